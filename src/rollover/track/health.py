"""Warnings about metrics outside the range of healthy training, with advice. Pure.

The ranges are those that Axolotl documents for GRPO (docs/training_stability), under our metric names. They are rules
of thumb: a warning is logged once, after several steps in a row outside the range.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from rollover.config import Config
from rollover.track.tracker import Cut, Row, Tracker

logger = logging.getLogger(__name__)

PATIENCE = 5  # steps in a row


@dataclass(frozen=True)
class Range:
    """`low` <= value <= `high` after step `after`; a warning after `patience` steps in a row outside.

    `at_zero`: advice if the value is exactly 0. `cause`: key of another range; steps outside that one do not count,
    because its advice is the one that helps. Non-finite values are ignored: train/skipped_steps counts them.
    """

    key: str
    low: float
    high: float
    advice: str
    after: int = 0
    at_zero: str = ""
    cause: str = ""
    patience: int = PATIENCE

    def advice_for(self, value: float | None, step: float) -> str:
        """Return the advice for a value, "" if it is in range."""
        if value is None or step <= self.after or self.low <= value <= self.high or not math.isfinite(value):
            return ""
        return self.at_zero if value == 0 and self.at_zero else self.advice


RANGES = (
    Range(
        "reward/mean", 0.15, float("inf"),
        "the tasks may be too hard, or the scorer does not find the answers: look at rollouts/, try easier tasks", 20,
    ),
    Range(
        "groups/zero_variance", 0.0, 0.8,
        "in most groups all rewards are equal, so that siblings compared teach nothing: try harder or easier tasks, a"
        " higher rollout.temperature, a larger rollout.group_size, or filters.zero_variance, which draws other tasks",
    ),
    Range(
        "grad_norm", 1e-3, float("inf"), "almost nothing is learned: try a higher train.learning_rate",
        at_zero="no token has a gradient: the advantages are all 0, all tokens are masked, or algorithm.loss does not"
        " depend on the policy",
        cause="groups/zero_variance",
    ),
    Range(
        "train/skipped_steps", 0.0, 0.0,
        "a gradient or the importance weights were not finite, and the weights were left as they are: look for rewards"
        " and log-probs in rollouts/ that are infinite or nan, look at algorithm.loss if it is your own, or try a lower"
        " train.learning_rate", patience=1,
    ),
    Range(
        "off_policy/rejected_share", 0.0, 0.9,
        "algorithm.rejection leaves most tokens out: try wider bounds or a lower"
        " rollout.max_staleness",
    ),
    Range("entropy", 0.05, float("inf"), "the policy has collapsed: try algorithm.entropy_coef or a larger clip_high"),
    Range("kl/reference", -float("inf"), 0.5, "it is far from the reference policy: try a larger algorithm.kl_coef"),
    Range(
        "mismatch/logprob_abs_mean", 0.0, 0.1,
        "engine and trainer disagree, or rollouts are old: try a lower rollout.max_staleness or"
        ' rollout.kv_on_resume = "recompute"',
    ),
    Range(
        "importance/ess", 0.1, float("inf"),
        "a few tokens carry all the weight: try a lower rollout.max_staleness or algorithm.correction_cap",
    ),
    Range("clip_fraction", 0.0, 0.1, "updates are clipped often: try a lower train.learning_rate or fewer minibatches"),
    Range(
        "episodes/timeout_share", 0.0, 0.05,
        "environments take too long, and their rollouts end without an answer: look for one that hangs, or raise"
        " workflow.timeout_s", patience=1,
    ),
    Range("length/truncated", 0.0, 0.3, "many answers are cut off: try a larger rollout.max_new_tokens"),
)  # fmt: skip


def reason_nothing_trained(config: Config, rows: Sequence[Row]) -> str:
    """Explain why a finished run changed no weight in any step; "" if it changed some, or had no steps to make."""
    if not config.train.num_steps or any(_trained(row) for row in rows):
        return ""
    if not rows:
        return "no step was made. The tasks are used up, or every group was dropped: the lines above say which"
    if not any(row.get("train/updates", 1) for row in rows):
        return "every update was skipped, as a gradient or an importance weight was not finite"
    alike = [share for row in rows if (share := row.get("groups/zero_variance")) is not None]
    of_rewards = f", and in {sum(alike) / len(alike):.0%} of the groups all rewards were equal" if alike else ""
    return (
        f"every gradient was 0{of_rewards}. Look at the answers and their scores in rollouts/, try easier or harder"
        " tasks, or fix the reward function"
    )


def _trained(row: Row) -> bool:
    """Return whether a step changed weights; a missing gradient norm counts as a change."""
    return bool(row.get("train/updates", 1)) and row.get("grad_norm") != 0


def ignored_figures(config: Config) -> list[str]:
    """Return the keys of RANGES that are meaningless under this configuration."""
    keys = [] if config.equal_scores_teach_nothing else ["groups/zero_variance"]
    if config.algorithm.supervised:
        return ["entropy", "groups/zero_variance", "reward/mean"]  # examples may be all but certain
    return [*keys, "reward/mean"] if config.distill.replaces else keys


class Health(Tracker):
    """Logs a warning for each metric that stays outside its range; never ends a run (rollout/watchdog.py finds hangs).

    `ignored`: keys without a warning.
    """

    def __init__(self, ignored: Collection[str] = ()) -> None:
        self._ranges = [wanted for wanted in RANGES if wanted.key not in ignored]
        self._out: Counter[str] = Counter()
        self._said: set[str] = set()

    def truncate(self, cut: Cut) -> None:
        self._out.clear()

    def on_step(self, row: Row) -> None:
        for warning in self.look({key: value for key, value in row.items() if value is not None}):
            logger.warning(f"health: {warning}")

    def look(self, row: Mapping[str, float]) -> list[str]:
        """Return the warnings that this step's row triggers."""
        warnings = []
        for wanted in self._ranges:
            value = row.get(wanted.key)
            advice = "" if self._is_out(row, wanted.cause) else wanted.advice_for(value, row["step"])
            self._out[wanted.key] = self._out[wanted.key] + 1 if advice else 0
            if value is not None and self._out[wanted.key] == wanted.patience and wanted.key not in self._said:
                self._said.add(wanted.key)
                where = f"below {wanted.low:g}" if value < wanted.low else f"above {wanted.high:g}"
                where = f"has been {where} for {wanted.patience} steps" if wanted.patience > 1 else f"is {where}"
                warnings.append(f"{wanted.key} = {value:.3g} {where}: {advice}")
        return warnings

    def _is_out(self, row: Mapping[str, float], key: str) -> bool:
        """Return whether the metric is outside its range in this step; False for the key ""."""
        return any(wanted.advice_for(row.get(key), row["step"]) for wanted in self._ranges if wanted.key == key)
