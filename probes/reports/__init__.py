"""Reports, their figures and their summary."""
