"""Probes over dumps, runs and branches: estimators, controls, statistics, sweeps, causal tests, branch questions.

The parts load on first use.
"""

from importlib import import_module
from typing import Any

_WHERE = {
    "AttentiveProbe": "attentive",
    "CcsProbe": "ccs",
    "ESTIMATORS": "registry",
    "Inlp": "erasers",
    "Leace": "erasers",
    "LinearProbe": "probe",
    "MassMeanProbe": "mass_mean",
    "MomentStream": "moments",
    "ProbeRows": "rows",
    "Report": "report",
    "SparseProbe": "sparse",
    "Split": "splits",
    "ablate": "causal",
    "by_acceptance": "splits",
    "by_answer": "splits",
    "by_depth": "splits",
    "by_length": "splits",
    "by_mask": "splits",
    "by_names": "splits",
    "by_part": "splits",
    "by_phrase": "splits",
    "by_root": "splits",
    "calibrated": "registry",
    "find_direction": "das",
    "fit_probe": "probe",
    "fit_streaming": "streaming",
    "forced_rows": "questions.forced",
    "interchange": "causal",
    "judge": "questions.judge",
    "outcome_at_fork": "questions.outcome_at_fork",
    "permutation_test": "refit",
    "placebo_probes": "probe",
    "sequences": "sequence_rows",
    "steer": "causal",
    "steering_reach": "questions.steering_reach",
    "sweep": "sweeping",
    "text_or_truth": "questions.text_or_truth",
    "transfer": "questions.transfer",
    "untrained_rows": "controls",
    "viable_branch": "questions.viable_branch",
}

__all__ = list(_WHERE)


def __getattr__(name: str) -> Any:
    """Load a public name where it lives, the first time it is asked for."""
    if name not in _WHERE:
        raise AttributeError(f"module 'replaylens.probes' has no attribute {name!r}; it offers {', '.join(sorted(_WHERE))}")
    return getattr(import_module(f"replaylens.probes.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
