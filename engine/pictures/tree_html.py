"""A `Tree` as HTML: the shared prefix as flowing text, then a grid with one column per position."""

from collections.abc import Iterable, Iterator

from markupsafe import Markup

from replaylens.engine.memory.tree import TokenState
from replaylens.engine.pictures.html import join, tag
from replaylens.engine.pictures.layout import arrange
from replaylens.engine.pictures.palette import KINDS, NAMES
from replaylens.engine.pictures.paths import DrawnPath, Paths, Token, visible
from replaylens.engine.pictures.readings import LensLayer


def draw(tree: Paths) -> Markup:
    """The tree with its title and legend."""
    stem = _stem_length(tree)
    parts = [tag("div", tag("b", tree.title), legend(tree.kinds), class_="rl-head")]
    if before := [chip(token, tree.trunk) for token in tree.trunk.tokens if token.position < stem]:
        parts.append(tag("div", *before, class_="rl-stem"))
    parts.append(tag("div", tag("div", *_grid(tree, stem), class_="rl-grid"), class_="rl-scroll"))
    if tree.left_out:
        parts.append(tag("p", f"and {tree.left_out} more branches", class_="rl-quiet"))
    return tag("div", *parts, class_="rl-tree")


def _stem_length(tree: Paths) -> int:
    """Number of first tokens drawn as flowing text: prompt tokens before every fork, except the last, which is in the grid."""
    prompt = sum(token.state is TokenState.PROMPT for token in tree.trunk.tokens)
    return max(0, min([prompt, *(path.fork_position for path in tree.paths[1:])]) - 1)


def _grid(tree: Paths, stem: int) -> Iterator[Markup]:
    for place in arrange(tree):
        if place.path.parent is not None:
            column = max(1, place.path.fork_position - stem)
            yield tag("i", class_="rl-line", style=f"grid-row:{place.parent_row + 2}/{place.row + 2};grid-column:{column}")
        for token in place.path.tokens:
            if token.position >= stem or place.row:
                yield chip(token, place.path, f"grid-row:{place.row + 1};grid-column:{token.position - stem + 1}")


def chip(token: Token, path: DrawnPath, place: str | None = None) -> Markup:
    """One token in its colour. Its title lists facts, one per line, with tabs between columns."""
    thought = tag("small", f"Z {' '.join(map(visible, token.thought))}", class_="rl-said") if token.thought else ""
    return tag(
        "span",
        token.visible,
        thought,
        class_=f"rl-token rl-{token.kind}",
        style=place,
        title="\n".join(_facts(token, path)),
        tabindex=0,
    )


def _facts(token: Token, path: DrawnPath) -> Iterator[str]:
    yield f"{KINDS[token.kind].mark} {visible(token.text)}"
    yield f"position\t{token.position}"
    yield f"state\t{token.standing}, branch {path.branch}"
    if token.thought:
        yield f"thought\t{' '.join(map(visible, token.thought))}"
    if token.logprob is not None:
        yield f"log-prob\t{token.logprob:.3f}"
    if token.entropy is not None:
        yield f"entropy\t{token.entropy:.3f} nats"
    yield from (f"{name}\t{visible(value)}" for name, value in token.labels)
    if token.lens:
        yield "next token, layer by layer"
        yield from map(_layer, token.lens)


def _layer(layer: LensLayer) -> str:
    return "\t".join([layer.site, *(f"{visible(guess.token)} {guess.probability:.2f}" for guess in layer.guesses)])


def legend(kinds: Iterable[str]) -> Markup:
    """The colours and marks of kinds of tokens."""
    chips = (tag("span", f"{KINDS[kind].mark} {NAMES.get(kind, kind)}", class_=f"rl-token rl-{kind}") for kind in kinds)
    return tag("span", join(chips), class_="rl-legend")
