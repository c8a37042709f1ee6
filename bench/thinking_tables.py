"""The tables of Thinking States in docs/notes/thinking_states.md: what they train and test, and the tables as Markdown.

    python -m bench run thinking-parity-gpu --set models=FOLDER          # keeps the models
    python -m bench.thinking_tables FILE.json ... [--image NAME]     # later files replace cells

A case trains every model of its table, `at_once` side by side, and has one line per kind of model, over its seeds. Training
rows are packed with texts up to the width, so all methods are trained at all positions and distances of the test; only the
number of steps of a single text is new there. Test texts are not packed and start at position 0.
"""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from bench.harness import Line, case
from replaylens import tasks
from replaylens.commands.training import save
from replaylens.engine.model.config import ModelConfig
from replaylens.tasks import WordTokenizer
from replaylens.thinking.model import ThinkingConfig
from replaylens.training import embedded as zoo
from replaylens.training import thinking as thinking_train
from replaylens.training.recipe import RecipePart, backbone_folder, load_tokenizer
from replaylens.training.score import score
from replaylens.training.thinking import METHODS, Method, ThinkingRecipe
from replaylens.weights import loading

Row = dict[str, Any]


# What is trained and tested


@dataclass(frozen=True)
class Task:
    """The models of a table, up to method, N, seed, and what an ablation changes."""

    part: RecipePart
    thoughts: dict[int, int]
    """chunk size -> tokens of its longest thought, <EOS> included; the first is the table's, the others are of the ablation"""
    steps: int
    beyond: tuple[int, ...] = (20, 30, 40, 50, 60, 70, 80, 90, 100)
    """tested numbers of steps, where they exceed N"""
    inside: tuple[int, ...] = ()
    """tested numbers of steps up to N; empty: five, evenly spread"""
    longest: tuple[int, ...] = (10, 20, 40)
    """N: training texts have 1 to N steps"""
    d_model: int = 64
    width: int = 768
    batch: int = 8
    texts: int = 10240
    """training texts of a model, over all numbers of steps"""
    examples: int = 100
    """per tested number of steps"""
    cut: bool = False
    """train Thinking States with `ThinkingRecipe.cut`; not where the beginning of a text holds what every step needs"""
    options: dict[str, Any] = field(default_factory=lambda: {"lr": 1e-3})
    """further fields of the recipe"""
    published: dict[tuple[Method, int], float] = field(default_factory=dict)
    """percent on lengths beyond N up to 100, Qwen2.5-0.5B"""

    @property
    def vocabulary(self) -> tuple[str, ...]:
        return tasks.get(self.part.task).vocabulary()

    def lengths(self, n: int) -> list[int]:
        """Tested numbers of steps of a model that was trained on up to n."""
        inside = self.inside or tuple(max(1, n * k // 5) for k in range(1, 6))
        return sorted({*inside, *(length for length in self.beyond if length > n)})

    def config(self) -> ModelConfig:
        heads, vocab_size = self.d_model // 32, WordTokenizer(self.vocabulary).vocab_size
        return ModelConfig(4, self.d_model, heads, heads, 32, 3 * self.d_model, vocab_size, 1024, rotary_dim=32)

    def recipe(
        self, method: Method, n: int, seed: int = 0, *, chunk: int | None = None, read_layer: int | None = None,
        write_layer: int = 0, cut: bool | None = None, **others: Any,
    ) -> ThinkingRecipe:  # fmt: skip
        """Defaults are the task's; `others` are fields of the recipe."""
        others, chunk = {**self.options, **others}, chunk or next(iter(self.thoughts))
        steps, backbone = others.setdefault("steps", self.steps), others.get("backbone")
        config, words = (self.config(), WordTokenizer) if backbone is None else _pretrained(backbone)
        limits = dict(write_layer=write_layer, max_thought=self.thoughts[chunk])
        thinks = ThinkingConfig.for_backbone(config, chunk, words.eos_id, words.pad_id, **limits)
        return ThinkingRecipe(
            config=config, thinking=thinks if read_layer is None else replace(thinks, read_layer=read_layer), method=method,
            width=self.width, cut=method == "thinking" and (self.cut if cut is None else cut), parts=(self.part,), longest=n,
            batch=self.batch, seed=seed, warmup=min(100, steps // 10), pool=max(1, self.texts // n), **others,
        )  # fmt: skip


@lru_cache(1)
def _pretrained(backbone: str) -> tuple[ModelConfig, Any]:
    folder = backbone_folder(backbone)
    return loading.load(folder).config, load_tokenizer(folder)


PARITY = Task(
    RecipePart("coin", 1.0, (("rendering", "states"),)),  # The coin starts at state heads. Alice doesn't flip the coin. ...
    {6: 4},  # an operation has 5 or 6 words and signs, so every chunk between the first and the last decides one or two
    steps=4161,
    published={
        ("none", 10): 54.67, ("none", 20): 57.50, ("none", 40): 59.60,
        ("cot", 10): 12.35, ("cot", 20): 38.12, ("cot", 40): 64.38,
        ("thinking", 10): 98.37, ("thinking", 20): 99.02, ("thinking", 40): 100.0,
    },
)  # fmt: skip
VARIABLES = Task(
    RecipePart("variables", 1.0),  # Modulo 10: a = 3. b = 7. c = 1. a = a + b. ... The wording of the paper is unknown
    {4: 3},  # an operation has 4 or 6 words and signs: no chunk ends two, so each can continue from the state before it
    steps=6000, batch=4, cut=True,
    published={
        ("none", 10): 2.15, ("none", 20): 2.17, ("none", 40): 2.19,
        ("cot", 10): 6.78, ("cot", 20): 35.45, ("cot", 40): 87.75,
        ("thinking", 10): 33.76, ("thinking", 20): 87.23, ("thinking", 40): 97.71,
    },
)  # fmt: skip
AROUND = dict(lr=2e-4, precision="bf16", curriculum=0.0, completion_weight=20.0)
BACKBONE = replace(
    PARITY, thoughts={8: 8}, steps=514, width=832, texts=5120, examples=50, cut=True, options={**AROUND, "backbone": "smollm2"}
)
"""in the backbone's tokens an operation has 6 or 7, sometimes 8, so a chunk of 8 decides one or two"""
HOPS = Task(
    RecipePart("hops", 1.0), {4: 2, 2: 2, 8: 3, 16: 5}, steps=6000, inside=(1, 2, 3, 4), beyond=(6, 8, 12), longest=(4,),
    d_model=128, width=144, batch=21, texts=12288,
)  # fmt: skip
COUNTS = Task(
    RecipePart("counts", 1.0), {4: 7, 2: 7, 8: 13, 16: 25}, steps=3000, inside=(1, 2, 4, 6), beyond=(8, 12, 16, 24),
    longest=(6,), d_model=128, width=384, batch=8, texts=12288, cut=True,
)  # fmt: skip
PAPER = {"parity": PARITY, "variables": VARIABLES}
TEXTS = {"hops": HOPS, "counts": COUNTS}


SMOKE: Row = dict(inside=(1, 2), beyond=(4,), longest=(2,), d_model=32, width=160, batch=2, texts=24, examples=4, steps=4)
"""other fields of a task, for a smoke test on the CPU"""


@dataclass(frozen=True)
class Run:
    """One model to train and to test."""

    name: str
    kind: str
    """the name without the seed: runs of one kind are averaged"""
    task: Task
    recipe: ThinkingRecipe
    arm: Row
    """what the table says about it"""


def paper_runs(task: Task, methods: Sequence[Method] = METHODS, seeds: Sequence[int] = (0, 1, 2), **others: Any) -> list[Run]:
    """Every method with every N and seed."""
    found = []
    for seed, n, method in ((seed, n, method) for seed in seeds for n in task.longest for method in methods):
        recipe = task.recipe(method, n, seed, **others)
        kind = f"{method}{'-cut' * recipe.cut}-{n}"
        found.append(Run(f"{kind}-{seed}", kind, task, recipe, dict(method=method, N=n, seed=seed, cut=recipe.cut)))
    return found


CHANGES = ("chunk", "layers", "cut", "loss")
"""what the ablations change: chunk size, L_out and L_in, `cut`, and the weights of the loss"""


def text_runs(names: Sequence[str], seeds: Sequence[int], changes: Sequence[str] = CHANGES, **small: Any) -> list[Run]:
    """Three methods with every seed, and Thinking States with one thing changed. small: other fields of the tasks"""
    found = []
    for name in names:
        task = replace(TEXTS[name], **small)
        changed: dict[str, list[Row]] = dict(
            chunk=[{"chunk": chunk} for chunk in list(task.thoughts)[1:]],
            layers=[{"read_layer": 1}, {"read_layer": 3}, {"write_layer": 1}],
            cut=[{"cut": not task.cut}],
            loss=[{"completion_weight": 1.0}, {"completion_weight": 1.0, "thought_loss": "chunks"}],
        )
        arms: list[tuple[Method, int, Row]] = [(method, seed, {}) for seed in seeds for method in METHODS]
        arms += [("thinking", seeds[0], each) for change in changes for each in changed[change]]
        for method, seed, other in arms:
            kind = "-".join([name, method, *(f"{key}={value}" for key, value in other.items())])
            recipe = task.recipe(method, task.longest[0], seed, **other)
            told = dict(task=name, method=method, N=task.longest[0], seed=seed, **other)
            found.append(Run(kind + f"-seed={seed}" * bool(seed), kind, task, recipe, told))
    return found


# The cases


def trained(run: Run, device: str, models: str | None) -> Row:
    """Trains and tests one model: percent of right answers, and of texts with every thought right, by number of steps."""
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = run.recipe.backbone is None
    recipe, number, losses, begin = run.recipe, run.task.examples, list[float](), time.perf_counter()
    model = thinking_train.train(recipe, device, after_step=lambda done, loss: losses.append(loss))
    taken, lengths = time.perf_counter() - begin, run.task.lengths(recipe.longest)
    examples = [example for length in lengths for example in zoo.held_out(run.task.part, length, number)]
    scores = score(model.to(device), recipe.method, recipe.thinking, recipe.tokenizer(), examples, 256, recipe.precision)
    pieces = {length: scores[i * number :][:number] for i, length in enumerate(lengths)}
    percent = lambda what, piece: mean(100.0 * getattr(each, what) for each in piece)  # noqa: E731
    curve = {n: {what: percent(what, piece) for what in ("answered", "thought")} for n, piece in pieces.items()}
    if models is not None:
        save(model.cpu(), recipe, Path(models) / f"model-{run.name}")
    print(f"{run.name}: {taken:.0f} s, loss {losses[-1]:.3f}, {curve}", flush=True)
    weights, ends = sum(x.numel() for x in model.parameters()), mean(losses[-20:])
    told = dict(steps=len(losses), final_loss=ends, losses=losses[::50], weights=weights, train_seconds=taken)
    return dict(name=run.name, kind=run.kind, **run.arm, **told, recipe=json.loads(recipe.to_json()), curve=curve)


def lines_of(runs: Sequence[Run], at_once: int, device: str = "cuda", models: str | None = None) -> Iterator[Line]:
    """One line per kind: percent right up to N and beyond, of every seed and on average. A run that fails ends them."""
    with ProcessPoolExecutor(at_once, get_context("spawn")) as pool:
        found = {run.name: pool.submit(trained, run, device, models) for run in runs}
        for kind in dict.fromkeys(run.kind for run in runs):
            mine = [run for run in runs if run.kind == kind]
            group, arm = [found[run.name].result() for run in mine], mine[0].arm
            published = mine[0].task.published.get((arm["method"], arm["N"]))
            numbers: Row = dict(method=arm["method"], N=arm["N"], seeds=len(group), published=published)
            numbers["steps_taken"] = min(result["steps"] for result in group)
            for where, beyond in (("inside", False), ("beyond", True)):
                for what in ("answered", "thought"):
                    shares = [share(result, what, beyond) for result in group]
                    numbers |= {f"{where}_{what}": mean(shares), f"{where}_{what}_seeds": shares}
            yield Line(kind, numbers={**numbers, "runs": group})


def share(result: Row, kind: str, beyond: bool) -> float:
    """Mean percent over the tested numbers of steps up to N, or beyond."""
    return mean(found[kind] for steps, found in result["curve"].items() if (int(steps) > result["N"]) == beyond)


DECLARED: dict[str, Any] = dict(needs="gpu", clock="wall")
QUICK: Row = {"tiny": True, "seeds": (0,), "at_once": 1}


def paper_table_of(
    task: Task, tiny: bool, methods: Sequence[Method], seeds: Sequence[int], steps: int | None, at_once: int, models: str | None
) -> Iterator[Line]:
    task = replace(task, **(SMOKE if tiny else {"steps": steps or task.steps}))
    yield from lines_of(paper_runs(task, methods, seeds), at_once, "cpu" if tiny else "cuda", models)


@case("thinking-parity-gpu", **DECLARED, quick={**QUICK, "methods": ("none", "thinking")})
def parity(
    tiny: bool = False, methods: tuple[Any, ...] = METHODS, seeds: tuple[int, ...] = (0, 1, 2), steps: int | None = None,
    at_once: int = 14, cut: bool = False, models: str | None = None,
) -> Iterator[Line]:  # fmt: skip
    """The paper's parity table from scratch: trained on texts of up to N = 10, 20, 40 operations, tested on lengths up to
    100."""
    yield from paper_table_of(replace(PARITY, cut=cut), tiny, methods, seeds, steps, at_once, models)


@case("thinking-variables-gpu", **DECLARED, quick={**QUICK, "methods": ("none", "thinking")})
def variables(
    tiny: bool = False, methods: tuple[Any, ...] = METHODS, seeds: tuple[int, ...] = (0, 1, 2), steps: int | None = None,
    at_once: int = 14, models: str | None = None,
) -> Iterator[Line]:  # fmt: skip
    """The table of variables from scratch, Thinking States with `cut`."""
    yield from paper_table_of(VARIABLES, tiny, methods, seeds, steps, at_once, models)


@case("thinking-backbone", **DECLARED)
def backbone(
    methods: tuple[Any, ...] = METHODS, longest: tuple[int, ...] = (10, 20, 40), seeds: tuple[int, ...] = (0,),
    steps: int = 514, at_once: int = 2, cut: bool = True,
) -> Iterator[Line]:  # fmt: skip
    """The parity table around SmolLM2-135M: rows of 832 tokens, the length of the longest test with its chain of thought, in
    bfloat16 with float32 weights, Thinking States with `cut`."""
    yield from paper_table_of(replace(BACKBONE, longest=longest, cut=cut), False, methods, seeds, steps, at_once, None)


@case("thinking-texts-gpu", **DECLARED, quick={**QUICK, "tasks": ("hops",), "changes": ()})
def texts(
    tiny: bool = False, tasks: tuple[str, ...] = tuple(TEXTS), seeds: tuple[int, ...] = (0, 1),
    changes: tuple[str, ...] = CHANGES, at_once: int = 30, models: str | None = None,
) -> Iterator[Line]:  # fmt: skip
    """Two-hop questions and word problems: three methods with two seeds, and Thinking States with one thing changed."""
    runs = text_runs(tasks, seeds, changes, **(SMOKE if tiny else {}))
    yield from lines_of(runs, at_once, "cpu" if tiny else "cuda", models)


# Markdown

NAMES = {
    "none": "no chain of thought", "cot": "chain of thought", "thinking": "Thinking States",
    "thinking-cut": "Thinking States with `cut`",
}  # fmt: skip
COLOURS = dict(zip(NAMES, ("tab:gray", "tab:orange", "tab:cyan", "tab:blue"), strict=True))


def rows_of(file: Path) -> list[Row]:
    """The lines of a result file, also of one that was written before the harness. Thinking States with `cut`, which is not in
    the paper, is a method of its own; texts have it by task."""
    body = json.loads(file.read_text())
    rows: list[Row] = body.get("rows") or [
        {**row, "runs": [run for run in body["runs"] if (run["method"], run["N"]) == (row["method"], row["N"])]}
        for row in body["table"]
    ]
    whole = body.get("plan", {}).get("cut", False)
    is_cut = lambda row: "task" not in arm_of(row) and arm_of(row).get("cut", whole and row["method"] == "thinking")  # noqa: E731
    return [{**row, "method": "thinking-cut"} if is_cut(row) else row for row in rows]


def arm_of(row: Row) -> Row:
    """What the first run says about itself; files that were written before the harness hold it apart."""
    first: Row = row["runs"][0]
    found: Row = first.get("arm", first)
    return found


def merged(files: Sequence[Path]) -> list[Row]:
    """Each cell (method, N) from the last file that has it, in the order of the docs."""
    cells = {(row["method"], row["N"]): row for file in files for row in rows_of(file)}
    return [cells[cell] for cell in sorted(cells, key=lambda cell: (list(NAMES).index(cell[0]), cell[1]))]


def table_of(head: str, marks: str, rows: Sequence[Sequence[str]]) -> list[str]:
    """A table in Markdown."""
    return [f"|{head} |", f"|{marks}|", *(f"| {' | '.join(row)} |" for row in rows)]


def seeds_of(shares: Sequence[float]) -> str:
    return f"**{mean(shares):.1f}** ({', '.join(f'{each:.1f}' for each in shares)})" if len(shares) > 1 else f"{shares[0]:.1f}"


def by_length(row: Row) -> dict[int, list[float]]:
    """Percent right of every seed, by length."""
    lengths = sorted({int(length) for run in row["runs"] for length in run["curve"]})
    return {n: [run["curve"][str(n)]["answered"] for run in row["runs"] if str(n) in run["curve"]] for n in lengths}


def paper_table(rows: Sequence[Row]) -> list[str]:
    """Mean over seeds, each seed in brackets, beside the published number; then the mean by length."""
    first, second = [], []
    for row in rows:
        columns = (("answered", False), ("answered", True), ("thought", True))
        inside, beyond, thoughts = (seeds_of([share(run, *column) for run in row["runs"]]) for column in columns)
        published = "" if row["published"] is None else f"{row['published']:.2f}"  # the paper has three N
        name, found = [NAMES[row["method"]], str(row["N"])], by_length(row)
        first.append([*name, inside, beyond, published, "" if row["method"] == "none" else thoughts])
        second.append([*name, *(f"{mean(found[n]):.0f}" if n in found else "" for n in PARITY.beyond)])
    head, lengths = " | N | up to N | beyond, up to 100 | published | thoughts all right, beyond", map(str, PARITY.beyond)
    means = table_of(f" | N | {' | '.join(lengths)}", "---|---:" + "|---:" * len(PARITY.beyond), second)
    return [*table_of(head, "---|---:|---|---|---:|---", first), "", *means]


def text_tables(rows: Sequence[Row]) -> list[str]:
    """One table per task: the methods and what was changed, by number of steps."""
    lines: list[str] = []
    for task in dict.fromkeys(arm_of(row)["task"] for row in rows):
        group, told = [row for row in rows if arm_of(row)["task"] == task], []
        for row in group:
            method, changed = arm_of(row)["method"], row["what"].split("-", 2)[2:]
            name = ", ".join([NAMES[method], *(part.replace("=", " ") for text in changed for part in text.split("-"))])
            cells = [seeds_of(row[f"{where}_seeds"]) for where in ("inside_answered", "beyond_answered", "beyond_thought")]
            cells[2] = "" if method == "none" else cells[2]
            told.append([name, *cells, *(f"{mean(each):.0f}" for each in by_length(row).values())])
        lengths, steps = list(map(str, by_length(group[0]))), [row["steps_taken"] for row in group]
        head = [f" {task}, N = {group[0]['N']}", "up to N", "beyond", "thoughts all right, beyond", *lengths]
        lines += table_of(" | ".join(head), "|".join(["---"] * 4 + ["---:"] * len(lengths)), told)
        lines += ["", f"Steps: {min(steps)} to {max(steps)}.", ""]
    return lines


def draw(rows: Sequence[Row], path: Path) -> None:
    """PATH-light.png and PATH-dark.png."""
    from matplotlib import style

    for theme, (name, page) in {"light": ("default", "#ffffff"), "dark": ("dark_background", "#14171a")}.items():
        with style.context(name):
            _panels(rows).savefig(path.with_name(f"{path.name}-{theme}.png"), dpi=110, facecolor=page)


def _panels(rows: Sequence[Row]) -> Any:
    """One panel per N: the mean of the seeds as a line, every seed as a dot."""
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    longest = sorted({row["N"] for row in rows})
    figure = Figure(figsize=(3.4 * len(longest), 3.0), layout="constrained")
    for panel, n in zip(figure.subplots(1, len(longest), sharey=True, squeeze=False)[0], longest, strict=True):
        for row in [row for row in rows if row["N"] == n]:
            found, method = by_length(row), row["method"]
            means, dots = [mean(each) for each in found.values()], [(n, each) for n, own in found.items() for each in own]
            panel.plot(list(found), means, color=COLOURS[method], label=NAMES[method].replace("`", ""))
            panel.scatter(*zip(*dots, strict=True), color=COLOURS[method], s=6, alpha=0.5)
        panel.axvline(n, color=rcParams["text.color"], linewidth=0.6, linestyle=":")
        panel.set(title=f"trained on up to {n}", xlabel="operations", ylim=(0, 103))
    figure.axes[0].set_ylabel("right answers, %")
    figure.axes[0].legend(fontsize=7)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--image", type=Path, help="also draw accuracy by length")
    given = parser.parse_args()
    found = [row for file in given.files for row in rows_of(file)]
    of_texts = "task" in arm_of(found[0])
    print("\n".join(text_tables(found) if of_texts else paper_table(merged(given.files))))
    if given.image is not None and not of_texts:
        draw(merged(given.files), given.image)


if __name__ == "__main__":
    main()
