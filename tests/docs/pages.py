"""Settings of the page tests: what a page assumes, which sizes are reduced, and what is not run."""

GIVEN = {
    "docs/probes.md": """
import replaylens as rl
engine = rl.Engine.load("coin-plain")
examples = rl.tasks.get("coin")(flips=(1, 4), seed=1).examples(6)
engine.replay(rl.tasks.get("coin")(flips=(1, 4)).examples(40), sites="STC", drafter="lens").save("dumps/coin")
""",
    "docs/dump_format.md": """
import os
import replaylens as rl
run = rl.Engine.load("coin-plain").replay(rl.tasks.get("coin")(flips=8).examples(40), sites="S", drafter="lens")
run.save("dump")
os.chdir("dump")
""",
    "docs/features.md": """
import json
import os
import torch
from safetensors.torch import save_file
os.makedirs("saes/block1")
directions = torch.randn(512, 128, generator=torch.Generator().manual_seed(0))
directions /= directions.norm(dim=1, keepdim=True)
tensors = dict(W_enc=directions.T, b_enc=torch.full((512,), -0.5), W_dec=directions, b_dec=torch.zeros(128))
save_file({name: value.contiguous().clone() for name, value in tensors.items()}, "saes/block1/sae_weights.safetensors")
config = dict(architecture="topk", k=32, d_in=128, d_sae=512, metadata=dict(hook_name="blocks.1.hook_resid_post"))
json.dump(config, open("saes/block1/cfg.json", "w"))
few = directions[:64].clone()
tensors = dict(W_enc=few.T.contiguous(), b_enc=torch.full((64,), -0.5), W_dec=few, b_dec=torch.zeros(128))
for layer in range(4):
    os.makedirs(f"transcoders/{layer}")
    save_file(tensors, f"transcoders/{layer}/sae_weights.safetensors")
    sites = dict(hook_name=f"blocks.{layer}.ln2.hook_out", hook_name_out=f"blocks.{layer}.hook_mlp_out")
    config = dict(architecture="transcoder", d_in=128, d_out=128, d_sae=64, apply_b_dec_to_input=False, metadata=sites)
    json.dump(config, open(f"transcoders/{layer}/cfg.json", "w"))
import replaylens as rl
task = rl.tasks.get("coin")(flips=(1, 4))
rl.Engine.load("coin-plain").replay(task.examples(40), sites="S", drafter="lens").save("dumps/coin")
""",
    "docs/feeding.md": """
import replaylens as rl
run = rl.Engine.load("coin-plain").replay(rl.tasks.get("coin")(flips=(1, 4)).examples(20), sites="STCZ", drafter="lens")
run.save("dumps/coin")
""",
    "docs/views.md": """
import replaylens as rl
run = rl.Engine.load("coin-plain").replay(rl.tasks.get("coin")(flips=(1, 4)).examples(20), sites="SZ", drafter="lens")
rl.probes.sweep(run.save("dumps/coin"), "face", sites="S", positions="query", estimators="ridge").save("probes/coin")
""",
}
"""page -> code that creates what its snippets assume"""

SMALLER = {
    "task.examples(64)": "task.examples(12)",
    "task.examples(40)": "task.examples(20)",
    ".examples(48)": ".examples(32)",
    "steps = 1500": "steps = 10",
    "pool = 1024": "pool = 32",
    "--n 1000": "--n 20",
    "--n 200": "--n 20",
    "--n 100": "--n 6",
    "task.examples(80)": "task.examples(40)",
    'sites="STC", positions=["step", "query"])': 'sites="S", layers=[3], positions=["query"])',
    '"face", sites="S", estimators="ridge")': '"face", sites="S", layers=[3], positions="query", estimators="ridge")',
    "n: int = 40": "n: int = 12",
    "--label state --sites STC": "--label state --sites S --layers 3 --positions query --permutations 19",
    "--positions step,query --estimators ridge": "--layers 3 --positions query --estimators ridge --permutations 19",
    "--sites S --positions query --estimators ridge": "--sites S --positions query --estimators ridge --permutations 19",
    'positions="step", estimators="ridge")': 'layers=[3], positions="step", estimators="ridge")',
    "root.resample(100, max_new=64": "root.resample(10, max_new=64",
    "range(100, 124)": "range(100, 108)",
    "batch = 64": "batch = 16",
    "--model coin-thinking --out": "--model coin-thinking --n 4 --out",
}
"""text of a snippet -> its replacement in the test; only sizes change"""

FEWEST_PERMUTATIONS = 19
"""of sweeps that do not give their number"""

MINUTES = "takes minutes; the functions behind it are tested on small sizes"
NETWORK = "needs a network"
PEER = "needs another version of transformer-lens than ours"

NOT_RUN = {
    "README.md": {"pip install": NETWORK, "replaylens demo": MINUTES},
    "docs/quickstart.md": {"git clone": NETWORK, "python3 -m venv": NETWORK, "pip install": NETWORK},
    "docs/five_things.md": {"replaylens fetch": NETWORK, "": NETWORK},
    "docs/texts.md": {'model = rl.Engine.load("smollm2")': NETWORK},
    "docs/resampling.md": {'model = rl.Engine.load("smollm2")': NETWORK},
    "docs/feeding.md": {"from sae_lens import": PEER},
    "docs/thinking.md": {"replaylens train": MINUTES, "from replaylens.engine.training.thinking import train": MINUTES},
    "docs/training.md": {"replaylens train": MINUTES},
    "docs/results.md": {
        "replaylens ": MINUTES,
        "rl.probes.": MINUTES,
        "for label in": MINUTES,
        "make smollm2": NETWORK,
        "python docs/examples/decided.py": MINUTES,
    },
}
"""page -> prefixes of shell lines and Python blocks that are not run, each with its reason"""

PROCESS = {"docs/extending.md": {"import torch\nimport triton\n": {"TRITON_INTERPRET": "1"}}}
"""page -> prefixes of Python blocks that need their own process, with its variables"""
