"""`Plan`: the size of the job of `benchmarks.thinking_gpu`: task, methods, lengths, seeds, model, time.

Positions: every training row is packed with texts up to 768 tokens, so all methods are trained at all positions and distances
of the test; only the length of a single text is new in the test. Test texts are not packed and start at position 0. Packed
rows also give every step of a run the same shapes.
"""

from dataclasses import dataclass
from typing import Any

from benchmarks.thinking_tasks import TASKS, TableTask
from replaylens.engine.model.config import ModelConfig
from replaylens.engine.thinking.model import ThinkingConfig
from replaylens.engine.training.thinking import METHODS, Method, ThinkingRecipe
from replaylens.tasks import WordTokenizer

Run = tuple[Method, int, int]
"""method, N, seed"""


@dataclass(frozen=True)
class Plan:
    """The size of the job. A plain record, stored with the results."""

    seconds: float
    """after this the job ends, finished or not"""
    device: str
    task: str = "parity"
    methods: tuple[Method, ...] = METHODS
    longest: tuple[int, ...] = (10, 20, 40)
    seeds: tuple[int, ...] = (0, 1, 2)
    d_model: int = 64
    width: int = 768
    batch: int = 8
    texts: int = 10240
    """training texts of a run, over all lengths"""
    most_steps: int = 8000
    steps: int | None = None
    """of every run; None: as many as all of them can reach in the given time"""
    at_once: int | None = None
    """parallel runs; None: all"""
    examples: int = 100
    """per tested length"""
    tested_together: int = 256
    """texts of a batch in the test"""
    beyond: tuple[int, ...] = (20, 30, 40, 50, 60, 70, 80, 90, 100)
    cut: bool = False
    """train Thinking States with `ThinkingRecipe.cut`"""
    embedded: bool = True
    """train the embedded model, too"""
    embedded_steps: int = 3000
    embedded_pool: int = 4096

    @property
    def table_task(self) -> TableTask:
        return TASKS[self.task]

    @property
    def train_until(self) -> float:
        """Seconds after which training stops; the rest is for testing. If runs take turns, most are tested by then."""
        return (0.75 if self.at_once is None else 0.9) * self.seconds

    @property
    def result_file(self) -> str:
        """Name of the table's file."""
        return f"thinking-{self.task}-{'gpu' if self.device == 'cuda' else 'cpu'}.json"

    def runs(self) -> list[Run]:
        return [(method, n, seed) for seed in self.seeds for n in self.longest for method in self.methods]

    def lengths(self, n: int) -> list[int]:
        """Tested lengths of a run: five up to N, then those beyond."""
        return sorted({max(1, n * k // 5) for k in range(1, 6)} | {length for length in self.beyond if length > n})

    def recipe(self, method: Method, n: int, seed: int) -> ThinkingRecipe:
        task, heads = self.table_task, self.d_model // 32
        config = ModelConfig(
            num_layers=4, d_model=self.d_model, num_heads=heads, num_kv_heads=heads, d_head=32, d_mlp=3 * self.d_model,
            vocab_size=task.vocab_size, max_positions=1024, rotary_dim=32,
        )  # fmt: skip
        words = WordTokenizer
        return ThinkingRecipe(
            config=config,
            thinking=ThinkingConfig.for_backbone(config, task.chunk, words.eos_id, words.pad_id, max_thought=task.max_thought),
            method=method,
            width=self.width,
            cut=self.cut and method == "thinking",
            parts=(task.part,),
            longest=n,
            steps=self.most_steps,
            batch=self.batch,
            lr=1e-3,
            seed=seed,
            warmup=min(100, self.most_steps // 10),
            pool=max(1, self.texts // n),
        )


TINY: dict[str, Any] = dict(
    longest=(2, 3),
    seeds=(0,),
    d_model=32,
    width=96,
    batch=2,
    texts=24,
    most_steps=30,
    examples=4,
    beyond=(4, 6),
    embedded_steps=8,
    embedded_pool=8,
)
"""a few steps of small models, as a smoke test"""
