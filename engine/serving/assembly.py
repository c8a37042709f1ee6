"""The parts of an engine that its options choose: drafters, and the decode steps that a device takes on its own."""

from functools import partial

from replaylens.engine.loop.drafters import (
    Drafter,
    ForcedDrafter,
    LensDrafter,
    ModelDrafter,
    NgramDrafter,
    SelfDrafter,
    TreeDrafter,
)
from replaylens.engine.loop.loop import Loop
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.passes.runner import Runner
from replaylens.engine.proof import certificates


def make_drafters(runner: Runner, draft_model: Decoder | None, layer: int | None, width: int) -> dict[str, Drafter]:
    """All drafters of an engine by name; `model` only if there is a model to draft with.

    layer  where the early-exit drafters leave the model; None: in the middle
    width  sibling chains of the `tree` drafter
    """
    config = runner.model.config
    layer = max(1, config.num_layers // 2) if layer is None else layer
    drafters: dict[str, Drafter] = {
        "self": SelfDrafter(),
        "lens": LensDrafter(runner, layer),
        "ngram": NgramDrafter(),
        "tree": TreeDrafter(runner, layer, width),
        "forced": ForcedDrafter(),
    }
    if draft_model is not None:
        certificate = certificates.certificate_for(draft_model)
        own = Runner(draft_model, certificate, runner.pool.num_pages, runner.pool.page_size)
        drafters["model"] = ModelDrafter(own, config.vocab_size)
    return drafters


def decode_on_device(loop: Loop) -> None:
    """Mutates: the loop decodes in bursts and its passes are CUDA graphs. Precondition: the model is on CUDA."""
    from replaylens.engine.lens import cuda as cuda_lens
    from replaylens.engine.passes.bursts import Bursts
    from replaylens.engine.passes.graphs import PassGraphs

    runner = loop.runner
    loop.bursts = Bursts(runner, partial(cuda_lens.columns, runner.model))
    runner.graphs = PassGraphs(runner.model, runner.cache, loop.bursts.spare.pages[0], runner.vectors)
