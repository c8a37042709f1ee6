"""Results of the workbench and of attribution for the report page: their figures as SVG, and their tables."""

import re
from collections.abc import Iterable
from io import StringIO
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from markupsafe import Markup

from replaylens.engine.errors import BadRequest, EngineBug
from replaylens.engine.pictures.html import join, script, style, tag
from replaylens.engine.request.values import items, shown

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SALT = "replaylens"
"""names of shapes in an SVG are hashes: with a fixed salt, equal figures give equal bytes"""
_DROPPED = re.compile(r"<metadata>.*?</metadata>|<defs>\s*<style.*?</defs>|<!--.*?-->", re.S)


@runtime_checkable
class Reportable(Protocol):
    """What a verb returns: lens, patch, path_patch, ablate, steer, attention, and the two attributions."""

    @property
    def frame(self) -> "pd.DataFrame": ...

    def plot(self) -> "Figure | Axes": ...

    def _repr_html_(self) -> str: ...


def checked(results: Any) -> tuple[Reportable, ...]:
    """The results; BadRequest names what is none."""
    found = items("results", results, "a list of results, such as [patch(...)]")
    if bad := [each for each in found if isinstance(each, type) or not isinstance(each, Reportable)]:
        raise BadRequest(
            f"Invalid results: {shown(bad[0])} is no result. Give what lens, patch, ablate, steer or attention return."
        )
    return tuple(found)


def draw_all(results: Iterable[Reportable]) -> Markup:
    """All results of the page, in order."""
    return join(_draw(result) for result in results)


def _draw(result: Reportable) -> Markup:
    """One result: its figure, and below it the view that a notebook shows."""
    kind = re.sub(r"(?<!^)([A-Z])", r" \1", type(result).__name__.removesuffix("Result")).lower()
    view = result._repr_html_().removeprefix(style()).removesuffix(script())
    drawn: Any = result.plot()
    figure = tag("figure", svg(getattr(drawn, "figure", drawn)), class_="rl-figure")  # of axes, their figure
    about = tag("p", repr(result), class_="rl-quiet")
    return join([tag("h3", kind), about, figure, tag("details", tag("summary", "Table"), Markup(view))])


def svg(figure: "Figure") -> Markup:
    """The figure as an SVG element that loads nothing. Equal figures give equal bytes.

    Nothing is clipped, because clipping refers to shapes by URL, which the page's checks forbid.
    """
    import matplotlib

    for artist in figure.findobj():
        artist.set_clip_on(False)
        artist.set_rasterized(False)
    made = StringIO()
    with matplotlib.rc_context({"svg.hashsalt": _SALT, "svg.fonttype": "path"}):
        figure.savefig(made, format="svg", metadata={"Date": None, "Creator": None})
    text = _DROPPED.sub("", made.getvalue())
    text = re.sub(r'<g id="[^"]*"', "<g", text[text.index("<svg") :])
    if "url(" in text or "data:" in text or "<image" in text:
        raise EngineBug("A figure holds an image, which a page cannot load. Draw it with shapes.")
    return Markup(text.replace("<svg", '<svg style="max-width:100%;height:auto;stroke-linejoin:round;background:white"', 1))
