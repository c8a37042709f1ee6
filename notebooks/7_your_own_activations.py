# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 7. Your own activations
#
# Sweeps, controls, splits and statistics do not need an engine. Hand over arrays from any model, with the group of each row,
# and get the same report.
#
# **What to expect.** A recurrent network, trained here in a few seconds, that keeps track of a coin; its activations as arrays,
# swept over layers and positions; why groups are required, and what happens with wrong ones; a TransformerLens cache, whose
# labels the tokens alone explain; a probe that is saved, and one score from plain arrays.
#
# Nothing is downloaded. With `MODEL = "smollm2"` the cache is one of SmolLM2-135M, after `replaylens fetch smollm2`.

# %%
import tempfile

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import nn

import replaylens as rl
from replaylens.probes import ProbeRows, cross_validate, fit_probe, sweep
from replaylens.weights import loading

MODEL = "coin-plain"  # or "smollm2"

# %% [markdown]
# ## A model from elsewhere
#
# Two GRU layers read words. Some words flip a coin, others do nothing. After every word the network says which side is up.

# %%
torch.manual_seed(0)
words = np.array(["flip", "turn", "wait", "hold", "look"])
flips = torch.tensor([1, 1, 0, 0, 0])


class Tracker(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(words), width)
        self.layers = nn.ModuleList([nn.GRU(width, width, batch_first=True) for _ in range(2)])
        self.out = nn.Linear(width, 2)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        states = [self.embed(tokens)]
        for layer in self.layers:
            states.append(layer(states[-1])[0])
        return self.out(states[-1]), states


model = Tracker()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for _ in range(200):
    tokens = torch.randint(len(words), (64, 12))
    loss = nn.functional.cross_entropy(model(tokens)[0].transpose(1, 2), flips[tokens].cumsum(1) % 2)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

tokens = torch.randint(len(words), (240, 12))
side = flips[tokens].cumsum(1) % 2  # [prompts, positions]
with torch.no_grad():
    logits, states = model(tokens)
print(f"right after every word: {(logits.argmax(-1) == side).float().mean():.2f}")

# %% [markdown]
# ## Rows from arrays
#
# One row per word. `groups` says which prompt a row belongs to; `positions` and `tokens` are optional, and switch on the
# positions `last` and `7`, and the controls by tokens. A site is a name or a pair of name and layer.

# %%
prompts, length = tokens.shape


def make_rows(states: list[torch.Tensor]) -> ProbeRows:
    return ProbeRows.of_arrays(
        {("gru", layer): state.reshape(prompts * length, -1) for layer, state in enumerate(states)},
        {"side": np.array(["heads", "tails"])[side.reshape(-1)]},
        groups=np.repeat(np.arange(prompts), length),
        positions=np.tile(np.arange(length), prompts),
        tokens=words[tokens.reshape(-1)],
    )


with torch.no_grad():
    rows, untrained = make_rows(states), make_rows(Tracker()(tokens)[1])
print(rows)
report = sweep(rows, "side", positions=[7, "last"], untrained=untrained)
print(report)

# %% [markdown]
# Layer 0 is the embedding: it knows the last word, not the side. What a control needs and the rows do not have is named in the
# report: known zeros come from a task. The untrained model is a network with random weights that read the same words.

# %%
report.heatmap()

# %%
columns = ["layer", "position", "accuracy", "low", "high", "majority", "bag_of_tokens", "shuffled", "untrained"]
report.table[columns].round(2)

# %% [markdown]
# `cross_validate` gives one score from plain arrays, without controls. The predictions are those of the sweep.

# %%
found = cross_validate(states[2][:, -1], side[:, -1], groups=np.arange(prompts))
print(f"{found.metric} {found.score}, in {len(found.split)} folds")

# %% [markdown]
# ## Why groups are required
#
# Rows of one document are alike. Here they hold nothing but noise, which the rows of a document share, and a label that was
# drawn for each document. A probe that has seen other rows of a document recognises it.

# %%
random = np.random.default_rng(0)
documents = np.repeat(np.arange(60), 4)
noise = random.normal(size=(60, 64))[documents] + 0.1 * random.normal(size=(240, 64))
drawn = random.integers(2, size=60)[documents]
scores = {
    name: cross_validate(noise, drawn, groups).score
    for name, groups in {"the documents as groups": documents, "every row on its own": np.arange(240)}.items()
}
for name, score in scores.items():
    print(f"{name}: accuracy {score}")

# %%
figure, axis = plt.subplots(figsize=(5, 1.8), layout="constrained")
for place, score in enumerate(scores.values()):
    axis.plot([score.low, score.high], [place, place], color="tab:blue", linewidth=3)
    axis.plot(score.value, place, "o", color="tab:blue")
axis.set(xlim=(0, 1.02), ylim=(-0.6, 1.6), xlabel="accuracy on pure noise; chance is 0.5")
axis.set_yticks([0, 1], list(scores))
chance = axis.axvline(0.5, color="black", linestyle=":", linewidth=0.8)

# %% [markdown]
# So there is no default.

# %%
try:
    ProbeRows.of_arrays(noise, drawn)
except rl.probes.errors.BadRows as error:
    print(error)

# %% [markdown]
# ## A TransformerLens cache
#
# `of_cache` takes an `ActivationCache` with its tokens. Every prompt is a group. Hook names are mapped to S, T and C (residual
# stream, attention output, MLP output) where they correspond. The label, whether the number of the token is even, is read off
# the residual stream; but the token itself says as much, so nothing is shown.

# %%
bridge = loading.bridge(loading.hugging_face(rl.Engine.load(MODEL).model))  # or your own TransformerBridge
prompt = torch.randint(4, 40, (120, 10))
mask = torch.arange(10) < torch.randint(6, 11, (120, 1))  # padding on the right
with torch.no_grad():
    _, cache = bridge.run_with_cache(prompt)
rows = ProbeRows.of_cache(cache, prompt, {"even": prompt % 2 == 0}, mask=mask)
print(rows, rows.source.sites())
report = sweep(rows, "even", sites="S", positions="last", estimators="mass-mean")
print(report)

# %% [markdown]
# ## One probe, to keep
#
# `fit_probe` fits one direction on all rows of a position. It is saved as safetensors and JSON, with the digest of the arrays.

# %%
probe = fit_probe(rows, "even", site="S", layer=0, position="all", estimator="mass-mean")
folder = f"{tempfile.mkdtemp()}/even"
probe.save(folder)
again = rl.probes.LinearProbe.load(folder)
print(again)
print("the same direction:", bool((again.weight == probe.weight).all()), "| digest of the arrays:", len(probe.source["digest"]))

# %% [markdown]
# pandas frames (`ProbeRows.of_pandas`) and Hugging Face datasets (`ProbeRows.of_dataset`) work alike. What works without a
# task, and what is refused: [probes, your own activations](../docs/probes.md#your-own-activations).
