"""Assembles sections into one self-contained HTML file, which loads nothing and runs only its own script.

Its content security policy forbids every request, and every script except one with the given hash, so that unescaped text
could do no harm.
"""

import base64
import gzip
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

import replaylens
from replaylens.engine.display import stamped
from replaylens.views.html import asset, join, script_json, style, tag, void

NO_STYLE = Markup()
MADE_BY = "replaylens "
"""how a page names its generator, before the version"""
MAX_TREES = 300
"""default limit of examples with trees"""
PER_BLOCK = 32
"""fragments per compressed block"""


@dataclass(frozen=True)
class Section:
    """A part of the page with an entry in its menu. `key` must not come from user data."""

    key: str
    title: str
    body: Markup


def assemble(
    title: str,
    lead: Sequence[str],
    sections: Sequence[Section],
    data: Markup,
    *,
    code: str = "",
    more_style: Markup = NO_STYLE,
    source: str = "",
) -> str:
    """The whole file. `data`: blocks for the page's script. Equal content gives equal bytes.

    lead              paragraphs before the menu, the first of them for everybody
    code, more_style  of views that are not on every page
    source            identifier of the dump that it shows
    """
    code = asset("view.js") + asset("report.js", "replaylens.views") + code
    head = [
        void("meta", name="generator", content=f"{MADE_BY}{replaylens.__version__}"),
        tag("title", title),
        style(),
        Markup(f"<style>{asset('report.css', 'replaylens.views')}</style>"),
        more_style,
    ]
    menu = tag("nav", *(tag("a", section.title, href=f"#{section.key}") for section in sections), _theme_button())
    first = [tag("p", text, class_="rl-quiet" if number else "rl-first") for number, text in enumerate(lead)]
    top = tag("header", tag("h1", title), *first, menu)
    parts = [tag("section", tag("h2", s.title), s.body, id=s.key) for s in sections]
    needs = tag("noscript", tag("p", "The examples need this page's script; certificate and heatmaps do not."))
    return document(code, head, [top, needs, tag("main", *parts), data], "rl-view rl-page", source)


def document(code: str, head: Sequence[Markup], body: Sequence[Markup], look: str, source: str = "", connects: str = "") -> str:
    """A file whose policy allows no request and no script except `code`, which runs last. It carries its identifier.

    look      classes of the body
    source    identifier of the result that it shows
    connects  what it may send requests to: a page that is served, to its server
    """
    allowed = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{allowed}'; base-uri 'none'; form-action 'none'"
    ) + (f"; connect-src {connects}" if connects else "")
    first = [
        void("meta", charset="utf-8"),
        void("meta", http_equiv="Content-Security-Policy", content=policy),
        void("meta", name="viewport", content="width=device-width, initial-scale=1"),
    ]
    last = Markup(f"<script>{code}</script>")
    text = f"<!DOCTYPE html>\n{tag('html', tag('head', *first, *head), tag('body', *body, last, class_=look), lang='en')}\n"
    return stamped(text.encode(), source).decode()


def _theme_button() -> Markup:
    return tag("button", "light / dark", type="button", id="rl-theme")


def json_block(key: str, data: object) -> Markup:
    """Data for the page's script."""
    return tag("script", script_json(data), type="application/json", id=key)


def packed_blocks(fragments: Iterable[str]) -> Markup:
    """Many fragments, compressed; the page unpacks a block when it is viewed."""
    blocks, waiting = [], []
    for fragment in fragments:
        waiting.append(fragment)
        if len(waiting) == PER_BLOCK:
            blocks.append(_pack(waiting))
            waiting = []
    return join([*blocks, *([_pack(waiting)] if waiting else [])])


def _pack(fragments: list[str]) -> Markup:
    packed = gzip.compress(json.dumps(fragments, ensure_ascii=False).encode(), mtime=0)
    return tag("script", base64.b64encode(packed).decode(), type="text/plain", class_="rl-block", data_count=len(fragments))
