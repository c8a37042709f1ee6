"""Sparse autoencoders and transcoders: features of captured rows, and edits of them."""
