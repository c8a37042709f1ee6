"""Branches, requests and streams: the handles that callers hold, served by the loop."""
