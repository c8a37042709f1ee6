"""Elements of a page as `Markup`: HTML that is safe to show. Whatever is not `Markup` already is escaped on its way in.

The fragments stand alone: style and script travel with them, nothing is loaded from anywhere, and without scripts (on a
page that strips them) everything is still there to be read.
"""

import json
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from typing import Any

from markupsafe import Markup, escape

from replaylens.engine.pictures.palette import css_variables

Value = str | int | float | bool | None
Attributes = dict[str, Value]


def tag(name: str, /, *children: str | int | float, **attributes: Value) -> Markup:
    """One element. `class_` is class, `data_x` is data-x; an attribute of None or False is left out, True has no value."""
    return Markup(f"<{name}{''.join(map(_attribute, attributes.items()))}>{join(children)}</{name}>")


def void(name: str, /, **attributes: Value) -> Markup:
    """An element that has no content, such as input."""
    return Markup(f"<{name}{''.join(map(_attribute, attributes.items()))}>")


def join(children: Iterable[str | int | float]) -> Markup:
    """One after the other."""
    return Markup().join(map(escape, children))


def _attribute(item: tuple[str, Value]) -> str:
    name, value = item[0].removesuffix("_").replace("_", "-"), item[1]
    if value is None or value is False:
        return ""
    return f" {name}" if value is True else f' {name}="{escape(str(value))}"'  # str: markup is no attribute either


def script_json(data: Any) -> Markup:
    """Data for a script element: JSON in which nothing can end the element or open a comment."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    safe = text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    return Markup(safe)


@cache
def asset(name: str, package: str = "replaylens.engine.pictures") -> str:
    """A style or script that ships with a package of ours."""
    return files(package).joinpath("assets", name).read_text()


@cache
def style() -> Markup:
    """The style element of every view. Light or dark as the system, or as a notebook's or the page's own theme says."""
    dark = css_variables("dark")
    themes = [
        f".rl-view{{{css_variables('light')}color-scheme:light}}",
        f"@media (prefers-color-scheme:dark){{.rl-view{{{dark}color-scheme:dark}}}}",
        f"[data-jp-theme-light=true] .rl-view,.vscode-light .rl-view,[data-theme=light].rl-view{{{css_variables('light')}"
        f"color-scheme:light}}",
        f"[data-jp-theme-light=false] .rl-view,.vscode-dark .rl-view,[data-theme=dark].rl-view{{{dark}color-scheme:dark}}",
    ]
    return Markup(f"<style>{''.join(themes)}{asset('view.css')}</style>")


@cache
def script() -> Markup:
    """The script element of every view; running it again does no harm."""
    return Markup(f"<script>{asset('view.js')}</script>")


def fragment(*children: str) -> str:
    """What a notebook shows: a view with its style and script."""
    return join([style(), tag("div", *children, class_="rl-view"), script()])
