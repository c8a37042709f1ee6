"""Canonical arithmetic and the passes over packed rows, on a CPU and on CUDA."""
