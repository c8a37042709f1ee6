# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 5. A real model: SmolLM2-135M
#
# The same verbs on a pretrained model: 30 layers, 576 wide, a vocabulary of 49152. **It must be fetched once** (93 MB): run
# `replaylens fetch smollm2` in a shell, or `make smollm2`. Without it the next cell says so and stops.
#
# **What to expect.** The model knows a capital. It answers coin flips at about chance (models of this size are at 47 to 51 %
# in Wei et al.'s table), so the question is not what it answers but what its activations hold. A small dump, replayed to the
# same bits; a sweep with its controls. Samples are small here, so intervals are wide and little can be shown; larger ones are
# in [docs/results.md](../docs/results.md). One to two minutes on two cores.

# %%
import tempfile
from pathlib import Path

import pandas as pd
import torch
from IPython.display import display

import replaylens as rl
from replaylens.engine.dump.verify import verify
from replaylens.engine.model import hub

if not hub.is_fetched():
    raise SystemExit("SmolLM2-135M is not fetched yet. Run this once, then run the notebook again:  replaylens fetch smollm2")
engine = rl.Engine.load(hub.model_folder())
print(f"{engine.config.num_layers} layers, d_model {engine.config.d_model}, vocabulary {engine.config.vocab_size}")

# %% [markdown]
# ## It speaks, and every layer can be asked
#
# Hover a token to see the logit lens of all 30 layers, read through the model's own final norm and unembedding (the plain
# logit lens is known to be unreliable in early layers).

# %%
capital = engine.prompt("The capital of France is", sites="Z")
capital.generate(2, drafter="ngram").tree()

# %%
ids = capital.activations["Z.top_ids"][capital.root_length - 1, :, 0]  # the likeliest next token by layer, before " Paris"
print(", ".join(f"{layer} {engine.text.token(int(token))!r}" for layer, token in enumerate(ids) if layer >= 20))

# %% [markdown]
# As a figure: the rank of *Paris* among all tokens, at every layer and position. 0 is the likeliest.

# %%
rl.lens(engine, "The capital of France is", token=" Paris").plot("rank")

# %% [markdown]
# ## The same bits, alone and together

# %%
ask = rl.tasks.get("coin")(rendering="wei", verb="turn", flips=(1, 4))
prompts = [example.prompt for example in ask.examples(6)]
print(prompts[0])
site = "blocks.29.hook_in"
alone = [engine.prompt(prompt, sites=[site]) for prompt in prompts[:3]]
together = engine.prompts(prompts, sites=[site])[:3]
print("states equal:", [torch.equal(a.activations[site], b.activations[site]) for a, b in zip(alone, together, strict=True)])
print("KV equal:    ", [torch.equal(a.kv(), b.kv()) for a, b in zip(alone, together, strict=True)])

# %% [markdown]
# ## What it answers
#
# "Flips the coin" may mean a random toss to a pretrained model; "turns the coin over" cannot. The more likely of the two words
# *yes* and *no* counts as the answer, whatever else the model would rather have said. Half of the stories have the answer yes,
# half no: a model that always says the same is right in half of them.


# %%
def balanced(task, n):
    """Different stories, half of them with the answer yes."""
    unique = {example.root: example for example in task.examples(40 * n)}.values()
    return [e for answer in (" yes", " no") for e in [e for e in unique if e.answer == answer][: n // 2]]


def answers(task, n):
    words = {engine.text.encode(word, special=False)[0]: 1e4 for word in (" yes", " no", " Yes", " No")}
    run = engine.replay(balanced(task, n), max_new=1, sampling=rl.Sampling(logit_bias=words))
    said = [engine.text.decode(result.tokens[result.num_prompt :]).lower() for result in run]
    right = sum(word == result.example.answer for word, result in zip(said, run, strict=True))
    return {"stories": len(run), "right": right, "said yes": said.count(" yes")}


words = {"flip": "flips the coin", "turn": "turns the coin over"}
asked = [(verb, flips) for verb in words for flips in (1, 2, 4)]
lines = [answers(rl.tasks.get("coin")(rendering="wei", verb=verb, flips=flips), 16) for verb, flips in asked]
told = pd.DataFrame(lines, index=pd.MultiIndex.from_tuples([(words[v], n) for v, n in asked], names=["wording", "actors"]))
axis = told["right"].unstack("wording").plot.bar(ylim=(0, 16), rot=0, figsize=(5, 2.8), ylabel="right answers of 16")
axis.axhline(8, color="black", linewidth=0.8, linestyle=":")  # one answer to everything is right in half of them
display(told)

# %% [markdown]
# ## What its activations hold
#
# Six of thirty layers of the residual stream, bfloat16 on disk. `parity`: whether the coin was turned an odd number of times.
# Read the controls before the accuracy.

# %%
layers = (0, 6, 12, 18, 24, 29)
run = engine.replay(ask.examples(60), sites=[f"blocks.{layer}.hook_in" for layer in layers], drafter="ngram", max_new=1)
dump = run.save(Path(tempfile.mkdtemp()) / "smollm2", dtype="bfloat16")
print(f"digest {dump.digest}")
print(verify(dump.url, engine, sample=0.1))

# %%
report = rl.probes.sweep(dump, "parity", sites=list(dump.sites), positions=["step:2", "query"], estimators="ridge")
print(report)

# %%
report.table.query("~known_zero").set_index(["position", "site"])[
    ["accuracy", "low", "high", "majority", "token_identity", "bag_of_tokens", "control_task", "p_family"]
].round(2)

# %%
report.heatmap()

# %% [markdown]
# After two actors parity can be read, but mind the control task: a random label per kind of context is read well there too,
# since two actions make few contexts. At the end of the question, where the answer would need it, these stories show nothing.
# That is a negative result with a wide interval, not a proof of absence.
#
# ## A fork
#
# One text states the truth, the other does not; the model continues from both. The prefix is computed once.

# %%
root = engine.prompt("A coin is heads up. Alice turns the coin over. Now the coin is")
honest, lying = root.fork(2)
engine.force_all([honest, lying], [" tails up. Bob turns the coin over.", " heads up. Bob turns the coin over."])
for branch in engine.generate([honest, lying], 8, drafter="ngram"):
    print(branch.text[len(root.text) :])

# %%
root.tree()

# %% [markdown]
# The whole study, with ten times as many stories, chain of thought, steering and a report page: `make smollm2`. Any other
# Hugging Face folder of a supported family loads the same way. Next:
# [6_coming_from_transformerlens](6_coming_from_transformerlens.ipynb).
