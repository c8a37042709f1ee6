"""Probes over dumps, runs and branches: estimators, controls, statistics, sweeps, causal tests, branch questions.

Modules load on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # type checkers and editors see the names themselves
    from replaylens.probes.areas import area as area
    from replaylens.probes.attentive import AttentiveProbe as AttentiveProbe
    from replaylens.probes.balanced import balanced_accuracy as balanced_accuracy
    from replaylens.probes.causal import ablate as ablate
    from replaylens.probes.causal import interchange as interchange
    from replaylens.probes.causal import steer as steer
    from replaylens.probes.ccs import CcsProbe as CcsProbe
    from replaylens.probes.chosen import ChosenProbe as ChosenProbe
    from replaylens.probes.controls import untrained_rows as untrained_rows
    from replaylens.probes.crossval import CrossValidated as CrossValidated
    from replaylens.probes.crossval import cross_validate as cross_validate
    from replaylens.probes.curve import complexity_curve as complexity_curve
    from replaylens.probes.das import find_direction as find_direction
    from replaylens.probes.erasers import Inlp as Inlp
    from replaylens.probes.erasers import Leace as Leace
    from replaylens.probes.mass_mean import MassMeanProbe as MassMeanProbe
    from replaylens.probes.moments import MomentStream as MomentStream
    from replaylens.probes.online_code import online_codes as online_codes
    from replaylens.probes.probe import LinearProbe as LinearProbe
    from replaylens.probes.probe import fit_probe as fit_probe
    from replaylens.probes.probe import placebo_probes as placebo_probes
    from replaylens.probes.questions.across import transfer_across as transfer_across
    from replaylens.probes.questions.amnesic import amnesic as amnesic
    from replaylens.probes.questions.forced import forced_rows as forced_rows
    from replaylens.probes.questions.judge import judge as judge
    from replaylens.probes.questions.outcome_at_fork import outcome_at_fork as outcome_at_fork
    from replaylens.probes.questions.steering_reach import steering_reach as steering_reach
    from replaylens.probes.questions.text_or_truth import text_or_truth as text_or_truth
    from replaylens.probes.questions.transfer import transfer as transfer
    from replaylens.probes.questions.viable_branch import viable_branch as viable_branch
    from replaylens.probes.refit import permutation_test as permutation_test
    from replaylens.probes.registry import ESTIMATORS as ESTIMATORS
    from replaylens.probes.registry import calibrated as calibrated
    from replaylens.probes.report import Report as Report
    from replaylens.probes.rows import ProbeRows as ProbeRows
    from replaylens.probes.sequence_rows import sequences as sequences
    from replaylens.probes.solvers import Solution as Solution
    from replaylens.probes.solvers import one_hot as one_hot
    from replaylens.probes.solvers import solve as solve
    from replaylens.probes.sparse import SparseProbe as SparseProbe
    from replaylens.probes.splits import Split as Split
    from replaylens.probes.splits import by_acceptance as by_acceptance
    from replaylens.probes.splits import by_answer as by_answer
    from replaylens.probes.splits import by_depth as by_depth
    from replaylens.probes.splits import by_length as by_length
    from replaylens.probes.splits import by_mask as by_mask
    from replaylens.probes.splits import by_names as by_names
    from replaylens.probes.splits import by_part as by_part
    from replaylens.probes.splits import by_phrase as by_phrase
    from replaylens.probes.splits import by_root as by_root
    from replaylens.probes.splits import fold_of_groups as fold_of_groups
    from replaylens.probes.statistics import Estimate as Estimate
    from replaylens.probes.statistics import false_discovery as false_discovery
    from replaylens.probes.statistics import mean_over_groups as mean_over_groups
    from replaylens.probes.statistics import means_over_groups as means_over_groups
    from replaylens.probes.statistics import ratio_over_groups as ratio_over_groups
    from replaylens.probes.streaming import fit_streaming as fit_streaming
    from replaylens.probes.sweeping import sweep as sweep

_WHERE = {
    "AttentiveProbe": "attentive",
    "CcsProbe": "ccs",
    "ChosenProbe": "chosen",
    "CrossValidated": "crossval",
    "ESTIMATORS": "registry",
    "Estimate": "statistics",
    "Inlp": "erasers",
    "Leace": "erasers",
    "LinearProbe": "probe",
    "MassMeanProbe": "mass_mean",
    "MomentStream": "moments",
    "ProbeRows": "rows",
    "Report": "report",
    "Solution": "solvers",
    "SparseProbe": "sparse",
    "Split": "splits",
    "ablate": "causal",
    "amnesic": "questions.amnesic",
    "area": "areas",
    "balanced_accuracy": "balanced",
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
    "complexity_curve": "curve",
    "cross_validate": "crossval",
    "false_discovery": "statistics",
    "find_direction": "das",
    "fit_probe": "probe",
    "fit_streaming": "streaming",
    "fold_of_groups": "splits",
    "forced_rows": "questions.forced",
    "interchange": "causal",
    "judge": "questions.judge",
    "mean_over_groups": "statistics",
    "means_over_groups": "statistics",
    "one_hot": "solvers",
    "online_codes": "online_code",
    "outcome_at_fork": "questions.outcome_at_fork",
    "permutation_test": "refit",
    "placebo_probes": "probe",
    "ratio_over_groups": "statistics",
    "sequences": "sequence_rows",
    "solve": "solvers",
    "steer": "causal",
    "steering_reach": "questions.steering_reach",
    "sweep": "sweeping",
    "text_or_truth": "questions.text_or_truth",
    "transfer": "questions.transfer",
    "transfer_across": "questions.across",
    "untrained_rows": "controls",
    "viable_branch": "questions.viable_branch",
}

__all__ = list(_WHERE)


if not TYPE_CHECKING:  # a type checker would take `__getattr__` to mean that every name exists

    def __getattr__(name: str) -> object:
        """Import a public name on first use."""
        if name not in _WHERE:
            raise AttributeError(f"module 'replaylens.probes' has no attribute {name!r}. It has {', '.join(sorted(_WHERE))}.")
        return getattr(import_module(f"replaylens.probes.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
