"""`Engine`: the public object. Loads a model, shows that its arithmetic is canonical here, and serves branches."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from replaylens.engine import certificates, fingerprint, sites, weights
from replaylens.engine.branch import Branch
from replaylens.engine.branches import BranchTree, TokenState
from replaylens.engine.capture import CaptureSpec, LensSpec, Recording
from replaylens.engine.drafters import (
    Drafter,
    ForcedDrafter,
    LensDrafter,
    ModelDrafter,
    NgramDrafter,
    SelfDrafter,
    TreeDrafter,
)
from replaylens.engine.edits import Edit, Hook, PlacedEdit, page_keys, place
from replaylens.engine.errors import BadRequest, IntegrityError
from replaylens.engine.lane import Job, Lane
from replaylens.engine.loop import Loop
from replaylens.engine.model import Decoder
from replaylens.engine.pages import PageTable
from replaylens.engine.prefix import PrefixIndex
from replaylens.engine.runner import Runner
from replaylens.engine.sampling import Sampling
from replaylens.engine.text import Text, load_text
from replaylens.engine.trace import Trace
from replaylens.engine.tuned_lens import TunedLens

if TYPE_CHECKING:
    from replaylens.engine.run import Run
    from replaylens.tasks import Example


class Engine:
    """A model, its KV cache and its tree of branches.

    cache_tokens   how many positions the KV cache holds; requests wait or are computed again when it is full
    page_size      positions per page; has no influence on any bit
    max_rows       rows per pass; has no influence on any bit
    draft_model    a smaller model with the same tokenizer, for the `model` drafter
    lens_layer     where the `lens` and `tree` drafters leave the model; default: the middle
    tree_width     siblings of the `tree` drafter
    canary         debug mode: check before every pass that the cache holds what the branches think it holds
    """

    def __init__(
        self,
        model: Decoder,
        tokenizer: Any = None,
        *,
        cache_tokens: int = 8192,
        page_size: int = 16,
        max_rows: int = 512,
        draft_model: "Decoder | None" = None,
        lens_layer: int | None = None,
        tree_width: int = 3,
        canary: bool = False,
    ) -> None:
        if cache_tokens < page_size or page_size < 1:
            raise BadRequest(f"a cache of {cache_tokens} tokens in pages of {page_size}: give room for at least one page")
        if max_rows < 16:
            raise BadRequest(f"max_rows {max_rows}: a pass has at least 16 rows")
        self.model, self.config = model, model.config
        self.text = tokenizer if isinstance(tokenizer, Text) else Text(tokenizer)
        self.certificate = certificates.certificate_for(model)
        self.fingerprint = fingerprint.take(model)
        self.sites = sites.table(model.config)
        self.tree = BranchTree()
        self.runner = Runner(model, self.certificate, cache_tokens // page_size, page_size, canary)
        self.prefix = PrefixIndex(self.runner.pool, self.fingerprint.digest.encode())
        drafters = self._make_drafters(draft_model, lens_layer or max(1, self.config.num_layers // 2), tree_width)
        self.loop = Loop(self.runner, self.tree, self.prefix, drafters, self.text.decode, max_rows)
        if self.runner.device == "cuda":
            from replaylens.engine.burst import Bursts

            self.loop.bursts = Bursts(self.runner)
        self.trace = Trace(self.fingerprint)
        self.loop.listeners.append(self._listen)

    @classmethod
    def load(
        cls, source: Any, *, device: str = "cpu", dtype: torch.dtype | None = None, draft_model: Any = None, **options: Any
    ) -> "Engine":
        """From an embedded model's name, a folder, a .gguf file, a transformers model, a TransformerBridge or a Decoder.

        device  "cpu" (float32) or "cuda" (bfloat16 unless said otherwise)
        """
        from replaylens.engine import zoo

        if device not in ("cpu", "cuda"):
            raise BadRequest(f"device {device!r}: give cpu or cuda")
        if device == "cuda" and not torch.cuda.is_available():
            raise BadRequest("no CUDA device is to be had here; load with device='cpu'")
        dtype = dtype or (torch.float32 if device == "cpu" else torch.bfloat16)
        if device == "cpu" and dtype is not torch.float32:
            raise BadRequest(f"{dtype} on a CPU is emulated and slow: the CPU engine computes in float32")
        embedded = isinstance(source, str) and source in zoo.names()
        if embedded:
            model, text = zoo.load_embedded(source)[0], Text(zoo.load_embedded(source)[1])
            draft_model = "coin-draft" if draft_model is None and source == "coin-plain" else draft_model
            model = weights.load(model, dtype)
        else:
            is_folder = isinstance(source, str | Path) and Path(source).is_dir()
            text = load_text(Path(source)) if is_folder else Text(getattr(source, "tokenizer", None))
            model = weights.load(source, dtype)
        if draft_model is not None:
            draft = zoo.load_embedded(draft_model)[0] if draft_model in zoo.names() else draft_model
            options["draft_model"] = weights.load(draft, dtype).to(device)
        return cls(model.to(device), options.pop("tokenizer", text), **options)

    # ---- branches -----------------------------------------------------------------------------------------------

    def prompt(self, text: str | Sequence[int], **options: Any) -> Branch:
        """A new root branch, its prompt computed. Options as in `prompts`."""
        (branch,) = self.prompts([text], **options)
        return branch

    def prompts(
        self,
        texts: Iterable[str | Sequence[int]],
        *,
        sites: str | Sequence[str] | None = None,
        keep_rejected: bool = False,
        edits: Sequence[Edit] = (),
        hooks: Sequence[Hook] = (),
        **lens: Any,
    ) -> list[Branch]:
        """Several root branches, computed together.

        sites          what to capture on them and their forks: "STCZ", or site names
        keep_rejected  capture the rows of rejected drafts too
        edits, hooks   interventions, as in `Branch.fork`
        lens           how Z is stored: top_k, targets, full (see `capture_spec`)
        """
        paths = [self._check_tokens(self.text.encode(t) if isinstance(t, str) else list(t)) for t in texts]
        capture = self.capture_spec(sites, rejected=keep_rejected, **lens) if sites else None
        placed = [tuple(p for edit in edits for p in place(edit, self.sites, len(path))) for path in paths]
        resolved = tuple((self.sites.resolve(name), hook) for name, hook in hooks)
        branches = [self._plant(path, capture, own, resolved) for path, own in zip(paths, placed, strict=True)]
        self._compute(*branches)
        return branches

    def generate(
        self,
        branches: Sequence[Branch],
        n: int,
        *,
        sampling: Sampling | Sequence[Sampling] | None = None,
        drafter: str = "self",
        window: int | None = None,
        deterministic: bool = True,
        keep_rejected: bool = False,
        drafts: dict[int, list[list[int]]] | None = None,
        final: bool = False,
        progress: bool = False,
    ) -> list[Branch]:
        """Generate up to `n` tokens on each branch, all together; the outcome is that of each alone.

        sampling       how tokens are chosen: for all branches, or one for each; default: greedy
        drafter        who guesses ahead; never changes the output
        window         rows per verification; 1 decodes directly; None lets the planner choose
        deterministic  False: take the fast path's tokens at once; the branches are marked as not certified
        keep_rejected  keep the pages of rejected drafts, so that they can be forked
        drafts         for the `forced` drafter: chains of tokens by the position they start at
        final          also compute the last token's own row
        """
        own = list(sampling) if isinstance(sampling, Sequence) else [sampling or Sampling()] * len(branches)
        if len(own) != len(branches):
            raise BadRequest(f"{len(own)} samplings for {len(branches)} branches: give one for all, or one for each")
        jobs = [
            self._job(branch, n, one, drafter, window, deterministic, keep_rejected, drafts, final)
            for branch, one in zip(branches, own, strict=True)
        ]
        try:
            self._run(jobs, progress)
        finally:  # what was committed before a failure counts as well
            for branch, job in zip(branches, jobs, strict=True):
                branch._absorb(job)
        return list(branches)

    def force_all(self, branches: Sequence[Branch], tokens: Sequence[str | Sequence[int]]) -> list[Branch]:
        """Append given tokens to each branch, whatever the model thinks of them, and compute all their rows together."""
        paths = [self.text.encode(t, special=False) if isinstance(t, str) else list(t) for t in tokens]
        for branch, ids in zip(branches, paths, strict=True):
            branch._check_open()
            if not ids:
                raise BadRequest("force: give at least one token")
            self._check_tokens(ids, branch.length)
        for branch, ids in zip(branches, paths, strict=True):
            self._append_forced(branch, ids)
        self._compute(*branches)
        return list(branches)

    def stream(self, branch: Branch, n: int, **options: Any) -> Iterator[int]:
        """Committed tokens of one branch as they come; other submitted work goes on beside it."""
        defaults = {
            "sampling": None,
            "drafter": "self",
            "window": None,
            "deterministic": True,
            "keep_rejected": False,
            "drafts": None,
            "final": False,
        }
        if unknown := set(options) - set(defaults):
            raise BadRequest(f"unknown options {sorted(unknown)}; known: {sorted(defaults)}")
        o = defaults | options
        job = self._job(branch, n, o["sampling"] or Sampling(), *list(o.values())[1:])
        self._submit(job)
        return self._stream(branch, job)

    def _stream(self, branch: Branch, job: Job) -> Iterator[int]:
        shown = branch.length
        try:
            while True:
                tokens = self.tree.branch(branch.id).tokens
                yield from tokens[shown:]
                shown = len(tokens)
                if job.done:
                    break
                self.loop.step()
            if job.error is not None:
                raise job.error
        finally:
            if not job.done:
                self.cancel(job)
            branch._absorb(job)

    def cancel(self, job: Job) -> None:
        """Stop a job at once. What it committed stays on its branch."""
        self.loop.end(job)
        self.loop.jobs = [other for other in self.loop.jobs if other is not job]

    def replay(self, what: "Trace | Iterable[Example]", **options: Any) -> "Run | dict[int, Branch]":
        """Replay task examples into a `Run` (see `run.replay_examples`), or a recorded `Trace` into its branches."""
        from replaylens.engine import replayer, run

        if isinstance(what, Trace):
            return replayer.replay_trace(self, what, **options)
        return run.replay_examples(self, list(what), **options)

    def check_integrity(self) -> list[str]:
        """Recount pages, tree and prefix index: lines that say what was counted, or IntegrityError naming the first fault."""
        tables = [lane.table for lane in self.loop.lanes.values()]
        tables += [self.loop.bursts.spare] if self.loop.bursts is not None else []
        lines = [
            str(self.runner.pool.check_integrity(tables, self.prefix.pages())),
            str(self.tree.check_integrity()),
            str(self.prefix.check_integrity()),
        ]
        for lane in self.loop.lanes.values():
            if lane.computed > lane.table.length or lane.computed > len(self.tree.branch(lane.branch).tokens):
                raise IntegrityError(f"branch {lane.branch}: {lane.computed} computed positions, but {lane.table.length} slots")
        return lines

    def run_with_cache(self, tokens: Any, names_filter: Any = None, pos_slice: slice | int | None = None) -> tuple[Tensor, Any]:
        """TransformerLens' verb: logits and an `ActivationCache`; see `interop.run_with_cache`."""
        from replaylens.engine import interop

        return interop.run_with_cache(self, tokens, names_filter, pos_slice)

    def capture_spec(
        self,
        sites: str | Sequence[str],
        *,
        rejected: bool = False,
        top_k: int = 8,
        targets: Sequence[str | int] = (),
        full: bool = False,
        lens: TunedLens | None = None,
    ) -> CaptureSpec:
        """Resolve what to capture; an unknown site is an UnknownSite error that lists the nearest names.

        rejected  keep the rows of rejected drafts too
        top_k     how many of the likeliest tokens Z keeps; targets: tokens whose log-probs it keeps; full: all of them
        lens      read Z through this tuned lens instead of the plain one
        """
        names, wants_lens = self.sites.select(sites if isinstance(sites, str) else list(sites))
        residuals = tuple(self.sites.letter("S"))
        spec = None
        if wants_lens:
            if lens is not None:
                self.loop.committer.lenses[lens.digest] = lens.require(self.model)
            ids = tuple(self._target(t) for t in targets)
            spec = LensSpec(residuals, top_k, ids, full, None if lens is None else lens.digest)
        return CaptureSpec(names, spec, rejected, residuals[-1])

    # ---- inside -------------------------------------------------------------------------------------------------

    def _plant(
        self, path: list[int], capture: CaptureSpec | None, edits: tuple[PlacedEdit, ...] = (), hooks: tuple[Hook, ...] = ()
    ) -> Branch:
        table = PageTable()
        if capture is None and not hooks:  # rows that are to be captured must be computed, even if their KV is known
            keys = page_keys(edits, len(path) // self.runner.pool.page_size, self.runner.pool.page_size)
            table = self.prefix.adopt(path, keys, limit=len(path) - 1)
        lane = Lane(self.tree.plant(path), table, computed=table.length, edits=edits, hooks=hooks)
        if capture is not None:
            lane.capture, lane.recording = capture, Recording()
        self.loop.lanes[lane.branch] = lane
        self.trace.add("plant", branch=lane.branch, tokens=path, capture=_capture_json(capture), **_edits_json(edits, hooks))
        return Branch(self, lane)

    def _compute(self, *branches: Branch) -> None:
        """Bring the branches' KV and captured rows up to their tokens."""
        self._run([Job(branch.lane, exact=branch.lane.exact) for branch in branches])

    def _fork(self, parent: Branch, at: int, edits: Sequence[Edit], hooks: Sequence[Hook]) -> Branch:
        placed = tuple(p for edit in edits for p in place(edit, self.sites, at))
        resolved = tuple((self.sites.resolve(name), hook) for name, hook in hooks)
        return self._fork_placed(parent, at, placed, resolved)

    def _fork_placed(self, parent: Branch, at: int, edits: tuple[PlacedEdit, ...], hooks: tuple[Hook, ...]) -> Branch:
        lane = parent.lane
        same = 0 if hooks else min([at, *(edit.first for edit in edits)])  # below this position nothing changes
        child = self.tree.fork(parent.id, at)
        new = Lane(child, self.runner.pool.fork(lane.table, min(same, lane.computed)), exact=lane.exact)
        new.computed, new.capture = new.table.length, lane.capture
        new.edits, new.hooks = lane.edits + edits, lane.hooks + hooks
        if lane.recording is not None and lane.capture is not None:
            new.recording = self._whole_recording(lane, lane.recording).fork(min(same, at - lane.capture.lag))
        self.loop.lanes[child] = new
        self.trace.add("fork", branch=parent.id, child=child, at=at, **_edits_json(edits, hooks))
        return Branch(self, new)

    def _whole_recording(self, lane: Lane, recording: Recording) -> Recording:
        """A rejected branch records its own suffix only; what comes before is on the branch it was cut from."""
        parent = self.tree.branch(lane.branch).parent
        main = self.loop.lanes[parent].recording if parent in self.loop.lanes and recording.base else None
        if main is None or main.end < recording.base:
            return recording
        return Recording(main.base, [*main.fork(recording.base).chunks, *recording.chunks])

    def _append_forced(self, branch: Branch, ids: list[int]) -> None:
        self.tree.append(branch.id, ids, TokenState.DRAFT)
        self.trace.add("force", branch=branch.id, tokens=ids)

    def _rollback(self, branch: Branch, to: int) -> None:
        lane = branch.lane
        self.tree.rollback(branch.id, to)
        self.runner.pool.truncate(lane.table, min(to, lane.table.length))
        lane.computed = min(lane.computed, to)
        if lane.recording is not None and lane.capture is not None:
            lane.recording.truncate(to - lane.capture.lag)
        self.trace.add("rollback", branch=branch.id, to=to)

    def _release(self, branch: Branch) -> None:
        for job in [job for job in self.loop.jobs if job.lane is branch.lane]:
            self.cancel(job)
        self.runner.pool.release(branch.lane.table)
        self.tree.release(branch.id)
        del self.loop.lanes[branch.id]
        self.trace.add("release", branch=branch.id)

    def _job(
        self,
        branch: Branch,
        n: int,
        sampling: Sampling,
        drafter: str,
        window: int | None,
        deterministic: bool,
        keep_rejected: bool,
        drafts: dict[int, list[list[int]]] | None,
        final: bool,
    ) -> Job:
        branch._check_open()
        if n < 1:
            raise BadRequest(f"generate {n} tokens: give at least 1")
        if drafter not in self.loop.drafters:
            hint = "; load the engine with draft_model=..." if drafter == "model" else ""
            raise BadRequest(f"no drafter {drafter!r}; known: {', '.join(self.loop.drafters)}{hint}")
        if window is not None and window < 1:
            raise BadRequest(f"window {window}: give at least 1 (1 decodes directly)")
        if branch.length + n > self.config.max_positions:
            raise BadRequest(f"{branch.length} tokens and {n} more exceed the model's {self.config.max_positions} positions")
        if branch.finish_reason:
            self.tree.append(branch.id, [0], TokenState.PENDING)  # raises ClosedBranch with advice
        stop = (
            sampling.stop_tokens
            if sampling.ignore_eos or self.text.eos_id is None
            else (*sampling.stop_tokens, self.text.eos_id)
        )
        sampling = replace(sampling, stop_tokens=tuple(dict.fromkeys(stop)))
        forced = {int(k): [list(c) for c in v] for k, v in (drafts or {}).items()} if drafter == "forced" else None
        return Job(branch.lane, n, sampling, drafter, window, deterministic, final, keep_rejected, forced)

    def _submit(self, job: Job) -> None:
        if job.new_tokens:
            options = {"deterministic": job.exact, "final": job.final, "keep_rejected": job.keep_rejected}
            self.trace.add("generate", branch=job.lane.branch, n=job.new_tokens, sampling=asdict(job.sampling), **options)
        self.loop.submit(job)

    def _run(self, jobs: list[Job], progress: bool = False) -> None:
        for job in jobs:
            self._submit(job)
        with tqdm(total=sum(job.new_tokens for job in jobs), unit="token", disable=not progress) as bar:
            while any(not job.done for job in jobs):
                self.loop.step()
                bar.update(sum(job.generated for job in jobs) - bar.n)
        self.loop.run(jobs)

    def _listen(self, event: dict[str, Any]) -> None:
        """Trace what the loop does. A fast-path request's tokens are noted: they could not be computed again."""
        details = {key: value for key, value in event.items() if key != "event"}
        if event["event"] in ("draft", "verdict"):
            self.trace.add(event["event"], **details)
        elif event["event"] == "finish" and self.loop.lanes[event["branch"]].exact is False:
            self.trace.add("finish", **details, tokens=self.tree.path(event["branch"]))
        elif event["event"] == "finish":
            self.trace.add("finish", **details)

    def _make_drafters(self, draft_model: Decoder | None, layer: int, width: int) -> dict[str, Drafter]:
        runner = self.runner
        drafters: dict[str, Drafter] = {
            "self": SelfDrafter(runner),
            "lens": LensDrafter(runner, layer),
            "ngram": NgramDrafter(),
            "tree": TreeDrafter(runner, layer, width),
            "forced": ForcedDrafter(),
        }
        if draft_model is not None:
            certificate = certificates.certificate_for(draft_model)
            own = Runner(draft_model, certificate, runner.pool.num_pages, runner.pool.page_size)
            drafters["model"] = ModelDrafter(own, self.config.vocab_size)
        return drafters

    def _check_tokens(self, ids: list[int], before: int = 0) -> list[int]:
        """The ids, or BadRequest: empty, out of the vocabulary, or too long."""
        if not ids:
            raise BadRequest("an empty prompt: give at least one token")
        if bad := [t for t in ids if not isinstance(t, int) or not 0 <= t < self.config.vocab_size]:
            raise BadRequest(f"token {bad[0]!r} is not in the vocabulary of {self.config.vocab_size}")
        if before + len(ids) > self.config.max_positions:
            raise BadRequest(f"{before + len(ids)} tokens exceed the model's {self.config.max_positions} positions")
        return ids

    def _target(self, target: str | int) -> int:
        if isinstance(target, int):
            return self._check_tokens([target])[0]
        ids = self.text.encode(target, special=False)
        if len(ids) != 1:
            raise BadRequest(f"target {target!r} is {len(ids)} tokens; a target must be one token")
        return ids[0]


def _edits_json(edits: tuple[PlacedEdit, ...], hooks: tuple[Hook, ...]) -> dict[str, Any]:
    """Trace fields; absent where there are no edits. Of hooks only that they were there: functions are not written down."""
    out: dict[str, Any] = {"edits": [edit.to_json() for edit in edits]} if edits else {}
    return out | ({"hooks": len(hooks)} if hooks else {})


def _capture_json(capture: CaptureSpec | None) -> dict[str, Any] | None:
    return None if capture is None else asdict(capture)
