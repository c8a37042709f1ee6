"""Canonical arithmetic and passes over packed rows, on CPU and CUDA."""
