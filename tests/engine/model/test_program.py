"""The steps of a pass as data: those of the pass that an engine computes, of every family, and told by nobody twice.

python -m tests.engine.model.test_program [--same-bits]    writes the digests of all families into tests/programs.json: once the
version of the arithmetic is raised, or if no bit has moved
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from replaylens import Engine
from replaylens.cli import app
from replaylens.engine.errors import UnsupportedModel
from replaylens.engine.model import program
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.model.program import Operation, Program, Recorder
from replaylens.engine.model.sites import layer_of
from replaylens.engine.proof.fingerprint import PORTABLE, of_tensor_cores
from replaylens.engine.request.capture import PassTap
from replaylens.gradients.backward import RULES
from tests.engine.reference import decoder
from tests.engine.test_wiring import CONFIG, Looped, LoopedConfig
from tests.families import MORE, NAMES

PINNED = Path(__file__).parents[2] / "programs.json"
PATH = [n * n % 61 for n in range(29)]
"""as long as no size of a model"""
WITHOUT_GRADIENT = {"norm_parts", "choice_scores", "choose", "torch.lt", "torch.transpose", "torch.expand", "torch.t"}
"""kinds whose results are shown or compared, or made of weights alone"""


def recorded(model: Decoder) -> Recorder:
    """What an engine's own pass over a path asks for, every site wanted."""
    engine = Engine(model)
    recorder = Recorder(engine.model, frozenset(engine.sites.sites), weights=True)
    engine.runner.whole(PATH, (), PassTap(frozenset()), recorder)
    return recorder


def told(steps: Sequence[Operation], shapes: Mapping[int, tuple[int, ...]], rows: int) -> list[Any]:
    """The steps of all blocks: kind, what they read, and the shapes of their results; values in the order of their appearance.
    Of a latent, ops may return more than the part that is a value."""
    numbers: dict[int, int] = {}
    sites = {step.site: i for i, step in enumerate(steps) if step.kind == "site"}
    found = []
    for step in steps[sites["blocks.0.hook_in"] : sites[f"blocks.{max(map(layer_of, sites), key=lambda n: n or 0)}.hook_out"]]:
        for number in (*step.reads, *step.outs):
            numbers.setdefault(number, len(numbers))
        width = -1 if step.kind == "attend" else None
        sizes = [tuple("rows" if n == rows else n for n in shapes[out][:width]) for out in step.outs]
        found.append((step.kind, [numbers[number] for number in step.reads], sizes))
    return found


@pytest.mark.parametrize("name", [*NAMES, *MORE])
def test_it_is_the_pass_that_an_engine_computes(name: str) -> None:
    """Written down without weights and without computing: the same steps on the same values, of the same shapes; and the sites
    of the table, with its shapes."""
    model = decoder(name)
    made, real, known = Program.of(type(model), model.config), recorded(model), Engine(model).sites
    sizes = {number: tuple(x.shape) for number, x in real.values.items()}
    assert told(made.steps, made.shapes, made.rows) == told(real.steps, sizes, len(PATH))
    assert made.sites == {site: known.sites[site].shape for site in known.sites}
    assert {step.kind for step in made.steps} - WITHOUT_GRADIENT <= set(RULES)
    assert made.entries == frozenset(range(model.config.num_layers)), "the state between blocks is the stream alone"
    assert made.digest == json.loads(PINNED.read_text())["programs"][name], (
        "The wiring is another one, and the fingerprints of its models stay what they are. If a bit moves, raise PORTABLE and "
        "CANONICAL_VERSION. Then: python -m tests.engine.model.test_program"
    )


def write(same_bits: bool) -> None:
    """Mutates tests/programs.json. Wirings that are another one need another version of both arithmetics, or `same_bits`."""
    versions, made = [PORTABLE, of_tensor_cores()], {n: Program.of_wiring(decoder(n)).digest for n in (*NAMES, *MORE)}
    old = json.loads(PINNED.read_text()) if PINNED.exists() else {"arithmetic": versions, "programs": {}}
    changed = [name for name, digest in old["programs"].items() if made.get(name, digest) != digest]
    if changed and not same_bits and any(now == before for now, before in zip(versions, old["arithmetic"], strict=True)):
        raise SystemExit(f"The wiring of {', '.join(changed)} is another one under the same version. Raise it, or --same-bits.")
    PINNED.write_text(json.dumps({"arithmetic": versions, "programs": made}, indent=1) + "\n")


def test_the_digests_are_of_this_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And are not written anew under it."""
    pinned = json.loads(PINNED.read_text())
    assert pinned["arithmetic"] == [PORTABLE, of_tensor_cores()] and pinned["programs"].keys() == {*NAMES, *MORE}
    here = sys.modules[__name__]
    monkeypatch.setattr(here, "PINNED", tmp_path / "programs.json")
    monkeypatch.setattr(here, "NAMES", ("llama",))
    monkeypatch.setattr(here, "MORE", ())
    other = {**pinned, "programs": {"llama": "other"}}
    for versions, same_bits, refused in (
        (pinned["arithmetic"], False, True),
        (pinned["arithmetic"], True, False),
        (["portable-0", pinned["arithmetic"][1]], False, True),
        (["portable-0", "cuda-0"], False, False),
    ):
        here.PINNED.write_text(json.dumps({**other, "arithmetic": versions}))
        if refused:
            with pytest.raises(SystemExit, match="The wiring of llama is another one under the same version"):
                write(same_bits)
        else:
            write(same_bits)
        kept = json.loads(here.PINNED.read_text())["programs"]["llama"]
        assert kept == ("other" if refused else pinned["programs"]["llama"])


def test_another_wiring_has_another_digest() -> None:
    once, twice = (Program.of(Looped, LoopedConfig(**vars(CONFIG), loops=n)) for n in (1, 2))
    again = Program.of(Looped, LoopedConfig(**vars(CONFIG), loops=1))
    assert once.digest == again.digest == Program.of(Decoder, CONFIG).digest != twice.digest
    assert len(twice.steps) == len(once.steps) + 5 * CONFIG.num_layers, "a norm, an MLP and a sum more in each block"
    assert once.digest != Program.of(Decoder, replace(CONFIG, activation="gelu")).digest


def test_the_doctor_prints_it() -> None:
    said = CliRunner().invoke(app, ["doctor", "coin-plain", "--program"])
    lines = said.stdout.splitlines()
    assert said.exit_code == 0 and "attend(q=%" in said.stdout and lines[-1].startswith(f"{len(lines) - 1} steps, digest ")
    assert any(line.endswith("= site(%2, blocks.0.hook_in)") for line in lines)


def test_what_it_cannot_follow_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a product that the recorder does not see is no input of nothing, but an error."""
    monkeypatch.setattr(program.RecordedOps, "linear", _unseen, raising=False)
    with pytest.raises(UnsupportedModel, match="reads numbers that neither Ops nor torch made within the pass"):
        recorded(decoder("llama"))


def _unseen(self: Any, x: Any, linear: Any) -> Any:
    with torch._C.DisableTorchFunction():
        return self._ops.linear(x, linear)


if __name__ == "__main__":
    write("--same-bits" in sys.argv[1:])
