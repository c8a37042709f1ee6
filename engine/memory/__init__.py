"""State that outlives a pass: the tree of branches, KV pages, shared prefixes."""
