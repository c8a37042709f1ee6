"""The logit lens (Z), plain and tuned."""
