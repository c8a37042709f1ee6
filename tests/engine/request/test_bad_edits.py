"""Edits and hook functions that are refused."""

from typing import Any

import pytest
import torch

from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadEdit
from replaylens.engine.request.edits import Edit
from tests.engine.coin_engine import PROMPT


@pytest.mark.parametrize("wrong", [lambda x, hook: x[:, :1], lambda x, hook: x[0], lambda x, hook: x.numpy()])
def test_a_hook_function_that_gives_something_else_is_refused(served: Engine, wrong: Any) -> None:
    """A single row must not be broadcast to all positions."""
    (child,) = served.prompt(PROMPT).fork(hooks=[("blocks.1.hook_in", wrong)])
    with pytest.raises(BadEdit, match=r"The hook function on blocks\.1\.hook_in returned a"):
        child.generate(2)
    served.check_integrity()


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda: Edit("blocks.1.hook_in", "add", ["a"]), r"Invalid value for .*=\['a'\]. Give a tensor"),  # type: ignore[list-item]
        (lambda: Edit("blocks.1.hook_in", "add", torch.ones(3)), r"expected \(128,\)"),
        (lambda: Edit("blocks.1.hook_in", "zero", positions=1.5), "positions=1.5. Give whole numbers"),  # type: ignore[arg-type]
        (lambda: Edit("blocks.1.hook_in", "project_out", torch.zeros(128)), "are zero or linearly dependent"),
        (lambda: Edit("C", "scale", 0.5), "takes no value. Give what to multiply by as factor"),  # type: ignore[arg-type]
        (lambda: Edit("C", "scale", factor=1e300), "factor=1e\\+300 is beyond float32"),
        (lambda: Edit("C", "scale", factor=float("nan")), "Invalid factor=nan"),
        (lambda: Edit("C", "scale", factor=2.0, keep_norm=True), "Only 'add' takes it"),
        (lambda: Edit("blocks.1.attn.hook_pattern", "scale", factor=2.0, keys=[1]), "takes the ops 'mask'"),
        (lambda: "blocks.1.hook_in", "edits='blocks.1.hook_in'. Give a list of Edits"),
    ],
)
def test_edits_that_are_none(served: Engine, edit: Any, says: str) -> None:
    root = served.prompt(PROMPT)
    with pytest.raises(BadEdit, match=says):
        root.fork(edits=[edit()])
    with pytest.raises(BadEdit, match="Give a list of Edits"):
        served.prompt(PROMPT, edits=Edit("blocks.1.hook_in", "zero"))  # type: ignore[arg-type]
