"""Training of the embedded models, and of Thinking-States models."""
