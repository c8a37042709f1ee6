"""What a fork decides: outcome distributions of rollouts, importance, change points, outcome probes."""
