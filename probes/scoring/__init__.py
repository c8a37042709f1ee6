"""Scores of predictions, their intervals and tests."""
