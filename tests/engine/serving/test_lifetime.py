"""An engine that nobody holds is freed at once: its memory must not wait until Python looks for cycles."""

import gc
import weakref
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadRequest, OutOfPages
from replaylens.engine.request.edits import Edit
from replaylens.engine.request.sampling import Sampling
from replaylens.engine.serving import branch as branch_module
from replaylens.engine.serving.forest import Forest
from tests.toy_model import engine

DRAWN = Sampling(temperature=1.0, ignore_eos=True)
S = ["blocks.0.hook_out"]


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def captured(used: Engine) -> None:
    branch = used.prompt([1, 2, 3], sites=S)
    branch.generate(4, drafter="ngram")
    assert len(branch.activations[S[0]]) == 6


def forked(used: Engine) -> None:
    with used.prompt([1, 2, 3], sites=S) as root:
        left, right = root.fork(2)
        used.generate([left, right], 4, sampling=[Sampling(temperature=1.0, seed=i) for i in range(2)])
        root.fork(edits=[Edit(S[0], "add", torch.ones(32))])[0].generate(3)


def resampled(used: Engine) -> None:
    used.prompt([1, 2, 3]).resample(3, at=[2, 3], max_new=4, sampling=DRAWN, sites=S, keep="fork")


def streamed(used: Engine) -> None:
    assert len(list(used.prompt([1, 2, 3]).stream(4, sampling=DRAWN))) == 4


def refused(used: Engine) -> None:
    with pytest.raises(BadRequest, match="vocabulary"):
        used.prompt([10**6])


def failed(used: Engine) -> None:
    """Errors of jobs, whose tracebacks hold the engine's frames."""
    with pytest.raises(OutOfPages):
        used.generate([used.prompt([1, 2, 3]), used.prompt([4, 5])], 150, sampling=DRAWN)
    with pytest.raises(OutOfPages):
        list(used.prompt([1, 2, 3]).stream(150, sampling=DRAWN))

    def broken(rows: torch.Tensor, hook: object) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        used.prompt([1, 2, 3], hooks=[(S[0], broken)])


def left(
    uses: Callable[[Engine], None], make: Callable[[], Engine] = lambda: engine(record=True, cache_tokens=128)
) -> list[str]:
    """What is still there of an engine that was used and dropped."""
    used = make()
    uses(used)
    parts = {
        "engine": used,
        "runner": used.runner,
        "cache": used.runner.cache,
        "loop": used.loop,
        "host_copy": used.runner.host_copy,
    }
    held = {name: weakref.ref(part) for name, part in parts.items()}
    del used, parts
    return [name for name, part in held.items() if part() is not None]


@pytest.mark.parametrize("uses", [captured, forked, resampled, streamed, refused, failed])
def test_it_is_freed_when_its_last_handle_is_gone(uses: Callable[[Engine], None]) -> None:
    assert not left(uses)


@pytest.mark.parametrize("released", [True, False])
def test_an_engine_whose_branches_think(released: bool) -> None:
    def thinks(used: Engine) -> None:
        branch = used.prompt("A coin's state is heads. Alice flips, then Bob flips.", sites="S")
        branch.generate(2)
        if released:
            branch.release()

    assert not left(thinks, lambda: Engine.load("coin-thinking"))


def test_notes_of_finalizers_would_keep_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a note that holds the engine is never read once nobody calls the engine."""
    monkeypatch.setattr(branch_module, "partial", lambda _, forest, lane: partial(Forest.abandon, forest(), lane()))
    assert "cache" in left(captured)
