"""`ExpertNames`: the names of a family's experts, stacked in one tensor or stored one by one, and how they are read."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from replaylens.engine.errors import MissingTensor


@dataclass(frozen=True, kw_only=True)
class ExpertNames:
    """Where the tensors of a layer's experts are, after the beginning of the layer's names."""

    stacked: Mapping[str, str]
    """our parameter (up, down, up_bias, down_bias) -> theirs, [experts, ...], as transformers holds it in memory"""
    each: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """our parameter -> theirs with {} for the number of the expert, to be joined, as older checkpoints store it"""
    transposed: bool = True
    """products are stored [outputs, inputs]; we store [inputs, outputs]"""
    interleaved: bool = False
    """gate and up take turns; we store gate | up"""

    def read(self, name: str, count: int, begin: str, get: Callable[[str], Tensor]) -> Tensor:
        """One of our parameters, of all experts."""
        x = self._stacked(name, count, begin, get)
        if self.transposed and x.dim() == 3:
            x = x.transpose(1, 2)
        if self.interleaved and name.startswith("up"):
            x = torch.cat([x[..., ::2], x[..., 1::2]], dim=-1)
        return x

    def _stacked(self, name: str, count: int, begin: str, get: Callable[[str], Tensor]) -> Tensor:
        try:
            return get(begin + self.stacked[name])
        except MissingTensor:
            if name not in self.each:
                raise
            parts = self.each[name]
        joined = [[get(f"{begin}{part.format(expert)}.weight") for part in parts] for expert in range(count)]
        return torch.stack([pieces[0] if len(pieces) == 1 else torch.cat(pieces) for pieces in joined])


def respelled(get: Callable[[str], Tensor], spellings: tuple[tuple[str, str], ...]) -> Callable[[str], Tensor]:
    """As `get`; a tensor that is missing is looked for under its other names: (part of a name, what stands there instead)."""

    def find(name: str) -> Tensor:
        try:
            return get(name)
        except MissingTensor:
            for here, there in spellings:
                if here in name:
                    return get(name.replace(here, there))
            raise

    return find if spellings else get
