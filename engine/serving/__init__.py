"""Branches and requests, served by the loop."""
