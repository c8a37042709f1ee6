# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 8. Five things you do every week
#
# Logit lens, activation patching, steering, resampling, ablation of heads: one call each, on SmolLM2-135M and on prompts of
# your own. **The model must be fetched once** (93 MB): run `replaylens fetch smollm2` in a shell. Without it the next cell
# says so and stops.
#
# **What to expect.** Each section has the call, its figure and how long it takes next to TransformerLens on the same weights.
# Every result is a small object with plain data (`.frame` or tensors), a figure (`.plot()`) and a view for notebooks. The
# numbers of a cell do not depend on what is computed beside it: they are bit for bit those of the same edit made alone. Two
# to three minutes on two cores.

# %%
import json
from collections import Counter
from pathlib import Path

import pandas as pd
from IPython.display import display

import replaylens as rl
from replaylens.engine.model import hub

if not hub.is_fetched():
    raise SystemExit("SmolLM2-135M is not fetched yet. Run this once, then run the notebook again:  replaylens fetch smollm2")
engine = rl.Engine.load("smollm2")
clean = "When Mary and John went to the store, John gave a drink to"
corrupt = "When Mary and John went to the store, Mary gave a drink to"
names = (" Mary", " John")

# %% [markdown]
# ## 1. Logit lens
#
# What would each layer say next? Rows are layers, from the embedding at the bottom to the output at the top; the colour is the
# probability of the layer's likeliest token, and its word is in the cell.

# %%
seen = rl.lens(engine, clean, token=" Mary")
seen.plot()

# %% [markdown]
# The same object holds entropy, KL divergence and the rank of a token at every layer and position.

# %%
seen.frame.query("position == 13 and layer % 5 == 0")[["layer", "top", "probability", "entropy", "rank"]].round(3)

# %% [markdown]
# ## 2. Activation patching
#
# The two prompts differ in one name. Which activations of the clean one, copied into the corrupt one, bring back the answer
# *Mary*? 0: the patch changes nothing. 1: it restores the whole logit difference. All 31 x 14 cells are forks of one prompt.

# %%
patched = rl.patch(engine, clean, corrupt, metric=names)
patched.plot()

# %% [markdown]
# Up to layer 19 the name that differs carries the answer alone; from layer 24 on, the last token does.
#
# ## 3. Steering
#
# A vector from contrasting texts, added to the residual stream at two layers with several strengths. Perplexity is that of the
# continuation under the unsteered model: it shows where a strength breaks the text.

# %%
contrast = (["I love this, it is wonderful", "What a great day"], ["I hate this, it is horrible", "What an awful day"])
told = ["I went to the new restaurant and the food was"]
steered = rl.steer(engine, contrast, told, layers=[10, 15], strengths=[-3, -1.5, 1.5, 3], n=14)
display(steered)

# %%
steered.plot()

# %% [markdown]
# ## 4. Resampling
#
# How sure is the model of its continuation? Fork the prompt, and sample every fork with a seed of its own. All forks are
# generated together, and each gets the tokens that it would get alone, so a single one can be repeated later from its seed.

# %%
root = engine.prompt("Question: Which animal says meow?\nAnswer: The animal that says meow is the")
rollouts = root.resample(48, max_new=2)
answers = Counter(text.strip().split(" ")[0].strip(".,\n") for text in rollouts.frame["text"])
counts = pd.Series(answers, name="continuations").sort_values()
axis = counts.tail(8).plot.barh(xlabel="continuations of 48", figsize=(5, 2.6))

# %%
again = root.resample(8, max_new=2)
print("the eighth of 8 is the eighth of 48:", again.frame["tokens"][7] == rollouts.frame["tokens"][7])

# %% [markdown]
# ## 5. Ablation of heads
#
# Every head of every layer set to zero, one at a time, on each prompt: 270 heads, ranked by their mean effect on the logit
# difference.

# %%
prompts = [clean, "When Sarah and David went to the park, David gave a ball to"]
ablated = rl.ablate(engine, prompts, metric=[(" Mary", " John"), (" Sarah", " David")], heads=True)
ablated.plot()

# %%
ablated.frame.head(6).round(3)

# %% [markdown]
# ## What it costs
#
# The same jobs by TransformerLens: caches, hook functions and its `generate`, on the same weights, one thread, in turns
# (`python -m benchmarks run workbench-cpu`). CPU milliseconds per cell of a grid, or per continuation; a ratio above 1 means
# that replaylens takes less time.

# %%
measured = json.loads(Path("../benchmarks/results/workbench-cpu.json").read_text())
columns = {"what": "job", "ours_ms": "replaylens, ms", "hooks_ms": "TransformerLens, ms", "ratio": "ratio"}
pd.DataFrame(measured["rows"])[list(columns)].rename(columns=columns).set_index("job").round(1)

# %% [markdown]
# The calls with all their options are in [docs/workbench.md](../docs/workbench.md); what was measured, and how, in
# [docs/performance.md](../docs/performance.md).
