"""`page`: sections put together to one self-contained HTML file. It loads nothing and runs no script but its own.

The file's own policy forbids every request and every script whose hash it does not name, so that text which slipped
through the escaping could do nothing.
"""

import base64
import gzip
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

import replaylens
from replaylens.engine.pictures.html import asset, join, script_json, style, tag, void

MAX_TREES = 300
"""examples whose trees a page holds unless told otherwise"""
PER_BLOCK = 32
"""fragments that are unpacked together"""


@dataclass(frozen=True)
class Section:
    """A part of the page with a place in its menu. `key` is a word of ours, never of a user."""

    key: str
    title: str
    body: Markup


def assemble(title: str, lead: str, sections: Sequence[Section], data: Markup) -> str:
    """The whole file. `data`: blocks for the page's script. The same content gives the same bytes."""
    code = asset("view.js") + asset("report.js", "replaylens.views")
    allowed = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{allowed}'; base-uri 'none'; form-action 'none'"
    )
    head = [
        void("meta", charset="utf-8"),
        void("meta", http_equiv="Content-Security-Policy", content=policy),
        void("meta", name="viewport", content="width=device-width, initial-scale=1"),
        void("meta", name="generator", content=f"replaylens {replaylens.__version__}"),
        tag("title", title),
        style(),
        Markup(f"<style>{asset('report.css', 'replaylens.views')}</style>"),
    ]
    menu = tag("nav", *(tag("a", section.title, href=f"#{section.key}") for section in sections), _theme_button())
    top = tag("header", tag("h1", title), tag("p", lead, class_="rl-quiet"), menu)
    parts = [tag("section", tag("h2", s.title), s.body, id=s.key) for s in sections]
    needs = tag("noscript", tag("p", "The examples need this page's script; certificate and heatmaps are complete without."))
    body = tag("body", top, needs, tag("main", *parts), data, Markup(f"<script>{code}</script>"), class_="rl-view rl-page")
    return f"<!DOCTYPE html>\n{tag('html', tag('head', *head), body, lang='en')}\n"


def _theme_button() -> Markup:
    return tag("button", "light / dark", type="button", id="rl-theme")


def json_block(key: str, data: object) -> Markup:
    """Data for the page's script."""
    return tag("script", script_json(data), type="application/json", id=key)


def packed_blocks(fragments: Iterable[str]) -> Markup:
    """Many fragments, compressed; the page unpacks those that are looked at."""
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
