# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 8. The living tree
#
# A model's branches, to look at and to change: click a token to roll back, fork, force another one, steer, ablate, resample.
# Every click is a call of the API, so what it makes has the same bits, and can be replayed.
#
# **What to expect.** A tree that you can click in. Where there is no kernel, as in a file that you only read, its picture
# stands instead. Then the same from Python: a question to a branch, the first layer where two branches differ, and a saved page
# that rebuilds its tree bit for bit. [Branches](../docs/branches.md#the-living-tree) has all keys and actions.
#
# Nothing is downloaded. This notebook has no variable for SmolLM2: what it asks is about a coin.

# %%
import replaylens as rl

engine = rl.Engine.load("coin-plain")
w = rl.explore(engine, "A coin's state is heads. Alice flips. Bob doesn't flip.")
w.generate(w.root.id, 8)
w

# %% [markdown]
# Click a token, then press `f` to fork there, `t` to type another token, `g` to generate, `?` for all keys. `w.selection` is
# the branch that is selected. The calls below do what clicks do, and show in the tree above.
#
# What if it had been Bob who flips, and what if a layer had not read the tokens before?

# %%
(bob,) = w.force(w.root.id, at=6, text=" Bob", n=8)
(blind,) = w.edit(w.root.id, at=10, op="attention", layer=1, n=6)
print(w.branch(bob).text)
print(w.branch(blind).text)

# %% [markdown]
# Where do two branches part, and how far are their layers apart there?

# %%
for other in (bob, blind):
    found = w.compare(w.root.id, other)
    print(found["row"]["position"], found["row"]["site"], [round(size, 2) for size in found["row"]["sizes"]])

# %% [markdown]
# The same tree as a page for somebody without a kernel, and as Python. `rl.replay_page` rebuilds it, and compares every row.

# %%
page = w.save("living_tree.html")
print(rl.replay_page(page, engine=engine))
page.unlink()
print(w.python())
