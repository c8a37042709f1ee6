# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 6. Coming from TransformerLens
#
# Names, `run_with_cache`, `ActivationCache` and hook functions are the ones you know (TransformerLens 4; the older names are
# aliases). An engine adds branches, rollback, dumps and bitwise determinism. Captured rows carry no
# autograd graph: `branch.gradients` computes gradients, and training stays there.
#
# **What to expect.** A bridge loaded into an engine; the same values under the same names, up to rounding; the cache's own
# methods; a hook function and the `Edit` that does the same, with the same effect; a shared prefix with several continuations;
# the activations of generated tokens without a second run; a dump read back as an `ActivationCache`.
#
# Nothing is downloaded; most of the time is the import of transformer_lens. With `MODEL = "smollm2"` it runs on SmolLM2-135M,
# after `replaylens fetch smollm2`.

# %%
import tempfile
import warnings
from pathlib import Path

import matplotlib.pyplot as plt
import torch

import replaylens as rl
from replaylens.weights import loading

MODEL = "coin-plain"  # or "smollm2"
torch.manual_seed(0)
model = rl.Engine.load(MODEL)
bridge = loading.bridge(loading.hugging_face(model.model))  # or your own TransformerBridge
engine = rl.Engine.load(bridge)
story = "A coin's state is {}. Alice flips, then Bob flips, then Carol flips. What's the state, step by step? A: Alice flips:"
tokens = model.to_tokens([story.format("heads"), story.format("tails")])

# %% [markdown]
# ## The same names, the same values

# %%
with torch.no_grad():
    their_logits, theirs = bridge.run_with_cache(tokens)
logits, cache = engine.run_with_cache(tokens)
names = list(cache.keys())
common = [name for name in names if name in theirs.cache_dict and theirs[name].shape == cache[name].shape]
apart = max((cache[name] - theirs[name]).abs().max().item() for name in common)
print(f"{len(common)} of {len(names)} names in common; largest difference {apart:.1e}")
print(f"logits: {(logits - their_logits).abs().max():.1e}; type: {type(cache).__module__}.{type(cache).__name__}")
print([name for name in names if name.startswith("blocks.2")])

# %% [markdown]
# All of them, in order of the pass: the values differ in their last bits, because the sums are added in another order.

# %%
size = [theirs[name].abs().median().item() for name in common]
off = [(cache[name] - theirs[name]).abs().max().item() for name in common]
figure, axis = plt.subplots(figsize=(7, 2.8), layout="constrained")
axis.semilogy(size, ".", color="tab:blue", label="median value")
axis.semilogy([max(x, 1e-9) for x in off], ".", color="tab:orange", label="largest difference (equal: at the bottom)")
axis.set(xlabel="activations, in order of the pass", ylim=(5e-10, 1e3))
legend = axis.legend(loc="upper right", ncols=2)

# %% [markdown]
# An unknown name is an error that lists the nearest ones.

# %%
try:
    engine.run_with_cache(tokens, "blocks.2.hook_rezid_pre")
except rl.errors.UnknownSite as error:
    print(error)

# %% [markdown]
# The cache's methods work on it, and `names_filter` and `pos_slice` are as you know them.

# %%
print("resid_post by short name:", torch.equal(cache["resid_post", 2], cache["blocks.2.hook_out"]))
print("accumulated_resid:", tuple(cache.accumulated_resid(layer=3).shape))
print("attention rows sum to 1:", bool((cache["pattern", 0].sum(-1) - 1).abs().max() < 1e-5))
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    directions = cache.logit_attrs(cache.decompose_resid(), tokens=tokens[:, -1])
apart = (directions - theirs.logit_attrs(theirs.decompose_resid(), tokens=tokens[:, -1])).abs().max()
print(f"logit_attrs: {tuple(directions.shape)}, {apart:.1e} from the bridge's")
print(warned[0].message)
_, last = engine.run_with_cache(tokens, lambda name: name.endswith("mlp.hook_out"), pos_slice=-1)
print({name: tuple(value.shape) for name, value in last.items() if name.startswith("blocks.1")})

# %% [markdown]
# A name that goes in comes out, also on a branch. `engine(tokens)` returns logits or the loss.

# %%
branch = engine.prompt(tokens[0], sites=["blocks.1.hook_resid_post", "blocks.1.attn.q.hook_in"])
print(branch.activations.keys())
print("same bits:", torch.equal(branch.activations["blocks.1.hook_resid_post"], cache["blocks.1.hook_out"][0]))
print(f"loss: {(engine(tokens, return_type='loss') - bridge(tokens, return_type='loss')).abs():.1e} apart")

# %% [markdown]
# ## Hooks, and what to use instead
#
# `run_with_hooks` is as you know it, and hook functions work on a fork. The engine cannot know what a function computes, so
# such a branch is not certified. An `Edit` is data: it has a hash, shares KV up to the first edited position, and can be dumped
# and replayed. Activation patching, ablation and steering vectors are edits.

# %%
direction = torch.randn(engine.config.d_model)
path = tokens[0].tolist()


def add(value, hook):
    return value + direction


with torch.no_grad():
    reference = bridge.run_with_hooks(tokens[:1], fwd_hooks=[("blocks.1.hook_resid_pre", add)])[0, -1]
ours = engine.run_with_hooks(tokens[:1], fwd_hooks=[("blocks.1.hook_resid_pre", add)])[0, -1]
print(f"run_with_hooks: {(ours - reference).abs().max():.1e} from the bridge's")
root = engine.prompt(path, sites=["unembed.hook_out"])
(hooked,) = root.fork(hooks=[("blocks.1.hook_resid_pre", add)])
(edited,) = root.fork(edits=[rl.Edit("blocks.1.hook_resid_pre", "add", direction)])
engine.generate([hooked, edited], 1)
for name, branch in {"hook": hooked, "edit": edited}.items():
    own = branch.activations["unembed.hook_out"][len(path) - 1]
    print(f"{name}: {(own - reference).abs().max():.1e} from run_with_hooks, certified {branch.certified}")
print(f"without either: {(logits[0, -1] - reference).abs().max():.1f} away")

# %% [markdown]
# The next token's logits under the edit, against those of `run_with_hooks` (on the diagonal) and of the model left alone.

# %%
edited_logits = edited.activations["unembed.hook_out"][len(path) - 1]
figure, axis = plt.subplots(figsize=(4, 3.6), layout="constrained")
axis.plot(logits[0, -1], edited_logits, ".", color="lightgrey", label="model left alone")
axis.plot(reference, edited_logits, ".", color="tab:blue", label="run_with_hooks")
axis.set(xlabel="logit", ylabel="logit with the Edit")
legend = axis.legend()

# %% [markdown]
# ## What is new
#
# A prefix is computed once and continued as often as you like. The activations of generated tokens are there without running
# the text again, and have the bits that `run_with_cache` gives for the finished text.

# %%
root = engine.prompt(path, sites="STC")
forks = root.fork(3)
engine.generate(forks, 12, sampling=[rl.Sampling(temperature=1.0, seed=seed) for seed in range(3)], final=True)
for fork in forks:
    _, again = engine.run_with_cache(fork.tokens)
    same = all(torch.equal(again[site][0], fork.activations[site]) for site in fork.activations.sites())
    new, sites = fork.length - root.length, len(fork.activations.sites())
    print(f"{new} new tokens, {sites} sites; the same bits in a run over the whole: {same}")

# %% [markdown]
# Dumps return `ActivationCache`s too: load stored activations without the dataset, and go on with your own code.

# %%
run = model.replay(rl.tasks.get("coin")(flips=(2, 4)).examples(4), sites="STC")
stored = run.save(Path(tempfile.mkdtemp()) / "dump").to_activation_cache(2)
print({name: tuple(value.shape) for name, value in stored.items() if name.startswith("blocks.3")})
print("as captured:", torch.equal(stored["blocks.3.hook_in"][0], run[2].activations["blocks.3.hook_in"]))

# %% [markdown]
# | you write | here | |
# |---|---|---|
# | `bridge.run_with_cache(tokens)` | `engine.run_with_cache(tokens)` | the same `ActivationCache`, canonical bits |
# | `bridge.run_with_hooks(tokens, fwd_hooks=...)` | the same, or `branch.fork(edits=...)` | edits can be dumped and verified |
# | `bridge.generate(...)`, then a second run for the activations | `branch.generate(n)`, `branch.activations` | one pass |
# | padding and attention masks for prompts of several lengths | `engine.prompts([...])` | no padding anywhere |
# | `torch.save(cache)` | `run.save(folder)` | labels, digest, resumable |
# | `metric.backward()` with hooks | `branch.gradients(metric, sites="STC")` | certified; rows carry no autograd graph |

# %%
print("gradients:", cache["blocks.0.hook_in"].requires_grad)

# %% [markdown]
# All names with their shapes: `engine.sites.in_order()`. [What differs, and what is not there](../docs/bridges.md).
# More: [the contract](../docs/determinism.md),
# [dumps](../docs/dumps.md), [probes](../docs/probes.md), [views](../docs/branches.md).
