"""`TableTask`: a task of the paper's tables, the chunking of its texts, and the published numbers."""

from dataclasses import dataclass

from replaylens import tasks
from replaylens.engine.training.recipe import Part
from replaylens.engine.training.thinking import Method
from replaylens.tasks import WordTokenizer

Cell = tuple[Method, int]
"""a method, and the maximum number of operations of its training texts"""


@dataclass(frozen=True)
class TableTask:
    """The parts of a table, except the size of the models."""

    part: Part
    chunk: int
    max_thought: int
    """<EOS> included"""
    published: dict[Cell, float]
    """percent on lengths beyond N up to 100, Qwen2.5-0.5B"""

    @property
    def vocab_size(self) -> int:
        return WordTokenizer(tasks.get(self.part.task).vocabulary()).vocab_size


PARITY = TableTask(
    Part("coin", 1.0, (("rendering", "states"),)),  # The coin starts at state heads. Alice doesn't flip the coin. ...
    chunk=6,  # an operation has 5 or 6 words and signs, so every chunk between the first and the last decides one or two
    max_thought=4,
    published={
        ("none", 10): 54.67, ("none", 20): 57.50, ("none", 40): 59.60,
        ("cot", 10): 12.35, ("cot", 20): 38.12, ("cot", 40): 64.38,
        ("thinking", 10): 98.37, ("thinking", 20): 99.02, ("thinking", 40): 100.0,
    },
)  # fmt: skip
VARIABLES = TableTask(
    Part("variables", 1.0),  # Modulo 10: a = 3. b = 7. c = 1. a = a + b. ... The wording of the paper is unknown
    chunk=4,  # an operation has 4 or 6 words and signs: no chunk ends two, so each can continue from the state before it
    max_thought=3,
    published={
        ("none", 10): 2.15, ("none", 20): 2.17, ("none", 40): 2.19,
        ("cot", 10): 6.78, ("cot", 20): 35.45, ("cot", 40): 87.75,
        ("thinking", 10): 33.76, ("thinking", 20): 87.23, ("thinking", 40): 97.71,
    },
)  # fmt: skip
TASKS = {"parity": PARITY, "variables": VARIABLES}
