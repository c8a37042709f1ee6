"""Fixtures for the view tests: a tiny model that emits markup and whose drafts are often rejected, with its runs and dumps."""

from collections.abc import Iterable

import pytest

from replaylens import tasks
from replaylens.dumps.reader import Dump
from replaylens.engine.engine import Engine
from replaylens.replay.run import Run
from replaylens.tasks import WordTokenizer
from tests.toy_model import random_model

HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror="alert(2)">',
    "</script><!--",
    "&amp;",
    "\u2028'",
    "\x00\n\t",
    "]]>",
    "\ufffd",
)
"""tokens that a hostile tokenizer might produce"""


class HostileTokenizer(WordTokenizer):
    """A tokenizer that decodes the coin's names as markup."""

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(self.reads(i) for i in ids)

    def reads(self, token: int) -> str:
        plain = super().decode([token])
        return HOSTILE[token % len(HOSTILE)] if plain.strip().istitle() and len(plain.strip()) > 2 else plain


@pytest.fixture(scope="session")
def engine() -> Engine:
    words = HostileTokenizer(tasks.get("coin").vocabulary())
    draft = random_model(seed=3, vocab_size=words.vocab_size, num_layers=1)
    return Engine(random_model(vocab_size=words.vocab_size), words, draft_model=draft, record=True)


@pytest.fixture(scope="session")
def run(engine: Engine) -> Run:
    """Eight examples with S and Z of every row. Tests must not change it."""
    made = engine.replay(tasks.get("coin")(flips=(1, 3)).examples(8), sites="SZ", drafter="lens", window=4, max_new=9)
    assert isinstance(made, Run) and any(result.rejected for result in made), "the model must have drafts rejected"
    return made


@pytest.fixture(scope="session")
def dump(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Dump:
    """The same run on disk. Tests must not change it."""
    return run.save(tmp_path_factory.mktemp("dump"), examples_per_shard=5)
