"""The deterministic, branching inference engine."""
