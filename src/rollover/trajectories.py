"""Views over a Group: who acted in it, in which order, and what is compared with what. Pure.

    Group        Episode 0 ── Trajectory 0 (solver)  Rollout, Rollout    one run of a workflow on the task, and in it
                            └ Trajectory 1 (judge)   Rollout             the ordered Rollouts (contexts) of one role
                 Episode 1 ── ...
    TrajectoryGroup (solver): trajectory 0 of each episode               what one baseline is taken over

A plain task is an Episode of one Trajectory of one Rollout. Nothing here changes a Rollout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby

from rollover.types import Group, Reward, Rollout, StopReason, Task


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One model call: tokens `start` to `end` of a Rollout, counted from the end of its prompt. All are sampled."""

    rollout: Rollout
    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """The ordered Rollouts of one role in one Episode, with one score. `index`: its place in the Episode.

    `reward` is that of the whole: None before it was scored, missing where that of one of its Rollouts is.
    """

    group_id: int
    episode: int
    index: int
    role: str
    rollouts: tuple[Rollout, ...]
    reward: Reward | None

    def __str__(self) -> str:
        """As messages name it."""
        return f"trajectory {self.index} (role {self.role!r}) of episode {self.group_id}-{self.episode}"

    @property
    def task(self) -> Task:
        return self.rollouts[0].task

    @property
    def named(self) -> str:
        """The name of the reward function of its task."""
        return self.task.reward

    @property
    def ids(self) -> set[str]:
        """Of its Rollouts."""
        return {rollout.rollout_id for rollout in self.rollouts}

    @property
    def sequence_id(self) -> str:
        """What its rows are known by as one sequence."""
        return self.rollouts[0].rollout_id

    @property
    def greedy(self) -> bool:
        """A baseline, which is never trained."""
        return any(rollout.greedy for rollout in self.rollouts)

    @property
    def valid(self) -> bool:
        """Whether it has a score."""
        return self.reward is not None and not self.reward.missing

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The model calls of all its Rollouts, in order."""
        return tuple(turn for rollout in self.rollouts for turn in turns_of(rollout))


@dataclass(frozen=True, slots=True, eq=False)
class Episode:
    """One run of a workflow on a task: a sibling of its Group."""

    group_id: int
    sibling: int
    task: Task
    trajectories: tuple[Trajectory, ...]


@dataclass(frozen=True, slots=True, eq=False)
class TrajectoryGroup:
    """The trajectories over which one baseline is taken."""

    trajectories: tuple[Trajectory, ...]

    @property
    def roles(self) -> tuple[str, ...]:
        """Those of its trajectories, sorted."""
        return tuple(sorted({trajectory.role for trajectory in self.trajectories}))

    @property
    def role(self) -> str:
        """That of its trajectories; "a+b" where they have several."""
        return "+".join(self.roles)


def place(rollout: Rollout) -> tuple[int, int, int]:
    """Where it stands in its Group: episode, trajectory, context."""
    return rollout.sibling, rollout.trajectory, rollout.context


def turns_of(rollout: Rollout) -> list[Turn]:
    """The model calls of a Rollout: a call ends where its generation stopped, or before what an environment wrote."""
    turns: list[Turn] = []
    start: int | None = None
    at = 0
    for segment in rollout.segments:
        if not segment.trainable and start is not None:
            turns.append(Turn(rollout, start, at))
            start = None
        if segment.trainable and segment.num_tokens:
            start = at if start is None else start
        at += segment.num_tokens
        if segment.trainable and start is not None and segment.stop_reason is not StopReason.PAUSED:
            turns.append(Turn(rollout, start, at))
            start = None
    if start is not None:
        turns.append(Turn(rollout, start, at))
    return turns


def up_to(rollout: Rollout, num_tokens: int) -> Rollout:
    """A copy with its first tokens alone, which end a turn, or are none: it has stopped as that did."""
    kept = [
        s for s, end in zip(rollout.segments, accumulate(map(len, rollout.segments)), strict=True) if end <= num_tokens
    ]
    reason = kept[-1].stop_reason if kept else None
    if reason is StopReason.PAUSED:  # why it stopped came with a segment without tokens: those are not kept
        reason = StopReason.EOS
    copy = replace(rollout, segments=kept, stop_reason=reason)
    assert copy.num_tokens == num_tokens, f"rollout {rollout.rollout_id}: no turn ends after {num_tokens} tokens"
    return copy


def episodes_of(group: Group) -> list[Episode]:
    """The episodes of a Group, and their trajectories, in order.

    ValueError where the Rollouts of one trajectory have several roles or scores: it has one of each.
    """
    ordered = sorted(group.rollouts, key=place)
    return [
        Episode(group.group_id, sibling, group.task, tuple(_trajectory(list(r)) for _, r in groupby(rollouts, _index)))
        for sibling, rollouts in groupby(ordered, lambda r: r.sibling)
    ]


def by_role(episodes: Sequence[Episode]) -> list[TrajectoryGroup]:
    """What baselines are taken over by default: the trajectories of each role, in the order in which roles appear.

    Greedy ones, which are never trained, are in none.
    """
    of_role: dict[str, list[Trajectory]] = {}
    for trajectory in (t for episode in episodes for t in episode.trajectories if not t.greedy):
        of_role.setdefault(trajectory.role, []).append(trajectory)
    return [TrajectoryGroup(tuple(trajectories)) for trajectories in of_role.values()]


def divided(reward: Reward, nums: Sequence[int], where: str) -> list[Reward]:
    """The Reward of each Rollout of a trajectory, which have `nums` turns: with what is about its own turns.

    ValueError, which names `where`, for rewards of more or fewer turns than all of them have. Advantages are checked by
    who trains with them (algorithms/precomputed.py): the last Rollout gets those that are too many.
    """
    total = sum(nums)
    given = reward.advantages
    if reward.turns and len(reward.turns) != total:
        raise ValueError(f"{where}: {len(reward.turns)} rewards for {total} turns. Give one for each turn, or none")
    ends = [*accumulate(nums)][:-1]
    return [
        replace(reward, turns=reward.turns[a:b], advantages=given[a:b] if isinstance(given, tuple) else given)
        for a, b in zip([0, *ends], [*ends, None], strict=True)
    ]


# Private


def _index(rollout: Rollout) -> int:
    return rollout.trajectory


def _trajectory(rollouts: list[Rollout]) -> Trajectory:
    first = rollouts[0]
    reward = _reward(rollouts)
    trajectory = Trajectory(first.group_id, first.sibling, first.trajectory, first.role, tuple(rollouts), reward)
    roles, scores = {r.role for r in rollouts}, {r.reward.score for r in rollouts if r.reward is not None}
    if len(roles) > 1:
        raise ValueError(f"{trajectory}: its rollouts have the roles {sorted(roles)}. Give them one")
    if reward is not None and not reward.missing and len(scores) > 1:
        raise ValueError(f"{trajectory}: its rollouts have the scores {sorted(map(str, scores))}. Give them one Reward")
    return trajectory


def _reward(rollouts: Sequence[Rollout]) -> Reward | None:
    """That of the last one, unless another lacks its own or has none."""
    rewards = [rollout.reward for rollout in rollouts]
    without = next((reward for reward in rewards if reward is None or reward.missing), rewards[-1])
    return None if None in rewards else without
