"""Views over a Group: turns, trajectories, episodes, and what is compared with what."""

from __future__ import annotations

import pytest

from rollover.trajectories import by_role, episodes_of, turns_of
from rollover.types import Group, Prompt, Reward, Rollout, RolloutState, StopReason, Task
from unit.rollout.world import make_segment

TASK = Task("t0", "s", "r", prompt="x")
EOS, PAUSED = StopReason.EOS, StopReason.PAUSED


def rollout(sibling: int, trajectory: int = 0, context: int = 0, role: str = "policy", **fields) -> Rollout:
    segments = fields.pop("segments", [make_segment(2, 0, EOS)])
    reward = fields.pop("reward", Reward(1.0))
    return Rollout(
        3,
        sibling,
        TASK,
        segments,
        RolloutState.READY,
        EOS,
        reward,
        role=role,
        trajectory=trajectory,
        context=context,
        **fields,
    )


def group(*rollouts: Rollout) -> Group:
    return Group(3, TASK, Prompt((7, 8)), list(rollouts))


def test_a_plain_group_has_an_episode_of_one_trajectory_of_one_rollout_a_sibling() -> None:
    plain = group(rollout(0), rollout(1), rollout(2, greedy=True))
    assert [r.rollout_id for r in plain.rollouts] == ["3-0", "3-1", "3-2"]
    assert all(r.prompt is plain.prompt for r in plain.rollouts)
    episodes = episodes_of(plain)
    assert [[t.rollouts for t in e.trajectories] for e in episodes] == [[(r,)] for r in plain.rollouts]
    assert all(t.reward is r.reward for e, r in zip(episodes, plain.rollouts, strict=True) for t in e.trajectories)
    (compared,) = by_role(episodes)
    assert compared.role == "policy" and [t.episode for t in compared.trajectories] == [0, 1], "no greedy baseline"


def test_episodes_hold_their_trajectories_and_these_their_contexts_in_order() -> None:
    solver = [rollout(s, 0, c, "solver", prompt=Prompt((s, c))) for s in (0, 1) for c in (0, 1)]
    judge = [rollout(s, 1, 0, "judge") for s in (0, 1)]
    episodes = episodes_of(group(judge[1], solver[3], solver[0], solver[1], judge[0], solver[2]))
    assert [[t.rollouts for t in e.trajectories] for e in episodes] == [
        [(solver[0], solver[1]), (judge[0],)],
        [(solver[2], solver[3]), (judge[1],)],
    ]
    assert [r.rollout_id for r in solver] == ["3-0", "3-0.0.1", "3-1", "3-1.0.1"] and judge[1].rollout_id == "3-1.1.0"
    assert solver[1].prompt == Prompt((0, 1)) and judge[0].prompt == Prompt((7, 8)), "its own, or else its group's"
    assert [(g.role, len(g.trajectories)) for g in by_role(episodes)] == [("solver", 2), ("judge", 2)]
    assert str(episodes[1].trajectories[1]) == "trajectory 1 (role 'judge') of episode 3-1"


def test_a_trajectory_is_valid_when_all_its_rollouts_have_their_reward() -> None:
    ((whole,), (missing,), (unscored,)) = (
        e.trajectories
        for e in episodes_of(
            group(
                *(rollout(0, context=c) for c in (0, 1)),
                *(rollout(1, context=c, reward=Reward(1.0) if c else Reward(None, error="e")) for c in (0, 1)),
                *(rollout(2, context=c, reward=Reward(1.0) if c else None) for c in (0, 1)),
            )
        )
    )
    assert whole.valid and not missing.valid and not unscored.valid
    assert missing.reward is not None and missing.reward.error == "e" and unscored.reward is None


def test_the_rollouts_of_a_trajectory_have_one_role_and_one_score() -> None:
    with pytest.raises(ValueError, match=r"trajectory 0 \(role 'a'\) of episode 3-0: .* roles \['a', 'b'\]"):
        episodes_of(group(rollout(0, role="a"), rollout(0, context=1, role="b")))
    with pytest.raises(ValueError, match=r"trajectory 0 .* of episode 3-0: .* scores \['1.0', '2.0'\]"):
        episodes_of(group(rollout(0), rollout(0, context=1, reward=Reward(2.0))))


def test_turns_are_cut_where_a_generation_stopped_or_an_environment_wrote() -> None:
    def environment(num: int):
        return make_segment(num, 0, trainable=False)

    played = rollout(
        0,
        segments=[
            environment(1),
            make_segment(2, 0, PAUSED),
            make_segment(3, 1, StopReason.STOP_STRING),
            environment(2),
            environment(1),
            make_segment(1, 1, PAUSED),
            environment(1),  # whoever brings rollouts need not say how a turn ended
            make_segment(2, 1, EOS),
            make_segment(1, 2, PAUSED),
        ],
    )
    assert [(t.start, t.end, len(t)) for t in turns_of(played)] == [(1, 6, 5), (9, 10, 1), (11, 13, 2), (13, 14, 1)]
    assert turns_of(rollout(0, segments=[environment(2)])) == []
