"""Resampling: which rollouts are drawn, from which seeds, how their answers are read, and what is kept of them."""
