"""Fits with held-out predictions."""
