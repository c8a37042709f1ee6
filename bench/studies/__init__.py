"""Studies: questions answered with the public API, each one command, one JSON file, one figure and one page."""
