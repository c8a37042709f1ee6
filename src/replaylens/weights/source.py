"""`Source`: tensors by their Hugging Face names, from files or from a model in memory."""

import ctypes
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from replaylens.engine.errors import BadRequest, BadWeights, MissingTensor, NotEnoughMemory, UnsupportedModel
from replaylens.engine.machine import total_memory
from replaylens.engine.memory.cache import free_on
from replaylens.engine.model.config import ModelConfig
from replaylens.engine.model.decoder import Decoder, LayerStage
from replaylens.engine.model.layers import Packable
from replaylens.kernels.gpus import Gpu, gpu_of

# ---- source ----------------------------------------------------------------------------------------------------------

HEAD = "lm_head.weight"
ADAPTER_FILE, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""of a LoRA adapter, written by peft"""
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""dtypes whose values are the weights; other dtypes need scales"""
_SPELLINGS = (("lm_head.", "embed_out."), ("model.", ""), ("transformer.", ""), ("gpt_neox.", ""))
"""other names of the same tensor: in GPT-NeoX files, and in files of a transformer without its head (GPT-2's own)"""
_TEXT_PARTS = (("", "language_model."), ("model.", "model.language_model."), ("model.", "language_model."))
"""where a multimodal model keeps its text part: (prefix of a name in a text model, prefix there)"""
_NO_WEIGHT = re.compile(
    r"rotary_emb\.inv_freq$|\.attn\.(masked_)?bias$|\.attention\.(masked_)?bias$|^(lm_head|embed_out)\.weight$"
)
"""constants that older checkpoints store, and the second copy of a tied embedding"""


class Source:
    """Returns tensors by name, and names those that are missing."""

    def __init__(self, names: Iterable[str], read: Callable[[str], Tensor], holds_copies: bool = False) -> None:
        self.names, self.read, self.holds_copies = set(names), read, holds_copies
        self.begins = next((pair for pair in _TEXT_PARTS if self._embeds(*pair)), ("", ""))
        self.shapes: dict[str, tuple[int, ...]] = {}
        """the shapes of all tensors read so far, in order"""

    def _embeds(self, text: str, here: str) -> bool:
        return here + "model.embed_tokens.weight".removeprefix(text) in self.names

    def find(self, name: str) -> str | None:
        """The tensor's name in this source; None: it is missing."""
        text, here = self.begins
        own = here + name.removeprefix(text) if name.startswith(text) else name
        others = (new + own.removeprefix(old) for old, new in _SPELLINGS if own.startswith(old))
        return next((known for known in (own, *others) if known in self.names), None)

    def get(self, name: str) -> Tensor:
        """The tensor, detached; BadWeights if it is missing or does not hold plain floating-point numbers."""
        found = self.find(name)
        if found is None:
            raise MissingTensor(f"Tensor {name!r} is missing from the checkpoint. Is it complete, and of this architecture?")
        tensor = self.read(found)
        if tensor.device.type == "meta":
            raise BadWeights(f"Tensor {found!r} has no values (device 'meta'). Load the model's weights first.")
        if tensor.dtype not in FLOATS:
            raise BadWeights(
                f"Tensor {found!r} holds {tensor.dtype}, which needs scales. Is the checkpoint quantised? "
                "Save it in float16, bfloat16 or float32."
            )
        self.shapes[found] = tuple(tensor.shape)
        return tensor.detach()

    def text_names(self) -> dict[str, str]:
        """The weights of the text part: their names in a text model -> here."""
        text, here = self.begins
        names = {text + name.removeprefix(here): name for name in self.names if name.startswith(here)}
        names |= {name: name for name in self.names if name == HEAD}
        return {name: known for name, known in names.items() if name == HEAD or not _NO_WEIGHT.search(name.removeprefix(text))}

    def unread(self) -> list[str]:
        """The weights that were never read; none if the source keeps copies under other names."""
        if self.holds_copies:
            return []
        here = self.begins[1]
        mine = (name for name in self.names - set(self.shapes) if name.startswith((here, "lm_head.")))
        return sorted(name for name in mine if not _NO_WEIGHT.search(name.removeprefix(here)))


# ---- shards ----------------------------------------------------------------------------------------------------------
# `Shards`: the tensors of a folder of safetensors files, read one by one.

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAPPED_BYTES = 1 << 24
"""how much is read before files are mapped anew, which returns the memory of what was read"""


class Shards:
    """All tensors of a folder, one file or sharded by an index. BadWeights names the file at fault.

    Files are mapped into memory. The pages that were read of a mapping count as memory of the process until it ends. So files
    are closed once much was read: only the mappings of tensors that are still in use remain.
    """

    def __init__(self, folder: Path, files: list[str] | None = None) -> None:
        """files  their names; default: those of a model"""
        self.folder = folder
        self.names: dict[str, str] = {}
        """tensor -> its file"""
        self._open: dict[str, Any] = {}
        self._mapped = 0
        for file in weight_files(folder) if files is None else files:
            for name in self._handle(file).keys():  # noqa: SIM118 (not a dict)
                if name in self.names:
                    raise BadWeights(
                        f"Tensor {name} is both in {self.names[name]} and in {file}. Is one left from an earlier save?"
                    )
                self.names[name] = file

    def read(self, name: str) -> Tensor:
        """The tensor, in a mapping of its file or a copy of it."""
        x: Tensor = self._handle(self.names[name]).get_tensor(name)
        self._mapped += x.nbytes
        if self._mapped > MAPPED_BYTES:
            self._open.clear()
            self._mapped = 0
        return x

    def _handle(self, file: str) -> Any:
        if file not in self._open:
            self._open[file] = _opened(self.folder / file)
        return self._open[file]


def weight_files(folder: Path) -> list[str]:
    """The names of a folder's weight files, present or not."""
    index = folder / INDEX_FILE
    if not index.exists():
        return [WEIGHTS_FILE]
    try:
        files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        bad = [name for name in files if Path(name).name != name]
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise BadWeights(f"{index} is not an index of shards ({e!r}). Copy it again.") from None
    if bad:
        raise BadWeights(f"{index} points outside its folder: {bad}.")
    if (folder / WEIGHTS_FILE).exists() and WEIGHTS_FILE not in files:  # transformers would read this one alone
        raise BadWeights(f"{folder} holds both {WEIGHTS_FILE} and {index.name}, which may be two models. Remove one.")
    return files


def _opened(file: Path) -> Any:
    if not file.exists():
        raise BadWeights(f"{file} is missing. Only safetensors checkpoints are read (no pickle).")
    try:
        return safe_open(file, framework="pt")
    except Exception as e:
        raise BadWeights(f"{file} is not a readable safetensors file: {e}") from e


# ---- filler ----------------------------------------------------------------------------------------------------------
# `Filler`: a decoder that receives its weights one by one, so that they are in memory only once.

_ROWS = 512
"""rows of a source tensor that are transposed together: they fit into a cache"""


Where = str | tuple[str, ...]
"""a device; or several, to divide the layers over"""


class Divider(Protocol):
    """Who takes weights of products in the place of a model's modules: ranks, which divide them."""

    def packable(self, model: Decoder) -> dict[str, tuple[Packable, str]]:
        """The weights that it takes, by name: (module, name within it)."""
        ...

    def split(self, name: str, module: Packable, leaf: str, weight: Tensor) -> bool:
        """Mutates the module. False: the weight is not divided."""
        ...


def free_memory(device: torch.device) -> int:
    """Bytes; of a CPU those of the machine."""
    return free_on(device) if device.type == "cuda" else total_memory()


def require_fit(needs: int, dtype: torch.dtype, gpu: Gpu, free: int, devices: int = 1) -> None:
    """NotEnoughMemory, before anything is read, if weights of so many bytes exceed the free bytes of the GPUs."""
    if needs > free:
        smaller = "dtype='bfloat16'" if dtype == torch.float32 else "a smaller model"
        where = f"{devices} GPUs from {gpu.name} on have" if devices > 1 else f"{gpu.name} has"
        raise NotEnoughMemory(
            f"The weights take {needs / 2**30:,.1f} GiB in {str(dtype).removeprefix('torch.')}, and {where} "
            f"{free / 2**30:,.1f} GiB free of {devices * gpu.memory / 2**30:,.1f}. Use {smaller}, several GPUs "
            "(devices=[...]), or device='cpu'."
        )


class Filler:
    """Copies each weight to its device, in its dtype, as it is set (`filler[name] = tensor`). The given one can be freed."""

    def __init__(
        self, made: ModelConfig | Decoder, dtype: torch.dtype, device: Where = "cpu", packed: bool | Divider = False
    ) -> None:
        """made    the config, or a decoder with the wiring
        device  several: layers are divided over them in proportion to their free memory; the rest is on the first
        packed  hold float32 weights as products read them, where they are packable; or give weights to a divider"""
        self.model = made.hollowed() if isinstance(made, Decoder) else Decoder.hollow(made)
        self.dtype, self.device = dtype, device if isinstance(device, str) else device[0]
        if not isinstance(device, str):
            if self.model.config.weights_of:
                raise UnsupportedModel("Layers that share weights are not divided over devices. Give one device.")
            devices = [torch.device(each) for each in device]
            sizes = [sum(x.numel() for x in block.parameters()) for block in self.model.blocks]
            self.model.stages = divided(sizes, devices, [free_memory(each) for each in devices])
            if not self.model.usual:
                from replaylens.engine.model.program import Program

                if not {stage.first for stage in self.model.stages} <= Program.of_wiring(self.model).entries:
                    what = "blocks that read more than the residual stream that enters them"
                    raise UnsupportedModel(f"A model with {what} is not divided over devices. Give one device.")
        self.packable = self.model.packable(self.device.split(":")[0]) if packed and dtype == torch.float32 else {}
        self.divider = None if isinstance(packed, bool) else packed
        self.divided = {} if self.divider is None else self.divider.packable(self.model)
        self.wanted = {name: tuple(x.shape) for name, x in self.model.state_dict().items()}
        if self.device.startswith("cuda") and not self.divided:
            devices = [torch.device(device)] if isinstance(device, str) else [torch.device(x) for x in device]
            held = self.model.state_dict().items()
            needs = sum(x.numel() * (2 if name in self.packable else dtype.itemsize) for name, x in held)
            require_fit(needs, dtype, gpu_of(devices[0]), sum(map(free_memory, devices)), len(devices))
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
        elif not self._divides(name, x):
            taken = x.detach().to(self._place(name), self.dtype) if name in self.packable else self._copied(name, x)
            if not _finite(taken):
                self._faults.append(f"{name} holds NaN or infinity as {self.dtype}")
            if name not in self.packable:
                self._held[name] = taken
            elif not self.packable[name][0].pack(self.packable[name][1], taken):
                self._held[name] = self._copied(name, x)

    def _divides(self, name: str, x: Tensor) -> bool:
        """Mutates: gives a weight to the divider. False: it is not one that it takes."""
        if self.divider is None or name not in self.divided:
            return False
        taken = x.detach().to("cpu", self.dtype)
        if not _finite(taken):
            self._faults.append(f"{name} holds NaN or infinity as {self.dtype}")
        return self.divider.split(name, *self.divided[name], taken)

    def _place(self, name: str) -> str:
        """The device of a weight."""
        layer = int(name.split(".")[1]) if name.startswith("blocks.") else -1
        return next((str(s.device) for s in self.model.stages if s.first <= layer < s.end), self.device)

    def _copied(self, name: str, x: Tensor) -> Tensor:
        try:
            return _copied(x, self.dtype, self._place(name))
        except (torch.OutOfMemoryError, RuntimeError) as e:  # a CPU's allocator has no error of its own
            if not isinstance(e, torch.OutOfMemoryError) and "alloc" not in str(e):
                raise
            held = sum(x.nbytes for x in self._held.values())
            raise NotEnoughMemory(
                f"{self._place(name)} has no memory for {name} in {self.dtype}, after {held / 1e9:.1f} GB of weights: {e}. "
                "Use a smaller model, free memory, or give several devices."
            ) from e

    def finished(self) -> Decoder:
        """The model, without gradients; BadWeights names the tensors at fault."""
        missing = [f"{name} is missing (shape {shape})" for name, shape in self.wanted.items() if name not in self._seen]
        if faults := missing + self._faults:
            shown = "; ".join(faults[:8]) + (f"; and {len(faults) - 8} more" if len(faults) > 8 else "")
            raise BadWeights(
                f"The weights cannot be used: {shown}. Check that config and weights belong together, and are finite."
            )
        self.model.load_state_dict(self._held, assign=True)
        for weight in self.model.held():
            weight.requires_grad_(False)
        for path, module in self.model.named_modules():
            for name, table in module._buffers.items():
                module._buffers[name] = None if table is None else table.to(self._place(f"{path}.{name}"))
        return_freed_memory()
        return self.model.eval()


def return_freed_memory() -> None:
    """To the system. glibc keeps what was freed between weights that stay: 35 MiB once those of SmolLM2-135M are joined and
    packed, 180 once they are compared, too. Takes less than a millisecond."""
    if (trim := getattr(ctypes.CDLL(None) if sys.platform == "linux" else None, "malloc_trim", None)) is not None:
        trim(0)


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
    x = x if x.is_contiguous() else x.mT  # several times faster if that is how they lie
    return x.numel() == 0 or bool(torch.isfinite(torch.stack(torch.aminmax(x))).all())


def divided(sizes: Sequence[int], devices: Sequence[torch.device], free: Sequence[int]) -> tuple[LayerStage, ...]:
    """Layers of these sizes over devices, at least one each, in proportion to their free memory. BadRequest if there are more
    devices than layers."""
    if len(devices) > len(sizes):
        raise BadRequest(f"{len(devices)} devices were given for {len(sizes)} layers. Give at most one device per layer.")
    ends, done, share = [0], list(accumulate(sizes)), list(accumulate(free))
    for i in range(1, len(devices)):
        wanted = done[-1] * share[i - 1] / share[-1]
        nearest = min(range(len(done)), key=lambda layer: abs(done[layer] - wanted)) + 1
        ends.append(min(max(nearest, ends[-1] + 1), len(sizes) - len(devices) + i))
    return tuple(LayerStage(a, b, device) for a, b, device in zip(ends, [*ends[1:], len(sizes)], devices, strict=True))


# ---- names on the hub ------------------------------------------------------------------------------------------------

_NAME = re.compile(r"[A-Za-z0-9_][\w.-]*(/[A-Za-z0-9_][\w.-]*)?(@[\w./-]+)?", re.ASCII)


@dataclass(frozen=True)
class HubOptions:
    """How a repository is found, in the words of huggingface_hub, whose defaults and environment variables count."""

    revision: str | None = None
    """a branch, a tag or a commit; None: main"""
    token: str | bool | None = None
    cache_dir: str | Path | None = None
    local_files_only: bool = False

    def __post_init__(self) -> None:
        kinds = {"revision": str, "token": str | bool, "cache_dir": str | Path}
        for name, kind in kinds.items():
            if (value := getattr(self, name)) is not None and not isinstance(value, kind):
                shown = type(value).__name__ if name == "token" else f"{value!r:.60}"
                raise BadRequest(f"Invalid {name}={shown}. Give what huggingface_hub takes: {kind} or None.")
        if not isinstance(self.local_files_only, bool):
            raise BadRequest(f"Invalid local_files_only={self.local_files_only!r:.60}. Give True or False.")

    def require_unused(self, source: Any) -> None:
        """BadRequest if an option is given with a source that is not on the hub, where it would be ignored."""
        given = [name for name, value in vars(self).items() if value not in (None, False)]
        if given:
            what = "a model in memory"
            if isinstance(source, str | Path):
                what = "a path here" if Path(source).exists() else "a model of replaylens"
            raise BadRequest(
                f"{given[0]}= goes with the name of a model on the Hugging Face hub, not with {source!r:.120}, which is "
                f"{what}. Leave {given[0]} out."
            )


def is_hub_name(source: Any) -> bool:
    """Whether the source can be a name on the hub: `gpt2`, `org/name`, each with `@revision` or without. Whether a path of
    this name exists is for the caller to see: it comes first."""
    return isinstance(source, str) and _NAME.fullmatch(source) is not None and not source.endswith(".gguf")
