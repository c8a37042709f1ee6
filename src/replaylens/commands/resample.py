"""`replaylens resample`: rollouts at the sentences of a chain, into a folder that can be resumed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from replaylens.commands.options import CLUSTER, MODEL, DeviceOption, DtypeOption, ModelOption
from replaylens.commands.reporting import refuse_idle, reporting
from replaylens.commands.tasks import JsonOption
from replaylens.engine.errors import BadRequest
from replaylens.engine.machine import optional, require_room
from replaylens.engine.records import parse

if TYPE_CHECKING:
    from replaylens.engine.engine import Engine
    from replaylens.rollouts.plan import Answer
    from replaylens.rollouts.rollouts import Rollouts


def resample(
    out: Annotated[str, typer.Option("--out", help="Folder for the rollouts; with --file, it gets one for each chain.")],
    prompt: Annotated[str | None, typer.Option(help="The prompt.")] = None,
    chat: Annotated[str | None, typer.Option(help='A JSON file instead: a list of messages {"role", "content"}.')] = None,
    chain: Annotated[str, typer.Option(help="What follows the prompt: the text to resample.")] = "",
    file: Annotated[
        str | None, typer.Option(help='A JSONL file instead: lines with "prompt" (text, token ids or a chat) and "chain".')
    ] = None,
    model: ModelOption = MODEL,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = None,
    at: Annotated[
        str | None, typer.Option(help="sentences, tokens, or positions separated by commas.  [default: the end of the chain]")
    ] = None,
    n: Annotated[int, typer.Option("--n", min=1, help="Rollouts at each position.")] = 20,
    max_new: Annotated[int, typer.Option(min=0, help="Maximum tokens of a rollout; 0 reads choices at the fork.")] = 64,
    temperature: Annotated[float, typer.Option(min=0, help="0: greedy.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Every rollout has a seed made from it.")] = 0,
    answer: Annotated[str | None, typer.Option(help="Regular expression that finds the answer; its first group is it.")] = None,
    choice: Annotated[
        list[str] | None, typer.Option(help="A token whose probability is read instead; give it at least twice.")
    ] = None,
    after: Annotated[str, typer.Option(help="Text that is forced before the choice.")] = "",
    replace: Annotated[str | None, typer.Option(help="Text that comes at each position instead of the chain's.")] = None,
    sites: Annotated[str | None, typer.Option(help="What to capture: letters of STCZ, or a site name.")] = None,
    keep: Annotated[
        str, typer.Option(help="Rows to keep: fork, sentences, answer, last, all, or numbers; separated by commas.")
    ] = "sentences,answer,last",
    wave: Annotated[
        int | None, typer.Option(min=1, help="Rollouts drawn together; changes no bit.  [default: by the KV cache]")
    ] = None,
    cache_tokens: Annotated[
        int | None, typer.Option(min=16, help="Tokens that the KV cache holds; by default, by the free memory.")
    ] = None,
    dump: Annotated[
        str | None, typer.Option(help="Also write the kept rows as a dump into this folder, one for all chains.")
    ] = None,
    ray: Annotated[str | None, typer.Option(help="Address of a Ray cluster, or 'local'.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Ray workers; without --ray, on this machine.")] = None,
    as_json: JsonOption = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Hide progress bars.")] = False,
) -> None:
    """Draw rollouts at positions of a chain and count their outcomes. Repeat the command to continue an unfinished folder."""
    from replaylens.dumps.store import Store
    from replaylens.engine.engine import Engine
    from replaylens.engine.request.sampling import Sampling
    from replaylens.engine.request.values import output_path
    from replaylens.engine.serving.branch import ResampleKeywords
    from replaylens.rollouts.drawing import chain_of
    from replaylens.rollouts.rollouts import Rollouts

    with reporting(lambda: "the same command again"):
        options = ResampleKeywords(at=_at(at), max_new=max_new, sites=sites, keep=_keep(keep), replace=replace, wave=wave)
        options["sampling"] = Sampling(temperature=temperature, seed=seed)
        options["answer"] = _answer(answer, choice or [], after)
        if not sites:
            refuse_idle(["keep"], "without --sites: it says which rows of these to keep. Give --sites, such as S")
        if dump is not None and not sites:
            raise BadRequest("--dump writes the rows of --sites, and none are captured. Give --sites, such as S.")
        output_path(out, folder=True)
        if dump is not None:
            Store(dump).require_writable()
        if workers is not None and ray is None:
            require_room(f"workers={workers}", processes=workers)
        chosen: dict[str, Any] = {"device": device, "dtype": dtype, "cache_tokens": cache_tokens}
        chains = list(_chains(prompt, chat, chain, file))
        engine = None if ray or workers else Engine.load(model, **chosen)
        where: dict[str, Any] = {"address": ray or "local", "workers": workers, "engine_options": chosen}
        cluster: Any = optional(CLUSTER, "--ray") if engine is None else None
        starts = engine is None and where["address"] == "local"  # one cluster for all chains
        every = list[Rollouts]()
        with cluster.connected("local") if starts else nullcontext():
            for number, (asked, given) in enumerate(chains):
                folder = Path(out) / f"{number:05d}" if file is not None else Path(out)
                if engine is None:
                    found = cluster.resample_on_cluster(
                        model, folder, asked, n, chain=given, progress=not quiet, **where, **options
                    )
                else:
                    with chain_of(engine, asked, given) as branch:
                        found = branch.resample(n, folder=folder, progress=not quiet, **options)
                _tell(found, str(folder), as_json)
                every.append(found)
        if dump is not None:
            _write_dump(engine or Engine.load(model, **chosen), every if file is not None else every[0], dump, not quiet)


def _chains(prompt: str | None, chat: str | None, chain: str, file: str | None) -> Iterator[tuple[Any, str | list[int]]]:
    """Prompts with the chains that follow them."""
    from replaylens.engine.model.text import is_chat
    from replaylens.engine.request.values import short_repr

    if sum(each is not None for each in (prompt, chat, file)) != 1 or (file is not None and chain):
        raise BadRequest("Give one of --prompt and --chat, with --chain if one follows it; or --file.")
    if chat is not None:
        messages = parse(Path(chat).read_text(encoding="utf-8"), chat, BadRequest)
        if not is_chat(messages):
            raise BadRequest(
                f'{chat} holds {short_repr(messages)}. Give a JSON list of messages {{"role": ..., "content": ...}}.'
            )
        yield messages, chain
        return
    if file is None:
        yield prompt, chain
        return
    for number, line in enumerate(Path(file).read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            raw = parse(line, f"Line {number} of {file}", BadRequest)
            if not isinstance(raw, dict) or not raw.get("prompt") or raw.keys() - {"prompt", "chain"}:
                raise BadRequest(f'Line {number} of {file} is not a record with "prompt" and "chain", and nothing else.')
            yield raw["prompt"], raw.get("chain", "")


def _at(given: str | None) -> str | list[int] | None:
    try:
        return given and [int(each) for each in given.split(",")]
    except ValueError:
        return given


def _keep(given: str) -> list[str | int]:
    names = [each.strip() for each in given.split(",")]
    return [int(each) if each.lstrip("-").isdigit() else each for each in names]


def _answer(pattern: str | None, choices: Sequence[str], after: str) -> Answer | None:
    from replaylens.rollouts.plan import Answer

    if pattern is not None and choices:
        raise BadRequest("--answer and --choice are two ways to read an answer. Give one of them.")
    if after and not choices:
        raise BadRequest("--after is forced before a choice. Give --choice, or leave it out.")
    if choices:
        return Answer.choices(choices, after=after)
    return None if pattern is None else Answer.regex(pattern)


def _tell(found: Rollouts, folder: str, as_json: bool) -> None:
    counts = found.outcomes()
    if as_json:
        facts = {
            "path": folder,
            "digest": found.digest,
            "identifier": str(found.identifier),
            "rollouts": len(found),
            "positions": counts.positions,
            "outcomes": counts.outcomes,
            "counts": counts.counts.tolist(),
            "shares": counts.shares.tolist(),
            "texts": counts.texts,
        }
        typer.echo(json.dumps(facts))
        return
    typer.echo("\t".join(["position", *counts.outcomes, "text"]))
    for at, shares, text in zip(counts.positions, counts.shares, counts.texts, strict=True):
        typer.echo("\t".join([str(at), *(f"{share:.3f}" for share in shares), repr(text.strip()[:60])]))
    typer.echo(f"{folder}: {len(found)} rollouts, {len(found.index)} rows kept\n{found.identifier}")


def _write_dump(engine: Engine, found: Rollouts | list[Rollouts], path: str, progress: bool) -> None:
    """One dump of the kept rows of all chains; of a file's chains, rows have the number of theirs as a label."""
    from replaylens.dumps.maker import make_plan, write_dump
    from replaylens.rollouts.rollouts import Rollouts

    task = engine.texts(found)
    asked = (found if isinstance(found, Rollouts) else found[0]).plan.sites
    sites = asked[0] if len(asked) == 1 else asked
    plan = make_plan(engine, task, len(task), sites=sites, positions="label:place", rejected=False)
    made = write_dump(engine, plan, path, resume=True, progress=progress)
    assert made is not None  # it has one writer
    typer.echo(f"{path}: a dump of {len(made)} rows, digest {made.digest}")
