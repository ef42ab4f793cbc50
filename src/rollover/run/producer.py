"""Producers of a step's groups: `produce(step, version) -> groups`.

    Pipeline           the driver: tasks -> rollouts -> rewards, resumable across steps (pipeline.py)
    RecordedRollouts   run.train_on_recorded: the record of another run, for debugging a trainer without an engine
    CustomProducer     tasks.producer: a class of the user
    SupervisedExamples algorithm.loss = "nll": examples (supervised.py)

Each owns its position. Never trains.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from rollover.config import Config
from rollover.engine.protocol import Engine
from rollover.files import did_you_mean_path, local_path
from rollover.functions import CustomFunction, custom_function, described
from rollover.run.stop import Stop
from rollover.run.supervised import Examples, SupervisedExamples
from rollover.staleness import group_staleness
from rollover.track.records import read_rollouts
from rollover.trajectories import divided, turns_of
from rollover.types import (
    Group,
    Prompt,
    Reward,
    Rollout,
    RolloutState,
    Segment,
    StopReason,
    Task,
    why_not_in_vocabulary,
)

if TYPE_CHECKING:
    from rollover.models.load import LoadedModel


class Producer(Protocol):
    """Producer of a step's groups. One without state derives them from the step, or takes them from the cache."""

    source: str
    """Name of what is used up when it returns []."""
    uses_engine: bool
    """Whether the run's engine generates, and so needs new weights."""

    async def produce(self, step: int, version: int) -> list[Group] | None:
        """Return the groups of training step `step` (1, 2, ...), at trainer version `version` (step - 1).

        They are complete, have rewards, and are in the order of their ids, which are unique in a run. [] when no groups
        are left; None when a stop is requested. A resumed run continues with the next step.
        """
        ...

    def metrics(self) -> dict[str, float]:
        """Return metrics for the row of a step."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return its JSON-able state for a checkpoint."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state`; {} for a checkpoint without one."""


def build_producer(
    config: Config, loaded: LoadedModel, engine: Engine, stop: Stop, examples: Examples | None = None
) -> Producer | None:
    """Build the producer that the configuration names. None: the run's driver generates.

    ValueError where it cannot be used.
    """
    if examples is not None:
        return SupervisedExamples(config, examples)
    if config.run.train_on_recorded:
        return RecordedRollouts(local_path(config.run.train_on_recorded), loaded.vocab_size)
    if config.tasks.producer:
        return CustomProducer(config, loaded.tokenizer, engine, stop, loaded.vocab_size)
    return None


class RecordedRollouts(Producer):
    """The groups of each recorded step, in order; [] at the end. Steps without trained groups are left out.

    `vocab_size`: upper bound of token ids.
    """

    source, uses_engine = "recorded rollouts", False

    def __init__(self, folder: Path, vocab_size: int = 2**31 - 1) -> None:
        if not folder.is_dir():
            raise ValueError(
                f"run.train_on_recorded = {str(folder)!r}: there is no such folder{did_you_mean_path(folder)}"
            )
        self.folder, self.vocab_size = folder, vocab_size
        self._steps: Iterator[list[Group]] = (groups for groups in read_rollouts(folder) if groups)
        self._step = 0

    async def produce(self, step: int, version: int) -> list[Group] | None:
        """Return the groups of `step`; earlier steps are skipped. ValueError for invalid rollouts."""
        groups: list[Group] = []
        while self._step < step:
            groups = next(self._steps, [])
            self._step += 1
        for group in groups:
            if (why := _why_not_sampled(group, self.vocab_size)) is not None:
                raise ValueError(f"run.train_on_recorded = {str(self.folder)!r}: group {group.group_id} {why}")
        return groups


class CustomProducer(Producer):
    """A user's class, made by `Class(config, tokenizer, engine)`; its `produce(step, version)` may be `async def`.

    It may generate with the run's engine, whose weights are synced every train.publish_every steps, or take groups from
    elsewhere (`ready_group`). The result is checked: ValueError for an invalid group. [] or None: no groups are left.
    A stop cancels an `async def`, and discards its groups: a resumed run calls it again for that step. `vocab_size`:
    upper bound of token ids.
    """

    source, uses_engine = "groups of tasks.producer", True

    def __init__(
        self,
        config: Config,
        tokenizer: Any,
        engine: Engine,
        stop: Stop | None = None,
        vocab_size: int = 2**31 - 1,
    ) -> None:
        self.config, self.engine, self.stop, self.vocab_size = config, engine, stop or Stop(), vocab_size
        self.name = config.tasks.producer
        self._last_group_id = -1
        make = custom_function("tasks.producer", self.name, "an object with a method produce(step, version)")
        own = make(config, tokenizer, engine)
        if not callable(getattr(own, "produce", None)):
            raise make.refused(f"{described(own)}, which has no method produce")
        self._produce = CustomFunction(own.produce, "tasks.producer", self.name, "a list of Groups (of ready_group)")

    async def produce(self, step: int, version: int) -> list[Group] | None:
        groups = await self.stop.unless_requested(self._produce.awaited(step, version), self.config.watchdog.grace_s)
        if self.stop.requested:
            return None
        if groups is None:
            return []
        if not isinstance(groups, list | tuple) or not all(isinstance(g, Group) for g in groups):
            raise self._produce.refused(described(groups))
        groups = sorted(groups, key=lambda g: g.group_id)
        for group in groups:
            problem = self._problem(group, version)
            if problem is not None:
                raise ValueError(f"tasks.producer = {self.name!r}: group {group.group_id} of step {step} {problem}")
            self._last_group_id = group.group_id
            self.engine.release([r.rollout_id for r in group.rollouts])
        return groups

    def _problem(self, group: Group, version: int) -> str | None:
        if group.group_id <= self._last_group_id:
            return f"comes after group {self._last_group_id}: ids must rise over the run, restarts included"
        if not group.rollouts or not group.ready or any(r.reward is None for r in group.rollouts):
            return "is not ready: every rollout needs tokens and a Reward (make it with ready_group)"
        if any(v > version for r in group.rollouts for v in r.versions):
            return f"has tokens of a policy version above the trainer's, {version}"
        stale = group_staleness(group, version) or 0
        if stale > (bound := self.config.staleness_bound):
            return f"has tokens that are {stale} versions old, above rollout.max_staleness = {bound}"
        return _why_not_sampled(group, self.vocab_size)

    def state_dict(self) -> dict[str, Any]:
        return {"last_group_id": self._last_group_id}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._last_group_id = state.get("last_group_id", -1)


def _why_not_sampled(group: Group, vocab_size: int) -> str | None:
    """Return why no policy of this model can have sampled the group, to follow "group 3 "; None if valid."""
    if (why := why_not_in_vocabulary(np.asarray(group.prompt.ids), vocab_size)) is not None:
        return f"cannot be trained: in its prompt, {why}"
    for rollout in group.rollouts:
        if (why := why_not_in_vocabulary(np.asarray(rollout.prompt.ids), vocab_size)) is not None:
            return f"cannot be trained: in the prompt of rollout {rollout.rollout_id}, {why}"
        unknown = (why_not_in_vocabulary(segment.token_ids, vocab_size) for segment in rollout.segments)
        if (why := rollout.why_not_sampled() or next(filter(None, unknown), None)) is not None:
            return f"cannot be trained: in rollout {rollout.rollout_id}, {why}"
    return None


def ready_group(
    group_id: int,
    task: Task,
    prompt_ids: Sequence[int],
    segments: Sequence[Sequence[Segment]],
    rewards: Sequence[Reward],
) -> Group:
    """Make a group to train, from one list of segments and one Reward per rollout. For custom producers.

    `group_id`: 0, 1, 2, ... over the run, restarts included (make it of the step). Each segment holds token ids, the
    log-probs that they were sampled with and the policy version that sampled them: the correction of off-policy tokens
    needs both. ValueError where a rollout was interrupted.
    """
    if not segments or len(segments) != len(rewards):
        raise ValueError(f"{len(segments)} rollouts and {len(rewards)} rewards: a group has one reward a rollout")
    rollouts = []
    for sibling, (of, reward) in enumerate(zip(segments, rewards, strict=True)):
        _check_whole(of, f"rollout {sibling} of group {group_id}")
        rollout = Rollout(group_id, sibling, task, list(of), RolloutState.READY)
        rollout.stop_reason = of[-1].stop_reason
        rollout.reward = reward
        rollouts.append(rollout)
    return Group(group_id, task, Prompt.of(prompt_ids), rollouts)


@dataclass(frozen=True)
class Played:
    """A trajectory of a custom producer: the contexts of one role in one episode, in order.

    `contexts`: (token ids of the prompt, segments) of each. `reward`: of the whole; its `turns`, and `advantages` if
    they are a list, have one entry for each turn (sampled run between environment segments) of all contexts.
    """

    contexts: Sequence[tuple[Sequence[int], Sequence[Segment]]]
    reward: Reward
    role: str = "policy"


def ready_episodes(group_id: int, task: Task, episodes: Sequence[Sequence[Played]]) -> Group:
    """Make a group to train, from the trajectories of each episode. For custom producers.

    Like `ready_group`, for episodes with several roles or contexts: each Rollout has its own prompt. [workflow] decides
    which trajectories are compared. ValueError where a context has no prompt or no tokens, or was
    interrupted, or there are rewards for more or fewer turns than it has.
    """
    rollouts: list[Rollout] = []
    for sibling, episode in enumerate(episodes):
        for index, played in enumerate(episode):
            where = f"trajectory {index} (role {played.role!r}) of episode {group_id}-{sibling}"
            of_trajectory: list[Rollout] = []
            for context, (prompt_ids, segments) in enumerate(played.contexts):
                _check_whole(segments, f"context {context} of {where}")
                if not len(prompt_ids):
                    raise ValueError(f"context {context} of {where} has no prompt: give its token ids")
                rollout = Rollout(
                    group_id,
                    sibling,
                    task,
                    list(segments),
                    RolloutState.READY,
                    segments[-1].stop_reason,
                    prompt=Prompt.of(prompt_ids),
                    role=played.role,
                    trajectory=index,
                    context=context,
                )
                of_trajectory.append(rollout)
            if not of_trajectory:
                raise ValueError(f"{where} has no context: leave it out")
            nums = [len(turns_of(rollout)) for rollout in of_trajectory]
            for rollout, reward in zip(of_trajectory, divided(played.reward, nums, where), strict=True):
                rollout.reward = reward
            rollouts += of_trajectory
    if not rollouts:
        raise ValueError(f"group {group_id} has no trajectory: a group has one episode or more")
    return Group(group_id, task, rollouts[0].prompt, rollouts)


def _check_whole(segments: Sequence[Segment], what: str) -> None:
    """Raise ValueError unless these are the segments of a finished rollout."""
    if not sum(map(len, segments)):
        raise ValueError(f"{what} has no tokens")
    if segments[-1].stop_reason is StopReason.PAUSED:
        raise ValueError(f"{what} was interrupted, its answer is not whole: extend it to its end")
