"""Fixed holes, opened again: faults that were certified before their tests existed."""

from tests.mutants.mutant import Mutant

HOLES = (
    Mutant(
        "modes-set-right-again-unnoticed",
        "replaylens.engine.model.modes",
        "            if self.disturbed != entered or _read() != _PROCESS_MODES:",
        "            if _read() != _PROCESS_MODES:",
        "modes that another thread changed in the middle of a pass are noticed",
        ("tests/engine/passes/test_thread_counts.py::test_a_mode_that_another_pass_has_set_right_again_is_noticed_too",),
    ),
    Mutant(
        "columns-cut-to-the-length",
        "replaylens.engine.request.capture",
        "    if not site.endswith(KEY_SITES):",
        "    if rows.ndim < 3:",
        "run_with_cache gives whole rows, however few tokens there are",
        ("tests/engine/replay/test_habits.py::test_every_site_has_the_shape_that_transformer_lens_gives_it",),
    ),
    Mutant(
        "no-lock",
        "replaylens.engine.serving.lock",
        "        with first, self._held:\n            depth = self._depth",
        "        if True:\n            depth = self._depth",
        "one thread at a time changes an engine's state",
        ("tests/engine/serving/test_threads.py::test_nobody_sees_the_middle_of_a_step",),
    ),
    Mutant(
        "own-head-taken-for-the-embedding",
        "replaylens.engine.model.loading",
        "return a.shape == b.shape and torch.equal(a.to(wide), b.to(wide))",
        "return a.shape == b.shape",
        "a tied config with a head of its own is not tied",
        ("tests/engine/model/test_check.py::test_a_head_of_its_own_unties_a_tied_config",),
    ),
    Mutant(
        "rows-not-copied",
        "replaylens.engine.request.capture",
        "return pieces[0].clone() if len(pieces) == 1",
        "return pieces[0] if len(pieces) == 1",
        "changing captured rows in place changes no branch",
        ("tests/engine/memory/test_pages.py",),
    ),
    Mutant(
        "branch-given-twice",
        "replaylens.engine.serving.forest",
        "            if times[branch] > 1:",
        "            if times[branch] > 2:",
        "a request that is refused changes nothing",
        ("tests/engine/serving/test_activations.py",),
    ),
    Mutant(
        "kv-of-a-preempted-branch",
        "replaylens.engine.serving.forest",
        "(self.forest.held_kv(lane) if lane.computed >= committed else None)",
        "self.forest.held_kv(lane)",
        "KV of a preempted branch is computed again, not cut short",
        ("tests/engine/serving/test_activations.py",),
    ),
    Mutant(
        "capture-of-a-kept-draft-lost",
        "replaylens.engine.serving.forest",
        "recorded = lane.template if lane.recording is None else lane.recording",
        "recorded = lane.recording",
        "a fork of a kept rejected draft keeps its capture",
        ("tests/engine/loop/test_commit.py",),
    ),
    Mutant(
        "released-records-kept",
        "replaylens.engine.memory.tree",
        "self._released[branch_id] = self._live.pop(branch_id)",
        "self._released[branch_id] = self._live[branch_id]",
        "requests that are released leave nothing behind",
        ("tests/engine/serving/test_memory.py::test_forks_of_a_branch_that_stays",),
    ),
)
