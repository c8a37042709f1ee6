"""`Stops`: whether the last token completes a stop string. It decodes the end of the text only, however long the text is."""

import re
from collections.abc import Sequence

from replaylens.engine.memory.past import Path
from replaylens.engine.model.text import Text

_FIRST_TRY = 16
_MARGIN = 4
"""characters after the first token of an end that may differ from the whole text's: a dropped space, the marks of a word
piece, the rest of a character that began before"""
_HALF = "\ufffd"
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


class Stops:
    """Finds stop strings in generated text.

    A token is the start of an end of the text if the text from it on does not depend on earlier tokens, except for a few
    characters. Two kinds of token are not: a piece of a character (it decodes to U+FFFD), and a byte of a byte fallback, whose
    whole run decodes to characters only if all of it is valid. Tokenizers of unknown kind have no such tokens, so their text
    is decoded from its beginning.
    """

    def __init__(self, text: Text) -> None:
        self.text = text
        self._pieces: dict[int, str] = {}

    def completed(self, stops: Sequence[str], path: Path, first: int) -> bool:
        """Whether the last token of `path` completes a stop string in the text of the tokens from `first` on.

        A stop string that is already in earlier, forced text does not count.
        """
        longest, size, end = max(map(len, stops)), _FIRST_TRY, len(path)
        while True:
            start = self._start(path, first, end - size - longest)
            tokens = path[start:]
            # Half a character is no text yet.
            text, before = self.text.decode(tokens), self.text.decode(tokens[:-1]).rstrip(_HALF)
            if start == first or len(before) - longest + 1 >= len(self._pieces[path[start]]) + _MARGIN:
                return any(stop in text[max(0, len(before) - len(stop) + 1) :] for stop in stops)
            size *= 2

    def _start(self, path: Path, first: int, latest: int) -> int:
        """The last position up to `latest` whose token starts an end of the text; `first` if there is none."""
        if not self.text.local:
            return first
        return next((at for at in range(latest, first, -1) if self._piece(path[at])), first)

    def _piece(self, token: int) -> str:
        """The text of a token that starts an end; empty for others."""
        if token not in self._pieces:
            piece = self.text.token(token)
            apart = piece.startswith(_HALF) or _BYTE.fullmatch(self.text.name(token)) is not None
            self._pieces[token] = "" if apart else piece
        return self._pieces[token]
