"""Faults in what a GPU computes beside plain passes: edits, cut edges, gradients, features. Tried in Triton's interpreter."""

from tests.mutants.mutant import Mutant

PROGRAM = "tests/kernels/test_edit_program.py"

BURSTS = "tests/kernels/test_draft_bursts.py"

DEVICE = (
    Mutant(
        "windows-run-ahead",
        "replaylens.engine.loop.admission",
        "turn.burst = steps if steps > 1 else 0",
        "turn.burst = turn.burst if steps > 1 else 0",
        "in one step, requests that draft and requests that decode take equally many steps",
        (BURSTS,),
    ),
    Mutant(
        "drafts-after-the-end",
        "replaylens.engine.loop.loop",
        "            if not window.full:\n                window.add(",
        "            if True:\n                window.add(",
        "a draft that ends the sequence ends its window",
        (BURSTS,),
    ),
    Mutant(
        "draws-at-the-path's-end",
        "replaylens.engine.loop.verify",
        "positions = [turn.end + len(turn.job.window_open.chain) for turn in turns",
        "positions = [turn.end for turn in turns",
        "a draft is drawn with the noise of its own position",
        ("tests/kernels/test_drafted.py",),
    ),
    Mutant(
        "split-without-its-keys",
        "replaylens.kernels.split",
        "tl.minimum(end, begin + split), position",
        "tl.minimum(end, begin + split - BLOCK), position",
        "the splits of the fast path's attention cover all keys",
        ("tests/kernels/test_split.py",),
    ),
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
)
