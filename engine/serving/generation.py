"""`Generation`: the verbs that add tokens to branches: generate, stream, force."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Unpack

from replaylens import boundary
from replaylens.engine.errors import BadEdit, BadRequest, Caveat, ClosedBranch, no_such
from replaylens.engine.loop.lane import Job, Lane
from replaylens.engine.loop.loop import Loop
from replaylens.engine.model.config import ModelConfig
from replaylens.engine.model.text import Prompt, Text, is_chat
from replaylens.engine.request.edits import Edit, listed
from replaylens.engine.request.sampling import Sampling
from replaylens.engine.request.values import (
    as_bool,
    as_instance,
    as_list,
    named_options,
    one_path,
    renamed,
    short_repr,
    token_ids,
)
from replaylens.engine.serving.branch import Branch
from replaylens.engine.serving.forest import Forest
from replaylens.engine.serving.lock import EngineLock, changing
from replaylens.engine.serving.request import SAMPLING, GenerateKeywords, Request, Stream

# ---- token reader ----------------------------------------------------------------------------------------------------
# `TokenReader`: texts and ids as checked token ids of a model.


class TokenReader:
    """A tokenizer, and a model whose vocabulary and positions bound what it reads."""

    text: Text
    config: ModelConfig

    def tokens_of(self, text: Prompt) -> list[int]:
        """The token ids of a prompt: a text, token ids, or a chat, which the tokenizer's own template writes.

        BadRequest if it is empty, too long, or has ids outside the vocabulary; BadTexts if there is no template."""
        return self._check_tokens(self._ids(text))

    def _ids(self, prompt: Prompt, special: bool = True) -> list[Any]:
        """The one place where a prompt becomes token ids, which are not checked yet."""
        return self.text.encode(prompt, special) if isinstance(prompt, str) or is_chat(prompt) else one_path(prompt)

    def token_ids_of(self, tokens: Sequence[str | int]) -> list[int]:
        """Ids of single tokens, given as text or ids; BadRequest names one that is several tokens."""
        return [self._target(token) for token in as_list("tokens", tokens, "a list of tokens, as text or ids")]

    def tokenized(self, edits: Sequence[Edit]) -> list[Edit]:
        """The edits with the ids of their tokens; BadEdit names a text that is several tokens."""
        return [self._tokenized(edit) for edit in listed(edits)]

    def _tokenized(self, edit: Edit) -> Edit:
        if edit.tokens is None:
            return edit
        try:
            return replace(edit, tokens=self.token_ids_of(edit.plain().tokens))  # type: ignore[arg-type]
        except BadRequest as error:
            raise BadEdit(f"Invalid tokens of an edit at {edit.site}. {error}") from error

    def _check_tokens(self, ids: list[int], before: int = 0) -> list[int]:
        """The ids; BadRequest if there are none, too many, or some outside the vocabulary."""
        if not ids:
            raise BadRequest("The prompt is empty. Give at least one token.")
        usual = set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < self.config.vocab_size
        wrong = lambda t: isinstance(t, bool) or not isinstance(t, int) or not 0 <= t < self.config.vocab_size  # noqa: E731
        if bad := [] if usual else [t for t in ids if wrong(t)]:
            if isinstance(bad[0], bool) or not isinstance(bad[0], int):
                raise BadRequest(
                    f"{short_repr(bad[0])} is a {type(bad[0]).__name__}, not a token id. Give text, or ids as whole numbers."
                )
            last = self.config.vocab_size - 1
            raise BadRequest(f"Token {bad[0]} is not in the vocabulary of {last + 1} tokens. Give ids from 0 to {last}.")
        if before + len(ids) > self.config.max_positions:
            raise BadRequest(f"{before + len(ids)} tokens exceed the model's {self.config.max_positions} positions.")
        return ids

    def _target(self, target: str | int) -> int:
        if not isinstance(target, str):
            return self._check_tokens(token_ids("targets", [target]))[0]
        ids = self.text.encode(target, special=False)
        if len(ids) != 1:
            raise BadRequest(f"Target {target!r} is {len(ids)} tokens. Give targets of one token each.")
        return ids[0]

    def require_positions(self, name: str, count: int) -> int:
        """The count; BadRequest if it exceeds the model's positions."""
        if count > (most := self.config.max_positions):
            raise BadRequest(f"{name}={count} exceeds the model's {most} positions. Give at most {most}.")
        return count


# ---- generation ------------------------------------------------------------------------------------------------------


class Generation(TokenReader):
    """Serves requests on branches, all that are given together."""

    loop: Loop
    forest: Forest
    lock: EngineLock

    @renamed(keep_rejected="keep_pages")
    @named_options
    def generate(
        self,
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
            own = [sampling or Sampling()] * len(branches)
        else:
            own = as_list("sampling", sampling, f"{SAMPLING}, or one for each branch")
        if len(own) != len(branches):
            raise BadRequest(f"Got {len(own)} samplings for {len(branches)} branches. Give one for all, or one for each.")
        return self.serve(branches, [Request(n, each, **options) for each in own], progress)

    def serve(self, branches: Sequence[Branch], requests: Sequence[Request], progress: bool = False) -> list[Branch]:
        """Serve one request on each branch, all together."""
        progress = as_bool("progress", progress)
        self.forest.serve(lambda: [self._job(b, r) for b, r in zip(branches, requests, strict=True)], progress)
        return list(branches)

    @renamed(keep_rejected="keep_pages")
    @named_options
    def stream(
        self, branch: Branch, n: int, *, sampling: Sampling | None = None, **options: Unpack[GenerateKeywords]
    ) -> Stream:
        """Stream the committed tokens of one branch, as `Branch.stream`. Other requests are served alongside."""
        return self.open_stream(branch, Request(n, Sampling() if sampling is None else sampling, **options))

    @changing
    def open_stream(self, branch: Branch, request: Request) -> Stream:
        """Start a request on a branch and stream its tokens."""
        job = self._job(branch, request)
        self.forest.start(job)
        return Stream(self.forest, job)

    def force_all(self, branches: Sequence[Branch], tokens: Sequence[str | Sequence[int]]) -> list[Branch]:
        """Append given tokens to each branch, however unlikely, and compute all their rows together."""
        branches = as_list("branches", branches, "a list of branches")
        texts = as_list("tokens", tokens, "a list with the tokens of each branch")
        paths = [self.text.encode(t, special=False) if isinstance(t, str) else token_ids("tokens", t) for t in texts]
        if len(paths) != len(branches):
            raise BadRequest(f"Got {len(paths)} texts for {len(branches)} branches. Give one for each.")
        self.forest.serve(lambda: self._forced(branches, paths))
        return list(branches)

    def _forced(self, branches: Sequence[Branch], paths: Sequence[list[int]]) -> list[Job]:
        """Mutates: appends the tokens to all branches, or to none if one cannot take them. Returns the jobs to compute them."""
        jobs = [Job(self._own(branch).lane, exact=branch.lane.exact) for branch in branches]
        self.forest.require(jobs)
        for branch, ids in zip(branches, paths, strict=True):
            if not ids:
                raise BadRequest("No tokens to force. Give at least one token.")
            self._check_tokens(ids, branch.length)
            if branch.finish_reason:
                raise ClosedBranch(f"Branch {branch.id} is finished. Roll it back or fork it to continue.")
        for branch, ids in zip(branches, paths, strict=True):
            self.forest.force(branch.lane, ids)
        return jobs

    def cancel(self, job: Job) -> None:
        """Stop a job at once. Its committed tokens stay on the branch."""
        as_instance("job", job, Job, "a Job, such as stream.job")
        if self.loop.lanes.get(job.lane.branch) is not job.lane and not job.done:
            raise BadRequest(f"Branch {job.lane.branch} is not a branch of this engine. Cancel the job on its own engine.")
        self.forest.cancel(job)

    def _job(self, branch: Branch, request: Request) -> Job:
        """The request as a job on this branch; BadRequest or ClosedBranch if it cannot be served."""
        self._own(branch)._check_open()
        if request.drafter not in self.loop.drafters:
            hint = " Load the engine with draft_model=..." if request.drafter == "model" else ""
            raise BadRequest(no_such("drafter", str(request.drafter), self.loop.drafters) + hint)
        if branch.length + request.n > self.config.max_positions:
            most = self.config.max_positions
            raise BadRequest(f"{branch.length} tokens and {request.n} more exceed the model's {most} positions. Ask for fewer.")
        if branch.finish_reason:
            raise ClosedBranch(f"Branch {branch.id} is finished. Roll it back or fork it to continue.")
        if request.window is not None:
            self.require_positions("window", request.window)
        _warn_of_equal_draws(self.loop.lanes, branch, request)
        return request.job(branch.lane, self.text.eos_id)

    def _own(self, branch: Branch) -> Branch:
        """The branch; BadRequest if it is not a Branch of this engine."""
        as_instance("branch", branch, Branch, "a Branch, such as prompt(...) returns")
        if branch.engine is not self:
            raise BadRequest(f"Branch {branch.id} belongs to another engine. Prompt this engine with its tokens.")
        return branch


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
