"""The embedded models."""
