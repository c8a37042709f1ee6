"""Bridges to other tools: evaluation frameworks and file formats. Nothing else in the package needs them."""
