"""Weights go from files to the model one by one, in every dtype, with tied and untied heads."""

import copy
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from replaylens import Engine
from replaylens.engine.errors import NotEnoughMemory
from replaylens.engine.model import source as filler
from replaylens.engine.model import source as shards
from replaylens.engine.model.families import FAMILIES
from replaylens.engine.model.loading import WEIGHTS_FILE, load, weights_hash
from replaylens.engine.model.source import Filler, Shards, Source
from tests.engine.model.test_weights import assert_same, edit
from tests.families import hugging_face

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def sharded(folder: Path, name: str = "llama") -> Path:
    hugging_face(name).save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


@pytest.fixture
def most_alive(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Its entry is the largest number of tensors from files that were in memory at once."""
    read, alive, most = Shards.read, set[int](), [0]

    def counted(self: Shards, tensor: str) -> Tensor:
        values = read(self, tensor).clone().numpy()  # lives as long as any view of it
        key = id(values)
        alive.add(key)
        weakref.finalize(values, alive.discard, key)
        most[0] = max(most[0], len(alive))
        return torch.from_numpy(values)

    monkeypatch.setattr(Shards, "read", counted)
    return most


@pytest.mark.parametrize("name", ["llama", "llama3", "gpt2", "gemma2"])
def test_few_source_tensors_are_alive_at_a_time(name: str, tmp_path: Path, most_alive: list[int]) -> None:
    """What was read is freed before much more is read: the files are never in memory as a whole."""
    model = load(sharded(tmp_path, name))
    assert most_alive[0] <= 6, "q, k and v, and what was read before them"
    assert_same(model, load(hugging_face(name)))


def test_tensors_that_are_collected_first_are_noticed(tmp_path: Path, most_alive: list[int]) -> None:
    """The control."""
    config = load(hugging_face("gpt2")).config
    files = Shards(sharded(tmp_path, "gpt2"))
    tensors = FAMILIES["gpt2"].tensors(config, Source(files.names, files.read).get)
    assert most_alive[0] > 20 and tensors


def test_files_that_are_mapped_anew_give_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Path] = []
    real = shards._opened

    def counted(file: Path) -> Any:
        opened.append(file)
        return real(file)

    monkeypatch.setattr(shards, "_opened", counted)
    before = load(sharded(tmp_path))
    few = len(opened)
    monkeypatch.setattr(shards, "MAPPED_BYTES", 4096)
    assert_same(load(tmp_path), before)
    assert len(opened) - few > few, "files were opened again"


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_narrow_checkpoints_load_to_the_numbers_that_they_store(stored: torch.dtype, tied: bool, tmp_path: Path) -> None:
    model = copy.deepcopy(hugging_face("llama3" if tied else "llama")).to(stored)
    model.save_pretrained(tmp_path)
    assert (HEAD in load_file(tmp_path / WEIGHTS_FILE)) is not tied
    loaded = load(tmp_path)
    assert loaded.config.tied_embeddings is tied
    assert_same(loaded, load(copy.deepcopy(model).float()))
    narrow = load(tmp_path, stored)
    for name, x in narrow.state_dict().items():
        assert x.dtype == stored and torch.equal(x.float(), loaded.state_dict()[name]), name


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_checkpoint_of_several_dtypes_loads(tied: bool, tmp_path: Path) -> None:
    """Norms in float32, one of q, k and v in another dtype, the head in a third one."""
    model = copy.deepcopy(hugging_face("llama3" if tied else "llama")).to(torch.float16).float()  # numbers of float16
    model.save_pretrained(tmp_path)
    whole = load(tmp_path)

    def narrow(tensors: dict[str, Tensor]) -> None:
        for name in tensors:
            if "q_proj" in name or "gate_proj" in name or name in (EMBED, HEAD):
                tensors[name] = tensors[name].half()
        if tied:  # a second copy of the embedding, in another dtype
            tensors[HEAD] = tensors[EMBED].double()

    edit(tmp_path, narrow)
    assert_same(load(tmp_path), whole)
    edit(tmp_path, lambda tensors: tensors.update({HEAD: tensors[EMBED].double() + 1e-9}))
    assert not load(tmp_path).config.tied_embeddings, "the control: a head that differs, if only in float64"


def test_a_copy_of_the_embedding_is_tied_and_another_head_is_not(tmp_path: Path) -> None:
    hugging_face("llama3").save_pretrained(tmp_path)
    edit(tmp_path, lambda tensors: tensors.update({HEAD: tensors[EMBED].clone()}))
    assert_same(load(tmp_path), load(hugging_face("llama3")))
    edit(tmp_path, lambda tensors: tensors.update({HEAD: tensors[EMBED] * 2}))
    untied = load(tmp_path)
    assert not untied.config.tied_embeddings
    assert torch.equal(untied.unembedding, 2 * untied.embed)


@pytest.mark.parametrize("shape", [(3, 5), (700, 1030), (1, 1), (4, 0), (9,), (3, 4, 5)])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32, torch.float64])
def test_a_transposed_copy_has_the_numbers_of_its_source(shape: tuple[int, ...], stored: torch.dtype) -> None:
    x = torch.randn(shape).to(stored)
    for source in (x, x.transpose(-1, -len(shape)), x.transpose(-1, 0)[1:], x[::2], x.flip(0)[..., ::2]):
        copied = filler._copied(source, torch.float32, "cpu")
        assert copied.is_contiguous() and torch.equal(copied, source.float())
        assert copied.data_ptr() != source.data_ptr() or copied.numel() == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_not_finite_are_found_anywhere(value: float) -> None:
    for place in (0, 511, 99_999):
        x = torch.randn(100_000)
        assert filler._finite(x) and filler._finite(x.bfloat16())
        x[place] = value
        assert not filler._finite(x) and not filler._finite(x.bfloat16())


def test_a_device_without_room_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load(hugging_face("llama")).config

    def full(*args: Any) -> Tensor:
        raise torch.OutOfMemoryError("tried to allocate 9 GiB")

    into = Filler(config, torch.float32)
    monkeypatch.setattr(filler, "_copied", full)
    with pytest.raises(NotEnoughMemory, match=r"cpu has no memory for embed in torch.float32.*9 GiB.*smaller model"):
        into["embed"] = torch.zeros(config.vocab_size, config.d_model)


def test_the_engine_loads_shards_like_one_file(tmp_path: Path) -> None:
    """End to end: the fingerprint and the tokens do not depend on how the weights are stored."""
    one, many = tmp_path / "one", sharded(tmp_path / "many")
    hugging_face("llama").save_pretrained(one)
    engines = [Engine.load(folder) for folder in (one, many)]
    assert engines[0].fingerprint == engines[1].fingerprint
    assert len({tuple(engine.prompt([1, 2, 3]).generate(5).tokens) for engine in engines}) == 1
    tensors = load_file(one / WEIGHTS_FILE)
    tensors[EMBED][0, 0] += 1
    save_file(tensors, one / WEIGHTS_FILE)
    assert Engine.load(one).fingerprint != engines[1].fingerprint
    assert json.loads((many / "model.safetensors.index.json").read_text())["weight_map"]
    assert weights_hash(load(many)) == engines[1].fingerprint.weights
