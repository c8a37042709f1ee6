"""`GgufFile`: the config and the tensors of a GGUF file, dequantised one by one."""

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from replaylens.engine.errors import BadWeights, UnsupportedModel
from replaylens.engine.model.families import FAMILIES
from replaylens.engine.model.gguf_metadata import architecture_of, config_of
from replaylens.engine.model.source import HEAD, Source

_FACTORS = ("rope_freqs", "rope_factors_short", "rope_factors_long")


class GgufFile:
    """A model as llama.cpp stores it. UnsupportedModel or BadWeights names what cannot be read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            import gguf
        except ImportError:
            raise UnsupportedModel(
                "Reading a GGUF file needs the package `gguf`. Run pip install 'replaylens[gguf]'."
            ) from None
        if not path.exists():
            raise UnsupportedModel(f"{path} does not exist.")
        self._gguf = gguf
        try:
            self._reader = gguf.GGUFReader(path)
            fields = {name: _value(field) for name, field in self._reader.fields.items() if "tokenizer" not in name}
        except Exception as e:
            raise BadWeights(f"{path} is not a readable GGUF file: {e}") from e
        self.architecture = str(fields.get("general.architecture"))
        begin = self.architecture + "."
        self.metadata = {name.removeprefix(begin): x for name, x in fields.items() if name.startswith(begin)}
        self.tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        if fields.get("split.count", 0) > 1:
            count = fields["split.count"]
            raise UnsupportedModel(f"{path} is one of {count} parts. Join them first (llama-gguf-split --merge).")
        if self._reader.byte_order != "I":
            raise UnsupportedModel(f"{path} is written for machines of the other byte order.")
        if "token_embd.weight" not in self.tensors:
            raise BadWeights(f"{path} has no tensor token_embd.weight. Is it a language model?")

    @cached_property
    def config(self) -> dict[str, Any]:
        """The file's config, in the fields of Hugging Face."""
        made = config_of(
            self.architecture,
            self.metadata,
            vocab_size=int(self.tensors["token_embd.weight"].shape[1]),  # shapes are stored in reverse
            tensors=self.tensors,
            factors={name: self._read(f"{name}.weight").tolist() for name in _FACTORS if f"{name}.weight" in self.tensors},
        )
        return dict(made.to_dict())

    def source(self) -> Source:
        """The tensors by their Hugging Face names. BadWeights names those that the family does not have."""
        family = FAMILIES[architecture_of(self.architecture).model_type]
        config, names = family.config(self.config), family.names
        theirs = [names.embed, names.final_norm, names.pos_embed, HEAD.removesuffix(".weight")]
        for layer in range(config.num_layers):
            for part in {**names.parts, **family.renamed(config)}.values():
                theirs += [names.block.format(layer) + each for each in ((part,) if isinstance(part, str) else part) if each]
        found: dict[str, str] = {}
        for name in theirs:
            stored = self._names(config.num_layers).get(name)
            found |= {name + end: f"{stored}{end}" for end in (".weight", ".bias") if f"{stored}{end}" in self.tensors}
        if extra := sorted(self.tensors.keys() - set(found.values()) - {f"{name}.weight" for name in _FACTORS}):
            raise BadWeights(
                f"{self.path} holds {len(extra)} tensors that a {config.family} model does not have, such as "
                f"{', '.join(extra[:4])}. Leaving them out would change what it computes."
            )
        heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}
        return Source(found, lambda name: self._as_there(found[name], heads, not names.transposed))

    def _names(self, num_layers: int) -> dict[str, str]:
        """Names of modules, in all spellings that llama.cpp knows -> names in the file."""
        kinds = {name: kind for kind, name in self._gguf.MODEL_ARCH_NAMES.items()}
        mapping = self._gguf.get_tensor_name_map(kinds[self.architecture], num_layers).mapping
        return {name: stored for name, (_, stored) in mapping.items()}

    def _as_there(self, name: str, heads: dict[str, int], products_transposed: bool) -> Tensor:
        """A tensor in the layout of transformers."""
        x, own = self._read(name), architecture_of(self.architecture)
        part = name.split(".")[-2]
        if own.rotates_pairs and part in heads:  # [head, pair, (first, second)] -> [head, (first, second), pair]
            return x.view(heads[part], -1, 2, *x.shape[1:]).transpose(1, 2).reshape(x.shape)
        if own.norm_offset and part.endswith("norm"):
            return x - own.norm_offset
        is_product = x.dim() == 2 and name.startswith("blk.")
        return x.T if products_transposed and is_product else x

    def _read(self, name: str) -> Tensor:
        """A tensor in float32. It is read from the file, not mapped, so that the process does not keep its pages."""
        tensor = self.tensors[name]
        shape = tuple(int(size) for size in reversed(tensor.shape))
        raw = np.fromfile(self.path, np.uint8, count=tensor.n_bytes, offset=int(tensor.data_offset))
        kind = tensor.tensor_type
        try:
            data = raw.reshape(self._gguf.quant_shape_to_byte_shape(shape, kind))
            out = self._gguf.dequantize(data, kind)
        except NotImplementedError as e:
            raise UnsupportedModel(f"{self.path} stores {name} as {kind.name}, which the package gguf cannot read: {e}") from e
        except ValueError as e:
            raise BadWeights(f"{self.path} is cut off within {name}: {e}. Copy it again.") from e
        return torch.from_numpy(np.ascontiguousarray(out, dtype=np.float32)).view(shape)


def _value(field: Any) -> Any:
    """A number of float32 as the shortest decimal that means it: 1e-06, as the model's own config says."""
    value = field.contents()
    return float(str(np.float32(value))) if isinstance(value, float) and field.types[0].name == "FLOAT32" else value
