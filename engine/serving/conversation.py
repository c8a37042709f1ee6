"""`Conversation`: a branch that grows by turns. Turns and tool results are appended, forked, and replayed with changes.

A conversation is a token path like any other: it only ever grows at its end. So what the chat template writes for the first
turns must be a prefix of what it writes for more of them. Templates that break this, such as those that drop earlier
reasoning, are named by BadTexts. The tokens of a generated turn stay those that the model chose, whatever the tokenizer
would make of their text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

import torch
from torch import Tensor

from replaylens.engine.errors import BadRequest, BadTexts
from replaylens.engine.request.edits import Edit
from replaylens.engine.request.sampling import Sampling
from replaylens.engine.request.values import as_instance, as_int, as_list, hides, named_options, short_repr
from replaylens.engine.serving.branch import Branch
from replaylens.engine.serving.request import SAMPLING, GenerateKeywords, NotCopyable
from replaylens.engine.serving.verbs import PromptKeywords

if TYPE_CHECKING:
    from replaylens.engine.engine import Engine

Message = Mapping[str, Any]
"""{"role": ..., "content": ...}, with more keys if the template reads them, such as tool_calls or name"""
_MESSAGE = "a message {'role': ..., 'content': ...}"
ANSWER = "assistant"


@dataclass(frozen=True)
class ChatTurn:
    """One message, and its tokens [start, stop) on the path, with what the template writes around its content."""

    message: Message
    start: int
    stop: int
    generated: tuple[tuple[int, Sampling, GenerateKeywords], ...] = ()
    """of a turn that the model wrote: the requests that made it; empty: it was given"""
    ended: bool = True
    """False: the model's turn was cut by its length, and can go on"""

    @property
    def role(self) -> str:
        return str(self.message["role"])

    @property
    def content(self) -> str:
        return str(self.message.get("content") or "")


@hides("tools")
class Conversation(NotCopyable):
    """Turns on one branch of an engine.

    engine    whose tokenizer has a chat template
    messages  the first turns, at least one
    tools     descriptions of tools, as JSON schemas or functions, for templates that write them
    options   of `Engine.prompt`, such as sites

    `branch` is the path itself, to be read, forked and resampled. Growing it and cutting it back is done here: once the path is
    not what the turns say, calls that need them raise BadRequest. A call that fails changes no turn.

    Templates do not escape: special tokens in a message's text, such as "<|im_end|>", are taken for what they mean, and so can
    end the turn and begin others. Clean a text that you do not trust.
    """

    _instead = "Use fork(), which copies nothing."

    @named_options
    def __init__(
        self,
        engine: Engine,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] | None = None,
        **options: Unpack[PromptKeywords],
    ) -> None:
        self.engine, self.tools = engine, tools
        given = [_message(each) for each in as_list("messages", messages, f"a list of messages, each {_MESSAGE}")]
        if not given:
            raise BadRequest(f"A conversation needs at least one message. Give {_MESSAGE}.")
        self._text, tokens, spans = "", list[int](), list[ChatTurn]()
        for number, message in enumerate(given):
            start = len(tokens)
            if (text := self._written(given[: number + 1], first=number + 1 < len(given))) is not None:
                tokens += self._more(text, [*spans, ChatTurn(message, start, start)])
                self._text = text
            spans.append(ChatTurn(message, start, len(tokens)))
        self.branch: Branch = engine.prompt(tokens, **options)
        self._path, self._said = self.branch.tokens, self.branch.length
        self.turns = tuple(spans)
        """in order; a message that the template writes only together with the next one has no tokens of its own"""

    def __repr__(self) -> str:
        return f"Conversation({len(self.turns)} turns, {self.branch.length} tokens, last {self.turns[-1].role})"

    @property
    def messages(self) -> list[Message]:
        return [turn.message for turn in self.turns]

    @property
    def tokens(self) -> list[int]:
        """The whole path. A copy."""
        return self.branch.tokens

    # ---- growing ------------------------------------------------------------------------------------------------

    def append(self, *messages: Message | str, role: str = "user") -> Self:
        """Append given turns: what a user says, or a tool returns. Returns self.

        messages  each a message, or the content of one with this `role`
        """
        given = [_message({"role": role, "content": each} if isinstance(each, str) else each) for each in messages]
        if not given:
            raise BadRequest(f"No message to append. Give {_MESSAGE}, or its content with role=.")
        self._require()
        ids, added = list[int](), list[ChatTurn]()
        with self._whole():
            more, closing = self._closing()
            turns = [*self.turns[:-1], replace(self.turns[-1], stop=self._end + len(closing), ended=True)]
            self._text += more
            for message in given:
                start = self._end + len(closing) + len(ids)
                whole = self._written([*(turn.message for turn in (*turns, *added)), message])
                assert whole is not None
                ids += self._more(whole, [*turns, *added, ChatTurn(message, start, start)])
                added.append(ChatTurn(message, start, self._end + len(closing) + len(ids)))
                self._text = whole
            self._grow([*closing, *ids])
            self.turns = (*turns, *added)
        return self

    @named_options
    def generate(self, n: int, *, sampling: Sampling | None = None, **options: Unpack[GenerateKeywords]) -> ChatTurn:
        """Let the model write the next turn, of up to `n` tokens, or continue its last one if that was cut by its length.
        Returns the turn. Options as in `Engine.generate`, but for `final`: a turn's last row is always computed."""
        if not options.get("final", True):
            raise BadRequest("A conversation computes the last row of every turn. Leave out final=False.")
        sampling = as_instance("sampling", Sampling() if sampling is None else sampling, Sampling, SAMPLING)
        self._require()
        last = self.turns[-1]
        if last.role == ANSWER and last.ended:
            raise BadRequest("The last turn is the assistant's and has ended. Append a message first, or fork before the turn.")
        with self._whole():
            if last.ended:
                begun = self._written(self.messages, add_generation_prompt=True)
                assert begun is not None
                last = ChatTurn({"role": ANSWER, "content": ""}, self._end, self._end, ended=False)
                self._grow(self._more(begun, [*self.turns, last]))
                self._text, self._said, self.turns = begun, self._end, (*self.turns, last)
            self.branch.generate(n, sampling=sampling, **options | {"final": True})
            self._path = self.branch.tokens
            said = self.engine.text.decode(self._path[self._said : self._end])  # whole: requests may cut a character
            self._text = self._text[: len(self._text) - len(last.content)] + said
            requests, ended = (*last.generated, (n, sampling, options)), self.branch.finish_reason is not None
            made = ChatTurn({**last.message, "content": said}, last.start, self._end, requests, ended)
            self.turns = (*self.turns[:-1], made)
        return made

    # ---- branching ----------------------------------------------------------------------------------------------

    def fork(self, at: int | None = None, *, edits: Sequence[Edit] = ()) -> Conversation:
        """A new conversation with the first `at` turns, or all of them. Pages are shared; nothing is copied.

        at     negative: without so many turns at the end. With a number, the path may have been changed by hand after these
               turns; the fork is without such changes
        edits  as in `Branch.fork`; their positions may be those of turns
        """
        if at is None:
            self._require()
        at = len(self.turns) if at is None else as_int("at", at, -len(self.turns) + 1, len(self.turns))
        if at == 0:
            raise BadRequest("Invalid at=0: a conversation has at least one turn. Give a number of turns, or make a new one.")
        at = at + len(self.turns) if at < 0 else at
        made = object.__new__(type(self))
        made.engine, made.tools, made.turns = self.engine, self.tools, self.turns[:at]
        self._require(made.turns[-1].stop)
        (made.branch,) = self.branch.fork(at=made.turns[-1].stop, edits=edits)
        made._path, made._said, made._text = made.branch.tokens, self._said, self._text
        if at < len(self.turns):
            closed = made._written(made.messages)
            assert closed is not None
            made._text = closed
        return made

    def replay(self, turn: int, message: Message | str, *, edits: Sequence[Edit] = ()) -> Conversation:
        """The conversation with another message at a turn, such as another result of a tool.

        Turns before it are shared. Of those after it, given ones are appended again, and generated ones are generated again,
        with the requests that made them: what differs is due to the message, and to `edits`, which the new branch has.

        message  or its content, with the role and the other keys of the turn
        """
        self._require()
        turn = as_int("turn", turn, 1, len(self.turns) - 1)
        if self.turns[turn].generated:
            raise BadRequest(f"Turn {turn} was generated. Replay a given turn, or fork before it and append a message.")
        new = {**self.turns[turn].message, "content": message} if isinstance(message, str) else message
        made = self.fork(turn, edits=edits).append(new)
        for later in self.turns[turn + 1 :]:
            if not later.generated:
                made.append(later.message)
            for number, (n, sampling, options) in enumerate(later.generated):
                if not number or not made.turns[-1].ended:
                    made.generate(n, sampling=sampling, **options)
        return made

    # ---- states -------------------------------------------------------------------------------------------------

    def activations(self, site: str, turn: int) -> Tensor:
        """The captured rows of one turn: [tokens, ...]; those that `positions` left out are missing."""
        own = self.turns[as_int("turn", turn, -len(self.turns), len(self.turns) - 1)]
        self._require(own.stop)
        recorded = self.branch.activations
        places = [i for i, at in enumerate(recorded.positions()) if own.start <= at < own.stop]
        return recorded[site][places]

    def states(self, site: str) -> Tensor:
        """The captured row at the last token of each turn: [turns, ...]. BadRequest if a turn has none."""
        rows = [self.activations(site, turn) for turn in range(len(self.turns))]
        if empty := [number for number, each in enumerate(rows) if not len(each)]:
            raise BadRequest(f"Turn {empty[0]} has no captured rows: it has no tokens, or `positions` left them out.")
        return torch.stack([each[-1] for each in rows])

    def release(self) -> None:
        """Free the branch. Forks stay open."""
        self.branch.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.branch.__exit__(kind, error, trace)

    # ---- internals ----------------------------------------------------------------------------------------------

    @property
    def _end(self) -> int:
        """The length of the path without an end-of-sequence token that the model wrote: the template closes a turn itself."""
        return self.branch.length - (self.branch.finish_reason == "eos")

    def _require(self, stop: int | None = None) -> None:
        """Raise BadRequest if the first `stop` tokens of the branch, or all of them, are not those of the turns."""
        if self.branch.tokens[:stop] != self._path[:stop]:
            raise BadRequest(
                f"Branch {self.branch.id} of the conversation was changed by hand: its tokens are not those of the turns. "
                "Use fork(turn) with a number of turns that are still there, or make a new Conversation; to change a path by "
                "hand, fork talk.branch."
            )

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """If what is done within fails, turns and path are as before, but for an end-of-sequence token that the model wrote."""
        before, path, end = (self.turns, self._text, self._said), self.branch.tokens, self._end
        try:
            yield
        except BaseException:
            self.turns, self._text, self._said = before
            if len(now := self.branch.tokens) > end and now != path:
                self.branch.rollback(to=end)
            self._path = self.branch.tokens
            raise

    def _grow(self, ids: list[int]) -> None:
        """Mutates: the path goes on with given tokens."""
        if self.branch.finish_reason is not None:
            self.branch.rollback(to=self._end)
        if ids:
            self.branch.force(ids)
        self._path = self.branch.tokens

    def _closing(self) -> tuple[str, list[int]]:
        """What the template writes at the end of the last turn, if the model wrote it; else nothing."""
        if not self.turns[-1].generated:
            return "", []
        closed = self._written(self.messages)
        assert closed is not None
        return closed[len(self._text) :], self._more(closed, list(self.turns))

    def _written(self, messages: Sequence[Message], first: bool = False, **options: Any) -> str | None:
        """The template's text. `first`: more messages follow at once, so that a template may refuse to write these alone."""
        how = options | ({} if self.tools is None else {"tools": list(self.tools)})
        try:
            return self.engine.text.templated(messages, **how)
        except BadRequest:
            if first and self.engine.text.tokenizer is not None and getattr(self.engine.text.tokenizer, "chat_template", None):
                return None
            raise

    def _more(self, text: str, turns: Sequence[ChatTurn]) -> list[int]:
        """The tokens of `text` after those of the path so far; BadTexts if it does not begin with them."""
        encode = self.engine.text.encode
        if not text.startswith(self._text):
            same = next(i for i, (a, b) in enumerate(zip(self._text + "\0", text + "\0", strict=False)) if a != b)
            shown = slice(max(0, same - 20), same + 40)
            raise self._rewritten(turns, f"{self._text[shown]!r} became {text[shown]!r}")
        ids = encode(text[len(self._text) :], special=False) if len(text) > len(self._text) else []
        whole = encode(text, special=False)
        if [*(encode(self._text, special=False) if self._text else []), *ids] != whole:
            raise self._rewritten(turns, "tokens of two turns merge where they meet")
        return ids

    def _rewritten(self, turns: Sequence[ChatTurn], how: str) -> BadTexts:
        tokenizer: Any = self.engine.text.tokenizer
        template, name = str(tokenizer.chat_template), getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
        return BadTexts(
            f"The chat template of {name} (sha256 {hashlib.sha256(template.encode()).hexdigest()[:12]}) changes what it wrote "
            f"before once turn {len(turns) - 1}, {turns[-1].role}, follows: {how}. A path cannot change its past. Use a "
            "template that keeps earlier turns as they are, such as one without trimming and with all reasoning."
        )


def _message(given: Any) -> Message:
    if not isinstance(given, Mapping) or not isinstance(given.get("role"), str):
        raise BadRequest(f"Invalid message {short_repr(given)}. Give {_MESSAGE}.")
    return dict(given)
