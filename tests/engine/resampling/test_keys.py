"""Rows with one value per key, of rollouts that end at different lengths: padded as on one path, whatever the waves."""

from pathlib import Path

import pytest
import torch

from replaylens.engine.model.ops import MASKED
from replaylens.engine.request.sampling import Sampling
from replaylens.engine.resampling import drawing
from replaylens.engine.resampling.drawing import plan_rollouts
from replaylens.engine.resampling.plan import Answer
from replaylens.engine.resampling.rollouts import Rollouts
from replaylens.engine.serving.branch import Branch
from tests.toy_model import VOCAB, engine

PATTERN, SCORES = "blocks.1.attn.hook_pattern", "blocks.0.attn.hook_attn_scores"
SITES = [PATTERN, SCORES, "blocks.1.hook_in"]
HOT = Sampling(temperature=1.2, seed=5, stop_tokens=range(VOCAB - 8, VOCAB))
ANSWER = Answer.regex(r"\b(1\d)\b")
TOKENS, AT = [1, 2, 3, 4, 5, 6, 7], [4, 6]


def path() -> Branch:
    return engine().prompt(TOKENS[:3]).force(TOKENS[3:])


def drawn(wave: int | None = None, folder: Path | None = None, replace: list[str] | list[int] | None = None) -> Rollouts:
    keep = ["fork", "all", -1]
    return path().resample(
        6, at=AT, sampling=HOT, max_new=7, answer=ANSWER, sites=SITES, keep=keep, wave=wave, folder=folder, replace=replace
    )


@pytest.fixture(scope="module")
def reference() -> Rollouts:
    return drawn()


def test_the_rollouts_end_differently(reference: Rollouts) -> None:
    assert {each.stopped for each in reference} == {"answer", "eos", "length"}
    assert len({each.position + len(each.tokens) for each in reference}) > 3


def test_rows_are_those_of_the_path_alone(reference: Rollouts) -> None:
    """One column per token of the rollout's own path, and in `states` one per token of the longest."""
    longest, first = max(each.position + len(each.tokens) for each in reference), 0
    for each in reference:
        whole = [*TOKENS[: each.position], *each.tokens]
        alone = engine().prompt(whole, sites=SITES).activations
        at, end = [position for _, position in each.rows], first + len(each.rows)
        for site, rest in ((PATTERN, 0.0), (SCORES, MASKED)):
            assert torch.equal(each.states[site], alone[site][at])
            joined = reference.states[site][first:end]
            assert joined.shape[-1] == longest and torch.equal(joined[..., : len(whole)], alone[site][at])
            assert (joined[..., len(whole) :] == rest).all()
        assert torch.equal(reference.states[SITES[2]][first:end], alone[SITES[2]][at])
        first = end
    assert first == len(reference.index) == len(reference.states[PATTERN])


@pytest.mark.parametrize("wave", [1, 4, 100])
@pytest.mark.parametrize("replace", [None, [8, 9]])
def test_waves_and_folders_change_no_bit(wave: int, replace: list[int] | None, tmp_path: Path, reference: Rollouts) -> None:
    whole = drawn(replace=replace) if replace else reference
    found = [
        drawn(wave, replace=replace),
        drawn(wave, tmp_path, replace),
        drawn(wave, tmp_path, replace),
        Rollouts.load(tmp_path),
    ]
    for each in found:
        assert each.digest == whole.digest
        assert all(torch.equal(each.states[site], whole.states[site]) for site in SITES)


def test_the_bytes_of_a_wave_count_its_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of a pattern has heads x keys values, one of the logits the vocabulary and, in its pass, the stream before it."""
    monkeypatch.setattr(drawing, "MAX_BYTES", 30_000)
    wave = lambda site: plan_rollouts(path(), 50, AT, HOT, 7, sites=site)[1]  # noqa: E731
    assert wave(SITES[2]) == 30_000 // (8 * 32 * 4)
    assert wave(PATTERN) == 30_000 // (8 * 4 * (6 + 7) * 4)
    assert wave("unembed.hook_out") == 30_000 // (8 * (32 + VOCAB) * 4)
