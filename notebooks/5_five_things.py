# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 5. Five things you do every week
#
# Logit lens, activation patching, steering, resampling, ablation of heads: one call each, on prompts of your own.
#
# **What to expect.** Each section has the call and its figure. Every result is a small object with plain data (`.frame` or
# tensors), a figure (`.plot()`) and a view for notebooks. The numbers of a cell do not depend on what else is computed: they
# are bit for bit those of the same edit made alone.
#
# Nothing is downloaded: the embedded model knows coins and little else. Set `MODEL = "smollm2"` for SmolLM2-135M and prompts
# about names, food and animals, after `replaylens fetch smollm2` (93 MB). The [quickstart](../docs/quickstart.md) shows these
# calls with the figures of SmolLM2.

# %%
from collections import Counter

import pandas as pd
from IPython.display import display

import replaylens as rl

MODEL = "coin-plain"  # or "smollm2"
engine = rl.Engine.load(MODEL)
if MODEL == "smollm2":
    clean = "When Mary and John went to the store, John gave a drink to"
    corrupt = "When Mary and John went to the store, Mary gave a drink to"
    names = (" Mary", " John")
    contrast = (["I love this, it is wonderful", "What a great day"], ["I hate this, it is horrible", "What an awful day"])
    told = ["I went to the new restaurant and the food was"]
    layers, strengths = [10, 15], [-3, -1.5, 1.5, 3]
    question = "Question: Which animal says meow?\nAnswer: The animal that says meow is the"
    prompts = [clean, "When Sarah and David went to the park, David gave a ball to"]
    pairs = [(" Mary", " John"), (" Sarah", " David")]
else:
    clean = "A coin's state is heads. Alice flips, then Bob does not flip. What's the state? A:"
    corrupt = "A coin's state is tails. Alice flips, then Bob does not flip. What's the state? A:"
    names = (" tails", " heads")
    contrast = tuple(
        [f"A coin's state is {face}. {name} does not flip. What's the state? A:" for name in ("Alice", "Bob", "Carol")]
        for face in ("heads", "tails")
    )
    told = ["A coin's state is heads. Frank flips, then Grace does not flip. What's the state, step by step? A:"]
    layers, strengths = [2, 3], [-0.6, -0.3, 0.3, 0.6]
    question = "A coin's state is heads. Alice flips, then Bob"
    prompts = [clean, "A coin's state is heads. Frank flips. What's the state? A:"]
    pairs = [names, names]

# %% [markdown]
# ## 1. Logit lens
#
# What would each layer say next? Rows are layers, from the embedding at the bottom to the output at the top; the colour is the
# probability of the layer's likeliest token, and its word is in the cell.

# %%
seen = rl.lens(engine, clean, token=names[0])
seen.plot()

# %% [markdown]
# The same object holds entropy, KL divergence and the rank of a token at every layer and position.

# %%
last = seen.frame[seen.frame["position"] == seen.frame["position"].max()]
last[["layer", "top", "probability", "entropy", "rank"]].round(3)

# %% [markdown]
# ## 2. Activation patching
#
# The two prompts differ in one word. Which activations of the clean one, copied into the corrupt one, bring back its answer?
# 0: the patch changes nothing. 1: it restores the whole logit difference. All cells are forks of one prompt.

# %%
patched = rl.patch(engine, clean, corrupt, metric=names)
patched.plot()

# %% [markdown]
# In `coin-plain` the state moves in two hops: from the word that differs to the flip, where it is updated, and from there to
# the last token. In SmolLM2 the name that differs carries the answer alone up to layer 19, and the last token from layer 24 on.
#
# ## 3. Steering
#
# A vector from contrasting texts, added to the residual stream at two layers with several strengths. Perplexity is that of the
# continuation under the unsteered model: it shows where a strength breaks the text.

# %%
steered = rl.steer(engine, contrast, told, layers=layers, strengths=strengths, n=14)
display(steered)

# %%
steered.plot()

# %% [markdown]
# `coin-plain`, steered towards heads at layer 2, states heads at a strength of 0.3; twice as much breaks the text. At layer 3,
# the weaker vector changes no word.
#
# ## 4. Resampling
#
# How sure is the model of its continuation? Fork the prompt, and sample every fork with a seed of its own. All forks are
# generated together, and each gets the tokens that it would get alone, so a single one can be repeated later from its seed.

# %%
root = engine.prompt(question)
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
# Every head of every layer set to zero, one at a time, on each prompt, ranked by the mean effect on the logit difference.

# %%
ablated = rl.ablate(engine, prompts, metric=pairs, heads=True)
ablated.plot()

# %%
ablated.frame.head(6).round(3)

# %% [markdown]
# The calls with all their options are in [docs/workbench.md](../docs/workbench.md); how long they take next to TransformerLens
# on the same weights, in [docs/performance.md](../docs/performance.md).
