"""Linear probes and what else is fitted to rows."""
