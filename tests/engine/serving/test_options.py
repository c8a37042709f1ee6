"""Options of engines and requests."""

import inspect
from typing import Any, get_type_hints

import pytest
import torch

from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadRequest
from replaylens.engine.request.sampling import Sampling
from replaylens.engine.serving.core import Core, CoreOptions
from tests.engine.coin_engine import PROMPT


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"drafter": "ngram", "drafts": {9: [[1]]}}, "Use drafter='forced'"),
        ({"sampling": Sampling(stop_tokens=(10**9,))}, "not in the vocabulary"),
    ],
)
def test_options_that_would_do_nothing_are_refused(served: Engine, options: dict[str, Any], says: str) -> None:
    with pytest.raises(BadRequest, match=says):
        served.prompt(PROMPT).generate(2, **options)


def test_one_word_for_rows_and_another_for_pages(served: Engine) -> None:
    """`keep_rejected` of prompt keeps rows, `keep_pages` of generate keeps pages. Its old name still works, with a warning."""
    drafts: dict[str, Any] = {"drafter": "forced", "drafts": {10: [[1, 2]]}}
    assert not served.prompt(PROMPT).generate(3, **drafts).rejected
    assert served.prompt(PROMPT).generate(3, **drafts, keep_pages=True).rejected
    with pytest.warns(DeprecationWarning, match=r"keep_rejected of generate\(\) is now called keep_pages"):
        assert served.prompt(PROMPT).generate(3, **drafts, keep_rejected=True).rejected  # type: ignore[call-arg]
    with pytest.warns(DeprecationWarning, match=r"keep_rejected of stream\(\)"):
        list(served.stream(served.prompt(PROMPT), 2, keep_rejected=True))  # type: ignore[call-arg]
    with pytest.raises(BadRequest, match="got keep_pages and keep_rejected, its old name"):
        served.prompt(PROMPT).generate(3, keep_pages=True, keep_rejected=True)  # type: ignore[call-arg]


@pytest.mark.parametrize("tokens", [("heads",), 3, (True,)])
def test_stop_tokens_are_token_ids(tokens: Any) -> None:
    with pytest.raises(BadRequest, match="stop_tokens="):
        Sampling(stop_tokens=tokens)


def test_options_that_are_passed_on_are_those_of_an_engine() -> None:
    """`Engine.load` and a Thinking-States engine pass `CoreOptions` on: what it lacks, they could not set."""
    own = [each for each in inspect.signature(Core).parameters.values() if each.kind is each.KEYWORD_ONLY]
    hints = get_type_hints(Core.__init__)
    assert {each.name: hints[each.name] for each in own} == get_type_hints(CoreOptions)
    assert {each.name for each in own} < set(inspect.signature(Engine.load).parameters)


def test_a_lens_layer_of_zero_is_refused() -> None:
    with pytest.raises(BadRequest, match=r"lens_layer=0\. Give a whole number between 1 and 4"):
        Engine.load("coin-plain", lens_layer=0)


@pytest.mark.parametrize("top_k", [0, -1, 10**6, 2.5])
def test_how_many_tokens_z_keeps(served: Engine, top_k: Any) -> None:
    with pytest.raises(BadRequest, match=r"top_k=.* Give a whole number between 1 and"):
        served.prompt(PROMPT, sites="Z", top_k=top_k)
    assert served.loop.lanes == {}


def test_prompts_as_tensors_and_as_nothing(served: Engine) -> None:
    ids = served.prompt(PROMPT).tokens
    assert served.prompt(torch.tensor(ids)).tokens == ids
    for nothing in (None, 7):
        with pytest.raises(BadRequest, match="Give text, or token ids"):
            served.prompt(nothing)  # type: ignore[arg-type]
    with pytest.raises(BadRequest, match=r"drafter=None\. Give the name of a drafter"):
        served.prompt(ids).generate(2, drafter=None)  # type: ignore[arg-type]


def test_captured_rows_read_like_a_dictionary(served: Engine) -> None:
    rows = served.prompt(PROMPT, sites="S").activations
    assert "blocks.0.hook_in" in rows and "blocks.9.hook_in" not in rows
    assert list(rows) == rows.keys() == served.sites.letter("S")
    assert all(torch.equal(x, rows[site]) for site, x in rows.items()) and dict(rows).keys() == set(rows)
    assert repr(rows) == f"Recording(positions 0 to 8, {len(rows.sites())} sites)"
