"""`Aligned`: two prompts, and which positions of one correspond to which of the other."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from replaylens.engine.dump.places import ends_of
from replaylens.engine.errors import BadRequest
from replaylens.engine.request.values import items, shown, whole
from replaylens.engine.serving.core import Core
from replaylens.engine.serving.logits import At, chosen
from replaylens.workbench.metric import words

Direction = Literal["denoise", "noise"]
Align = str | Sequence[tuple[int, int]] | None
FORMS = "pairs (clean position, corrupt position), 'start', 'end', or 'text:SUBSTRING'"


@dataclass(frozen=True, eq=False)
class Aligned:
    """The prompt that is patched, and the one that activations are taken from."""

    base: list[int]
    source: list[int]
    pairs: tuple[tuple[int, int], ...]
    """(position of the base, position of the source), in the order of the base"""

    @classmethod
    def of(cls, engine: Core, clean: Any, corrupt: Any, direction: Direction, align: Align, positions: At = None) -> "Aligned":
        """The pairs at the chosen positions of the base; BadRequest if lengths differ and nothing says what corresponds."""
        if direction not in ("denoise", "noise"):
            raise BadRequest(f"Unknown direction {shown(direction)}. Known: denoise, noise.")
        first, second = engine.tokens_of(clean), engine.tokens_of(corrupt)
        pairs = _pairs(engine, first, second, align)
        if direction == "denoise":
            pairs = [(theirs, mine) for mine, theirs in pairs]
            first, second = second, first
        asked = set(chosen(positions, len(first)))
        kept = tuple(sorted(pair for pair in pairs if pair[0] in asked))
        if not kept:
            raise BadRequest(f"positions={shown(positions)} has no counterpart in the other prompt. Give other positions.")
        return cls(first, second, kept)

    @property
    def at(self) -> list[int]:
        """The positions of the base."""
        return [mine for mine, _ in self.pairs]

    @property
    def there(self) -> list[int]:
        """The positions of the source, in the order of the base's."""
        return [theirs for _, theirs in self.pairs]


def _pairs(engine: Core, clean: list[int], corrupt: list[int], align: Align) -> list[tuple[int, int]]:
    """(clean position, corrupt position) pairs."""
    lengths = len(clean), len(corrupt)
    if align is None:
        if lengths[0] != lengths[1]:
            raise BadRequest(
                f"The prompts have {lengths[0]} (clean) and {lengths[1]} (corrupt) tokens, but rows are copied one by one. "
                f"Give prompts with the same number of tokens, or say which correspond with align: {FORMS}."
            )
        return [(i, i) for i in range(lengths[0])]
    if isinstance(align, str):
        return _named(engine, clean, corrupt, align)
    found = []
    for pair in items("align", align, FORMS):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise BadRequest(f"Invalid align: {shown(pair)} is not a pair. Give {FORMS}.")
        here, there = (whole("align", p, -n, n - 1) % n for p, n in zip(pair, lengths, strict=True))
        found.append((here, there))
    if not found or any(len({pair[side] for pair in found}) < len(found) for side in (0, 1)):
        raise BadRequest(f"Invalid align={shown(align)}. Give at least one pair, and each position only once.")
    return found


def _named(engine: Core, clean: list[int], corrupt: list[int], name: str) -> list[tuple[int, int]]:
    shorter = min(len(clean), len(corrupt))
    if name == "start":
        return [(i, i) for i in range(shorter)]
    if name == "end":
        return [(len(clean) - i, len(corrupt) - i) for i in range(shorter, 0, -1)]
    if not name.startswith("text:") or name == "text:":
        raise BadRequest(f"Unknown align={shown(name)}. Give {FORMS}.")
    substring = name.removeprefix("text:")
    ends = [ends_of(substring, words(engine, path)) for path in (clean, corrupt)]
    if not ends[0] or len(ends[0]) != len(ends[1]):
        raise BadRequest(
            f"{substring!r} occurs {len(ends[0])} times in the clean prompt and {len(ends[1])} times in the corrupt one. Give "
            "a text that occurs equally often in both, or pairs of positions."
        )
    return list(zip(*ends, strict=True))


def require_one_vocabulary(first: Core, second: Core) -> None:
    """BadRequest if two models do not have the same tokens: their logits and positions would not correspond."""
    sizes = first.config.vocab_size, second.config.vocab_size
    if sizes[0] != sizes[1]:
        raise BadRequest(f"The models have vocabularies of {sizes[0]} and {sizes[1]} tokens. Give models with the same tokens.")
    if first.text.tokenizer is None or second.text.tokenizer is None:
        return  # prompts are token ids then
    names = [_vocabulary(engine) for engine in (first, second)]
    if names[0] != names[1]:
        other = next((i for i, pair in enumerate(zip(*names, strict=False)) if pair[0] != pair[1]), min(map(len, names)))
        raise BadRequest(f"The models' tokenizers differ, first in token {other}. Give models with the same tokenizer.")


def _vocabulary(engine: Core) -> list[str]:
    """The names of all tokens, in order."""
    known = getattr(engine.text.tokenizer, "get_vocab", None)
    if known is None:
        return [engine.text.token(token) for token in range(engine.config.vocab_size)]
    names: dict[str, int] = known()
    return sorted(names, key=names.__getitem__)
