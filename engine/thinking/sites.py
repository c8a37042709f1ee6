"""The sites of a model that thinks: those of its backbone, and those of its thoughts."""

import re

from replaylens.engine.model.config import ModelConfig
from replaylens.engine.model.sites import LETTERS, Site, SiteTable
from replaylens.engine.thinking.thoughts import FULL_SITE
from replaylens.engine.thinking.thoughts import LETTERS as THOUGHT_LETTERS


class ThinkingSites(SiteTable):
    """S, T, C and Z choose the sites of thoughts, too, but for whole distributions. `letter` counts layers: they are none."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        for name in THOUGHT_LETTERS:
            self.sites[name] = Site(name, None, (config.d_model,), ())

    def select(self, sites: str | list[str] | tuple[str, ...]) -> tuple[tuple[str, ...], bool]:
        names, lens = super().select(sites)
        words = re.split(r"[,\s]+", sites.strip()) if isinstance(sites, str) else list(sites)
        letters = {letter for word in words if word and set(word) <= set(LETTERS) for letter in word}
        chosen = {*names} | {name for name, letter in THOUGHT_LETTERS.items() if letter in letters and name != FULL_SITE}
        return tuple(name for name in self.in_order() if name in chosen), lens

    def in_order(self) -> list[str]:
        return [*super().in_order(), *THOUGHT_LETTERS]
