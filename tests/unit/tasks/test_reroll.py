"""Deferred re-roll: which tasks, when, how many, in what order, and the state."""

from __future__ import annotations

import json

import pytest

from rollover.config import RerollConfig
from rollover.tasks.reroll import ATTEMPT, Reroll, has_failed
from rollover.types import Group, Prompt, Reward, Rollout, Task, rollout_seed
from unit.rollout.world import make_segment, make_task


def group(i: int, scores: tuple[float | None, ...] = (0.0, 0.0), attempt: int = 0) -> Group:
    task = Task(f"t{i}", "s", "r", prompt=f"problem {i}", attempt=attempt)
    rollouts = [Rollout(i, sibling, task) for sibling in range(len(scores))]
    for r, score in zip(rollouts, scores, strict=True):
        r.reward = Reward(score)
    return Group(i, task, Prompt((1, 2, i)), rollouts)


class Stream:
    """Endless tasks from 100 on."""

    def __init__(self) -> None:
        self.given = 99

    def __call__(self):
        self.given += 1
        return make_task(self.given), Prompt((1, 2, 3))


def reroll(num_steps: int = 10, **config: float) -> Reroll:
    return Reroll(RerollConfig.model_validate({"max_groups": 2, "start_fraction": 0.5} | config), num_steps, Stream())


def given(r: Reroll, num: int) -> list[str]:
    return [r()[0].task_id for _ in range(num)]  # type: ignore[index]


@pytest.mark.parametrize(
    ("scores", "at_most", "failed"),
    [
        ((0.0, 0.0), 0.0, True),
        ((-1.0, -1.0), 0.0, True),
        ((0.0, -1.0), 0.0, False),  # differs: it has a signal
        ((0.0, 1.0), 0.0, False),
        ((1.0, 1.0), 0.0, False),
        ((0.1, 0.1), 0.0, False),
        ((0.1, 0.1), 0.1, True),
        ((0.0, None), 0.0, True),
        ((None, None), 0.0, False),  # nothing is known about it
    ],
)
def test_which_groups_have_failed(scores: tuple[float | None, ...], at_most: float, failed: bool) -> None:
    assert has_failed(group(0, scores), at_most) is failed


def test_a_greedy_baseline_does_not_count() -> None:
    g = group(0, (0.0, 0.0, 1.0))
    segment = make_segment(2, 0)
    greedy = segment.__class__(
        segment.token_ids, segment.logprobs, 0, segment.sampling.__class__(temperature=0.0), segment.stop_reason
    )
    g.rollouts[2].add(greedy)
    assert has_failed(g, 0.0)


def test_reroll_starts_late_and_is_first_in_first_out() -> None:
    r = reroll()
    for version in range(1, 5):
        r.on_step([group(2 * version), group(2 * version + 1, (0.0, 1.0))], version)
        assert given(r, 2) == [f"t{98 + 2 * version}", f"t{99 + 2 * version}"], "too early"
    r.on_step([], 5)
    assert given(r, 4) == ["t2", "t4", "t108", "t109"], "at most max_groups of them a step"
    r.on_step([], 6)
    assert given(r, 3) == ["t6", "t8", "t110"]
    assert len(r) == 0 and r.given == 4


def test_a_task_that_is_given_again_samples_anew() -> None:
    r = reroll(start_fraction=0.0)
    r.on_step([group(3, attempt=2)], 1)
    task, prompt = r()  # type: ignore[misc]
    assert prompt == Prompt((1, 2, 3)) and task.attempt == 2 + ATTEMPT
    r.on_step([Group(9, task, Prompt((1, 2, 3)), group(3).rollouts)], 2)
    again, _ = r()  # type: ignore[misc]
    seeds = {rollout_seed(0, "t3", attempt, 0) for attempt in (0, 1, 2, 3, 4, task.attempt, again.attempt)}
    assert len(seeds) == 7, "neither its own earlier visits nor later passes of the stream have its draws"
    assert r.solved == 0
    r.on_step([Group(10, again, Prompt((1, 2, 3)), group(3, (0.0, 1.0)).rollouts), group(4, (0.0, 1.0))], 3)
    assert r.solved == 1 and len(r) == 0


def test_each_task_waits_once_and_the_queue_is_bounded() -> None:
    r = reroll(size=2)
    r.on_step([group(1), group(2)], 1)
    r.on_step([group(1), group(3), group(2), group(4)], 5)
    assert r.dropped == 2, "t3 and t4: a task that waits already is no drop"
    assert given(r, 3) == ["t1", "t2", "t100"]


def test_off_is_the_stream() -> None:
    r = reroll(max_groups=0, start_fraction=0.0)
    r.on_step([group(1)], 9)
    assert given(r, 2) == ["t100", "t101"] and len(r) == 0 and r.metrics() == {}


def test_state_round_trip_in_the_middle_of_a_step() -> None:
    r = reroll(start_fraction=0.0, size=5)
    r.on_step([group(i) for i in range(7)], 1)
    given(r, 1)
    state = json.loads(json.dumps(r.state_dict()))
    again = reroll(start_fraction=0.0, size=5)
    again.load_state_dict(state, max_prompt_tokens=3)
    assert again.state_dict() == r.state_dict() and again.metrics() == r.metrics()
    assert given(again, 2) == given(r, 2) == ["t1", "t100"], "one of this step's two was given before"
    again.on_step([], 2)
    assert given(again, 3) == ["t2", "t3", "t101"]
    smaller = reroll(start_fraction=0.0, size=3)
    smaller.load_state_dict(state, max_prompt_tokens=3)
    assert len(smaller) == 3 and smaller.dropped == r.dropped + 1
    shorter = reroll(start_fraction=0.0)
    shorter.load_state_dict(state, max_prompt_tokens=2)
    assert len(shorter) == 0


def test_a_filtered_group_counts_as_a_trained_one() -> None:
    """filters.zero_variance drops every group that failed: their tasks are given again all the same."""
    r = reroll(start_fraction=0.0)
    r.look(group(0))
    r.look(group(1, (1.0, 1.0)))
    r.look(group(2, (0.0, 1.0)))
    assert len(r) == 1 and given(r, 2) == ["t0", "t100"]
    r.look(group(0, (1.0, 1.0), attempt=ATTEMPT))
    assert (r.given, r.solved, len(r)) == (1, 1, 0)
    off = reroll(max_groups=0)
    off.look(group(0))
    assert len(off) == 0
