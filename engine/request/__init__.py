"""What is asked for: sampling, edits, capture."""
