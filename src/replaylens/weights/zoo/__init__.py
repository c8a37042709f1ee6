"""The embedded models by name: their checkpoints, ready to load. Their recipes are in `src/replaylens/training`."""

from pathlib import Path

CHECKPOINTS = Path(__file__).parent / "checkpoints"
TOKENIZER_FILE = "tokenizer.json"
PLAIN = ("coin-plain", "coin-draft")
THINKING = ("coin-thinking",)
"""those that are Thinking-States models"""
