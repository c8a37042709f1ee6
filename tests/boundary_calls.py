"""Calls that no golden answer asks for, made in hostile modes by `tests/test_boundary.py`: what results, rows, estimators and
files tell besides, and what callers who build on the package use of it."""

import inspect
import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from datasets import Dataset
from rich.console import Console

import replaylens
from replaylens.dumps.maker import plan_of_run
from replaylens.dumps.plan import DumpPlan
from replaylens.engine.engine import Engine
from replaylens.engine.model.ops import SequenceOps
from replaylens.engine.passes.lens import TunedLens
from replaylens.engine.proof.doctor import numbers
from replaylens.engine.records import Identifier
from replaylens.engine.request.edits import Edit
from replaylens.engine.serving.request import Request
from replaylens.extras.bridges import formats, neuronpedia
from replaylens.features.rows import FeatureRows
from replaylens.probes.controls import make_goal
from replaylens.probes.intervals import Estimate
from replaylens.probes.positions import RowPosition, add_places
from replaylens.probes.questions.forced import forced_rows
from replaylens.probes.splits import by_part
from replaylens.rollouts.plan import Answer
from replaylens.tasks import splits, task, tokenizer
from replaylens.thinking.model import ThinkingConfig, ThinkingDecoder
from replaylens.training import embedded as embedded_plain
from replaylens.training import embedded_thinking, recipe, thinking
from replaylens.views import pictures
from replaylens.views.report import report as page_of
from tests import golden_calls, golden_more
from tests.digests import _sparse
from tests.golden import error
from tests.golden_calls import HEADS, PAIR, TAILS, coin, tiny, told
from tests.training.test_trainer import TINY_OF_THINKING

GROUPS: dict[str, Callable[[], dict[str, Any]]] = {}


def group(make: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    GROUPS[make.__name__.replace("_", " ").strip()] = make
    return make


def asked(value: Any, *without: str) -> dict[str, Any]:
    """All properties of an object, and what its methods give that need no argument."""
    found = dict[str, Any]()
    for name in dir(type(value)):
        held = inspect.getattr_static(type(value), name)
        if name.startswith("_") or name in ("close", "release", "plot", "save", "stream", *without):
            continue
        if isinstance(held, property | cached_property):
            found[name] = error(getattr, value, name)
        elif inspect.isfunction(held) and all(
            each.default is not each.empty or each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
            for each in [*inspect.signature(held).parameters.values()][1:]
        ):
            found[name] = error(getattr(value, name))
    return found


@group
def _rest() -> dict[str, Any]:
    """What results, rows, estimators and files tell besides."""
    rl, probes, folder = replaylens, replaylens.probes, Path(tempfile.mkdtemp())
    rows, engine, clean = golden_more.made_rows(), golden_calls.coin(record=True), golden_calls.HEADS
    x, y, groups = (
        np.asarray(rows.matrix("S", 1), np.float64),
        np.array(rows.target("topic").values),
        np.repeat(np.arange(30), 3),
    )
    chain, coin, answer = (
        engine.prompt(clean, sites="S"),
        rl.tasks.get("coin")(flips=(1, 3)),
        rl.Answer.regex("A: (heads|tails)"),
    )
    run, split, sparse = engine.replay(coin.examples(4), sites="S"), probes.by_root(rows, 3), _sparse("topk")
    patched = rl.patch(engine, clean, golden_calls.TAILS, metric=golden_calls.PAIR, layers=[1])
    dump, encoded = run.save(folder / "dump"), sparse.require(engine).of(chain)
    rolled = chain.resample(2, at=[9], max_new=2, answer=answer)
    texts = probes.RolloutTexts.of_frame(
        pd.DataFrame({"position": [3, 8, 8], "outcome": list("aba"), "units": [("x",)] * 3}), "yz"
    )
    report = probes.sweep(rows, "topic", layers=[1], estimators="ridge", positions="all", permutations=19)
    report.save(folder / "report")
    engine.trace.save(folder / "trace.json")
    with engine.variants(clean, keep=["blocks.1.hook_in"]) as base:
        varied = base.capture([[Edit("S", "scale", factor=0.3, layers=[0])]]), base.rows("blocks.1.hook_in"), base.stream(1)
    moments = probes.MomentStream(x.shape[1], sorted({*y}))
    moments.add(torch.from_numpy(x), y)
    fitted = {
        "attentive": probes.AttentiveProbe(steps=5).fit(x, y),
        "mean": probes.MassMeanProbe().fit(x, y),
        "sparse": probes.SparseProbe(k=2).fit(x, y),
        "chosen": probes.ESTIMATORS["logistic"].make().fit(x, y),
        "calibrated": probes.calibrated("logistic", x, y, groups, folds=3),
    }
    goal, train = make_goal(rows.target("topic")), np.stack([groups % 3 != fold for fold in range(3)])[None]
    solved = probes.solve("ridge", torch.from_numpy(x)[None], probes.one_hot((y == "c1")[None].astype(int), 2), train)
    verbs = ("predict", "predict_proba", "decision_function")
    return {
        "predicted": [error(getattr(each, verb), x[:5]) for each in fitted.values() for verb in verbs if hasattr(each, verb)],
        "attention": fitted["attentive"].attention(x[:5]),
        "moments": [asked(moments.moments()), moments.count, *moments.moments().class_means],
        "streamed": [
            probes.Leace().fit_moments(moments.moments()).transform(x[:3]),
            probes.MassMeanProbe().fit_moments(moments.moments()).decision_function(x[:3]),
        ],
        "solved": [solved.weight, solved.bias, solved.scores(torch.from_numpy(x)[None, :4])],
        "codes": [asked(each) for each in probes.online_codes(torch.from_numpy(x)[None], goal, [], groups)],
        "split": [asked(split), [*split], len(split), asked(split.check(rows))],
        "rows": [asked(rows), rows.target("topic")[np.arange(4)], asked(rows.about), len(rows.where(y == "c1"))],
        "report": [asked(probes.Report.load(folder / "report")), report.digest],
        "trace": len(rl.Trace.load(folder / "trace.json").events),
        "dump": [
            asked(dump.manifest.plan),
            asked(dump.array("S", 1)),
            error(list, dump.array("S", 1)),
            len(dump.array("S", 1)),
        ],
        "fingerprint": asked(engine.fingerprint),
        "run": run.digest,
        "rollouts": [asked(rolled[0]), [*rolled], asked(answer), answer.read("A: heads"), len(rolled.states)],
        "texts": [asked(texts), len(texts), asked(texts.where(np.array([True, False, True])))],
        "features": [asked(encoded), asked(sparse, "generate", "load"), len(encoded), len(sparse)],
        "branch": {name: getattr(chain, name) for name in ("generated", "root_length", "text")},
        "recorded": [asked(chain.activations, "handed_over", "take_over"), "blocks.1.hook_in" in chain.activations],
        "varied": varied,
        "patched": [type(patched).mean([patched, patched]), [asked(each) for each in patched.grids()]],
        "grids": [rl.lens(engine, clean, token=" tails").grid(), rl.attention(engine, clean, layers=[1]).grid(1, 0)],
        "unembedding": [engine.W_U, engine.W_E],
        "task": [asked(coin, "examples"), asked(coin.example(2)), asked(coin.example(2).reading)],
        "words": asked(rl.tasks.WordTokenizer(coin.vocabulary())),
        "stream": [*engine.prompt(clean).stream(2)],
    }


def _probe() -> Any:
    return replaylens.probes.fit_probe(golden_more.coin_run(), "face", layer=3, position="query")


@group
def _builders() -> dict[str, Any]:
    """What verbs are made of: requests, streams and branches under edits."""
    engine, edit = coin(), Edit("S", "scale", factor=0.3, layers=[0])
    spec, ids = engine.capture_spec("SZ", top_k=3, targets=[" heads"]), engine.tokens_of(HEADS)
    placed = engine.placed([edit], len(ids))
    plain, edited = engine.planted([ids, ids], spec, [(), placed])
    served = engine.serve([plain], [Request(3, window=2)])[0]
    stream = engine.open_stream(edited, Request(4))
    first = next(stream)
    engine.cancel(stream.job)
    closed, watch = engine.prompt(HEADS).stream(4), engine.watch({"face": _probe()})
    scored = [str(watch.scored), watch.unscored]
    watched = watch.stream(seen := watch.prompt(TAILS), 3)
    found = [next(closed), tuple(next(watched)), closed.close(), watched.close()]
    hybrid = tiny("a gated delta net").prompt(HEADS)
    with engine.variants(ids) as base:
        read = [base.lane.computed, base.read([[edit], []], [len(ids) - 1, 2], lambda logits: logits[..., :9])]
    return {
        "placed": [str(placed), engine.guesses(), engine.handle(plain.lane).tokens, engine.tokenized([edit])],
        "counts": [engine.require_positions("n", 5), error(engine.require_positions, "n", 10**6), str(spec)],
        "served": [told(served), told(edited), first, found, [*engine.stream(engine.prompt(TAILS), 2)]],
        "state": [error(hybrid.state, layer) for layer in range(2)],
        "variants": read,
        "watch": [scored, seen.activations.scores(watch.scored[0].name), engine.tokenizer.vocab_size],
        "turns": _turns(),
    }


def _turns() -> list[Any]:
    from tests.engine.serving.test_conversation import PLAIN, byte_tokenizer

    engine = Engine(tiny(vocab_size=258, max_positions=512).model, byte_tokenizer(PLAIN), cache_tokens=1024)
    with replaylens.Conversation(engine, [{"role": "user", "content": "2+2?"}]) as talk:
        talk.generate(4)
        found = [(turn.role, turn.content) for turn in talk.turns]
        talk.release()
    return found


@group
def _recorded() -> dict[str, Any]:
    """Rows of a branch, as those who take them over see them."""
    branch = coin().prompt(HEADS, sites="S").generate(2)
    rows, names = branch.activations, ("blocks.1.hook_in", "blocks.2.hook_in")
    part, other, copied = rows.fork(3), rows.fork(2), rows.fork(rows.end)
    part.truncate(2)
    other.take_over(rows)
    copied.append(rows.end - 1, {name: rows.peek(name)[-1:] * 0.5 for name in rows.sites()})
    return {
        "rows": [[rows.get(name), rows.peek(name), rows.pieces(name)] for name in names],
        "runs": [block[name][at : at + count] for name in names for block, _, at, count in rows.runs([name])],
        "none": [rows.get("nothing"), rows.has_scores("x"), rows.num_valid(4, 1), str(rows.place(3)[1:])],
        "forked": [part[names[0]], other[names[0]], copied[names[0]], copied.handed_over()],
    }


@group
def _explored() -> dict[str, Any]:
    """The living tree: its actions, what it tells pages, and a page that is saved and replayed."""
    rl, folder, heard = replaylens, Path(tempfile.mkdtemp()), list[dict[str, Any]]()
    w = rl.explore(coin(), HEADS, edits={"half": Edit("T", "scale", factor=0.5, layers=[0])})
    root, stop = w.root.id, w.listen(heard.append)
    end = w.generate(root, 4)
    w.fork(root, at=5)
    (forced,) = w.force(root, at=5, text=" Bob")
    (edited,) = w.edit(root, at=5, name="half", n=3, temperature=1.0)
    drawn = w.resample(root, at=end, n=3, max_new=2, temperature=2.0)
    w.rollback(edited, to=7)
    w.undo()
    told = (
        [w.read(each, 0, 40) for each in (root, forced, edited)],
        w.look(root, 4, 1),
        w.values(root, 4, "blocks.1.hook_attn_out"),
    )
    plain = {"rows": w.rows(root, 0, 40), "found": w.find("flips"), "code": len(w.python()), "parts": drawn["parts"]}
    apart = {key: value for key, value in w.compare(root, edited).items() if key != "words"}
    w.pin(root, 3), w.select([forced], 4), w.pause(), w.resume(), w.stop(), w.refresh(), stop()
    seen = [w.handle({"id": 1, "do": "ping"}), w.ping(), w.position, len(w.pins), w.selection.tokens, w.branch(forced).tokens]
    with w.serve():
        shape = [(line["start"], line["end"]) for line in w.shape()], len(w.tree())
    replayed = rl.replay_page(w.save(folder / "tree.html"), engine=w.engine)
    bundle = sorted(w._repr_mimebundle_())
    other = w.branch(forced).explore().tree()["layers"]
    made = {"same": replayed.same, "said": str(replayed), "events": len(heard), "bundle": bundle, "other": other}
    return {"told": told, "plain": plain, "apart": apart, "seen": seen, "shape": shape, "made": made}


@group
def _files() -> dict[str, Any]:
    """Plans, identifiers, lenses, bundles and pages."""
    rl, folder, engine, run = replaylens, Path(tempfile.mkdtemp()), coin(record=True), golden_more.coin_run()
    plan = golden_more.steps_dump().manifest.plan
    again = DumpPlan.from_json(json.loads(json.dumps(plan.to_json())))
    rolled = engine.prompt(HEADS).resample(2, at=[9], max_new=2, answer=(answer := Answer.regex("A: (heads|tails)")))
    branch = engine.prompt(HEADS, sites="S").generate(3, drafter="lens", window=3)
    drawn = pictures.timeline(engine.trace, branch.id, str)
    patched = rl.patch(engine, HEADS, TAILS, metric=PAIR, layers=[1])
    pairs = rl.attribution_patching(engine, HEADS, TAILS, PAIR)
    engine.trace.add("noted", number=3)
    about = {"id": "a", "name": "b", "author": "c", "category": "deception", "modelId": "e/f", "license": "MIT", "tasks": ["t"]}
    probe = _probe()
    formats.to_probebench(probe, folder / "bench", about)
    console = Console(file=(folder / "drawn").open("w"), width=100)
    console.print(branch.tree(), drawn)
    console.file.close()
    made = neuronpedia.graph(
        [{"kind": "embedding", "position": 0, "token": 5, "label": "A"}],
        [],
        tokens=["A"],
        model="m",
        slug="s",
        num_layers=2,
        source_set="o",
    )
    (folder / "graph.json").write_text(json.dumps(made))
    site = next(iter(golden_more.steps_dump().manifest.sites.values()))
    report = rl.probes.sweep(golden_more.made_rows(), "topic", layers=[1], estimators="ridge", positions="all", permutations=0)
    report.save(folder / "report")
    page = page_of(folder / "page.html", results=[patched], title="All")
    return {
        "plan": [
            plan.differences(replace(plan, examples_per_shard=3)),
            plan.differences(again),
            again.indices(0),
            again.place.kind,
        ],
        "site": [
            site.row_bytes,
            np.asarray(golden_more.steps_dump().array("S", 1)),
            np.array(golden_more.steps_dump().array("S", 1), np.float64),
        ],
        "cited": [
            pairs.digest,
            rolled.read_by_function,
            str(run.cite()),
            str(rolled.cite()),
            str(Identifier.parse(str(patched.cite().identifier))),
            patched.digest,
        ],
        "answer": [answer.certain("A: heads"), Answer.from_json(answer.to_json())],
        "means": [type(patched).mean([patched, patched]).frame, type(pairs).mean([pairs, pairs]).frame],
        "required": [
            engine.trace.require(engine.fingerprint),
            engine.fingerprint.differences(tiny().fingerprint),
            len(engine.trace.events),
        ],
        "drawn": [
            (folder / "drawn").read_text(),
            drawn.capacity,
            drawn.interest,
            drawn.first(),
            drawn.still(drawn.frames[-1]),
            [each.beside for each in drawn.frames],
        ],
        "saved": [
            len(drawn.save(folder / "boards")),
            page.name,
            rl.probes.Report.load(folder / "report").strays(folder / "report"),
        ],
        "bundles": [formats.from_probebench(folder / "bench").weight, neuronpedia.read_graph(folder / "graph.json")],
    }


@group
def _lenses_and_features() -> dict[str, Any]:
    engine = tiny()
    lens = TunedLens(numbers(5, 2, 40, 40) / 9, numbers(6, 2, 40), "")
    sparse = _sparse("topk")
    dense = numbers(7, 5, 12).relu()
    rows = FeatureRows.of_dense([dense[:2], dense[2:]], 12)
    graph = golden_calls.GROUPS["graphs"]()["small"]
    return {
        "lens": [lens.translate(numbers(8, 4, 3, 40)), lens.digest, error(lens.require, engine.model)],
        "features": [sparse.site_in(coin()), sparse.site_out(coin()), rows.rows_of_entries, rows.dense()],
        "graph": [[each.key for each in graph.nodes], [each.key for each in graph.targets]],
    }


@group
def _rows_and_splits() -> dict[str, Any]:
    rl, p, made, engine = replaylens, replaylens.probes, golden_more.made_rows(), coin()
    run = golden_more.coin_run()
    rows, groups = p.ProbeRows.of(run), [f"doc {i // 3}" for i in range(90)]
    plan = plan_of_run(engine, run[0].example.maker, [0, 1], run.options)
    examples = rl.tasks.get("coin")(flips=(1, 3)).examples(4)
    streamed = p.fit_streaming(engine, examples, "face", ["heads", "tails"], position="all", sites="S", max_new=3)
    x, y = np.asarray(made.matrix("S", 1), np.float64), np.array(made.target("topic").values)
    two = p.ProbeRows.join(**{name: p.ProbeRows.of_arrays(x + i, {"y": y}, groups=groups) for i, name in enumerate("ab")})
    split, position = p.by_root(made, 3), rows.position("query")
    pairs = np.concatenate([x[:30], 0.1 - x[:30]], 1)
    null = p.permutation_test(made, "topic", layer=1, position="all", permutations=9, folds=3)
    more = type(streamed)("face", ["heads", "tails"], "S", "all")
    more.add(rows)
    table = Dataset.from_dict({"v": x.tolist(), "y": y.tolist(), "g": groups})
    estimate = Estimate(0.5, 0.25, 0.75)
    return {
        "streamed": [{str(cell): [each.mean, each.covariance] for cell, each in m.moments().items()} for m in (streamed, more)],
        "fitted": [each.decision_function(numbers(9, 3, 128).numpy()) for each in more.fit("mass-mean").values()],
        "places": [
            len(rows.at_position(position)),
            position.mask(add_places(rows.frame, None)),
            str(RowPosition.parse("step-1")),
        ],
        "cells": [str(rows.cell("S", 1)), str(rows.cells("S", [0, 2])), rows.known("face"), error(rows.require, engine)],
        "results": p.ProbeRows.of_results(engine, plan, run.results[:2]).frame,
        "forced": forced_rows(engine, examples, [" heads."] * 4).frame,
        "split": [*split[y == "c1"], *by_part(two, "a", "b")],
        "ccs": p.CcsProbe(tries=2, steps=20).fit(pairs, y[:30] == "c0").decision_function(pairs),
        "chosen": p.ESTIMATORS["logistic-cv"].make().fit(x, y, groups=np.arange(90) // 3).decision_function(x[:4]),
        "kinds": [replace(each).kinds for each in p.ESTIMATORS.values()],
        "dataset": p.ProbeRows.of_dataset(table, "v", "y", "g").matrix("X"),
        "null": [null.standard(), 0.3 in estimate, 0.8 in estimate],
    }


@group
def _texts_of_tasks() -> dict[str, Any]:
    """Tasks and words, which hold integers and texts."""
    kind, folder = replaylens.tasks.get("coin"), Path(tempfile.mkdtemp())
    made = kind(flips=(1, 3))
    words, example = tokenizer.WordTokenizer(made.vocabulary()), made.example(2)
    ids = words.encode(example.text)
    words.save(folder / "words.json")
    copies = [tokenizer.WordTokenizer.load(folder / "words.json"), tokenizer.WordTokenizer.from_json(words.to_json())]
    sides = [splits.Side(made, 3, test) for test in (False, True)]
    return {
        "words": [
            ids,
            words.decode(ids),
            words.decode_with_offsets(ids),
            words.id(" heads"),
            len(words),
            [each == words for each in copies],
        ],
        "offsets": tokenizer.path_offsets(words, ids),
        "labels": [
            example.reading.labels_after(30),
            example.reading.labels_at([(0, 5), (20, 30)]),
            example.read(" heads.").labels_after(40),
        ],
        "task": [
            made == kind(flips=(1, 3)),
            made.answers(),
            made.next_action_chance(),
            made.outcomes(example.prompt),
            made.thoughts(example),
            made.knobs.canonical(),
        ],
        "story": [type(made.scene()).__name__, str(made.write(task.Draws("coin", 2)))],
        "sides": [[len(each), [one.text for one in each.examples()]] for each in sides],
        "kept": [
            splits.is_test_root(example.root),
            next(iter(splits.kept(made, lambda one: not splits.is_test_root(one.root), "train"))).text,
        ],
        "ranges": [
            task.as_range("n", 3),
            task.require_room_for(range(3)),
            error(task.check_range, "n", (0, 9), least=1, most=5),
            str(task.knob(3, "a number").default),
        ],
        "registered": error(replaylens.tasks.register, kind),
    }


@group
def _training_of_thoughts() -> dict[str, Any]:
    """Models that think: their parts, recipes and files."""
    folder, backbone = Path(tempfile.mkdtemp()), tiny(num_layers=4).model
    thinks = ThinkingConfig.for_backbone(backbone.config, 3, 1, 0, max_thought=4)
    model = ThinkingDecoder.around(backbone, thinks).requires_grad_(False).eval()
    tokens, at = torch.tensor([5, 6, 7, 8]), torch.arange(4)
    ops = SequenceOps([4])
    embedded = embedded_thinking.recipe(embedded_thinking.names()[0])
    trained, words = thinking.train(replace(TINY_OF_THINKING, steps=2)), TINY_OF_THINKING.tokenizer()
    embedded_thinking.save(trained, words, folder / "model")
    loaded, read = embedded_thinking.load(folder / "model")
    usual, _ = embedded_thinking.load_embedded(embedded_thinking.names()[0])
    plain = replace(embedded_plain.recipe("coin-plain"))
    part, other = TINY_OF_THINKING.parts[0], embedded_thinking.for_task(embedded, "shell", 2, 6, 4)
    return {
        "passes": [*model(tokens, at, numbers(9, 4, 40), ops), model.run_compress(tokens, at, ops)],
        "thoughts": [
            model.thought_embedding(tokens, at),
            model.run_think(numbers(9, 4, 40), at, ops),
            model.thought_logits(numbers(9, 4, 40), ops),
        ],
        "config": [
            thinks.check(backbone.config),
            thinks.compressed,
            thinks.layers,
            thinks.read_site,
            thinks.write_site,
            ThinkingConfig.from_json(thinks.to_json()) == thinks,
        ],
        "trained": [*trained.parameters(), *loaded.parameters(), read == words, next(iter(usual.parameters()))],
        "recipes": [
            other.to_json(),
            embedded.to_json(),
            plain.to_json(),
            plain.sequences,
            plain.tokenizer().vocab_size,
            part.of_length(1, 0).example(0).text,
        ],
        "folders": [
            error(recipe.backbone_folder, "nowhere"),
            recipe.load_tokenizer(folder / "model") == words,
            recipe.tokenizer_files(words),
            error(embedded_thinking.around, embedded, "nowhere", 4, 4),
        ],
    }
