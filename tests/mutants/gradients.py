"""Faults in gradients and in what is built on them."""

from tests.mutants.mutant import Mutant

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
        "entering + from_mlp if block.parallel and shared is None else entering",
        "entering",
        "in a parallel block, the MLP reads the block's input too",
        (f"{AUTOGRAD}::test_agrees_with_float64_at_every_site",),
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
