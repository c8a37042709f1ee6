"""`Pieces`: the rows of a shard's sites as they were captured, branch by branch, joined only when somebody asks for a tensor.

Files and digests take the pieces one after another. Joining them first would copy every byte of a dump into fresh memory,
which costs more than computing the rows on a GPU.
"""

from collections.abc import Iterator, Mapping
from itertools import groupby

import torch
from torch import Tensor

_LARGE = 1 << 17
"""bytes; smaller pieces are joined with their neighbours, because handling each of them costs more than the copy"""


class Pieces(Mapping[str, Tensor]):
    """Tensors [rows, ...] by site."""

    def __init__(self, pieces: Mapping[str, list[Tensor]]) -> None:
        """Precondition: every site has at least one piece, and nobody changes them."""
        self._pieces = {site: _small_ones_joined(some) for site, some in pieces.items()}
        self._own: set[str] = set()
        """sites whose rows are shared with nobody"""

    def __getitem__(self, site: str) -> Tensor:
        """All rows of a site, which the caller may change: they are shared with this object alone."""
        if site not in self._own:
            self._pieces[site] = [torch.cat(self._pieces[site])]
            self._own.add(site)
        return self._pieces[site][0]

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)

    def pieces(self, site: str) -> list[Tensor]:
        return self._pieces[site]


def pieces_of(tensors: Mapping[str, Tensor], site: str) -> list[Tensor]:
    """The contiguous pieces of a site in order, of which there is at least one."""
    some = tensors.pieces(site) if isinstance(tensors, Pieces) else [tensors[site]]
    return [piece.contiguous() for piece in some]


def _small_ones_joined(pieces: list[Tensor]) -> list[Tensor]:
    """Large pieces stay as they are; those between them are joined."""
    joined: list[Tensor] = []
    for small, some in groupby(pieces, key=_is_small):
        members = list(some)
        joined += [torch.cat(members)] if small and len(members) > 1 else members
    return joined


def _is_small(piece: Tensor) -> bool:
    return piece.numel() * piece.element_size() < _LARGE
