"""Draws are pure, pinned, uniform and independent of each other."""

from collections import Counter

from replaylens.tasks.task import Draws

PINNED_BITS = [6872651907919724493, 6787158988321881170, 14198632120367806709]
PINNED_ORDER = list("cafebd")


def test_pinned() -> None:
    draws = Draws("key", 7)
    assert [draws.bits("purpose", place) for place in range(3)] == PINNED_BITS
    assert draws.order("abcdef", "order") == PINNED_ORDER


def test_key_index_purpose_and_place_all_matter() -> None:
    drawn = {
        Draws(key, index).bits(purpose, place)
        for key in ("a", "b")
        for index in (1, 11)
        for purpose in ("x", "y")
        for place in (0, 1, 11)
    }
    assert len(drawn) == 24


def test_even() -> None:
    counts = Counter(Draws("even", index).below(6, "die") for index in range(6000))
    assert set(counts) == set(range(6)) and all(870 < count < 1130 for count in counts.values())
    pairs = Counter((Draws("k", i).below(2, "a", 0), Draws("k", i).below(2, "a", 1)) for i in range(4000))
    assert all(870 < count < 1130 for count in pairs.values())


def test_chance_between_and_order() -> None:
    assert not any(Draws("k", i).chance(0, "c") for i in range(500))
    assert all(Draws("k", i).chance(1, "c") for i in range(500))
    assert 80 < sum(Draws("k", i).chance(0.1, "c") for i in range(1000)) < 125
    assert {Draws("k", i).between((3, 5), "b") for i in range(100)} == {3, 4, 5}
    orders = Counter(tuple(Draws("k", i).order("abc", "o")) for i in range(1200))
    assert len(orders) == 6 and all(140 < count < 260 for count in orders.values())
