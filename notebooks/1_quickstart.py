# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 1. Quickstart
#
# Load a model, replay coin-flip stories, look at one, write a dump, verify it, probe it.
#
# **What to expect.** The embedded model answers nearly all stories correctly and writes down the coin's state step by step. A
# smaller model drafts for it and is often wrong; rejected drafts are kept and branch off the path. The coin's state can be
# read from the activations where a step is decided, far above every control. At the end of the question sixty stories do not
# show it, which does not prove that it is absent.
#
# Nothing is downloaded. Set `MODEL = "smollm2"` for SmolLM2-135M, after `replaylens fetch smollm2`. It does not answer in the
# task's form, which counts as wrong, and the likelier of its yes and no is right at about chance; so the question is what its
# activations hold, of which 24 stories show little ([larger samples](../docs/results.md#smollm2-135m)).

# %%
import tempfile
from pathlib import Path

import replaylens as rl
from replaylens.dumps.verify import verify

MODEL = "coin-plain"  # or "smollm2"
engine = rl.Engine.load(MODEL)
if MODEL == "coin-plain":
    task = rl.tasks.get("coin")(flips=(2, 6), rendering="steps")
    stories, sites, layers, drafter = 60, "STCZ", None, "model"
else:  # thirty layers: fewer stories, and five layers to probe; and there is no smaller model that could draft
    task = rl.tasks.get("coin")(flips=(2, 4), rendering="wei", verb="turn")
    stories, sites, layers, drafter = 24, "STC", range(0, 30, 6), "lens"
example = task.example(1)
print(example.prompt + example.completion)

# %% [markdown]
# ## Replay
#
# `sites` selects what is captured at every layer: S (residual stream), T (attention output), C (MLP output) and Z (logit
# lens). `drafter` selects who drafts ahead. It changes the speed and the rejected branches, never the answer.

# %%
run = engine.replay(task.examples(stories), sites=sites, drafter=drafter, window=4)
print(f"{run.accuracy:.0%} right, {run.acceptance:.0%} of drafts accepted")
print(run[1].text)

# %% [markdown]
# Hover a token to see its position, log-probability, entropy and the logit lens of every layer. The prompt is blue, accepted
# tokens are green, rejected ones red.

# %%
run.tree(1)

# %% [markdown]
# Every row of the path is captured, and rejected branches have rows of their own.

# %%
resid = run[1].activations["blocks.2.hook_in"]
wrong = next(branch for result in run for branch in result.rejected)
print(f"path: {len(run[1].tokens)} tokens, rows {tuple(resid.shape)}")
print(f"rejected: {engine.text.decode(wrong.tokens[wrong.fork_position :])!r} at position {wrong.fork_position},", end=" ")
print(f"rows {tuple(wrong.activations['blocks.2.hook_in'].shape)}")

# %% [markdown]
# ## Dump
#
# A dump is a folder of safetensors and Parquet with one line per row: token, branch, labels. Its digest identifies all of its
# content. `verify` replays every example and compares every bit.

# %%
dump = run.save(Path(tempfile.mkdtemp()) / "coin")
verdict = verify(dump.url, engine, sample="all")
print(f"digest {dump.digest}")
print(verdict)

# %%
dump.to_pandas()[["example", "branch", "position", "text", "token_state", "face", "logprob"]].query("example == 1").tail(12)

# %% [markdown]
# ## Probe
#
# Splits are by root prompt: all branches of a prompt are on one side. Every score comes with its controls, an interval over
# roots and a correction over the whole grid. `step` is where a step is decided, `query` the prompt's last token.

# %%
report = rl.probes.sweep(dump, "face", sites="STC", layers=layers, positions=["step", "query"], estimators="ridge")
print(report)

# %% [markdown]
# A white dot marks what is shown over the whole grid.

# %%
report.heatmap()

# %%
report.curves()

# %% [markdown]
# A probe that reads a state does not show that the model uses it: `rl.probes.steer`, `ablate` and `interchange` test that
# ([probes](../docs/probes.md)). Next: what the digest is worth, in [2_determinism](2_determinism.ipynb).
