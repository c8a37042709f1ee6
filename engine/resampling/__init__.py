"""Resampling: rollouts from fork positions and the counts of their outcomes."""
