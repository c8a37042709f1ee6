"""The workbench: lens, patch, ablate, steer and attention, one call each, on any text."""
