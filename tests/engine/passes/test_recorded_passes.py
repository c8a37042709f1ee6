"""Recorded passes of a CPU have the bits of the passes that were recorded, whatever else runs, and say what they cannot do."""

import ctypes
import gc
import mmap
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import replaylens as rl
from replaylens.engine.engine import Engine
from replaylens.engine.errors import InternalError, NonFinite
from replaylens.engine.model.config import ModelConfig
from replaylens.engine.model.decoder import Block, Decoder
from replaylens.engine.passes import recorded
from replaylens.engine.passes.recorded import Extent, RecordedPasses
from replaylens.kernels import cpu, cpu_experts, cpu_recurrent, threads
from tests.devices import swept
from tests.engine.reference import same_bits
from tests.families import BOTH_NAMES, LATENT_NAMES, MORE, NAMES, hugging_face
from tests.hostile import divide_everything
from tests.mixtures import MIXTURES
from tests.toy_model import SHAPE, random_model

ENDLESS = rl.Sampling(ignore_eos=True)
SITES = "STC"


def recordings(engine: Engine) -> RecordedPasses:
    found = engine.runner.recorded
    assert found is not None
    return found


def everything(engine: Engine, sites: str = SITES) -> dict[str, Any]:
    """Tokens, KV and rows of two branches of which one is forked and cut back, in steps of one, two and three rows."""
    first, second = engine.prompts([[1, 2, 3, 4, 5], [7, 8, 9]], sites=sites)
    engine.generate([first, second], 21, sampling=ENDLESS, window=1)
    third = first.fork(1)[0]
    engine.generate([first, second.rollback(9), third], 18, sampling=ENDLESS, window=1)
    second.generate(9, sampling=ENDLESS, window=1)
    found: dict[str, Any] = {}
    for name, branch in (("first", first), ("second", second), ("third", third)):
        found |= {f"{name} tokens": torch.tensor(branch.tokens), f"{name} kv": branch.kv()}
        found |= {f"{name} {site}": branch.activations[site] for site in (branch.activations.sites() if sites else ())}
    return found


def differing(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[str]:
    assert ours.keys() == theirs.keys()
    return [name for name in theirs if not same_bits(ours[name], theirs[name])]


def unrecorded(model: Any, monkeypatch: pytest.MonkeyPatch, sites: str = SITES) -> dict[str, Any]:
    with monkeypatch.context() as patch:
        patch.setattr(recorded, "WORTH", 1 << 30)
        engine = Engine.load(model) if not isinstance(model, Decoder) else Engine(model)
        found = everything(engine, sites)
    assert not recordings(engine).recordings
    return found


FAMILIES = tuple(dict.fromkeys((*NAMES, *MORE, *LATENT_NAMES, *BOTH_NAMES, *MIXTURES)))
"""of every kind: dense, latent attention, mixtures, recurrent layers, and several of these"""
HYBRIDS = ("lfm2", "qwen3-next", "mamba2", "falcon-h1")


@pytest.mark.parametrize(
    "name",
    swept(FAMILIES, "gpt2", "gemma2", "bloom", "deepseek-v3-groups", "qwen2-moe", "gpt-oss", "phimoe", *HYBRIDS),
)
def test_every_family_has_its_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = hugging_face(name)
    engine = Engine.load(model)
    truth = unrecorded(model, monkeypatch)
    assert differing(everything(engine), truth) == []
    assert recordings(engine).recordings and not recordings(engine).unrecordable


@pytest.mark.parametrize("count", [1, 2, 5])
def test_any_number_of_threads_which_changes(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    divide_everything(monkeypatch)
    model = random_model(d_model=64, d_mlp=96)
    truth, engine, before = unrecorded(model, monkeypatch), Engine(model), torch.get_num_threads()
    try:
        for now in (count, 3):
            torch.set_num_threads(now)
            engine.prefix.clear()
            assert differing(everything(engine), truth) == []
    finally:
        torch.set_num_threads(before)
    assert recordings(engine).recordings


def test_a_pass_that_is_no_list_of_kernels_is_run_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patterns, and hook functions; a pass without them is recorded beside them."""
    model = random_model()
    engine = Engine(model)
    pattern = engine.prompt([3, 1, 2], sites=["blocks.0.attn.hook_pattern"])
    pattern.generate(6, sampling=ENDLESS, window=1)
    assert list(recordings(engine).unrecordable.values()) != [] and not recordings(engine).recordings
    hooked = engine.prompt([3, 1, 2], hooks=[("blocks.1.hook_in", lambda value, context: value * 0.5)])
    plain = engine.prompt([3, 1, 2])
    for branch in (hooked, plain):
        branch.generate(6, sampling=ENDLESS, window=1)
    assert hooked.tokens != plain.tokens == pattern.tokens and recordings(engine).recordings


@pytest.mark.parametrize("read", [Tensor.tolist, np.asarray], ids=["tolist", "asarray"])
def test_a_wiring_that_computes_with_positions_in_python(
    read: Callable[[Tensor], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The factors of the recorded pass would be in all later ones."""

    class Scaled(Block):
        def write(self, x: Tensor, rotary: Any, ops: Any, tap: Any, rows: Any) -> Tensor:
            x = super().write(x, rotary, ops, tap, None)
            x = torch.cat([x[i : i + 1] * (1.0 + float(p) % 3) for i, p in enumerate(read(rotary.positions))])
            return x if rows is None else x[rows]

    class Theirs(Decoder):
        block = Scaled

    model = Theirs(ModelConfig(**SHAPE)).initialize(0).requires_grad_(False)  # type: ignore[arg-type]
    truth = unrecorded(model, monkeypatch)
    engine = Engine(model)
    assert differing(everything(engine), truth) == []
    assert set(recordings(engine).unrecordable.values()) <= {"tolist", "__array__"} and not recordings(engine).recordings


def test_a_heap_among_the_numbers_is_no_reason_to_record_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a Python that is not position-independent: its heap lies below the bits of floats. Mapped memory does not."""
    mapped = torch.frombuffer(mmap.mmap(-1, 4096), dtype=torch.uint8).data_ptr() - (1 << 40)
    model = random_model(vocab_size=50)
    truth = unrecorded(model, monkeypatch)
    monkeypatch.setattr(recorded, "_NO_ADDRESS", mapped)
    engine = Engine(model)
    assert differing(everything(engine), truth) == []
    assert recordings(engine).recordings and not recordings(engine).unrecordable
    monkeypatch.setattr(recorded, "_NO_ADDRESS", 1 << 62)  # every address could be a number
    control = Engine(model)
    everything(control)
    assert set(recordings(control).unrecordable.values()) == {"Addresses that could be numbers."}


def test_a_weight_that_is_replaced_is_not_freed_under_recordings() -> None:
    model = random_model(vocab_size=50)
    engine, gone = Engine(model), list[str]()
    everything(engine)
    assert recordings(engine).recordings
    weakref.finalize(model.blocks[0].ln1.weight, gone.append, "freed")
    model.blocks[0].ln1.weight = torch.nn.Parameter(torch.ones(1), requires_grad=False)
    gc.collect()
    assert gone == []
    del engine
    gc.collect()
    assert gone == ["freed"]


def test_values_live_on_after_later_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a recorded pass leaves is a copy: the next pass has the same arena."""
    kept = list[tuple[Tensor, Tensor]]()
    replayed = RecordedPasses._replayed

    def held(*given: Any) -> Any:
        ran = replayed(*given)
        kept.extend((x, x.clone()) for x in (ran.residual, *ran.values.values()))
        return ran

    monkeypatch.setattr(RecordedPasses, "_replayed", held)
    one, other = Engine(random_model()).prompts([[1, 2, 3], [4, 5, 6]], sites=SITES)
    one.generate(6, sampling=ENDLESS, window=1)
    other.generate(6, sampling=ENDLESS, window=1)
    assert len(kept) > 40 and all(torch.equal(x, then) for x, then in kept)


@pytest.mark.parametrize("shape", [{"attn_gate": True, "d_head": 8, "rotary_dim": 8}, {"mlp_bias": True}])
def test_copies_that_call_themselves_views(shape: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """`contiguous` says in inference mode that it is a view. Of the rows of a gate it copies, and of a bias with gaps: the copy
    was no part of the recording, and its memory was somebody else's later."""
    found, counts = list[list[Tensor]](), list[int]()
    for worth in (1 << 30, 3):
        monkeypatch.setattr(recorded, "WORTH", worth)
        model = random_model(**shape)
        for block in model.blocks if "mlp_bias" in shape else ():
            wide = torch.randn(len(block.mlp.up.bias), 2, generator=torch.Generator().manual_seed(0))
            block.mlp.up.bias = torch.nn.Parameter(wide[:, 0], requires_grad=False)
        engine = Engine(model)
        found.append([engine.prompt([(7 * i + 3 * j) % 61 for j in range(4)]).kv() for i in range(6)])
        counts.append(len(recordings(engine).recordings))
    assert all(map(same_bits, *found)) and counts == [0, "attn_gate" in shape]


def test_sites_that_are_parts_of_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries are columns of a product. They are copied beside the others."""
    sites: Any = ["blocks.0.attn.q.hook_out", "blocks.1.attn.o.hook_in", "S"]
    model = random_model()
    truth, engine = unrecorded(model, monkeypatch, sites), Engine(model)
    assert differing(everything(engine, sites), truth) == [] and not recordings(engine).unrecordable


def test_a_result_that_is_not_finite_is_named_as_ever() -> None:
    model = random_model()
    with torch.no_grad():
        model.blocks[-1].mlp.down.weight[0, 0] = float("nan")
    engine = Engine(model)
    for i in range(5):
        with pytest.raises(NonFinite):
            engine.prompt([1, 2, 3, 4 + i])


def test_keys_that_are_not_finite_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model()
    engine = Engine(model)
    branch = engine.prompt([1, 2, 3])
    branch.generate(5, sampling=ENDLESS, window=1)
    assert recordings(engine).recordings
    kv, length = branch.kv(), branch.length
    embedding = model.embedding
    monkeypatch.setattr(model, "embedding", lambda *given: embedding(*given) * float("nan"))
    with pytest.raises(NonFinite, match="keys or values"):
        branch.generate(1, sampling=ENDLESS, window=1)
    monkeypatch.undo()
    assert branch.length == length and torch.equal(branch.kv(), kv)
    assert branch.generate(1, sampling=ENDLESS, window=1).length == length + 1


def test_a_recording_that_differs_from_its_pass_is_a_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a work is left out."""
    run = recorded.threads.run_list
    monkeypatch.setattr(recorded.threads, "run_list", lambda works, given: run(works[:-1].copy(), given))
    branch = Engine(random_model()).prompt([1, 2, 3])
    with pytest.raises(InternalError, match="A recorded pass of 1 rows has another residual"):
        branch.generate(5, sampling=ENDLESS, window=1)


def beyond_a_chunk(engine: Engine) -> dict[str, Any]:
    """As `everything`, where chunks of recurrent layers end on the way, and threads change."""
    first, second = engine.prompts([[(3 * i + 1) % 61 for i in range(n)] for n in (52, 57)], sites="S")
    before, found = torch.get_num_threads(), dict[str, Any]()
    try:
        for count in (1, 3, 2):
            torch.set_num_threads(count)
            engine.generate([first, second], 5, sampling=ENDLESS, window=1)
        third = second.fork(1)[0]
        engine.generate([first, second.rollback(62), third], 9, sampling=ENDLESS, window=1)
    finally:
        torch.set_num_threads(before)
    for name, branch in (("first", first), ("second", second), ("third", third)):
        found |= {f"{name} tokens": torch.tensor(branch.tokens)}
        found |= {f"{name} {site}": branch.activations[site] for site in branch.activations.sites()}
    return found


def plain_chunks(model: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    with monkeypatch.context() as patch:
        patch.setattr(recorded, "WORTH", 1 << 30)
        return beyond_a_chunk(Engine.load(model))


@pytest.mark.parametrize("name", swept(("lfm2", "qwen3-next", "mamba2", "bamba", "olmo-hybrid", "lfm2-moe"), "qwen3-next"))
def test_chunks_of_recurrent_layers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    divide_everything(monkeypatch)
    model = hugging_face(name)
    truth, engine = plain_chunks(model, monkeypatch), Engine.load(model)
    assert differing(beyond_a_chunk(engine), truth) == []
    assert recordings(engine).recordings and not recordings(engine).unrecordable


def stale(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded passes keep one of their inputs: that of the pass that was recorded, which stays alive."""
    run, replayed = recorded.WorkList.run, RecordedPasses._replayed
    kept: dict[Any, int] = {}
    held: list[Any] = []

    def with_first(self: Any, bases: Any) -> None:
        run(self, [*bases[:place], kept.setdefault(self, bases[place]), *bases[place + 1 :]])

    monkeypatch.setattr(recorded.WorkList, "run", with_first)
    monkeypatch.setattr(RecordedPasses, "_replayed", lambda *given: (held.append(given), replayed(*given))[1])


INPUTS = (
    "arena",
    "x",
    "positions",
    "slots",
    "sequence",
    "pages",
    "order",
    "told",
    "entry slots",
    "entries",
    "states",
    "pieces",
)


@pytest.mark.parametrize("name", ["x", "positions", "slots"])
def test_a_stale_input_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative controls for the comparison with unrecorded passes."""
    model = random_model()
    truth = unrecorded(model, monkeypatch)
    stale(INPUTS.index(name), monkeypatch)
    assert differing(everything(Engine(model)), truth) != []


@pytest.mark.parametrize("name", ["entry slots", "entries", "states", "pieces"])
def test_a_stale_input_of_a_hybrid_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = hugging_face("qwen3-next")
    truth = plain_chunks(model, monkeypatch)
    stale(INPUTS.index(name), monkeypatch)
    assert differing(beyond_a_chunk(Engine.load(model)), truth) != []


@pytest.mark.parametrize("name", ["llama", "lfm2"])
def test_memory_that_is_given_away_too_soon_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arranged = recorded._arranged
    monkeypatch.setattr(
        recorded, "_arranged", lambda *given: ([Extent(p.first, p.size, given[3]) for p in given[0]], arranged(*given)[1])
    )
    with pytest.raises(InternalError):
        everything(Engine.load(hugging_face(name)))


@pytest.mark.parametrize("name, task", [
    ("qwen2-moe", cpu_experts._product), ("qwen2-moe", cpu_experts._combine), ("qwen3-next", cpu_recurrent._recur),
    ("qwen3-next", cpu_recurrent._keep),
])  # fmt: skip
def test_a_piece_of_work_that_is_left_out_is_seen(name: str, task: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the last of three parts of a kernel is left out."""
    divide_everything(monkeypatch)
    run = recorded.threads.run_list
    call = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 3)(task.address)

    def without_last(works: Any, given: Any) -> None:
        for i, (address, begin, parts) in enumerate(works.tolist()):
            if address != task.address or parts == 1:
                run(works[i : i + 1].copy(), given)
            for part in range(parts - 1 if address == task.address else 0):
                call(given.ctypes.data + 8 * begin, part, parts)

    noticed = list[str]()

    class Noticed(InternalError):
        """The loop repeats what failed branch by branch, where a row is not divided, and so goes on."""

        def __init__(self, text: str) -> None:
            super().__init__(text)
            noticed.append(text)

    model = hugging_face(name)
    truth = plain_chunks(model, monkeypatch)
    monkeypatch.setattr(recorded.threads, "run_list", without_last)
    monkeypatch.setattr(recorded, "InternalError", Noticed)
    try:
        with threads.within(3):
            noticed += differing(beyond_a_chunk(Engine.load(model)), truth)
    except (Noticed, NonFinite) as error:  # what is left out is whatever the memory held, NaN for instance
        noticed.append(str(error))
    assert noticed


def test_places_do_not_overlap_while_they_are_needed() -> None:
    """Random lists of works: memory that two works use at the same time lies apart, and little more than needed is taken."""
    generator = torch.Generator().manual_seed(5)
    for _ in range(40):
        made, at = [], 1 << 40
        for _ in range(30):
            size = int(torch.randint(1, 900, (1,), generator=generator))
            made.append(Extent(at, size))
            at += size + 7
        uses = [
            (int(a), int(a) + int(b))
            for a, b in zip(
                torch.randint(0, 40, (30,), generator=generator), torch.randint(0, 9, (30,), generator=generator), strict=True
            )
        ]
        given = [
            [place.first for place, (first, last) in zip(made, uses, strict=True) if i in (first, last)] + [17]
            for i in range(50)
        ]
        starts = torch.tensor([0, *(len(x) for x in given)]).cumsum(0)[:-1].numpy()
        places, end = recorded._arranged(made, torch.tensor([x for each in given for x in each]).numpy(), starts, 128)
        span = dict(zip(made, uses, strict=True))
        known = [(p.at, p.at + p.size, *span[Extent(p.first, p.size)]) for p in places]
        assert len(places) == 30 and min(p.at for p in places) >= 128 and max(stop for _, stop, *_ in known) <= end
        for i, (begin, stop, first, last) in enumerate(known):
            for other in known[:i]:
                assert stop <= other[0] or begin >= other[1] or last < other[2] or first > other[3]
        together = max(sum(p.size for p in made if span[p][0] <= i <= span[p][1]) for i in range(50))
        assert end - 128 < 2 * together + 64 * 30


@pytest.mark.parametrize("kind, expected", [
    ("copy", lambda x, y: x), ("add", lambda x, y: x + y), ("mul", lambda x, y: x * y),
    ("scale", lambda x, y: x * 0.3), ("clamp", lambda x, y: x.clamp(-0.2, 0.3)),
])  # fmt: skip
@pytest.mark.parametrize("shape", [(5,), (4, 5), (3, 4, 5)])
def test_single_numbers_as_torch_computes_them(kind: str, expected: Callable[..., Tensor], shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(*shape[:-1], 11, generator=generator)[..., 3:8] for _ in range(2))
    x[..., 0], y[..., 1] = float("nan"), float("inf")
    out = torch.empty(*shape[:-1], 9)[..., 2:7]
    assert same_bits(cpu.pointwise(kind, x, y, out, 0.3, -0.2).contiguous(), expected(x, y).contiguous())
    for few in (y[..., 2:3], y[(0,) * (y.dim() - 1)]) if kind in ("add", "mul") else ():
        assert same_bits(cpu.pointwise(kind, x, few, out).contiguous(), expected(x, few).contiguous())
