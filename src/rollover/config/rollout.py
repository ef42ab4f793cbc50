"""[rollout]: what is generated, and the rules about it.

A rule reads the configuration as given: `in_flight_groups = 0` and `on_stale = ""` are not settled yet.
"""

import math
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import Field

from rollover.config import logits
from rollover.config.logits import LogitsConfig
from rollover.config.table import Inert, Refused, Rule, Table, option
from rollover.config.traits import with_estimator
from rollover.staleness import EVERY_VERSION, NO_DEADLINE
from rollover.types import Group, Rollout, SamplingParams, StopReason

# The function of an `EnvironmentSetup` that makes each, loaded when it is called.
ENVIRONMENTS = {"single_turn": "rollover.envs.build:single_turn"}
ORDERS = ("oldest_first", "longest_first", "shortest_remaining", "fifo")
_PAUSED = StopReason.PAUSED  # needed at every parking; Enum member lookups are slow
AUTO_STEPS = 4  # in_flight_groups = "auto" holds at most so many steps' worth, unless the staleness bound allows more


class RolloutConfig(Table):
    """[rollout]: number of rollouts in flight, interruption of generation, staleness bound, and sampling."""

    groups_per_step: int = option(8, "Groups (tasks) trained in one step.", ge=1)
    group_size: int = option(8, "Sibling rollouts of one task.", ge=1)
    greedy_baseline: bool = option(
        False,
        "Generate one more, greedy rollout per task that is not trained: the baseline of algorithm.advantage ="
        " remax, which sets this.",
        only_if=with_estimator(lambda traits: traits.greedy),
    )
    max_new_tokens: int = option(256, "Limit of a rollout's tokens, over all its segments.", ge=1)
    in_flight_groups: Annotated[int, Field(ge=0)] | Literal["auto"] = option(
        0,
        "Groups held at once (admitted, not yet trained or dropped); 0 = groups_per_step. auto: chosen before every"
        " step from observed lengths, to keep all slots of the engine busy.",
    )
    supplement: bool = option(
        False,
        "Admit a new task as soon as all rollouts of a group are finished: in_flight_groups then counts unfinished"
        " groups, until there are enough for a step.",
    )
    interrupt: Literal["never", "when_enough", "token_budget", "on_weight_update"] = option(
        "never",
        "never: a step (with overlap: a weight sync) waits for every rollout in flight. when_enough: interrupt"
        " generation as soon as enough groups are ready. token_budget: each rollout generates at most token_budget"
        " tokens per phase; the phase ends when enough groups are ready. Unfinished rollouts continue in the next"
        " step. on_weight_update (with overlap): running rollouts continue under new weights as soon as these"
        " arrive.",
    )
    overlap: bool = option(
        False,
        "Generate while the trainer trains, within max_staleness: one step ahead with max_staleness = 1 and"
        " in_flight_groups = 2 * groups_per_step.",
    )
    token_budget: int = option(
        0,
        "Maximum number of tokens that a rollout generates in one phase.",
        ge=0,
        only_if=("rollout.interrupt", "token_budget"),
    )
    complete_fraction: float = option(
        1.0,
        "Share of groups_per_step that is enough for a step. The step trains every ready group, at most"
        " groups_per_step.",
        gt=0,
        le=1,
    )
    complete_by: Literal["group", "rollout"] = option(
        "group",
        "Unit of complete_fraction: ready groups, or finished rollouts (with at least one ready group). Groups are"
        " always trained whole.",
    )
    max_continuations: int = option(
        0,
        "Maximum number of interruptions of one rollout; after that, the step waits for it. 0 = no limit.",
        ge=0,
        only_if=("rollout.interrupt", "when_enough", "token_budget"),
    )
    max_staleness: int = option(0, "Bound on trainer_version - policy_version of every token in the loss.", ge=0)
    on_stale: Literal["", "finish_first", "drop", "mask"] = option(
        "",
        "Handling of groups beyond max_staleness. finish_first (default): delay new weights until no held group"
        " would exceed the bound. drop: drop such groups, with a counter. mask: tokens beyond the bound leave the"
        " loss, stay as context and count as dropped.",
    )
    kv_on_resume: Literal["recompute", "keep", "salt"] = option(
        "recompute",
        "KV cache of interrupted rollouts after a weight update. recompute: prefill again under the new weights."
        " keep: reuse everything. salt: running rollouts keep their cache, new requests do not reuse it.",
    )
    order: str = option(
        "oldest_first",
        "Order in which parked rollouts resume, before new ones start: oldest_first, longest_first,"
        " shortest_remaining, fifo, or a custom function (module:function or path.py:function) from a RolloutView to"
        " a tuple of integers, smallest first.",
        entry_points="orders",
    )
    environment: str = option(
        "single_turn",
        "Environment that responds after each generation. single_turn: none, the rollout ends. Or a custom function"
        " (module:function or path.py:function) from an EnvironmentSetup to an Environment (envs/protocol.py)."
        " Evaluations are single-turn.",
        entry_points="environments",
    )
    stop_repetition_tokens: int = option(
        0, "Stop a rollout when its last tokens, this many, repeat one pattern at least four times; 0 = off.", ge=0
    )
    temperature: float = option(1.0, "Sampling temperature of training rollouts (above 0).", ge=0)
    top_p: float = option(1.0, "Nucleus sampling; 1 = off. Truncation requires a correction.", gt=0, le=1)
    top_k: int = option(0, "Sample from the k likeliest tokens; 0 = off.", ge=0)
    min_p: float = option(0.0, "Drop tokens below min_p times the likeliest one's probability; 0 = off.", ge=0, lt=1)
    keep_special_tokens: bool = option(
        False,
        "Keep special tokens such as <think> in the text of answers for rewards, workflows, records and evaluations;"
        " EOS, padding and the end-of-turn token are always removed.",
    )
    stop: list[str] = option([], "Strings that end a rollout; they stay in its text.")
    stop_token_ids: list[int] = option([], "Token ids that end a rollout, besides EOS.")
    logits: LogitsConfig = Field(default_factory=LogitsConfig, description="Processing of logits before sampling.")

    @property
    def sampling(self) -> SamplingParams:
        """The distribution that training's tokens are drawn from, before `logits`."""
        return SamplingParams(self.temperature, self.top_p, self.top_k, self.min_p)

    @property
    def rollouts_per_group(self) -> int:
        """Trained siblings and the greedy baseline."""
        return self.group_size + self.greedy_baseline

    @property
    def finish_first(self) -> bool:
        """Whether a step waits so that no held group passes the bound; "" is not resolved yet."""
        return self.on_stale in ("", "finish_first")

    @property
    def masks(self) -> bool:
        """Whether tokens beyond the bound leave the loss."""
        return self.on_stale == "mask"

    @property
    def holds_the_bound(self) -> bool:
        """Whether a step that waits for every group that gets too old becomes possible at last (docs/staleness.md)."""
        return not self.finish_first or self.most_held <= self.max_groups_in_bound()

    @property
    def most_in_flight(self) -> int:
        """The largest number that in_flight_groups can stand for."""
        if self.in_flight_groups != "auto":
            return self.in_flight_groups or self.groups_per_step
        steps = 1 + self.max_staleness
        if not self.finish_first:
            steps = max(steps, AUTO_STEPS)
        return max(1, steps - self.supplement) * self.groups_per_step

    @property
    def first_in_flight(self) -> int:
        """Groups in flight before any length was seen."""
        return (
            min(self.most_in_flight, 2 * self.groups_per_step)
            if self.in_flight_groups == "auto"
            else self.most_in_flight
        )

    @property
    def most_held(self) -> int:
        """The largest number of groups held at once: with supplement, ready ones wait beside those in flight."""
        return self.most_in_flight + (self.groups_per_step if self.supplement else 0)

    @property
    def num_enough(self) -> int:
        """Groups' worth that is enough for a step, counted as complete_by says."""
        return math.ceil(self.complete_fraction * self.groups_per_step - 1e-9)

    @property
    def one_step_in_flight(self) -> bool:
        """Whether nothing else is in flight when there is enough for a step, so that nothing is left to interrupt."""
        whole = self.complete_fraction == 1 and self.complete_by == "group"
        return whole and self.most_held <= self.groups_per_step

    @property
    def nothing_rolls_over(self) -> bool:
        """Whether every rollout is finished before the step that follows it."""
        return not self.overlap and (self.interrupt == "never" or self.one_step_in_flight)

    def staleness_bound(self, publish_every: int) -> int:
        """Return the largest staleness that a token in the loss can have. Never above `max_staleness`.

        If nothing rolls over, a group waits at most for those admitted before it, ceil(most_held / groups_per_step) - 1
        steps, and the weights that sampled it were up to publish_every - 1 steps old.
        """
        if not self.nothing_rolls_over:
            return self.max_staleness
        waits = -(-self.most_held // self.groups_per_step) - 1
        return min(self.max_staleness, waits + publish_every - 1)

    # How old a token may get: proved in docs/staleness.md

    def oldest_in_loss(self, trainer_version: int) -> int:
        """Return the policy version below which tokens are masked in the loss of the step at `trainer_version`."""
        return trainer_version - self.max_staleness if self.masks else EVERY_VERSION

    def max_groups_in_bound(self, lag: int = 0) -> int:
        """Return the limit of held groups so that each can be trained within the bound; <= 0: none may be admitted.

        `lag`: versions that the next sampled token is behind the trainer at the next step. A step at lag l may leave as
        many groups as may be held at lag l + 1.
        """
        return (1 + self.max_staleness - lag) * self.groups_per_step

    def deadline(self, oldest_version: int | None) -> float:
        """Return the last trainer version whose step may train tokens of this version; NO_DEADLINE without tokens."""
        return NO_DEADLINE if oldest_version is None else oldest_version + self.max_staleness

    def expiry(self, group: Group) -> float:
        """Return the last trainer version whose step may train any of the group's tokens; NO_DEADLINE without tokens.

        Groups are consumed in this order. With masks the newest token counts, of rollouts that are trained: not greedy,
        and with a reward.
        """
        if not self.masks:
            return self.deadline(group.min_version)
        rewarded = (r for r in group.rollouts if r.reward is None or not r.reward.missing)
        return self.deadline(max((v for r in rewarded if not r.greedy for v in r.versions), default=None))

    def expired(self, groups: Iterable[Group], trainer_version: int) -> list[int]:
        """Return the ids of groups that no step from `trainer_version` on may train.

        With masks only READY groups expire: the others still get tokens.
        """
        may_expire = (g for g in groups if g.ready or not self.masks)
        return [g.group_id for g in may_expire if self.expiry(g) < trainer_version]

    def excess_groups(self, groups: Iterable[Group], trainer_version: int, bound: int) -> list[int]:
        """Return the ids of the fewest groups to drop so that all others can be trained within `bound`; oldest first.

        Of the others at most (k + 1) * groups_per_step are due by trainer_version + k, for every k >= 0, and at most
        (1 + bound) * groups_per_step are held. No group may be running.
        """
        tighter = self.max_staleness - bound
        due = sorted((self.deadline(g.min_version) - tighter, -g.group_id) for g in groups)
        num_beyond = 0
        for rank, (time, _) in enumerate(due, start=1):
            steps = min(1 + bound, max(0, time - trainer_version + 1))
            num_beyond = max(num_beyond, rank - int(steps) * self.groups_per_step)
        return sorted(-group_id for _, group_id in due[:num_beyond])

    def next_run_is_last(self, rollout: Rollout) -> bool:
        """Return whether an unfinished rollout may not be interrupted again."""
        if not self.max_continuations:
            return False
        return sum(s.trainable and s.stop_reason is _PAUSED for s in rollout.segments) >= self.max_continuations

    def pause_after(self, rollout: Rollout) -> int:
        """Return the tokens after which a rollout that starts now is interrupted; 0: no limit."""
        return 0 if self.interrupt != "token_budget" or self.next_run_is_last(rollout) else self.token_budget

    def neutral(self, name: str) -> tuple[Any, ...]:
        if name == "in_flight_groups":
            return (0, self.groups_per_step)
        return ("", "finish_first") if name == "on_stale" else super().neutral(name)


def _nothing_gets_stale(config: Any) -> bool:
    """Every step trains all that is in flight, by the newest weights, so no token is older than its step."""
    rollout = config.rollout
    newest = config.train.publish_every == 1 and not config.tasks.producer
    return newest and rollout.nothing_rolls_over and rollout.most_held == rollout.groups_per_step


_OF_ROLLING_OVER = ("supplement", "complete_fraction", "complete_by", "order", "kv_on_resume")
GENERATION = (
    "in_flight_groups", "interrupt", "overlap", "max_staleness", "on_stale", "stop_repetition_tokens",
    "token_budget", "max_continuations", "environment",
    *_OF_ROLLING_OVER,
)  # fmt: skip
SAMPLING = ("temperature", "top_p", "top_k", "min_p")

RULES: tuple[Rule, ...] = (
    *logits.RULES,
    Inert(
        ("rollout.in_flight_groups",),
        ("rollout.max_staleness", "rollout.on_stale", "rollout.supplement"),
        lambda c: c.rollout.in_flight_groups == "auto" and c.rollout.most_in_flight <= c.rollout.groups_per_step,
        "as there is nothing to choose: rollout.max_staleness allows no more than rollout.groups_per_step groups",
        "Raise rollout.max_staleness",
    ),
    Inert(
        ("rollout.interrupt",),
        ("rollout.in_flight_groups", "rollout.groups_per_step"),
        lambda c: c.rollout.one_step_in_flight and not c.rollout.overlap,
        "with as many groups in flight as a step trains (rollout.in_flight_groups = rollout.groups_per_step): when"
        " enough groups are ready, none is left to interrupt",
        "Raise rollout.in_flight_groups",
    ),
    Inert(
        ("rollout.max_staleness", "rollout.on_stale"),
        ("rollout.interrupt", "rollout.in_flight_groups", "rollout.groups_per_step", "train.publish_every"),
        _nothing_gets_stale,
        'with rollout.interrupt = "never" and rollout.in_flight_groups = rollout.groups_per_step: nothing gets stale',
        "Raise rollout.in_flight_groups",
    ),
    Inert(
        tuple(f"rollout.{name}" for name in _OF_ROLLING_OVER),
        ("rollout.interrupt",),
        lambda c: c.rollout.interrupt == "never" and not c.rollout.overlap,
        'with rollout.interrupt = "never": a step waits for all that is in flight, no rollout is parked and resumed',
        'Set rollout.interrupt = "when_enough"',
    ),
    Refused(
        ("rollout.interrupt", "rollout.max_staleness"),
        lambda c: (
            not (c.rollout.nothing_rolls_over or c.rollout.overlap)
            and c.rollout.max_staleness == 0
            and c.rollout.on_stale != "mask"
        ),
        lambda c: (
            f'rollout.interrupt = "{c.rollout.interrupt}" with rollout.max_staleness = 0: an interrupted rollout is'
            ' always stale when it is trained. Set rollout.max_staleness to 1 or more, rollout.on_stale = "mask" (its'
            ' earlier tokens leave the loss), or rollout.interrupt = "never"'
        ),
    ),
    Refused(
        ("rollout.overlap", "rollout.interrupt"),
        lambda c: c.rollout.overlap and c.rollout.interrupt in ("when_enough", "token_budget"),
        lambda c: (
            f'rollout.overlap with rollout.interrupt = "{c.rollout.interrupt}": generation continues when there is'
            ' enough for a step. Set rollout.interrupt = "on_weight_update" (rollouts continue under new weights) or'
            ' "never" (they end under those they began with)'
        ),
    ),
    Refused(
        ("rollout.overlap", "rollout.on_stale"),
        lambda c: c.rollout.overlap and c.rollout.on_stale == "drop",
        'rollout.overlap with rollout.on_stale = "drop": generation waits rather than that anything gets too old.'
        ' Set rollout.on_stale = "finish_first"',
    ),
    Refused(
        ("rollout.overlap", "rollout.interrupt"),
        lambda c: c.rollout.interrupt == "on_weight_update" and not c.rollout.overlap,
        'rollout.interrupt = "on_weight_update" without rollout.overlap: nothing is generated while weights are'
        " updated. Set rollout.overlap = true",
    ),
    Refused(
        ("rollout.interrupt", "rollout.token_budget"),
        lambda c: c.rollout.interrupt == "token_budget" and not 0 < c.rollout.token_budget < c.rollout.max_new_tokens,
        lambda c: (
            f'rollout.token_budget = {c.rollout.token_budget} with rollout.interrupt = "token_budget": it must be'
            f" above 0 and below rollout.max_new_tokens = {c.rollout.max_new_tokens}. Set it"
        ),
    ),
    Refused(
        ("rollout.stop_repetition_tokens",),
        lambda c: 0 < c.rollout.stop_repetition_tokens < 16,
        lambda c: (
            f"rollout.stop_repetition_tokens = {c.rollout.stop_repetition_tokens}: so few tokens repeat themselves in"
            " sound answers too. Set it to 16 or more (64, say), or to 0 (off)"
        ),
    ),
    Refused(
        ("rollout.in_flight_groups", "rollout.groups_per_step"),
        lambda c: c.rollout.most_in_flight < c.rollout.groups_per_step,
        lambda c: (
            f"rollout.in_flight_groups = {c.rollout.in_flight_groups} is below rollout.groups_per_step ="
            f" {c.rollout.groups_per_step}: a step would never have enough groups. Raise it, or set it to 0 (equal)"
        ),
    ),
    Refused(
        ("rollout.in_flight_groups", "rollout.max_staleness", "rollout.groups_per_step", "rollout.on_stale"),
        lambda c: not c.rollout.holds_the_bound,
        lambda c: (
            f"rollout.in_flight_groups = {c.rollout.in_flight_groups}"
            + (
                " and as many ready ones beside them as a step trains (rollout.supplement),"
                if c.rollout.supplement
                else ""
            )
            + " is above (1 + rollout.max_staleness) *"
            f" rollout.groups_per_step = {c.rollout.max_groups_in_bound()}: with"
            ' rollout.on_stale = "finish_first" the bound could not be held. Lower it, raise rollout.max_staleness, or'
            ' set rollout.on_stale = "drop" to lose groups that get too old'
        ),
    ),
    Refused(
        ("rollout.temperature",),
        lambda c: c.rollout.temperature == 0,
        "rollout.temperature = 0: greedy rollouts of a task are all the same and are never trained. Set it above 0"
        " (eval.temperature = 0 makes the evaluation greedy)",
    ),
)
