"""`python -m replaylens` is the `replaylens` command."""

from replaylens.cli import main

main()
