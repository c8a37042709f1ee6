"""Activation dumps: plan, write, read, verify, compare."""
