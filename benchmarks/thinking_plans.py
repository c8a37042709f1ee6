"""What the tables of Thinking States train and test: tasks, models, recipes, the runs of a table.

Positions: every training row is packed with texts up to the width, so all methods are trained at all positions and distances of
the test; only the number of steps of a single text is new there. Test texts are not packed and start at position 0. Packed rows
also give every step of a run the same shapes.
"""

from dataclasses import dataclass, field, replace
from functools import lru_cache

from replaylens import tasks
from replaylens.engine.model import loading
from replaylens.engine.model.config import ModelConfig
from replaylens.engine.thinking.model import ThinkingConfig
from replaylens.engine.training.recipe import Part, backbone_folder, load_tokenizer
from replaylens.engine.training.thinking import METHODS, Method, ThinkingRecipe, ThoughtLoss
from replaylens.tasks import WordTokenizer

Cell = tuple[Method, int]
"""a method, and the maximum number of operations of its training texts"""


@dataclass(frozen=True)
class Run:
    """One model to train and to test."""

    name: str
    kind: str
    """the name without the seed: runs of one kind are averaged"""
    recipe: ThinkingRecipe
    lengths: tuple[int, ...]
    """tested numbers of steps"""
    examples: int
    """per tested number of steps"""
    published: float | None = None
    keep: bool = False
    """save the model"""
    arm: dict[str, object] = field(default_factory=dict)
    """what the table says about it"""


# Parity and variables


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


@dataclass(frozen=True)
class Plan:
    """A table of the paper: methods, N, seeds, and the size of the models."""

    task: str = "parity"
    methods: tuple[Method, ...] = METHODS
    longest: tuple[int, ...] = (10, 20, 40)
    """N: maximum number of operations of a training text"""
    seeds: tuple[int, ...] = (0, 1, 2)
    d_model: int = 64
    width: int = 768
    batch: int = 8
    texts: int = 10240
    """training texts of a run, over all lengths"""
    steps: int = 8000
    """at most; fewer if time is short"""
    examples: int = 100
    """per tested length"""
    beyond: tuple[int, ...] = (20, 30, 40, 50, 60, 70, 80, 90, 100)
    """tested numbers of operations; those above N count as beyond"""
    cut: bool = False
    """train Thinking States with `ThinkingRecipe.cut`"""
    backbone: str | None = None
    """smollm2, or a model folder; None: from scratch"""

    def runs(self) -> list[Run]:
        return [self.run(method, n, seed) for seed in self.seeds for n in self.longest for method in self.methods]

    def run(self, method: Method, n: int, seed: int) -> Run:
        made = self.recipe if self.backbone is None else self.recipe_around
        keep = self.backbone is None and (method == "thinking" or (seed, n) in {(self.seeds[0], m) for m in self.longest[::2]})
        kind = f"{method}{'-cut' * (self.cut and method == 'thinking')}-{n}"
        published = TASKS[self.task].published.get((method, n))
        arm = {"method": method, "N": n, "seed": seed, "cut": self.cut and method == "thinking"}
        return Run(
            f"{kind}-{seed}", kind, made(method, n, seed), tuple(self.lengths(n)), self.examples, published, keep, dict(arm)
        )

    def lengths(self, n: int) -> list[int]:
        """Tested lengths of a run: five up to N, then those beyond."""
        return sorted({max(1, n * k // 5) for k in range(1, 6)} | {length for length in self.beyond if length > n})

    def recipe(self, method: Method, n: int, seed: int) -> ThinkingRecipe:
        task, heads = TASKS[self.task], self.d_model // 32
        config = ModelConfig(
            num_layers=4, d_model=self.d_model, num_heads=heads, num_kv_heads=heads, d_head=32, d_mlp=3 * self.d_model,
            vocab_size=task.vocab_size, max_positions=1024, rotary_dim=32,
        )  # fmt: skip
        words = WordTokenizer
        thinks = ThinkingConfig.for_backbone(config, task.chunk, words.eos_id, words.pad_id, max_thought=task.max_thought)
        return ThinkingRecipe(
            config=config, thinking=thinks, method=method, width=self.width, cut=self.cut and method == "thinking",
            parts=(task.part,), longest=n, steps=self.steps, batch=self.batch, lr=1e-3, seed=seed,
            warmup=min(100, self.steps // 10), pool=max(1, self.texts // n),
        )  # fmt: skip

    def recipe_around(self, method: Method, n: int, seed: int) -> ThinkingRecipe:
        """Around the backbone, in its tokens: an operation has 6 or 7, sometimes 8, so a chunk of 8 decides one or two."""
        assert self.backbone is not None
        config, tokenizer = _config(self.backbone), load_tokenizer(backbone_folder(self.backbone))
        thinks = ThinkingConfig.for_backbone(config, 8, tokenizer.eos_id, tokenizer.pad_id, max_thought=8)
        return ThinkingRecipe(
            config=config, thinking=thinks, backbone=self.backbone, precision="bf16", method=method, width=self.width,
            cut=self.cut and method == "thinking", parts=(TASKS[self.task].part,), longest=n, steps=self.steps,
            batch=self.batch, lr=2e-4, seed=seed, warmup=min(100, self.steps // 10), curriculum=0.0, completion_weight=20.0,
            pool=max(1, self.texts // n),
        )  # fmt: skip


@lru_cache(1)
def _config(backbone: str) -> ModelConfig:
    return loading.load(backbone_folder(backbone)).config


TINY_PLAN = Plan(
    longest=(2, 3), seeds=(0,), d_model=32, width=96, batch=2, texts=24, steps=30, examples=4, beyond=(4, 6)
)  # fmt: skip
"""a few steps of small models, as a smoke test"""


# Two tasks of generated text: three methods, and ablations


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
    TableTask(Part("hops", 1.0), chunk=4, max_thought=2, published={}), longest=4, tested=(1, 2, 3, 4, 6, 8, 12),
    chunks=(2, 8, 16), steps=6000, width=144, words=1, apart=4, cut=False,
)  # fmt: skip
COUNTS = TextTask(
    TableTask(Part("counts", 1.0), chunk=4, max_thought=7, published={}), longest=6, tested=(1, 2, 4, 6, 8, 12, 16, 24),
    chunks=(2, 8, 16), steps=3000, width=384, words=6, apart=4, cut=True,
)  # fmt: skip
TEXT_TASKS = {"hops": HOPS, "counts": COUNTS}


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
    examples: int = 100
    """per tested number of steps"""

    def run(self, arm: Arm) -> Run:
        told = {**vars(arm), "N": TEXT_TASKS[arm.task].longest}
        keep = arm.name in (f"{arm.task}-thinking", f"{arm.task}-cot")
        return Run(arm.name, arm.kind, self.recipe(arm), TEXT_TASKS[arm.task].tested, self.examples, keep=keep, arm=told)

    def recipe(self, arm: Arm) -> ThinkingRecipe:
        task, heads = TEXT_TASKS[arm.task], self.d_model // 32
        steps = self.steps or task.steps
        config = ModelConfig(
            num_layers=self.layers, d_model=self.d_model, num_heads=heads, num_kv_heads=heads, d_head=32,
            d_mlp=3 * self.d_model, vocab_size=task.table.vocab_size, max_positions=1024, rotary_dim=32,
        )  # fmt: skip
        chunk = arm.chunk or task.table.chunk
        limits = dict(write_layer=arm.write_layer, max_thought=task.max_thought(chunk))
        thinks = ThinkingConfig.for_backbone(config, chunk, WordTokenizer.eos_id, WordTokenizer.pad_id, **limits)
        return ThinkingRecipe(
            config=config, thinking=thinks if arm.read_layer is None else replace(thinks, read_layer=arm.read_layer),
            method=arm.method, width=task.width, cut=arm.method == "thinking" and (task.cut if arm.cut is None else arm.cut),
            parts=(task.table.part,), longest=task.longest, steps=steps, batch=self.tokens // task.width, lr=self.lr,
            seed=arm.seed, warmup=min(100, steps // 10), completion_weight=arm.completion_weight,
            thought_loss=arm.thought_loss, pool=max(1, self.texts // task.longest),
        )  # fmt: skip


TINY_SIZE = Size(d_model=32, tokens=768, texts=24, steps=6, examples=3)
"""a smoke test"""


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
