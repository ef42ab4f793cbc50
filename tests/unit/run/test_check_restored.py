"""What a restarted run refuses: rollouts of a snapshot that its configuration, or its engine, cannot go on with."""

from __future__ import annotations

import pytest

from rollover.config.rollout import RolloutConfig
from rollover.rollout.lifecycle import Lifecycle
from rollover.run.resume import check_restored
from rollover.types import Prompt, Rollout, SamplingParams, Segment, StopReason
from unit.rollout.world import make_segment, make_task, through_json

PROMPT, BUDGET, SO_FAR = (1, 2, 3), 20, 5


def sampled(temperature: float, stop: StopReason = StopReason.PAUSED, trainable: bool = True) -> Segment:
    plain = make_segment(SO_FAR, 0, stop, trainable=trainable)
    sampling = SamplingParams(temperature)
    return Segment(plain.token_ids.copy(), plain.logprobs.copy(), 0, sampling, stop, trainable)


def restored(*started: Segment, **changes: object) -> Lifecycle:
    """A snapshot that holds a rollout for each of these first segments, restored under another configuration."""
    values = {"groups_per_step": 1, "group_size": 1, "in_flight_groups": 2, "interrupt": "when_enough",
              "max_staleness": 1, "max_new_tokens": BUDGET}  # fmt: skip
    before = Lifecycle(RolloutConfig.model_validate(values))
    for i in range(max(1, len(started))):
        before.admit(make_task(i), Prompt(PROMPT), 0)
    rollouts: list[Rollout] = before.start(0) if started else []
    for rollout, segment in zip(rollouts, started, strict=True):
        before.append(rollout, [segment])
    state, arrays = before.state_dict()
    after = Lifecycle(RolloutConfig.model_validate(values | changes))
    after.load_state_dict(through_json(state), arrays)
    return after


ROOM = len(PROMPT) + BUDGET  # the longest rollout of that configuration


@pytest.mark.parametrize(
    ("started", "changes", "max_tokens"),
    [
        ([], {}, ROOM),
        ([sampled(1.0)], {}, ROOM),
        ([sampled(1.0)], {"max_new_tokens": SO_FAR + 1}, ROOM),
        ([sampled(1.0)], {"max_new_tokens": BUDGET + 1}, ROOM + 1),
        ([sampled(1.0, StopReason.EOS)], {"max_new_tokens": SO_FAR}, ROOM - 10),
        ([sampled(0.0)], {"temperature": 0.5}, ROOM),
        ([sampled(1.0, trainable=False)], {"temperature": 0.5}, ROOM),
    ],
    ids=["waiting", "as it was", "room for one more token", "larger, and the engine too",
         "finished: it needs no room", "greedy: a baseline", "written by an environment"],
)  # fmt: skip
def test_goes_on(started: list[Segment], changes: dict, max_tokens: int) -> None:
    check_restored(restored(*started, **changes), 0, max_tokens)


@pytest.mark.parametrize(
    ("started", "changes", "max_tokens", "num_tokens"),
    [
        ([], {"max_new_tokens": BUDGET + 1}, ROOM, 0),
        ([sampled(1.0)], {"max_new_tokens": BUDGET + 1}, ROOM, SO_FAR),
        ([], {}, ROOM - 1, 0),
        ([sampled(1.0)], {}, ROOM - 1, SO_FAR),
    ],
    ids=["larger budget, waiting", "larger budget, parked", "smaller engine, waiting", "smaller engine, parked"],
)  # fmt: skip
def test_refuses_what_would_not_fit(started: list[Segment], changes: dict, max_tokens: int, num_tokens: int) -> None:
    budget = changes.get("max_new_tokens", BUDGET)
    message = (
        rf"--resume with rollout.max_new_tokens = {budget}: .*rollout 0-0 has a prompt of {len(PROMPT)}"
        rf" and {num_tokens} tokens.* takes {max_tokens} in all\. Set it \(and engine.kv_memory_gb\) back"
    )
    with pytest.raises(ValueError, match=message):
        check_restored(restored(*started, **changes), 0, max_tokens)


def test_refuses_a_budget_that_is_used_up() -> None:
    """At once: what holds such a rollout could not go on, whoever asks it."""
    with pytest.raises(ValueError, match=f"rollout.max_new_tokens = {SO_FAR}: .* 0-0 has {SO_FAR} tokens so far.*more"):
        restored(sampled(1.0), max_new_tokens=SO_FAR)


@pytest.mark.parametrize("stop", [StopReason.PAUSED, StopReason.EOS])
def test_refuses_another_temperature(stop: StopReason) -> None:
    with pytest.raises(ValueError, match=r"rollout.temperature = 0.5: rollout 0-0 was begun at 1.*Set .* = 1$"):
        check_restored(restored(sampled(1.0, stop), temperature=0.5), 0, ROOM)


def test_looks_at_every_rollout() -> None:
    with pytest.raises(ValueError, match="rollout 1-0 was begun at 0.5"):
        check_restored(restored(sampled(1.0), sampled(0.5)), 0, ROOM)
