"""The verbs that add tokens to branches: generate, stream, force. All that are given together are served together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Unpack

from replaylens import boundary
from replaylens.engine.errors import BadRequest, Caveat, ClosedBranch, no_such
from replaylens.engine.loop.lane import Job, Lane
from replaylens.engine.request.sampling import Sampling
from replaylens.engine.request.values import as_bool, as_instance, as_list, named_options, renamed, token_ids
from replaylens.engine.serving.branch import Branch, own_branch
from replaylens.engine.serving.lock import changing
from replaylens.engine.serving.prompting import check_tokens, require_positions
from replaylens.engine.serving.request import SAMPLING, GenerateKeywords, Request, Stream

if TYPE_CHECKING:
    from replaylens.engine.engine import Engine


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
