"""Results of small, hand-made tables: what is written down here was worked out without the code that it tests."""

import math
import os
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import replaylens as rl
from replaylens.commands import probe as command
from replaylens.commands.training import Changes, changed_thinking
from replaylens.dumps import feed as feeds
from replaylens.dumps.reader import Dump
from replaylens.dumps.store import Store
from replaylens.dumps.verify import verify
from replaylens.engine.errors import ModelMismatch
from replaylens.engine.passes.lens import LensSpec, statistics
from replaylens.engine.proof import certificates
from replaylens.extras.graph import Graph, Node
from replaylens.gradients.attribution import Attribution
from replaylens.kernels import definition
from replaylens.probes.estimators import SparseProbe
from replaylens.probes.forks.outcome_probe import GAIN, LOSS, _say
from replaylens.probes.report import summarise
from replaylens.probes.verdicts import verdict_of
from replaylens.thinking.thoughts import Thought
from replaylens.training import embedded_thinking as thinking_zoo
from replaylens.training.thinking import METHODS
from replaylens.weights import check, gguf
from tests.extras.stand_ins import installed

coins = rl.tasks.get("coin")


# ---- dumps ----------------------------------------------------------------------------------------------------------------

TABLE = """
is      prompt    -      -  -
heads   prompt    heads  0  0
.       prompt    heads  0  0
Alice   prompt    heads  0  0
flips   prompt    tails  1  1
.       prompt    tails  1  1
What's  prompt    tails  1  1
the     prompt    tails  1  1
state   prompt    tails  1  1
?       prompt    tails  1  1
A       prompt    tails  1  1
:       prompt    tails  1  1
tails   accepted  tails  1  1
.       accepted  tails  1  1
"""
"""text, state of the token, face, number of flips and of actions, from the fourth token on: a face is known once it is named,
and an action counts with its verb"""


@pytest.fixture(scope="module")
def engine() -> rl.Engine:
    return rl.Engine.load("coin-plain")


def test_the_rows_of_a_dump(engine: rl.Engine, tmp_path: Path) -> None:
    lines = [line.split() for line in TABLE.strip().splitlines()]
    task, begins = coins(flips=(1, 1), p=1.0), "A coin's state is heads. Alice"
    example = next(each for i in range(400) if (each := task.example(i)).prompt.startswith(begins))
    frame = engine.replay([example], sites="S", drafter="model").save(tmp_path / "d").index
    assert (frame["example"] == example.index).all() and frame["branch"].eq(0).all() and frame["accepted"].all()
    assert frame["position"].tolist() == list(range(len(lines) + 4)) and frame["correct"].all() and frame["parent"].isna().all()
    assert frame["text"].iloc[:3].str.strip().tolist() == ["A", "coin's", "state"] and frame["face"].iloc[:4].isna().all()
    known = frame.iloc[3:-1]
    assert known["text"].str.strip().tolist() == [line[0] for line in lines]
    assert known["token_state"].tolist() == [line[1] for line in lines]
    assert known["face"].fillna("-").tolist() == [line[2] for line in lines]
    for at, name in ((3, "flips"), (4, "actions")):
        assert [str(each).replace("<NA>", "-") for each in known[name]] == [line[at] for line in lines]
    assert frame["token"].iloc[-1] == engine.text.eos_id, "the last token ends the text"


@pytest.mark.parametrize("window", [2, 4])
def test_the_window_of_a_dump_bounds_what_is_rejected(engine: rl.Engine, tmp_path: Path, window: int) -> None:
    """A verification has the last token and `window - 1` drafts: no rejected branch is longer, and some are as long."""
    task = coins(flips=(2, 4), rendering="steps", seed=2)
    dump = engine.replay(task.examples(3), sites="S", drafter="ngram", window=window).save(tmp_path / "d")
    again = _made_again(engine, dump, tmp_path / "again")
    for each in (dump, again):
        rejected = each.index[each.index["branch"] > 0]
        assert rejected.groupby(["example", "branch"]).size().max() == window - 1
    assert again.digest == dump.digest and verify(dump.url, engine)


def _made_again(engine: rl.Engine, dump: Dump, folder: Path) -> Dump:
    """From the plan alone."""
    from replaylens.dumps.maker import write_dump

    made = write_dump(engine, dump.manifest.plan, folder)
    assert made is not None
    return made


def test_columns_of_targets_are_in_the_order_asked_for() -> None:
    log_p = -torch.arange(24, dtype=torch.float32).view(2, 2, 6)
    found = statistics(LensSpec(("a",), 1, (4, 1, 3), False), log_p, [0, -1])
    assert found["Z.targets"].tolist() == [[[-4, -1, -3], [-10, -7, -9]], [[-16, -13, -15], [-22, -19, -21]]]
    assert found["Z.emitted"][0].tolist() == [0, -6] and found["Z.emitted"][1].isnan().all()


def test_rows_of_pools_by_two_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 4, pools of 2 blocks, 27 rows: 6 blocks in a random order and 3 rows that stay last."""
    monkeypatch.setattr(feeds, "BLOCK_ROWS", 4)
    monkeypatch.setattr(feeds, "POOL_BLOCKS", 2)
    order = feeds.RowOrder(27, seed=3, shuffle="blocks")
    key = feeds._mix(feeds._mix(3) ^ 5) if not hasattr(order, "_key") else order._key(5)
    blocks = feeds.permuted(np.arange(6, dtype=np.uint64), 6, key).tolist()
    wanted = []
    for pool in range(4):
        rows = [4 * block + i for block in blocks[2 * pool : 2 * pool + 2] for i in range(4)] or [24, 25, 26]
        inside = feeds.permuted(np.arange(len(rows), dtype=np.uint64), len(rows), feeds._mix(key ^ (pool + 1)))
        wanted += [rows[i] for i in inside.tolist()]
    assert order.of_epoch(5, np.arange(27, dtype=np.uint64)).tolist() == wanted and sorted(wanted) == list(range(27))


def test_a_set_of_rows_has_its_own_fingerprint(engine: rl.Engine, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    dump = engine.replay(coins(flips=(1, 2)).examples(3), sites="S").save(tmp_path / "d")
    site, other = "blocks.1.hook_in", "blocks.2.hook_in"
    ways = [
        dump.to_dataset([site]),
        dump.to_dataset([other]),
        dump.where(example=0).to_dataset([site]),
        dump.where(example=1).to_dataset([site]),
    ]
    assert len({each._fingerprint for each in ways}) == 4
    assert dump.where(example=1).to_dataset([site])._fingerprint == ways[3]._fingerprint


def test_a_file_is_in_its_folder_before_it_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is flushed, gets its name, and then its folder is flushed: a crash after that loses nothing."""
    said: list[str] = []
    fsync, replace = os.fsync, os.replace

    def flushed(number: int) -> None:
        said.append("folder" if os.path.isdir(f"/proc/self/fd/{number}") else "file")
        fsync(number)

    def named(*paths: Any) -> None:
        said.append("name")
        replace(*paths)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(os, "replace", named)
    with Store(tmp_path).writing("a.bin") as file:
        file.write(b"abc")
    assert said == ["file", "name", "folder"]


# ---- probes ---------------------------------------------------------------------------------------------------------------


def test_the_lowest_bound_decides() -> None:
    """Of three baselines, one has the least gain and another the lowest bound; one cell is above all, one is not."""
    score = {"metric": LOSS, "what": "S1", "accuracy": 0.5, "share_explained": 0.25, "verdict": "shown"}
    gains = {"S1": ((0.30, 0.21), (0.10, 0.04), (0.20, 0.02)), "S2": ((0.30, 0.20), (0.10, 0.04), (0.20, -0.02))}
    lines = [score, score | {"what": "S2", "verdict": "undecided"}]
    for cell, values in gains.items():
        for name, (gain, low) in zip(("frequencies", "words", "length"), values, strict=True):
            more = {"accuracy": gain, "low": low, "high": gain + 0.1, "state": cell}
            lines.append({"metric": GAIN, "what": f"{cell} against {name}", **more})
    first, second = _say(lines)
    assert first.startswith("Shown: S1") and second.startswith("Undecided: S2")
    for said, low in ((first, "+0.020"), (second, "-0.020")):
        assert "Loss 0.500 nats, 25% of what can be explained" in said
        assert "least gain +0.100 nats over words (+0.040 to +0.200)." in said
        assert f"The lowest bound decides: {low} over length (gain +0.200)." in said


def test_verdicts_of_a_table() -> None:
    """Chance, the majority, the margin and the control task, at their bounds."""
    line = {"accuracy": 0.8, "majority": 0.6, "margin": 0.1, "margin_over": "bag_of_tokens", "margin_without_task": 0.1}
    for changes, wanted in (
        ({"p_family": 0.05}, ("shown", "bag_of_tokens")),
        ({"p_family": 0.0501}, ("undecided", "p_family")),
        ({"p_family": math.nan}, ("undecided", "no test")),
        ({"majority": 0.8}, ("undecided", "majority")),
        ({"majority": 0.8, "high_family": 0.85}, ("below", "majority")),
        ({"majority": 0.79}, ("shown", "bag_of_tokens")),
        ({"margin": math.nan}, ("shown", "p_family")),
        ({"margin": 0.0}, ("undecided", "bag_of_tokens")),
        ({"margin": -0.1, "margin_over": "control_task", "margin_high": 0.05}, ("below", "control_task")),
        ({"margin": -0.1, "margin_over": "token_identity"}, ("undecided", "token_identity")),
    ):
        found = verdict_of({"p_family": 0.01} | line | changes)
        assert found is not None and (found.outcome, found.decided_by) == wanted, changes


def test_the_summary_of_a_table() -> None:
    """Three cells: two are shown, the best of those is named, though one that is not shown scores more."""
    common = {"label": "face", "estimator": "ridge", "position": "step", "site": "S", "known_zero": False, "metric": "accuracy"}
    common |= {
        "margin_over": "untrained",
        "majority": 0.5,
        "untrained": 0.6,
        "test": "permutation",
        "rows": 90,
        "distinct": 80,
        "groups": 30,
    }
    cells = ((0, 0.95, 0.5, 0.2), (1, 0.8, 0.01, 0.1), (2, 0.9, 0.03, 0.25))
    table = pd.DataFrame([
        {**common, "layer": layer, "accuracy": score, "low": score - 0.1, "high": score + 0.05, "p_family": p, "margin": margin}
        for layer, score, p, margin in cells
    ])  # fmt: skip
    lines = summarise(table, {"permutations": 99})
    assert lines[0] == (
        "Shown: face at step (ridge): cells 2 of 3 shown, 1 of 3 undecided; best accuracy 0.900 [0.800, 0.950] at S2, best "
        "control 0.600 (untrained), "
        "without token identity and bag of tokens and control task, p = 0.030 over the grid (permutation; 90 rows, 80 distinct "
        "of 30 groups)."
    )
    assert lines[1] == "  decided by the margin over untrained: lower bound +0.250, above 0."
    assert any(line.startswith("Grid of 3 cells (1 site, 3 layers, 1 position, 1 label, 1 estimator)") for line in lines)
    assert any("99 permutations: no p is below 0.010" in line for line in lines)


def test_equal_keys_are_one_observation() -> None:
    """Rows come in pairs with one key, which belong to different groups: one of each is kept, and groups that share none."""
    count = 40
    y = np.arange(count) % 2
    x = np.random.default_rng(0).normal(size=(count, 3)) + 3 * y[:, None]
    x, y = np.repeat(x, 2, axis=0) + np.arange(2 * count)[:, None] % 2 / 10, np.repeat(y, 2)
    groups, keys = np.arange(2 * count) // 4, np.arange(2 * count) // 2
    found = rl.probes.cross_validate(x, y, groups=groups, keys=keys, estimator="mass-mean")
    assert found.rows.tolist() == list(range(0, 2 * count, 2))
    every = rl.probes.cross_validate(x, y, groups=groups, estimator="mass-mean")
    assert every.rows.tolist() == list(range(2 * count))


def test_a_column_that_tells_the_middle_class_is_chosen() -> None:
    """Three classes with means 0, 6, 0 in one column and 0, 1, 2 in the other: standard deviations 2.8 and .8."""
    y = np.repeat([0, 1, 2], 10)
    x = np.stack([np.array([0.0, 6.0, 0.0])[y], y * 1.0], 1) + np.random.default_rng(1).normal(0, 0.1, (30, 2))
    assert SparseProbe(k=1).fit(x, y).selected_.tolist() == [0]
    assert SparseProbe(k=1).fit(x[y != 1], y[y != 1]).selected_.tolist() == [1]


def test_examples_are_streamed_in_the_order_of_their_index(engine: rl.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    examples, batches, replay = coins(flips=(1, 3)).examples(5), [], engine.replay

    def watched(some: Any, **options: Any) -> Any:
        batches.append([each.index for each in some])
        return replay(some, **options)

    monkeypatch.setattr(engine, "replay", watched)
    rl.probes.fit_streaming(engine, examples[::-1], "face", ["heads", "tails"], position="query", batch=2)
    assert batches == [[0, 1], [2, 3], [4]]


def test_prompts_that_are_not_in_the_dump() -> None:
    """Behind the last index of the dump; neither its texts nor a text twice."""
    texts = {6: "b", 7: "c", 8: "c", 9: "a", 10: "d", 11: "e"}
    example = lambda i: SimpleNamespace(root=texts[i], index=i)  # noqa: E731
    plan = SimpleNamespace(examples=[2, 5, 3], make_task=lambda: SimpleNamespace(example=example))
    dump: Any = SimpleNamespace(manifest=SimpleNamespace(plan=plan), index={"root": ["a", "b"]})
    assert [each.index for each in command._unseen(dump, 3)] == [7, 10, 11]


# ---- tasks ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "knobs", "chance"),
    [
        ("coin", {"p": 0.7}, 0.7),
        ("coin", {"p": 0.2}, 0.8),
        ("coins", {"p": 0.25}, 0.75),
        ("coin-resets", {"p": 0.5, "reset": 0.2}, 0.4),
        ("coin-resets", {"p": 0.9, "reset": 0.1}, 0.81),
        ("coin-resets", {"p": 0.5, "reset": 0.8}, 0.4),
        ("shell", {"cups": 3, "p": 0.5}, 1 / 6),
        ("shell", {"cups": 5, "p": 0.25}, 0.075),
        ("hops", {"relations": 2}, 0.5),
        ("boxes", {}, 1 / 3),
        ("fork", {}, 0.5),
    ],
)
def test_the_chance_of_the_next_action(name: str, knobs: dict[str, Any], chance: float) -> None:
    """The likeliest action, times the share of pairs or faces that it may concern."""
    assert rl.tasks.get(name)(**knobs).next_action_chance() == pytest.approx(chance, abs=1e-12)


# ---- models and thoughts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("errors", "fits"),
    [
        ([0.0] * 31 + [0.9e-3], True),
        ([0.0] * 31 + [1.1e-3], False),
        ([2e-5] * 15 + [0.0] * 17, True),
        ([2e-5] * 17 + [0.0] * 15, False),
        ([float("nan")] * 32, False),
    ],
)
def test_a_model_fits_by_its_median_and_its_worst_row(errors: list[float], fits: bool) -> None:
    with nullcontext() if fits else pytest.raises(ModelMismatch):
        check._require_small("block 0", torch.tensor(errors), torch.float32)


def test_a_copied_thought_has_its_own_tensors() -> None:
    """Also of what was read already; what was not is read by the copy, from its own states."""
    reads: list[int] = []

    def source(hidden: torch.Tensor) -> Any:
        reads.append(1)
        return {"p": hidden * 2}

    make = lambda given: Thought((1, 2), torch.ones(2, 3), given, torch.ones(1, 3), torch.ones(1, 3))  # noqa: E731
    lazy, read, plain = make(source), make(source), make({"p": torch.ones(2, 3)})
    assert torch.equal(read.distribution["p"], torch.full((2, 3), 2.0)) and len(reads) == 1
    for thought, later in ((lazy, 1), (read, 0), (plain, 0)):
        copied, before = thought.copy(), len(reads)
        copied.distribution["p"].zero_()
        copied.hidden.zero_(), copied.state.zero_(), copied.compressed.zero_()
        assert len(reads) - before == later
        assert thought.distribution["p"].all() and thought.hidden.all() and thought.state.all() and thought.compressed.all()


# ---- graphs and attribution -----------------------------------------------------------------------------------------------


def small_graph(weights: list[list[float]]) -> Graph:
    """Sources: one feature, an error, a token, a bias. Targets: the feature and two outputs, which count .75 and .25."""
    kinds = ("feature", "error", "token", "bias", "output", "output")
    nodes = tuple(Node(kind, 0, 0, i, 0.0, kind) for i, kind in enumerate(kinds))  # type: ignore[arg-type]
    return Graph(
        all_nodes=nodes,
        weights=torch.tensor(weights),
        shares=(0.75, 0.25),
        tokens=(1,),
        words=("a",),
        left_out=frozenset(),
        made_of=("x",),
        certified=True,
        kept_nodes=np.ones(6, dtype=bool),
        kept_edges=np.ones((3, 4), dtype=bool),
    )


def test_influence_and_its_shares() -> None:
    """The outputs take 1/2 and 1/4 from the feature, which takes 1/5 from the error and 4/5 from the token."""
    graph = small_graph([[0.0, 1.0, -4.0, 9.0], [2.0, 1.0, 1.0, 7.0], [-1.0, 0.0, 3.0, 5.0]])
    feature = 0.75 * 0.5 + 0.25 * 0.25
    error, token = 0.75 * 0.25 + feature * 0.2, 0.75 * 0.25 + 0.25 * 0.75 + feature * 0.8
    assert graph.influence.tolist() == pytest.approx([feature, error, token, 0.0])
    assert graph.replacement == pytest.approx(token / (token + error))
    assert graph.completeness == pytest.approx(1 - (0.75 * 0.25 + feature * 0.2) / (1 + feature))
    kept = np.ones((3, 4), dtype=bool)
    kept[0, 1] = False
    assert graph._normed(kept)[0].tolist() == [0.0, 0.0, 1.0, 0.0], "without an edge, the others share"
    assert small_graph([[0.0, 0.0, 0.0, 9.0]] * 3)._normed(kept).tolist() == [[0.0] * 4] * 3, "biases are no edges"


def test_sites_of_one_kind_are_one_row_of_pictures() -> None:
    """The stream that leaves the last block follows those that enter; several such streams are a kind of their own."""

    def kinds(*sites: str) -> dict[str, list[int]]:
        return Attribution._kinds(SimpleNamespace(sites=sites))  # type: ignore[arg-type]

    last = ("blocks.0.hook_in", "blocks.0.mlp.hook_out", "blocks.1.hook_in", "blocks.1.hook_out")
    assert kinds(*last) == {"hook_in": [0, 2, 3], "mlp.hook_out": [1]}
    assert kinds("blocks.0.hook_in", "blocks.0.hook_out", "blocks.1.hook_out") == {"hook_in": [0], "hook_out": [1, 2]}
    assert kinds("blocks.1.hook_out") == {"hook_out": [0]}


# ---- bridges --------------------------------------------------------------------------------------------------------------


class Rows:
    """Features of a path, given as numbers."""

    def __init__(self, *values: float) -> None:
        self.values, self.positions = torch.tensor(values)[:, None], range(len(values))

    def columns(self, ids: list[int]) -> torch.Tensor:
        return self.values


def test_a_feature_for_the_viewer(engine: rl.Engine) -> None:
    """Paths by their strongest activation, silent ones left out; frequencies count what is above zero, of all rows."""
    from replaylens.extras.bridges import neuronpedia

    paths = {"weak": (0.0, 1.0, 0.0), "silent": (0.0, 0.0, -1.0), "strong": (0.0, 3.0, 2.0)}
    branches = [engine.prompt("A coin's state") for _ in paths]
    rows = {branch.id: Rows(*values) for branch, values in zip(branches, paths.values(), strict=True)}
    decoder = torch.zeros(3, 128)
    decoder[2] = engine.model.unembedding[5].float()
    features: Any = SimpleNamespace(of=lambda branch: rows[branch.id], decoder=decoder, __len__=lambda: 3)
    kind = type("Three", (SimpleNamespace,), {"__len__": lambda self: 3})
    found = neuronpedia.feature.__wrapped__(kind(**vars(features)), 2, branches, transcoder="t", examples=3, logits=2)  # type: ignore[attr-defined]
    (quantile,) = found["examples_quantiles"]
    assert [each["tokens_acts_list"] for each in quantile["examples"]] == [[0.0, 3.0, 2.0], [0.0, 1.0, 0.0]]
    assert [each["train_token_ind"] for each in quantile["examples"]] == [1, 1]
    assert (found["act_min"], found["act_max"], found["activation_frequency"]) == (-1.0, 3.0, 3 / 9)
    assert found["quantile_values"][::3] == [1.0, pytest.approx(2.5), 3.0] or found["quantile_values"][2] == 2.0
    effect = engine.model.unembedding.float() @ engine.model.unembedding[5].float()
    order = effect.argsort(descending=True)
    assert found["top_logits"] == [engine.text.token(int(each)) for each in order[:2]]
    assert found["bottom_logits"] == [engine.text.token(int(each)) for each in order.flip(0)[:2]]


def test_requests_are_seeded_by_their_place_in_the_list(engine: rl.Engine) -> None:
    """Five sampled requests in batches of two: request i has the seed plus i, as if it were alone."""
    prompts = [f"A coin's state is {face}. {name} flips." for face, name in product(("heads", "tails"), ("Alice", "Bob"))]
    prompts.append(prompts[0])
    with installed():
        from replaylens.extras.bridges.lm_eval_model import ReplayLM

        model, options = ReplayLM(engine, batch_size=2, seed=7), {"max_gen_toks": 4, "temperature": 4.0, "do_sample": True}
        found = model.generate_until([SimpleNamespace(args=(each, dict(options))) for each in prompts], disable_tqdm=True)
    hot = [rl.Sampling(temperature=4.0, seed=7 + i) for i in range(5)]
    alone = [engine.prompt(each).generate(4, sampling=own).generated_text for each, own in zip(prompts, hot, strict=True)]
    assert found == alone and len(set(found)) > 3


# ---- monitors, certificates, recipes --------------------------------------------------------------------------------------


def test_a_score_stops_above_its_limit_and_not_at_it(engine: rl.Engine) -> None:
    run = engine.replay(coins(flips=(1, 3)).examples(20), sites="S")
    probe = rl.probes.fit_probe(run, "face", layer=3, position="query", estimator="mass-mean")
    watch, prompt = engine.watch({"face": probe}), "A coin's state is heads. Alice flips."
    free = watch.prompt(prompt)
    free.generate(4)
    highest = np.float32(watch.scores(free)["face"][free.length - 4 :].max())
    for limit, stops in ((highest, False), (np.nextafter(highest, np.float32(-np.inf)), True)):
        branch = watch.prompt(prompt)
        watch.generate([branch], 4, stop={"face": float(limit)})
        assert (branch.length < free.length) is stops


def test_a_model_is_examined_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is on the disk, what the examination gives is stored and remembered; where something is, it is read."""
    asked: list[str] = []
    monkeypatch.setattr(certificates, "_EXAMINED", {})
    monkeypatch.setattr(certificates, "_key", lambda model: model.key)
    monkeypatch.setattr(certificates, "_from_disk", lambda key: "read" if key == "known" else None)
    monkeypatch.setattr(certificates, "_to_disk", lambda key, made: f"stored {made}")
    monkeypatch.setattr(certificates, "_first_examination", lambda model: asked.append(model.key) or "made")
    monkeypatch.setattr(certificates.doctor, "require", lambda made: made)
    model = lambda key: SimpleNamespace(key=key, device=SimpleNamespace(type="cuda"))  # noqa: E731
    found: Any = [certificates.certificate_for(model(key)) for key in ("new", "new", "known")]
    assert found == ["stored made", "stored made", "read"] and asked == ["new"]


def test_numbers_of_a_file_keep_their_precision() -> None:
    """float32 as the shortest decimal that means it, float64 in full, text and whole numbers as they are."""
    field = lambda value, kind: SimpleNamespace(contents=lambda: value, types=[SimpleNamespace(name=kind)])  # noqa: E731
    third = 1 / 3
    assert gguf._value(field(float(np.float32(1e-6)), "FLOAT32")) == 1e-06
    assert gguf._value(field(third, "FLOAT64")) == third and gguf._value(field("x", "STRING")) == "x"


@pytest.mark.slow
def test_noise_explains_nothing_of_an_outcome(engine: rl.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """R2 is against the mean of the outcomes: rows of noise have none."""
    task = coins(flips=(2, 4), rendering="steps", seed=2)
    rows = rl.probes.ProbeRows.of(engine.replay(task.examples(40), sites="S"))
    noise = lambda self, site, layer=None: np.random.default_rng(len(self)).normal(size=(len(self), 3))  # noqa: E731
    monkeypatch.setattr(rl.probes.ProbeRows, "matrix", noise)
    table = rl.probes.outcome_at_fork(rows, layers=[3], folds=3).table
    own = table[table["metric"].eq("r2") & table["site"].eq("S")]["accuracy"]
    assert len(own) and (own < 0.2).all()


def test_a_recipe_of_another_method() -> None:
    recipe = thinking_zoo.recipe("coin-thinking")
    other = next(each for each in METHODS if each != recipe.method)
    assert changed_thinking(recipe, Changes(method=other)).method == other
    assert changed_thinking(recipe, Changes(longest=3)).method == recipe.method


# ---- one value on every machine -------------------------------------------------------------------------------------------


def test_probabilities_of_a_lens_are_in_portable_arithmetic(engine: rl.Engine) -> None:
    found = rl.lens(engine, "A coin's state is heads. Alice flips.")
    wanted = definition.exp(found.top_logprobs[..., 0].numpy())
    assert np.array_equal(found.probability.numpy(), wanted)


def test_the_length_of_an_ablated_direction_is_rounded_once() -> None:
    """The exact length, rounded to float64; sums in float32 hang on how many lanes a processor has."""
    from fractions import Fraction

    from replaylens.workbench.ablate import _direction

    vector = torch.tensor([4096.0] + [1.0] * 127)
    exact = float(sum(Fraction(x) ** 2 for x in vector.tolist()))
    assert torch.equal(_direction((1, vector), 4, 128)[1], vector / math.sqrt(exact))
