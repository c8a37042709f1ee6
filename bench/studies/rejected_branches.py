"""Do rejected branches know what they say: do rows of rejected drafts hold their own text, in the code of accepted rows?

Four questions per model and drafter. (a) Does a probe fitted on accepted rows read rejected ones (`rl.probes.transfer`, with
its controls)? (b) Where what is drafted parts from the truth (coins) or from the path that was taken (stories, boxes), which
one does the probe follow? (c) Is the rejected state used: rows at the same position are exchanged between both paths, against
rows of other prompts; which next face (coins) or which token after the next (stories, boxes) does the model write? (d) From
which layer on does the draft's own row tell that it will be rejected?

Verification itself compares the draft with the model's output at the row before: in greedy decoding a draft is rejected if
another token is likelier, so how far it is behind the likeliest separates both kinds by definition (an area of 1). What (d)
can ask is at which layer that is known. Its baselines are all of the row before: entropy and margin of the output, which do not
know the draft; the draft's log-probability in the output and in each layer's logit lens; and a probe of that row at each layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import replaylens as rl
from bench.studies.common import COLOURS, QUIET, Place, digest, inputs, paired, picture, share
from bench.studies.told import ShownCoin, ToldBoxes, TwoPeople
from replaylens.engine.passes.lens import read as read_lens
from replaylens.engine.records import LensSpec
from replaylens.probes.areas import area, area_gains
from replaylens.probes.intervals import LEVEL

TRAINED = Path(__file__).parents[2] / "trained" / "studies"
"""models of `bench/studies/recipes`, which the file's first line says how to train"""
FOLDS = 5
CONTROLS = ("shuffled labels", "token alone", "position alone", "bag of tokens", "control task", "untrained model")


@dataclass(frozen=True)
class Setting:
    """One model on one task."""

    model: str
    task: Any
    label: str
    """what the text says"""
    truth: str | None
    """what is true; None: what the label is at the same position of the path that was taken"""
    drafters: tuple[str, ...]
    n: int
    """prompts"""
    layers: tuple[int, ...]
    position: Any = "step"
    max_new: int | None = None
    temperature: float = 0.0
    options: dict[str, Any] = field(default_factory=dict)
    """of the engine"""
    exchange: bool = True
    """whether (c) is asked"""
    pairs: int = 80
    """of rows that are exchanged, at most"""
    probed: tuple[int, ...] = (1, 3)
    """layers of (a), whose controls are many fits"""


def _coin(**knobs: Any) -> Any:
    return rl.tasks.get("coin")(rendering="steps", **knobs)


def _said(frame: Any) -> Any:
    """Every generated token with a label: stories have no deciding words of their own."""
    return frame["since_query"] > 0


def _due(frame: Any) -> Any:
    """The colon after which a face is due: a model that writes it must know it here."""
    return (frame["since_query"] > 0) & (frame["text"].str.strip() == ":")


def _small(name: str) -> Setting:
    draft = ("model", "lens", "ngram")
    return Setting(str(TRAINED / name), _coin(flips=(2, 3)), "implied", "face", draft, 100, (0, 1, 2, 3),
                   options={"draft_model": "coin-draft"})  # fmt: skip


def _boxes(name: str) -> Setting:
    task = ToldBoxes(boxes=3, moves=(2, 3))
    return Setting(str(TRAINED / name), task, "full.1", None, ("lens", "ngram"), 200, (0, 1, 2, 3), max_new=24, temperature=1.0)


def _pretrained(
    model: str, layers: tuple[int, ...], n: int = 20, drafters: tuple[str, ...] = ("ngram",), pairs: int = 80
) -> dict[str, Setting]:
    shown = ShownCoin(rendering="steps", flips=(2, 3))
    how: dict[str, Any] = dict(
        drafters=drafters, n=n, layers=layers, probed=layers[1:3], options={"cache_tokens": 8192}, pairs=pairs
    )
    return {
        f"{model}, coins": Setting(model, shown, "implied", "face", max_new=26, **how),
        f"{model}, stories": Setting(model, TwoPeople(), "who", None, position=_said, max_new=32, temperature=0.7, **how),
    }


def _at_colon(setting: Setting) -> Setting:
    """(a) and (b) again where the face is due: added when a new model did not hold it at the deciding words."""
    return replace(setting, position=_due, drafters=("lens", "ngram"), exchange=False, probed=(2, 3))


_ALL = ("model", "lens", "ngram", "self")
SETTINGS = {
    "coin-plain": Setting("coin-plain", _coin(flips=(2, 6)), "implied", "face", _ALL, 120, (0, 1, 2, 3, 4)),
    **{name: _small(name) for name in ("coin-1", "coin-2", "coin-3")},
    **{name: _boxes(name) for name in ("boxes-1", "boxes-2", "boxes-3")},
    "coin-plain, face due": _at_colon(Setting("coin-plain", _coin(flips=(2, 6)), "implied", "face", _ALL, 80, (0, 1, 2, 3, 4))),
    **{f"{name}, face due": _at_colon(_small(name)) for name in ("coin-1", "coin-2", "coin-3")},
    **_pretrained("smollm2", (0, 8, 16, 24)),
    **_pretrained("gemma-3-270m", (0, 4, 9, 14), 12, pairs=24),  # as many as one CPU thread had time for
    **_pretrained("qwen", (0, 7, 14, 21), 48, ("ngram", "self"), pairs=40),
}
PARTS = tuple(SETTINGS)


def run(quick: bool, part: str, place: Place) -> dict[str, Any]:
    setting = SETTINGS[part]
    rl.tasks.register(type(setting.task))  # runs cite it by name
    engine = place.load(_trained(setting.model), record=True, **setting.options)  # the trace says what was drafted
    examples = setting.task.examples(24 if quick else setting.n)
    found: dict[str, Any] = {"inputs": inputs(engine, prompts=digest(e.prompt for e in examples)), "drafters": {}}
    streams, runs = _streams(engine, sorted({*setting.layers, engine.config.num_layers})), []
    for drafter in setting.drafters[:1] if quick else setting.drafters:
        sampling = rl.Sampling(temperature=setting.temperature)
        done = engine.replay(examples, sites=streams, drafter=drafter, max_new=setting.max_new, sampling=sampling)
        rejected = sum(len(result.rejected) for result in done)
        told: dict[str, Any] = {"prompts": len(done), "right": done.accuracy, "accepted": done.acceptance, "branches": rejected}
        told["drafted"] = sum(result.statistics.drafted for result in done)
        found["drafters"][drafter] = told
        if rejected < 10:
            told["note"] = "Too few rejected branches for any question."
            continue
        runs.append(done)
        rows = rl.probes.ProbeRows.of(done)
        told["transfer"] = transferred(engine, rows, setting, quick)
        told["parted"] = parted(rows, setting)
        told["foreseen"] = foreseen(engine, rows, setting, confirmed(engine, done))
    if setting.exchange and runs:
        found["exchange"] = exchanged(engine, runs, setting)
    return found


def _trained(model: str) -> str:
    """The model; SystemExit if it is one of ours that is not trained yet."""
    if model.startswith(str(TRAINED)) and not Path(model).exists():
        recipe = Path(model).name.partition("-")
        raise SystemExit(
            f"{model} is not trained. Run: "
            f"replaylens train bench/studies/recipes/{recipe[0]}.toml --seed {recipe[2]} --out {model}"
        )
    return model


def _streams(engine: rl.Engine, layers: Sequence[int]) -> list[str]:
    last = engine.config.num_layers
    return [f"blocks.{layer}.hook_in" if layer < last else f"blocks.{last - 1}.hook_out" for layer in layers]


# ---- (a) from accepted to rejected rows ----------------------------------------------------------------------------------


def transferred(engine: rl.Engine, rows: rl.probes.ProbeRows, setting: Setting, quick: bool) -> dict[str, Any]:
    """The report's lines by layer, and its verdict."""
    given = None if quick else engine
    try:
        report = rl.probes.transfer(rows, setting.label, layers=setting.probed, position=setting.position, engine=given)
    except rl.errors.ProbeError as error:
        return {"note": f"Not done: {error}"}
    lines = {line["what"]: line for line in report.lines}
    layers = {}
    for cell in (f"S{layer}" for layer in setting.probed):
        ways = ("accepted to accepted", "accepted to rejected", "rejected to rejected", "rejected to accepted")
        kept = {way: _value(lines[f"{cell}: {way}"]) for way in ways} | {"leakage": _value(lines[f"{cell}: leakage"])}
        above = f"{cell}: accepted to rejected minus "
        kept["above"] = {name: _value(lines[above + name]) for name in CONTROLS if above + name in lines}
        layers[cell] = kept
    alone = {name: _value(line) for name in CONTROLS if (line := lines.get(f"{name}: accepted to rejected"))}
    return {"layers": layers, "text alone": alone, "verdict": report.findings[-1], "notes": list(report.notes)}


def _present(rows: rl.probes.ProbeRows, setting: Setting) -> list[int]:
    return [layer for layer in setting.layers if layer in {cell.layer for cell in rows.cells("S", None)}]


def _value(line: dict[str, Any]) -> dict[str, Any]:
    kept = {"value": line["accuracy"], "low": line["low"], "high": line["high"], "n": line["rows"]}
    return kept | {name: line[name] for name in ("majority", "groups") if line.get(name) is not None}


# ---- (b) text or truth ---------------------------------------------------------------------------------------------------


def parted(rows: rl.probes.ProbeRows, setting: Setting) -> dict[str, Any]:
    """On rejected rows whose text says one thing and the truth, or the path taken, another: does a probe follow the text?"""
    here = rows.at(setting.position)
    here = here.where((here.frame["since_query"] > 0) & here.frame[setting.label].notna())
    frame = here.frame
    said, other = frame[setting.label].to_numpy(dtype=str), _other(rows.frame, frame, setting)
    accepted, roots = frame["accepted"].to_numpy(dtype=bool), frame["root"].to_numpy(dtype=str)
    fold = rl.probes.fold_of_groups(roots, FOLDS)
    deepest = here.matrix("S", _present(rows, setting)[-1])
    once = np.zeros(len(frame), bool)
    once[np.unique([row.tobytes() for row in deepest], return_index=True)[1]] = True  # equal paths have equal bits
    apart = ~accepted & once & (other != "") & (other != said)
    found: dict[str, Any] = {"rows": int(apart.sum()), "rejected": int((~accepted & once).sum()), "layers": {}}
    if apart.sum() < 10 or len(np.unique(said[accepted])) < 2:
        return found | {"note": "Too few rows where they part."}
    for layer in _present(rows, setting):
        x, predicted = here.matrix("S", layer).astype(np.float64), np.full(len(said), "", dtype=said.dtype)
        for k in range(FOLDS):
            fit, test = accepted & once & (fold != k), apart & (fold == k)
            if test.any():
                predicted[test] = _probe().fit(x[fit], said[fit]).predict(x[test])
        found["layers"][f"S{layer}"] = share(predicted[apart] == said[apart], roots[apart])
    return found


def _other(every: Any, frame: Any, setting: Setting) -> np.ndarray:
    """The truth at each row, or what the path that was taken says at its position; empty where there is none."""
    if setting.truth is not None:
        return frame[setting.truth].fillna("").to_numpy(dtype=str)
    taken = every[every["accepted"].astype(bool) & every[setting.label].notna()]
    known = dict(zip(zip(taken["example"], taken["position"], strict=True), taken[setting.label].astype(str), strict=True))
    return np.array([known.get(key, "") for key in zip(frame["example"], frame["position"], strict=True)])


def _probe() -> Any:
    return make_pipeline(StandardScaler(), LogisticRegression(max_iter=2000))


# ---- (c) is the rejected state used --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    """A draft that was rejected for another token, and the text up to where the model is asked."""

    root: str
    at: int
    """position of the rejected token"""
    taken: list[int]
    """tokens of the accepted path: up to the next face, or one more than the rejected token"""
    drafted: list[int]
    """the same, with the rejected token"""
    rows: dict[str, dict[int, Any]]
    """taken, drafted -> layer -> the row of that token"""


def exchanged(engine: rl.Engine, runs: Sequence[rl.Run], setting: Setting) -> dict[str, Any]:
    """Rows exchanged between a rejected branch and the accepted path: what does the model write next?

    Coins: rows of the face, and the next face. Others: rows of any rejected token, and the token after the next, for which the
    row is read by attention alone. Only pairs count where the rejected token changes it: elsewhere there is nothing to follow.
    Placebos: the row of another prompt with the token which is replaced, and any row of another prompt's answer.
    """
    words: dict[int, str] | None = None
    if setting.truth is not None:
        faces = [engine.text.encode(word, special=False) for word in (" heads", " tails")]
        if any(len(face) > 1 for face in faces):
            return {"note": "The faces are no single tokens."}
        words = {face[0]: name for face, name in zip(faces, ("heads", "tails"), strict=True)}
    pairs = _pairs(engine, runs, words, setting.layers)[: setting.pairs]
    pools = _pools(engine, runs[0], setting.layers)
    follow: dict[tuple[str, str], dict[int, dict[int, bool]]] = {}
    usable, random = 0, np.random.default_rng(0)
    for number, pair in enumerate(pairs):
        clean = {way: _next(engine, getattr(pair, way), [[]], words)[0] for way in ("taken", "drafted")}
        if clean["taken"] == clean["drafted"]:
            continue
        usable += 1
        for into, source in (("taken", "drafted"), ("drafted", "taken")):
            path = getattr(pair, into)
            rows = {OTHER: pair.rows[source]}
            thing = "token" if words is None else "face"
            own = {f"same {thing}": path[pair.at], f"other {thing}": getattr(pair, source)[pair.at], "any row": None}
            for name, token in own.items():
                others = [row for root, row in pools.get(token, []) if root != pair.root]
                if others:
                    rows[name] = others[random.integers(len(others))]
            names = [(name, layer) for name in rows for layer in setting.layers if layer < engine.config.num_layers]
            edits = [[rl.Edit(f"blocks.{layer}.hook_in", "set", rows[name][layer], positions=pair.at)] for name, layer in names]
            for (name, layer), said in zip(names, _next(engine, path, edits, words), strict=True):
                follow.setdefault((into, name), {}).setdefault(layer, {})[number] = said == clean[source]
    return {"pairs": len(pairs), "usable": usable, **_followed(follow, [pair.root for pair in pairs])}


OTHER = "the other branch's row"


def _followed(follow: dict[tuple[str, str], dict[int, dict[int, bool]]], roots: Sequence[str]) -> dict[str, Any]:
    """Shares of pairs that follow, and how many more follow the other branch's row than each placebo, on the same pairs."""
    table: dict[str, dict[str, Any]] = {}
    gains: dict[str, dict[str, Any]] = {}
    for (into, name), layers in follow.items():
        for layer, said in layers.items():
            own = [roots[pair] for pair in said]
            table.setdefault(f"into {into}: {name}", {})[f"S{layer}"] = share(list(said.values()), own)
            if name != OTHER:
                ours = [follow[into, OTHER][layer][pair] for pair in said]
                gains.setdefault(f"into {into}: minus {name}", {})[f"S{layer}"] = paired(ours, list(said.values()), own)
    return {"follows": table, "paired": gains}


def _pairs(engine: rl.Engine, runs: Sequence[rl.Run], words: dict[int, str] | None, layers: Sequence[int]) -> list[Pair]:
    found: dict[tuple[str, int], Pair] = {}
    for result in (each for done in runs for each in done):
        later = [p for p in range(result.num_prompt, len(result.tokens)) if words is None or result.tokens[p] in words]
        for branch in result.rejected:
            at = branch.fork_position
            following = next((p for p in later if p > at + (words is None)), None)
            known = words is None or branch.tokens[at] in words
            if at not in later or not known or branch.tokens[at] == result.tokens[at] or following is None:
                continue
            taken = list(result.tokens[:following])
            drafted = [*taken[:at], branch.tokens[at], *taken[at + 1 :]]
            sites = dict(zip(layers, _streams(engine, layers), strict=True))
            assert branch.activations is not None
            rows = {
                "taken": {layer: result.activations[site][at].float() for layer, site in sites.items()},
                "drafted": {layer: branch.activations[site][0].float() for layer, site in sites.items()},
            }
            found.setdefault((result.example.root, at), Pair(result.example.root, at, taken, drafted, rows))
    return list(found.values())


def _pools(engine: rl.Engine, done: rl.Run, layers: Sequence[int]) -> dict[int | None, list[Any]]:
    """Rows of the answers of accepted paths by token, and all of them under None: (root, layer -> row)."""
    pools: dict[int | None, list[Any]] = {None: []}
    sites = dict(zip(layers, _streams(engine, layers), strict=True))
    for result in done:
        length = len(result.activations[sites[layers[0]]])
        for at in range(result.num_prompt, min(len(result.tokens), length)):
            rows = {layer: result.activations[site][at].float() for layer, site in sites.items()}
            pools[None].append((result.example.root, rows))
            pools.setdefault(result.tokens[at], []).append((result.example.root, rows))
    return pools


def _next(engine: rl.Engine, path: list[int], variants: Sequence[Sequence[rl.Edit]], words: dict[int, str] | None) -> list[int]:
    """The likeliest token after a path under each list of edits, among the words if there are any."""
    known = None if words is None else list(words)
    best = engine.logits_under(path, variants, tokens=known).argmax(-1).tolist()
    return best if known is None else [known[each] for each in best]


# ---- (d) could the verification have known ---------------------------------------------------------------------------------


def confirmed(engine: rl.Engine, done: rl.Run) -> set[tuple[int, int]]:
    """(example, position) of every draft that was accepted.

    The other tokens of a path are the verifier's own: in place of a rejected draft, behind a window that was accepted as a
    whole, and wherever the drafter had nothing to propose, which is most of a story.
    """
    examples, begun, found = {result.branch: result.example.index for result in done}, dict[int, int](), set[tuple[int, int]]()
    for event in engine.trace.events:
        branch = event["branch"]
        if event["event"] == "draft":
            begun[branch] = event["at"]
        elif event["event"] == "verdict" and branch in examples:
            found |= {(examples[branch], begun[branch] + i) for i in range(event["accepted"])}
    return found


def foreseen(engine: rl.Engine, rows: rl.probes.ProbeRows, setting: Setting, confirmed: set[tuple[int, int]]) -> dict[str, Any]:
    """Area under the ROC curve for "this draft will be rejected": of its own row, and of what the row before it gives.

    Only drafts count: a probe that tells drafts from what nobody drafted has foreseen nothing. S0 holds the token alone.
    """
    frame = rows.frame
    place = list(zip(frame["example"], frame["position"], strict=True))
    accepted = frame["accepted"].to_numpy(dtype=bool) & np.array([key in confirmed for key in place])
    rejected = ~frame["accepted"].to_numpy(dtype=bool) & (frame["depth"].to_numpy() == 1)
    taken = {key: number for number, key in enumerate(place) if frame["branch"].iat[number] == 0}
    before = np.array([taken.get((e, p - 1), -1) for e, p in place])
    chosen = np.flatnonzero((accepted | rejected) & (before >= 0))
    bad, roots = rejected[chosen], frame["root"].to_numpy(dtype=str)[chosen]
    found: dict[str, Any] = {"drafts": len(chosen), "rejected": int(bad.sum())}
    if min(bad.sum(), (~bad).sum()) < 15:
        return found | {"note": "Too few drafts of one kind."}
    fold, layers, last = rl.probes.fold_of_groups(roots, FOLDS), _present(rows, setting), engine.config.num_layers
    outputs = {layer: output_before(engine, rows, before[chosen], chosen, layer) for layer in {*layers, last}}
    base = {BASELINE: _scores(outputs[last][:, 2:], bad, fold), **dict(zip(KNOWN, -outputs[last].T[:2], strict=True))}
    lens = {f"lens S{layer}": -outputs[layer][:, 0] for layer in layers if layer < last}
    probes = {f"before S{layer}": _scores(rows.matrix("S", layer)[before[chosen]], bad, fold) for layer in layers}
    own = {f"S{layer}": _scores(rows.matrix("S", layer)[chosen], bad, fold) for layer in layers}
    rivals = base | lens | probes
    areas = {name: _area(score, bad, roots, fold) for name, score in (rivals | own).items()}
    best = max(rivals, key=lambda name: areas[name]["value"])
    found |= {"baseline": BASELINE, "best baseline": best, "areas": areas}
    ways = {"gains": BASELINE, "gains over the token": "S0", "gains over the best": best}
    for name, rival in ways.items():
        found[name] = _gains(own, (rivals | own)[rival], bad, roots, fold)
    for name, kind, others in (("gains over the row before", "before", probes), ("gains over the lens", "lens", lens)):
        same = {layer: others[f"{kind} {layer}"] for layer in own if f"{kind} {layer}" in others}
        found[name] = {
            layer: _gains({layer: own[layer]}, rival, bad, roots, fold, len(same))[layer] for layer, rival in same.items()
        }
    return found


BASELINE = "entropy and margin"
KNOWN = ("log-probability", "behind the likeliest")
"""of the draft, in the model's output at the row before: what verification itself compares"""


def output_before(
    engine: rl.Engine, rows: rl.probes.ProbeRows, before: np.ndarray, drafts: np.ndarray, layer: int
) -> np.ndarray:
    """[drafts, 4] of the logit lens of a layer at the row before each draft, at the last one the model's output: the draft's
    log-probability, how far that is from the likeliest token's (0 or less), the entropy, the margin of the two likeliest."""
    tokens = rows.frame["token"].to_numpy()[drafts].tolist()
    residual = rows.source.take("S", layer, rows.numbers[before])
    z = read_lens(LensSpec(("S",), top_k=2), engine.runner, {"S": residual}, tokens)
    draft, top = z["Z.emitted"][:, 0], z["Z.top_logprobs"][:, 0]
    columns = [draft, draft - top[:, 0], z["Z.entropy"][:, 0], top[:, 0] - top[:, 1]]
    return np.column_stack([each.double().numpy() for each in columns])


def _gains(
    scores: dict[str, np.ndarray], rival: np.ndarray, bad: np.ndarray, roots: np.ndarray, fold: np.ndarray, calls: int = 1
) -> dict[str, Any]:
    """How much larger the areas are than the rival's. Intervals hold for all scores jointly, and for as many calls."""
    level = 1 - (1 - LEVEL) / calls
    gains = area_gains(list(scores.values()), rival, bad, roots, strata=fold, folds=FOLDS, level=level)
    return {name: dict(value=g.value, low=g.low, high=g.high) for name, g in zip(scores, gains, strict=True)}


def _scores(x: np.ndarray, bad: np.ndarray, fold: np.ndarray) -> np.ndarray:
    """Held-out log-odds of being rejected."""
    scores = np.zeros(len(bad))
    for k in range(FOLDS):
        scores[fold == k] = _probe().fit(x[fold != k].astype(np.float64), bad[fold != k]).decision_function(x[fold == k])
    return scores


def _area(score: np.ndarray, bad: np.ndarray, roots: np.ndarray, fold: np.ndarray) -> dict[str, Any]:
    found = area(score, bad, roots, strata=fold, folds=FOLDS)
    return dict(value=found.value, low=found.low, high=found.high)


# ---- figure ----------------------------------------------------------------------------------------------------------------


def draw(parts: dict[str, dict[str, Any]]) -> Figure:
    """One line per model and drafter: (a) and (b) at the layer where (a) is best, (c) and (d) at the first layer after S0."""
    lines = [
        (name, drafter) for name, part in parts.items() for drafter, told in part["drafters"].items() if "foreseen" in told
    ]
    made, axes = picture(4, width=2.9, height=1.0 + 0.17 * len(lines))
    for y, (name, drafter) in enumerate(lines):
        told = parts[name]["drafters"][drafter]
        layers = told["transfer"].get("layers", {})
        best = max(layers, key=lambda cell: layers[cell]["accepted to rejected"]["value"], default=None)
        shown = COLOURS[0 if told["transfer"].get("verdict", "").startswith("Shown:") else 1]
        if best is not None:
            found = layers[best]["accepted to rejected"]
            rival = found["value"] - min(each["value"] for each in layers[best]["above"].values())
            _mark(axes[0, 0], y, found, rival, shown)
        if parted_at := told["parted"]["layers"]:
            _mark(axes[0, 1], y, parted_at.get(best) or list(parted_at.values())[-1], parted_at["S0"]["value"], shown)
        follows = parts[name].get("exchange", {}).get("follows", {})
        if follows and drafter == next(d for n, d in lines if n == name):
            row, placebo = (
                next(list(each.values())[1] for way, each in follows.items() if way.startswith(f"into taken: {kind}"))
                for kind in ("the other", "other")
            )
            _mark(axes[0, 2], y, row, placebo["value"], COLOURS[2])
        areas = told["foreseen"].get("areas", {})
        cells = [cell for cell in areas if cell.startswith("S")]
        if cells:
            _mark(axes[0, 3], y, areas[cells[1]], areas[told["foreseen"]["baseline"]]["value"], COLOURS[3])
            for rival, colour in ((KNOWN[0], COLOURS[1]), (f"before {cells[1]}", COLOURS[2])):
                axes[0, 3].plot([areas[rival]["value"]], [y], color=colour, marker="|", markersize=7)
    titles = (
        "(a) rejected rows read\nby probes of accepted ones",
        "(b) follows the text\nwhere both part",
        "(c) rejected row copied in:\nnext token follows",
        "(d) will be rejected:\nAUC of the draft's own row",
    )
    rivals = (
        "best control; blue: shown",
        "the token alone",
        "its token, another prompt",
        "entropy and margin before it;\norange: log-probability, green: row before",
    )
    for axis, title, rival in zip(axes[0], titles, rivals, strict=True):
        axis.set(
            title=title, xlabel=f"grey: {rival}", xlim=(-0.04, 1.04), ylim=(len(lines) - 0.4, -0.6), yticks=range(len(lines))
        )
        axis.set_yticklabels([f"{n}: {d}" for n, d in lines] if axis is axes[0, 0] else [], fontsize=7)
        axis.tick_params(axis="y", length=0)
    return made


def _mark(axis: Any, y: int, found: dict[str, Any], rival: float | None, colour: str) -> None:
    """A value with its interval, and what it is compared with."""
    if found["low"] is not None:
        axis.plot([found["low"], found["high"]], [y, y], color=colour, linewidth=1.5)
    axis.plot([found["value"]], [y], color=colour, marker="o", markersize=4)
    if rival is not None:
        axis.plot([rival], [y], color=QUIET, marker="|", markersize=7)
