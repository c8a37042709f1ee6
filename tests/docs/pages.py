"""Settings of the page tests: what a page assumes, which sizes are reduced, and what is not run."""

GIVEN = {
    "docs/workbench.md": """
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
for layer in range(4):
    os.makedirs(f"transcoders/{layer}")
    draw = torch.Generator().manual_seed(layer)
    tensors = dict(W_enc=torch.randn(128, 12, generator=draw) / 12, W_dec=torch.randn(12, 128, generator=draw) / 4)
    save_file({**tensors, "b_enc": torch.zeros(12), "b_dec": torch.zeros(128)}, f"transcoders/{layer}/sae_weights.safetensors")
    hooks = dict(hook_name=f"blocks.{layer}.mlp.hook_in", hook_name_out=f"blocks.{layer}.hook_mlp_out")
    config = dict(architecture="transcoder", d_in=128, d_out=128, d_sae=12, apply_b_dec_to_input=False, metadata=hooks)
    json.dump(config, open(f"transcoders/{layer}/cfg.json", "w"))
""",
}
"""page -> code that creates what its snippets assume"""

SMALLER = {
    "task.examples(40)": "task.examples(12)",
    ".examples(48)": ".examples(32)",
    "steps = 1500": "steps = 10",
    "pool = 1024": "pool = 32",
    "--n 200": "--n 8",
    "--label face,parity": "--label face",
    "--n 100": "--n 6",
    "--n 40 --knob flips=1,4": "--n 12 --knob flips=1,4",
    'sites="STC", positions=["step", "query"])': 'sites="S", layers=[3], positions=["query"])',
    "n: int = 40": "n: int = 12",
    "--label state --sites STC": "--label state --sites S --layers 3 --positions query --permutations 19",
    "--positions step,query --estimators ridge": "--layers 3 --positions query --estimators ridge --permutations 19",
    "--sites S --positions query --estimators ridge": "--sites S --positions query --estimators ridge --permutations 19",
    'positions="step", estimators="ridge")': 'layers=[3], positions="step", estimators="ridge")',
    ".examples(80)": ".examples(24)",
    "range(100, 124)": "range(100, 108)",
    "batch = 64": "batch = 16",
    "--model coin-thinking --out": "--model coin-thinking --n 4 --out",
    "fit_jacobian_lens(engine, [heads])": 'fit_jacobian_lens(engine, ["A coin"])',
    "np.arange(80) // 2, tokens=tokens)": 'np.arange(80) // 2, tokens=tokens, estimator="logistic")',
    "range(1000, 1020)": "range(1000, 1006)",
    "untrained=rl.probes.placebo_probes(dump, probe))": "untrained=rl.probes.placebo_probes(dump, probe, 4))",
    'label="state", ': 'label="state", estimators="ridge", ',
}
"""text of a snippet -> its replacement in the test; only sizes change"""

FEWEST_PERMUTATIONS = 19
"""of sweeps that do not give their number"""

MINUTES = "takes minutes; the functions behind it are tested on small sizes"
NETWORK = "needs a network"
EXTRA = "needs the extra eval and a network"
PEER = "needs another version of transformer-lens than ours"

NOT_RUN = {
    "README.md": {
        "make demo": NETWORK,
        "make test": MINUTES,
        ".venv/bin/replaylens fetch": NETWORK,
        "import replaylens as rl": NETWORK,
    },
    "docs/quickstart.md": {
        "python3 -m venv": NETWORK,
        "pip install": NETWORK,
        "replaylens fetch": NETWORK,
        'import replaylens as rl\n\nengine = rl.Engine.load("smollm2")': NETWORK,
        "seen = rl.lens": NETWORK,
        "patched = rl.patch": NETWORK,
        "contrast = ": NETWORK,
        'root = engine.prompt("Question': NETWORK,
        "prompts = [clean": NETWORK,
    },
    "docs/tasks.md": {'model = rl.Engine.load("smollm2")': NETWORK},
    "docs/branches.md": {'model = rl.Engine.load("smollm2")': NETWORK, "talk = rl.Conversation": NETWORK},
    "docs/dumps.md": {"from sae_lens import": PEER, "replaylens verify replaylens:": "stands for any identifier"},
    "docs/bridges.md": {"inspect eval": EXTRA, "python -m replaylens.extras.bridges.lm_eval_model": EXTRA},
    "docs/models.md": {"replaylens train": MINUTES, "from replaylens.training.thinking import train": MINUTES},
}
"""page -> prefixes of shell lines and Python blocks that are not run, each with its reason"""

PROCESS = {"docs/extending.md": {"import torch\nimport triton\n": {"TRITON_INTERPRET": "1"}}}
"""page -> prefixes of Python blocks that need their own process, with its variables"""

WORDS = {
    "another library's": [
        "SAETrainer", "MultiSAETrainer", "data_provider", "LlamaForCausalLM", "_original_component", "fenv_t", "pickle",
        "logit_attrs", "cache.logit_attrs", "cache.stack_head_results()", "fit_sparse_probe", "hf", "feature_json_base_url",
        "perma_hooks", "flaky", "--max-connections", "weight_scale_inv", "merge_and_unload", "output_hidden_states",
        "hidden_states", "skip_transcoder", "attn.hook_cos", "attn.hook_sin", "attn.hook_hidden_states", "attn.hook_result",
        "hook_q_input", "hook_k_input", "hook_v_input", "hook_attn_in", "hook_mlp_in", "HF_TOKEN", "HF_HOME",
        "TRITON_CACHE_DIR",
    ],
    "the end of a site, part by part in the code": [
        "hook_k", "hook_v", "hook_expert_weights", "mlp.dense_gate", "mlp.dense_in", "mlp.dense_out", "ln_final.hook_out",
        "unembed.hook_out",
    ],
    "in a page or a file that a command makes": [
        "--rl-prompt", "--rl-page", "--o0", "--o1", "data_x", "site/", "trained/square/card.md", "wave-00003.safetensors",
        "wave-00003.json",
    ],
    "a label of a task, by colour": ["face.red"],
    "made by the command line's library": ["replaylens --install-completion"],
}  # fmt: skip
"""what words in backticks are that neither the code nor Python defines -> the words; see `test_words.py`"""
