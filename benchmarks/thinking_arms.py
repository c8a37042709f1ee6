"""`Arm`: one model of `benchmarks.thinking_texts`. The arms: three methods on two tasks of generated text, and ablations.

Every training row is packed with texts up to the width, so all arms are trained at all positions and distances of the test;
only the number of steps of a single text is new there.
"""

from dataclasses import dataclass, replace

from benchmarks.thinking_tasks import TableTask
from replaylens import tasks
from replaylens.engine.model.config import ModelConfig
from replaylens.engine.thinking.model import ThinkingConfig
from replaylens.engine.training.recipe import Part
from replaylens.engine.training.thinking import METHODS, Method, ThinkingRecipe, ThoughtLoss
from replaylens.tasks import WordTokenizer


@dataclass(frozen=True)
class TextTask:
    """A task of generated text: what is trained and tested, and the chunking of its texts."""

    table: TableTask
    longest: int
    """N: training texts have 1 to N steps"""
    tested: tuple[int, ...]
    """tested numbers of steps; those above N count as beyond"""
    chunks: tuple[int, ...]
    """chunk sizes of the ablation"""
    steps: int
    """training steps of every arm"""
    width: int
    """tokens per training row: the longest tested text must fit, and the fewer texts share a row, the less they disturb"""
    words: int
    """tokens of one step's thought, without <EOS>"""
    apart: int
    """least distance in tokens between the ends of two steps"""
    cut: bool
    """train Thinking States with `ThinkingRecipe.cut`; not where the beginning of a text holds what every step needs"""

    @property
    def vocabulary(self) -> tuple[str, ...]:
        """The words of the task, as a tokenizer takes them."""
        return tasks.get(self.table.part.task).vocabulary()

    def max_thought(self, chunk: int) -> int:
        """Tokens of the longest thought of a chunk, <EOS> included."""
        return 1 + self.words * ((chunk - 1) // self.apart + 1)


HOPS = TextTask(
    TableTask(
        Part("hops", 1.0), chunk=4, max_thought=2, published={}
    ),  # the paper says only that it matches a chain of thought
    longest=4,
    tested=(1, 2, 3, 4, 6, 8, 12),
    chunks=(2, 8, 16),
    steps=6000,
    width=144,
    words=1,
    apart=4,
    cut=False,
)
COUNTS = TextTask(
    TableTask(Part("counts", 1.0), chunk=4, max_thought=7, published={}),
    longest=6,
    tested=(1, 2, 4, 6, 8, 12, 16, 24),
    chunks=(2, 8, 16),
    steps=3000,
    width=384,
    words=6,
    apart=4,
    cut=True,
)
TEXT_TASKS = {"hops": HOPS, "counts": COUNTS}
PUBLISHED: dict[str, dict[str, str | float]] = {
    "hops": {"2-hop QA": "matches a chain of thought"},
    "counts": {"GSM8K, none": 34.11, "GSM8K, cot": 60.50, "GSM8K, thinking": 42.22, "best chunk on GSM8K": 8},
}
"""the paper's numbers for its own tasks of these kinds, Qwen2.5-0.5B"""


@dataclass(frozen=True)
class Arm:
    """One model: a task, a method and a seed, and what differs from the defaults. A plain record, stored with the results."""

    task: str
    method: Method = "thinking"
    seed: int = 0
    chunk: int | None = None
    """None: the task's"""
    read_layer: int | None = None
    """L_out; None: the second to last block"""
    write_layer: int = 0
    """L_in"""
    cut: bool | None = None
    """None: the task's"""
    completion_weight: float = 10.0
    thought_loss: ThoughtLoss = "tokens"

    @property
    def name(self) -> str:
        """What differs from the default arm, in words; it names the arm's files."""
        base = Arm(self.task, self.method)
        other = [f"{key}={value}" for key, value in vars(self).items() if value != getattr(base, key)]
        return "-".join([self.task, self.method, *other])

    @property
    def kind(self) -> str:
        """The name without the seed: arms of one kind are averaged."""
        return replace(self, seed=0).name


@dataclass(frozen=True)
class Size:
    """The size of the models and of the job. A plain record, stored with the results."""

    layers: int = 4
    d_model: int = 128
    tokens: int = 3072
    """of a training step"""
    texts: int = 12288
    """training texts of an arm, over all numbers of steps"""
    steps: int | None = None
    """of every arm; None: the task's"""
    lr: float = 1e-3
    longest: int | None = None
    """N, where it is less than the task's"""
    examples: int = 100
    """per tested number of steps"""
    tested_together: int = 256

    def task(self, name: str) -> TextTask:
        """The task, with this N: up to twice as many steps are tested, and rows are shorter accordingly."""
        task = TEXT_TASKS[name]
        if self.longest is None:
            return task
        tested = tuple(steps for steps in range(1, 2 * self.longest + 1) if steps <= self.longest or steps % 2 == 0)
        return replace(task, longest=self.longest, tested=tested, width=task.width // 2)

    def recipe(self, arm: Arm) -> ThinkingRecipe:
        task, heads = self.task(arm.task), self.d_model // 32
        steps = self.steps or task.steps
        config = ModelConfig(
            num_layers=self.layers, d_model=self.d_model, num_heads=heads, num_kv_heads=heads, d_head=32,
            d_mlp=3 * self.d_model, vocab_size=task.table.vocab_size, max_positions=1024, rotary_dim=32,
        )  # fmt: skip
        chunk = arm.chunk or task.table.chunk
        thinks = ThinkingConfig.for_backbone(
            config,
            chunk,
            WordTokenizer.eos_id,
            WordTokenizer.pad_id,
            write_layer=arm.write_layer,
            max_thought=task.max_thought(chunk),
        )
        return ThinkingRecipe(
            config=config,
            thinking=thinks if arm.read_layer is None else replace(thinks, read_layer=arm.read_layer),
            method=arm.method,
            width=task.width,
            cut=arm.method == "thinking" and (task.cut if arm.cut is None else arm.cut),
            parts=(task.table.part,),
            longest=task.longest,
            steps=steps,
            batch=self.tokens // task.width,
            lr=self.lr,
            seed=arm.seed,
            warmup=min(100, steps // 10),
            completion_weight=arm.completion_weight,
            thought_loss=arm.thought_loss,
            pool=max(1, self.texts // task.longest),
        )


TINY = Size(d_model=32, tokens=768, texts=24, steps=6, examples=3)
"""a smoke test"""
SMALL = Size(layers=3, d_model=64, tokens=1536, texts=6144, steps=1500, lr=2e-3, longest=3)
"""for one core, and one task: a step of Thinking States takes about 0.3 s"""


def methods(names: tuple[str, ...], seeds: tuple[int, ...]) -> list[Arm]:
    """Three methods with every seed."""
    return [Arm(task, method, seed) for seed in seeds for task in names for method in METHODS]


CHANGES = ("chunk", "layers", "cut", "loss")
"""what the ablations change: chunk size, L_out and L_in, `cut`, and the weights of the loss"""


def ablations(names: tuple[str, ...], changes: tuple[str, ...], layers: int, seeds: tuple[int, ...]) -> list[Arm]:
    """Thinking States, and with one thing changed."""
    found: list[Arm] = []
    for task in names:
        base = Arm(task)
        changed = dict(
            chunk=[replace(base, chunk=chunk) for chunk in TEXT_TASKS[task].chunks],
            layers=[
                *[replace(base, read_layer=layer) for layer in range(1, layers) if layer != layers - 2],
                replace(base, write_layer=1),
            ],
            cut=[replace(base, cut=not TEXT_TASKS[task].cut)],
            loss=[replace(base, completion_weight=1.0), replace(base, completion_weight=1.0, thought_loss="chunks")],
        )
        found += [base, *[arm for change in changes for arm in changed[change]]]
    return [replace(arm, seed=seed) for seed in seeds for arm in found]
