"""The decoder: configuration, families, weights, sites, text."""
