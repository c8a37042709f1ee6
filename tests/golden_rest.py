"""Calls of `tests/golden.json` that the other groups do not reach: other forms of input, saved files, rarer models."""

import json
from pathlib import Path
from tempfile import mkdtemp
from typing import Any
from unittest.mock import patch

import numpy as np
import pandas as pd
import torch

from replaylens.engine.model.decoder import Decoder
from replaylens.engine.proof.doctor import numbers
from tests.digests import _sparse, model_of
from tests.golden import bits, error
from tests.golden_calls import GROUPS, HEADS, LONGER, PAIR, TAILS, coin, group, rl, tasks, tiny, told
from tests.golden_more import coin_run, made_rows, report, steps_dump

__all__ = ["GROUPS"]


@group
def _gradients_of_more_models() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in (
        "experts with a shared one",
        "experts in groups",
        "sparsemixer",
        "latent attention",
        "slopes",
        "caps, windows and second norms",
        "layer norms, biases, learned positions",
        "a gated model with norms of heads",
        "YaRN",
    ):
        engine = tiny(name)
        branch = engine.prompt(HEADS)
        (edited,) = branch.fork(
            edits=[
                rl.Edit("S", "add", numbers(3, 40), layers=[1], positions=[2, 5]),
                rl.Edit("T", "set", numbers(4, 40), layers=[0], positions=3),
            ]
        )
        sites = [site for site in engine.sites.sites if "hook_in" in site and "gate" not in site and "pattern" not in site]
        for what, each in {"": branch, " edited": edited}.items():
            made = error(each.gradients, PAIR, sites=sites)
            found[name + what] = made if isinstance(made, Exception) else {site: bits(made[site]) for site in sorted(made)}
    pairs = rl.attribution_patching(coin(), [HEADS, TAILS], [TAILS, HEADS], [PAIR, PAIR[::-1]], sites="T")
    return found | {"pairs": pairs}


@group
def _small_caches() -> dict[str, Any]:
    """Branches that give up pages to others, share prefixes and come back."""
    found: dict[str, Any] = {}
    for name in ("", "latent attention", "a gated delta net", "caps, windows and second norms"):
        engine = tiny(name, cache_tokens=64, page_size=8, record=True)
        roots = engine.prompts([HEADS, TAILS, LONGER], sites="S")
        forks = [fork for root in roots for fork in root.fork(2)]
        made = error(
            engine.generate,
            forks,
            9,
            sampling=[rl.Sampling(temperature=1.0, seed=i) for i in range(6)],
            drafter="lens",
            window=2,
        )
        found[name] = made if isinstance(made, Exception) else [each.tokens for each in forks]
        found[f"{name} rows"] = bits(*(each.activations["blocks.1.hook_in"] for each in forks))
        forks[0].rollback(to=roots[0].length + 2)
        again = engine.prompt(HEADS)
        found[f"{name} again"] = (
            bits(again.kv()),
            bits(forks[0].kv()),
            forks[0].generate(3).tokens[-4:],
            engine.check_integrity(),
            str(engine),
        )
        for each in forks[2:]:
            each.release()
        found[f"{name} released"] = (
            engine.check_integrity(),
            error(forks[3].generate, 1),
            [event["event"] for event in engine.trace.events],
        )
    return found


@group
def _verbs_of_transformer_lens() -> dict[str, Any]:
    engine, found = tiny("layer norms, biases, learned positions"), {}
    for kind in ("logits", "loss", "both", None):
        for given in ({}, {"loss_per_token": True}, {"stop_at_layer": 1}):
            made = error(engine, [HEADS, TAILS], return_type=kind, **given)
            found[f"{kind} {sorted(given)}"] = made
    for where in (None, -1, 3, (2, 5), slice(-3, None), slice(-30, 2)):
        where = slice(*where) if isinstance(where, tuple) else where
        made = error(engine.run_with_cache, HEADS, names_filter="blocks.0.hook_in", pos_slice=where)
        found[f"slice {where}"] = made if isinstance(made, Exception) else made[1]["blocks.0.hook_in"]
    for bare, plain in ((True, False), (False, False), (True, True)):
        names, given = ["embed.hook_in", "blocks.1.attn.hook_k"], {"remove_batch_dim": bare, "return_cache_object": plain}
        logits, cache = engine.run_with_cache(TAILS, names_filter=names, pos_slice=slice(1, 4), **given)
        found[f"batch removed {bare}, object {plain}"] = [logits, dict(cache.items())]
    _, cache = engine.run_with_cache(HEADS)
    found["cache"] = {name: bits(cache[name]) for name in list(cache)}
    found["parts"] = [
        error(cache.decompose_resid, return_labels=True),
        error(cache.accumulated_resid),
        error(cache.stack_head_results),
        error(cache.logit_attrs, cache.accumulated_resid(), " heads"),
    ]
    found["strings"] = [
        engine.to_string([3, 4]),
        engine.to_string([[3, 4], [5]]),
        error(engine.to_string, 3),
        error(engine.to_single_token, " heads"),
        error(engine.to_single_token, " heads tails"),
    ]
    with engine.hooks([("blocks.1.hook_in", lambda x, hook: x * 0.5)]) as hooked:
        found["hooks"] = hooked(HEADS)
    engine.add_hook(lambda name: name.endswith("attn.hook_out"), lambda x, hook: x + 1)
    found["added"] = engine(HEADS)
    engine.reset_hooks()
    found["reset"] = engine(HEADS)
    return found


@group
def _texts() -> dict[str, Any]:
    engine, folder = coin(), Path(mkdtemp())
    lines = [{"q": HEADS, "up": True, "n": 3}, {"q": TAILS, "up": False, "n": 1.5}]
    (folder / "t.jsonl").write_text("\n".join(map(json.dumps, lines)))
    root = engine.prompt(HEADS, edits=[rl.Edit("S", "zero", layers=[1], positions=-1)])
    root.generate(2)
    span = [[{"start": 18, "end": 23, "value": "up"}, {"start": 20, "end": 30, "value": "down"}], None]
    made = {
        "jsonl": lambda: engine.texts(str(folder / "t.jsonl"), text="q", labels=["up", "n"]),
        "frame": lambda: engine.texts(pd.DataFrame(lines), text="q", labels=["up"]),
        "columns": lambda: engine.texts({"q": [HEADS, TAILS], "up": [1, 0]}, text="q", labels=["up"]),
        "records": lambda: engine.texts(lines, text="q", labels=["n"]),
        "spans": lambda: engine.texts(
            [HEADS, TAILS], labels={"face": span, "zero": [0, 0.5], "each": [[False, None] * 7 + [True], [0] * 15]}
        ),
        "branch": lambda: engine.texts([root], labels={"own": [""]}),
        "ids": lambda: engine.texts([[3, 4, 5], np.array([6, 7])]),
        "wrong column": lambda: engine.texts(lines, text="z"),
        "wrong count": lambda: engine.texts([HEADS], labels={"a": [1, 2]}),
        "wrong length": lambda: engine.texts([HEADS], labels={"a": [[1, 2]]}),
        "wrong span": lambda: engine.texts([HEADS], labels={"a": [[{"start": 9, "end": 3, "value": 1}]]}),
        "wrong types": lambda: engine.texts([HEADS, TAILS], labels={"a": ["x", 1]}),
        "reserved": lambda: engine.texts([HEADS], labels={"shuffled": [1]}),
        "nothing": lambda: engine.texts([]),
    }
    found: dict[str, Any] = {}
    for name, call in made.items():
        task = error(call)
        if not isinstance(task, Exception):
            run = engine.replay(task, sites="S", max_new=1)
            dump = run.save(folder / name, positions="all")
            task = {"str": str(task), "index": dump.index, "digest": dump.digest, "plan": str(dump.manifest.plan.knobs)[:400]}
        found[name] = task
    return found


@group
def _arrays() -> dict[str, Any]:
    x = numbers(31, 12, 4)
    frame = pd.DataFrame(
        {
            "v": list(x.numpy()),
            "a": x[:, 0],
            "b": x[:, 1],
            "y": ["p", "q"] * 6,
            "g": np.arange(12) // 2,
            "at": np.arange(12) % 2,
            "t": ["u", "w", "x"] * 4,
        }
    )
    cache = {"blocks.0.hook_in": x.reshape(3, 4, 4), "blocks.1.attn.hook_out": -x.reshape(3, 4, 4)}
    tokens = np.arange(12).reshape(3, 4) % 5
    made = {
        "pandas": lambda: rl.probes.ProbeRows.of_pandas(frame, "v", "y", "g", position="at", token="t"),
        "columns": lambda: rl.probes.ProbeRows.of_pandas(frame, ["a", "b"], ["y", "at"], "g"),
        "sites": lambda: rl.probes.ProbeRows.of_pandas(frame, {("S", 1): "v", "own": ["a"]}, "y", "g"),
        "cache": lambda: rl.probes.ProbeRows.of_cache(cache, tokens, {"y": ["p", "q", "p"]}, mask=tokens > 0),
        "cache by token": lambda: rl.probes.ProbeRows.of_cache(cache, tokens, {"y": [[1, 2, 1, 2]] * 3}, groups=[0, 0, 1]),
        "torch": lambda: rl.probes.ProbeRows.of_arrays(
            {"own": x}, {"y": torch.arange(12) % 3}, groups=torch.arange(12) // 3, keys=np.arange(12) // 2
        ),
        "no groups": lambda: rl.probes.ProbeRows.of_pandas(frame, "v", "y"),
        "no column": lambda: rl.probes.ProbeRows.of_pandas(frame, "z", "y", "g"),
        "nan": lambda: rl.probes.ProbeRows.of_arrays(x * np.nan, {"y": [1] * 12}, groups=range(12)),
        "shape": lambda: rl.probes.ProbeRows.of_cache(cache, tokens[:2], {"y": [1, 2]}),
    }
    found: dict[str, Any] = {}
    for name, call in made.items():
        rows = error(call)
        found[name] = (
            rows
            if isinstance(rows, Exception)
            else {
                "frame": rows.frame,
                "str": str(rows),
                "target": rows.target("y"),
                "digest": rows.about.digest,
            }
        )
    return found


@group
def _saved_probes() -> dict[str, Any]:
    from replaylens.extras.bridges import formats, neuronpedia

    folder, engine = Path(mkdtemp()), coin()
    rows, three = made_rows(), made_rows(3)
    probe = rl.probes.fit_probe(coin_run(), "face", layer=3, position="query")
    several = rl.probes.fit_probe(three, "topic", layer=1, position="all")
    again = rl.probes.LinearProbe.load(probe.save(folder / "face"))
    found: dict[str, Any] = {
        "direction": probe.direction("heads", "tails"),
        "gap": probe.gap("heads", "tails"),
        "basis": probe.basis,
        "three": several.direction("c0", "c2"),
        "three basis": several.basis,
        "again": (again.weight, again.classes, str(again), again.digest == probe.digest),
        "shuffled": rl.probes.fit_probe(rows, "topic", layer=1, position="all", shuffled=True).weight,
        "required": error(again.require, tiny()),
        "no class": error(probe.direction, "heads", "edge"),
    }
    about = {"id": "a", "name": "b", "author": "c", "category": "d", "modelId": "e/f", "license": "MIT", "tasks": []}
    bundle = error(formats.to_probebench, probe, folder / "bench", about)
    found["bench"] = (
        bundle
        if isinstance(bundle, Exception)
        else (formats.from_probebench(bundle).weight, (folder / "bench" / "meta.json").read_text())
    )
    dump = coin().replay(tasks.get("coin")(flips=(1, 2)).examples(4), sites="S").save(folder / "dump")
    written = error(formats.to_lmprobe, dump, folder / "lmprobe", model="x/y", label="face")
    read = written if isinstance(written, Exception) else formats.from_lmprobe(written)
    found["lmprobe"] = read if isinstance(read, Exception) else read.frame
    sae = _sparse("topk")
    branches = engine.prompts([HEADS, TAILS], sites="S")
    found["feature"] = neuronpedia.feature(
        sae, sae.of(branches[0]).strongest(1)[0], branches, transcoder="t", examples=2, logits=3
    )
    featured = (
        coin()
        .replay(tasks.get("coin")(flips=(1, 2)).examples(4), sites="S")
        .save(folder / "featured", features={"sae": sae}, keep=3)
    )
    found["dumped features"] = (featured.features("sae").frame(), featured.to_torch("features.sae.counts"), featured.digest)
    watch = engine.watch({"face": probe})
    found["watched"] = (
        engine.replay(tasks.get("coin")(flips=(1, 2)).examples(3), sites="S")
        .save(folder / "watched", watch=watch)
        .to_torch("probes.face")
    )
    wider = rl.probes.with_features(rl.probes.ProbeRows.of(featured), sae, [1, 5, 9])
    found["wider"] = (str(wider), error(wider.matrix, "features", None))
    found["sequences"] = error(rl.probes.sequences, rl.probes.ProbeRows.of(coin_run()), "face", "S", 3, ["query-1", "query"])
    with patch.object(Decoder, "initialize", lambda self, seed: model_of(self.config, seed + 1)):  # torch's differ by processor
        blank = rl.probes.untrained_rows(rl.probes.ProbeRows.of(coin_run()).renumbered(), engine, ["S"])
    found["untrained"] = bits(torch.as_tensor(blank.matrix("S", 2)))
    x, y = np.asarray(three.matrix("S", 1), dtype=np.float64), np.array(three.target("topic").values)
    found["calibrated"] = error(lambda: rl.probes.calibrated("logistic", x, y, three.roots, folds=3).predict_proba(x[:4]))
    found["attentive"] = error(
        lambda: rl.probes.AttentiveProbe().fit(x.reshape(45, 2, 6), y[::2]).predict(x.reshape(45, 2, 6)[:6])
    )
    report_ = rl.probes.sweep(rows, "topic", permutations=0)
    report_.save(folder / "report")
    found["report"] = (
        sorted(each.name for each in (folder / "report").iterdir()),
        pd.read_csv(folder / "report" / "table.csv"),
        report_.best("topic"),
        report(rl.probes.Report.load(folder / "report")),
    )
    found["codes"] = error(
        lambda: report(
            rl.probes.sweep(three, "topic", permutations=0, code_length=True, groups=np.arange(90) // 9, estimators="logistic")
        )
    )
    return found


@group
def _thinking_forks() -> dict[str, Any]:
    engine = rl.Engine.load("coin-thinking", record=True)
    root = engine.prompt("A coin's state is heads. Alice flips,", sites="S")
    grown = error(root.extend, " then Bob flips. What's the state? A:")
    found: dict[str, Any] = {
        "root": told(root),
        "grown": grown if isinstance(grown, Exception) else told(grown.generate(2)),
        "tree": str(root.tree()),
        "timeline": str(error(root.timeline)),
    }
    (edited,) = root.fork(edits=[rl.Edit("S", "add", numbers(5, 96), layers=[2], positions=[4])])
    found["edited"] = (told(edited), bits(edited.activations["blocks.1.hook_in"]), str(edited.tree()))
    early = root.fork(at=5)[0]
    found["early"] = told(early.generate(3))
    for guess in ("empty", "copy", "last", "oracle"):
        made = error(rl.Engine.load, "coin-thinking", guess=guess)
        found[f"guess {guess}"] = made if isinstance(made, Exception) else (made.guesses(), told(made.prompt(HEADS)))
    run = rl.Engine.load("coin-thinking").replay(tasks.get("coin")(flips=(1, 3)).examples(3), sites="STC")
    dump = run.save(Path(mkdtemp()) / "thinking")
    found["dump"] = (dump.digest, dump.index, str(dump))
    return found


@group
def _rarer() -> dict[str, Any]:
    """Rollouts from files, commands about them, feeds that continue, plans with edits, a tuned lens."""
    from typer.testing import CliRunner

    from replaylens.cli import app
    from replaylens.engine.passes.lens import TunedLens, train

    folder, engine, dump = Path(mkdtemp()), coin(), steps_dump()
    chain = engine.prompt("A coin's state is heads.").force(" Alice flips. Bob flips.")
    drawn = chain.resample(3, at="sentences", max_new=5, sites="S", keep=["fork", "last", 1], folder=folder / "r", wave=2)
    loaded = rl.Rollouts.load(folder / "r")
    feed = dump.feed([("S", 2)], batch_size=100, seed=1, epochs=None)
    batches = iter(feed)
    first = [next(batches)["row"] for _ in range(3)]
    later = dump.feed([("S", 2)], batch_size=50, seed=1, epochs=None)
    later.load_state_dict(feed.state_dict())
    edit = rl.Edit("S", "add", numbers(8, 128), layers=[2], positions=slice(-4, -1), when=numbers(9, 128), above=0.5)
    edited = engine.replay(tasks.get("coin")(flips=(1, 2)).examples(3), sites="S", edits=[edit]).save(
        folder / "edited", examples_per_shard=2
    )
    small = tiny()
    rows = torch.stack([small.prompt(HEADS, sites="S").activations[site] for site in small.sites.per_layer("S")], 1)
    with torch.enable_grad():
        lens = train(small.model, rows, steps=3, batch=4)
    lens.save(folder / "lens")
    found: dict[str, Any] = {
        "loaded": (
            loaded.frame,
            loaded.index,
            {site: bits(x) for site, x in loaded.states.items()},
            loaded.digest == drawn.digest,
        ),
        "streamed": [each.text for each in chain.stream_rollouts(2, max_new=3)],
        "feed": (first, next(iter(later))["row"], later.state_dict()),
        "loader": [
            batch["row"] for batch in dump.where(accepted=True).feed([("S", 2)], batch_size=500, seed=1).loader(workers=0)
        ],
        "activations": [len(each) for each in dump.feed([("S", 2)], batch_size=1000, drop_last=True).activations()],
        "edited": (edited.digest, str(edited.manifest.plan.edits)),
        "lens": (lens.weight, lens.bias, rl.lens(small, TAILS, tuned=TunedLens.load(folder / "lens"))),
        "dataset": error(lambda: dump.to_dataset([("S", 2)])[3]["position"]),
        "within": [
            len(dump.where(example=[1, 2])),
            len(dump.where(position=range(3, 5))),
            len(dump.where(face="heads", depth=2)),
        ],
        "own": report(
            rl.probes.sweep(
                coin_run(),
                "face",
                layers=[3],
                positions=["query"],
                permutations=0,
                engine=engine,
                estimators="ridge",
                untrained=True,
            )
        ),
        "replayed": [told(each) for each in engine.prompts([HEADS, [3, 4, 5]])],
        "bursts": told(coin().prompt(HEADS).generate(9, deterministic=False, final=True)),
    }
    for name, line in {
        "tasks json": ["tasks", "list", "--json"],
        "show json": ["tasks", "show", "coin", "--n", "1", "--json"],
        "verify rollouts": ["verify", str(folder / "r")],
        "inspect edited": ["inspect", str(folder / "edited")],
        "diff": ["diff", dump.url, str(folder / "edited")],
        "replay json": ["replay", "--n", "1", "--json"],
        "doctor help": ["doctor", "--help"],
        "probe json": [
            "probe",
            dump.url,
            "--label",
            "face",
            "--layers",
            "3",
            "--positions",
            "step",
            "--estimators",
            "ridge",
            "--permutations",
            "0",
            "--json",
        ],
    }.items():
        done = CliRunner(env={"COLUMNS": "300"}).invoke(app, line)
        found[f"$ {name}"] = (done.exit_code, done.output, str(done.exception or ""))
    return found
