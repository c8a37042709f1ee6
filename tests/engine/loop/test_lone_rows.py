"""Passes of prompts alone may be wide; nobody else waits for a wide pass, and none captures. Bits stay the same."""

import pytest
import torch

from replaylens.engine.engine import Engine
from replaylens.engine.request.sampling import Sampling
from tests.engine.coin_engine import PROMPT

LONG = " ".join([PROMPT] * 6)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of every canonical pass from here on."""
    from replaylens.engine.passes.runner import Runner

    seen: list[int] = []
    exact = Runner.exact

    def counted(self, segments, *given, **options):
        seen.append(sum(len(segment.tokens) for segment in segments))
        return exact(self, segments, *given, **options)

    monkeypatch.setattr(Runner, "exact", counted)
    return seen


def narrow() -> Engine:
    return Engine.load("coin-plain", max_rows=16)


def wide() -> Engine:
    engine = narrow()
    engine.loop.admission.lone_rows = 1024
    return engine


def test_a_prompt_alone_has_wide_passes_and_the_same_bits(passes: list[int]) -> None:
    usual = narrow().prompt(LONG)
    assert max(passes) == 16
    passes.clear()
    lone = wide().prompt(LONG)
    assert passes == [usual.length], "one pass for all rows"
    assert torch.equal(lone.kv(), usual.kv()) and torch.equal(lone.logits(), usual.logits())


def test_nobody_waits_for_a_wide_pass(passes: list[int]) -> None:
    engine = wide()
    stream = engine.prompt(PROMPT).stream(40, sampling=Sampling(ignore_eos=True))
    next(stream)
    passes.clear()
    long = engine.prompt(LONG)
    assert max(passes) <= 16 and sum(passes) >= long.length - 16
    stream.close()
    passes.clear()
    engine.prefix.clear()
    engine.prompt(LONG)
    assert max(passes) > 16, "the control: nobody decodes any more"


def test_captured_passes_stay_narrow(passes: list[int]) -> None:
    branch = wide().prompt(LONG, sites="S")
    assert max(passes) == 16
    alone = Engine.load("coin-plain", max_rows=1024).prompt(LONG, sites="S")
    for site in alone.activations:
        assert torch.equal(branch.activations[site], alone.activations[site])
