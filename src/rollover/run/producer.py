"""Where the groups of a step come from: `produce(step, version) -> groups`.

    Generation         the driver's: tasks -> rollouts -> rewards, with all that rolls over
    RecordedRollouts   run.train_on_recorded: what another run recorded, for debugging a trainer without an engine
    OwnProducer        tasks.producer: the user's own class
    SupervisedExamples algorithm.loss = "nll": examples (supervised.py), which no policy sampled

All are behind the one loop, which trains what it is given. Owns what was produced last; never trains it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from rollover.config import Config
from rollover.engine.protocol import Engine
from rollover.files import did_you_mean_path, local_path
from rollover.functions import OwnFunction, described, own_function
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
    """Where the groups of a step come from. Without a state of its own, its groups follow from the step, or are in the
    cache."""

    source: str
    """What is used up when it returns []."""
    generates: bool
    """Whether the run's own driver makes its groups: they come through the lifecycle, so that a journal can tell of
    them and more of them can be generated while the trainer trains."""
    uses_engine: bool
    """Whether anyone generates with the run's engine, which then needs new weights."""

    async def produce(self, step: int, version: int) -> list[Group] | None:
        """The groups that training step `step` (1, 2, ...) trains, at trainer version `version` (step - 1).

        Whole, with rewards, in group-id order, no id twice in a run. [] when there is nothing (more) to train on; None
        when the run is stopping. A resumed run goes on with the next step.
        """
        ...

    def metrics(self) -> dict[str, float]:
        """What the row of a step tells of it."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """JSON-able: what a checkpoint holds of it."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`; {} is that of a checkpoint without one."""


Collect = Callable[[int], Awaitable[list[Group] | None]]


def build_producer(
    config: Config,
    loaded: LoadedModel,
    engine: Engine,
    stop: Stop,
    collect: Collect,
    examples: Examples | None = None,
) -> Producer:
    """The one that the configuration names, or of `examples`; without a name the run generates by `collect`. ValueError
    where it cannot be used."""
    if examples is not None:
        return SupervisedExamples(config, examples)
    if config.run.train_on_recorded:
        return RecordedRollouts(local_path(config.run.train_on_recorded), loaded.vocab_size)
    if config.tasks.producer:
        return OwnProducer(config, loaded.tokenizer, engine, stop, loaded.vocab_size)
    return Generation(collect)


class Generation(Producer):
    """The driver's groups. `collect(version)` as `Driver.collect`."""

    source, generates, uses_engine = "tasks", True, True

    def __init__(self, collect: Collect) -> None:
        self._collect = collect

    async def produce(self, step: int, version: int) -> list[Group] | None:
        return await self._collect(version)


class RecordedRollouts(Producer):
    """The groups of one recorded step after the other; [] at the end. Steps that trained nothing are left out.

    `vocab_size`: every token id of the model is below it.
    """

    source, generates, uses_engine = "recorded rollouts", False, False

    def __init__(self, folder: Path, vocab_size: int = 2**31 - 1) -> None:
        if not folder.is_dir():
            raise ValueError(
                f"run.train_on_recorded = {str(folder)!r}: there is no such folder{did_you_mean_path(folder)}"
            )
        self.folder, self.vocab_size = folder, vocab_size
        self._steps: Iterator[list[Group]] = (groups for groups in read_rollouts(folder) if groups)
        self._step = 0

    async def produce(self, step: int, version: int) -> list[Group] | None:
        """Steps before `step` are passed over: a resumed run has trained them. ValueError for what no policy can have
        sampled."""
        groups: list[Group] = []
        while self._step < step:
            groups = next(self._steps, [])
            self._step += 1
        for group in groups:
            if (why := _why_not_sampled(group, self.vocab_size)) is not None:
                raise ValueError(f"run.train_on_recorded = {str(self.folder)!r}: group {group.group_id} {why}")
        return groups


class OwnProducer(Producer):
    """The user's class, made by `Class(config, tokenizer, engine)`; its `produce(step, version)` may be `async def`.

    It may generate with the run's engine, which gets the new weights every train.publish_every steps, or bring groups
    from elsewhere (`ready_group`). What it returns is checked: ValueError says what is wrong with it. [] or None: there
    is no more.
    When the run is stopped an `async def` is cancelled, and nothing that it has by then is trained: a resumed run asks
    for that step again. `vocab_size`: every token id of the model is below it.
    """

    source, generates, uses_engine = "groups of tasks.producer", False, True

    def __init__(
        self,
        config: Config,
        tokenizer: Any,
        engine: Engine,
        stop: Stop | None = None,
        vocab_size: int = 2**31 - 1,
    ) -> None:
        self.name, self.engine, self.stop = config.tasks.producer, engine, stop or Stop()
        self.max_staleness, self.vocab_size = config.rollout.max_staleness, vocab_size
        self.grace_s = config.watchdog.grace_s
        self._last_group_id = -1
        make = own_function("tasks.producer", self.name, "an object with a method produce(step, version)")
        own = make(config, tokenizer, engine)
        if not callable(getattr(own, "produce", None)):
            raise make.refused(f"{described(own)}, which has no method produce")
        self._produce = OwnFunction(own.produce, "tasks.producer", self.name, "a list of Groups (of ready_group)")

    async def produce(self, step: int, version: int) -> list[Group] | None:
        groups = await self.stop.unless_requested(self._produce.awaited(step, version), self.grace_s)
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
        if stale > self.max_staleness:
            return f"has tokens that are {stale} versions old, above rollout.max_staleness = {self.max_staleness}"
        return _why_not_sampled(group, self.vocab_size)

    def state_dict(self) -> dict[str, Any]:
        return {"last_group_id": self._last_group_id}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._last_group_id = state.get("last_group_id", -1)


def _why_not_sampled(group: Group, vocab_size: int) -> str | None:
    """What to say after "group 3 " where no policy of this model can have sampled it; None where one can have."""
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
    """A group to be trained, of one list of segments and one Reward a rollout. For producers of your own.

    `group_id`: 0, 1, 2, ... over the run, restarts included (make it of the step). Each segment holds token ids, the
    log-probs that they were sampled with and the policy version that sampled them: the correction of off-policy tokens
    needs both. ValueError where a rollout was interrupted: its answer is not whole.
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
    """A trajectory that a producer of your own brings: the contexts that one role had in one episode, in order.

    `contexts`: (token ids of the prompt, segments) of each. `reward`: of the whole; its `turns`, and `advantages` if
    they are a list, have one entry for each turn (sampled run between environment segments) of all contexts.
    """

    contexts: Sequence[tuple[Sequence[int], Sequence[Segment]]]
    reward: Reward
    role: str = "policy"


def ready_episodes(group_id: int, task: Task, episodes: Sequence[Sequence[Played]]) -> Group:
    """A group to be trained, of the trajectories of each episode. For producers of your own.

    Like `ready_group`, for tasks that are solved by several roles, or in several contexts: each Rollout has a prompt of
    its own. What is compared with what, [workflow] says. ValueError where a context has no prompt or no tokens, or was
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
    """ValueError unless these are the segments of a rollout that has stopped."""
    if not sum(map(len, segments)):
        raise ValueError(f"{what} has no tokens")
    if segments[-1].stop_reason is StopReason.PAUSED:
        raise ValueError(f"{what} was interrupted, its answer is not whole: extend it to its end")
