"""Faults in what a GPU computes beside plain passes: edits, cut edges, gradients, features. Tried in Triton's interpreter."""

from tests.mutants.mutant import Mutant

PROGRAM = "tests/kernels/test_edit_program.py"

DEVICE = (
    Mutant(
        "condition-of-edited-rows",
        "replaylens.engine.passes.program",
        "dots = matmul(x, self.conditions",
        "dots = matmul(edited, self.conditions",
        "`when` looks at a row before its edit",
        (PROGRAM,),
    ),
    Mutant(
        "condition-of-another-edit",
        "replaylens.engine.passes.program",
        "stage.when[rows] = 1 + (keys.index(edit.key) if edit.key in keys else len(keys))",
        "stage.when[rows] = 1",
        "every row has the condition of its own edit",
        (PROGRAM,),
    ),
    Mutant(
        "one-length-for-all-heads",
        "replaylens.engine.passes.program",
        "keep_lengths(x, edited, kept, self.shape.lengths)",
        "keep_lengths(x, edited, kept)",
        "with keep_norm, each head keeps its own length",
        ("tests/kernels/test_device_edits.py",),
    ),
    Mutant(
        "zeroed-edges-kept",
        "replaylens.kernels.edges",
        "tl.where(replaced, 0.0, p)",
        "p",
        "a zeroed edge carries no value",
        ("tests/kernels/test_edges.py",),
    ),
    Mutant(
        "cut-edges-forgotten",
        "replaylens.engine.passes.runner",
        "batch if batch.cuts_edges else None",
        "None",
        "edits of attention patterns reach the attention of a GPU",
        ("tests/kernels/test_device_edits.py",),
    ),
    Mutant(
        "backward-product-not-examined",
        "replaylens.engine.gradients.cuda",
        "self.certified = self.certified and _known[shape]",
        "self.certified = True",
        "gradients by products that depend on their company are not certified",
        ("tests/kernels/test_device_gradients.py::test_a_product_that_depends_on_company_is_not_certified",),
    ),
    Mutant(
        "encoder-product-not-examined",
        "replaylens.engine.features.product",
        "if not all(torch.equal(matmul(many[some], self.weight), together[some]) for some in parts):",
        "if False and parts:",
        "features by products that depend on their company are refused",
        ("tests/kernels/test_device_features.py::test_a_product_that_depends_on_company_is_refused",),
    ),
    Mutant(
        "ties-to-the-higher-index",
        "replaylens.kernels.route",
        "(0x7FFFFFFF - index)",
        "index",
        "of experts with equal scores, the lower index is chosen",
        ("tests/kernels/test_route.py::test_agrees_with_float64",),
    ),
    Mutant(
        "last-tile-forgotten",
        "replaylens.kernels.plan",
        "end = tile + (mine + ROWS - 1) // ROWS",
        "end = tile + mine // ROWS",
        "every pair is in a tile",
        ("tests/kernels/test_route.py::test_a_plan_lists_every_pair_once_with_its_expert",),
    ),
    Mutant(
        "up-not-rounded",
        "replaylens.kernels.grouped",
        "activate_gated(y.to(tl.float32), up.to(tl.float32), KIND)",
        "activate_gated(y.to(tl.float32), more, KIND)",
        "an expert's bias is added to its up part, too",
        ("tests/kernels/test_grouped.py::test_agrees_with_float64_and_has_the_bits_of_one_product_per_expert",),
    ),
    Mutant(
        "plan-of-another-choice",
        "replaylens.engine.passes.cuda_experts",
        "if known is None or known[0] is not chosen:",
        "if known is None:",
        "a layer's products follow its own choice",
        ("tests/kernels/test_experts_passes.py::test_a_path_alone_and_in_company",),
    ),
    Mutant(
        "mixtures-not-examined",
        "replaylens.engine.proof.doctor_experts",
        "for part in (_routing, _hidden, _outputs, _mixed):",
        "for part in (_routing,):",
        "the doctor compares every op of a mixture",
        ("tests/kernels/test_experts_passes.py::test_the_doctor_examines_mixtures",),
    ),
)
