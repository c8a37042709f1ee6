"""Token states stay distinguishable under every common kind of colour blindness, and their text is legible."""

from itertools import combinations

import numpy as np
import pytest

from replaylens.engine.memory.tree import TokenState
from replaylens.engine.resampling.plan import NO_ANSWER, OTHER
from replaylens.views.html import CHECK, INK, KINDS, LOOKS, PAGES, css_variables, svg_style
from replaylens.views.rollouts import FILLS, REST, colours

# Machado, Oliveira and Fernandes (2009), severity 1: how linear RGB is perceived
BLINDNESS = {
    "none": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
TO_CONES = [
    [0.4122214708, 0.5363325363, 0.0514459929],
    [0.2119034982, 0.6806995451, 0.1073969566],
    [0.0883024619, 0.2817188376, 0.6299787005],
]
TO_OKLAB = [
    [0.2104542553, 0.7936177850, -0.0040720468],
    [1.9779984951, -2.4285922050, 0.4505937099],
    [0.0259040371, 0.7827717662, -0.8086757660],
]
APART = 0.1
"""Oklab distance; about five times the just noticeable difference"""


def linear(colour: str) -> np.ndarray:
    c = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


def seen(colour: str, blindness: str) -> np.ndarray:
    rgb = np.clip(np.asarray(BLINDNESS[blindness]) @ linear(colour), 0, 1)
    return np.asarray(TO_OKLAB) @ np.cbrt(np.asarray(TO_CONES) @ rgb)


def distance(a: str, b: str, blindness: str) -> float:
    return float(np.linalg.norm(seen(a, blindness) - seen(b, blindness)))


def contrast(a: str, b: str) -> float:
    """Contrast as defined by the Web Content Accessibility Guidelines."""
    low, high = sorted(float(linear(c) @ [0.2126, 0.7152, 0.0722]) for c in (a, b))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("blindness", BLINDNESS)
def test_states_keep_apart(blindness: str) -> None:
    """Pending has a pattern, so the other kinds must differ by colour."""
    fills = [look.fill for kind, look in KINDS.items() if kind != TokenState.PENDING.value]
    assert min(distance(a, b, blindness) for a, b in combinations(fills, 2)) > APART


@pytest.mark.parametrize("blindness", BLINDNESS)
def test_outcomes_keep_apart(blindness: str) -> None:
    """The first five as token states do, all eight nearly so; the rest share a grey."""
    assert min(distance(a, b, blindness) for a, b in combinations(FILLS[:5], 2)) > APART
    assert min(distance(a, b, blindness) for a, b in combinations(FILLS, 2)) > 0.8 * APART
    assert all(contrast(INK, fill) > 4.5 for fill in (*FILLS, REST))
    assert colours("ab") == list(FILLS[:2]) and colours("abcdefghij") == [*FILLS, REST, REST]
    assert colours(["heads", NO_ANSWER, "tails"]) == [FILLS[0], REST, FILLS[1]] and colours([OTHER]) == [REST]


def test_a_careless_palette_would_fail() -> None:
    """Negative control: a medium red and green look the same to some readers."""
    assert distance("#b0402a", "#7b7018", "none") > APART > distance("#b0402a", "#7b7018", "deuteranopia")


def test_text_can_be_read() -> None:
    assert all(contrast(INK, fill) > 4.5 for fill in [*(look.fill for look in KINDS.values()), CHECK])
    for page in PAGES.values():
        assert contrast(page["text"], page["page"]) > 4.5 and contrast(page["quiet"], page["panel"]) > 4.5
        assert contrast(page["deep-ink"], page["deep"]) > 4.5


def test_no_state_is_told_by_colour_alone() -> None:
    for marks in ([look.mark for look in KINDS.values()], [look.ascii for look in KINDS.values()]):
        assert len(set(marks)) == len(TokenState) + 1 and all(len(mark) == 1 for mark in marks)
    assert all(look.ascii.isascii() for look in KINDS.values())


def test_a_terminal_has_the_colours_of_the_docs() -> None:
    """Prompt blue, accepted green, pending checkered (a terminal has no pattern), draft yellow, rejected red."""
    colours = [LOOKS[state].colour.removeprefix("bright_") for state in TokenState]
    assert colours == ["blue", "green", "white", "yellow", "red"]


def test_styles_name_every_state() -> None:
    for state in TokenState:
        assert f"--rl-{state.value}:{LOOKS[state].fill}" in css_variables("dark")
        assert f".{state.value}{{fill:{LOOKS[state].fill}}}" in svg_style()
