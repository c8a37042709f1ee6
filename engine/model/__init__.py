"""The decoder: config, families, weights, sites and tokenizer."""
