"""Views over a Group: its episodes, their trajectories by role, and the groups of a baseline. Pure.

    Group        Episode 0 ── Trajectory 0 (solver)  Rollout, Rollout    one run of a workflow on the task, and in it
                            └ Trajectory 1 (judge)   Rollout             the ordered Rollouts (contexts) of one role
                 Episode 1 ── ...
    TrajectoryGroup (solver): trajectory 0 of each episode               one baseline is taken over these

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
    """The ordered Rollouts of one role in one Episode, with one score. `index`: its index in the Episode.

    `reward`: of the whole; None before scoring, missing where a Rollout's is missing.
    """

    group_id: int
    episode: int
    index: int
    role: str
    rollouts: tuple[Rollout, ...]
    reward: Reward | None

    def __str__(self) -> str:
        return f"trajectory {self.index} (role {self.role!r}) of episode {self.group_id}-{self.episode}"

    @property
    def task(self) -> Task:
        return self.rollouts[0].task

    @property
    def named(self) -> str:
        """Name of the reward function of its task."""
        return self.task.reward

    @property
    def ids(self) -> set[str]:
        """Ids of its Rollouts."""
        return {rollout.rollout_id for rollout in self.rollouts}

    @property
    def sequence_id(self) -> str:
        """Id of the sequence that its rows form."""
        return self.rollouts[0].rollout_id

    @property
    def greedy(self) -> bool:
        """Whether it is a baseline, which is never trained."""
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
        """Roles of its trajectories, sorted."""
        return tuple(sorted({trajectory.role for trajectory in self.trajectories}))

    @property
    def role(self) -> str:
        """Role of its trajectories; "a+b" where they have several."""
        return "+".join(self.roles)


def place(rollout: Rollout) -> tuple[int, int, int]:
    """Return its position in the Group: (episode, trajectory, context)."""
    return rollout.sibling, rollout.trajectory, rollout.context


def turns_of(rollout: Rollout) -> list[Turn]:
    """Return the model calls of a Rollout: a call ends where generation stopped, or before text of an environment."""
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
    """Return a copy with its first `num_tokens`, up to the end of a turn, and the stop reason of that turn."""
    kept = [
        s for s, end in zip(rollout.segments, accumulate(map(len, rollout.segments)), strict=True) if end <= num_tokens
    ]
    reason = kept[-1].stop_reason if kept else None
    if reason is StopReason.PAUSED:  # its stop reason came with an empty segment, which is not kept
        reason = StopReason.EOS
    copy = replace(rollout, segments=kept, stop_reason=reason)
    assert copy.num_tokens == num_tokens, f"rollout {rollout.rollout_id}: no turn ends after {num_tokens} tokens"
    return copy


def episodes_of(group: Group) -> list[Episode]:
    """Return the episodes of a Group, in order.

    ValueError where the Rollouts of one trajectory have several roles or scores.
    """
    ordered = sorted(group.rollouts, key=place)
    return [
        Episode(group.group_id, sibling, group.task, tuple(_trajectory(list(r)) for _, r in groupby(rollouts, _index)))
        for sibling, rollouts in groupby(ordered, lambda r: r.sibling)
    ]


def by_role(episodes: Sequence[Episode]) -> list[TrajectoryGroup]:
    """Return the default groups of a baseline: the trajectories of each role, in order of appearance.

    Greedy trajectories are left out.
    """
    of_role: dict[str, list[Trajectory]] = {}
    for trajectory in (t for episode in episodes for t in episode.trajectories if not t.greedy):
        of_role.setdefault(trajectory.role, []).append(trajectory)
    return [TrajectoryGroup(tuple(trajectories)) for trajectories in of_role.values()]


def divided(reward: Reward, nums: Sequence[int], where: str) -> list[Reward]:
    """Divide the Reward of a trajectory among its Rollouts, which have `nums` turns each.

    ValueError, which names `where`, where the number of turn rewards differs from that of turns. Surplus advantages go
    to the last Rollout; algorithms/precomputed.py checks them.
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
    """Return the last Rollout's Reward, unless another one is None or missing."""
    rewards = [rollout.reward for rollout in rollouts]
    without = next((reward for reward in rewards if reward is None or reward.missing), rewards[-1])
    return None if None in rewards else without
