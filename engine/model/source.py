"""`Source`: tensors by their Hugging Face names, from files or from a model in memory."""

import re
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from replaylens.engine.errors import BadWeights, MissingTensor

HEAD = "lm_head.weight"
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
