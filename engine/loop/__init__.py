"""The heart: admit, draft, verify, roll back, commit."""
