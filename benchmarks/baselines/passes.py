"""Decode steps and prompt passes against two baselines that promise nothing about bits.

* shared: the library's products, our attention kernel, cache and graphs (the engine's own fast path);
* library: the library's products and attention over a contiguous cache, see `library.py`.

Ratios are the library's time over ours: above 1, ours is faster.
"""

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.baselines.library import LibraryDecoder, graphed
from benchmarks.baselines.subject import ENDLESS, Subject
from benchmarks.llama import difference
from replaylens.engine.memory.pages import PageTable
from replaylens.engine.passes.batch import Segment
from replaylens.engine.serving.branch import Branch


def prompt_passes(subject: Subject) -> None:
    """One pass over whole prompts, from nothing to the logits of their last tokens."""
    runner = subject.engine.runner
    if runner.graphs is not None:
        runner.graphs.worth = 1  # a graph at once: the second pass of a shape is timed
    for count, length in subject.sizes.prompts:
        segments = [Segment(PageTable(), 0, path, 1) for path in subject.prompts(count, length)]
        for segment in segments:
            runner.reserve(segment.table, 0, length)
        library = LibraryDecoder(subject, count, length)
        work = _checked_prompt(subject, library, segments)
        ours, shared, theirs = subject.in_turns(lambda: runner.exact(segments), lambda: runner.fast(segments), work)
        subject.table.add(
            f"prompts, {count} x {length} tokens",
            ratio=theirs / ours,
            ratio_to_shared=shared / ours,
            ours_ms=ours,
            shared_ms=shared,
            library_ms=theirs,
            library_attention=library.chosen["prompt"],
        )
        for segment in segments:
            runner.pool.release(segment.table)
        subject.clear()


def _checked_prompt(subject: Subject, library: LibraryDecoder, segments: list[Segment]) -> Callable[[], Any]:
    """The library's pass, after a check: it computes what ours does, and in ours a prompt does not see the others."""
    runner = subject.engine.runner
    alone, together = runner.exact(segments[-1:]).logits.clone(), runner.exact(segments).logits.clone()
    assert torch.equal(together[-1:], alone), "company moved bits"
    tokens = torch.tensor([segment.tokens for segment in segments], device=subject.device)
    work = graphed(library.prompt(tokens), subject.device)
    assert difference(work(), together) < subject.tolerance, "the library computes something else"
    return work


def decode_steps(subject: Subject) -> None:
    """One greedy token for every branch of a batch, without the host."""
    for context in subject.sizes.contexts:
        for count in subject.sizes.batches:
            _decode(subject, count, context)
            subject.clear()


def _decode(subject: Subject, count: int, context: int) -> None:
    engine, steps, paths = subject.engine, subject.sizes.steps, subject.prompts(count, context)
    branches = engine.prompts(paths)
    _check_company(subject, branches, paths[0])
    library = LibraryDecoder(subject, count, context + steps)
    middle = context + steps // 2  # ours goes from `context` on; the library stays in the middle of that
    work = _library_step(subject, library, paths, middle)

    def repeated() -> None:
        for _ in range(steps):
            work()

    mine = _engine_steps(subject, branches, context)
    ours, shared, theirs = subject.in_turns(lambda: mine(True), lambda: mine(False), repeated)
    subject.table.add(
        f"decode, batch {count}, {context} tokens before",
        ratio=theirs / ours,
        ratio_to_shared=shared / ours,
        ours_ms=ours / steps,
        shared_ms=shared / steps,
        library_ms=theirs / steps,
        library_attention=library.chosen["step"],
    )
    for branch in branches:
        branch.release()


def _check_company(subject: Subject, branches: list[Branch], path: list[int]) -> None:
    """The first branch, generated beside the others, has the bits of one that was alone."""
    subject.engine.prefix.clear()  # otherwise it would share the pages of its twin
    (single,) = subject.engine.prompts([path])
    length = single.length
    subject.engine.generate([single], subject.sizes.steps, window=1, sampling=ENDLESS)
    subject.engine.generate(branches, subject.sizes.steps, sampling=ENDLESS)
    assert branches[0].tokens == single.tokens and torch.equal(branches[0].kv(), single.kv()), "company moved bits"
    for branch in branches:
        branch.rollback(to=length)
    single.release()


def _library_step(subject: Subject, library: LibraryDecoder, paths: list[list[int]], length: int) -> Callable[[], Any]:
    """A step at `length`, after a check: the last token of the prompts as a step gives what the whole prompts gave."""
    tokens = torch.tensor(paths, device=subject.device)
    whole = library.prompt(tokens)()
    library.prompt(tokens[:, :-1].contiguous())()
    split = graphed(library.step(tokens[:, -1].contiguous(), tokens.shape[1]), subject.device)()
    assert difference(split, whole) < subject.tolerance, "the library's step computes something else"
    return graphed(library.step(tokens[:, -1].contiguous(), length), subject.device)


def _engine_steps(subject: Subject, branches: list[Branch], context: int) -> Callable[[bool], Any]:
    """`steps` decode steps from the prompts' last tokens on, canonical or fast, as the engine takes them between two looks of
    the host; on a CPU it looks at each."""
    engine, steps, runner = subject.engine, subject.sizes.steps, subject.engine.runner
    tables = [branch.lane.table for branch in branches]
    for table in tables:
        runner.reserve(table, context - 1, context + steps)
    if engine.loop.bursts is not None:
        from replaylens.engine.passes.bursts import Place

        bursts = engine.loop.bursts
        places = [Place(b.tokens[-1], context - 1, table, ENDLESS) for b, table in zip(branches, tables, strict=True)]
        return lambda exact: bursts.run(places, steps, exact)

    def one_by_one(exact: bool) -> None:
        for step in range(steps):
            segments = [Segment(table, context + step, [2], 1) for table in tables]
            (runner.exact if exact else runner.fast)(segments)

    return one_by_one
