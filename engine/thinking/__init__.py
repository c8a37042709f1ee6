"""Models that think (Thinking States): states, thoughts, and prefill with guess, verification and rollback."""
