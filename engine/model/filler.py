"""`Filler`: a decoder that receives its weights one by one, so that they are in memory only once."""

import torch
from torch import Tensor

from replaylens.engine.errors import BadWeights, NotEnoughMemory
from replaylens.engine.model.config import ModelConfig
from replaylens.engine.model.decoder import Decoder

_ROWS = 512
"""rows of a source tensor that are transposed together: they fit into a cache"""


class Filler:
    """Copies each weight to its device, in its dtype, as it is set (`filler[name] = tensor`). The given one can be freed."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str = "cpu") -> None:
        with torch.device("meta"):
            self.model = Decoder(config)
        self.dtype, self.device = dtype, device
        self.wanted = {name: tuple(x.shape) for name, x in self.model.state_dict().items()}
        self._held: dict[str, Tensor] = {}
        self._seen: set[str] = set()
        self._faults: list[str] = []

    def __setitem__(self, name: str, x: Tensor) -> None:
        """Mutates: takes a copy of one weight. A fault is noted, and `finished` names it."""
        self._seen.add(name)
        if name not in self.wanted:
            self._faults.append(f"{name} is not part of this model")
        elif tuple(x.shape) != self.wanted[name]:
            self._faults.append(f"{name} has shape {tuple(x.shape)}, the config asks for {self.wanted[name]}")
        elif not x.is_floating_point():
            self._faults.append(f"{name} holds {x.dtype}, not floating-point numbers")
        else:
            copied = self._copied(name, x)
            if not _finite(copied):
                self._faults.append(f"{name} holds NaN or infinity as {self.dtype}")
            self._held[name] = copied

    def _copied(self, name: str, x: Tensor) -> Tensor:
        try:
            return _copied(x, self.dtype, self.device)
        except (torch.OutOfMemoryError, RuntimeError) as e:  # a CPU's allocator has no error of its own
            if not isinstance(e, torch.OutOfMemoryError) and "alloc" not in str(e):
                raise
            held = sum(x.nbytes for x in self._held.values())
            raise NotEnoughMemory(
                f"{self.device} has no memory for {name} in {self.dtype}, after {held / 1e9:.1f} GB of weights: {e}. "
                "Use a smaller model, or free memory."
            ) from e

    def finished(self) -> Decoder:
        """The model, without gradients; BadWeights names the tensors at fault."""
        missing = [f"{name} is missing (shape {shape})" for name, shape in self.wanted.items() if name not in self._seen]
        if faults := missing + self._faults:
            shown = "; ".join(faults[:8]) + (f"; and {len(faults) - 8} more" if len(faults) > 8 else "")
            raise BadWeights(f"The weights do not fit the config: {shown}. Check that config and weights belong together.")
        self.model.load_state_dict(self._held, assign=True)
        return self.model.requires_grad_(False).eval().to(self.device)


def _copied(x: Tensor, dtype: torch.dtype, device: str) -> Tensor:
    """A contiguous copy: the source may be a file or a model that changes later."""
    x = x.detach()
    out = torch.empty(x.shape, dtype=dtype, device=device)
    if x.is_contiguous() or out.device.type != "cpu" or x.device.type != "cpu":
        return out.copy_(x.to(out.device))  # transposed there, if need be
    _transpose(x, out)
    return out


def _transpose(x: Tensor, out: Tensor) -> None:
    """Mutates `out`. Converting and transposing in one step would be three times slower."""
    if x.dim() > 2:
        for source, target in zip(x, out, strict=True):
            _transpose(source, target)
    elif x.dim() < 2:
        out.copy_(x)
    else:
        for first in range(0, x.shape[1], _ROWS):
            out[:, first : first + _ROWS].copy_(x[:, first : first + _ROWS].contiguous())


def _finite(x: Tensor) -> bool:
    """Whether all numbers are finite, without a second copy of them: NaN and infinity are found among the extremes."""
    return x.numel() == 0 or bool(torch.isfinite(torch.stack(torch.aminmax(x))).all())
