"""Every machine has the digests of `tests/digests.json`."""

import json

import pytest

from tests.digests import FILE, cases

KNOWN = json.loads(FILE.read_text())


def test_every_case_has_its_digest() -> None:
    assert list(KNOWN) == list(cases())


@pytest.mark.parametrize("name", list(cases()))
def test_this_machine_has_the_digest_of_all_machines(name: str) -> None:
    assert cases()[name]() == KNOWN[name]
