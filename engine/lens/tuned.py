"""`TunedLens`: an affine map per layer before the unembedding, trained to predict the model's final distribution.

The plain lens reads every layer as if it were the last. A tuned lens translates it first. It is trained on captured residual
rows to minimise KL(final || layer), and saved with the hash of the unembedding that it belongs to.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from replaylens.engine.errors import BadWeights, OtherFingerprint
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.model.torch_ops import SequenceOps

_ROWS = 32
"""rows translated together; bounds the memory and does not affect the bits"""


@dataclass(frozen=True, eq=False)
class TunedLens:
    """Translators of all layers but the last, which is the model's own output and is not translated."""

    weight: Tensor
    """[layers, d, d]: added to the identity"""
    bias: Tensor
    """[layers, d]"""
    unembed: str
    """hash of final norm and unembedding"""

    @property
    def digest(self) -> str:
        return hashlib.sha256(_raw(self.weight) + _raw(self.bias) + self.unembed.encode()).hexdigest()

    def translate(self, stacked: Tensor) -> Tensor:
        """[n, layers + 1, d] -> the same shape, with all entries but the last translated.

        Every row is computed independently of the others, so Z remains a function of the path.
        """
        out = stacked.clone()
        for layer in range(len(self.weight)):
            x = stacked[:, layer]
            # sums over single rows: the bits of a library product may depend on the number of rows
            moved = [(some[:, None, :] * self.weight[layer][None]).sum(-1) for some in x.split(_ROWS)]
            out[:, layer] = x + torch.cat(moved) + self.bias[layer]
        return out

    def require(self, model: Decoder) -> "TunedLens":
        """Return self. Raises OtherFingerprint if the lens was trained for another unembedding."""
        if unembed_hash(model) != self.unembed:
            raise OtherFingerprint("This tuned lens was trained for another unembedding. Train it again for this model.")
        return self

    def save(self, path: str | Path) -> None:
        """Write the weights, and a JSON file beside them with their digest and the hash of their unembedding."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({"weight": self.weight.contiguous(), "bias": self.bias.contiguous()}, path)
        path.with_suffix(".json").write_text(json.dumps({"format": 1, "unembed": self.unembed, "digest": self.digest}) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> "TunedLens":
        """Read a saved lens. Raises BadWeights if the two files are unreadable or do not match."""
        path = Path(path)
        try:
            tensors, about = load_file(path), json.loads(path.with_suffix(".json").read_text())
            lens = cls(tensors["weight"], tensors["bias"], about["unembed"])
        except (OSError, KeyError, ValueError) as e:
            raise BadWeights(f"{path} is not a tuned lens: {e}. Check the path, or save the lens again.") from e
        if lens.digest != about["digest"]:
            raise BadWeights(f"The weights in {path} do not match the digest in its JSON file. Save the lens again.")
        return lens


def unembed_hash(model: Decoder) -> str:
    """Hash of the final norm and the unembedding, which a lens reads through."""
    tensors = [model.ln_final.weight, *([model.ln_final.bias] if model.ln_final.bias is not None else [])]
    tensors.append(model.embed if model.unembed is None else model.unembed.weight)
    digest = hashlib.sha256()
    for x in tensors:
        digest.update(_raw(x))
    return digest.hexdigest()


def _raw(x: Tensor) -> bytes:
    """The bytes of a tensor of any dtype on any device."""
    return x.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()


def train(
    model: Decoder,
    rows: Tensor,
    *,
    steps: int = 200,
    batch: int = 256,
    lr: float = 1e-3,
    seed: int = 0,
    tell: Callable[[int, float], None] | None = None,
) -> TunedLens:
    """Train the translators in float32 on captured residual rows (S) [n, layers + 1, d]. A function of its arguments.

    tell  called with (step, loss) after each step
    """
    n, layers, d = len(rows), rows.shape[1] - 1, rows.shape[2]
    generator, ops, device, dtype = torch.Generator().manual_seed(seed), SequenceOps([1]), model.embed.device, model.embed.dtype
    weight = torch.zeros(layers, d, d, device=device, requires_grad=True, dtype=torch.float32)
    bias = torch.zeros(layers, d, device=device, requires_grad=True, dtype=torch.float32)
    optimizer = torch.optim.Adam([weight, bias], lr=lr)
    for step in range(steps):
        some = rows[torch.randint(n, (min(batch, n),), generator=generator)].clone().to(device)
        final = model.logits(some[:, -1].to(dtype), ops).float().log_softmax(-1)
        x = some[:, :-1].float()
        moved = (x + torch.einsum("nld,led->nle", x, weight) + bias).to(dtype)
        log_p = model.logits(moved.reshape(-1, d), ops).float().log_softmax(-1).view(len(some), layers, -1)
        loss = (final.exp()[:, None] * (final[:, None] - log_p)).sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if tell is not None:
            tell(step, float(loss.detach()))
    return TunedLens(weight.detach().cpu(), bias.detach().cpu(), unembed_hash(model))
