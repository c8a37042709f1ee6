"""The engine's verbs on branches: how they begin (tokens, captures, prompts), what they give, and how they grow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, Unpack

import torch
from torch import Tensor

from replaylens import boundary
from replaylens.engine.errors import BadEdit, BadRequest, Caveat, ClosedBranch, no_such
from replaylens.engine.loop.lane import Job, Lane
from replaylens.engine.model.text import Prompt, is_chat
from replaylens.engine.passes.lens import TunedLens
from replaylens.engine.passes.runner import Keep
from replaylens.engine.records import LensSpec
from replaylens.engine.request.capture import CaptureSpec, Recording, Rows
from replaylens.engine.request.edits import Edit, Hook, listed, resolve_hooks
from replaylens.engine.request.placed import PlacedEdit
from replaylens.engine.request.placing import place_all, warn_of_no_match
from replaylens.engine.request.positions import CAPTURED, At, Position, PositionSlice, chosen
from replaylens.engine.request.sampling import Sampling
from replaylens.engine.request.values import (
    as_bool,
    as_instance,
    as_int,
    as_list,
    defines,
    integer,
    named_options,
    one_path,
    renamed,
    short_repr,
    token_ids,
)
from replaylens.engine.serving.branch import Branch, own_branch
from replaylens.engine.serving.lock import changing
from replaylens.engine.serving.request import SAMPLING, GenerateKeywords, Request, Stream
from replaylens.engine.terminal import defer_interrupt

if TYPE_CHECKING:
    from replaylens.engine.engine import Engine
    from replaylens.engine.serving.variants import Variants
    from replaylens.engine.serving.watch import Watch

AnyBranch = TypeVar("AnyBranch", bound=Branch)
_COPYING = 12
"""threads that copy captured rows for a caller, at most"""

# ---- tokens ----------------------------------------------------------------------------------------------------------


def tokens_of(engine: Engine, text: Prompt) -> list[int]:
    """The token ids of a prompt: a text, token ids, or a chat, which the tokenizer's own template writes.

    BadRequest if it is empty, too long, or has ids outside the vocabulary; BadTexts if there is no template."""
    return check_tokens(engine, ids_of(engine, text))


def ids_of(engine: Engine, prompt: Prompt, special: bool = True) -> list[Any]:
    """The one place where a prompt becomes token ids, which are not checked yet."""
    return engine.text.encode(prompt, special) if isinstance(prompt, str) or is_chat(prompt) else one_path(prompt)


def token_ids_of(engine: Engine, tokens: Sequence[str | int]) -> list[int]:
    """Ids of single tokens, given as text or ids; BadRequest names one that is several tokens."""
    return [target_id(engine, token) for token in as_list("tokens", tokens, "a list of tokens, as text or ids")]


def tokenized(engine: Engine, edits: Sequence[Edit]) -> list[Edit]:
    """The edits with the ids of their tokens; BadEdit names a text that is several tokens."""
    return [_tokenized(engine, edit) for edit in listed(edits)]


def _tokenized(engine: Engine, edit: Edit) -> Edit:
    if edit.tokens is None:
        return edit
    try:
        return replace(edit, tokens=engine.token_ids_of(edit.plain().tokens))  # type: ignore[arg-type]
    except BadRequest as error:
        raise BadEdit(f"Invalid tokens of an edit at {edit.site}. {error}") from error


def check_tokens(engine: Engine, ids: list[int], before: int = 0) -> list[int]:
    """The ids; BadRequest if there are none, too many, or some outside the vocabulary."""
    if not ids:
        raise BadRequest("The prompt is empty. Give at least one token.")
    usual = set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < engine.config.vocab_size
    wrong = lambda t: isinstance(t, bool) or not isinstance(t, int) or not 0 <= t < engine.config.vocab_size  # noqa: E731
    if bad := [] if usual else [t for t in ids if wrong(t)]:
        if isinstance(bad[0], bool) or not isinstance(bad[0], int):
            raise BadRequest(
                f"{short_repr(bad[0])} is a {type(bad[0]).__name__}, not a token id. Give text, or ids as whole numbers."
            )
        last = engine.config.vocab_size - 1
        raise BadRequest(f"Token {bad[0]} is not in the vocabulary of {last + 1} tokens. Give ids from 0 to {last}.")
    if before + len(ids) > engine.config.max_positions:
        raise BadRequest(f"{before + len(ids)} tokens exceed the model's {engine.config.max_positions} positions.")
    return ids


def target_id(engine: Engine, token: str | int) -> int:
    if not isinstance(token, str):
        return check_tokens(engine, token_ids("targets", [token]))[0]
    ids = engine.text.encode(token, special=False)
    if len(ids) != 1:
        raise BadRequest(f"Target {token!r} is {len(ids)} tokens. Give targets of one token each.")
    return ids[0]


def require_positions(engine: Engine, name: str, count: int) -> int:
    """The count; BadRequest if it exceeds the model's positions."""
    if count > (most := engine.config.max_positions):
        raise BadRequest(f"{name}={count} exceeds the model's {most} positions. Give at most {most}.")
    return count


# ---- captures --------------------------------------------------------------------------------------------------------

SITES = "letters such as 'STCZ', a site name, or a list of these"
"""the accepted values of `sites`, for error messages"""


class CaptureKeywords(TypedDict, total=False):
    """What is stored of captured rows, and where. `Engine.capture_spec` documents it."""

    top_k: int
    targets: Sequence[str | int]
    full: bool
    lens: TunedLens | None
    positions: str
    keep: Keep
    watch: Watch | None


class PromptKeywords(CaptureKeywords, total=False):
    """How a root branch is made. `Engine.prompts` documents it."""

    sites: str | Sequence[str] | None
    keep_rejected: bool
    edits: Sequence[Edit]
    hooks: Sequence[Hook]


@defines(CaptureKeywords)
@named_options
def capture_spec(
    engine: Engine,
    sites: str | Sequence[str],
    *,
    rejected: bool = False,
    top_k: int = 8,
    targets: Sequence[str | int] = (),
    full: bool = False,
    lens: TunedLens | None = None,
    positions: str = "all",
    keep: Keep = "host",
    watch: Watch | None = None,
) -> CaptureSpec:
    """Resolve what to capture. UnknownSite lists the nearest names.

    rejected   also keep the rows of rejected drafts
    top_k      number of the likeliest tokens kept in Z, the logit lens
    targets    tokens whose log-probs Z always keeps
    full       keep whole distributions
    lens       read Z through this tuned lens instead of the plain one
    positions  which rows to keep, such as "last" (of the prompt), "response[:32]" or "all[::4]"; the others are neither
               moved nor kept. Forms: `engine.request.positions`
    keep       "host": rows are kept in ordinary memory; "device": on the model's device, for probes that run there
    watch      record the scores of its probes, whether or not the rows that they read are captured
    """
    if watch is not None:
        from replaylens.engine.serving.watch import Watch

        if as_instance("watch", watch, Watch, "a Watch, such as engine.watch(probe)").engine is not engine:
            raise BadRequest("The watch belongs to another engine. Make it with this engine's watch(...).")
    names, wants_lens = engine.sites.select(sites if isinstance(sites, str) else as_list("sites", sites, SITES))
    rejected, full = as_bool("rejected", rejected), as_bool("full", full)
    asked = as_list("targets", targets, "a list of tokens, as text or ids")
    if not wants_lens and (integer(top_k) != 8 or asked or full or lens is not None):
        raise BadRequest(
            "top_k, targets, full and lens say how Z is stored, but Z is not captured. Ask for it, e.g. with sites='Z'."
        )
    residuals = tuple(engine.sites.per_layer("S"))
    spec = None
    if wants_lens:
        top_k = as_int("top_k", top_k, 1, engine.config.vocab_size)
        ids = tuple(target_id(engine, t) for t in asked)
        spec = LensSpec(residuals, top_k, ids, full, None if lens is None else engine.lenses.add(lens))
    if not isinstance(keep, str) or keep not in ("host", "device"):
        raise BadRequest(f"Invalid keep={short_repr(keep)}. Give 'host' or 'device'.")
    where = Position.parse(positions, CAPTURED).tokens or PositionSlice()
    scored = () if watch is None else watch.scored
    names += () if watch is None else tuple(site for site in watch.unscored if site not in names)
    return engine._fitted(CaptureSpec(names, spec, rejected, residuals[-1], positions=where, keep=keep, scored=scored))


def capture_of(
    engine: Engine, sites: str | Sequence[str] | None, rejected: bool, **stored: Unpack[CaptureKeywords]
) -> CaptureSpec | None:
    """What to capture on a prompt; None: nothing."""
    if sites is None or (isinstance(sites, str | Sequence) and not len(sites)):
        sites = ""
    spec = engine.capture_spec(sites, rejected=rejected, **stored)
    return spec if sites or stored.get("watch") is not None else None


# ---- root branches ---------------------------------------------------------------------------------------------------


@defines(PromptKeywords)
@named_options
def prompts(
    engine: Engine,
    texts: Iterable[Prompt],
    *,
    sites: str | Sequence[str] | None = None,
    keep_rejected: bool = False,
    edits: Sequence[Edit] = (),
    hooks: Sequence[Hook] = (),
    **stored: Unpack[CaptureKeywords],
) -> Sequence[Branch]:
    """Several root branches, computed together.

    sites          what to capture on them and their forks: "STCZ", or site names
    keep_rejected  also capture the rows of rejected drafts
    edits, hooks   interventions, as in `Branch.fork`
    top_k, targets, full, lens, positions, keep, watch
                   what is stored of them and where, as in `capture_spec`
    """
    capture = capture_of(engine, sites, keep_rejected, **stored)
    engine.lenses.of(capture.lens if capture else None)  # an unknown lens fails before anything is computed
    paths = [engine.tokens_of(text) for text in as_list("texts", texts, "a list of prompts; prompt(...) takes one")]
    edits = as_list("edits", edits, "a list of Edits", BadEdit)
    own = [engine.placed(edits, len(path)) for path in paths]
    warn_of_no_match(own, paths)
    return named_rows(engine, engine.planted(paths, capture, own, resolve_hooks(hooks, engine.sites)), sites)


@named_options
def prompt(engine: Engine, text: Prompt, **options: Unpack[PromptKeywords]) -> Branch:
    """A new root branch with its prompt computed. Options as in `prompts`."""
    (branch,) = engine.prompts([text], **options)
    return branch


def activations(engine: Engine, branches: Sequence[Branch], *, release: bool = False) -> list[dict[str, Tensor]]:
    """What each branch captured, by site: [rows, ...], copied as by `branch.activations`, but faster. A tensor that is kept
    keeps those of its branch's other sites in memory, too; clone it if you need only that one.

    release  release the branches. Rows that nobody else has, and that lie in one piece, are handed over without a copy; a
             kept tensor may then keep all rows of its pass in memory
    """
    given = as_list("branches", branches, "a list of branches, such as engine.prompts(...)")
    recordings = [own_branch(engine, branch).activations for branch in given]
    if not as_bool("release", release):
        return _copied(recordings)
    if len({branch.id for branch in given}) < len(given):
        raise BadRequest("A branch is given twice, and its rows can be handed over once. Give each branch once.")
    sole = [each.sole for each in recordings]
    others = [each for each, own in zip(recordings, sole, strict=True) if not own]
    copies = iter(_copied(others))  # what can fail comes first
    return _handed_over(engine, given, [None if own else next(copies) for own in sole])


@changing
def _handed_over(engine: Engine, branches: Sequence[Branch], copies: Sequence[Rows | None]) -> list[Rows]:
    """The copies, and the rows themselves where there is none. Mutates: releases the branches that are not released yet."""
    lanes, found = [branch.lane for branch in branches], list[Rows]()
    for lane, rows in zip(lanes, copies, strict=True):
        assert lane.recording is not None  # its rows were looked at
        found.append(lane.recording.handed_over() if rows is None else rows)
    engine.forest.release_all(lanes)
    return found


def named_rows(engine: Engine, branches: list[AnyBranch], sites: str | Sequence[str] | None) -> list[AnyBranch]:
    """Mutates: captured rows are listed by the names that they were asked for. Returns the branches."""
    asked = engine.sites.asked(sites if isinstance(sites, str) else () if sites is None else tuple(sites))
    for branch in branches if asked else ():
        for recording in (branch.lane.recording, branch.lane.template):
            if recording is not None:
                recording.asked = asked
    return branches


def planted(
    engine: Engine,
    paths: Sequence[list[int]],
    capture: CaptureSpec | None,
    edits: Sequence[tuple[PlacedEdit, ...]],
    hooks: tuple[Hook, ...] = (),
) -> list[Branch]:
    """Root branches with these tokens, each under its own placed edits, computed together."""
    with engine.forest.made() as lanes:
        with defer_interrupt():
            lanes += [engine.forest.plant(path, capture, own, hooks) for path, own in zip(paths, edits, strict=True)]
        engine.forest.compute(lanes)
    return [engine.handle(lane) for lane in lanes]


def logits(
    engine: Engine,
    text: Prompt,
    *,
    edits: Sequence[Edit] = (),
    positions: At = -1,
    tokens: Sequence[str | int] | None = None,
) -> Tensor:
    """The logits of a text, under edits: [vocab] for one position, else [positions, vocab]; as `Branch.logits`."""
    branch = engine.prompt(text, edits=edits)
    try:
        return branch.logits(positions, tokens=tokens)
    finally:
        branch.release()


def logits_under(
    engine: Engine,
    text: Prompt,
    variants: Sequence[Sequence[Edit]],
    *,
    edits: Sequence[Edit] = (),
    positions: At = -1,
    tokens: Sequence[str | int] | None = None,
    progress: bool = False,
) -> Tensor:
    """The logits of a text under each of several lists of edits: [variants, vocab], or [variants, positions, vocab].

    All are computed together. They share the text's KV, and rows that an edit leaves alone are not computed again. Each has
    the bits of `logits` with the same edits.

    edits  made in every variant, before its own
    """
    variants = as_list("variants", variants, "a list of lists of Edits", BadEdit)
    if not variants:
        raise BadEdit("No variants. Give at least one list of edits; an empty list leaves the text as it is.")
    with engine.variants(text, edits) as base:
        at = chosen(positions, len(base.path), len(base.path), lambda: map(engine.text.token, base.path))
        columns = slice(None) if tokens is None else engine.token_ids_of(tokens)
        found = base.read(variants, at, lambda logits: logits[..., columns], progress)
    return found[:, 0] if integer(positions) is not None else found


def variants(engine: Engine, text: Prompt, edits: Sequence[Edit] = (), keep: Sequence[str] = ()) -> Variants:
    """The text, to be computed under many lists of edits; see `Variants`."""
    from replaylens.engine.serving.variants import Variants

    return Variants(engine.forest, engine.sites, engine.placed, engine.tokens_of(text), edits, keep)


def placed(engine: Engine, edits: Sequence[Edit], length: int) -> tuple[PlacedEdit, ...]:
    """The edits of a branch with `length` tokens, in their order, one per site."""
    return place_all(engine.tokenized(edits), engine.sites, length)


def _copied(recordings: Sequence[Recording]) -> list[Rows]:
    """Copies of their rows. Several threads: one fills fresh memory slowly."""
    with ThreadPoolExecutor(min(_COPYING, torch.get_num_threads())) as threads:
        return list(threads.map(Recording.copied, recordings))


# ---- generation ------------------------------------------------------------------------------------------------------


@renamed(keep_rejected="keep_pages")
@named_options
def generate(
    engine: Engine,
    branches: Sequence[Branch],
    n: int,
    *,
    sampling: Sampling | Sequence[Sampling] | None = None,
    progress: bool = False,
    **options: Unpack[GenerateKeywords],
) -> list[Branch]:
    """Generate up to `n` tokens on each branch, all together. Each branch gets the tokens it would get alone.

    sampling       how tokens are chosen: one for all branches, or one for each; default: greedy
    drafter        which drafter guesses ahead; never changes the output
    window         rows per verification; 1 decodes directly; None lets the planner choose
    deterministic  False: take the fast path's tokens unverified; the branches are marked as not certified
    keep_pages     keep the pages of rejected drafts, so that they can be forked
    drafts         for the `forced` drafter: chains of tokens by their start position
    final          also compute the last token's own row
    """
    branches = as_list("branches", branches, "a list of branches, such as [engine.prompt(...)]")
    if sampling is None or isinstance(sampling, Sampling):
        each = [sampling or Sampling()] * len(branches)
    else:
        each = as_list("sampling", sampling, f"{SAMPLING}, or one for each branch")
    if len(each) != len(branches):
        raise BadRequest(f"Got {len(each)} samplings for {len(branches)} branches. Give one for all, or one for each.")
    return engine.serve(branches, [Request(n, own, **options) for own in each], progress)


def serve(engine: Engine, branches: Sequence[Branch], requests: Sequence[Request], progress: bool = False) -> list[Branch]:
    """Serve one request on each branch, all together."""
    progress = as_bool("progress", progress)
    engine.forest.serve(lambda: [job_of(engine, b, r) for b, r in zip(branches, requests, strict=True)], progress)
    return list(branches)


@renamed(keep_rejected="keep_pages")
@named_options
def stream(
    engine: Engine, branch: Branch, n: int, *, sampling: Sampling | None = None, **options: Unpack[GenerateKeywords]
) -> Stream:
    """Stream the committed tokens of one branch, as `Branch.stream`. Other requests are served alongside."""
    return engine.open_stream(branch, Request(n, Sampling() if sampling is None else sampling, **options))


@changing
def open_stream(engine: Engine, branch: Branch, request: Request) -> Stream:
    """Start a request on a branch and stream its tokens."""
    job = job_of(engine, branch, request)
    engine.forest.start(job)
    return Stream(engine.forest, job)


def force_all(engine: Engine, branches: Sequence[Branch], tokens: Sequence[str | Sequence[int]]) -> list[Branch]:
    """Append given tokens to each branch, however unlikely, and compute all their rows together."""
    branches = as_list("branches", branches, "a list of branches")
    texts = as_list("tokens", tokens, "a list with the tokens of each branch")
    paths = [engine.text.encode(t, special=False) if isinstance(t, str) else token_ids("tokens", t) for t in texts]
    if len(paths) != len(branches):
        raise BadRequest(f"Got {len(paths)} texts for {len(branches)} branches. Give one for each.")
    engine.forest.serve(lambda: _forced(engine, branches, paths))
    return list(branches)


def _forced(engine: Engine, branches: Sequence[Branch], paths: Sequence[list[int]]) -> list[Job]:
    """Mutates: appends the tokens to all branches, or to none if one cannot take them. Returns the jobs to compute them."""
    jobs = [Job(own_branch(engine, branch).lane, exact=branch.lane.exact) for branch in branches]
    engine.forest.require(jobs)
    for branch, ids in zip(branches, paths, strict=True):
        if not ids:
            raise BadRequest("No tokens to force. Give at least one token.")
        check_tokens(engine, ids, branch.length)
        if branch.finish_reason:
            raise ClosedBranch(f"Branch {branch.id} is finished. Roll it back or fork it to continue.")
    for branch, ids in zip(branches, paths, strict=True):
        engine.forest.force(branch.lane, ids)
    return jobs


def cancel(engine: Engine, job: Job) -> None:
    """Stop a job at once. Its committed tokens stay on the branch."""
    as_instance("job", job, Job, "a Job, such as stream.job")
    if engine.loop.lanes.get(job.lane.branch) is not job.lane and not job.done:
        raise BadRequest(f"Branch {job.lane.branch} is not a branch of this engine. Cancel the job on its own engine.")
    engine.forest.cancel(job)


def job_of(engine: Engine, branch: Branch, request: Request) -> Job:
    """The request as a job on this branch; BadRequest or ClosedBranch if it cannot be served."""
    own_branch(engine, branch)._check_open()
    if request.drafter not in engine.loop.drafters:
        hint = " Load the engine with draft_model=..." if request.drafter == "model" else ""
        raise BadRequest(no_such("drafter", str(request.drafter), engine.loop.drafters) + hint)
    if branch.length + request.n > engine.config.max_positions:
        most = engine.config.max_positions
        raise BadRequest(f"{branch.length} tokens and {request.n} more exceed the model's {most} positions. Ask for fewer.")
    if branch.finish_reason:
        raise ClosedBranch(f"Branch {branch.id} is finished. Roll it back or fork it to continue.")
    if request.window is not None:
        require_positions(engine, "window", request.window)
    _warn_of_equal_draws(engine.loop.lanes, branch, request)
    return request.job(branch.lane, engine.text.eos_id)


def _warn_of_equal_draws(lanes: dict[int, Lane], branch: Branch, request: Request) -> None:
    """Warn, once for each such draw, if a live fork at the same place sampled with the same seed: to the same tokens."""
    record, parent = branch.record, lanes.get(-1 if branch.record.parent is None else branch.record.parent)
    if parent is None or not request.sampling.temperature or len(record.tokens) > record.fork_position:
        return
    edits = tuple(edit.key for edit in branch.lane.edits)
    drawn = (record.fork_position, edits, len(branch.lane.hooks), hash(repr(request.sampling)))
    first = parent.drawn.setdefault(drawn, branch.id)
    if first != branch.id and first in lanes:
        parent.drawn[drawn] = -1  # no branch: warned
        boundary.warn(
            f"Branches {first} and {branch.id} are forks of branch {parent.branch} at the same position and "
            f"sample with the same seed, {request.sampling.seed}, so they get the same tokens. Give each fork a Sampling "
            "with its own seed, or use branch.resample(n), which does.",
            Caveat,
        )
