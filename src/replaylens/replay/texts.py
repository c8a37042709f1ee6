"""Texts of your own as a task: strings, token ids, chats, branches and tables become token paths with labels."""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadRequest, BadTexts, NotCertified, no_such
from replaylens.engine.model.text import Chat, Text, is_chat
from replaylens.engine.request.values import as_list, short_repr
from replaylens.engine.serving.branch import Branch
from replaylens.tasks.reading import NOT_LABELS, GivenText, Label, Offset, TokenSpan
from replaylens.tasks.task import Example, Task
from replaylens.tasks.texts import GivenTexts
from replaylens.tasks.tokenizer import WordTokenizer, offsets_of, path_offsets

if TYPE_CHECKING:
    from replaylens.rollouts.rollouts import Rollout, Rollouts

# ---- labelling -------------------------------------------------------------------------------------------------------
# Labels as users give them, per text, per token or per character span, turned into labels of texts and of tokens.

NamedLabels = Mapping[str, Sequence[Any]] | Sequence[str] | str | None
"""label -> one value for each text; of a table, the names of the label columns"""
VALUES = "one value, a list with one value per token, or a list of spans {'start', 'end', 'value'} in characters"


def label_columns(labels: NamedLabels, count: int) -> dict[str, list[Any]]:
    """The labels of a list of texts, each with one value for each of them. BadTexts if some are missing."""
    if labels is None:
        return {}
    if not isinstance(labels, Mapping):
        raise BadTexts(f"Invalid labels={short_repr(labels)}. Give a dict from label to values, one for each text.")
    found = {}
    for name in labels:
        values = as_list(f"labels[{name!r}]", labels[name], "a list with one value for each text", BadTexts)
        if len(values) != count:
            raise BadTexts(f"Label {str(name)!r} has {len(values)} values for {count} texts. Give one for each text.")
        found[str(name)] = values
    return found


def same_numbers(values: list[Any]) -> list[Any]:
    """Values of one label with whole numbers and fractions as one type. A column of whole numbers that became fractions
    because some are missing has whole numbers again."""
    found = [_number(value) for value in values]
    known = [value for value in found if value is not None]
    if len(known) + sum(_missing(value) for value in values) < len(values) or not any(isinstance(v, float) for v in known):
        return values
    whole = len(known) < len(values) and all(value == int(value) for value in known if math.isfinite(value))
    return [None if value is None else int(value) if whole and math.isfinite(value) else float(value) for value in found]


def _number(value: Any) -> int | float | None:
    value = value.item() if isinstance(value, np.generic) else value
    return value if isinstance(value, int | float) and not isinstance(value, bool) and value == value else None


def _missing(value: Any) -> bool:
    return value is None or type(value).__name__ in ("NAType", "NaTType") or (isinstance(value, float) and math.isnan(value))


def token_labels(
    labels: Mapping[str, Any], length: int, offsets: Callable[[], list[Offset]], where: str
) -> tuple[dict[str, Label], dict[str, tuple[TokenSpan, ...]]]:
    """(labels of the text, labels of its tokens), for a text of `length` tokens. `where` names the text in errors."""
    whole: dict[str, Label] = {}
    spans: dict[str, tuple[TokenSpan, ...]] = {}
    for name, value in labels.items():
        here = f"{where}, label {name!r}"
        if isinstance(value, np.ndarray | Tensor) and value.ndim:
            value = value.tolist()
        if not isinstance(value, list | tuple):
            whole[name] = _plain(value, here)
        elif all(isinstance(each, Mapping) for each in value):
            spans[name] = _runs(_at_tokens(value, offsets(), here) if value else [])
        elif len(value) == length:
            spans[name] = _runs([_plain(each, here) for each in value])
        else:
            raise BadTexts(f"{here} has {len(value)} values for {length} tokens. Give {VALUES}.")
    return whole, spans


def _plain(value: Any, here: str) -> Label:
    """A label as text, a number, True, False or None. NaN and pandas' NA are missing values."""
    value = value.item() if isinstance(value, np.generic | Tensor) and np.ndim(value) == 0 else value
    if _missing(value):
        return None
    if not isinstance(value, str | int | float) or (isinstance(value, float) and math.isinf(value)):
        raise BadTexts(f"{here} is {short_repr(value)}. Give {VALUES}; a value is text, a finite number, True, False or None.")
    return value


def _at_tokens(spans: Sequence[Mapping[str, Any]], offsets: Sequence[Offset], here: str) -> list[Label]:
    """The value of each token. A token takes the span of its last character, else the last span that it overlaps."""
    values: list[Label] = [None] * len(offsets)
    ends = [False] * len(offsets)
    """whether the value is that of the token's last character"""
    for span in spans:
        start, end, value = _span(span, here)
        touched = [i for i, (a, b) in enumerate(offsets) if a < end and start < b]
        if not touched:
            raise BadTexts(f"{here}: the characters [{start}, {end}) are in no token. Give a span within the text.")
        for i in touched:
            ending = offsets[i][1] <= end
            if ending and ends[i]:
                raise BadTexts(
                    f"{here}: two spans cover the token at characters {list(offsets[i])}. Give spans without overlaps."
                )
            if ending or not ends[i]:
                values[i], ends[i] = value, ending
    return values


def _span(raw: Mapping[str, Any], here: str) -> tuple[int, int, Label]:
    if set(raw) != {"start", "end", "value"}:
        raise BadTexts(f"{here} has the span {short_repr(dict(raw))}. Give {{'start', 'end', 'value'}}, in characters.")
    start, end, value = raw["start"], raw["end"], _plain(raw["value"], here)
    if type(start) is not int or type(end) is not int or not 0 <= start < end or value is None:
        raise BadTexts(f"{here} has the span {short_repr(dict(raw))}. Give whole numbers with 0 <= start < end, and a value.")
    return start, end, value


def _runs(values: Sequence[Label]) -> tuple[TokenSpan, ...]:
    """Runs of equal values; tokens without a value are left out."""
    runs: list[TokenSpan] = []
    for i, value in enumerate(values):
        if value is None:
            continue
        if runs and runs[-1][1] == i and runs[-1][2] == value and type(runs[-1][2]) is type(value):
            runs[-1] = (runs[-1][0], i + 1, value)
        else:
            runs.append((i, i + 1, value))
    return tuple(runs)


# ---- tables ----------------------------------------------------------------------------------------------------------
# Tables of texts: data frames, JSON lines, Hugging Face datasets and mappings of columns, read by the names of columns.

Columns = dict[str, list[Any]]
TABLE = "a pandas DataFrame, the path of a JSONL file, a Hugging Face dataset, a mapping of columns, or a list of records"
"""what counts as a table, for error messages"""


def read_columns(table: Any, names: Sequence[str]) -> Columns:
    """The named columns of a table, each as a list. BadTexts names what is missing or malformed."""
    if isinstance(table, str | Path):
        return _of_records(_json_lines(Path(table)), names, str(table))
    if _is_split_dataset(table):
        raise BadTexts(f"The dataset has the splits {', '.join(map(str, table))}. Give one of them.")
    if (known := _column_names(table)) is not None:
        for name in names:
            if name not in known:
                raise BadTexts(no_such("column", name, known))
        return {name: _listed(table[name]) for name in names}
    if isinstance(table, Iterable) and not isinstance(table, str | bytes):  # also a dataset that is streamed
        return _of_records(list(table), names, "The table")
    raise BadTexts(f"Invalid texts={short_repr(table)}. Give {TABLE}.")


def _is_split_dataset(table: Any) -> bool:
    """Whether this is a dictionary of datasets by split, as `datasets.load_dataset` returns."""
    return isinstance(table, Mapping) and bool(table) and all(hasattr(each, "column_names") for each in table.values())


def _column_names(table: Any) -> list[str] | None:
    """The columns of a data frame, a dataset or a mapping; None if it has none to ask for."""
    if isinstance(table, Mapping):
        return [str(name) for name in table]
    found = getattr(table, "column_names", None)  # a dataset
    if found is None or not hasattr(table, "__len__"):
        found = getattr(table, "columns", None)  # a data frame
    return [str(name) for name in found] if found is not None and hasattr(table, "__getitem__") else None


def _listed(column: Any) -> list[Any]:
    return column.to_list() if hasattr(column, "to_list") else list(column)


def _of_records(records: Sequence[Any], names: Sequence[str], where: str) -> Columns:
    """The columns of a list of records. A label may be missing in some of them, but not in all."""
    for number, record in enumerate(records):
        if not isinstance(record, Mapping):
            raise BadTexts(
                f"{where}: record {number} is {short_repr(record)}. Give records with named fields, such as {{'text': ...}}."
            )
    known = list(dict.fromkeys(name for record in records for name in record))
    for name in names:
        if name not in known:
            raise BadTexts(f"{where}: {no_such('column', name, known)}")
    return {name: [record.get(name) for record in records] for name in names}


def _json_lines(path: Path) -> list[Any]:
    """The records of a JSONL file; empty lines are skipped."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        raise BadTexts(f"Cannot read {path}: {error}. Give the path of a JSONL file, one JSON object per line.") from None
    records = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                records.append(json.loads(line))
            except ValueError as error:
                raise BadTexts(f"{path}, line {number} is not JSON: {error}. Give one JSON object per line.") from None
    if not records:
        raise BadTexts(f"{path} has no lines. Give one JSON object per line.")
    return records


# ---- rollouts --------------------------------------------------------------------------------------------------------
# Rollouts as texts: their paths with outcome, fork position, number and kept places as labels.

OUTCOME, FORK, NUMBER, PLACE, CHAIN = "outcome", "fork", "rollout", "place", "chain"
"""labels: the outcome, the fork position, the number of the rollout there, at the tokens whose rows are kept the place, and of
rollouts of several chains the number of the chain"""


def texts_of_rollouts(text: Text, given: "Rollouts | Sequence[Rollouts]") -> GivenTexts:
    """The task of the rollouts' paths. A dump of it with positions="label:place" has just the kept rows, and verifies from its
    folder, like a dump of any texts."""
    from replaylens.rollouts.rollouts import Rollouts

    chains = [given] if isinstance(given, Rollouts) else list(given)
    if empty := [number for number, rollouts in enumerate(chains) if not len(rollouts)]:
        raise BadTexts("There are no rollouts." if len(chains) == 1 else f"Chain {empty[0]} has no rollouts. Leave it out.")
    made = list[GivenText]()
    for number, rollouts in enumerate(chains):
        made += _texts(text, rollouts, {} if isinstance(given, Rollouts) else {CHAIN: number})
    return GivenTexts.of(made)


def _texts(text: Text, rollouts: "Rollouts", more: dict[str, int]) -> list[GivenText]:
    """The paths of one chain's rollouts, with these labels besides their own."""
    plan, made = rollouts.plan, []
    for rollout in rollouts:  # of which some positions may have fewer than others
        place = plan.positions.index(rollout.position)
        prefix = plan.prefix(place)
        tokens = (*prefix, *rollout.tokens)
        prompt = min(plan.num_prompt, len(prefix))
        rest = text.decode(tokens[prompt:]) if tokens[prompt:] else ""
        labels = {OUTCOME: rollout.outcome, FORK: rollout.position, NUMBER: rollout.number, **more}
        spans = {PLACE: _spans(rollout)} if rollout.rows else {}
        edits = plan.edits[place] if plan.edits else ()
        made.append(GivenText(tokens, prompt, text.decode(tokens[:prompt]), rest, labels, spans, edits))
    return made


def _spans(rollout: "Rollout") -> tuple[TokenSpan, ...]:
    """One span for each token with a kept row. A token that is several places has their names, joined by +."""
    names: dict[int, list[str]] = {}
    for place, at in rollout.rows:
        names.setdefault(at, []).append(place)
    return tuple((at, at + 1, "+".join(names[at])) for at in sorted(names))


# ---- texts -----------------------------------------------------------------------------------------------------------

SUBJECTS = "a list of strings, of token lists, of chats (lists of {'role', 'content'}) or of branches"
"""what counts as texts, for error messages"""


def examples_of(engine: Engine, given: Any, text: str | None, labels: NamedLabels) -> list[Example]:
    """Examples as they are; texts as those of their task."""
    from replaylens.rollouts.rollouts import Rollouts

    if isinstance(given, GivenTexts):
        given = given.examples()
    elif isinstance(given, Task) or (isinstance(given, type) and issubclass(given, Task)):
        how = "task().examples(100)" if isinstance(given, type) else "task.examples(100)"
        raise BadTexts(f"{short_repr(given)} is a task. Give examples of it: engine.replay({how}).")
    elif text is None and is_list(given) and not isinstance(given, Rollouts):
        given = list(given)  # an iterator can be read only once
    named = labels is not None or text is not None
    if isinstance(given, list) and (any(isinstance(each, Example) for each in given) if given else not named):
        if named:
            raise BadTexts("text= and labels= describe texts, but examples of a task were given. Leave them out.")
        return given
    return texts_of(engine, given, text, labels).examples()


def texts_of(engine: Engine, given: Any, text: str | None = None, labels: NamedLabels = None) -> GivenTexts:
    """The task of some texts.

    given   strings, token ids, chats and branches, in one list; or a table; or rollouts, of one chain or a list of
            several, which have labels of their own
    text    of a table: the column of the texts
    labels  of a table: the columns of the labels; of a list: label -> values, one for each text. A value is that of the
            text, or a list with one value per token, or a list of character spans {"start", "end", "value"}
    """
    from replaylens.rollouts.rollouts import Rollouts

    if isinstance(given, Rollouts) or (isinstance(given, list | tuple) and any(isinstance(each, Rollouts) for each in given)):
        if not isinstance(given, Rollouts) and not all(isinstance(each, Rollouts) for each in given):
            raise BadTexts("Rollouts and other texts were given in one list. Give them in separate calls.")
        if text is not None or labels is not None:
            raise BadTexts("Rollouts have labels of their own: outcome, fork, rollout and place. Leave out text= and labels=.")
        if engine.guesses():
            raise BadRequest("Rollouts of a Thinking-States model cannot be replayed: their thoughts are part of their path.")
        return texts_of_rollouts(engine.text, given)
    if text is not None:
        names = [labels] if isinstance(labels, str) else [] if labels is None else labels
        if isinstance(names, Mapping):
            raise BadTexts("labels is a mapping, but the texts are a table. Give the names of the label columns.")
        names = [str(name) for name in as_list("labels", names, "names of label columns", BadTexts)]
        columns = read_columns(given, [text, *names])
        subjects, labelled = columns[text], {name: columns[name] for name in names}
    else:
        if not is_list(given):
            raise BadTexts(
                f"Invalid texts={short_repr(given)}. Give {SUBJECTS}; or {TABLE}, with text= for the column of the texts."
            )
        subjects = as_list("texts", given, SUBJECTS, BadTexts)
        labelled = label_columns(labels, len(subjects))
    if not subjects:
        raise BadTexts(f"No texts were given. Give {SUBJECTS}.")
    if taken := [name for name in labelled if name in NOT_LABELS]:
        names = ", ".join(filter(None, NOT_LABELS))
        raise BadTexts(f"Label {taken[0]!r} has the name of an index column. Rename it. These names are taken: {names}.")
    labelled = {name: same_numbers(values) for name, values in labelled.items()}
    rows = [{name: values[i] for name, values in labelled.items()} for i in range(len(subjects))]
    return GivenTexts.of(
        _Maker(engine, number).make(each, own) for number, (each, own) in enumerate(zip(subjects, rows, strict=True))
    )


class _Maker:
    """Makes one text. Every error names its number."""

    def __init__(self, engine: Engine, number: int) -> None:
        self.engine, self.number = engine, number

    def make(self, subject: Any, labels: Mapping[str, Any]) -> GivenText:
        if isinstance(subject, Branch):
            return self._branch(subject, labels)
        if isinstance(subject, str):
            return self._string(subject, labels)
        if is_chat(subject):
            return self._chat(subject, labels)
        if subject is None or isinstance(subject, int | float | Mapping):
            raise BadTexts(f"Text {self.number} is {short_repr(subject)}. Give {SUBJECTS}.")
        tokens = self._tokens(subject)
        return self._labelled(GivenText(tuple(tokens), len(tokens), self.engine.text.decode(tokens)), labels)

    def _tokens(self, subject: Any) -> list[int]:
        try:
            return self.engine.tokens_of(subject)
        except BadRequest as error:
            raise BadTexts(f"Text {self.number}: {error}") from error

    def _string(self, text: str, labels: Mapping[str, Any]) -> GivenText:
        tokens = self._tokens(text)
        return self._labelled(GivenText(tuple(tokens), len(tokens), text), labels, special=True)

    def _chat(self, messages: Chat, labels: Mapping[str, Any]) -> GivenText:
        tokens = self._tokens(messages)
        return self._labelled(GivenText(tuple(tokens), len(tokens), self.engine.text.written(messages)), labels, special=False)

    def _branch(self, branch: Branch, labels: Mapping[str, Any]) -> GivenText:
        """The path and the edits of a branch. Its rows follow from these, so that they need not be captured."""
        self.engine._own(branch)
        if self.engine.guesses():
            raise BadRequest("Branches of a Thinking-States model cannot be replayed: their thoughts are part of their path.")
        if not branch.certified:
            raise NotCertified(
                f"Text {self.number} is branch {branch.id}, which the fast path or hook functions computed, so its bits cannot "
                f"be reproduced. Generate it with deterministic=True, and with edits instead of hooks."
            )
        tokens, prompt = branch.tokens, branch.root_length
        decode = self.engine.text.decode
        made = GivenText(
            tuple(tokens),
            prompt,
            decode(tokens[:prompt]),
            decode(tokens[prompt:]) if tokens[prompt:] else "",
            edits=tuple(edit.to_json() for edit in branch.lane.edits),
        )
        return self._labelled(made, labels)

    def _labelled(self, made: GivenText, labels: Mapping[str, Any], special: bool | None = None) -> GivenText:
        """The text with its labels. `special`: how its text was encoded; None: its tokens were given."""
        found, spans = token_labels(
            labels, len(made.tokens), lambda: self._offsets(made, special), f"Text {self.number} ({made.text[:40]!r})"
        )
        return GivenText(made.tokens, made.num_prompt, made.text, made.completion, found, spans, made.edits)

    def _offsets(self, made: GivenText, special: bool | None) -> list[Offset]:
        """Characters [start, end) of each token in the given text; of given tokens, in their decoded text."""
        tokenizer, tokens = self.engine.text.tokenizer, list(made.tokens)
        if tokenizer is None:
            raise BadTexts(f"Text {self.number}: without a tokenizer, tokens have no characters. Give one value per token.")
        if special is None:
            return path_offsets(tokenizer, tokens)[1]
        if isinstance(tokenizer, WordTokenizer) or getattr(tokenizer, "is_fast", False):
            offsets = offsets_of(tokenizer, made.text, add_special_tokens=special)
        else:
            text, offsets = path_offsets(tokenizer, tokens)
            if text != made.text:
                raise BadTexts(
                    f"Text {self.number}: {type(tokenizer).__name__} gives no offsets, and its tokens read {text[:40]!r}. Give "
                    f"one value per token instead of character spans, or use a fast tokenizer."
                )
        return offsets + [(0, 0)] * (len(tokens) - len(offsets))  # a Thinking-States model pads its prompts


def is_list(given: Any) -> bool:
    """Whether this is an ordered iterable, and neither a text nor a table."""
    several = isinstance(given, Iterable) and not isinstance(given, str | bytes | Set | Mapping)
    several = several and getattr(given, "ndim", 1) > 0  # an array of no dimension says that it is iterable
    return several and not hasattr(given, "columns") and not hasattr(given, "column_names")
