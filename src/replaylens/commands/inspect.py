"""`replaylens inspect`: what a dump holds and how it was made. Reads the manifest and the sizes of the files, not the files.

Exit codes: 0 done, 1 files are missing or have another size, 2 bad input or a damaged manifest, 3 store unreachable.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from replaylens.commands.options import verify_command
from replaylens.commands.reporting import reporting
from replaylens.commands.tasks import JsonOption
from replaylens.engine.machine import in_bytes
from replaylens.tasks.texts import GivenTexts

if TYPE_CHECKING:
    from replaylens.dumps.plan import DumpPlan
    from replaylens.dumps.reader import Dump


def inspect(
    path: Annotated[str, typer.Argument(help="A dump's folder.")],
    as_json: JsonOption = False,
) -> None:
    """Show a dump's task, options, sites, labels, fingerprint and digests."""
    from replaylens.dumps.reader import Dump

    with reporting():
        found = Dump.open(path, check_files=False)
        wrong = found.files.wrong_sizes()
    manifest = found.manifest
    facts = facts_of(found) | {
        "plan": manifest.plan.to_json(),
        "fingerprint": manifest.fingerprint.parts(),
        "sites": {name: {"dtype": site.dtype, "shape": list(site.shape)} for name, site in manifest.sites.items()},
        "labels": manifest.labels,
        "problems": wrong,
        "hashed": False,
    }
    edits = list(_edits(manifest.plan))
    if as_json:
        typer.echo(json.dumps(facts, indent=1))
    else:
        lines = _lines(facts | {"plan": manifest.plan.to_json() | {"knobs": manifest.plan.cited_knobs}})
        check = manifest.plan.check_in_python(path) or verify_command(path)
        for name, value in (*lines, *edits, *_checked(wrong, check)):
            typer.echo(f"{name:<30} {value}")
    raise typer.Exit(1 if wrong else 0)


def facts_of(found: Dump) -> dict[str, Any]:
    """What a dump is, in numbers and digests."""
    manifest = found.manifest
    return {
        "path": found.url,
        "finished": True,
        "digest": manifest.digest,
        "accepted_digest": manifest.accepted_digest,
        "arithmetic": manifest.fingerprint.computed,
        "stored_dtype": manifest.plan.dtype,
        "rows": manifest.rows,
        "accepted_rows": manifest.accepted_rows,
        "shards": len(manifest.shards),
        "bytes": sum(shard.bytes for shard in manifest.shards) + manifest.index.bytes,
    }


def _checked(wrong: list[str], verify: str) -> Iterator[tuple[str, str]]:
    """What was looked at, and what was not."""
    for each in wrong:
        yield "damaged", each
    seen = "sizes only" if wrong else "sizes match the manifest"
    yield "files", f"{seen}; their content was not hashed: {verify}"


def _lines(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The lines of `inspect` without --json."""
    for name in ("path", "digest", "accepted_digest", "arithmetic", "stored_dtype", "rows", "accepted_rows", "shards"):
        yield name.replace("_", " "), str(facts[name])
    yield "size", f"{in_bytes(facts['bytes'])}"
    for name, value in facts["plan"].items():
        if name != "edits":
            yield f"plan: {name}", ", ".join(value) if name == "sites" else str(value)
    for name, value in facts["fingerprint"].items():
        yield f"fingerprint: {name}", str(value)
    for name, site in facts["sites"].items():
        yield f"tensor: {name}", f"{site['dtype']} [{', '.join(map(str, ['rows', *site['shape']]))}]"
    yield "labels", ", ".join(f"{name} ({kind})" for name, kind in facts["labels"].items())


def _edits(plan: DumpPlan) -> Iterator[tuple[str, str]]:
    """One line per edit: those of every example, and those that branches brought with them."""
    for raw in plan.edits:
        yield "edit of every example", _words(raw, raw["positions"])
    if plan.task != GivenTexts.name:
        return
    for number, text in enumerate(plan.knobs["texts"]):
        for raw in text.get("edits", ()):
            yield f"edit of text {number}", _words(raw, raw["picks"] or {"start": raw["start"], "stop": raw["stop"]})


def _words(raw: dict[str, Any], where: Any) -> str:
    """An edit in a few words, without its values."""
    if isinstance(where, dict):
        where = f"{where['start'] or 0} to {'the end' if where['stop'] is None else where['stop'] - 1}"
    at = "all positions" if where is None else f"positions {where}"
    more = [f"{name} {raw[name]}" for name in ("layers", "heads", "keys", "tokens", "experts") if raw.get(name)]
    more += [name for name in ("keep_norm", "match_norm") if raw.get(name)]
    more += [f"when above {raw['above']}" if raw.get("above") else "when"] if "when" in raw else []
    shape = f" of shape {raw['value']['shape']}" if "value" in raw else ""
    return ", ".join([f"{raw['op']}{shape} at {raw['site']}", at, *more])
