# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 4. Thinking States
#
# A model that thinks in words while it reads, after [arXiv 2602.08332](https://arxiv.org/abs/2602.08332). After each chunk of
# input the thinking block T writes what there is to think (`tails <EOS>`, mostly just `<EOS>`), the compression block C turns
# the words into a state S, and S is added to the next chunk. The KV cache never holds a thought.
#
# **What to expect.** One story with its thoughts. The letters S, T, C, Z as tensors. Three ways to prefill, one of which
# guesses that nothing will be thought and rolls the KV cache back where something was: the same bits. Then what is in S (the
# coin's face, and nothing of who acted or how), and whether it matters: with the other face's state put in, later thoughts and
# the answer flip; with noise of the same size, much less. The embedded model is tiny and was trained on nothing but coins.
#
# Nothing is downloaded. This notebook has no variable for SmolLM2: its checkpoint has no blocks T and C, so it thinks nothing.
# They must be trained into a model first; how, and what came of it around SmolLM2-135M, is in
# [the study](../docs/notes/thinking_states.md#around-smollm2-135m).

# %%
import numpy as np
import pandas as pd
import torch

import replaylens as rl
from replaylens.thinking.thoughts import LETTERS

engine = rl.Engine.load("coin-thinking")
story = "A coin's state is heads. Alice flips, then Bob flips. What's the state? A:"
branch = engine.prompt(story, sites="STCZ", keep_rejected=True)
branch.generate(2).picture()

# %% [markdown]
# ## S, T, C, Z
#
# A row is a token position. In a model that thinks S is the state, stored where it is added; T (the thought), C (its
# compression) and Z (its words) are stored at the last token of the chunk that thought, by step of the thought. The letters
# select these sites together with those of every model: residual stream, attention output, MLP output and logit lens.

# %%
captured = [site for site in branch.activations.sites() if site in LETTERS]
shapes = {site: list(branch.activations[site].shape[1:]) for site in captured}
pd.DataFrame({"letter": {site: LETTERS[site] for site in captured}, "shape of a row": shapes})

# %%
last = 3 * engine.thinking.chunk + 1  # the last token of chunk 3, " Alice flips"
entropy, ids = branch.activations["thinking.entropy"][last], branch.activations["thinking.top_ids"][last]
chances = branch.activations["thinking.top_logprobs"][last].exp()
for step in range(2):
    said = ", ".join(f"{engine.text.token(int(ids[step, k])) or '<EOS>'} {chances[step, k]:.4f}" for k in range(3))
    print(f"step {step}: entropy {entropy[step]:.4f}; {said}")

# %% [markdown]
# ## Three prefill modes, the same bits
#
# `sequential` thinks chunk by chunk. `empty` runs all remaining chunks at once as if nothing were thought, keeps everything up
# to the first thought that is not empty, and rolls the rest back. `drafted` guesses with the thoughts of the round that failed.


# %%
def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit; as numbers, the NaN of a last token without successor would not equal itself."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


roads = {guess: engine.prompt(story, sites="STCZ", guess=guess) for guess in ("sequential", "empty", "drafted")}
chain = roads["sequential"]
pd.DataFrame(
    {
        "rounds": {name: len(road.thoughts.rounds) for name, road in roads.items()},
        "same KV": {name: torch.equal(road.kv(), chain.kv()) for name, road in roads.items()},
        "same S, T, C, Z": {
            name: all(same(road.activations[site], chain.activations[site]) for site in chain.activations.sites())
            for name, road in roads.items()
        },
    }
)

# %% [markdown]
# What was rolled back is kept as a rejected branch, with the thoughts that it had without the state. Denied the first thought,
# T still thinks at the right chunk, but not always the right thing:

# %%
for path in (branch, *branch.rejected):
    print([engine.text.decode(thought.tokens).strip() or "." for thought in path.thoughts.chunks])

# %% [markdown]
# ## What is in S?

# %%
run = engine.replay(rl.tasks.get("coin")(flips=(2, 6)).examples(50), sites="S")
rows = rl.probes.ProbeRows.of(run).accepted()
states = rows.matrix("thinking.state")
received = rows.where(states.any(1))
vectors = len(np.unique(states[states.any(1)], axis=0))
print(f"{run.accuracy:.0%} right; {len(received)} rows received a state; {vectors} different vectors")
report = rl.probes.sweep(received, ["face", "last_action", "name"], sites=["thinking.state"], positions=["all"])
report.table.query("~known_zero")[["label", "accuracy", "low", "high", "majority", "bag_of_tokens", "shuffled"]].round(2)

# %% [markdown]
# A handful of different vectors: the thoughts are two words, and C makes one state of each, a vector per token of the chunk.
# So S holds the face, and who acted or how cannot be in it.
#
# ## Does it matter?
#
# The first state of a story is replaced by that of the other face, taken from the same story told with the other start; or by
# the story's own state with noise as large as that exchange. After the edit the fork thinks again.

# %%


def edited(example, kind):
    """Later thoughts and answers that changed when the first state was exchanged or blurred."""
    start, other = ("heads", "tails") if "is heads" in example.prompt else ("tails", "heads")
    own = engine.prompt(example.prompt, sites="S")
    twin = engine.prompt(example.prompt.replace(f"is {start}", f"is {other}", 1), sites="S")
    first, chunk = min(own.thoughts.states), engine.thinking.chunk
    where = slice(first * chunk, (first + 1) * chunk)
    mine, theirs = own.activations["thinking.state"][where], twin.activations["thinking.state"][where]
    noise = torch.randn(mine.shape, generator=torch.Generator().manual_seed(example.index))
    put_in = {"the other face's": theirs, "noise as large": mine + noise / noise.norm() * (theirs - mine).norm()}[kind]
    (fork,) = own.fork(edits=[rl.Edit.interchange("thinking.state", put_in, where)])
    engine.generate([own, fork], 2)
    pairs = zip(own.thoughts.chunks[first:], fork.thoughts.chunks[first:], strict=True)
    changed = [a.tokens != b.tokens for a, b in pairs if not a.empty]
    return {"put in": kind, "later thoughts changed": np.mean(changed), "answer changed": own.tokens != fork.tokens}


fresh = rl.tasks.get("coin")(flips=(3, 6)).examples(range(100, 120))
lines = [edited(example, kind) for example in fresh for kind in ("the other face's", "noise as large")]
pd.DataFrame(lines).groupby("put in").mean().round(2).assign(stories=len(fresh))

# %% [markdown]
# How it works, what was decided where the paper leaves it open, and how it was trained: [models that
# think](../docs/models.md#thinking-states-models), [sources](../docs/determinism.md#sources).
# Next: a real model, [5_five_things](5_five_things.ipynb).
