"""The three groups satisfy the axioms and are the groups they claim to be."""

from collections import Counter
from itertools import product

import pytest

from replaylens.tasks.words import NAMES, ORDER, Group, group


def order_of(chosen: Group, a: int) -> int:
    power, count = a, 1
    while power:
        power, count = chosen.times(power, a), count + 1
    return count


@pytest.mark.parametrize("name", NAMES)
def test_axioms(name: str) -> None:
    chosen = group(name)
    everyone = list(range(ORDER))
    assert len(set(chosen.elements)) == ORDER
    for a in everyone:
        assert chosen.times(0, a) == chosen.times(a, 0) == a
        assert sorted(chosen.table[a]) == everyone
        assert 0 in chosen.table[a]
    for a, b, c in product(everyone[::7], everyone[::5], everyone[::3]):
        assert chosen.times(chosen.times(a, b), c) == chosen.times(a, chosen.times(b, c))


@pytest.mark.parametrize(
    ("name", "orders"),
    [
        ("A5", {1: 1, 2: 15, 3: 20, 5: 24}),
        ("Z60", {1: 1, 2: 1, 3: 2, 4: 2, 5: 4, 6: 2, 10: 4, 12: 4, 15: 8, 20: 8, 30: 8, 60: 16}),
        ("A4xZ5", {1: 1, 2: 3, 3: 8, 5: 4, 10: 12, 15: 32}),
    ],
)
def test_orders_of_elements(name: str, orders: dict[int, int]) -> None:
    """The counts match the textbook. No other group of order 60 has them."""
    assert Counter(order_of(group(name), a) for a in range(ORDER)) == orders
