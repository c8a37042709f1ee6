"""Engines of `coin-plain` that record a trace."""

from replaylens.engine.engine import Engine

PROMPT = "A coin's state is heads. Alice flips,"


def fresh() -> Engine:
    return Engine.load("coin-plain", record=True)
