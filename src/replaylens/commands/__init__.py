"""One file per group of shell commands; `replaylens.cli` assembles them."""
