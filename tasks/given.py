"""`GivenText`: a text that somebody gave, as the tokens that a model reads, with labels of the text or of its tokens."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from replaylens.tasks.errors import BadKnob, MixedLabel
from replaylens.tasks.reading import NEXT_ACTION, RESERVED, SHUFFLED, Label

NOT_LABELS = (*RESERVED, SHUFFLED, NEXT_ACTION, "")
"""what no label of given texts may be called"""
TokenSpan = tuple[int, int, Label]
"""the tokens [start, end) and the value of a label there"""
_FIELDS = {"tokens": list, "prompt": int, "text": str, "completion": str, "labels": dict, "spans": dict, "edits": list}


@dataclass(frozen=True, eq=False)
class GivenText:
    """A token path. Its first `num_prompt` tokens are the prompt; those after it were generated or forced by its maker."""

    tokens: tuple[int, ...]
    num_prompt: int
    text: str
    """of the prompt, as given"""
    completion: str = ""
    """the text after the prompt"""
    labels: Mapping[str, Label] = field(default_factory=dict)
    """labels of the whole text: every token has them, also those that a model generates after it"""
    spans: Mapping[str, tuple[TokenSpan, ...]] = field(default_factory=dict)
    """labels of some tokens, in order and without overlaps"""
    edits: tuple[dict[str, Any], ...] = ()
    """interventions on this text alone, as the engine writes them"""

    def to_json(self) -> dict[str, Any]:
        """Plain values; what is empty is left out."""
        spans = {name: [list(span) for span in own] for name, own in self.spans.items()}
        rest: dict[str, Any] = {
            "completion": self.completion,
            "labels": dict(self.labels),
            "spans": spans,
            "edits": list(self.edits),
        }
        if self.num_prompt < len(self.tokens):
            rest["prompt"] = self.num_prompt
        return {"tokens": list(self.tokens), "text": self.text} | {name: value for name, value in rest.items() if value}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> "GivenText":
        """Inverse of `to_json`, for values that `as_texts` has checked."""
        spans = {name: tuple((a, b, value) for a, b, value in own) for name, own in raw.get("spans", {}).items()}
        tokens = tuple(raw["tokens"])
        rest = (raw.get("completion", ""), raw.get("labels", {}), spans, tuple(raw.get("edits", ())))
        return cls(tokens, raw.get("prompt", len(tokens)), raw["text"], *rest)

    def labels_at(self, positions: Sequence[int], names: Iterable[str]) -> dict[str, list[Label]]:
        """The values of labels at some positions of a path that begins with these tokens; None where there is none."""
        return {name: self._values(name, positions) for name in names}

    def _values(self, name: str, positions: Sequence[int]) -> list[Label]:
        if name not in self.spans:
            return [self.labels.get(name)] * len(positions)
        dense = self._dense[name]
        return [dense[position] if position < len(dense) else None for position in positions]

    @cached_property
    def _dense(self) -> dict[str, list[Label]]:
        """The value of each label of tokens at every token."""
        found: dict[str, list[Label]] = {}
        for name, spans in self.spans.items():
            found[name] = [None] * len(self.tokens)
            for start, end, value in spans:
                found[name][start:end] = [value] * (end - start)
        return found


def as_texts(knob: str, value: Any) -> tuple[dict[str, Any], ...]:
    """The records of given texts, checked; BadKnob names the first that is wrong. Takes what `GivenText.to_json` writes."""
    if not isinstance(value, list | tuple) or not value:
        raise BadKnob(knob, value, "Give at least one text: engine.texts(...) makes this task, and --texts a dump of it.")
    for number, raw in enumerate(value):
        if problem := _problem(raw):
            raise BadKnob(f"{knob}[{number}]", str(raw)[:60], problem)
    for name, kinds in _kinds(value).items():
        if len(kinds) > 1:
            raise MixedLabel(name, sorted(kind.__name__ for kind in kinds))
    return tuple(value)


def _problem(raw: Any) -> str | None:
    """What is wrong with a record, or None."""
    if not isinstance(raw, dict) or not {"tokens", "text"} <= raw.keys() <= _FIELDS.keys():
        return f"Give a record with tokens and text, and nothing but {', '.join(_FIELDS)}."
    for name, kind in _FIELDS.items():
        if name in raw and type(raw[name]) is not kind:
            return f"Its {name!r} is not of the type {kind.__name__}."
    tokens = raw["tokens"]
    if not tokens or any(type(token) is not int or token < 0 for token in tokens):
        return "Its tokens are not a list of whole numbers from 0 on, with at least one."
    if not 1 <= raw.get("prompt", 1) <= len(tokens):
        return f"Its prompt has {raw['prompt']} of {len(tokens)} tokens."
    return _label_problem(raw, len(tokens))


def _label_problem(raw: dict[str, Any], length: int) -> str | None:
    labels, spans = raw.get("labels", {}), raw.get("spans", {})
    for name in (*labels, *spans):
        if name in NOT_LABELS:
            return f"The label {name!r} has the name of an index column. Rename it."
    if both := labels.keys() & spans.keys():
        return f"The label {min(both)!r} is given for the text and for its tokens. Give it once."
    for name, value in labels.items():
        if not _is_label(value) and value is not None:
            return f"The label {name!r} is {value!r:.40}. Use text, numbers of 64 bits, True, False or None."
    for name, own in spans.items():
        last, listed = 0, [*own] if isinstance(own, list) else [own]
        for span in listed:
            fits = isinstance(span, list | tuple) and len(span) == 3 and type(span[0]) is int and type(span[1]) is int
            if not fits or not last <= span[0] < span[1] <= length or not _is_label(span[2]):
                return f"The label {name!r} has the span {span!r:.40}. Give [start, end, value], in order, of {length} tokens."
            last = span[1]
    return None


def _is_label(value: Any) -> bool:
    """Whether a value can be stored: text, a finite number of 64 bits, True or False."""
    return isinstance(value, str | bool) or (isinstance(value, int | float) and -(2**63) <= value < 2**63)


def _kinds(records: Sequence[dict[str, Any]]) -> dict[str, set[type]]:
    """The types of each label's values, over all texts."""
    kinds: dict[str, set[type]] = {}
    for raw in records:
        for name, value in raw.get("labels", {}).items():
            kinds.setdefault(name, set()).update({type(value)} - {type(None)})
        for name, own in raw.get("spans", {}).items():
            kinds.setdefault(name, set()).update(type(span[2]) for span in own)
    return kinds


def label_names_of(records: Iterable[GivenText]) -> tuple[str, ...]:
    """Every label of the texts, in the order in which they first occur."""
    return tuple(dict.fromkeys(name for text in records for name in (*text.labels, *text.spans)))
