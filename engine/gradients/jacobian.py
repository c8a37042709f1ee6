"""The Jacobian lens: what a layer's residual stream does, to first order, to the final one at the same position.

J[l] is the mean over texts and positions of d final / d stream[l], and the lens reads a row x of layer l as

    mean(final) + J[l] (x - mean(stream[l]))

through the final norm and the unembedding. Nothing is trained: the map says what the model itself makes of a small change,
where a tuned lens says what predicts the output best. It is a `TunedLens`, and goes wherever one does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tqdm.auto import tqdm

from replaylens.engine.errors import BadRequest
from replaylens.engine.gradients.branches import differentiable, tape_of
from replaylens.engine.lens.lens import TunedLens, unembed_hash
from replaylens.engine.model.text import Prompt
from replaylens.engine.request.values import as_bool, as_int, as_list, verb
from replaylens.engine.serving.core import Core
from replaylens.engine.terminal import hidden


@verb
def fit_jacobian_lens(
    engine: Core,
    texts: Sequence[Prompt],
    *,
    first: int = 1,
    centred: bool = True,
    progress: bool = False,
) -> TunedLens:
    """Fit a Jacobian lens by gradients over texts. A function of its arguments: on a CPU, with the same bits on every machine.

    texts    prompts of any form. Each takes d_model backward passes over its tokens, for all layers and positions together
    first    the first position that counts. The stream of a text's first token is unlike all others in most models
    centred  False: read J[l] x alone, without the means

    Raises NoGradient for a model without gradients, such as one with attention sinks.

    >>> from replaylens import Engine, lens
    >>> engine = Engine.load("coin-plain")
    >>> fitted = fit_jacobian_lens(engine, ["A coin's state is heads. Alice flips."])
    >>> fitted.weight.shape, lens(engine, "A coin's state is heads.", tuned=fitted).kl.shape
    (torch.Size([4, 128, 128]), torch.Size([5, 6]))
    """
    given = as_list("texts", texts, "a list of texts, token ids or chats")
    first, centred = as_int("first", first, 0), as_bool("centred", centred)
    streams = engine.sites.per_layer("S")
    asked = differentiable(engine, streams[:-1])
    if asked != tuple(streams[:-1]):
        raise BadRequest(f"The streams of this model are not one per layer: {', '.join(asked)}.")
    paths = [engine.tokens_of(text) for text in given]
    if short := [number for number, path in enumerate(paths) if len(path) <= first]:
        raise BadRequest(
            f"Text {short[0]} has {len(paths[short[0]])} tokens, none from position {first} on. Give longer texts."
        )
    if not paths:
        raise BadRequest("No texts. Give at least one.")
    width, count = engine.config.d_model, sum(len(path) - first for path in paths)
    jacobian = torch.zeros(len(asked), width, width, dtype=torch.float64)
    means = torch.zeros(len(streams), width, dtype=torch.float64)
    with tqdm(total=width * len(paths), unit="pass", disable=hidden(progress)) as bar:
        for path in paths:
            tape = tape_of(engine, path, (), asked)
            picked = range(first, len(path))
            lines: Any = engine.lock.alone(tape.own_jacobians, picked, lambda _: bar.update())
            jacobian += lines.double()
            values = [*(tape.value(site) for site in asked), tape.forward.residual.cpu()]
            means += torch.stack([value[first:].double().sum(0) for value in values])
    jacobian, means = jacobian / count, means / count
    bias = means[-1] - torch.einsum("led,ld->le", jacobian, means[:-1]) if centred else torch.zeros_like(means[:-1])
    weight = jacobian - torch.eye(width, dtype=torch.float64)
    return TunedLens(weight.float(), bias.float(), unembed_hash(engine.model))
