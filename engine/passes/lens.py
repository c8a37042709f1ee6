"""The logit lens (Z): each layer's prediction of the next token, read through the final norm and the unembedding.

Z is stored compactly: top-k ids and log-probs, entropy, KL from the model's own output, log-probs of the next token and of
chosen target tokens, and the whole distribution only on request. The last entry is the model's own distribution. Its logits
have the bits of those that the token was chosen from, because both are the same canonical function of the same row.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from msgspec import Meta
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from replaylens.engine.errors import BadRequest, BadWeights, FingerprintMismatch
from replaylens.engine.model import modes
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.model.ops import SequenceOps
from replaylens.engine.passes.runner import LENS_ROWS, Runner
from replaylens.engine.records import Hash, LensSpec
from replaylens.engine.records import read as read_record
from replaylens.engine.request.capture import Rows
from replaylens.engine.request.values import as_instance, as_path
from replaylens.kernels import cpu as portable

# ---- tuned -----------------------------------------------------------------------------------------------------------
# `TunedLens`: an affine map per layer before the unembedding, trained to predict the model's final distribution.
#
# The plain lens reads every layer as if it were the last. A tuned lens translates it first. It is trained on captured
# residual rows to minimise KL(final || layer), and saved with the hash of the unembedding that it belongs to.


@dataclass(frozen=True)
class _LensFile:
    format: Annotated[int, Meta(ge=1, le=1)]
    unembed: Hash
    digest: Hash


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
            x = stacked[:, layer].float().contiguous()
            weight, bias = self.weight[layer].float(), self.bias[layer].float()
            out[:, layer] = portable.product(x, portable.Panels.of(weight.t()), bias, x)
        return out

    def require(self, model: Decoder) -> "TunedLens":
        """Return self. Raises FingerprintMismatch if the lens was trained for another unembedding."""
        if unembed_hash(model) != self.unembed:
            raise FingerprintMismatch("This tuned lens was trained for another unembedding. Train it again for this model.")
        return self

    def save(self, path: str | Path) -> None:
        """Write the weights, and next to them a JSON file with their digest and the hash of their unembedding. An older lens is
        replaced by both or by neither; BadRequest if files of these names are none."""
        from replaylens.engine.files import write_pair

        path = Path(path)
        record = path.with_suffix(".json")
        about = json.dumps({"format": 1, "unembed": self.unembed, "digest": self.digest}) + "\n"
        tensors = save({"weight": self.weight.contiguous(), "bias": self.bias.contiguous()})
        write_pair(record, about, path, tensors, _is_lens)

    @classmethod
    def load(cls, path: str | Path) -> "TunedLens":
        """Read a saved lens. Raises BadWeights if the two files are unreadable or do not match."""
        from replaylens.engine.files import saves_of

        path = as_path("path", path)
        record, problem = path.with_suffix(".json"), None
        for file in saves_of(path):
            try:
                tensors, content = load_file(file), record.read_bytes()
                weight, bias = tensors["weight"], tensors["bias"]
            except (OSError, KeyError, SafetensorError) as e:
                problem = problem or e
                continue
            about = read_record(_LensFile, content, str(record), BadWeights)
            lens = cls(weight, bias, about.unembed)
            if lens.digest == about.digest:
                break
        else:
            if problem is not None:
                raise BadWeights(f"{path} is not a tuned lens: {problem}. Check the path, or save the lens again.") from problem
            raise BadWeights(f"The weights in {path} do not match the digest in its JSON file. Save the lens again.")
        shapes = weight.dim() == 3 and bias.shape == weight.shape[:2] and weight.shape[1] == weight.shape[2]
        if not shapes or not all(x.is_floating_point() and bool(x.isfinite().all()) for x in (weight, bias)):
            raise BadWeights(
                f"The tuned lens in {path} needs finite weights [layers, d, d] and biases [layers, d]. Train it again."
            )
        return lens


def _is_lens(content: bytes) -> bool:
    """Whether a JSON file is one that `TunedLens.save` wrote, of any format."""
    try:
        return {"format", "unembed", "digest"} <= set(json.loads(content))
    except (ValueError, TypeError, RecursionError):
        return False


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


@torch.inference_mode(False)
@torch.enable_grad()
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
    generator, ops, device, dtype = torch.Generator().manual_seed(seed), SequenceOps([1]), model.device, model.dtype
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


# ---- readout ---------------------------------------------------------------------------------------------------------

_TOGETHER = 4096
"""rows times layers per step if all their logits are stored at once"""
_NUMBERS = 1 << 25
"""logits per step; bounds the memory at 128 MB a copy, and changes no bit: every row is computed on its own"""


def read(spec: LensSpec, runner: Runner, rows: Rows, emitted: list[int], tuned: TunedLens | None = None) -> Rows:
    """Z of captured residual rows, on the CPU.

    rows[site] [n, d] for every site of the spec; `emitted[i]` is the token that follows row i (-1: none yet)
    -> {"Z.entropy": [n, layers], "Z.kl": [n, layers], "Z.emitted": ..., "Z.top_ids": [n, layers, k], ...}
    """
    return {name: z.cpu() for name, z in read_there(spec, runner, rows, emitted, tuned).items()}


@torch.inference_mode()
def read_ranked(spec: LensSpec, runner: Runner, rows: Rows, tokens: list[int], tuned: TunedLens | None = None) -> Rows:
    """As `read`, with "Z.rank" [n, layers]: how many tokens are likelier than `tokens[i]`, NaN for -1. Ties go to the lowest
    id, as in greedy decoding. Every row is unembedded once."""
    stacked = torch.stack([rows[site].cpu() for site in spec.sites], dim=1)  # [n, layers, d]
    with modes.canonical():
        return _read(spec, runner, stacked if tuned is None else tuned.translate(stacked), tokens, ranked=True)


@torch.inference_mode()
def read_there(spec: LensSpec, runner: Runner, rows: Rows, emitted: list[int], tuned: TunedLens | None = None) -> Rows:
    """As `read`, but left on the device that computes it."""
    stacked = torch.stack([rows[site] for site in spec.sites], dim=1)  # [n, layers, d]
    with modes.canonical():
        if tuned is not None:
            stacked = tuned.translate(stacked.cpu())
        return _read(spec, runner, stacked, emitted)


@torch.inference_mode()
def next_token(runner: Runner, residual: Tensor, emitted: list[int]) -> tuple[Tensor, Tensor]:
    """(log-probability of the token that follows, entropy) of the model's own distribution: [n] each, on the CPU.

    residual [n, d] leaves the last block; `emitted[i]` is the token that follows row i (-1: none, NaN)

    The bits are those of "Z.emitted" and "Z.entropy" at the last layer, without the rest of Z: at most 256 rows of logits
    exist at a time, and they are overwritten.
    """
    if runner.device == "cuda":
        z = read(LensSpec(("",), top_k=1), runner, {"": residual}, emitted)
        return z["Z.emitted"][:, 0], z["Z.entropy"][:, 0]
    tokens = torch.tensor(emitted, dtype=torch.int64)
    logprob, entropy = torch.empty(len(residual), dtype=torch.float32), torch.empty(len(residual), dtype=torch.float32)
    with modes.canonical():
        for first in range(0, len(residual), LENS_ROWS):
            some = slice(first, first + LENS_ROWS)
            _next_token(runner.logits(residual[some]).float(), tokens[some], logprob[some], entropy[some])
    return logprob.masked_fill_(tokens < 0, float("nan")), entropy


def _next_token(logits: Tensor, tokens: Tensor, logprob: Tensor, entropy: Tensor) -> None:
    """Fill `logprob` and `entropy`. Overwrites the logits."""
    log_p = portable.log_softmax_(logits)
    torch.gather(log_p, 1, tokens.clamp_min(0)[:, None], out=logprob[:, None])
    entropy.copy_(portable.entropies(log_p[:, None])[0][:, 0])


def _read(spec: LensSpec, runner: Runner, stacked: Tensor, emitted: list[int], ranked: bool = False) -> Rows:
    n, layers, d = stacked.shape
    if runner.device == "cuda" and not ranked:
        from replaylens.engine.passes import cuda as cuda_lens  # its kernel needs triton

        # float32 is portable arithmetic, which the host computes of portable logits
        if spec.fits_kernel and runner.model.config.plain_logits and runner.model.dtype != torch.float32:
            return cuda_lens.read_lens(spec, runner.model, stacked, emitted)
    parts: dict[str, list[Tensor]] = {}
    step = max(1, min(_TOGETHER, _NUMBERS // runner.model.config.vocab_size) // layers)
    for first in range(0, n, step):
        block = stacked[first : first + step]
        # on the CPU, where sums over a row do not depend on the number of rows; in CUDA libraries they do
        logits = runner.logits(block.reshape(-1, d)).float().cpu()
        log_p = log_softmax(logits).view(len(block), layers, -1)
        found = statistics(spec, log_p, emitted[first : first + step])
        if ranked:
            found["Z.rank"] = _ranks(logits.view(log_p.shape), emitted[first : first + step])
        for name, value in found.items():
            parts.setdefault(name, []).append(value)
    return {name: torch.cat(pieces) for name, pieces in parts.items()}


def _ranks(logits: Tensor, tokens: list[int]) -> Tensor:
    """logits [n, layers, vocab], one token per row -> how many are likelier: [n, layers] float32, NaN for -1."""
    wanted = torch.tensor(tokens)
    own = logits.gather(-1, wanted.clamp_min(0)[:, None, None].expand(-1, logits.shape[1], 1))
    above = (logits > own).sum(-1)
    for i, layer in ((logits == own).sum(-1) > 1).nonzero().tolist():
        above[i, layer] += (logits[i, layer, : int(wanted[i])] == own[i, layer]).sum()
    return above.float().masked_fill_((wanted < 0)[:, None], float("nan"))


def log_softmax(logits: Tensor) -> Tensor:
    """Of rows [rows, vocab] on the CPU, in portable arithmetic."""
    return portable.log_softmax_(logits.clone(memory_format=torch.contiguous_format))


def statistics(spec: LensSpec, log_p: Tensor, emitted: list[int]) -> Rows:
    """log_p [n, layers, vocab], contiguous -> Z, as in `read`."""
    entropy, kl = portable.entropies(log_p)
    values, ids = portable.top(log_p, spec.top_k)
    next_token = torch.tensor(emitted).clamp_min(0)[:, None, None].expand(-1, log_p.shape[1], 1)
    out = {
        "Z.entropy": entropy,
        "Z.kl": kl,  # KL(final || layer)
        "Z.emitted": log_p.gather(-1, next_token).squeeze(-1),
        "Z.top_ids": ids.to(torch.int32),
        "Z.top_logprobs": values,
    }
    missing = torch.tensor(emitted) < 0
    out["Z.emitted"][missing] = float("nan")
    if spec.targets:
        out["Z.targets"] = log_p[..., list(spec.targets)]
    if spec.full:
        out["Z.full"] = log_p
    return out


# ---- known -----------------------------------------------------------------------------------------------------------
# `KnownLenses`: the tuned lenses of an engine. Captures refer to them by digest.


class KnownLenses:
    """Tuned lenses by digest, all trained for the unembedding of one model."""

    def __init__(self, model: Decoder) -> None:
        self.model = model
        self._by_digest: dict[str, TunedLens] = {}

    def add(self, lens: TunedLens) -> str:
        """Add a lens, so that captures can use it, and return its digest. FingerprintMismatch if it belongs to another
        model."""
        as_instance("lens", lens, TunedLens, "a TunedLens")
        self._by_digest[lens.digest] = lens.require(self.model)
        return lens.digest

    def of(self, spec: LensSpec | None) -> TunedLens | None:
        """The tuned lens of the spec; None for the plain lens. BadRequest if it was not added."""
        if spec is None or spec.tuned is None:
            return None
        if spec.tuned not in self._by_digest:
            raise BadRequest(
                f"This engine does not have the tuned lens {spec.tuned[:16]} that the capture asks for. "
                "Add it with engine.capture_spec('Z', lens=...)."
            )
        return self._by_digest[spec.tuned]
