"""HTML elements as `Markup`, which is safe to show. Everything that is not `Markup` is escaped.

Fragments are self-contained: they include style and script and load nothing. On a page that strips scripts, all content
remains readable.
"""

import json
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from markupsafe import Markup, escape

from replaylens.engine.memory.tree import TokenState

# ---- palette ---------------------------------------------------------------------------------------------------------
# The look of each token state, the same in notebooks, on the report page, in SVG files and in a terminal.
#
# The fills are distinguishable with every common kind of colour blindness, and have the same dark text on light and dark
# pages. Pending tokens are checkered. No state is marked by colour alone: each also has a mark. A token of which nothing is
# promised has a look of its own, `ORDINARY`, whatever its state: it must not look like an accepted one.


class Look(NamedTuple):
    """One state's appearance."""

    fill: str
    """background of the token's text; for pending tokens, the lighter squares"""
    mark: str
    """one character for the state, without colour"""
    ascii: str
    """the mark in ASCII, for trees as plain text"""
    colour: str
    """terminal colour, one of the basic sixteen, which every terminal distinguishes"""
    accent: str = ""
    """terminal text style"""

    @property
    def terminal(self) -> str:
        """A rich style."""
        return f"{self.accent} black on {self.colour}".strip()


INK = "#14171a"
"""text on any fill"""
CHECK = "#b9c0c7"
"""the darker squares of a pending token"""
OTHER = "#aab1b8"
"""other requests"""
SAND = "#dcb98a"
"""states added to a chunk"""
LOOKS = {
    TokenState.PROMPT: Look("#86b6f2", "·", ".", "bright_blue"),
    TokenState.ACCEPTED: Look("#a8ecc9", "✓", "+", "bright_green"),
    TokenState.PENDING: Look("#f4f5f6", "▒", "~", "white", "bold"),
    TokenState.DRAFT: Look("#f3d535", "?", "?", "bright_yellow", "italic"),
    TokenState.REJECTED: Look("#ee8a72", "✗", "x", "bright_red", "strike"),
}
ORDINARY = "ordinary"
"""the kind of tokens that no canonical pass has verified"""
KINDS = {state.value: look for state, look in LOOKS.items()} | {ORDINARY: Look("#a08fb0", "○", "o", "magenta")}
"""the look of each kind of token"""

NAMES = {ORDINARY: "ordinary: not verified"}
"""legends of kinds whose name does not say enough"""


def kind_of(state: TokenState, why: str = "") -> str:
    """The kind of a token, a key of KINDS and a CSS class. `why`: why nothing is promised of it; empty: it is certified."""
    return ORDINARY if why and state in (TokenState.ACCEPTED, TokenState.PENDING) else state.value


PAGES = {
    "light": {
        "page": "#ffffff",
        "panel": "#f5f7f9",
        "text": "#14171a",
        "quiet": "#59636e",
        "line": "#8a949e",
        "deep": "#0b4f8f",
        "deep-ink": "#ffffff",
    },
    "dark": {
        "page": "#14171a",
        "panel": "#1f2429",
        "text": "#eceff2",
        "quiet": "#a3adb8",
        "line": "#6f7a85",
        "deep": "#8ec5ff",
        "deep-ink": "#14171a",
    },
}
"""colours of everything except tokens; `deep` is the end of the heatmap scale"""


def css_variables(theme: str) -> str:
    """The palette as CSS custom properties: `--rl-prompt`, `--rl-page`, ..."""
    fills = {kind: look.fill for kind, look in KINDS.items()} | {
        "ink": INK,
        "check": CHECK,
        "other": OTHER,
        "sand": SAND,
    }
    return "".join(f"--rl-{name}:{colour};" for name, colour in (fills | PAGES[theme]).items())


def svg_style() -> str:
    """The style of a standalone picture, in plain colours, for viewers without custom properties."""
    rules = "".join(f".{kind}{{fill:{look.fill}}}" for kind, look in KINDS.items())
    fixed = f"{rules}.ink{{fill:{INK}}}.check{{fill:{CHECK}}}.other{{fill:{OTHER}}}.edge{{stroke:{INK}}}.sand{{fill:{SAND}}}"
    fixed += ".arrow{fill:none}"
    fixed += f".cross{{fill:none;stroke:{INK};stroke-width:1;opacity:.55}}"
    return f"{fixed}{_page_rules('light')}@media (prefers-color-scheme:dark){{{_page_rules('dark')}}}"


def _page_rules(theme: str) -> str:
    page = PAGES[theme]
    return (
        f".page{{fill:{page['page']}}}.text{{fill:{page['text']}}}.quiet{{fill:{page['quiet']}}}.line{{stroke:{page['line']}}}"
    )


# ---- html ------------------------------------------------------------------------------------------------------------

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
def asset(name: str, package: str = "replaylens.views") -> str:
    """The text of a style or script in a package."""
    return files(package).joinpath("assets", name).read_text(encoding="utf-8")


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
