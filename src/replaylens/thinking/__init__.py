"""Thinking-States models: states, thoughts, and prefill with guess, verification and rollback."""
