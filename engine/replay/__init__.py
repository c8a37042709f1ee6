"""Replaying task examples and traces; TransformerLens' verbs."""
