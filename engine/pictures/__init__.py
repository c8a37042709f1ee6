"""Trees, timelines and boards, drawn from data."""
