"""Thinking-States models on a CUDA device: three code paths and any batch give one result."""

import pytest
import torch

from replaylens import tasks
from replaylens.engine.engine import Engine
from replaylens.engine.request.edits import Edit
from replaylens.thinking.core import ThinkingBranch, ThinkingEngine
from replaylens.thinking.model import COMPRESS_SITE, STATE_SITE, THINK_SITE
from replaylens.thinking.prefill import Prefiller
from replaylens.weights.opening import GUESSES
from tests.thinking.reference import SHAPES, random_prompt, thinking_model

pytestmark = pytest.mark.gpu
PROMPTS = [random_prompt(n, seed=n) for n in (1, 4, 7, 25)]
Outcome = dict[str, torch.Tensor]


def thinker(name: str) -> ThinkingEngine:
    return ThinkingEngine(thinking_model(SHAPES[name]).to("cuda"), cache_tokens=4096)


def outcome(branch: ThinkingBranch) -> Outcome:
    """KV, captured rows and thoughts."""
    found = {site: branch.activations[site].contiguous() for site in branch.activations.sites()}
    return found | {"kv": branch.kv().cpu(), "tokens": torch.tensor(branch.tokens)}


def differences(a: Outcome, b: Outcome) -> list[str]:
    bits = lambda x: x.contiguous().view(torch.uint8)  # noqa: E731 (NaN marks a row without successor)
    return [name for name in a.keys() | b.keys() if not torch.equal(bits(a[name]), bits(b[name]))]


@pytest.mark.parametrize("name", SHAPES)
def test_three_roads_and_any_company(name: str) -> None:
    """In float32: rounded to bfloat16, models this small leave the doctor's negative controls no difference to find."""
    served = thinker(name)
    truth = [outcome(served.prompt(path, sites="STCZ", guess="sequential")) for path in PROMPTS]
    for guess in GUESSES:
        together = served.prompts(PROMPTS, sites="STCZ", guess=guess, keep_rejected=True)
        assert [differences(outcome(branch), right) for branch, right in zip(together, truth, strict=True)] == [[]] * 4
        served.check_integrity()
    thoughts = [thought for branch in together for thought in branch.thoughts.chunks]
    assert any(t.empty for t in thoughts) and not all(t.empty for t in thoughts)


@pytest.mark.parametrize("name", SHAPES)
def test_steps_as_graphs_and_launched_agree(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thoughts of few and of many chunks; a second engine without graphs gives the truth."""
    from replaylens.thinking import graphs  # needs triton

    monkeypatch.setattr(graphs, "WORTH", 1 << 30)
    launched = thinker(name)
    truth = [outcome(launched.prompt(path, sites="STCZ", guess="sequential")) for path in PROMPTS]
    assert not launched.prefiller.blocks._graphs
    monkeypatch.setattr(graphs, "WORTH", 1)
    replayed = thinker(name)
    for guess in GUESSES:
        together = replayed.prompts(PROMPTS, sites="STCZ", guess=guess)
        assert [differences(outcome(branch), right) for branch, right in zip(together, truth, strict=True)] == [[]] * 4
        replayed.check_integrity()
    assert set(replayed.prefiller.blocks._graphs) <= set(graphs.SIZES) and replayed.prefiller.blocks._graphs


def test_edits_on_s_t_and_c() -> None:
    served, path = thinker("rotary"), PROMPTS[2]
    push = torch.randn(32, generator=torch.Generator().manual_seed(0))
    branch = served.prompt(path, sites="STCZ")
    plain, said = outcome(branch), next(i for i, thought in enumerate(branch.thoughts.chunks) if not thought.empty)
    places = {STATE_SITE: 4} | {site: served.thought_place(site, said) for site in (THINK_SITE, COMPRESS_SITE)}
    for site, place in places.items():
        edits = [Edit(site, "add", 3 * push, positions=[place])]
        alone = outcome(served.prompt(path, sites="STCZ", edits=edits, guess="sequential"))
        assert not differences(outcome(served.prompts([PROMPTS[3], path], sites="STCZ", edits=edits)[1]), alone)
        assert differences(alone, plain)


def test_a_wrong_guess_that_is_kept_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: keeping a wrong guess changes the result."""
    served = thinker("rotary")
    right = outcome(served.prompt(PROMPTS[3], sites="STCZ", guess="sequential"))
    judge = Prefiller._judge
    monkeypatch.setattr(Prefiller, "_judge", lambda self, p, guessed, found: judge(self, p, [t.tokens for t in found], found))
    assert differences(outcome(served.prompt(PROMPTS[3], sites="STCZ", guess="empty")), right)


def test_a_trained_model_in_bfloat16() -> None:
    """Stories of 1 to 8 actors on three code paths, alone and in a batch."""
    served = Engine.load("coin-thinking", device="cuda")
    assert isinstance(served, ThinkingEngine)
    stories = [tasks.get("coin")(rendering="picture", flips=n).example(n).prompt for n in (1, 3, 5, 8)]
    truth = [outcome(served.prompt(story, sites="STCZ", guess="sequential")) for story in stories]
    for guess in GUESSES:
        together = served.prompts(stories, sites="STCZ", guess=guess)
        assert [differences(outcome(branch), right) for branch, right in zip(together, truth, strict=True)] == [[]] * 4


def test_the_pictures_sentence() -> None:
    sentence = "A coin's state is heads. Alice flips, then Bob flips. What's the state? A:"
    branch = Engine.load("coin-thinking", device="cuda").prompt(sentence).generate(2)
    assert isinstance(branch, ThinkingBranch)
    said = {"".join(chunk.tokens): chunk.thought for chunk in branch.picture().chunks[:-1]}
    assert said.pop(" Alice flips") == (" tails", "<EOS>") and said.pop(" Bob flips") == (" heads", "<EOS>")
    assert set(said.values()) == {("<EOS>",)} and branch.text == sentence + " heads."
