"""Other tools' files of activations and probes: lmprobe's dataset format 2.0, and ProbeBench's bundles.

Both are data. Names of files come from the formats, never from a file's own metadata; nothing is unpickled.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, load_file, save
from torch import Tensor

from replaylens import __version__
from replaylens.dumps.reader import Dump
from replaylens.engine.errors import BadDump, BadFile, BadRequest
from replaylens.engine.files import appearing_folder, saves_of, write_file, write_pair
from replaylens.engine.request.values import as_int, as_list, as_path, short_repr, verb
from replaylens.probes.probe import LinearProbe
from replaylens.probes.rows import Cell, ProbeRows

# ---- lmprobe ---------------------------------------------------------------------------------------------------------
# Format 2.0 of lmprobe's activation datasets: a Parquet index with one line per prompt, whose schema metadata says what there
# is, and safetensors files of one layer and one shard each. Layer l is the residual stream after block l. The last token of
# every prompt is in the shards that come first, so that probes of last tokens need only those.

INDEX, VERSION = Path("index") / "train-00000-of-00001.parquet", "2.0"
_PREFIX = "lmprobe:"
_STREAM = re.compile(r"blocks\.(\d+)\.hook_(in|out)")


def _shard(layer: int, shard: int) -> Path:
    return Path("tensors") / f"hidden_layer{layer:03d}_shard{shard:03d}.safetensors"


def _key(layer: int) -> str:
    return f"hidden.layer_{layer}"


def _after_block(site: str) -> int | None:
    """The block after which the residual stream is this site; None if it is another site, or what enters the first block."""
    found = _STREAM.fullmatch(site)
    block = -1 if found is None else int(found[1]) - (found[2] == "in")
    return None if block < 0 else block


@verb
def to_lmprobe(dump: Dump, folder: str | Path, *, model: str, label: str | None = None) -> Path:
    """Write the accepted paths of a dump as a dataset that lmprobe reads (after an upload to the hub, as it is).

    folder  new or empty
    model   the name that lmprobe knows the model by, such as HuggingFaceTB/SmolLM2-135M-Instruct
    label   a label of the dump: its value at the last token of each path

    All stored layers of the residual stream are written, in float32. Every path needs a row for each of its tokens, from the
    first on. Paths of equal text, whose rows are equal, are written once.
    """
    folder = as_path("folder", folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadRequest(f"{folder} is not empty. Give a new folder.")
    layers = {block: site for site in dump.sites if (block := _after_block(site)) is not None}
    if not layers:
        raise BadRequest(f"The dump has no residual stream after a block. It has {', '.join(dump.sites)}. Dump with sites='S'.")
    chosen = dump.where(accepted=True)
    paths = _paths(chosen, label)
    last = np.array([rows[-1] for _, rows, _ in paths])
    rest = np.concatenate([rows[:-1] for _, rows, _ in paths])
    with appearing_folder(folder) as new:
        _write_index(new, _lines(paths), _about(dump, model, sorted(layers), len(last), len(rest)))
        for block, site in layers.items():
            for number, rows in enumerate([last, rest] if len(rest) else [last]):
                values = chosen.take(rows, [site])[site].reshape(len(rows), -1).float().contiguous()
                write_file(new / _shard(block, number), save({_key(block): values}))
    return folder


def _paths(chosen: Dump, label: str | None) -> list[tuple[str, np.ndarray, Any]]:
    """(text, its rows, label) of every path."""
    index = chosen.index.reset_index(drop=True)
    found: dict[str, tuple[str, np.ndarray, Any]] = {}
    if label is not None and label not in chosen.labels:
        raise BadRequest(f"The dump has no label {label!r}. It has {', '.join(chosen.labels) or 'none'}.")
    for (example, branch), lines in index.sort_values("position").groupby(["example", "branch"], sort=True):
        if lines["position"].tolist() != list(range(len(lines))):
            raise BadRequest(f"Example {example}, branch {branch} lacks rows of some tokens. Dump all positions.")
        text, value = "".join(lines["text"]), None if label is None else lines[label].iloc[-1]
        value = value.item() if isinstance(value, np.generic) else value
        if text in found and found[text][2] != value:
            raise BadRequest(f"Two paths have the text {text[:60]!r} and other labels, which lmprobe cannot tell apart.")
        found.setdefault(text, (text, lines.index.to_numpy(), value))
    return list(found.values())


def _lines(paths: Sequence[tuple[str, np.ndarray, Any]]) -> dict[str, pa.Array]:
    """The columns of the index. Shard 0 has last tokens, shard 1 all others."""
    starts = np.cumsum([0, *(len(rows) - 1 for _, rows, _ in paths)])
    labels = [label for *_, label in paths]
    whole = all(isinstance(each, int) for each in labels if each is not None)
    places = np.arange(len(paths))
    return {
        "text": pa.array([text for text, *_ in paths], pa.string()),
        "label": pa.array(labels, pa.int32()) if whole else pa.array([None if v is None else str(v) for v in labels]),
        "num_tokens": pa.array([len(rows) for _, rows, _ in paths], pa.int32()),
        "shard_index": pa.array([0] * len(paths), pa.int32()),
        "row_offset": pa.array(places, pa.int32()),
        "token_offset": pa.array(places, pa.int64()),
        "token_shard_ids": pa.array([[1] * (len(rows) - 1) + [0] for _, rows, _ in paths], pa.list_(pa.int64())),
        "token_shard_offsets": pa.array(
            [
                [*range(start, start + len(rows) - 1), place]
                for place, start, (_, rows, _) in zip(places.tolist(), starts.tolist(), paths, strict=False)
            ],
            pa.list_(pa.int64()),
        ),
    }


def _about(dump: Dump, model: str, layers: list[int], last: int, rest: int) -> dict[str, Any]:
    """The schema metadata."""
    shards = [{"num_prompts": last, "num_tokens": tokens} for tokens in (last, rest) if tokens]
    site = next(entry for name, entry in dump.sites.items() if _after_block(name) is not None)
    hidden = {
        "type": "hidden",
        "layers": layers,
        "dim": math.prod(site.shape),
        "dtype": "float32",
        "layout": "per_layer",
        "file_pattern": "tensors/hidden_layer{layer:03d}_shard{shard:03d}.safetensors",
        "key_pattern": "hidden.layer_{layer}",
        "shards": shards,
        "storage": "full_sequence",
        "last_token_shards": 1,
    }
    return {
        "format_version": VERSION,
        "model": {"name": model, "revision": None},
        "num_prompts": last,
        "prompt_ordering": "dump",
        "tensors": {"hidden_layers": hidden},
        "provenance": {"replaylens_version": __version__, "dump": f"replaylens:sha256:{dump.digest}"},
    }


def _write_index(folder: Path, columns: Mapping[str, pa.Array], about: Mapping[str, Any]) -> None:
    metadata = {f"{_PREFIX}{name}": json.dumps(value) for name, value in about.items()}
    pq.write_table(pa.table(columns).replace_schema_metadata(metadata), content := BytesIO())
    write_file(folder / INDEX, content.getvalue())


@verb
def from_lmprobe(folder: str | Path, *, layers: Sequence[int] | None = None, labels: Any = None) -> ProbeRows:
    """Rows to probe, from a local copy of an lmprobe dataset of format 2: one per token, or one per prompt where it is pooled.

    layers  of the dataset; default: all. Layer l becomes the site blocks.l.hook_out
    labels  one value per prompt, in the index's order, where the dataset has none

    Each prompt is a group. BadDump if the folder is no such dataset, or is damaged.
    """
    folder = as_path("folder", folder)
    wanted = None if layers is None else [as_int("layers", each, 0) for each in as_list("layers", layers, "a list of layers")]
    if wanted == []:
        raise BadRequest("No layers. Give at least one, or leave layers out for all.")
    with _damage(folder, BadDump, "an lmprobe dataset of format 2"):
        about, index = _read_index(folder)
        hidden = about["tensors"]["hidden_layers"]
        there = [as_int("layer", each, 0, 999) for each in hidden["layers"]]
        if not there or len({*there}) < len(there):
            raise ValueError(f"layers {short_repr(there)}: each must be there once")
        if missing := [each for each in wanted or there if each not in there]:
            raise ValueError(f"it has no layer {missing[0]}, only {there}")
        places = _places(hidden, index, lambda shard: _stored_rows(folder, there[0], shard))
        found = {f"blocks.{block}.hook_out": _gathered(folder, block, hidden, places) for block in wanted or there}
        prompt = np.repeat(np.arange(len(index["text"])), [len(each) for each in places])
        values = index["label"] if labels is None else list(labels)
        own = np.array(values, dtype=object)[prompt]
    if labels is None and (without := sum(value is None for value in values)):
        lacks = "no labels" if without == len(values) else f"no labels of {without} prompts"
        raise BadRequest(f"{folder} has {lacks}. Give labels=, one per prompt.")
    full = hidden.get("storage") == "full_sequence"
    positions = np.concatenate([np.arange(len(each)) for each in places]) if full else None
    return ProbeRows.of_arrays(found, own, groups=prompt, positions=positions)


def _read_index(folder: Path) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """(what the metadata says, the columns)."""
    table = pq.read_table(folder / INDEX)
    raw = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
    about = {key.removeprefix(_PREFIX): json.loads(value) for key, value in raw.items() if key.startswith(_PREFIX)}
    version = str(about["format_version"])
    if version.split(".")[0] != VERSION.split(".")[0]:
        raise ValueError(f"format {version} instead of {VERSION}")
    return about, table.to_pydict()


def _stored_rows(folder: Path, block: int, shard: int) -> int:
    """The rows of a shard of a layer, from the header of its file."""
    if not 0 <= shard < 1000:
        raise ValueError(f"shard {shard}; there are at most 1000")
    with safe_open(folder / _shard(block, shard), framework="pt") as file:
        return int(file.get_slice(_key(block)).get_shape()[0])


def _places(hidden: Mapping[str, Any], index: Mapping[str, list[Any]], stored: Callable[[int], int]) -> list[np.ndarray]:
    """[(shard, row) of every token] of every prompt. `stored` tells the rows of a shard: an index that counts more tokens than
    all its shards hold is refused before they are listed."""
    if hidden.get("layout") != "per_layer":
        raise ValueError(f"layout {hidden.get('layout')!r} instead of 'per_layer'")
    if hidden.get("storage") != "full_sequence":
        ids, rows = [[each] for each in index["shard_index"]], [[each] for each in index["row_offset"]]
    elif "token_shard_ids" in index:
        every = {as_int("shard", each) for own in index["token_shard_ids"] for each in own}
        _require_room(index["num_tokens"], every, stored)
        ids, rows = index["token_shard_ids"], index["token_shard_offsets"]
    else:  # all tokens of a prompt side by side
        _require_room(index["num_tokens"], {as_int("shard", each) for each in index["shard_index"]}, stored)
        counts = list(zip(index["shard_index"], index["token_offset"], index["num_tokens"], strict=True))
        ids, rows = [[s] * n for s, _, n in counts], [list(range(at, at + n)) for _, at, n in counts]
    found = [
        np.stack([np.asarray(a, dtype=np.int64), np.asarray(b, dtype=np.int64)], 1) for a, b in zip(ids, rows, strict=True)
    ]
    if hidden.get("storage") == "full_sequence" and [len(each) for each in found] != index["num_tokens"]:
        raise ValueError("num_tokens does not count the tokens of every prompt")
    return found


def _require_room(counts: Sequence[int], shards: set[int], stored: Callable[[int], int]) -> None:
    """ValueError if prompts have more tokens than the shards have rows: no two prompts share one."""
    total, room = sum(as_int("num_tokens", each, 0) for each in counts), sum(stored(each) for each in sorted(shards))
    if total > room:
        raise ValueError(f"the index counts {total} tokens, and the shards have {room} rows")


def _gathered(folder: Path, block: int, hidden: Mapping[str, Any], places: Sequence[np.ndarray]) -> Tensor:
    """The rows of one layer, in the order of prompts and tokens: [rows, dim]."""
    places_of, dim = np.concatenate(places), as_int("dim", hidden["dim"], 1)
    out: Tensor | None = None
    for shard in np.unique(places_of[:, 0]).tolist():
        stored = load_file(folder / _shard(block, shard))[_key(block)]
        here = np.flatnonzero(places_of[:, 0] == shard)
        rows = places_of[here, 1]
        if shard < 0 or rows.min() < 0 or stored.ndim != 2 or rows.max() >= len(stored) or stored.shape[1] != dim:
            raise ValueError(f"{_shard(block, shard)} has shape {list(stored.shape)}, which the index does not fit")
        if not stored.dtype.is_floating_point or not bool(stored.float().isfinite().all()):
            raise ValueError(f"{_shard(block, shard)} has {stored.dtype} numbers, NaN, infinity or numbers beyond float32")
        out = torch.empty((len(places_of), dim), dtype=torch.float32) if out is None else out
        out[torch.from_numpy(here)] = stored[torch.from_numpy(rows)].float()
    if out is None:
        raise ValueError("it has no prompts")
    return out


@contextmanager
def _damage(path: Path, error: type[Exception], what: str) -> Iterator[None]:
    """Whatever a foreign or truncated file raises becomes one named error."""
    try:
        yield
    except (
        OSError,
        MemoryError,
        RecursionError,
        KeyError,
        IndexError,
        TypeError,
        ValueError,
        AttributeError,
        pa.ArrowException,
        SafetensorError,
    ) as problem:
        reason = f"{type(problem).__name__}: {problem}" if isinstance(problem, KeyError) else problem
        raise error(f"{path} is not {what}, or is damaged ({reason}). Nothing of it was used.") from problem


# ---- ProbeBench ------------------------------------------------------------------------------------------------------
# ProbeBench (openinterp) publishes probes as a folder: metadata, a scaler and a linear classifier with P(positive). Its
# reference files for the last two are joblib pickles, which run code when they are read. These bundles have the same metadata
# and numbers, in safetensors.

PROBE, META = "probe.safetensors", "meta.json"
REQUIRED = ("id", "name", "author", "category", "modelId", "layer", "license", "tasks", "artifactSha256")
"""metadata that ProbeBench 0.0.1 requires"""
_TEXTS = (*("id", "name", "shortName", "author", "org", "category", "probeType", "modelId", "position", "artifactUrl"),
          *("artifactSha256", "license", "release", "tagline", "description", "status"))  # fmt: skip
_OPTIONAL = ("paper", "paperTitle", "reproducerNotebook", "colabUrl")
"""texts, or null"""
_COUNTS, _NUMBERS = ("layer", "paramCount", "citations"), ("sizeMB", "auroc")


def checked_about(about: Any) -> Mapping[str, Any]:
    """ProbeBench's metadata, its documented fields checked: their kinds, and that required ones say something. Others may hold
    anything. ValueError names the first field that is wrong."""
    if not isinstance(about, Mapping):
        raise ValueError(f"the metadata is {short_repr(about)} instead of an object")
    for name, value in about.items():
        texts = isinstance(value, str) and (bool(value.strip()) or name not in REQUIRED)
        if (name in _TEXTS and not texts) or (name in _OPTIONAL and value is not None and not texts):
            raise ValueError(f"{name} is {short_repr(value)} instead of a text")
        if name in _COUNTS and (type(value) is not int or not 0 <= value < 1 << 53):
            raise ValueError(f"{name} is {short_repr(value)} instead of a whole number")
        if name in _NUMBERS and value is not None and (type(value) not in (int, float) or not 0 <= value < math.inf):
            raise ValueError(f"{name} is {short_repr(value)} instead of a number")
    tasks = about.get("tasks", ["any"])
    if not isinstance(tasks, list | tuple) or not tasks or not all(isinstance(each, str) and each.strip() for each in tasks):
        raise ValueError(f"tasks is {short_repr(tasks)} instead of a list of names")
    if not re.fullmatch("[0-9a-f]{64}", about.get("artifactSha256", "0" * 64)):
        raise ValueError(f"artifactSha256 is {short_repr(about['artifactSha256'])} instead of 64 hexadecimal digits")
    if (kind := about.get("probeType", "linear")) != "linear":
        raise ValueError(f"probeType is {kind!r}; only linear probes are supported")
    return about


@verb
def to_probebench(probe: LinearProbe, folder: str | Path, about: Mapping[str, Any]) -> Path:
    """Write a probe of two classes as a ProbeBench bundle: meta.json, and probe.safetensors with coef [1, d], intercept [1],
    scaler.mean [d] and scaler.scale [d]. P(second class) is sigmoid(coef @ ((x - mean) / scale) + intercept).

    about  ProbeBench's metadata: id, name, author, category, modelId (the model's name on the hub), license, tasks, and other
           fields of it, such as paper. The probe gives layer, position and hash
    """
    if len(probe.classes) != 2:
        raise BadRequest(f"ProbeBench's probes have two classes; this one has {len(probe.classes)}.")
    if (layer := probe.cell.layer) is None:
        raise BadRequest(f"ProbeBench's probes belong to a layer; this one reads {probe.site}.")
    try:
        about = checked_about(about)
        json.dumps(about, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadRequest(f"Invalid `about` of a ProbeBench bundle: {error}.") from None
    if missing := sorted(set(REQUIRED) - {"layer", "artifactSha256", *about}):
        raise BadRequest(f"ProbeBench requires {', '.join(missing)}. Give it in `about`.")
    folder, d = as_path("folder", folder), probe.weight.shape[1]
    numbers = {"coef": probe.weight, "intercept": probe.bias, "scaler.mean": np.zeros(d), "scaler.scale": np.ones(d)}
    body = save({key: torch.from_numpy(np.ascontiguousarray(x, dtype=np.float64)) for key, x in numbers.items()})
    own = {"layer": layer, "artifactSha256": sha256(body).hexdigest(), "spec_version": "0.0.1"}
    own |= {"probeType": "linear", "position": probe.position, "paramCount": d + 1, "site": probe.site, "label": probe.label}
    own |= {"classes": list(probe.classes), "source": probe.source, "cell": probe.cell.site}
    content = json.dumps({**about, **own}, indent=1, sort_keys=True) + "\n"
    write_pair(folder / META, content, folder / PROBE, body, _is_bundle)
    return folder


def _is_bundle(content: bytes) -> bool:
    """Whether metadata is what `to_probebench` wrote: somebody else's has no place of the rows."""
    try:
        return {"artifactSha256", "site", "cell", "source"} <= set(json.loads(content))
    except (ValueError, TypeError, RecursionError):
        return False


def _line(stored: Mapping[str, Tensor]) -> tuple[np.ndarray, np.ndarray]:
    """Weight [1, d] and bias [1] for rows as they are, with the scaler in them. ValueError for tensors that are none."""
    width = max(stored["coef"].shape, default=0)
    shapes = {"coef": ((1, width), (width,)), "intercept": ((1,), ()), "scaler.mean": ((width,),), "scaler.scale": ((width,),)}
    for name, known in shapes.items():
        if tuple(stored[name].shape) not in known or not stored[name].dtype.is_floating_point or not stored[name].numel():
            raise ValueError(f"{name} is {stored[name].dtype} {list(stored[name].shape)}, and a row has {width} numbers")
    coef, intercept, mean, scale = (stored[name].double().numpy() for name in shapes)
    if not (scale > 0).all():
        raise ValueError("scaler.scale has numbers that are not positive")
    weight = coef.reshape(1, -1) / scale
    bias = intercept.reshape(1) - weight @ mean
    if not (np.isfinite(weight).all() and np.isfinite(bias).all()):
        raise ValueError("it holds NaN or infinity")
    return weight, bias


@verb
def from_probebench(folder: str | Path) -> LinearProbe:
    """Read a bundle that `to_probebench`, or anybody else, wrote in that form. BadFile for another folder, for numbers
    without the SHA-256 of the metadata, and for bundles that hold only pickles, which are not read."""
    folder = as_path("folder", folder)
    if not (folder / PROBE).exists() and (folder / "probe.joblib").exists():
        raise BadFile(
            f"{folder} holds its probe as a pickle (probe.joblib), which would run code. Ask for {PROBE}, or, if you trust it, "
            "write coef, intercept, scaler.mean and scaler.scale there yourself."
        )
    with _damage(folder, BadFile, "a ProbeBench bundle"):
        about = checked_about(json.loads((folder / META).read_bytes()))
        if missing := [key for key in REQUIRED if key not in about]:
            raise ValueError(f"{META} lacks {', '.join(missing)}")
        there = [file for file in saves_of(folder / PROBE) if file.exists()] or [folder / PROBE]
        bodies = [file.read_bytes() for file in there]
        whole = next((body for body in bodies if sha256(body).hexdigest() == about["artifactSha256"]), None)
        if whole is None:
            raise ValueError(f"{PROBE} has the SHA-256 {sha256(bodies[0]).hexdigest()[:16]}…, not that of {META}")
        weight, bias = _line(load(whole))
        layer, classes = about["layer"], about.get("classes", ["negative", "positive"])
        named = isinstance(classes, list) and len(classes) == 2 and all(isinstance(each, str) for each in classes)
        if not named or classes[0] == classes[1]:
            raise ValueError(f"classes is {short_repr(classes)} instead of two names")
        texts = {"site": f"blocks.{layer}.hook_out", "label": about["category"], "position": "last"}
        site, label, position = (str(about.get(name, usual)) for name, usual in texts.items())
        if wrong := [name for name in (*texts, "cell") if not isinstance(about.get(name, ""), str)]:
            raise ValueError(f"{wrong[0]} is {short_repr(about[wrong[0]])} instead of a text")
        cell = Cell(str(about.get("cell", site)), layer if "cell" in about else None)
        means = np.zeros((2, weight.shape[1]))
        source = dict(about.get("source", {})) | {"probebench": str(about["id"])}
        return LinearProbe(weight, bias, means, tuple(classes), label, site, cell, position, "probebench", source)
