"""Grids of probes over sites, layers and positions."""
