# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 3. Speculative branches
#
# A drafter proposes some tokens ahead, one canonical pass checks them all, and what does not match is rolled back. Elsewhere
# the rejected tokens are discarded. Here they stay in the tree, with activations of their own: counterfactual paths, for free.
#
# **What to expect.** Five drafters, one output. A tree with red branches, and how it came about. Then two questions. Does a
# probe of accepted branches read rejected ones? Mostly, and the exception is telling: it reads what the *text* implies rather
# than what is true. And after a false statement is forced into the chain of thought, does the state follow the text or the
# truth? Mostly the text. Both with few stories, so with wide intervals. At last, recurrent
# states move from one branch to another.
#
# Nothing is downloaded. With `MODEL = "smollm2"`, after `replaylens fetch smollm2`, the calls run on SmolLM2-135M with fewer
# stories. It does not follow the task's format, so the first question cannot be asked of it, only the second.

# %%
import pandas as pd
import torch
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM, logging

import replaylens as rl

MODEL = "coin-plain"  # or "smollm2"
engine = rl.Engine.load(MODEL, record=True)  # for the timeline below
drafters = ["self", "lens", "tree", "ngram", "model"]
few, many, sites, layers, max_new = 20, 80, "SZ", None, None  # stories; all layers are probed; answers are complete
if MODEL == "smollm2":
    drafters.remove("model")  # no smaller model has its tokenizer
    few, many, sites, layers, max_new = 3, 30, "S", [0, 6, 12, 18, 24, 30], 12
task = rl.tasks.get("coin")(flips=(2, 6), rendering="steps")

# %% [markdown]
# ## Drafters
#
# `self` is the fast path of the model itself, `lens` and `tree` exit at a middle layer, `ngram` looks back in the text,
# `model` is a smaller model. The output is the same for all; the rejected branches are not.

# %%
runs = {
    drafter: engine.replay(task.examples(few), sites=sites, drafter=drafter, window=4, max_new=max_new) for drafter in drafters
}
written = [result.tokens for result in runs["self"]]
pd.DataFrame(
    {
        "same output": {name: [result.tokens for result in run] == written for name, run in runs.items()},
        "drafts accepted": {name: f"{run.acceptance:.0%}" for name, run in runs.items()},
        "rejected branches": {name: sum(len(result.rejected) for result in run) for name, run in runs.items()},
    }
)

# %%
runs[drafters[-1]].tree(few - 1)

# %% [markdown]
# Another story, step by step: prefill, decode, verify, rollback, and the contents of the KV cache. Use the arrows below the
# picture (or scroll, where scripts are off).

# %%
engine.replay(task.examples([4]), drafter=drafters[-1], window=4, max_new=6).timeline(0)

# %% [markdown]
# ## Branches by hand
#
# `fork` copies nothing; `force` appends any text. One of these two texts now states something false.

# %%
root = engine.prompt(
    "A coin's state is heads. Alice flips, then Bob flips. What's the state, step by step? A: Alice flips:", sites=sites
)
honest, lying = root.fork(2)
honest.force(" tails.").generate(12)
lying.force(" heads.").generate(12)
root.tree()

# %% [markdown]
# ## Do probes of accepted branches read rejected ones?
#
# Rejected drafts describe things that never happened. `face` is the true state; `implied` is where a reader who believes the
# text ends up. Probes are fitted on some roots and tested on others, for either kind of branch.

# %%
if MODEL == "coin-plain":  # what SmolLM2 writes cannot be read as a chain of the task, so its rows have no labels
    run = engine.replay(task.examples(many), sites="S", drafter="model", window=4)
    rows = rl.probes.ProbeRows.of(run)
    for kind, some in {"accepted": rows.accepted(), "rejected": rows.rejected()}.items():
        known = some.frame.dropna(subset=["face", "implied"])
        print(f"{kind} rows where text and truth differ: {(known['face'] != known['implied']).mean():.0%}")
    for label in ("face", "implied"):
        print(f"\n{label}:", rl.probes.transfer(rows, label), sep="\n")

# %% [markdown]
# On the accepted path text and truth agree. On rejected branches they sometimes differ, and there the same probe agrees with
# the text more than with the truth.
#
# ## Text or truth?
#
# The chain of thought is forced up to its first stated face, which is reversed; then the model continues by itself. Probes of
# truthful chains of other roots read the rows after the false statement, where truth and text differ.

# %%
report = rl.probes.text_or_truth(engine, task.examples(range(200, 200 + many)), layers=layers)
print(report)

# %%
report.table.set_index("what")[["accuracy", "low", "high", "rows", "roots"]].round(2)

# %% [markdown]
# ## States patched into another branch
#
# Recurrent layers of a hybrid ([models](../docs/models.md#hybrids)) sum up all earlier tokens in one state per head. Branches
# share states as they share keys and values, and edits move them from one branch to another. Here is a tiny Qwen3-Next with
# random weights, whose layers 0 to 2 recur and hardly forget.

# %%
logging.set_verbosity_error()  # it would say that kernels are missing which replaylens does not use
torch.manual_seed(0)
sizes = dict(vocab_size=64, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
heads = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8)
model = Qwen3NextForCausalLM(Qwen3NextConfig(**sizes, **heads, num_experts=0, intermediate_size=64))
for layer in model.model.layers[:3]:
    layer.linear_attn.A_log.data.fill_(-5.0)
hybrid = rl.Engine.load(model)

site = "blocks.2.mixer.hook_read"
one, other = (hybrid.prompt(text, sites=[site]) for text in ([3, 14, 15, 9, 2], [6, 5, 35, 8, 9, 7]))
patch = [rl.Edit(f"blocks.{layer}.mixer.hook_state", "set", other.state(layer), positions=-1) for layer in range(3)]
(patched,) = one.fork(edits=patch)
print("patched states:", all(torch.equal(patched.state(layer), other.state(layer)) for layer in range(3)))

read = {}
for name, branch in {"one": one, "other": other, "patched": patched}.items():
    branch.force([11, 12, 13, 20, 21, 22])
    read[name] = branch.activations[site][-6:].flatten(1)  # what layer 2 reads at the six tokens
for name in ("one", "other"):
    cosines = torch.cosine_similarity(read["patched"], read[name]).tolist()
    print(f"cosines of patched and {name}:", [round(x, 2) for x in cosines])

# %% [markdown]
# The patched branch has the tokens of `one` and mostly reads what `other` reads. They are not equal: at the first three tokens
# convolutions still see the last inputs of `one`, and what these tokens add stays in the states.
#
# More of these questions: `outcome_at_fork`, `judge`, `viable_branch`, `steering_reach` ([probes](../docs/probes.md)).
# Next: a model whose thoughts are words, [4_thinking_states](4_thinking_states.ipynb).
