"""What `Engine.load` takes: a name, a path or a model in memory becomes a decoder with its tokenizer, and these an engine.

Other kinds of models than a decoder (`KINDS`) and models over several processes are parts of their own, which an installation
may leave out; they are found by name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from replaylens.engine.errors import BadRequest, FetchFailed, UnsupportedModel, nearest, no_such
from replaylens.engine.machine import optional, require_gpu
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.model.layers import freeze
from replaylens.engine.model.text import Text
from replaylens.engine.records import DTYPES
from replaylens.engine.request.values import as_bool, as_list, short_repr
from replaylens.tasks.tokenizer import WordTokenizer
from replaylens.weights import loading, zoo
from replaylens.weights.source import HubOptions, is_hub_name

KINDS = ("replaylens.thinking.opening",)
"""files of other kinds of models: `opened_kind` of each returns how an engine of a source is made, or None"""
RANKS = "replaylens.extras.ranks"
Guess = Literal["sequential", "empty", "drafted"]
GUESSES: tuple[Guess, ...] = ("sequential", "empty", "drafted")
EngineOf = Callable[..., Any]
"""an engine of a kind (None: of a decoder), a model, its tokenizer and a draft model"""


class Opened(NamedTuple):
    """A model of another kind than a decoder."""

    what: str
    """its kind, in words"""
    model: Any
    tokenizer: Any
    kind: type
    """its engine's class"""


# ---- an engine -------------------------------------------------------------------------------------------------------


def open_engine(
    make: EngineOf,
    source: Any,
    device: str,
    devices: Sequence[str] | None,
    dtype: str | torch.dtype | None,
    tokenizer: Any,
    adapter: str | Path | None,
    hub: HubOptions,
    draft_model: Any,
    guess: Any,
    check: bool | None,
    ranks: Any,
    rank_timeout: Any,
) -> Any:
    """The engine of a source; parameters as of `Engine.load`"""
    where: loading.Where = device
    if devices is not None:
        named = placed_devices(devices, device)
        device = "cuda" if named[0] != "cpu" else "cpu"
        where = named if len(named) > 1 else device
        dtype = torch.float32 if dtype is None and "cpu" in where else dtype
    dtype = default_dtype(device, dtype)
    _require_float32(dtype, where)
    over = None if type(ranks) is int and ranks == 1 else optional(RANKS, f"ranks={short_repr(ranks)}")
    several = over is not None and over.joined(ranks, where, device)
    draft = _draft(source, draft_model, dtype, device, hub)
    check = None if check is None else as_bool("check", check)
    source = located(source, adapter, hub)
    if (found := _other_kind(source)) is not None:
        loading.require_unchecked(bool(check), found.what)
        _require_one_place(where, found.what, several)
        on_disk = isinstance(source, loading.LocatedModel)
        _require_no_adapter(source.adapter if on_disk else adapter, found.what)
        if not on_disk:
            hub.require_unused(source)
        model = loading.in_dtype(found.model, dtype).to(device)
        freeze(model)
        given = found.tokenizer if tokenizer is None else tokenizer
        return make(found.kind, model, given, guess=guess, draft_model=draft)
    if not isinstance(guess, str) or guess != "empty":  # an array answers != with an array
        _require_guess(guess)
    check = loading.is_live(source) if check is None else check
    read = partial(load_model, source, dtype, adapter=adapter, hub=hub)
    made: EngineOf = lambda model, text: make(  # noqa: E731
        None, owned(model), text if tokenizer is None else tokenizer, draft_model=draft
    )
    if several:
        assert over is not None
        return over.divided(ranks, device, dtype, rank_timeout, partial(read, device=device), made, check, tokenizer is None)
    return made(*read(check=check, device=where, packed=True, with_text=tokenizer is None))


def _draft(source: Any, draft_model: Any, dtype: torch.dtype, device: str, hub: HubOptions) -> Decoder | None:
    if draft_model is None and isinstance(source, str) and source == "coin-plain":
        draft_model = "coin-draft"
    if draft_model is None:
        return None
    beside = replace(hub, revision=None)  # the draft model may be on the hub, too
    return owned(load_model(draft_model, dtype, False, device, hub=beside, packed=True, with_text=False)[0])


def _other_kind(source: Any) -> Opened | None:
    if isinstance(source, str | loading.LocatedModel) and not thinks(source):
        return None
    for name in KINDS:
        if find_spec(name.rpartition(".")[0]) is not None and (found := import_module(name).opened_kind(source)) is not None:
            return found
    if thinks(source):
        optional(KINDS[0], "A Thinking-States model")
    return None


def thinks(source: Any) -> bool:
    """Whether a source is the embedded name or the folder of a Thinking-States model."""
    if isinstance(source, loading.LocatedModel):
        from replaylens.weights.hub import THINKING_FILES

        return loading.exists(source.path / THINKING_FILES[0])
    return isinstance(source, str) and source in zoo.THINKING


# ---- a place to compute ----------------------------------------------------------------------------------------------


def default_dtype(device: str, dtype: str | torch.dtype | None = None) -> torch.dtype:
    """The dtype that a device computes in; BadRequest if the device is missing or does not support it."""
    if isinstance(device, str) and device.partition(":")[0] == "mps":
        raise UnsupportedModel("Apple GPUs (mps) are not supported: kernels are compiled for NVIDIA GPUs. Use device='cpu'.")
    if not isinstance(device, str) or device not in ("cpu", "cuda"):
        raise BadRequest(f"Unknown device {short_repr(device)}. Use 'cpu' or 'cuda'.")
    if device == "cuda" and not torch.cuda.is_available():
        raise BadRequest("No CUDA device found. Use device='cpu'.")
    if device == "cuda":
        require_gpu(torch.device("cuda", torch.cuda.current_device()))
    given = ("float32" if device == "cpu" else "bfloat16") if dtype is None else dtype
    name = str(given).removeprefix("torch.") if isinstance(given, torch.dtype) else given
    if not isinstance(name, str) or name not in DTYPES:
        raise BadRequest(f"Unknown dtype={short_repr(dtype)}. Use one of {', '.join(DTYPES)}.")
    if device == "cpu" and name != "float32":
        raise BadRequest(
            f"A CPU computes in float32 only, and dtype={name!r} was given. Use dtype='float32', or device='cuda'."
        )
    found: torch.dtype = getattr(torch, name)
    return found


def placed_devices(given: Any, device: str) -> tuple[str, ...]:
    """`devices` of `Engine.load`, each with its number; BadRequest if one is missing, or `device` names another kind."""
    listed = [given] if isinstance(given, str) else as_list("devices", given, 'a list of devices, such as ["cuda:0", "cuda:1"]')
    known = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    named = tuple("cuda:0" if isinstance(each, str) and each == "cuda" else each for each in listed)
    if not named:
        raise BadRequest(f"devices=[] names none. Give at least one of {', '.join(known)}.")
    if len(known) == 1 and any(isinstance(each, str) and each.startswith("cuda") for each in named):
        raise BadRequest("No CUDA device found. Use devices=['cpu'].")
    if any(each not in known for each in named):
        raise BadRequest(f"Invalid devices={short_repr(given)}. Give a list of {', '.join(known)}.")
    if device != "cpu" and not any(each.startswith(device) for each in named):
        raise BadRequest(f"device={device!r} and devices={list(named)} were given. Give one of them.")
    if named[0] != "cpu" and torch.device(named[0]).index != torch.cuda.current_device():
        advice = f"Call torch.cuda.set_device({named[0]!r}) before."
        raise BadRequest(f"The first of devices={list(named)} is not the current one. {advice}")
    return named


def _require_float32(dtype: torch.dtype, where: loading.Where) -> None:
    if "cpu" in where and dtype != torch.float32:
        raise BadRequest(f"A CPU is among devices={list(where)}, and it does not compute in {dtype}. Use torch.float32.")


def _require_one_place(where: loading.Where, what: str, several: bool) -> None:
    if not isinstance(where, str) or several:
        raise UnsupportedModel(f"Not supported: {what} over {'ranks' if several else 'devices'}. Leave it out.")


# ---- a model and its tokenizer ---------------------------------------------------------------------------------------


def load_model(
    source: Any,
    dtype: torch.dtype,
    check: bool,
    device: loading.Where = "cpu",
    adapter: str | Path | None = None,
    hub: HubOptions = HubOptions(),  # noqa: B008 (frozen)
    packed: bool | loading.Divider = False,
    with_text: bool = True,
) -> tuple[Decoder, Text]:
    """A decoder and its tokenizer, from any source of `Engine.load`; the options as in `loading.load`.

    with_text  whether a file's tokenizer is read, which may take half a minute or be impossible, for somebody who has his own
    """
    if isinstance(source, str) and source in zoo.PLAIN:
        loading.require_unchecked(check, source)
        _require_no_adapter(adapter, source)
        hub.require_unused(source)
        folder = zoo.CHECKPOINTS / source
        words = WordTokenizer.load(folder / zoo.TOKENIZER_FILE)
        return loading.load(folder, dtype, device=device), Text(words)
    found = located(source, adapter, hub)
    if isinstance(found, loading.LocatedModel):
        places = [place for place in (found.adapter, found.path) if place is not None and with_text]
        text = next((found for found in map(load_text, places) if found.tokenizer is not None), Text(None))
        return loading.load(found.path, dtype, check, device, found.adapter, found.revision, packed), text
    hub.require_unused(source)
    return loading.load(source, dtype, check, device, adapter, packed=packed), Text(getattr(source, "tokenizer", None))


def folder_of(source: str) -> Path:
    """Where a named model is: its folder, or its .gguf file. Fetched from the hub if need be."""
    if source in (*zoo.PLAIN, *zoo.THINKING):
        return zoo.CHECKPOINTS / source
    found: loading.LocatedModel = located(source, None, HubOptions())
    return found.path


def located(source: Any, adapter: str | Path | None, hub: HubOptions) -> Any:
    """Where a path, smollm2 or a name on the hub is, as a `LocatedModel`; other sources as they are."""
    if not isinstance(source, str | Path) or source in (*zoo.PLAIN, *zoo.THINKING):
        return source
    from replaylens.weights.hub import PACKAGED, fetched_folder

    if source in PACKAGED:
        hub.require_unused(source)
        source = fetched_folder(str(source))
    if not str(source) or not loading.exists(Path(source)):
        _require_name(source)
    try:
        return loading.located(source, adapter, hub)
    except FetchFailed as error:
        if "/" not in str(source):
            error.args = (f"{error} Models of replaylens: {', '.join(_own_names())}.",)
        raise


def owned(model: Decoder) -> Decoder:
    """Mutates: the model belongs to an engine. In float32, weights are held as products read them; they cannot be changed."""
    if model.dtype == torch.float32:
        for module, name in model.packable(model.device.type).values():
            module.pack(name)
    freeze(model)
    return model


def _require_name(source: str | Path) -> None:
    """UnsupportedModel for a path that does not exist and is no name on the hub, or is nearly that of an embedded model.

    The hub is not asked for words like those: all its models but a few of its first have an owner in their names.
    """
    known, name = _own_names(), str(source).lower()
    if is_hub_name(source) and not nearest(name, known):
        return
    raise UnsupportedModel(
        f"{str(source) or repr('')} does not exist. Give the path of a folder or a .gguf file, or a name: on the Hugging Face "
        f"hub, such as gpt2 or org/name, or of an embedded model. {no_such('model', name, known)}"
    )


def _own_names() -> tuple[str, ...]:
    from replaylens.weights.hub import PACKAGED

    return (*zoo.PLAIN, *zoo.THINKING, *PACKAGED)


def _require_guess(guess: Any) -> None:
    if not isinstance(guess, str) or guess not in GUESSES:
        raise BadRequest(
            f"Invalid guess={short_repr(guess)}. Give one of {', '.join(GUESSES)}, for Thinking-States models only."
        )


def _require_no_adapter(adapter: str | Path | None, what: str) -> None:
    if adapter is not None:
        raise BadRequest(f"adapter= goes with the folder of a base model, not with {what}. Leave adapter out.")


# ---- tokenizers ------------------------------------------------------------------------------------------------------


def load_text(folder: Path) -> Text:
    """The tokenizer in a model folder or a .gguf file, if any."""
    if folder.suffix == ".gguf" and folder.is_file():
        from replaylens.weights.gguf import GgufFile

        return Text(GgufFile(folder).tokenizer())
    ours, theirs = folder / "tokenizer.json", folder / "tokenizer_config.json"
    if theirs.exists():
        from transformers import AutoTokenizer

        return Text(AutoTokenizer.from_pretrained(folder, **_known_config(folder, theirs)))
    if ours.exists():
        return Text(WordTokenizer.load(ours))
    return Text(None)


def _known_config(folder: Path, tokenizer_file: Path) -> dict[str, Any]:
    """For a tokenizer whose class is named: `config`, with all that `AutoTokenizer` reads of it. Else it imports the config's
    own class, and with it torch's compiler, which takes two seconds."""
    from transformers import PreTrainedConfig

    try:
        model, tokenizer = (json.loads(file.read_text(encoding="utf-8")) for file in (folder / "config.json", tokenizer_file))
        if not tokenizer["tokenizer_class"] or "auto_map" in tokenizer or "auto_map" in model:
            return {}
        config = PreTrainedConfig(name_or_path=str(folder))
        for name in ("model_type", "model_name"):
            if name in model:
                setattr(config, name, model[name])
    except (OSError, ValueError, KeyError, TypeError):  # reported by whoever needs them
        return {}
    return {"config": config}
