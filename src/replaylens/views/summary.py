"""The notebook view of a run, a branch or an engine: some facts, then pictures."""

from collections.abc import Mapping, Sequence

from markupsafe import Markup

from replaylens.views import draw, thoughts
from replaylens.views.boards import cylinder
from replaylens.views.data import Fill
from replaylens.views.html import fragment, tag
from replaylens.views.pictures import Tree
from replaylens.views.thoughts import Thinking

MAX_TREES = 12
"""limit per output"""
Facts = Mapping[str, str | int | float]


def one_picture(facts: Facts, picture: Tree | Thinking) -> str:
    """The facts, then one picture."""
    return fragment(fact_list(facts), _drawn(picture))


def folded_pictures(facts: Facts, pictures: Sequence[Tree | Thinking], rest: str = "") -> str:
    """The facts, then folded pictures, then a line about those not shown."""
    return fragment(fact_list(facts), *map(_folded, pictures), *_line(rest))


def cache_and_pictures(facts: Facts, used: int, pages: int, pictures: Sequence[Tree], rest: str = "") -> str:
    """The fill of the KV cache next to the facts, then folded pictures."""
    cache = tag("div", cylinder(Fill(used), pages), class_="rl-picture")
    return fragment(tag("div", cache, fact_list(facts), class_="rl-head"), *map(_folded, pictures), *_line(rest))


def fact_list(facts: Facts) -> Markup:
    """Names and values as a definition list."""
    return tag(
        "dl", *(part for name, value in facts.items() for part in (tag("dt", name), tag("dd", value))), class_="rl-facts"
    )


def code(text: str) -> Markup:
    """A value to copy verbatim."""
    return tag("code", text)


def _line(text: str) -> list[Markup]:
    return [tag("p", text, class_="rl-quiet")] if text else []


def _drawn(picture: Tree | Thinking) -> Markup:
    return thoughts.draw(picture) if isinstance(picture, Thinking) else draw.draw_tree(picture)


def _folded(picture: Tree | Thinking) -> Markup:
    if isinstance(picture, Thinking):
        text = "".join(token for chunk in picture.chunks for token in chunk.tokens)
        what = f"{len(picture.rounds)} rounds"
    else:
        text = "".join(token.text for token in picture.trunk.tokens)
        what = f"{len(picture.paths) - 1} branches"
    return tag("details", tag("summary", f"{picture.title}, {what}: …{text[-70:]}"), _drawn(picture))
