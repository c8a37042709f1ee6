"""Gradients of a scalar of the logits at the sites of one path."""
