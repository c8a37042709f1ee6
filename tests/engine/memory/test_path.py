"""`TokenPath` and `PathStates` against plain lists, over any order of forks, additions and cuts."""

import random
from itertools import pairwise

import pytest

from replaylens.engine.memory.path import PathStates, TokenPath, TokenState

ACCEPTED, DRAFT, PENDING, PROMPT = TokenState.ACCEPTED, TokenState.DRAFT, TokenState.PENDING, TokenState.PROMPT


@pytest.mark.parametrize("seed", range(20))
def test_paths_are_the_lists_that_they_would_be(seed: int) -> None:
    chance = random.Random(seed)
    paths: list[tuple[TokenPath, list[int]]] = [(TokenPath(range(9)), list(range(9)))]
    for _ in range(200):
        path, plain = chance.choice(paths)
        match chance.choice(["fork", "extend", "extend", "truncate", "drop"]):
            case "fork":
                length = chance.choice([len(plain), chance.randint(0, len(plain))])
                paths.append((path.fork(length), plain[:length]))
            case "extend":
                new = [chance.randrange(1000) for _ in range(chance.choice([1, 1, 2, 30]))]
                path.extend(new)
                plain.extend(new)
            case "truncate":
                length = max(0, len(plain) - chance.choice([0, 1, 3, 40]))
                path.truncate(length)
                del plain[length:]
            case "drop" if len(paths) > 6:
                paths.remove((path, plain))
        for path, plain in paths:
            path.check_integrity("path")
            first, last = sorted(chance.randint(0, len(plain) + 2) for _ in range(2))
            assert len(path) == len(plain) and path == plain and list(path) == plain
            assert path[first:last] == plain[first:last] and path[last:first] == plain[last:first]
            assert path[::3] == plain[::3] and path[-3:] == plain[-3:]
            for index in {-len(plain), -1, 0, len(plain) - 1, chance.randint(0, 400)}:
                if -len(plain) <= index < len(plain):
                    assert path[index] == plain[index]
                else:
                    with pytest.raises(IndexError):
                        path[index]


def test_a_fork_copies_no_tokens() -> None:
    root = TokenPath(range(5000))
    forks = [root.fork(5000) for _ in range(3)]
    assert len({id(fork._parts[0]) for fork in (root, *forks)}) == 1


def test_pieces_stay_few() -> None:
    """A path that is forked after every token has about as many pieces as its length has digits in base two."""
    path, kept = TokenPath(), []
    for token in range(1000):
        path.extend([token])
        kept.append(path.fork(len(path)))
    count, piece = 0, path._parts[0]
    while piece is not None:
        count, piece = count + 1, piece.below
    assert count <= 11 and path == list(range(1000)) and kept[500] == list(range(501))


def test_a_seal_sees_a_changed_token() -> None:
    path = TokenPath([1, 2, 3])
    path.fork(3)
    path.extend([4])
    before = path.seal()
    path.truncate(3)
    path.extend([5])
    assert path.seal() != before


@pytest.mark.parametrize("seed", range(10))
def test_states_are_the_list_that_they_would_be(seed: int) -> None:
    chance, states, plain = random.Random(seed), PathStates(), list[TokenState]()
    for _ in range(150):
        last = plain[-1] if plain else PROMPT
        match chance.choice(["append", "append", "truncate", "accept", "reopen"]):
            case "append":
                later = [
                    s for s in (PROMPT, ACCEPTED, PENDING, DRAFT) if list(TokenState).index(s) >= list(TokenState).index(last)
                ]
                state = chance.choice(later)
                count = 1 if state is PENDING else chance.randint(1, 4)
                if not (state is last is PENDING):
                    states.append(state, count)
                    plain += [state] * count
            case "truncate":
                length = chance.randint(max(0, len(plain) - 5), len(plain))
                states.truncate(length)
                del plain[length:]
            case "accept" if {PENDING, DRAFT} & set(plain):
                first = next(i for i, s in enumerate(plain) if s in (PENDING, DRAFT))
                count = chance.randint(1, len(plain) - first)
                states.accept(count)
                plain[first : first + count] = [ACCEPTED] * count
            case "reopen" if last is ACCEPTED:
                states.reopen_last()
                plain[-1] = PENDING
        assert list(states) == plain and len(states) == len(plain) and states == plain
        assert states.num_committed == plain.count(PROMPT) + plain.count(ACCEPTED)
        for state in TokenState:
            assert states.count(state) == plain.count(state) and (state in states) == (state in plain)
            if state in plain:
                assert states.index(state) == plain.index(state)
        length = chance.randint(0, len(plain))
        assert list(states.first(length)) == plain[:length] and states[-2:] == plain[-2:]
        assert not plain or (states[-1], states[0], states.last) == (plain[-1], plain[0], plain[-1])
    assert all(a is b or list(TokenState).index(a) < list(TokenState).index(b) for a, b in pairwise(states))
