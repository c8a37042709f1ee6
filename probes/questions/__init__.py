"""Questions about branches, each a function that returns a report; see docs/probes.md for the recipes."""
