"""Z: the logit lens, plain and tuned."""
