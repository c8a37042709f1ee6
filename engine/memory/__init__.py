"""What is kept: the tree of branches, KV pages, shared prefixes, captured rows."""
