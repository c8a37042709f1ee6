"""Faults in how threads and other library modes are certified and held."""

from tests.mutants.mutant import Mutant

_TESTS = "tests/engine/passes/test_thread_counts.py"

MODES = (
    Mutant(
        "threads-of-a-pass-not-set",
        "replaylens.engine.model.modes",
        "    _set_threads(count)\n    if count > 1 and",
        "    if count > 1 and",
        "a pass runs on a certified number of threads",
        (f"{_TESTS}::test_every_pass_is_held_and_given_back",),
    ),
    Mutant(
        "threads-of-the-user-kept",
        "replaylens.engine.model.modes",
        "        _PROCESS.leave()\n        _set_threads(before)\n",
        "        _PROCESS.leave()\n",
        "the user's number of threads is given back, after an error, too",
        (f"{_TESTS}::test_the_users_threads_come_back_after_an_error",),
    ),
    Mutant(
        "pass-without-hold",
        "replaylens.engine.passes.runner",
        "        with self._held(batch.padded):\n            residual = self._replayed",
        "        if True:\n            residual = self._replayed",
        "a canonical pass holds the modes",
        (f"{_TESTS}::test_a_mode_set_after_loading_moves_no_bit",),
    ),
    Mutant(
        "lens-without-hold",
        "replaylens.engine.lens.readout",
        "    with runner.canonical(stacked.shape[:2].numel()):\n        if tuned is not None:",
        "    if True:\n        if tuned is not None:",
        "the sums of a lens are taken in the canonical modes",
        (f"{_TESTS}::test_every_pass_is_held_and_given_back",),
    ),
    Mutant(
        "denormals-flushed",
        "replaylens.engine.model.modes",
        "    if flush:\n        torch.set_flush_denormal(False)\n",
        "",
        "denormal numbers are never flushed in a canonical pass",
        (f"{_TESTS}::test_a_mode_set_after_loading_moves_no_bit",),
    ),
    Mutant(
        "flushing-workers-used",
        "replaylens.engine.model.modes",
        "if count > 1 and _workers_flush(count):",
        "if count > 1 and not _workers_flush:",
        "workers that flush denormal numbers compute nothing canonical",
        (f"{_TESTS}::test_workers_that_flush_denormal_numbers_are_not_used",),
    ),
    Mutant(
        "changed-modes-unnoticed",
        "replaylens.engine.model.modes",
        "            if self.disturbed != entered or _read() != _PROCESS_MODES:",
        "            if self.disturbed != entered:",
        "a mode that another thread changes during a pass is noticed",
        (f"{_TESTS}::test_a_mode_that_another_thread_changes_during_a_pass_is_noticed",),
    ),
    Mutant(
        "threads-that-differ-certified",
        "replaylens.engine.proof.examination",
        "                self.more.remove(count)",
        "                continue",
        "numbers of threads on which an op gives other bits are not used",
        (f"{_TESTS}::test_a_row_wise_op_that_differs_on_four_threads_excludes_them",),
    ),
    Mutant(
        "row-counts-of-one-thread-on-all",
        "replaylens.engine.proof.doctor_products",
        "        some = Allowed({shape: counts})\n",
        "        some = Allowed(dict(one.row_counts))\n        return True\n",
        "on more threads only the row counts are used that give the bits of one",
        (f"{_TESTS}::test_the_number_of_threads_may_change_after_loading",),
    ),
    Mutant(
        "more-threads-than-the-user-has",
        "replaylens.engine.passes.certificate",
        "(n for n in self.allowed if n <= limit)",
        "(n for n in self.allowed if limit)",
        "a pass uses no more threads than the user allows",
        (f"{_TESTS}::test_the_number_of_threads_with_the_least_work_is_taken",),
    ),
    Mutant(
        "fingerprint-without-kernel-choice",
        "replaylens.engine.proof.fingerprint",
        "filter(None, [name, modes.environment()])",
        "filter(None, [name])",
        "variables that choose other kernels are part of the fingerprint",
        (f"{_TESTS}::test_variables_that_choose_other_kernels_are_part_of_the_fingerprint",),
    ),
)
