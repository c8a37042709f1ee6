"""Probes over dumps and branches."""
