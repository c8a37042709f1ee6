"""Models that think: states, thoughts, replay with rollback."""
