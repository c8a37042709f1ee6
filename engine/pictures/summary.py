"""What a notebook shows for a run, a branch or an engine: the facts in a few lines, then their pictures."""

from collections.abc import Mapping, Sequence

from markupsafe import Markup

from replaylens.engine.pictures import thoughts, tree_html
from replaylens.engine.pictures.frames import Fill
from replaylens.engine.pictures.html import fragment, tag
from replaylens.engine.pictures.svg import cylinder
from replaylens.engine.pictures.thoughts import Thinking
from replaylens.engine.pictures.tree import Tree

MAX_TREES = 12
"""that one output can unfold"""
Facts = Mapping[str, str | int | float]


def one_picture(facts: Facts, picture: Tree | Thinking) -> str:
    """The facts, and a picture under them."""
    return fragment(fact_list(facts), _drawn(picture))


def folded_pictures(facts: Facts, pictures: Sequence[Tree | Thinking], rest: str = "") -> str:
    """The facts, then pictures that unfold, then a line about those that are not shown."""
    return fragment(fact_list(facts), *map(_folded, pictures), *_line(rest))


def cache_and_pictures(facts: Facts, used: int, pages: int, pictures: Sequence[Tree], rest: str = "") -> str:
    """How full the KV cache is, beside the facts; then pictures that unfold."""
    cache = tag("div", cylinder(Fill(used), pages), class_="rl-picture")
    return fragment(tag("div", cache, fact_list(facts), class_="rl-head"), *map(_folded, pictures), *_line(rest))


def fact_list(facts: Facts) -> Markup:
    """Names with their values."""
    return tag(
        "dl", *(part for name, value in facts.items() for part in (tag("dt", name), tag("dd", value))), class_="rl-facts"
    )


def code(text: str) -> Markup:
    """A value to be copied as it is."""
    return tag("code", text)


def _line(text: str) -> list[Markup]:
    return [tag("p", text, class_="rl-quiet")] if text else []


def _drawn(picture: Tree | Thinking) -> Markup:
    return thoughts.draw(picture) if isinstance(picture, Thinking) else tree_html.draw(picture)


def _folded(picture: Tree | Thinking) -> Markup:
    if isinstance(picture, Thinking):
        text = "".join(token for chunk in picture.chunks for token in chunk.tokens)
        what = f"{len(picture.rounds)} rounds"
    else:
        text = "".join(token.text for token in picture.trunk.tokens)
        what = f"{len(picture.paths) - 1} branches"
    return tag("details", tag("summary", f"{picture.title}, {what}: …{text[-70:]}"), _drawn(picture))
