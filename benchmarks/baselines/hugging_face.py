"""Hugging Face's `generate` and forward on the same weights and device, beside our engine through its public API."""

from typing import Any

import torch
from torch import Tensor

from benchmarks.baselines.subject import ENDLESS, Subject
from benchmarks.llama import difference, hugging_face
from replaylens.engine.memory.pages import PageTable
from replaylens.engine.passes.batch import Segment


def hugging_face_numbers(subject: Subject) -> None:
    """Eager first; the compiled one last, because compiling takes a minute or two."""
    model = hugging_face(subject.engine.model)
    _check(subject, model)
    for count in subject.sizes.batches:
        _generation(subject, model, count, "eager")
    for count, length in subject.sizes.prompts:
        _prompt(subject, model, count, length)
    if subject.device == "cuda":
        _generation(subject, model, 1, "compiled, static cache", cache_implementation="static")
    del model
    subject.clear()


@torch.inference_mode()
def _check(subject: Subject, model: Any) -> None:
    (path,), table, runner = subject.prompts(1, subject.sizes.contexts[0]), PageTable(), subject.engine.runner
    theirs = model(torch.tensor([path], device=subject.device), logits_to_keep=1).logits[0]
    runner.reserve(table, 0, len(path))
    ours = runner.exact([Segment(table, 0, path, 1)]).logits
    runner.pool.release(table)
    assert difference(ours, theirs) < subject.tolerance, "Hugging Face computes something else"


def _generation(subject: Subject, model: Any, count: int, how: str, **options: Any) -> None:
    """Milliseconds a step: what the longer of two generations takes more, the prompt being the same."""
    (few, many), length = subject.sizes.peer_tokens, subject.sizes.contexts[0]
    paths = subject.prompts(count, length)
    x = torch.tensor(paths, device=subject.device)
    more = dict(do_sample=False, pad_token_id=0, attention_mask=torch.ones_like(x), **options)

    @torch.inference_mode()
    def theirs(tokens: int) -> None:
        """Both lengths have the same limit, hence the same static cache: another one would be compiled again."""
        done = lambda ids, scores: torch.full((count,), ids.shape[1] >= length + tokens, device=ids.device)  # noqa: E731
        out: Tensor = model.generate(x, min_new_tokens=tokens, max_new_tokens=many, stopping_criteria=[done], **more)
        assert out.shape == (count, length + tokens)

    def ours(tokens: int) -> None:
        branches = subject.engine.prompts(paths)
        subject.engine.generate(branches, tokens, sampling=ENDLESS)
        for branch in branches:
            branch.release()
        subject.engine.prefix.clear()

    times = subject.in_turns(lambda: theirs(few), lambda: theirs(many), lambda: ours(few), lambda: ours(many), rounds=3)
    their_step, our_step = ((times[i + 1] - times[i]) / (many - few) for i in (0, 2))
    subject.table.add(
        f"Hugging Face, {how}, batch {count}",
        ratio=their_step / our_step,
        hugging_face_ms=their_step,
        ours_ms=our_step,
        hugging_face_tokens_per_s=1e3 * count / their_step,
        ours_tokens_per_s=1e3 * count / our_step,
    )


def _prompt(subject: Subject, model: Any, count: int, length: int) -> None:
    paths = subject.prompts(count, length)
    x = torch.tensor(paths, device=subject.device)

    @torch.inference_mode()
    def theirs() -> None:
        model(x, logits_to_keep=1)

    def ours() -> None:
        for branch in subject.engine.prompts(paths):
            branch.release()
        subject.engine.prefix.clear()

    their_time, our_time = subject.in_turns(theirs, ours, rounds=3)
    subject.table.add(
        f"Hugging Face, eager, prompts, {count} x {length} tokens",
        ratio=their_time / our_time,
        hugging_face_ms=their_time,
        ours_ms=our_time,
    )
