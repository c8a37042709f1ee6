"""Replays task examples and traces, and provides TransformerLens' `run_with_cache`."""
