"""Figures of a run that left the range in which training usually goes well, and what to try. Pure.

The ranges are those that Axolotl documents for GRPO (docs/training_stability), under our metric names. They are habits,
not laws: a warning is said once, when a figure was out of its range for several steps in a row.
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
    """`low` <= value <= `high`, from step `after` on; a warning after `patience` steps in a row out of it.

    `at_zero`: other advice where the value is exactly 0. `cause`: the key of another range; steps in which that figure
    is out of its own do not count, as its advice is the one that helps. What is no finite number is passed over:
    train/skipped_steps tells of it.
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
        """What to try; "" if nothing is wrong."""
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
        "environments work for too long, and what they are given up at is no answer: look for one that hangs, or raise"
        " workflow.timeout_s", patience=1,
    ),
    Range("length/truncated", 0.0, 0.3, "many answers are cut off: try a larger rollout.max_new_tokens"),
)  # fmt: skip


def why_nothing_was_trained(config: Config, rows: Sequence[Row]) -> str:
    """Why a run that has come to its end changed no weight in any of its steps; "" if it did, or was not to."""
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
        " tasks, or mend the reward function"
    )


def _trained(row: Row) -> bool:
    """Whether a step changed weights. A gradient of which no norm is told counts."""
    return bool(row.get("train/updates", 1)) and row.get("grad_norm") != 0


def passed_over(config: Config) -> list[str]:
    """Keys of figures that say nothing of what a run of this configuration learns."""
    keys = [] if config.equal_scores_teach_nothing else ["groups/zero_variance"]
    if config.algorithm.supervised:
        return ["entropy", "groups/zero_variance", "reward/mean"]  # examples may be all but certain
    return [*keys, "reward/mean"] if config.distill.replaces else keys


class Health(Tracker):
    """Warns of figures that left their range: it counts, for each, the steps in a row that it was out of it.

    `passed_over`: keys of figures that do not matter in this run, however high or low. It watches what the run learns;
    it ends nothing. What does not come to an end is the matter of rollout/watchdog.py.
    """

    def __init__(self, passed_over: Collection[str] = ()) -> None:
        self._ranges = [wanted for wanted in RANGES if wanted.key not in passed_over]
        self._out: Counter[str] = Counter()
        self._said: set[str] = set()

    def truncate(self, cut: Cut) -> None:
        self._out.clear()

    def on_step(self, row: Row) -> None:
        for warning in self.look({key: value for key, value in row.items() if value is not None}):
            logger.warning(f"health: {warning}")

    def look(self, row: Mapping[str, float]) -> list[str]:
        """Warnings of this step's row."""
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
        """Whether the figure is out of its range in this step. False for the key ""."""
        return any(wanted.advice_for(row.get(key), row["step"]) for wanted in self._ranges if wanted.key == key)
