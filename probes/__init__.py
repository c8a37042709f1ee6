"""Probes over dumps, runs and branches: estimators, controls, statistics, sweeps, causal tests, branch questions.

Modules load on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # type checkers and editors see the names themselves
    from replaylens.probes.causal.das import find_direction as find_direction
    from replaylens.probes.causal.interventions import ablate as ablate
    from replaylens.probes.causal.interventions import interchange as interchange
    from replaylens.probes.causal.interventions import steer as steer
    from replaylens.probes.data.feature_columns import with_features as with_features
    from replaylens.probes.data.groups import near_duplicates as near_duplicates
    from replaylens.probes.data.rows import ProbeRows as ProbeRows
    from replaylens.probes.data.sequence_rows import sequences as sequences
    from replaylens.probes.design.controls import untrained_rows as untrained_rows
    from replaylens.probes.design.splits import Split as Split
    from replaylens.probes.design.splits import by_acceptance as by_acceptance
    from replaylens.probes.design.splits import by_answer as by_answer
    from replaylens.probes.design.splits import by_depth as by_depth
    from replaylens.probes.design.splits import by_length as by_length
    from replaylens.probes.design.splits import by_mask as by_mask
    from replaylens.probes.design.splits import by_names as by_names
    from replaylens.probes.design.splits import by_part as by_part
    from replaylens.probes.design.splits import by_phrase as by_phrase
    from replaylens.probes.design.splits import by_root as by_root
    from replaylens.probes.design.splits import fold_of_groups as fold_of_groups
    from replaylens.probes.estimators.attentive import AttentiveProbe as AttentiveProbe
    from replaylens.probes.estimators.ccs import CcsProbe as CcsProbe
    from replaylens.probes.estimators.erasers import Inlp as Inlp
    from replaylens.probes.estimators.erasers import Leace as Leace
    from replaylens.probes.estimators.mass_mean import MassMeanProbe as MassMeanProbe
    from replaylens.probes.estimators.moments import MomentStream as MomentStream
    from replaylens.probes.estimators.solvers import Solution as Solution
    from replaylens.probes.estimators.solvers import one_hot as one_hot
    from replaylens.probes.estimators.solvers import solve as solve
    from replaylens.probes.estimators.sparse import SparseProbe as SparseProbe
    from replaylens.probes.fitting.chosen import ChosenProbe as ChosenProbe
    from replaylens.probes.fitting.crossval import CrossValidated as CrossValidated
    from replaylens.probes.fitting.crossval import cross_validate as cross_validate
    from replaylens.probes.fitting.online_code import online_codes as online_codes
    from replaylens.probes.fitting.probe import LinearProbe as LinearProbe
    from replaylens.probes.fitting.probe import fit_probe as fit_probe
    from replaylens.probes.fitting.probe import placebo_probes as placebo_probes
    from replaylens.probes.fitting.refit import permutation_test as permutation_test
    from replaylens.probes.fitting.registry import ESTIMATORS as ESTIMATORS
    from replaylens.probes.fitting.registry import calibrated as calibrated
    from replaylens.probes.fitting.streaming import fit_streaming as fit_streaming
    from replaylens.probes.forks.change_points import change_points as change_points
    from replaylens.probes.forks.distributions import outcome_curve as outcome_curve
    from replaylens.probes.forks.drafts import draft_agreement as draft_agreement
    from replaylens.probes.forks.forking_tokens import TokenFork as TokenFork
    from replaylens.probes.forks.forking_tokens import forking_tokens as forking_tokens
    from replaylens.probes.forks.importance import counterfactual_importance as counterfactual_importance
    from replaylens.probes.forks.importance import importance as importance
    from replaylens.probes.forks.outcome_probe import outcome_probe as outcome_probe
    from replaylens.probes.forks.resilience import resilience as resilience
    from replaylens.probes.forks.rollout_texts import RolloutTexts as RolloutTexts
    from replaylens.probes.forks.siblings import sibling_divergence as sibling_divergence
    from replaylens.probes.questions.across import transfer_across as transfer_across
    from replaylens.probes.questions.amnesic import amnesic as amnesic
    from replaylens.probes.questions.forced import forced_rows as forced_rows
    from replaylens.probes.questions.judge import judge as judge
    from replaylens.probes.questions.outcome_at_fork import outcome_at_fork as outcome_at_fork
    from replaylens.probes.questions.steering_reach import steering_reach as steering_reach
    from replaylens.probes.questions.text_or_truth import text_or_truth as text_or_truth
    from replaylens.probes.questions.transfer import transfer as transfer
    from replaylens.probes.questions.viable_branch import viable_branch as viable_branch
    from replaylens.probes.reports.report import Report as Report
    from replaylens.probes.scoring.areas import area as area
    from replaylens.probes.scoring.balanced import balanced_accuracy as balanced_accuracy
    from replaylens.probes.scoring.statistics import Estimate as Estimate
    from replaylens.probes.scoring.statistics import false_discovery as false_discovery
    from replaylens.probes.scoring.statistics import mean_over_groups as mean_over_groups
    from replaylens.probes.scoring.statistics import means_over_groups as means_over_groups
    from replaylens.probes.scoring.statistics import ratio_over_groups as ratio_over_groups
    from replaylens.probes.sweeps.curve import complexity_curve as complexity_curve
    from replaylens.probes.sweeps.sweeping import sweep as sweep

_WHERE = {
    "AttentiveProbe": "estimators.attentive",
    "CcsProbe": "estimators.ccs",
    "ChosenProbe": "fitting.chosen",
    "CrossValidated": "fitting.crossval",
    "ESTIMATORS": "fitting.registry",
    "Estimate": "scoring.statistics",
    "Inlp": "estimators.erasers",
    "Leace": "estimators.erasers",
    "LinearProbe": "fitting.probe",
    "MassMeanProbe": "estimators.mass_mean",
    "MomentStream": "estimators.moments",
    "ProbeRows": "data.rows",
    "Report": "reports.report",
    "RolloutTexts": "forks.rollout_texts",
    "Solution": "estimators.solvers",
    "SparseProbe": "estimators.sparse",
    "Split": "design.splits",
    "TokenFork": "forks.forking_tokens",
    "ablate": "causal.interventions",
    "amnesic": "questions.amnesic",
    "area": "scoring.areas",
    "balanced_accuracy": "scoring.balanced",
    "by_acceptance": "design.splits",
    "by_answer": "design.splits",
    "by_depth": "design.splits",
    "by_length": "design.splits",
    "by_mask": "design.splits",
    "by_names": "design.splits",
    "by_part": "design.splits",
    "by_phrase": "design.splits",
    "by_root": "design.splits",
    "calibrated": "fitting.registry",
    "change_points": "forks.change_points",
    "complexity_curve": "sweeps.curve",
    "counterfactual_importance": "forks.importance",
    "cross_validate": "fitting.crossval",
    "draft_agreement": "forks.drafts",
    "false_discovery": "scoring.statistics",
    "find_direction": "causal.das",
    "fit_probe": "fitting.probe",
    "fit_streaming": "fitting.streaming",
    "fold_of_groups": "design.splits",
    "forced_rows": "questions.forced",
    "forking_tokens": "forks.forking_tokens",
    "importance": "forks.importance",
    "interchange": "causal.interventions",
    "judge": "questions.judge",
    "mean_over_groups": "scoring.statistics",
    "means_over_groups": "scoring.statistics",
    "near_duplicates": "data.groups",
    "one_hot": "estimators.solvers",
    "online_codes": "fitting.online_code",
    "outcome_at_fork": "questions.outcome_at_fork",
    "outcome_curve": "forks.distributions",
    "outcome_probe": "forks.outcome_probe",
    "permutation_test": "fitting.refit",
    "placebo_probes": "fitting.probe",
    "ratio_over_groups": "scoring.statistics",
    "resilience": "forks.resilience",
    "sequences": "data.sequence_rows",
    "sibling_divergence": "forks.siblings",
    "solve": "estimators.solvers",
    "steer": "causal.interventions",
    "steering_reach": "questions.steering_reach",
    "sweep": "sweeps.sweeping",
    "text_or_truth": "questions.text_or_truth",
    "transfer": "questions.transfer",
    "transfer_across": "questions.across",
    "untrained_rows": "design.controls",
    "viable_branch": "questions.viable_branch",
    "with_features": "data.feature_columns",
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
