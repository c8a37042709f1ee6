"""Replays task examples and given texts: prompt, generate, capture every row of the path."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tqdm.auto import tqdm

from replaylens.engine.errors import BadRequest, EngineError
from replaylens.engine.loop.lane import Statistics
from replaylens.engine.memory.tree import BranchRecord
from replaylens.engine.model.sites import SiteTable
from replaylens.engine.progress import hidden
from replaylens.engine.request.edits import Edit, listed
from replaylens.engine.request.placed import PlacedEdit
from replaylens.engine.request.placing import require_fit
from replaylens.engine.request.recording import Recording
from replaylens.engine.request.sampling import Sampling
from replaylens.engine.request.values import flag, instance, whole
from replaylens.engine.serving.branch import Branch
from replaylens.engine.serving.core import Core
from replaylens.engine.serving.request import Request
from replaylens.engine.thinking.thoughts import Thoughts, thoughts_of
from replaylens.tasks import Example


@dataclass(frozen=True)
class RejectedPath:
    """Rejected drafts: the tokens from `fork_position` on, with canonical rows of their own."""

    branch: int
    tokens: list[int]
    fork_position: int
    activations: Recording | None


@dataclass(frozen=True)
class Result:
    """One example's path."""

    example: Example
    branch: int
    record: BranchRecord = field(repr=False)
    """the branch's record in the engine's tree, kept so that it can be drawn after its release"""
    tokens: list[int]
    text: str
    num_prompt: int
    finish_reason: str | None
    correct: bool | None
    """whether the generated text ends with the right answer, in upper or lower case; None for given texts, which have none"""
    statistics: Statistics
    rejected: list[RejectedPath]
    recording: Recording | None
    certified: bool = True
    """whether all its rows are canonical; only certified results can be dumped"""
    thoughts: Thoughts | None = None
    """the thoughts on the prompt, for a model that thinks"""
    generated_text: str = ""
    """the text of the tokens after the prompt, without the end-of-sequence token that may end it"""

    @property
    def generated(self) -> list[int]:
        """The tokens after the prompt."""
        return self.tokens[self.num_prompt :]

    @property
    def activations(self) -> Recording:
        """Captured rows by site, in order of position."""
        if self.recording is None:
            raise BadRequest("Nothing was captured. Replay with sites='STCZ' or site names.")
        return self.recording


@dataclass(frozen=True)
class ReplayOptions:
    """How examples are replayed."""

    sites: str | Sequence[str] | None = None
    """what to capture: "STCZ", or site names"""
    drafter: str = "self"
    window: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    """each example samples with the sum of this seed and its index; for independent runs, choose seeds further apart than the
    indices"""
    edits: Sequence[Edit] = ()
    """interventions on every example; negative positions count from the end of its prompt"""
    max_new: int | None = None
    """maximal number of tokens to generate; None: a little more than the right completion has, and none after given texts"""
    rejected: bool = True
    """keep the rows of rejected drafts"""
    deterministic: bool = True
    """False: take the fast path's tokens; the run is then not certified and cannot be saved"""

    def __post_init__(self) -> None:
        if self.max_new is not None:
            object.__setattr__(self, "max_new", whole("max_new", self.max_new, 0))
        instance("sampling", self.sampling, Sampling, "a Sampling")
        object.__setattr__(self, "edits", tuple(listed(self.edits)))
        flag("rejected", self.rejected)


def replay_examples(
    engine: Core, examples: list[Example], options: ReplayOptions, batch: int = 32, progress: bool = False
) -> list[Result]:
    """Prompt with each example, generate its answer and capture every row of the path.

    batch  number of examples served together; changes no bit
    """
    batch, progress = whole("batch", batch, 1), flag("progress", progress)
    for example in examples:
        instance("examples", example, Example, "examples of a task, such as tasks.get('coin')().examples(4)")
    o, results = options, list[Result]()
    with tqdm(total=len(examples), unit="example", disable=hidden(progress)) as bar:
        for first in range(0, len(examples), batch):
            some = examples[first : first + batch]
            branches = prompt_examples(engine, some, o)
            try:
                _continue(engine, some, branches)
                asked = [(b, r) for e, b in zip(some, branches, strict=True) if (r := _request(engine, e, b, o)) is not None]
                engine.serve([branch for branch, _ in asked], [request for _, request in asked])
                results += [result_of(engine, example, branch) for example, branch in zip(some, branches, strict=True)]
            finally:
                for branch in branches:
                    branch.release()
            bar.update(len(some))
    return results


def prompt_examples(engine: Core, examples: Sequence[Example], o: ReplayOptions) -> Sequence[Branch]:
    """Branches with the prompts of the examples, computed together. The caller must release them."""
    prompts = list(map(prompt_of, examples))
    if not any(e.given is not None and e.given.edits for e in examples):
        return engine.prompts(prompts, sites=o.sites, keep_rejected=o.rejected, edits=o.edits)
    if engine.guesses():
        raise BadRequest(
            "Texts with edits of their own are branches of a model that does not think. Replay them on that model."
        )
    paths = [engine.tokens_of(prompt) for prompt in prompts]
    edits = [
        own_edits(example, engine.sites) + engine.placed(o.edits, len(path))
        for example, path in zip(examples, paths, strict=True)
    ]
    capture = engine.capture_spec(o.sites, rejected=o.rejected) if o.sites else None
    return engine.planted(paths, capture, edits)


def prompt_of(example: Example) -> str | list[int]:
    """What an engine is prompted with: the text of a task, the tokens of a given text."""
    given = example.given
    return example.prompt if given is None else list(given.tokens[: given.num_prompt])


def own_edits(example: Example, table: SiteTable) -> tuple[PlacedEdit, ...]:
    """The edits of a branch that became a text. BadRequest if they are damaged, BadEdit if the model has no such place."""
    try:
        return tuple(require_fit(PlacedEdit.from_json(raw), table) for raw in (example.given.edits if example.given else ()))
    except EngineError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadRequest(f"Text {example.index} has edits that cannot be read: {error!r}.") from error


def _continue(engine: Core, examples: Sequence[Example], branches: Sequence[Branch]) -> None:
    """Mutates: appends to each branch what follows the prompt of a given text."""
    more = [(b, list(e.given.tokens[b.root_length :])) for e, b in zip(examples, branches, strict=True) if e.given is not None]
    if more := [(branch, rest) for branch, rest in more if rest]:
        engine.force_all([branch for branch, _ in more], [rest for _, rest in more])


def _request(engine: Core, example: Example, branch: Branch, options: ReplayOptions) -> Request | None:
    """The generation of one example's answer, with its own length and seed; None if nothing is generated."""
    o, n = options, options.max_new
    if n is None:
        n = 0 if example.given is not None else len(engine.text.encode(example.completion, special=False)) + 2
    if not n or _ended(engine, example):
        return None
    n = min(n, engine.config.max_positions - branch.length)
    if n < 1:
        raise BadRequest(f"Example {example.index}: its prompt of {branch.length} tokens leaves no room to generate.")
    sampling = replace(o.sampling, seed=(o.sampling.seed + example.index) % 2**64)
    return Request(n, sampling, o.drafter, o.window, o.deterministic, final=True)


def _ended(engine: Core, example: Example) -> bool:
    """Whether a branch that became a text had generated the token that ends a sequence."""
    given = example.given
    return given is not None and len(given.tokens) > given.num_prompt and given.tokens[-1] == engine.text.eos_id


def result_of(engine: Core, example: Example, branch: Branch) -> Result:
    """The result of an example from the branch that generated its answer. Precondition: the branch is not released."""
    thoughts = thoughts_of(branch.lane)
    rejected = [
        RejectedPath(other.id, other.tokens, other.record.fork_position, other.lane.recording) for other in branch.rejected
    ]
    return Result(
        example=example,
        branch=branch.id,
        record=branch.record,
        tokens=branch.tokens,
        text=branch.text,
        num_prompt=branch.root_length,
        finish_reason=branch.finish_reason,
        correct=None if example.given is not None else _is_right(engine, example, branch.generated),
        statistics=branch.statistics,
        rejected=rejected,
        recording=branch.lane.recording,
        certified=branch.certified,
        thoughts=None if thoughts is None else thoughts.copy(),
        generated_text=branch.generated_text,
    )


def _is_right(engine: Core, example: Example, generated: list[int]) -> bool:
    """Whether the generated tokens end with the example's answer."""
    answer = engine.text.decode([token for token in generated if token != engine.text.eos_id])
    return _last_word(answer) == _last_word(example.completion)


def _last_word(text: str) -> str:
    """The last word in lower case, without punctuation. In every rendering it is the answer."""
    words = text.lower().replace(".", " ").split()
    return words[-1] if words else ""
