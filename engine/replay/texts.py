"""Texts of your own as a task: strings, token ids, chats, branches and tables become token paths with labels."""

from collections.abc import Iterable, Mapping, Set
from typing import Any

from replaylens.engine.errors import BadRequest, BadTexts, NoChatTemplate, NotCertified
from replaylens.engine.model.text import Chat, is_chat
from replaylens.engine.replay.labelling import NamedLabels, label_columns, same_numbers, token_labels
from replaylens.engine.replay.rollouts import texts_of_rollouts
from replaylens.engine.replay.tables import TABLE, read_columns
from replaylens.engine.request.values import items, shown
from replaylens.engine.resampling.rollouts import Rollouts
from replaylens.engine.serving.branch import Branch
from replaylens.engine.serving.core import Core
from replaylens.tasks.given import NOT_LABELS, GivenText
from replaylens.tasks.labels import offsets_of, path_offsets
from replaylens.tasks.reading import Offset
from replaylens.tasks.texts import GivenTexts
from replaylens.tasks.tokenizer import WordTokenizer

SUBJECTS = "a list of strings, of token lists, of chats (lists of {'role', 'content'}) or of branches"
"""what counts as texts, for error messages"""


def texts_of(engine: Core, given: Any, text: str | None = None, labels: NamedLabels = None) -> GivenTexts:
    """The task of some texts.

    given   strings, token ids, chats and branches, in one list; or a table; or rollouts, of one chain or a list of
            several, which have labels of their own
    text    of a table: the column of the texts
    labels  of a table: the columns of the labels; of a list: label -> values, one for each text. A value is that of the
            text, or a list with one value per token, or a list of character spans {"start", "end", "value"}
    """
    if isinstance(given, Rollouts) or (isinstance(given, list | tuple) and any(isinstance(each, Rollouts) for each in given)):
        if not isinstance(given, Rollouts) and not all(isinstance(each, Rollouts) for each in given):
            raise BadTexts("Rollouts and other texts were given in one list. Give them in separate calls.")
        if text is not None or labels is not None:
            raise BadTexts("Rollouts have labels of their own: outcome, fork, rollout and place. Leave out text= and labels=.")
        if engine.guesses():
            raise BadRequest("Rollouts of a model that thinks cannot be replayed: their thoughts are part of their path.")
        return texts_of_rollouts(engine.text, given)
    if text is not None:
        names = [labels] if isinstance(labels, str) else [] if labels is None else labels
        if isinstance(names, Mapping):
            raise BadTexts("labels is a mapping, but the texts are a table. Give the names of the label columns.")
        names = [str(name) for name in items("labels", names, "names of label columns", BadTexts)]
        columns = read_columns(given, [text, *names])
        subjects, labelled = columns[text], {name: columns[name] for name in names}
    else:
        if not is_list(given):
            raise BadTexts(
                f"Invalid texts={shown(given)}. Give {SUBJECTS}; or {TABLE}, with text= for the column of the texts."
            )
        subjects = items("texts", given, SUBJECTS, BadTexts)
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

    def __init__(self, engine: Core, number: int) -> None:
        self.engine, self.number = engine, number

    def make(self, subject: Any, labels: Mapping[str, Any]) -> GivenText:
        if isinstance(subject, Branch):
            return self._branch(subject, labels)
        if isinstance(subject, str):
            return self._string(subject, labels)
        if is_chat(subject):
            return self._chat(subject, labels)
        if subject is None or isinstance(subject, int | float | Mapping):
            raise BadTexts(f"Text {self.number} is {shown(subject)}. Give {SUBJECTS}.")
        tokens = self._tokens(subject)
        return self._labelled(GivenText(tuple(tokens), len(tokens), self.engine.text.decode(tokens)), labels)

    def _tokens(self, subject: Any) -> list[int]:
        try:
            return self.engine.tokens_of(subject)
        except BadRequest as error:
            kind = NoChatTemplate if isinstance(error, NoChatTemplate) else BadTexts
            raise kind(f"Text {self.number}: {error}") from error

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
            raise BadRequest("Branches of a model that thinks cannot be replayed: their thoughts are part of their path.")
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
        return offsets + [(0, 0)] * (len(tokens) - len(offsets))  # a model that thinks pads its prompts


def is_list(given: Any) -> bool:
    """Whether this is an ordered iterable, and neither a text nor a table."""
    several = isinstance(given, Iterable) and not isinstance(given, str | bytes | Set | Mapping)
    several = several and getattr(given, "ndim", 1) > 0  # an array of no dimension says that it is iterable
    return several and not hasattr(given, "columns") and not hasattr(given, "column_names")
