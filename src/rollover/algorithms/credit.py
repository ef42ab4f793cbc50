"""Credit: from the scores of a batch's trajectories to an advantage for every token of their Rollouts.

    broadcast      A_t = w * estimator({R_j of the TrajectoryGroup})_i, on every loss token of trajectory i
    turn_returns   G_ik = sum_{j >= k} gamma^(j-k) r_ij over the turns k of i, R_i added to the last of them; the
                   estimator runs over all turns of the TrajectoryGroup as if each were a trajectory (Kevin, arXiv
                   2507.11948). Turns are not compared by index: the lengths of trajectories differ.
    over tokens    the reward of the trajectory: the step makes an advantage for each token of it, times w
                   (`RoleCredit`, trainer/token_advantages.py)
    precomputed    advantages that came with the trajectory (precomputed.py), times w
    distilled      0: a teacher gives them in the step (trainer/distill.py)
    examples       0: their loss has none (algorithm.loss = "nll"), and they need no score

w and the estimator are those of the role (workflow.roles). Statistics over a batch are over one role, as scores of
different roles have different scales; or over those roles that some TrajectoryGroup of the batch compares with each
other. Knows no estimator by name (advantage.py does).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import MappingProxyType

import numpy as np
import torch

from rollover.algorithms.advantage import Estimator, ScoredBatch, ScoredUnit, checked_advantages
from rollover.algorithms.filters import MaskedRollout
from rollover.algorithms.grouping import Grouped, Grouping
from rollover.algorithms.precomputed import count_precomputed_turns, precomputed_advantages, undeclared_error
from rollover.algorithms.shaping import Shaped, Shaping
from rollover.config import AlgorithmConfig, DistillConfig, WorkflowConfig
from rollover.config.traits import AdvantageTraits, estimator
from rollover.functions import custom_function
from rollover.trajectories import Trajectory, TrajectoryGroup, Turn, episodes_of
from rollover.types import Group, Reward, Rollout

UNTRAINED, ALONE = "untrained_role", "alone_in_role"
# Stands for an estimator where advantages do not come from scores: a teacher's, or those of examples.
_TEACHER = "distill.teacher"
_TEACHER_TRAITS = AdvantageTraits("log teacher/policy", ())
_MIN_COMPARED = 2


@dataclass(frozen=True)
class RoleCredit:
    """Scaling of the advantages of a role's tokens.

    `compared_with`: the roles that share its batch statistics, itself included. `weight`: factor applied after that.
    """

    compared_with: frozenset[str]
    weight: float


@dataclass
class Credited:
    """Advantages of a batch, and how they came about.

    `advantages`: rollout_id -> one for all of its tokens, or [n] over those after its prompt; for all Rollouts whose
    trajectory is compared. `sequences`: rollout_id -> id of its sequence. `compared`: group id -> its
    TrajectoryGroups. `missing`: ids of Rollouts without a score. `left_out`: Rollouts whose role leaves the loss, with
    the reason. `shaped`: the trained rewards, where they differ from the scores. `roles`: roles whose advantages are
    estimated over tokens. `num_precomputed`: TrajectoryGroups trained with precomputed advantages.
    `partly_precomputed`: role -> descriptions of its TrajectoryGroups that have some precomputed advantages, but not
    all, and are estimated instead (workflow.own_advantages = "auto").
    """

    advantages: dict[str, float | np.ndarray] = field(default_factory=dict)
    sequences: dict[str, str] = field(default_factory=dict)
    compared: dict[int, list[TrajectoryGroup]] = field(default_factory=dict)
    missing: set[str] = field(default_factory=set)
    left_out: list[MaskedRollout] = field(default_factory=list)
    shaped: Shaped = field(default_factory=Shaped)
    roles: dict[str, RoleCredit] = field(default_factory=dict)
    num_precomputed: int = 0
    partly_precomputed: dict[str, list[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Recipient:
    """A trajectory (`turn` None), or one of its turns, that gets one advantage."""

    trajectory: Trajectory
    turn: Turn | None
    unit: ScoredUnit


class Credit:
    """Assigns advantages as [algorithm] and [workflow] configure; none where a teacher gives them ([distill]).

    ValueError if they name a custom function that does not exist.
    """

    def __init__(
        self,
        algorithm: AlgorithmConfig,
        workflow: WorkflowConfig,
        distill: DistillConfig | None = None,
        shaping: Shaping | None = None,
    ) -> None:
        self.algorithm, self.workflow, self.distill = algorithm, workflow, distill or DistillConfig()
        self.shaping = shaping
        self.grouping = Grouping(workflow, self.distill)
        names = {algorithm.advantage, *(r.advantage for r in workflow.roles.values() if r.advantage)}
        self._estimators = {name: Estimator(algorithm, name) for name in names if not _traits(name).precomputed}
        self._after_scoring = AfterScoring(algorithm.after_scoring) if algorithm.after_scoring else None

    def __call__(
        self,
        groups: Sequence[Group],
        oldest: Mapping[int, int],
        left_out: Collection[str] = (),
        penalties: Mapping[str, np.ndarray] = MappingProxyType({}),
        version: int = 0,
        replayed: Collection[int] = (),
    ) -> Credited:
        """Return the advantages of a batch at trainer `version`.

        `oldest`: group id -> the oldest policy version in its loss. `left_out`: ids of Rollouts whose rewards count as
        missing. `penalties`: rollout_id -> what each token after its prompt subtracts from the rewards [n], after all
        shaping (estimators over tokens subtract it per token instead). `replayed`: ids of replayed groups.

        A TrajectoryGroup with fewer than two valid trajectories has nothing to compare, and leaves the loss if its
        Group has others (a Group of one is kept or dropped whole: rewards.min_valid). ValueError as in `Grouping` and
        `precomputed_advantages`.
        """
        credited = Credited()
        for group in groups:
            credited.compared[group.group_id] = self._compared(self.grouping(group), credited)
        for trajectory in (t for of in credited.compared.values() for c in of for t in c.trajectories):
            credited.sequences |= dict.fromkeys(trajectory.ids, trajectory.sequence_id)
        if self.shaping is not None:
            credited.shaped = self._shaped(self.shaping, groups, credited, left_out, version, replayed)
        self._assign(groups, credited, oldest, left_out, penalties)
        return credited

    # Private

    def _shaped(
        self,
        shaping: Shaping,
        groups: Sequence[Group],
        credited: Credited,
        left_out: Collection[str],
        version: int,
        replayed: Collection[int],
    ) -> Shaped:
        """Shape the rewards of all trajectories whose advantages are estimated."""
        compared = [c for several in credited.compared.values() for c in several]
        estimated = [t for c in compared if self._estimator_of(c) in self._estimators for t in c.trajectories]
        shaped = [t for t in estimated if t.ids.isdisjoint(left_out)]
        greedy = greedy_of(groups)
        uncounted = {t.sequence_id for t in shaped if t.group_id in replayed} | {t.sequence_id for t in greedy}
        roles = _compared_roles(credited.compared.values(), {t.role for t in shaped})
        return shaping([*shaped, *greedy], version, uncounted, roles)

    def _compared(self, grouped: Grouped, credited: Credited) -> list[TrajectoryGroup]:
        """Return the TrajectoryGroups of a Group that stay in the loss."""
        credited.left_out += _left_out(grouped.untrained, UNTRAINED, "its role is not trained")
        stay: list[TrajectoryGroup] = []
        for compared in grouped.compared:
            valid = sum(t.valid for t in compared.trajectories)
            several = len(grouped.compared) > 1 or bool(grouped.untrained)
            if several and valid < _MIN_COMPARED and _traits(self._estimator_of(compared)).compares_siblings:
                why = f"{valid} of its TrajectoryGroup have a score"
                credited.left_out += _left_out(compared.trajectories, ALONE, why)
            else:
                stay.append(compared)
        return stay

    def _assign(
        self,
        groups: Sequence[Group],
        credited: Credited,
        oldest: Mapping[int, int],
        left_out: Collection[str],
        penalties: Mapping[str, np.ndarray],
    ) -> None:
        stride = max((len(compared) for compared in credited.compared.values()), default=1)
        greedy = _greedy_scores(groups, credited.shaped)
        parts: dict[str, list[_Recipient]] = {}
        numbered = ((g, g * stride + k, c) for g, several in credited.compared.items() for k, c in enumerate(several))
        for group_id, number, compared in numbered:
            estimator = self._estimator_of(compared)
            credited.num_precomputed += estimator == "precomputed"
            self._check_undeclared(compared, estimator, credited)
            for trajectory in compared.trajectories:
                if estimator == _TEACHER:
                    continue
                credited.missing |= set() if trajectory.valid else trajectory.ids
                if estimator == "precomputed":
                    self._use_precomputed(trajectory, credited)
                    continue
                missing = not trajectory.ids.isdisjoint(left_out)
                of_tokens = {} if _traits(estimator).over_tokens else penalties
                baseline = greedy.get((group_id, trajectory.role), float("nan"))
                parts.setdefault(trajectory.role, []).extend(
                    _Recipient(trajectory, turn, ScoredUnit(reward, number, num, baseline, trajectory.named))
                    for turn, reward, num in self._units(
                        credited.shaped.apply(trajectory), missing, oldest[group_id], of_tokens
                    )
                )
        for roles in _compared_roles(credited.compared.values(), parts):
            compared = [part for role in roles for part in parts[role]]
            if _traits(self._advantage_of(compared[0].trajectory)).over_tokens:
                weights = {part.trajectory.role: self.grouping.role(part.trajectory).weight for part in compared}
                credited.roles |= {role: RoleCredit(frozenset(roles), weight) for role, weight in weights.items()}
            self._estimate(compared, credited)
        self._apply_after_scoring(groups, credited)

    def _check_undeclared(self, compared: TrajectoryGroup, estimator: str, credited: Credited) -> None:
        """Raise ValueError for precomputed advantages that are not used.

        With workflow.own_advantages = "auto" they are recorded instead, where some are missing.
        """
        if estimator == "precomputed":
            return
        found = [why for t in compared.trajectories if (why := undeclared_error(t, taught=estimator == _TEACHER))]
        if not found:
            return
        if self.workflow.own_advantages != "auto" or estimator == _TEACHER:
            raise ValueError(found[0])
        one, (brought, total) = compared.trajectories[0], count_precomputed_turns(compared)
        credited.partly_precomputed.setdefault(one.role, []).append(
            f"{brought} of {total} turns of task {one.task.task_id!r} bring advantages"
        )

    def _units(
        self, trajectory: Trajectory, missing: bool, oldest: int, penalties: Mapping[str, np.ndarray]
    ) -> list[tuple[Turn | None, Reward | None, int]]:
        """Return (turn, or None for all; its reward; its tokens in the loss) of each unit of a trajectory."""
        reward = None if missing else trajectory.reward
        if self.workflow.credit == "broadcast":
            num = sum(_num_in_loss(r, 0, r.num_tokens, oldest) for r in trajectory.rollouts)
            penalty = sum(_penalty(penalties, r, 0, r.num_tokens) for r in trajectory.rollouts)
            return [(None, _minus(reward, penalty), num)]
        returns = turn_returns(trajectory, self.workflow.turn_gamma, penalties) if trajectory.valid else []
        return [
            (
                turn,
                None if reward is None or reward.missing else Reward(returns[k]),
                _num_in_loss(turn.rollout, turn.start, turn.end, oldest),
            )
            for k, turn in enumerate(trajectory.turns)
        ]

    def _estimate(self, parts: list[_Recipient], credited: Credited) -> None:
        estimator = self._estimators[self._advantage_of(parts[0].trajectory)]
        advantages = estimator(ScoredBatch.from_units([part.unit for part in parts], self.algorithm)).tolist()
        for part, advantage in zip(parts, advantages, strict=True):
            weight = 1.0 if part.trajectory.role in credited.roles else self.grouping.role(part.trajectory).weight
            value = advantage * weight
            if part.turn is None:
                credited.advantages |= {r.rollout_id: value for r in part.trajectory.rollouts}
                continue
            rollout = part.turn.rollout
            stream = credited.advantages.setdefault(rollout.rollout_id, np.zeros(rollout.num_tokens, np.float32))
            assert isinstance(stream, np.ndarray)
            stream[part.turn.start : part.turn.end] = value

    def _use_precomputed(self, trajectory: Trajectory, credited: Credited) -> None:
        """Take the precomputed advantages. A trajectory without a score is not trained."""
        if trajectory.valid:
            weight = self.grouping.role(trajectory).weight
            for rollout, stream in zip(trajectory.rollouts, precomputed_advantages(trajectory), strict=True):
                credited.advantages[rollout.rollout_id] = stream * np.float32(weight)

    def _apply_after_scoring(self, groups: Sequence[Group], credited: Credited) -> None:
        """Let the custom function algorithm.after_scoring change the advantages."""
        if self._after_scoring is None:
            return
        rollouts = [r for g in groups for r in g.rollouts if r.rollout_id in credited.advantages]
        advantages = [credited.advantages[r.rollout_id] for r in rollouts]
        changed = self._after_scoring(rollouts, torch.tensor(advantages, dtype=torch.float32))
        credited.advantages = {r.rollout_id: a for r, a in zip(rollouts, changed.tolist(), strict=True)}

    def _advantage_of(self, trajectory: Trajectory) -> str:
        if self.algorithm.supervised or self.distill.replaces_for(trajectory.role):
            return _TEACHER
        return self.workflow.advantage_of(trajectory.role, self.algorithm.advantage)

    def _estimator_of(self, compared: TrajectoryGroup) -> str:
        """Return the estimator of a TrajectoryGroup. ValueError if its trajectories have several."""
        names = {self._advantage_of(trajectory): trajectory for trajectory in compared.trajectories}
        if len(names) > 1:
            (one, a), (other, b) = list(names.items())[:2]
            raise ValueError(
                f"workflow.group_by = {self.workflow.group_by!r} compares {a} with {b}, whose roles have the"
                f" advantages {one!r} and {other!r}: put them into groups of their own, or give the roles one"
            )
        (name,) = names
        return "precomputed" if name != _TEACHER and self.grouping.uses_precomputed(compared, name) else name


class AfterScoring:
    """The custom function `spec` of rollouts and their advantages. ValueError if it does not exist."""

    def __init__(self, spec: str) -> None:
        returns = "None, or one finite advantage for each of the rollouts"
        self._function = custom_function("algorithm.after_scoring", spec, returns)

    def __call__(self, rollouts: Sequence[Rollout], advantages_N: torch.Tensor) -> torch.Tensor:
        """Return the changed advantages [N]. FunctionError if it raises or returns anything else."""
        changed = self._function(list(rollouts), advantages_N)  # a copy: it may sort the list
        return checked_advantages(advantages_N if changed is None else changed, len(rollouts), self._function)


def turn_returns(
    trajectory: Trajectory, gamma: float, penalties: Mapping[str, np.ndarray] = MappingProxyType({})
) -> list[float]:
    """Return G_k = sum_{j >= k} gamma^(j-k) r_j of each turn of a scored trajectory.

    The score is added to the last r, and the `penalties` of its tokens are subtracted from every r. ValueError if a
    Rollout has rewards for more or fewer turns than it has, or one is not a finite number.
    """
    rewards: list[float] = []
    for rollout in trajectory.rollouts:
        num = sum(turn.rollout is rollout for turn in trajectory.turns)
        given = () if rollout.reward is None else rollout.reward.turns
        if len(given) not in (0, num):
            raise ValueError(
                f"{trajectory}, rollout {rollout.rollout_id}: {len(given)} rewards for {num} turns. Give Reward.turns"
                " one for each turn, or none"
            )
        for index, value in enumerate(given):
            if isinstance(value, bool) or not isinstance(value, int | float) or not np.isfinite(value):
                raise ValueError(
                    f"turn {index} of {trajectory}, rollout {rollout.rollout_id}, has the reward {value!r}: it must be"
                    " a finite number"
                )
        rewards += given or [0.0] * num
    if not rewards:
        return []
    assert trajectory.reward is not None and trajectory.reward.score is not None
    rewards[-1] += trajectory.reward.score
    if penalties:
        of_turns = [_penalty(penalties, turn.rollout, turn.start, turn.end) for turn in trajectory.turns]
        rewards = [reward - penalty for reward, penalty in zip(rewards, of_turns, strict=True)]
    returns = rewards[-1:]
    for reward in reversed(rewards[:-1]):
        returns.append(reward + gamma * returns[-1])
    return returns[::-1]


def _traits(name: str) -> AdvantageTraits:
    return _TEACHER_TRAITS if name == _TEACHER else estimator(name)


def _left_out(trajectories: Sequence[Trajectory], reason: str, why: str) -> list[MaskedRollout]:
    return [MaskedRollout(rollout, reason, why, True) for t in trajectories for rollout in t.rollouts]


def _compared_roles(compared: Iterable[Sequence[TrajectoryGroup]], roles: Iterable[str]) -> list[list[str]]:
    """Group the `roles` that TrajectoryGroups compare, directly or through others."""
    found = [{role} for role in roles]
    for together in ({t.role for t in group.trajectories} for several in compared for group in several):
        touched = [one for one in found if one & together]
        if len(touched) > 1:
            found = [one for one in found if not one & together] + [set().union(*touched)]
    return [sorted(one) for one in found]


def greedy_of(groups: Sequence[Group]) -> list[Trajectory]:
    """Return the greedy trajectories of these groups."""
    with_some = (g for g in groups if any(r.greedy for r in g.rollouts))
    return [t for group in with_some for episode in episodes_of(group) for t in episode.trajectories if t.greedy]


def _greedy_scores(groups: Sequence[Group], shaped: Shaped) -> dict[tuple[int, str], float]:
    """Return (group id, role) -> reward of its greedy trajectory; the mean of several."""
    scores: dict[tuple[int, str], list[float]] = {}
    for trajectory in map(shaped.apply, greedy_of(groups)):
        if trajectory.reward is not None and trajectory.reward.score is not None:
            scores.setdefault((trajectory.group_id, trajectory.role), []).append(trajectory.reward.score)
    return {place: sum(of) / len(of) for place, of in scores.items()}


def _penalty(penalties: Mapping[str, np.ndarray], rollout: Rollout, start: int, end: int) -> float:
    """Return the sum of the penalties of tokens `start` to `end` of a Rollout."""
    of_tokens = penalties.get(rollout.rollout_id)
    return 0.0 if of_tokens is None else float(of_tokens[start:end].sum(dtype=np.float64))


def _minus(reward: Reward | None, penalty: float) -> Reward | None:
    """Return the reward with the penalty subtracted."""
    if not penalty or reward is None or reward.score is None:
        return reward
    return replace(reward, score=reward.score - penalty)


def _num_in_loss(rollout: Rollout, start: int, end: int, oldest_version: int) -> int:
    """Count the sampled tokens `start` to `end` of policy version `oldest_version` or later."""
    ends = np.cumsum([0, *(segment.num_tokens for segment in rollout.segments)]).tolist()
    return sum(
        max(0, min(end, b) - max(start, a))
        for segment, (a, b) in zip(rollout.segments, pairwise(ends), strict=True)
        if segment.trainable and segment.policy_version >= oldest_version
    )
