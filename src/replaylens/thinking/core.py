"""`ThinkingEngine`: an engine for Thinking-States models. Prompts think in chunks; tokens after the prompt do not.

A thought's state is an `add` edit at the positions of the chunk that receives it. So branches, forks, rollbacks, drafters,
captures and dumps work as on any engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Self, Unpack

from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadConfig, BadEdit, BadRequest
from replaylens.engine.loop.lane import Lane
from replaylens.engine.memory.pages import PageTable
from replaylens.engine.memory.tree import HOOKED
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.model.layers import FrozenWeights
from replaylens.engine.model.sites import SiteTable
from replaylens.engine.model.text import Prompt, is_chat
from replaylens.engine.proof.fingerprint import take
from replaylens.engine.records import Fingerprint
from replaylens.engine.request.capture import CaptureSpec
from replaylens.engine.request.edits import Edit, Hook, listed, resolve_hooks
from replaylens.engine.request.placed import PlacedEdit
from replaylens.engine.request.placing import place
from replaylens.engine.request.positions import PositionSlice
from replaylens.engine.request.values import as_int, as_list, named_options, short_repr, token_ids
from replaylens.engine.serving import verbs
from replaylens.engine.serving.assembly import EngineKeywords
from replaylens.engine.serving.branch import MAX_FORKS, Branch
from replaylens.engine.serving.lock import changing, reading
from replaylens.engine.serving.variants import Variants
from replaylens.engine.serving.verbs import CaptureKeywords, PromptKeywords
from replaylens.engine.terminal import defer_interrupt
from replaylens.thinking.blocks import ThinkingBlocks, Tokens
from replaylens.thinking.model import COMPRESS_SITE, STATE_SITE, THINK_SITE, ThinkingDecoder, padded
from replaylens.thinking.prefill import Prefill, Prefiller, split
from replaylens.thinking.thoughts import FULL_SITE, LETTERS, ThinkingRecording, ThinkingSites, Thoughts, thoughts_of
from replaylens.weights.opening import GUESSES, Guess

if TYPE_CHECKING:
    from replaylens.views.pictures import Timeline, Tree
    from replaylens.views.thoughts import Thinking

THOUGHTS = "a list of thoughts for each prompt, each a list of token ids that ends in <EOS>"
Drafts = Sequence[Sequence[int]]
"""guessed thoughts of one prompt's chunks, each with its <EOS>"""


class ThinkingEngine(Engine):
    """An engine for Thinking-States models: prompts think in chunks; tokens after the prompt do not.

    guess    how a prompt's thoughts are guessed ahead: sequential, empty or drafted. Changes no committed bit
    options  those of `Engine`
    """

    plain = False

    def __init__(
        self,
        model: ThinkingDecoder,
        tokenizer: Any = None,
        *,
        guess: Guess = "empty",
        draft_model: Decoder | None = None,
        **options: Unpack[EngineKeywords],
    ) -> None:
        if not isinstance(model, ThinkingDecoder):
            raise BadConfig(f"A {type(model).__name__} does not think. Load it with Engine, or train a Thinking-States model.")
        self.thinker, self.thinking, self.guess = model, model.thinking, _known(guess)
        super().__init__(model.backbone, tokenizer, draft_model=draft_model, **options)
        self.runner.weights = FrozenWeights(model)  # those of T and C as well
        if self.text.tokenizer is not None and self.text.eos_id != self.thinking.eos_token:
            raise BadConfig(
                f"The tokenizer's <EOS> is {self.text.eos_id}, but the model ends its thoughts with {self.thinking.eos_token}. "
                "A Thinking-States model needs the tokenizer with <EOS> that it was trained with."
            )
        self.prefiller = Prefiller(self.forest, ThinkingBlocks(model, self.runner, self.lock), self.lenses)

    def _fingerprint(self) -> Fingerprint:
        """Covers T and C too, since every bit depends on them."""
        backbone = replace(self.thinker.config, revision="")
        config = sha256((backbone.to_json() + self.thinking.to_json()).encode()).hexdigest()
        return replace(take(self.model, self.thinker), config=config)

    def _site_table(self) -> SiteTable:
        return ThinkingSites(self.config)

    def _fitted(self, spec: CaptureSpec) -> CaptureSpec:
        """Sites of thoughts are kept apart; whole distributions (`full`) also of thoughts. All positions, on the host."""
        if spec.positions != PositionSlice() or spec.keep != "host":
            raise BadRequest(
                "A Thinking-States model keeps the rows of all positions, on the host. Leave out positions and keep."
            )
        thoughts = tuple(name for name in spec.sites if name in LETTERS)
        if spec.lens is not None and spec.lens.full and FULL_SITE not in thoughts:
            thoughts += (FULL_SITE,)
        rest = tuple(name for name in spec.sites if name not in LETTERS)
        return replace(spec, sites=rest or (spec.last,), thoughts=thoughts)

    @named_options
    def prompt(
        self, text: Prompt, *, guess: Guess | None = None, drafts: Drafts | None = None, **options: Unpack[PromptKeywords]
    ) -> ThinkingBranch:
        """A new root branch that thinks on its prompt. Options as in `prompts`; `drafts` are those of this prompt."""
        (branch,) = self.prompts([text], guess=guess, drafts=None if drafts is None else [drafts], **options)
        return branch

    @named_options
    def prompts(
        self,
        texts: Iterable[Prompt],
        *,
        sites: str | Sequence[str] | None = None,
        keep_rejected: bool = False,
        edits: Sequence[Edit] = (),
        hooks: Sequence[Hook] = (),
        guess: Guess | None = None,
        drafts: Sequence[Drafts] | None = None,
        **stored: Unpack[CaptureKeywords],
    ) -> Sequence[ThinkingBranch]:
        """Several root branches that think on their prompts, computed together. As `Engine.prompts`, and:

        texts          text is padded to whole chunks; token ids must be whole chunks
        keep_rejected  also keep the rows of suffixes after a wrong guess
        edits          also on thinking.state (positions: tokens), thinking.hook_out and compress.hook_out (`thought_place`)
        guess, drafts  how thoughts are guessed for these prompts; with `drafted`, the guessed thoughts of each prompt

        Only the chunks of a prompt and the first chunk after it receive states. An edit of S elsewhere has no effect.
        """
        capture = verbs.capture_of(self, sites, keep_rejected, **stored)
        return verbs.named_rows(self, self._thought_along(texts, capture, edits, hooks, guess, drafts), sites)

    def _thought_along(
        self,
        texts: Iterable[Prompt],
        capture: CaptureSpec | None,
        edits: Sequence[Edit],
        hooks: Sequence[Hook],
        guess: Guess | None,
        drafts: Sequence[Drafts] | None,
    ) -> list[ThinkingBranch]:
        guess = _known(self.guess if guess is None else guess)
        if drafts is not None and guess != "drafted":
            raise BadRequest(f"drafts were given with guess={guess!r}. Use guess='drafted'.")
        self.lenses.of(capture.lens if capture else None)  # an unknown lens fails before anything is computed
        paths = [self.tokens_of(text) for text in as_list("texts", texts, "a list of prompts; prompt(...) takes one")]
        given = [[] for _ in paths] if drafts is None else as_list("drafts", drafts, THOUGHTS)
        if len(given) != len(paths):
            raise BadRequest(f"Got drafts for {len(given)} prompts, but {len(paths)} prompts. Give one list for each.")
        resolved = self._hooks(hooks)
        placed = [split(self._placed(edits, len(path))) for path in paths]
        guessed = [self._drafts(own) for own in given]
        with self.forest.made() as lanes:
            with defer_interrupt():  # everything is checked before the first lane is made
                lanes += [self._first_chunk(path, resolved) for path in paths]
            prefills = [
                Prefill(lane, path, guess, capture, outer, inner, own)
                for lane, path, (outer, inner), own in zip(lanes, paths, placed, guessed, strict=True)
            ]
            self.prefiller.run(prefills)
        return [ThinkingBranch(self, lane) for lane in lanes]

    @changing
    def _first_chunk(self, path: list[int], hooks: tuple[Hook, ...]) -> Lane:
        """Mutates: a lane with the first chunk of a prompt."""
        lane = Lane(self.tree.branch(self.tree.plant(path[: self.thinking.chunk])), PageTable(), hooks=hooks)
        if hooks:
            self.tree.uncertify(lane.branch, len(path), HOOKED)
        self.forest.add(lane)
        return lane

    def handle(self, lane: Lane) -> ThinkingBranch:
        return ThinkingBranch(self, lane)

    def thought_place(self, site: str, chunk: int, step: int = 0) -> int:
        """The position of a chunk's thought step for edits on T or C, whose `positions` number all steps of all chunks."""
        room = {THINK_SITE: self.thinking.max_thought, COMPRESS_SITE: self.thinking.compressed}
        if not isinstance(site, str) or site not in room:
            raise BadEdit(f"{site!r} has no thought steps; {' and '.join(room)} have. At other sites, positions are tokens.")
        chunk, step = as_int("chunk", chunk, error=BadEdit), as_int("step", step, error=BadEdit)
        if chunk < 0 or not 0 <= step < room[site]:
            raise BadEdit(
                f"Invalid chunk {chunk}, step {step}. Chunks count from 0, and {site} has steps 0 to {room[site] - 1}."
            )
        return chunk * room[site] + step

    def guesses(self) -> dict[str, Any]:
        return {"thoughts": self.guess}

    # ---- internals ----------------------------------------------------------------------------------------------

    def tokens_of(self, text: Prompt) -> list[int]:
        """As `Engine.tokens_of`, but text is padded to whole chunks, and token ids must be whole chunks."""
        return self._chunks(text)

    def _chunks(self, text: Prompt, before: int = 0) -> list[int]:
        """Whole chunks of tokens; BadRequest if token ids are not."""
        c = self.thinking.chunk
        ids = verbs.ids_of(self, text, special=before == 0)
        if isinstance(text, str) or is_chat(text):
            return verbs.check_tokens(self, list(padded(ids, self.thinking)), before)
        if len(ids) % c:
            raise BadRequest(
                f"{len(ids)} tokens are not whole chunks of {c}. Pad the prompt with token {self.thinking.pad_token} "
                "(replaylens.thinking.model.padded), or give text."
            )
        return verbs.check_tokens(self, ids, before)

    def variants(self, text: Prompt, edits: Sequence[Edit] = (), keep: Sequence[str] = ()) -> Variants:
        """Not available: a prompt's thoughts depend on the edits before them."""
        raise BadRequest("Thinking-States models have no variants. Use logits(text, edits=...), once per list of edits.")

    def _drafts(self, thoughts: Drafts) -> dict[int, Tokens]:
        listed = [token_ids("drafts", thought) for thought in as_list("drafts", thoughts, THOUGHTS)]
        return {i: self.prefiller.blocks.check(thought) for i, thought in enumerate(listed)}

    def _placed(self, edits: Sequence[Edit], length: int) -> list[PlacedEdit]:
        """The placed edits; BadEdit for sites that can be captured but not edited."""
        out: list[PlacedEdit] = []
        for edit in listed(edits):
            if (
                isinstance(edit, Edit)
                and edit.site in tuple(LETTERS)
                and edit.site not in (STATE_SITE, THINK_SITE, COMPRESS_SITE)
            ):
                raise BadEdit(f"{edit.site} can be captured but not edited. Edit {THINK_SITE} instead.")
            if edit.tokens is not None:
                raise BadEdit("Edits of chosen tokens are for plain models. Name the positions instead.")
            out += place(edit, self.sites, self._axis(getattr(edit, "site", ""), length), later=True)  # `extend` adds positions
        return out

    def _axis(self, site: str, length: int) -> int:
        """The length of the axis that an edit's positions refer to."""
        steps = {THINK_SITE: self.thinking.max_thought, COMPRESS_SITE: self.thinking.compressed}
        return length // self.thinking.chunk * steps[site] if isinstance(site, str) and site in steps else length

    def first_touched(self, edit: PlacedEdit) -> int:
        """The first token position that an edit affects."""
        steps = {THINK_SITE: self.thinking.max_thought, COMPRESS_SITE: self.thinking.compressed}
        return edit.first // steps[edit.site] * self.thinking.chunk if edit.site in steps else edit.first

    def _hooks(self, hooks: Sequence[Hook]) -> tuple[Hook, ...]:
        resolved = resolve_hooks(hooks, self.sites)
        if bad := [name for name, _ in resolved if name in LETTERS]:
            raise BadEdit(f"Hook functions cannot be used on {bad[0]}. Use an Edit.")
        return resolved


def _known(guess: str) -> Guess:
    for known in GUESSES:
        if isinstance(guess, str) and known == guess:
            return known
    raise BadRequest(f"Invalid guess={short_repr(guess)}. Give one of {', '.join(GUESSES)}.")


class ThinkingBranch(Branch):
    """A branch with thoughts on its prompt."""

    engine: ThinkingEngine

    @property
    def thoughts(self) -> Thoughts:
        """A copy of the thoughts of all prompt chunks, with the states that chunks received and the rounds of the prefill."""
        return self._thoughts.copy()

    @property
    def _thoughts(self) -> Thoughts:
        found = thoughts_of(self.lane)
        assert found is not None  # the prefill sets it
        return found

    def picture(self) -> Thinking:
        """The Thinking-States picture: chunks, states, thoughts, rounds. Draws itself in a notebook; `print` it elsewhere."""
        from replaylens.views.thoughts import picture

        return picture(self.engine.text, self.tokens, self._thoughts)

    @reading
    def tree(self) -> Tree:
        """As `Branch.tree`, with the thoughts after their chunks; those that were rolled back are struck out."""
        from replaylens.views.pictures import tree_of
        from replaylens.views.thoughts import thoughts_by_branch

        recordings = {i: lane.recording for i, lane in self.engine.loop.lanes.items()}
        said = thoughts_by_branch(self.engine.text, self.record, self._thoughts)
        return tree_of(self.record, recordings, self.engine.text, thoughts=said)

    @reading
    def timeline(self) -> Timeline:
        """As `Branch.timeline`, with the rounds of the prefill; thoughts that were rolled back are struck out."""
        from replaylens.views.thoughts import with_rounds

        return with_rounds(super().timeline(), self.engine.text, self._thoughts)

    def _repr_html_(self) -> str:
        from replaylens.views.summary import one_picture

        return one_picture(self._facts(), self.picture())

    def fork(self, n: int = 1, at: int | None = None, *, edits: Sequence[Edit] = (), hooks: Sequence[Hook] = ()) -> list[Self]:
        """`n` new branches with this path, or its first `at` tokens, as `Branch.fork`.

        They inherit the states made from the first `at` tokens. From the first chunk that an edit affects, prompt chunks think
        again. After `at`, only chunks that `extend` adds think.
        """
        n = as_int("n", n, 1, MAX_FORKS)
        self._check_open()
        at, chunk = self.length if at is None else as_int("at", at), self.engine.thinking.chunk
        hooks = resolve_hooks(hooks, self.engine.sites)
        placed, resolved = self.engine._placed(edits, at), self.engine._hooks(hooks)
        along = self._thought_along(at)
        first = 0 if hooks else min([along, *map(self.engine.first_touched, placed)])
        with self.engine.forest.made() as lanes:
            for _ in range(n):
                if first == along and not split(placed)[1]:
                    self._fork(at, tuple(placed), resolved, lanes)
                else:
                    self._rethink(first // chunk * chunk, at, placed, resolved, lanes)
        return [type(self)(self.engine, lane) for lane in lanes]

    def extend(self, text: str | Sequence[int], guess: Guess | None = None) -> Self:
        """A new branch that extends this prompt and thinks on it. Precondition: the branch has only whole prompt chunks."""
        self._check_open()
        if self.length != self._thought_along(self.length):
            raise BadRequest(
                f"Branch {self.id} has tokens without thoughts. Fork it at a chunk border, at most "
                f"{self._thought_along(self.length)}, and extend the fork."
            )
        path = [*self.tokens, *self.engine._chunks(text, self.length)]
        with self.engine.forest.made() as lanes:
            self._grown(self.length, path, (), (), _known(self.engine.guess if guess is None else guess), lanes)
        return type(self)(self.engine, lanes[0])

    def _thought_along(self, at: int) -> int:
        """The number of tokens, of the first `at`, in whole chunks with thoughts."""
        chunk = self.engine.thinking.chunk
        return min(at // chunk, len(self._thoughts.chunks)) * chunk

    def _fork(self, at: int, edits: tuple[PlacedEdit, ...], hooks: tuple[Hook, ...], lanes: list[Lane]) -> None:
        """Mutates: adds a fork to `lanes`."""
        with defer_interrupt():
            lanes.append(lane := self.engine.forest.fork(self.lane, at, edits, hooks))
        thoughts = lane.carried = self._thoughts.until(at)
        if isinstance(lane.recording, ThinkingRecording):
            lane.recording.thoughts = thoughts

    def _rethink(self, cut: int, at: int, edits: Sequence[PlacedEdit], hooks: tuple[Hook, ...], lanes: list[Lane]) -> None:
        """Mutates: adds a fork at `cut` to `lanes`, which thinks again up to `at`."""
        tokens, end = self.tokens[:at], self._thought_along(at)
        self._grown(cut, tokens[:end], edits, hooks, self.engine.guess, lanes)
        if end < at:
            self.engine.forest.force(lanes[-1], tokens[end:])
            self.engine.forest.compute(lanes[-1:])

    def _grown(
        self,
        cut: int,
        path: list[int],
        edits: Sequence[PlacedEdit],
        hooks: tuple[Hook, ...],
        guess: Guess,
        lanes: list[Lane],
    ) -> None:
        """Mutates: adds a fork at the chunk border `cut` to `lanes`, with whole prompt chunks `path` and additional edits."""
        engine, known = self.engine, self._thoughts.until(cut)
        outer, inner = split(edits)
        with defer_interrupt():
            lanes.append(lane := engine.forest.fork(self.lane, cut, (), hooks))
        prefill = Prefill(lane, path, guess, lane.capture, planted=False)
        prefill.edits, prefill.inner = known.others(lane.edits) + outer, known.inner + inner
        prefill.thoughts, prefill.states = list(known.chunks), dict(known.states)
        engine.prefiller.run([prefill])
