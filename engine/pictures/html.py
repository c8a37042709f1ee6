"""HTML elements as `Markup`, which is safe to show. Everything that is not `Markup` is escaped.

Fragments are self-contained: they include style and script and load nothing. On a page that strips scripts, all content
remains readable.
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
    """One element. `class_` becomes class, `data_x` becomes data-x. Attributes that are None or False are left out; True
    gives an attribute without a value."""
    return Markup(f"<{name}{''.join(map(_attribute, attributes.items()))}>{join(children)}</{name}>")


def void(name: str, /, **attributes: Value) -> Markup:
    """An element without content, such as input."""
    return Markup(f"<{name}{''.join(map(_attribute, attributes.items()))}>")


def join(children: Iterable[str | int | float]) -> Markup:
    """Concatenate, escaping what is not `Markup`."""
    return Markup().join(map(escape, children))


def _attribute(item: tuple[str, Value]) -> str:
    name, value = item[0].removesuffix("_").replace("_", "-"), item[1]
    if value is None or value is False:
        return ""
    return f" {name}" if value is True else f' {name}="{escape(str(value))}"'  # str: markup in attributes is escaped, too


def script_json(data: Any) -> Markup:
    """Data for a script element: JSON that cannot end the element or open a comment."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    safe = text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    return Markup(safe)


@cache
def asset(name: str, package: str = "replaylens.engine.pictures") -> str:
    """The text of a style or script in a package."""
    return files(package).joinpath("assets", name).read_text()


@cache
def style() -> Markup:
    """The style element of every view. Light or dark follows the system, or the theme of the notebook or page."""
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
    """The script element of every view. Running it twice is safe."""
    return Markup(f"<script>{asset('view.js')}</script>")


def fragment(*children: str) -> str:
    """A view for a notebook, with its style and script."""
    return join([style(), tag("div", *children, class_="rl-view"), script()])
