"""How tokens and figures are shown: words of tokens, visible blanks, figures, the identifier in a figure's file, and `Citable`:
results that have one."""

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache, cached_property, lru_cache
from io import BytesIO, TextIOBase
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any, NamedTuple
from unicodedata import category
from zlib import crc32

from replaylens.engine.errors import BadRequest
from replaylens.engine.files import write_file
from replaylens.engine.model.text import Text
from replaylens.engine.records import SCHEME, Citation, Fingerprint, Identifier, digest_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# ---- words -----------------------------------------------------------------------------------------------------------

_VISIBLE = {"\n": "⏎", "\t": "⇥", "\r": "␍", "": "∅", "\u00a0": "⍽"}


@lru_cache(1 << 16)
def visible(text: str) -> str:
    """The text with visible marks for line breaks, tabs, control characters, rare spaces and the empty string; for ordinary
    spaces if there is nothing else."""
    if not text:
        return _VISIBLE[""]
    if not text.strip(" "):
        return "␣" * len(text)
    return "".join(c if c.isprintable() else _VISIBLE.get(c, "␣" if category(c) == "Zs" else f"\\u{ord(c):04x}") for c in text)


def word(text: Text, token: int) -> str:
    """A token's text. An <EOS> without text becomes "<eos>"; without a tokenizer, it is the id after a space."""
    if text.tokenizer is None:
        return f" {text.token(token)}"
    return text.token(token) or ("<eos>" if token == text.eos_id else "")


def short(text: str, most: int) -> str:
    """At most so many characters; an ellipsis stands for the rest."""
    return text if len(text) <= most else text[: most - 1] + "…"


# ---- figures ---------------------------------------------------------------------------------------------------------
# Matplotlib figures that show themselves in a notebook, whatever its theme, and keep their words inside their edges.

DPI = 120
_CHARACTER = 0.6
"""mean width of a character, as a share of the font's size"""


@cache
def _picture() -> "type[Figure]":
    """Made late, because matplotlib is imported where it is used."""
    from matplotlib.figure import Figure

    class Picture(Figure):
        """A figure that displays itself, whatever pyplot's backend. Its PNG and SVG files carry their identifier, and replace
        only files that do."""

        source: Callable[[], str] | None = None
        """gives the identifier of the result that it shows"""

        def savefig(self, fname: Any, *, format: str | None = None, metadata: Any = None, **options: Any) -> None:
            """As matplotlib's, without its time stamp and version, so that equal figures of one machine are equal files."""
            import matplotlib

            named = isinstance(fname, str | Path)
            kind = format or (Path(fname).suffix.removeprefix(".").lower() if named else "") or "png"
            drawn = BytesIO()
            if kind not in _STAMPED:
                if not named:
                    return super().savefig(fname, format=format, metadata=metadata, **options)
                super().savefig(drawn, format=kind, metadata=metadata, **options)
                write_file(fname, drawn.getvalue())
                return None
            plain = {"png": {"Software": None}, "svg": {"Date": None, "Creator": None}}[kind]
            with matplotlib.rc_context({"svg.hashsalt": "replaylens"}):
                super().savefig(drawn, format=kind, metadata=plain | (metadata or {}), **options)
            content = stamped(drawn.getvalue(), "" if self.source is None else self.source())
            if named:  # a name without an ending gets one, as in matplotlib
                write_file(fname if Path(fname).suffix else f"{fname}.{kind}", content, is_stamped)
            else:
                fname.write(content.decode() if isinstance(fname, TextIOBase) else content)

        def _repr_png_(self) -> bytes:
            buffer = BytesIO()
            self.savefig(buffer, format="png", dpi=DPI)
            return buffer.getvalue()

    return Picture


def picture(width: float, height: float) -> "Figure":
    """An empty figure, so many inches wide and high. Its background is not transparent: dark pages show it as light ones do."""
    return _picture()(figsize=(width, height), layout="constrained", facecolor="white")


def shows(figure: "Figure", source: Callable[[], str]) -> "Figure":
    """Mutates: the figure's files will name the result that it shows, by its identifier. Returns it."""
    if isinstance(figure, _picture()):
        figure.source = source  # type: ignore[attr-defined]
    return figure


# ---- stamps ----------------------------------------------------------------------------------------------------------
# The identifier of a figure, within its own file: a text chunk of a PNG, an element of an SVG or HTML file. Its digest is the
# SHA-256 of the file without this stamp, so that whoever has the file can check it.

_STAMPED = ("png", "svg", "html")
_PNG = b"\x89PNG\r\n\x1a\n"
_ONE, _AND = rb"replaylens:sha256:[0-9a-f]{64}", " and "
_WORDS = b"(%b)(?: of (%b(?: and %b)*))?" % (_ONE, _ONE, _ONE)
_SVG_STAMP = re.compile(rb'<metadata class="replaylens">' + _WORDS + rb"</metadata>")
_HTML_STAMP = re.compile(rb'<meta name="replaylens" content="' + _WORDS + rb'">')
_CHUNK = b"tEXtreplaylens\x00"


class Stamp(NamedTuple):
    """What a figure's file says, and what it is."""

    identifier: str
    source: str
    """identifier of the result that the figure shows, or of several, as `together` writes them; empty: none is named"""
    digest: str
    """SHA-256 of the file without its stamp; of an intact file, that of `identifier`"""

    @property
    def intact(self) -> bool:
        return Identifier.parse(self.identifier).digest == self.digest

    @property
    def sources(self) -> list[str]:
        """The identifiers of all that is shown."""
        return self.source.split(_AND) if self.source else []


def together(sources: Iterable[str]) -> str:
    """The identifiers of several results, each once, as a stamp names them."""
    return _AND.join(dict.fromkeys(filter(None, sources)))


def stamped(content: bytes, source: str = "") -> bytes:
    """A PNG, SVG or HTML file with its identifier, and those of the results that it shows, if they are known. `source` is
    hashed, too."""
    told = f" of {source}" if source else ""
    words = f"{SCHEME}{_digest(content, source)}{told}".encode()
    if content.startswith(_PNG):
        body = _CHUNK + words
        end = 8 + 25  # the signature, and the header, which is the first chunk
        return content[:end] + len(body[4:]).to_bytes(4) + body + crc32(body).to_bytes(4) + content[end:]
    html, svg = re.search(rb"</head>", content), re.search(rb"<svg[^>]*>", content)
    at = html.start() if html else svg.end() if svg else None
    if at is None:
        raise BadRequest("This is neither a PNG, an SVG nor an HTML file, so there is no place for an identifier.")
    stamp = b'<meta name="replaylens" content="%s">' if html else b'<metadata class="replaylens">%s</metadata>'
    return content[:at] + stamp % words + content[at:]


def stamp_of(content: bytes) -> Stamp | None:
    """The stamp of a figure's file; None if it has none. BadRequest for a PNG that is cut off."""
    if content.startswith(_PNG):
        return _png_stamp(content)
    found = _HTML_STAMP.search(content) or _SVG_STAMP.search(content)
    return None if found is None else _read(found, content[: found.start()] + content[found.end() :])


def is_stamped(content: bytes) -> bool:
    """Whether a file carries a stamp, intact or not: one that we wrote."""
    return _CHUNK in content or any(stamp.search(content) for stamp in (_HTML_STAMP, _SVG_STAMP))


def _png_stamp(content: bytes) -> Stamp | None:
    at = len(_PNG)
    while at < len(content):
        end = at + 12 + int.from_bytes(content[at : at + 4])
        if end > len(content):
            raise BadRequest("The PNG file is cut off. Copy it again.")
        if content[at + 4 : end].startswith(_CHUNK):
            found = re.fullmatch(_WORDS, content[at + 4 + len(_CHUNK) : end - 4])
            return None if found is None else _read(found, content[:at] + content[end:])
        at = end
    return None


def _read(found: re.Match[bytes], rest: bytes) -> Stamp:
    source = (found[2] or b"").decode()
    return Stamp(found[1].decode(), source, _digest(rest, source))


def _digest(content: bytes, source: str) -> str:
    return hashlib.sha256(content + source.encode()).hexdigest()


def plain(text: str) -> str:
    """Text for matplotlib: a dollar sign would start a formula."""
    return visible(text).replace("$", r"\$")


def wrapped(text: str, inches: float, size: float = 10) -> str:
    """Text in lines that fit into a length at a font size, such as the label of a colour bar next to a low figure. Quoted
    tokens stay whole."""
    whole = re.sub(r"'[^']*'", lambda quoted: quoted[0].replace(" ", "\xa0"), text)
    return "\n".join(wrap(whole, max(8, int(inches * 72 / (size * _CHARACTER))))).replace("\xa0", " ")


# ---- results ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, kw_only=True)
class Citable:
    """A result of an engine, as a dataclass: its digest covers every field, and its figures' files name it."""

    made_by: tuple[Fingerprint, ...] = field(default=(), repr=False)
    """of the models that computed it; empty: it was put together by hand"""

    @cached_property
    def digest(self) -> str:
        """SHA-256 of all fields, with the fingerprints of the models: the same wherever the numbers have the same bits."""
        return digest_of([type(self).__name__, _fields(self)])

    @property
    def _what(self) -> str:
        """The result in a few words."""
        return repr(self)

    def cite(self) -> Citation:
        """How to cite the result: text and BibTeX."""
        made = [each.cited for each in self.made_by]
        facts = {name: " and ".join(dict.fromkeys(each[name] for each in made)) for name in made[0]} if made else {}
        whole = self.made_by[0].digest if len(self.made_by) == 1 else None
        check = "the same call on the same model has a result with this digest"
        return Citation(str(Identifier(self.digest)), self._what, check, fingerprint=whole, **facts)

    def _shown(self, figure: "Figure") -> "Figure":
        """Mutates: the figure's files will name this result. Returns it."""
        return shows(figure, lambda: str(Identifier(self.digest)))


def _fields(value: Any) -> dict[str, Any]:
    return {each.name: _content(getattr(value, each.name)) for each in fields(value)}


def _content(value: Any) -> Any:
    """A value as JSON: what has a digest by this, numbers of arrays and tensors by their hash, NaN as a word."""
    if isinstance(found := getattr(value, "digest", None), str):
        return found
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, Set):
        return sorted(map(_content, value), key=digest_of)
    if isinstance(value, Mapping):
        return {str(name): _content(each) for name, each in value.items()}
    if isinstance(value, Sequence):
        return [_content(each) for each in value]
    if is_dataclass(value):
        return _fields(value)
    return _content(value.to_dict("list")) if hasattr(value, "columns") else _hashed(value)


def _hashed(value: Any) -> Any:
    """Dtype, shape and hash of an array or tensor, or a number of NumPy. All NaNs are one: their bits depend on the machine."""
    import numpy as np

    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = (value if value.element_size() > 2 or not value.is_floating_point() else value.float()).numpy()
    if value.ndim == 0 or value.dtype.kind not in "biuf":
        return _content(value.tolist())
    plain = np.where(np.isnan(value), value.dtype.type(np.nan), value) if value.dtype.kind == "f" else value
    return [str(value.dtype), list(value.shape), hashlib.sha256(np.ascontiguousarray(plain).tobytes()).hexdigest()]
