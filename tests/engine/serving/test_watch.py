"""Scores of watched probes are a function of weights, path and edits: torch.equal in any batch, fork, rollback and replay."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from replaylens import Dump, Edit, Engine, Sampling, tasks
from replaylens.dumps.verify import MISMATCH, verify
from replaylens.engine.errors import BadDump, BadRequest, FingerprintMismatch, UnknownSite
from replaylens.engine.records import Identifier
from replaylens.engine.serving.watch import Scorer, Watch, probe_record
from replaylens.probes.probe import LinearProbe, fit_probe
from replaylens.probes.rows import Cell
from tests.dumps.damage import edit_manifest
from tests.toy_model import random_model, toy

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]
HOT = Sampling(temperature=1.0, seed=3)
IN, MIDDLE, OUT = "blocks.0.hook_in", "blocks.0.hook_out", "blocks.1.hook_out"


def probe(seed: int, site: str = IN, classes: int = 2, width: int = 32, **changes: Any) -> Any:
    draw = np.random.default_rng(seed)
    k = 1 if classes == 2 else classes
    names = tuple("abcdef"[:classes])
    made = LinearProbe(
        draw.normal(size=(k, width)),
        draw.normal(size=k),
        draw.normal(size=(classes, width)),
        names,
        "label",
        site,
        Cell("S", 0),
        "query",
        "ridge",
        {},
    )
    return replace(made, **changes)


PROBES = {"one": probe(1), "two": probe(2), "far": probe(3, OUT), "many": probe(4, MIDDLE, classes=3)}


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(toy(), record=True)


@pytest.fixture(scope="module")
def watch(engine: Engine) -> Watch:
    return engine.watch(PROBES)


@pytest.fixture(scope="module")
def path(engine: Engine, watch: Watch) -> list[int]:
    with watch.prompt(TOKENS) as branch:
        return branch.generate(12, sampling=HOT, final=True).tokens


@pytest.fixture(scope="module")
def wanted(engine: Engine, watch: Watch, path: list[int]) -> dict[str, torch.Tensor]:
    """The scores of the whole path as one prompt, computed alone."""
    with watch.prompt(path) as branch:
        return watch.scores(branch)


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], rows: Any = slice(None)) -> bool:
    return list(found) == list(wanted) and all(torch.equal(found[name], wanted[name][rows]) for name in wanted)


# ---- the promise ---------------------------------------------------------------------------------------------------------


def test_scores_are_what_the_probes_say(watch: Watch, path: list[int]) -> None:
    with watch.prompt(path) as branch:
        found, rows = watch.scores(branch), branch.activations
    assert found["one"].shape == (len(path),) and found["many"].shape == (len(path), 3)
    for name, each in PROBES.items():
        truth = torch.from_numpy(each.scores(rows[each.site].double()))
        assert (found[name].double() - truth).abs().max() < 1e-5 * truth.abs().max()


@pytest.mark.parametrize("drafter", ["lens", "ngram", "tree", "self"])
@pytest.mark.parametrize("window", [1, 5])
def test_any_batch_and_drafter(engine: Engine, watch: Watch, wanted: Any, path: list[int], drafter: str, window: int) -> None:
    mine, others = watch.prompt(TOKENS), [watch.prompt([7, i]) for i in range(3)]
    engine.generate([*others, mine], 12, sampling=HOT, drafter=drafter, window=window, final=True)
    assert mine.tokens == path and same(watch.scores(mine), wanted)
    assert not same(watch.scores(others[0]), wanted), "control"


def test_a_changed_bit_of_the_row_changes_the_score(watch: Watch, path: list[int]) -> None:
    """Negative control: the comparison sees one bit of one number of one row."""
    with watch.prompt(path) as branch:
        rows = branch.activations[IN]
    score = Scorer([probe_record("one", PROBES["one"], IN)])
    before = score(rows)["one"]
    at = int(np.abs(PROBES["one"].weight[0]).argmax())
    rows[5, at] = torch.nextafter(rows[5, at], torch.tensor(9e9)) + 1e-4
    assert (score(rows)["one"] != before).nonzero().flatten().tolist() == [5]


def test_probes_and_rows_beside_it_change_nothing(engine: Engine, wanted: Any, path: list[int]) -> None:
    alone = engine.watch({"two": PROBES["two"]})
    with alone.prompt(path) as branch:
        assert torch.equal(alone.scores(branch)["two"], wanted["two"])
        rows = branch.activations[IN]
    score = Scorer([probe_record(str(i), PROBES["one"] if i == 20 else probe(i), IN) for i in range(33)])
    assert torch.equal(score(rows[3:4])["20"], wanted["one"][3:4])


def test_forks_rollbacks_and_traces(engine: Engine, watch: Watch, wanted: Any, path: list[int]) -> None:
    branch = watch.prompt(TOKENS).generate(5, sampling=HOT)
    assert same(watch.scores(branch), wanted, slice(0, 12)), "the pending token has no score"
    (fork,) = branch.fork(at=10)
    fork.force([1, 1]).rollback(to=10)
    assert same(watch.scores(fork), wanted, slice(0, 10))
    fork.force(path[10:])
    assert same(watch.scores(fork), wanted)
    again = Engine(toy()).replay_trace(engine.trace)[fork.id]
    assert same(Watch(again.engine, PROBES).scores(again), wanted)  # type: ignore[arg-type]


def test_scores_are_copies_and_outlive_their_rows(engine: Engine, watch: Watch, wanted: Any, path: list[int]) -> None:
    with watch.prompt(path) as branch:
        (fork,) = branch.fork()
        for scores in watch.scores(branch).values():
            scores.fill_(7.0)
        assert same(watch.scores(branch), wanted) and same(watch.scores(fork), wanted)
    for sites in (None, "S"):
        branch = engine.prompt(path, sites=sites, watch=watch)
        kept = engine.prompt(path, sites="S").activations
        (rows,) = engine.activations([branch], release=True)
        assert list(rows) == ([] if sites is None else list(kept)) and all(
            torch.equal(x, kept[site]) for site, x in rows.items()
        )
        assert same(watch.scores(branch), wanted)


def test_rejected_drafts_have_scores_of_their_own(engine: Engine, watch: Watch) -> None:
    branch = watch.prompt(TOKENS, keep_rejected=True)
    branch.generate(10, drafter="forced", drafts={8: [[50, 51, 52]]}, window=6, sampling=HOT)
    rejected = next(each for each in branch.rejected if each.activations.positions())
    first = rejected.activations.positions()[0]
    with watch.prompt(rejected.tokens) as whole:
        assert same(watch.scores(rejected), {n: x[first:] for n, x in watch.scores(whole).items()})


# ---- streams and stops ----------------------------------------------------------------------------------------------------


def test_a_stream_yields_tokens_with_their_scores(watch: Watch, wanted: Any, path: list[int]) -> None:
    branch = watch.prompt(TOKENS)
    seen = list(watch.stream(branch, 12, sampling=HOT, drafter="lens", window=4))
    assert [each.token for each in seen] == path[8:] and [each.position for each in seen] == list(range(8, 20))
    for each in seen:
        assert all(torch.equal(each.scores[name], wanted[name][each.position]) for name in wanted)
    assert branch.tokens == path


def test_a_stream_that_is_left_keeps_what_it_yielded(engine: Engine, watch: Watch, wanted: Any, path: list[int]) -> None:
    branch = watch.prompt(TOKENS)
    stream = watch.stream(branch, 12, sampling=HOT, window=4, drafter="lens")
    next(stream), next(stream)
    stream.close()
    assert branch.tokens == path[:10] and same(watch.scores(branch), wanted, slice(0, 10)) and list(stream) == []
    assert branch.generate(10, sampling=HOT).tokens == path
    engine.check_integrity()


def limit_of(wanted: Any, path: list[int]) -> tuple[float, int]:
    """A threshold that the response meets first somewhere in its middle, and the position."""
    scores = wanted["one"][8:]
    at = max(range(4, 11), key=lambda i: float(scores[i] - scores[:i].max()))
    assert scores[at] > scores[:at].max()
    return float((scores[at] + scores[:at].max()) / 2), 8 + at


@pytest.mark.parametrize("window", [1, 3, 8])
def test_a_stop_is_the_same_in_any_window(engine: Engine, watch: Watch, wanted: Any, path: list[int], window: int) -> None:
    limit, at = limit_of(wanted, path)
    branch = watch.prompt(TOKENS)
    stream = watch.stream(branch, 12, sampling=HOT, window=window, drafter="lens", stop={"one": limit})
    assert [each.position for each in stream] == list(range(8, at + 1)) and stream.stopped
    assert branch.tokens == path[: at + 1]
    together = [watch.prompt(TOKENS), watch.prompt([7, 7]), watch.prompt(TOKENS)]
    found = watch.generate(together, 12, sampling=HOT, window=window, drafter="lens", stop={"one": limit})
    assert together[0].tokens == together[2].tokens == path[: at + 1] and found[0] is not None
    assert (found[0].position, found[0].token) == (at, path[at]) and torch.equal(found[0].scores["one"], wanted["one"][at])
    assert same(watch.scores(together[0]), wanted, slice(0, at + 1))
    never = watch.prompt(TOKENS)
    assert watch.generate([never], 12, sampling=HOT, stop=lambda scores: False) == [None] and never.tokens == path
    assert together[0].generate(20 - at - 1, sampling=HOT).tokens == path, "control: without the stop it goes on"
    engine.check_integrity()


def test_one_probe_takes_a_plain_threshold(engine: Engine, wanted: Any, path: list[int]) -> None:
    limit, at = limit_of(wanted, path)
    alone = engine.watch({"one": probe(1)})
    (hit,) = alone.generate([alone.prompt(TOKENS)], 12, sampling=HOT, stop=limit)
    assert hit is not None and hit.position == at


def test_a_function_of_all_scores_stops(watch: Watch, wanted: Any, path: list[int]) -> None:
    branch, likely = watch.prompt(TOKENS), int(wanted["many"][9].argmax())
    (hit,) = watch.generate([branch], 12, sampling=HOT, stop=lambda scores: int(scores["many"].argmax()) == likely)
    assert hit is not None and branch.length == hit.position + 1 <= 10


# ---- edits ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.3, 0.8])
def test_an_edit_where_the_probe_fires(engine: Engine, watch: Watch, wanted: Any, path: list[int], share: float) -> None:
    """Rows that score more are edited, and no others. Scores of edited rows are those of their new values."""
    above = float(wanted["far"].quantile(share))
    fires = wanted["far"] > above
    assert 0 < fires.sum() < len(path)
    with watch.prompt(path, edits=[watch.edit("far", "zero", above=above)]) as branch:
        rows, found = branch.activations[OUT], watch.scores(branch)["far"]
    bias = torch.tensor(PROBES["far"].bias, dtype=torch.float32)
    assert (rows.abs().sum(1) == 0).tolist() == fires.tolist()
    assert torch.equal(found[~fires], wanted["far"][~fires]) and torch.equal(found[fires], bias.expand(int(fires.sum())))


def test_an_edit_of_tokens_to_come(watch: Watch, path: list[int]) -> None:
    edit = watch.edit("one", "add", torch.ones(32), above=0.5, factor=2.0, match_norm=True, positions=slice(8, None))
    a, b = (watch.prompt(TOKENS, edits=[edit]).generate(12, sampling=HOT, window=w, drafter="lens") for w in (1, 6))
    assert a.tokens == b.tokens and same(watch.scores(a), watch.scores(b)) and a.certified
    plain: Edit = watch.edit("one", "zero")
    assert Edit.from_json(plain.to_json()).above == plain.plain().above


# ---- dumps ----------------------------------------------------------------------------------------------------------------


def test_dumps_name_their_probes(tmp_path: Path) -> None:
    """Scores are stored and verified; the plan has the probes with their weights. Controls: another score is found."""
    engine = Engine.load("coin-plain")
    watch = engine.watch({"a": probe(1, width=128), "b": probe(2, "blocks.1.hook_out", classes=3, width=128)})
    examples = tasks.get("coin")(flips=2).examples(3)
    run = engine.replay(examples, sites=["S"], drafter="lens")
    dump = run.save(tmp_path / "d", watch=watch)
    again = Dump.open(tmp_path / "d")
    assert [each.name for each in again.manifest.plan.probes] == ["a", "b"]
    named = again.manifest.plan.probes[0]
    assert Identifier(named.digest) == Identifier(probe(1, width=128).digest) and named == watch.records[0]
    rows = engine.watch({"a": probe(1, width=128)})._scorers[IN](dump.to_torch("S", 0))["a"]
    assert torch.equal(again.to_torch("probes.a"), rows) and again.to_torch("probes.b").shape == (len(again), 3)
    assert verify(tmp_path / "d", engine)
    assert run.save(tmp_path / "e").digest == run.digest != dump.digest
    other = run.save(tmp_path / "f", watch=engine.watch({"a": probe(9, width=128), "b": probe(2, "blocks.1.hook_out", 3, 128)}))
    assert other.digest != dump.digest
    assert dump.manifest.plan.differences(other.manifest.plan) == ["probes: other probes"]

    def swap(raw: Any) -> None:
        raw["plan"]["probes"][0]["bias"] = raw["plan"]["probes"][1]["bias"] | {"shape": [1], "data": "AACAPw=="}

    edit_manifest(tmp_path / "f", swap)
    assert verify(tmp_path / "f", engine).status == MISMATCH
    edit_manifest(tmp_path / "e", lambda raw: raw["plan"].update(probes=[raw_probe(named)]))
    with pytest.raises(BadDump, match="scores of the probe 'a'"):
        Dump.open(tmp_path / "e")


def raw_probe(record: Any) -> Any:
    from dataclasses import asdict

    return asdict(record)


# ---- misuse ---------------------------------------------------------------------------------------------------------------


def test_misuse_is_named(engine: Engine, watch: Watch) -> None:
    with pytest.raises(BadRequest, match="No probes"):
        engine.watch({})
    with pytest.raises(BadRequest, match="has no weight"):
        engine.watch(SimpleNamespace(label="x"))  # type: ignore[arg-type]
    with pytest.raises(BadRequest, match=r"reads 16 numbers, and a row of .* has 32"):
        engine.watch(probe(1, width=16))
    with pytest.raises(UnknownSite):
        engine.watch(probe(1, "blocks.9.hook_in"))
    with pytest.raises(FingerprintMismatch):
        engine.watch(probe(1, source={"fingerprint": Engine(random_model(5)).fingerprint.digest}))
    plain = engine.prompt(TOKENS)
    with pytest.raises(BadRequest, match=r"does not capture .*watch\.prompt"):
        watch.stream(plain, 3)
    partly = watch.prompt(TOKENS, positions="prompt")
    with pytest.raises(BadRequest, match="at all tokens"):
        watch.generate([partly], 3, stop={"one": 0.0})
    whole = watch.prompt(TOKENS, sites="STC")
    with pytest.raises(BadRequest, match=r"probe 'no'"):
        watch.stream(whole, 3, stop={"no": 1.0})
    with pytest.raises(BadRequest, match="more than two classes"):
        watch.stream(whole, 3, stop={"many": 1.0})
    with pytest.raises(BadRequest, match="Invalid stop"):
        watch.stream(whole, 3, stop=3)  # of which of the two?
    with pytest.raises(BadRequest, match="takes a probe of two"):
        watch.edit("many", "zero")
    assert "one at blocks.0.hook_in" in repr(watch)


def test_probes_must_be_well_formed(engine: Engine) -> None:
    with pytest.raises(BadRequest, match="name of a probe=1"):
        engine.watch({1: probe(1), "1": probe(2)})  # type: ignore[dict-item]
    with pytest.raises(BadRequest, match="Give a dict"):
        engine.watch([probe(1), probe(2)])  # type: ignore[arg-type]
    good = probe(1)
    for what in ("weight", "bias"):
        for value in (np.nan, np.inf, -np.inf, 1e300):
            values = getattr(good, what).copy()
            values.flat[0] = value
            with pytest.raises(BadRequest, match=f"The {what} of the probe 'odd' has NaN, infinite"):
                engine.watch({"good": good, "odd": replace(good, **{what: values})})
    unfit: list[dict[str, Any]] = [
        {"classes": ("a",)},
        {"classes": ("a", "b", "c")},
        {"weight": np.ones((2, 32)), "bias": np.ones(2)},
        {"bias": np.ones(2)},
        {"weight": np.ones((3, 32))},
    ]
    for changes in unfit:
        with pytest.raises(BadRequest, match=r"The probe 'odd' has \d classes, \d lines of weights and \d of bias"):
            engine.watch({"odd": replace(good, **changes)})
    others: list[dict[str, Any]] = [
        {"weight": np.ones(32)},
        {"weight": np.ones((1, 32, 1))},
        {"weight": [[1.0] * 32]},
        {"bias": np.ones((1, 1))},
        {"bias": np.array(["x"])},
    ]
    for changes in others:
        with pytest.raises(BadRequest, match=r"Invalid (weight|bias) of the probe 'odd'"):
            engine.watch({"odd": replace(good, **changes)})
    with pytest.raises(BadRequest, match="grow with the path"):
        engine.watch(probe(1, "blocks.0.attn.hook_pattern", width=0))


def test_branches_of_other_engines_are_refused(watch: Watch) -> None:
    other = Engine(toy()).prompt(TOKENS, sites="STC")
    with pytest.raises(BadRequest, match="another engine"):
        watch.stream(other, 3)
    with pytest.raises(BadRequest, match="another engine"):
        watch.generate([other], 3, stop={"one": 0.0})


def test_rows_of_thoughts_that_do_not_fit_are_named() -> None:
    """Control: rows of the same engine with one vector for each token are scored."""
    engine = Engine.load("coin-thinking")
    width = engine.config.d_model
    for site in ("thinking.hook_out", "thinking.entropy", IN):
        watch = engine.watch({"a": probe(1, site, width=width)})
        branch = watch.prompt("A coin's state is heads.")
        if site == IN:
            assert watch.scores(branch)["a"].shape == (branch.length,)
            continue
        with pytest.raises(BadRequest, match=f"Rows of {site} have .* 'a' reads {width}"):
            watch.scores(branch)
        with pytest.raises(BadRequest):
            list(watch.stream(branch, 3))


def test_a_stop_function_says_true_or_false(engine: Engine, watch: Watch, wanted: Any, path: list[int]) -> None:
    """A comparison of a score does, as a tensor. After another result, the branch can go on."""

    def odd(scores: Any) -> Any:
        return scores["many"].argmax()

    for result in (odd, lambda scores: None, lambda scores: "no", lambda scores: scores["many"] > 0):
        branch = watch.prompt(TOKENS)
        name = f"stop function {'odd' if result is odd else '<lambda>'}="
        with pytest.raises(BadRequest, match=name):
            watch.generate([branch], 12, sampling=HOT, stop=result)  # type: ignore[arg-type]
        stream = watch.stream(watch.prompt(TOKENS), 12, sampling=HOT, stop=result)  # type: ignore[arg-type]
        with pytest.raises(BadRequest, match=name):
            next(stream)
        assert stream.branch.tokens == TOKENS and torch.equal(
            watch.scores(stream.branch)["one"], watch.scores(watch.prompt(TOKENS))["one"]
        ), "nothing was yielded"
        stream.branch.generate(1, sampling=HOT)
        for each in (branch, stream.branch):
            assert each.rollback(to=each.length - 1).generate(20 - each.length, sampling=HOT).tokens == path
    limit, place = limit_of(wanted, path)
    (hit,) = watch.generate([watch.prompt(TOKENS)], 12, sampling=HOT, stop=lambda scores: scores["one"] > limit)  # type: ignore[arg-type,return-value]
    assert hit is not None and hit.position == place
    engine.check_integrity()


def test_rules_of_stops_and_alarms() -> None:
    """Above, below, and the probe's own alarm, which is printed with its rate; rules that are none are refused by name."""
    engine, prompts = Engine.load("coin-plain"), [f"A coin's state is {face}. Alice flips." for face in ("heads", "tails")]
    probe = fit_probe(engine.replay(tasks.get("coin")(flips=(1, 3)).examples(24), sites="S"), "face", layer=3)
    scores = probe.apply(engine, prompts * 10)
    armed = probe.with_alarm(scores, [i % 2 == 0 for i in range(20)], scores, rate=0.9)
    plain, watch = engine.watch({"face": probe}), engine.watch({"face": armed})
    branch = watch.prompt(prompts[0])
    own = watch.scores(branch)["face"]
    said = watch.alarms(branch)
    assert (len(said) == 1) == (armed.alarm.score(own.numpy()) > armed.alarm.threshold) and plain.alarms(branch) == []
    for side, sign in (("above", 1), ("below", -1)):
        (hit,) = watch.generate([watch.prompt(prompts[0])], 6, stop={"face": (side, -1e9 * sign)})
        assert hit is not None
        (none,) = watch.generate([watch.prompt(prompts[0])], 2, stop={"face": (side, 1e9 * sign)})
        assert none is None
    if armed.alarm.pooling == "max":
        list(watch.stream(watch.prompt(prompts[0]), 2, stop="alarm"))
    for rule, why in (
        ("alarm", "has no alarm"),
        (("between", 1.0), "A|above"),
        (("above",), "above"),
        (float("nan"), "finite"),
        ("loud", "finite|Invalid"),
    ):
        with pytest.raises(BadRequest, match=why):
            plain.generate([branch], 1, stop={"face": rule})
