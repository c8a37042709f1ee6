"""How tokens and figures are shown, wherever they are: words of tokens, visible blanks, figures for notebooks."""

from functools import cache, lru_cache
from io import BytesIO
from textwrap import wrap
from typing import TYPE_CHECKING
from unicodedata import category

from replaylens.engine.model.text import Text

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
        """A figure that displays itself, whatever pyplot's backend."""

        def _repr_png_(self) -> bytes:
            buffer = BytesIO()
            self.savefig(buffer, format="png", dpi=DPI)
            return buffer.getvalue()

    return Picture


def picture(width: float, height: float) -> "Figure":
    """An empty figure, so many inches wide and high. Its background is not transparent: dark pages show it as light ones do."""
    return _picture()(figsize=(width, height), layout="constrained", facecolor="white")


def plain(text: str) -> str:
    """Text for matplotlib: a dollar sign would start a formula."""
    return visible(text).replace("$", r"\$")


def wrapped(text: str, inches: float, size: float = 10) -> str:
    """Text in lines that fit into a length at a font size, such as the label of a colour bar beside a low figure."""
    return "\n".join(wrap(text, max(8, int(inches * 72 / (size * _CHARACTER)))))
