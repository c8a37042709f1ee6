"""Faults that a second look at the engine found: each is a test, named after what must hold instead."""

from typing import Any

import pytest
import torch

from replaylens.engine.engine import Engine, ThinkingEngine
from replaylens.engine.errors import BadEdit, BadRequest, BadTrace, NonFinite
from replaylens.engine.lens import readout
from replaylens.engine.lens import tuned as tuned_lens
from replaylens.engine.loop.loop import Loop
from replaylens.engine.model import weights
from replaylens.engine.request.capture import LensSpec
from replaylens.engine.request.edits import Edit
from replaylens.engine.request.sampling import Sampling
from tests.families import hugging_face

PROMPT = "A coin's state is heads. Alice flips,"


@pytest.fixture
def served() -> Engine:
    return fresh()


def fresh() -> Engine:
    return Engine.load("coin-plain", record=True)


# ---- traces ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("meanwhile", ["generate", "force"])
def test_a_request_that_was_refused_is_not_in_the_trace(served: Engine, meanwhile: str) -> None:
    """It used to end the stream's own request in the replay."""
    branch = served.prompt(PROMPT)
    stream = branch.stream(6, drafter="ngram", window=2)
    next(stream)
    before = branch.tokens
    with pytest.raises(BadRequest, match="being worked on"):
        branch.generate(2) if meanwhile == "generate" else branch.force(" heads")
    assert branch.tokens == before
    list(stream)
    replayed = fresh().replay_trace(served.trace)
    assert isinstance(replayed, dict) and replayed[branch.id].tokens == branch.tokens


def test_a_trace_with_a_tuned_lens_says_how_to_make_it_known(served: Engine) -> None:
    rows = torch.stack([served.prompt(PROMPT, sites="S").activations[s] for s in served.sites.letter("S")], 1)
    lens = tuned_lens.train(served.model, rows, steps=1)
    recorded, other = fresh(), fresh()
    branch = recorded.prompt(PROMPT, sites="Z", lens=lens)
    with pytest.raises(BadTrace, match="make it known with"):
        other.replay_trace(recorded.trace)
    knows = fresh()
    knows.capture_spec("Z", lens=lens)
    replayed = knows.replay_trace(recorded.trace)
    assert isinstance(replayed, dict)
    assert torch.equal(replayed[branch.id].activations["Z.kl"], branch.activations["Z.kl"])


# ---- requests --------------------------------------------------------------------------------------------------------


def test_no_chains_at_a_position_are_no_drafts(served: Engine) -> None:
    branch, right = served.prompt(PROMPT), served.prompt(PROMPT).generate(4)
    assert branch.generate(4, drafter="forced", drafts={branch.length: []}).tokens == right.tokens


def test_a_fault_in_the_admission_ends_the_jobs_and_not_the_engine(served: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    branch = served.prompt(PROMPT)
    with monkeypatch.context() as patch:
        patch.setattr(Loop, "admit", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            branch.generate(2)
    assert served.loop.jobs == [] and branch.generate(2).length == served.prompt(PROMPT).length + 2
    served.check_integrity()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"drafter": "ngram", "drafts": {9: [[1]]}}, "for drafter='forced'"),
        ({"sampling": Sampling(stop_tokens=(10**9,))}, "not in the vocabulary"),
    ],
)
def test_options_that_would_do_nothing_are_refused(served: Engine, options: dict[str, Any], says: str) -> None:
    with pytest.raises(BadRequest, match=says):
        served.prompt(PROMPT).generate(2, **options)


@pytest.mark.parametrize("tokens", [("heads",), 3, (True,)])
def test_stop_tokens_are_token_ids(tokens: Any) -> None:
    with pytest.raises(BadRequest, match="stop_tokens="):
        Sampling(stop_tokens=tokens)


def test_a_lens_layer_of_zero_is_refused() -> None:
    with pytest.raises(BadRequest, match="lens_layer=0: give a whole number between 1 and 4"):
        Engine.load("coin-plain", lens_layer=0)


@pytest.mark.parametrize("top_k", [0, -1, 10**6, 2.5])
def test_how_many_tokens_z_keeps(served: Engine, top_k: Any) -> None:
    with pytest.raises(BadRequest, match=r"top_k=.* give a whole number between 1 and"):
        served.prompt(PROMPT, sites="Z", top_k=top_k)
    assert served.loop.lanes == {}


# ---- commits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", ["ngram", "lens"])
def test_where_captured_rows_cannot_be_read_nothing_is_committed(
    served: Engine, drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    branch = served.prompt(PROMPT, sites="STCZ", keep_rejected=True)
    before = branch.tokens, branch.activations.positions()
    with monkeypatch.context() as patch:
        patch.setattr(readout, "read", lambda *_, **__: (_ for _ in ()).throw(MemoryError("no room for Z")))
        with pytest.raises(MemoryError):
            branch.generate(4, drafter=drafter, window=4)
    assert (branch.tokens, branch.activations.positions()) == before
    served.check_integrity()
    assert branch.generate(4, drafter=drafter).tokens == served.prompt(PROMPT).generate(4).tokens


def test_drafts_behind_the_end_are_not_rejected(served: Engine) -> None:
    """They are what the model would have said, had it been asked to go on."""
    free = served.prompt(PROMPT).generate(6, sampling=Sampling(ignore_eos=True)).generated
    branch = served.prompt(PROMPT, sites="S", keep_rejected=True)
    ending = Sampling(ignore_eos=True, stop_tokens=(free[1],))
    first = free.index(free[1])
    branch.generate(6, drafter="forced", drafts={branch.length: [free[:5]]}, sampling=ending, keep_rejected=True)
    assert branch.generated == free[: first + 1] and branch.rejected == []
    assert branch.statistics.rejected == 0
    other = served.prompt(PROMPT, sites="S", keep_rejected=True)
    wrong = [*free[: first + 1], *((token + 1) % served.config.vocab_size for token in free[first + 1 : 5])]
    other.generate(6, drafter="forced", drafts={other.length: [wrong]}, sampling=ending, keep_rejected=True)
    assert other.generated == branch.generated and other.rejected == []
    replayed = fresh().replay_trace(served.trace)
    assert isinstance(replayed, dict) and replayed[branch.id].tokens == branch.tokens


# ---- bits ------------------------------------------------------------------------------------------------------------


def test_a_single_row_has_the_statistics_that_it_has_among_others() -> None:
    """On two threads the library would split the sum of a single row, and round otherwise."""
    log_p = (torch.randn(24, 1, 49152, generator=torch.Generator().manual_seed(0)) * 3).log_softmax(-1)
    spec, threads = LensSpec((), top_k=1), torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        whole = readout.statistics(spec, log_p, [3] * 24)
        for i in range(24):
            alone = readout.statistics(spec, log_p[i : i + 1], [3])
            assert all(torch.equal(alone[name], whole[name][i : i + 1]) for name in whole)
        p = log_p.exp()
        split = [torch.equal((p[i : i + 1] * log_p[i : i + 1]).sum(-1), (p * log_p).sum(-1)[i : i + 1]) for i in range(24)]
        assert not all(split), "the control: summed alone, rows do differ"
    finally:
        torch.set_num_threads(threads)


def test_a_tuned_lens_of_a_model_in_bfloat16() -> None:
    model = weights.load(hugging_face("llama"), torch.bfloat16)
    rows = torch.randn(40, 4, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    lens = tuned_lens.train(model, rows, steps=3)
    assert lens.weight.dtype == torch.float32 and lens.require(model) is lens
    assert lens.translate(rows).dtype == torch.bfloat16


# ---- what is left behind ---------------------------------------------------------------------------------------------


def test_thoughts_that_fail_give_their_pages_back(monkeypatch: pytest.MonkeyPatch) -> None:
    thinker = Engine.load("coin-thinking")
    assert isinstance(thinker, ThinkingEngine)
    blocks = thinker.prefiller.blocks
    monkeypatch.setattr(blocks, "_logits", lambda rows: (_ for _ in ()).throw(NonFinite("planted")))
    with pytest.raises(NonFinite):
        thinker.prompt(PROMPT)
    assert blocks.pool.num_free == blocks.pool.num_pages and thinker.loop.lanes == {}


def test_a_refused_prompt_of_a_thinker_leaves_no_branch() -> None:
    thinker = Engine.load("coin-thinking")
    assert isinstance(thinker, ThinkingEngine)
    with pytest.raises(BadRequest):
        thinker.prompts([PROMPT, PROMPT], guess="drafted", drafts=[[], [(99999,)]])
    assert thinker.loop.lanes == {} and not thinker.tree.roots()


# ---- what users try ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [lambda x, hook: x[:, :1], lambda x, hook: x[0], lambda x, hook: x.numpy()])
def test_a_hook_function_that_gives_something_else_is_refused(served: Engine, wrong: Any) -> None:
    """A single row used to be written over all positions."""
    (child,) = served.prompt(PROMPT).fork(hooks=[("blocks.1.hook_in", wrong)])
    with pytest.raises(BadEdit, match=r"the hook function on blocks\.1\.hook_in gave a"):
        child.generate(2)
    served.check_integrity()


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda: Edit("blocks.1.hook_in", "add", [1.0, 2.0]), r"the value for .*=\[1.0, 2.0\]: give a tensor"),  # type: ignore[arg-type]
        (lambda: Edit("blocks.1.hook_in", "add", torch.ones(3)), r"wanted is \(128,\)$"),
        (lambda: Edit("blocks.1.hook_in", "zero", positions=1.5), "positions=1.5: give whole numbers"),  # type: ignore[arg-type]
        (lambda: Edit("blocks.1.hook_in", "project_out", torch.zeros(128)), "are zero or depend"),
        (lambda: "blocks.1.hook_in", "edits='blocks.1.hook_in': give a list of Edits"),
    ],
)
def test_edits_that_are_none(served: Engine, edit: Any, says: str) -> None:
    root = served.prompt(PROMPT)
    with pytest.raises(BadEdit, match=says):
        root.fork(edits=[edit()])
    with pytest.raises(BadEdit, match="give a list of Edits"):
        served.prompt(PROMPT, edits=Edit("blocks.1.hook_in", "zero"))  # type: ignore[arg-type]


def test_prompts_as_tensors_and_as_nothing(served: Engine) -> None:
    ids = served.prompt(PROMPT).tokens
    assert served.prompt(torch.tensor(ids)).tokens == ids
    for nothing in (None, 7):
        with pytest.raises(BadRequest, match="give text, or token ids"):
            served.prompt(nothing)  # type: ignore[arg-type]
    with pytest.raises(BadRequest, match="drafter=None: give the name of a drafter"):
        served.prompt(ids).generate(2, drafter=None)  # type: ignore[arg-type]


def test_captured_rows_read_like_a_dictionary(served: Engine) -> None:
    rows = served.prompt(PROMPT, sites="S").activations
    assert "blocks.0.hook_in" in rows and "blocks.9.hook_in" not in rows
    assert list(rows) == rows.keys() == served.sites.letter("S")
    assert all(torch.equal(x, rows[site]) for site, x in rows.items()) and dict(rows).keys() == set(rows)
    assert repr(rows) == f"Recording(positions 0 to 8, {len(rows.sites())} sites)"


def test_a_thinker_pads_what_is_run_with_a_cache() -> None:
    thinker = Engine.load("coin-thinking")
    text = "A coin's state is heads. Alice flips, then Bob flips. What's the state? A:"
    logits, cache = thinker.run_with_cache(text, names_filter="blocks.0.hook_in")
    assert logits.shape[1] == cache["blocks.0.hook_in"].shape[1] == thinker.prompt(text).length
