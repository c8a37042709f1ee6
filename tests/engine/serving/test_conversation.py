"""A conversation is a path: its tokens and rows are those of its rendering, however it was made."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from replaylens import Conversation, Edit, Engine, Sampling
from replaylens.engine.errors import BadRequest, BadTexts
from tests.toy_model import random_model

PLAIN = (
    "{% if tools %}<s>tools:{{ tools | tojson }}<e>{% endif %}{% for m in messages %}<s>{{ m.role }}:{{ m.content }}<e>\n"
    "{% endfor %}{% if add_generation_prompt %}<s>assistant:{% endif %}"
)
TRIMS = PLAIN.replace("{{ m.content }}", "{{ m.content | trim }}")
FORGETS = PLAIN.replace("{{ m.content }}", "{{ m.content if loop.last or m.role != 'assistant' else 'said' }}")
PAIRS = "{% if messages | length < 2 %}{{ raise_exception('a system message alone') }}{% endif %}" + PLAIN
SITE = "blocks.1.hook_out"
HOT = Sampling(temperature=1.0, seed=5)
FIRST = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]


def byte_tokenizer(template: str | None = None) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={"<s>": 0, "<e>": 1} | {c: i + 2 for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="<e>")
    made.chat_template = template
    return made


@pytest.fixture(scope="module")
def bare() -> Engine:
    return Engine(random_model(2, vocab_size=258, max_positions=1024), byte_tokenizer())


@pytest.fixture
def engine(bare: Engine) -> Iterator[Engine]:
    bare.text.tokenizer.chat_template = PLAIN
    yield bare
    bare.text.tokenizer.chat_template = PLAIN


def talked(engine: Engine, **options: Any) -> Conversation:
    """Two given turns, a generated one, a tool's result, and another generated one."""
    talk = Conversation(engine, FIRST, sites="S", **options)
    talk.generate(6, sampling=HOT)
    talk.append("4", role="tool").generate(5, sampling=HOT)
    return talk


def test_turns_cover_the_path(engine: Engine) -> None:
    talk = talked(engine)
    assert [turn.role for turn in talk.turns] == ["system", "user", "assistant", "tool", "assistant"]
    assert talk.turns[0].start == 0 and talk.turns[-1].stop == talk.branch.length
    assert [a.stop for a in talk.turns[:-1]] == [b.start for b in talk.turns[1:]]
    tool = talk.turns[3]
    assert engine.text.decode(talk.tokens[tool.start : tool.stop]) == "<s>tool:4<e>\n"
    assert engine.text.decode(talk.tokens[: talk.turns[1].stop]) == engine.text.templated(FIRST)


def test_states_are_those_of_the_path_in_one_piece(engine: Engine) -> None:
    """torch.equal with the same tokens as one prompt. Control: another tool result gives other states, from its turn on."""
    talk = talked(engine)
    with engine.prompt(talk.tokens, sites="S") as whole:
        wanted = whole.activations[SITE]
    for number, turn in enumerate(talk.turns):
        assert torch.equal(talk.activations(SITE, number), wanted[turn.start : turn.stop])
    assert torch.equal(talk.states(SITE), wanted[[turn.stop - 1 for turn in talk.turns]])
    other = talk.replay(3, "5")
    same = (talk.states(SITE) == other.states(SITE)).all(1)
    assert same.tolist()[:3] == [True] * 3 and not same[4]


def test_replay_repeats_what_was_not_changed(engine: Engine) -> None:
    """With the same result, every token and bit is the same; with another one, earlier turns are shared."""
    talk = talked(engine)
    talk.append("And 3+3?").generate(4, sampling=HOT)
    same = talk.replay(3, "4")
    assert same.tokens == talk.tokens and torch.equal(same.branch.activations[SITE], talk.branch.activations[SITE])
    assert [turn.role for turn in same.turns] == [turn.role for turn in talk.turns]
    other = talk.replay(3, {"role": "tool", "content": "five"})
    assert other.turns[:3] == talk.turns[:3] and other.turns[3].content == "five" and other.turns[5].content == "And 3+3?"
    start = talk.turns[3].start
    assert other.tokens[:start] == talk.tokens[:start] and other.tokens != talk.tokens
    edited = talk.replay(3, "4", edits=[Edit(SITE, "zero", positions=slice(start, None))])
    assert edited.tokens[: talk.turns[3].stop] == talk.tokens[: talk.turns[3].stop] and edited.branch.certified


def test_a_fork_goes_its_own_way(engine: Engine) -> None:
    talk = talked(engine)
    before = talk.tokens
    fork = talk.fork(3)
    fork.append("nothing", role="tool").generate(3, sampling=HOT)
    assert fork.tokens[: talk.turns[3].start] == before[: talk.turns[3].start] and talk.tokens == before
    assert talk.fork(-2).tokens == talk.fork(3).tokens and talk.fork().tokens == before
    whole = talk.fork().append("more")
    assert whole.tokens == talk.append("more").tokens
    engine.check_integrity()


def test_a_turn_that_was_cut_goes_on(engine: Engine) -> None:
    """In pieces it has the tokens that it has at once, and replay repeats the pieces."""
    once, pieces = (Conversation(engine, FIRST, sites="S") for _ in range(2))
    once.generate(8, sampling=HOT)
    pieces.generate(3, sampling=HOT)
    turn = pieces.generate(5, sampling=HOT)
    assert pieces.tokens == once.tokens and turn.content == once.turns[-1].content and len(turn.generated) == 2
    assert pieces.replay(1, "2+2?").tokens == pieces.tokens


def test_the_template_closes_a_turn_that_the_model_ended(engine: Engine) -> None:
    """The end-of-sequence token of the model is no part of the turn; the template writes its own."""
    talk = Conversation(engine, FIRST, sites="S")
    ended = talk.fork(edits=[towards(engine, 1)])
    turn = ended.generate(9)
    assert ended.branch.finish_reason == "eos" and turn.ended and turn.content == ""
    with pytest.raises(BadRequest, match="has ended"):
        ended.generate(2)
    copy = ended.fork()
    with pytest.raises(BadRequest, match="has ended"):
        copy.generate(2)
    ended.append("more")
    said = engine.text.decode(ended.tokens[ended.turns[2].start : ended.turns[2].stop])
    assert said == "<s>assistant:<e>\n" and ended.tokens == copy.append("more").tokens


def towards(engine: Engine, token: int) -> Edit:
    """An edit that makes a token the likeliest."""
    weight = engine.model.unembed.weight  # type: ignore[union-attr]
    column = weight[:, token] if weight.shape[0] == engine.config.d_model else weight[token]
    return Edit(SITE, "set", value=column / column.norm() * 100)


def test_the_last_row_of_a_turn_cannot_be_left_out(engine: Engine) -> None:
    conversation = Conversation(engine, FIRST)
    with pytest.raises(BadRequest, match="final=False"):
        conversation.generate(3, final=False)
    assert conversation.generate(3, final=True).role == "assistant"


def test_tools_are_written(engine: Engine) -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    assert "tools:" in talked(engine, tools=tools).branch.text and "tools:" not in talked(engine).branch.text


def test_a_template_that_changes_the_past_is_named(engine: Engine) -> None:
    """A failed call changes nothing. Control: with a template that keeps turns, the same call works."""
    for template in (FORGETS, PLAIN):
        engine.text.tokenizer.chat_template = template
        talk = Conversation(engine, [*FIRST, {"role": "assistant", "content": "so"}])
        before = talk.tokens, talk.turns, talk._text
        if template is PLAIN:
            assert talk.append("4", role="tool").turns[-1].role == "tool"
            continue
        with pytest.raises(BadTexts, match=r"of .* \(sha256 [0-9a-f]{12}\) .* once turn 3, tool, follows: .*so.*said"):
            talk.append("4", role="tool")
        assert before == (talk.tokens, talk.turns, talk._text)


def test_a_generated_turn_that_the_template_trims_is_named(engine: Engine) -> None:
    """Control: without trimming, the same tokens go on."""
    for template in (TRIMS, PLAIN):
        engine.text.tokenizer.chat_template = template
        talk = Conversation(engine, FIRST)
        (space,) = engine.text.encode(" ", special=False)
        ended = talk.fork(edits=[towards(engine, space)])
        assert ended.generate(2).content == "  "
        if template is TRIMS:
            with pytest.raises(BadTexts, match="trimming"):
                ended.append("more")
        else:
            assert "<s>assistant:  <e>\n<s>user:more" in ended.append("more").branch.text


def test_a_system_message_may_need_the_next_one(engine: Engine) -> None:
    engine.text.tokenizer.chat_template = PAIRS
    talk = Conversation(engine, FIRST, sites="S")
    assert (talk.turns[0].start, talk.turns[0].stop) == (0, 0) and talk.turns[1].stop == talk.branch.length
    with pytest.raises(BadRequest, match="Turn 0 has no captured rows"):
        talk.states(SITE)


def test_a_call_that_fails_changes_nothing(engine: Engine) -> None:
    """Also the path is as before, and goes on to the tokens that it has without the failures."""
    wanted, talk = talked(engine), Conversation(engine, FIRST, sites="S")
    for cut in (False, True):  # before a turn is begun, and within one that was cut
        before = talk.tokens, talk.turns, talk.messages, talk._text
        for n, options in ((0, {}), (5, {"drafter": "nope"}), (10**6, {})):
            with pytest.raises(BadRequest):
                talk.generate(n, sampling=HOT, **options)  # type: ignore[arg-type]
            assert before == (talk.tokens, talk.turns, talk.messages, talk._text)
        with pytest.raises(BadRequest):
            talk.append("x" * 2000)
        assert before == (talk.tokens, talk.turns, talk.messages, talk._text)
        talk.generate(3, sampling=HOT)
        assert talk.turns[-1].ended is False, cut
    talk.append("4", role="tool").generate(5, sampling=HOT)
    assert talk.tokens == wanted.tokens and torch.equal(talk.states(SITE), wanted.states(SITE))
    ended = Conversation(engine, FIRST).fork(edits=[towards(engine, 1)])
    ended.generate(9)
    copy = ended.fork()
    with pytest.raises(BadRequest):
        ended.append("x" * 2000)
    assert ended.turns == copy.turns and ended.append("more").tokens == copy.append("more").tokens
    engine.check_integrity()


def test_a_turn_in_pieces_has_its_whole_text(engine: Engine) -> None:
    """Also where a request ends within a character. Control: the pieces alone have none."""
    talk = Conversation(engine, FIRST)
    first, second = engine.text.encode("\u00e9", special=False)
    start = talk.branch.length + len("<s>assistant:") - 2  # <s> is one token
    assert engine.text.decode([first]) == "\ufffd", "control"
    edits = [at(towards(engine, token), start - 1 + i) for i, token in enumerate((first, second) * 2)]
    pieces, once = talk.fork(edits=edits), talk.fork(edits=edits)
    for _ in range(4):
        pieces.generate(1)
    assert once.generate(4).content == pieces.turns[-1].content == "\u00e9\u00e9" and pieces.tokens == once.tokens
    assert pieces.append("more").tokens == once.append("more").tokens and "\ufffd" not in pieces.branch.text


def at(edit: Edit, position: int) -> Edit:
    return replace(edit, positions=slice(position, position + 1))


def test_a_turn_that_was_cut_and_closed_does_not_go_on(engine: Engine) -> None:
    with pytest.raises(BadRequest, match="has ended"):
        talked(engine).fork(3).generate(2)


def test_a_branch_that_was_changed_by_hand_is_named(engine: Engine) -> None:
    """Turns that are still there can be forked. Control: a fork of the branch may be changed."""
    changes: list[Any] = [
        lambda branch: branch.rollback(to=branch.length - 1),
        lambda branch: branch.force([5, 6]),
        lambda branch: branch.generate(2, sampling=HOT),
        lambda branch: branch.rollback(to=branch.length - 1).force([7]),
    ]
    for change in changes:
        talk = talked(engine)
        talk.branch.fork()[0].force([5])
        wanted, turns = talk.fork(3).append("5", role="tool").tokens, talk.turns
        change(talk.branch)
        for call, given in ((talk.append, ["more"]), (talk.generate, [2]), (talk.replay, [3, "5"]), (talk.fork, [])):
            with pytest.raises(BadRequest, match=r"changed by hand.*fork\(turn\).*new Conversation"):
                call(*given)
        assert talk.turns == turns and talk.fork(3).append("5", role="tool").tokens == wanted
        assert len(talk.activations(SITE, 3)) == turns[3].stop - turns[3].start
    talk.branch.rollback(to=turns[3].start)
    with pytest.raises(BadRequest, match="changed by hand"):
        talk.fork(4)
    with pytest.raises(BadRequest, match="changed by hand"):
        talk.activations(SITE, 3)


def test_misuse_is_named(engine: Engine) -> None:
    with pytest.raises(BadRequest, match="at least one message"):
        Conversation(engine, [])
    with pytest.raises(BadRequest, match="Invalid message"):
        Conversation(engine, ["hi"])  # type: ignore[list-item]
    talk = Conversation(engine, FIRST)
    with pytest.raises(BadRequest, match="No message to append"):
        talk.append()
    with pytest.raises(BadRequest, match="Invalid at=0"):
        talk.fork(0)
    talk.generate(2, sampling=HOT)
    with pytest.raises(BadRequest, match="Turn 2 was generated"):
        talk.replay(2, "x")
    with pytest.raises(BadTexts):
        Conversation(Engine.load("coin-plain"), FIRST)
    with Conversation(engine, FIRST) as closing:
        pass
    assert closing.branch.status.value == "released"
