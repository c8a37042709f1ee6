"""Rows: where they come from, their labels and positions, and which of them are independent."""
