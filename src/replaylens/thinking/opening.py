"""How `Engine.load` opens a Thinking-States model. Plain models are recognised without importing anything of this folder."""

from typing import Any

from torch import nn

from replaylens.engine.model.decoder import Decoder
from replaylens.engine.model.text import Text
from replaylens.tasks.tokenizer import WordTokenizer
from replaylens.weights import loading, zoo
from replaylens.weights.opening import Opened, load_text, thinks


def opened_kind(source: Any) -> Opened | None:
    """An embedded name, a located folder or a ThinkingDecoder; None for other sources."""
    if not thinks(source) and (isinstance(source, Decoder) or not isinstance(source, nn.Module)):
        return None
    from replaylens.thinking import model as thinking
    from replaylens.thinking.core import ThinkingEngine

    if isinstance(source, str):
        folder = zoo.CHECKPOINTS / source
        model, text = thinking.load(folder), Text(WordTokenizer.load(folder / zoo.TOKENIZER_FILE))
    elif isinstance(source, loading.LocatedModel):
        model, text = thinking.load(source.path, revision=source.revision), load_text(source.path)
    elif isinstance(source, thinking.ThinkingDecoder):
        model, text = source, Text(None)
    else:
        return None
    return Opened("a Thinking-States model", model, text, ThinkingEngine)
