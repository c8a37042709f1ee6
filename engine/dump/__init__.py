"""Activation dumps: planned, written, read, verified."""
