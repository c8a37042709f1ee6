"""Faults in rows from arrays: what is refused, what counts as the same observation, and which tensor a name means."""

from bench.mutants.mutant import Mutant

TESTS = "tests/probes/data/test_arrays.py::"
SAME = (f"{TESTS}test_rows_that_are_the_same_observation",)

ARRAYS = (
    Mutant(
        "arrays-not-finite",
        "replaylens.probes.sources",
        "bad = ~torch.isfinite(part).all(1)",
        "bad = ~torch.isfinite(part).any(1)",
        "a row with one NaN is refused",
        (f"{TESTS}test_refused",),
    ),
    Mutant(
        "arrays-digest-of-the-first-site",
        "replaylens.probes.sources",
        "for name in sorted(arrays):",
        "for name in sorted(arrays)[:1]:",
        "every site is checked",
        (f"{TESTS}test_digest_names_the_arrays",),
    ),
    Mutant(
        "arrays-lose-bits",
        "replaylens.probes.sources",
        "return x.to(torch.float32 if x.element_size() <= 2 else torch.float64)",
        "return x.to(torch.float16)",
        "integers keep their values",
        (f"{TESTS}test_any_dtype",),
    ),
    Mutant(
        "arrays-key-by-bits",
        "replaylens.probes.groups",
        "if paths is not None and rows.about.task is None:",
        "if False:",
        "rows of one path are one observation, whatever their last bits",
        SAME,
    ),
    Mutant(
        "arrays-without-a-key",
        "replaylens.probes.groups",
        "if cells else rows.cells(rows.default_sites)",
        "if cells else []",
        "rows without tokens are told apart by their bits",
        SAME,
    ),
    Mutant(
        "arrays-joined-as-one-model",
        "replaylens.probes.groups",
        'if rows.about.task is not None or "part" not in rows.frame:',
        "if True:",
        "the same text through two models is two observations",
        (f"{TESTS}test_parts_of_different_models_are_different_observations",),
    ),
    Mutant(
        "arrays-prompt-in-two-groups",
        "replaylens.probes.arrays",
        "wrong = np.flatnonzero(root != root[first][example])",
        "wrong = np.flatnonzero(root != root)",
        "rows of one prompt are in one group",
        (f"{TESTS}test_refused",),
    ),
    Mutant(
        "cache-positions-count-padding",
        "replaylens.probes.arrays",
        "place = kept.cumsum(1)[line, column] - 1",
        "place = column",
        "positions count from the first token that counts",
        (f"{TESTS}test_cache_with_padding",),
    ),
    Mutant(
        "cache-ignores-post-norms",
        "replaylens.engine.model.sites",
        "for own, shift in _POST_NORMS.get(letter, usual) if post_norms else usual:",
        "for own, shift in usual:",
        "T and C are the outputs of norms after attention and MLP",
        (f"{TESTS}test_cache_of_a_model_with_norms_after_attention",),
    ),
    Mutant(
        "untrained-rows-of-others",
        "replaylens.probes.controls",
        "if not same or not rows.frame[columns].equals(blank.frame[columns]):",
        "if not same:",
        "rows of an untrained model are the same rows",
        (f"{TESTS}test_untrained_model",),
    ),
    Mutant(
        "untrained-rows-not-in-the-key",
        "replaylens.probes.sweeps",
        '(self.blank.about.digest if self.blank else "")',
        '""',
        "a sweep resumes only with the same untrained model",
        (f"{TESTS}test_untrained_model",),
    ),
)
