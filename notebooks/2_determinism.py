# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 2. Determinism
#
# Activations usually depend on more than the tokens: on the other sequences in the batch, on whether a row came from a prefill
# or from a decode step, on how a prompt was cut. replaylens commits only rows that are a function of weights, token path and
# edits, bit for bit.
#
# **What to expect.** First a plain model whose activations differ in their last bits, depending on how the same tokens were
# computed (which ways differ depends on your processor). Then the same weights in an engine, where all ways agree exactly.
# Then dumps whose digest does not depend on batch or drafter, the fast path and why its rows cannot be dumped, and the doctor,
# which tests all this on your machine.
#
# Nothing is downloaded. With `MODEL = "smollm2"` all of it runs on SmolLM2-135M, after `replaylens fetch smollm2`.

# %%
import tempfile
from pathlib import Path

import pandas as pd
import torch
from IPython.display import display

import replaylens as rl
from replaylens.engine.proof import certificates
from replaylens.weights.loading import hugging_face

MODEL = "coin-plain"  # or "smollm2"
texts, stories, flips = (16, 24, (2, 5)) if MODEL == "coin-plain" else (6, 3, (1, 2))  # SmolLM2 is slower
engine = rl.Engine.load(MODEL)
model = hugging_face(engine.model)  # the same weights as a model of transformers
torch.manual_seed(0)
prompts = torch.randint(2, engine.config.vocab_size, (texts, 40))  # any tokens: this is about arithmetic

# %% [markdown]
# ## The same tokens, computed in four ways, by transformers
#
# We compare the residual stream before the last block.


# %%
@torch.no_grad()
def states(tokens, **options):
    out = model(tokens, output_hidden_states=True, use_cache=True, **options)
    return out.hidden_states[3], out.past_key_values  # [batch, positions, d_model]


def decoded(tokens, prefill):
    """The first tokens in one pass, the others one by one."""
    first, cache = states(tokens[:, :prefill])
    rest = [states(tokens[:, i : i + 1], past_key_values=cache)[0] for i in range(prefill, tokens.shape[1])]
    return torch.cat([first, *rest], 1)


def left_padded(tokens, pads):
    """In a batch whose longest prompt is longer by `pads`, with the mask and positions that belong there."""
    rows = torch.cat([torch.zeros(len(tokens), pads, dtype=torch.long), tokens], 1)
    places = (torch.arange(rows.shape[1]) - pads).clamp(min=0).expand(len(rows), -1)
    return states(rows, attention_mask=(rows > 0).long(), position_ids=places)[0][:, pads:]


def compare(ways, reference):
    rows = {
        way: ((got != reference).any(-1).float().mean().item(), (got - reference).abs().max().item())
        for way, got in ways.items()
    }
    return pd.DataFrame(rows, index=["share of rows with other bits", "largest difference"]).T


alone = torch.cat([states(prompt[None])[0] for prompt in prompts])
ways = {
    f"in a batch of {texts}": states(prompts)[0],
    "in a padded batch": left_padded(prompts, 9),
    "decoded from token 30 on": torch.cat([decoded(prompt[None], 30) for prompt in prompts]),
    "decoded in a batch": decoded(prompts, 30),
}
display(theirs := compare(ways, alone))

# %% [markdown]
# The differences are small, but such activations have no reproducible hash, and two papers cannot compare bits.
#
# ## The same weights in an engine

# %%
site = "blocks.3.hook_in"


def rows_of(branches):
    return torch.stack([branch.activations[site] for branch in branches])


def forced(prompt, first):
    """The first tokens as a prompt, the others one by one."""
    branch = engine.prompt(prompt[:first], sites=[site])
    for token in prompt[first:]:
        branch.force([token])
    return branch


def detoured(prompt):
    """After a wrong turn that was rolled back, on a fork."""
    (fork,) = engine.prompt(prompt[:25], sites=[site]).fork()
    return fork.force([7, 7, 7]).rollback(to=25).force(prompt[25:])


paths = prompts.tolist()
reference = rows_of([engine.prompt(path, sites=[site]) for path in paths])
ways = {
    f"in a batch of {texts}": rows_of(engine.prompts(paths, sites=[site])),
    "with prompts of other lengths": rows_of(engine.prompts([*paths, *(p[:9] for p in paths)], sites=[site])[:texts]),
    "token by token from 30 on": rows_of([forced(path, 30) for path in paths]),
    "after a fork and a rollback": rows_of([detoured(path) for path in paths]),
}
display(ours := compare(ways, reference))

# %% [markdown]
# Both as a picture: the rows whose bits depend on how they were computed.

# %%
both = pd.concat({"transformers": theirs, "replaylens": ours}).iloc[::-1, 0]
colours = ["tab:orange" if name == "transformers" else "tab:blue" for name, _ in both.index]
axis = both.plot.barh(color=colours, xlim=(0, 1.1), figsize=(7, 3), xlabel="share of rows with other bits")
for place, share in enumerate(both):
    axis.text(share + 0.01, place, f"{share:.0%}", va="center")
axis.set_yticklabels([f"{name}: {way}" for name, way in both.index])
axis.set_ylabel("")
axis.figure.tight_layout()

# %%
print("all equal:", all(torch.equal(reference, got) for got in ways.values()))
print(f"against transformers: at most {(reference - alone).abs().max():.1e} apart: the same sums, added in another order")

# %% [markdown]
# ## Dumps: one digest, whatever the batch and the drafter
#
# Rejected branches depend on the drafter; accepted rows do not.

# %%
examples = rl.tasks.get("coin")(flips=flips, rendering="steps").examples(stories)
drafters = ("model", "model", "lens", "ngram") if MODEL == "coin-plain" else ("lens", "lens", "ngram", "self")
folder = Path(tempfile.mkdtemp())
lines = []
for number, (drafter, batch) in enumerate(zip(drafters, (1, 24, 3, 24), strict=True)):
    dump = engine.replay(examples, sites="STC", drafter=drafter, batch=batch, max_new=24).save(folder / str(number))
    lines.append({"drafter": drafter, "batch": batch, "accepted rows": dump.accepted_digest[:16], "all rows": dump.digest[:16]})
pd.DataFrame(lines)

# %% [markdown]
# ## The fast path
#
# `deterministic=False` takes the tokens of the fast path as they come. The branch is marked, and a run of such branches cannot
# be saved as a dump.

# %%
branch = engine.prompt(examples[0].prompt, sites="S").generate(20)
fast = engine.prompt(examples[0].prompt, sites="S").generate(20, deterministic=False)
print(f"certified: {branch.certified}, {fast.certified}; same tokens: {branch.tokens == fast.tokens}")
name, prompt, n = "blocks.3.hook_in", branch.root_length, min(branch.length, fast.length) - 1
differ = (branch.activations[name][:n] != fast.activations[name][:n]).any(-1)
print(f"rows with other bits: {differ[:prompt].sum()} of {prompt} prompt rows, {differ[prompt:].sum()} of {n - prompt} others")
try:
    engine.replay(examples[:2], sites="S", max_new=8, deterministic=False).save(folder / "fast")
except rl.errors.EngineError as error:
    print(f"{type(error).__name__}: {error}")

# %% [markdown]
# ## The doctor
#
# Why should you believe it on *your* processor? Before it serves a model, the engine compares bits for every op and shape of
# the model: a row alone, in a batch, at another offset, on more threads, a window cut elsewhere. Negative controls must differ,
# or the comparison would show nothing. The engine uses only what was certified, and raises `NotCertified` otherwise. In a
# shell: `replaylens doctor`.

# %%
certificate = certificates.examine(engine.model)
findings = pd.DataFrame([vars(finding) for finding in certificate.findings])
findings["check"] = findings["check"].str.replace("control: ", "")
print(f"certified: {certificate.certified}")
findings.groupby(["control", "check"]).equal.agg(compared="size", equal="sum")

# %% [markdown]
# **Scope.** On a CPU, and on a GPU in float32, the bits are those of every machine. In bfloat16 on a GPU they hold for one GPU
# model and one set of versions; results name these in their fingerprint, and comparisons across fingerprints are refused
# ([the contract](../docs/determinism.md)). Next: [3_branches](3_branches.ipynb).
