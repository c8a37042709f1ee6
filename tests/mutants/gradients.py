"""Faults in gradients and in what is built on them."""

from tests.mutants.mutant import Mutant

RECURRENT = "tests/engine/gradients/test_recurrent.py"
AUTOGRAD = "tests/engine/gradients/test_gradients.py"

GRADIENTS = (
    Mutant(
        "norm-without-its-scale",
        "replaylens.engine.gradients.derivatives",
        "dx = h - u * mean(h * u)",
        "dx = h.clone()",
        "the gradient of a norm's input includes that of its scale",
        (f"{AUTOGRAD}::test_every_length",),
    ),
    Mutant(
        "parallel-mlp-forgotten",
        "replaylens.engine.gradients.backward",
        "entering = entering + from_mlp",
        "pass",
        "in a parallel block, the MLP reads the block's input too",
        (f"{AUTOGRAD}::test_agrees_with_float64_at_every_site",),
    ),
    Mutant(
        "state-without-its-decay",
        "replaylens.kernels.cpu_recurrent",
        "f[a] = _ZERO if own else left * f[a]",
        "f[a] = _ZERO if own else f[a]",
        "the gradient of a state decays on its way back, as the state does on its way onward",
        (f"{RECURRENT}::test_agrees_over_several_chunks",),
    ),
    Mutant(
        "own-rows-read-by-others",
        "replaylens.engine.gradients.mixers",
        "[] if own else weights[1:]",
        "weights[1:]",
        "a Jacobian lens holds what a position does to itself",
        (f"{RECURRENT}::test_a_jacobian_lens",),
    ),
    Mutant(
        "bounded-steps-pass",
        "replaylens.engine.gradients.mixers",
        "passes = (free == step).float()",
        "passes = torch.ones_like(free)",
        "a step size at its bound does not change",
        (f"{RECURRENT}::test_agrees_with_float64_at_every_site[mamba2-limited]",),
    ),
    Mutant(
        "gate-of-attention-forgotten",
        "replaylens.engine.gradients.backward",
        "joined = joined if by_gate is None else torch.cat([joined, by_gate], dim=1)",
        "joined = joined if by_gate is None else torch.cat([joined, torch.zeros_like(by_gate)], dim=1)",
        "the gate of an attention has a gradient",
        (f"{RECURRENT}::test_agrees_with_float64_at_every_site[qwen3-5]",),
    ),
    Mutant(
        "gate-without-up",
        "replaylens.engine.gradients.backward",
        "g * up * slope",
        "g * slope",
        "a gate's gradient is weighed by the linear half",
        (f"{AUTOGRAD}::test_every_activation",),
    ),
    Mutant(
        "gradient-through-replaced-rows",
        "replaylens.engine.gradients.backward",
        "return g if edits is None else through_edits(g, self.forward.unedited[site], edits)",
        "return g",
        "a row that an edit replaces passes no gradient on",
        ("tests/engine/gradients/test_gradients.py",),
    ),
    Mutant(
        "gradient-without-edits",
        "replaylens.engine.passes.runner",
        "Segment(table, 0, tokens, 1, edits)",
        "Segment(table, 0, tokens, 1)",
        "the gradient is taken at the branch's own values, edits included",
        ("tests/engine/gradients/test_gradients.py::test_values_are_the_captured_rows",),
    ),
    Mutant(
        "functions-certified",
        "replaylens.engine.gradients.branches",
        "promised and isinstance(found, Named)",
        "promised",
        "nothing is promised about what a function computes",
        ("tests/engine/gradients/test_gradients.py::test_certified",),
    ),
    Mutant(
        "patches-counted-from-clean",
        "replaylens.engine.gradients.attribution",
        "rows[site] - found.activations[site]",
        "found.activations[site] - rows[site]",
        "an estimate has the sign of the real effect",
        ("tests/engine/attribution/test_attribution.py::test_small_moves_are_estimated_well",),
    ),
    Mutant(
        "left-endpoint-rule",
        "replaylens.engine.gradients.attribution",
        "(step + 0.5) / steps",
        "step / steps",
        "integrated gradients add up to the difference of the metric",
        ("tests/engine/attribution/test_attribution.py::test_integrated_gradients_add_up",),
    ),
    Mutant(
        "jacobian-of-other-positions",
        "replaylens.engine.gradients.derivatives",
        "ds, p = ds.masked_fill(cut, 0.0), p.masked_fill(cut, 0.0)",
        "p = p.masked_fill(cut, 0.0)",
        "the Jacobian lens is that of a position on itself",
        ("tests/workbench/test_jacobian.py::test_it_is_the_mean_of_the_jacobians",),
    ),
)
