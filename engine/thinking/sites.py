"""The sites of a model that thinks: those of its backbone and those of its thoughts."""

from replaylens.engine.model.config import ModelConfig
from replaylens.engine.model.sites import Site, SiteTable
from replaylens.engine.thinking.thoughts import FULL_SITE
from replaylens.engine.thinking.thoughts import LETTERS as THOUGHT_LETTERS


class ThinkingSites(SiteTable):
    """S, T, C and Z also select the sites of thoughts, except whole distributions, which are selected by name."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        for name in THOUGHT_LETTERS:
            self.sites[name] = Site(name, None, (config.d_model,), ())

    def letter(self, letter: str) -> list[str]:
        thoughts = [name for name, own in THOUGHT_LETTERS.items() if own == letter and name != FULL_SITE]
        return [*super().letter(letter), *thoughts]

    def in_order(self) -> list[str]:
        return [*super().in_order(), *THOUGHT_LETTERS]
