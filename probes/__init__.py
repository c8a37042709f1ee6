"""Probes over dumps, runs and branches: estimators, controls, statistics, sweeps, causal tests, branch questions.

Modules load on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # type checkers and editors see the names themselves
    from replaylens.probes.areas import area as area
    from replaylens.probes.areas import balanced_accuracy as balanced_accuracy
    from replaylens.probes.causal import ablate as ablate
    from replaylens.probes.causal import find_direction as find_direction
    from replaylens.probes.causal import interchange as interchange
    from replaylens.probes.causal import steer as steer
    from replaylens.probes.controls import untrained_rows as untrained_rows
    from replaylens.probes.erasers import Inlp as Inlp
    from replaylens.probes.erasers import Leace as Leace
    from replaylens.probes.erasers import MomentStream as MomentStream
    from replaylens.probes.estimators import AttentiveProbe as AttentiveProbe
    from replaylens.probes.estimators import CcsProbe as CcsProbe
    from replaylens.probes.estimators import MassMeanProbe as MassMeanProbe
    from replaylens.probes.estimators import SparseProbe as SparseProbe
    from replaylens.probes.forks.change_points import change_points as change_points
    from replaylens.probes.forks.distributions import RolloutTexts as RolloutTexts
    from replaylens.probes.forks.distributions import outcome_curve as outcome_curve
    from replaylens.probes.forks.importance import counterfactual_importance as counterfactual_importance
    from replaylens.probes.forks.importance import importance as importance
    from replaylens.probes.forks.importance import resilience as resilience
    from replaylens.probes.forks.outcome_probe import outcome_probe as outcome_probe
    from replaylens.probes.forks.tokens import TokenFork as TokenFork
    from replaylens.probes.forks.tokens import draft_agreement as draft_agreement
    from replaylens.probes.forks.tokens import forking_tokens as forking_tokens
    from replaylens.probes.forks.tokens import sibling_divergence as sibling_divergence
    from replaylens.probes.groups import near_duplicates as near_duplicates
    from replaylens.probes.heldout import online_codes as online_codes
    from replaylens.probes.heldout import permutation_test as permutation_test
    from replaylens.probes.intervals import Estimate as Estimate
    from replaylens.probes.intervals import false_discovery as false_discovery
    from replaylens.probes.intervals import mean_over_groups as mean_over_groups
    from replaylens.probes.intervals import means_over_groups as means_over_groups
    from replaylens.probes.intervals import ratio_over_groups as ratio_over_groups
    from replaylens.probes.probe import CrossValidated as CrossValidated
    from replaylens.probes.probe import LinearProbe as LinearProbe
    from replaylens.probes.probe import cross_validate as cross_validate
    from replaylens.probes.probe import fit_probe as fit_probe
    from replaylens.probes.probe import fit_streaming as fit_streaming
    from replaylens.probes.probe import placebo_probes as placebo_probes
    from replaylens.probes.questions.erasure import amnesic as amnesic
    from replaylens.probes.questions.erasure import steering_reach as steering_reach
    from replaylens.probes.questions.forced import forced_rows as forced_rows
    from replaylens.probes.questions.forced import outcome_at_fork as outcome_at_fork
    from replaylens.probes.questions.forced import text_or_truth as text_or_truth
    from replaylens.probes.questions.forced import viable_branch as viable_branch
    from replaylens.probes.questions.judge import judge as judge
    from replaylens.probes.questions.transfer import transfer as transfer
    from replaylens.probes.questions.transfer import transfer_across as transfer_across
    from replaylens.probes.registry import ESTIMATORS as ESTIMATORS
    from replaylens.probes.registry import ChosenProbe as ChosenProbe
    from replaylens.probes.registry import calibrated as calibrated
    from replaylens.probes.report import Report as Report
    from replaylens.probes.rows import ProbeRows as ProbeRows
    from replaylens.probes.rows import sequences as sequences
    from replaylens.probes.rows import with_features as with_features
    from replaylens.probes.solvers import Solution as Solution
    from replaylens.probes.solvers import one_hot as one_hot
    from replaylens.probes.solvers import solve as solve
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
    from replaylens.probes.sweeps import complexity_curve as complexity_curve
    from replaylens.probes.sweeps import sweep as sweep

_WHERE = {
    "AttentiveProbe": "estimators",
    "CcsProbe": "estimators",
    "ChosenProbe": "registry",
    "CrossValidated": "probe",
    "ESTIMATORS": "registry",
    "Estimate": "intervals",
    "Inlp": "erasers",
    "Leace": "erasers",
    "LinearProbe": "probe",
    "MassMeanProbe": "estimators",
    "MomentStream": "erasers",
    "ProbeRows": "rows",
    "Report": "report",
    "RolloutTexts": "forks.distributions",
    "Solution": "solvers",
    "SparseProbe": "estimators",
    "Split": "splits",
    "TokenFork": "forks.tokens",
    "ablate": "causal",
    "amnesic": "questions.erasure",
    "area": "areas",
    "balanced_accuracy": "areas",
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
    "change_points": "forks.change_points",
    "complexity_curve": "sweeps",
    "counterfactual_importance": "forks.importance",
    "cross_validate": "probe",
    "draft_agreement": "forks.tokens",
    "false_discovery": "intervals",
    "find_direction": "causal",
    "fit_probe": "probe",
    "fit_streaming": "probe",
    "fold_of_groups": "splits",
    "forced_rows": "questions.forced",
    "forking_tokens": "forks.tokens",
    "importance": "forks.importance",
    "interchange": "causal",
    "judge": "questions.judge",
    "mean_over_groups": "intervals",
    "means_over_groups": "intervals",
    "near_duplicates": "groups",
    "one_hot": "solvers",
    "online_codes": "heldout",
    "outcome_at_fork": "questions.forced",
    "outcome_curve": "forks.distributions",
    "outcome_probe": "forks.outcome_probe",
    "permutation_test": "heldout",
    "placebo_probes": "probe",
    "ratio_over_groups": "intervals",
    "resilience": "forks.importance",
    "sequences": "rows",
    "sibling_divergence": "forks.tokens",
    "solve": "solvers",
    "steer": "causal",
    "steering_reach": "questions.erasure",
    "sweep": "sweeps",
    "text_or_truth": "questions.forced",
    "transfer": "questions.transfer",
    "transfer_across": "questions.transfer",
    "untrained_rows": "controls",
    "viable_branch": "questions.forced",
    "with_features": "rows",
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
