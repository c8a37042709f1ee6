"""`Hooked`: the five jobs of `benchmarks.workbench` by TransformerLens: caches, hook functions and its `generate`."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from replaylens import Engine

Cell = tuple[int, int]


class Hooked:
    """A bridge, and prompts of equal length as its tokens."""

    def __init__(self, bridge: Any, engine: Engine, prompts: Sequence[str], answers: Sequence[tuple[str, str]]) -> None:
        """answers  of each prompt: the tokens whose logit difference is measured"""
        self.bridge, self.layers = bridge, engine.config.num_layers
        self.tokens = torch.tensor([engine.tokens_of(text) for text in prompts])  # [prompts, positions]
        self.answers = torch.tensor([engine.token_ids_of(pair) for pair in answers])  # [prompts, 2]

    @torch.no_grad()
    def lens(self) -> Tensor:
        """The log-probability of the first answer at every layer and position of the first prompt: [layers + 1, positions]."""
        names = [f"blocks.{layer}.hook_in" for layer in range(self.layers)] + [f"blocks.{self.layers - 1}.hook_out"]
        _, cache = self.bridge.run_with_cache(self.tokens[:1], names_filter=names)
        stacked = torch.cat([cache[name] for name in names])
        found = self.bridge.unembed(self.bridge.ln_final(stacked)).log_softmax(-1)
        found.topk(5, -1)
        (found.exp() * found).sum(-1)
        (found[-1].exp() * (found[-1] - found)).sum(-1)
        return found[..., self.answers[0, 0]]

    @torch.no_grad()
    def patched(self, cells: Sequence[Cell]) -> list[float]:
        """The first prompt's residual stream put into the second, at each (layer, position)."""
        _, cache = self.bridge.run_with_cache(self.tokens[:1], names_filter=lambda name: name.endswith("hook_in"))
        made = []
        for layer, position in cells:

            def put(value: Tensor, hook: Any, position: int = position) -> Tensor:
                value = value.clone()
                value[:, position] = cache[hook.name][:, position]
                return value

            made += self._differences(self.tokens[1:2], self.answers[:1], f"blocks.{layer}.hook_in", put)
        return made

    @torch.no_grad()
    def patched_together(self, layers: Sequence[int]) -> list[list[float]]:
        """The same grid, all positions of a layer in one batch: for each layer, one value per position."""
        _, cache = self.bridge.run_with_cache(self.tokens[:1], names_filter=lambda name: name.endswith("hook_in"))
        count = self.tokens.shape[1]
        tokens, answers = self.tokens[1:2].expand(count, -1), self.answers[:1].expand(count, -1)

        def put(value: Tensor, hook: Any) -> Tensor:
            value, each = value.clone(), torch.arange(count)
            value[each, each] = cache[hook.name][0]
            return value

        return [self._differences(tokens, answers, f"blocks.{layer}.hook_in", put) for layer in layers]

    @torch.no_grad()
    def ablated(self, cells: Sequence[Cell], together: bool = False) -> list[list[float]]:
        """For each (layer, head): every prompt without that head, one prompt at a time or in one batch."""
        made = []
        for layer, head in cells:

            def zero(value: Tensor, hook: Any, head: int = head) -> Tensor:
                value = value.clone()
                value[:, :, head] = 0
                return value

            size = len(self.tokens) if together else 1
            pieces = zip(self.tokens.split(size), self.answers.split(size), strict=True)
            made.append([x for t, a in pieces for x in self._differences(t, a, f"blocks.{layer}.attn.hook_z", zero)])
        return made

    @torch.no_grad()
    def steered(self, layer: int, vector: Tensor, strengths: Sequence[float], n: int) -> list[float]:
        """Continuations of the first prompt under each strength, and their log-probabilities without steering."""
        made = []
        for strength in strengths:

            def add(value: Tensor, hook: Any, amount: float = strength) -> Tensor:
                value = value.clone()
                value[:, -1] += amount * vector  # the prompt's last token, then each token that is generated
                return value

            with self.bridge.hooks(fwd_hooks=[(f"blocks.{layer}.hook_in", add)]):
                out = self._generated(self.tokens[:1], n, do_sample=False)
            logprobs = self.bridge(out)[0, :-1].log_softmax(-1)
            made.append(float(logprobs[torch.arange(out.shape[1] - 1), out[0, 1:]][-n:].sum()))
        return made

    @torch.no_grad()
    def resampled(self, count: int, n: int) -> Tensor:
        """Several sampled continuations of the first prompt, in one batch: [count, tokens]."""
        return self._generated(self.tokens[:1].repeat(count, 1), n, do_sample=True)

    def _generated(self, tokens: Tensor, n: int, do_sample: bool) -> Tensor:
        options = dict(stop_at_eos=False, do_sample=do_sample, prepend_bos=False, return_type="tokens", verbose=False)
        made: Tensor = self.bridge.generate(tokens, n, **options)
        return made

    def _differences(self, tokens: Tensor, answers: Tensor, site: str, change: Callable[[Tensor, Any], Tensor]) -> list[float]:
        logits = self.bridge.run_with_hooks(tokens, fwd_hooks=[(site, change)])[:, -1]
        right, wrong = logits.gather(1, answers).unbind(1)
        return [float(x) for x in right - wrong]
