"""Tests of use: directions that are moved, removed or exchanged."""
