"""What is on record of an Episode, and which of it a run of the function asks for again: no engine, no host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from rollover.envs.protocol import written
from rollover.trajectories import up_to
from rollover.types import Rollout, SamplingParams, Segment, StopReason, Task
from rollover.workflows.conversations import Call, Chats
from rollover.workflows.episode import EpisodeTrajectory
from rollover.workflows.turns import Continued, EpisodeLimits, Opened, Replayed, Turns
from unit.envs import templates

TOKENIZER = templates.tokenizer(templates.CHATML)
CHATS = Chats(TOKENIZER)
TASK = Task("t", "test", "", messages=({"role": "user", "content": "What is 2+2?"},))
PROMPT = CHATS.for_tools(()).prompt(TASK.messages or ())
EOS = CHATS.for_tools(()).end_of_turn


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


class Run:
    """One run of a function, whose calls are made one by one."""

    def __init__(self, recorded: Sequence[Rollout] = (), **limits: Any) -> None:
        self.counts: Counter[str] = Counter()
        self.turns = Turns(
            Rollout(0, 0, TASK, prompt=PROMPT), EpisodeLimits(400, 2000, **limits), self.counts, recorded
        )
        self.rollouts: dict[str, Rollout] = {}

    def trajectory(self, role: str = "policy") -> EpisodeTrajectory:
        async def nobody(*args: Any) -> Any:
            raise AssertionError

        return EpisodeTrajectory(role, "key", nobody, CHATS)

    def begin(self, trajectory: EpisodeTrajectory, messages: list[Any], **more: Any) -> Any:
        call = Call(tuple(messages), **more)
        turn = self.turns.begin(
            trajectory,
            call,
            self.turns.find(trajectory, call, trajectory.conversations.place_of(call)),
            call.max_tokens or 400,
        )
        if isinstance(turn, Opened):
            self.rollouts[turn.rollout_id] = turn.rollout
        elif isinstance(turn, Continued) and turn.tokens:
            rollout = self.rollouts[turn.rollout_id]
            rollout.add(written(rollout, turn.tokens))
        return turn

    def sample(self, rollout: Rollout, text: str, reason: StopReason = StopReason.EOS) -> None:
        ids = [*TOKENIZER(text)["input_ids"], *([EOS] if reason is StopReason.EOS else [])]
        arrays = np.array(ids, np.int32), np.full(len(ids), -1.0, np.float32)
        rollout.add(Segment(*arrays, 0, SamplingParams(), reason))
        rollout.stop_reason = None if reason is StopReason.PAUSED else reason

    def say(self, trajectory: EpisodeTrajectory, messages: list[Any], text: str, **more: Any) -> dict[str, Any]:
        """A call, and its whole turn. Returns the assistant's message."""
        turn = self.begin(trajectory, messages, **more)
        rollout = self.rollouts[turn.rollout_id]
        self.sample(rollout, text)
        return trajectory.conversations.on_turn(rollout).message


def served(turn: Any) -> str:
    assert isinstance(turn, Replayed), turn
    return turn.reply.text


def test_replay_serves_turns_and_continues_the_unfinished_one() -> None:
    before = Run()
    trajectory = before.trajectory()
    first = before.say(trajectory, [user("Hi")], "four")
    turn = before.begin(trajectory, [user("Hi"), first, user("more")])
    before.sample(before.rollouts["0-0"], "fi", StopReason.PAUSED)
    assert isinstance(turn, Continued)

    again = Run(list(before.rollouts.values()))
    trajectory = again.trajectory()
    assert served(again.begin(trajectory, [user("Hi")])) == "four"
    assert again.begin(trajectory, [user("Hi"), first, user("more")]) == Continued("0-0")
    assert again.turns.options == before.turns.options, "with the draws that it had"
    assert again.turns.record.unreplayed() == {} and not again.counts


def test_replay_finds_reordered_trajectories() -> None:
    before = Run()
    for role, text in (("a", "x"), ("b", "x"), ("a", "y")):
        before.say(before.trajectory(role), [user(text)], f"{role} to {text}")
    assert list(before.rollouts) == ["0-0", "0-0.1.0", "0-0.2.0"]

    again = Run(list(before.rollouts.values()))
    for role, text, index in (("a", "y", 2), ("b", "x", 1), ("a", "x", 0)):
        trajectory = again.trajectory(role)
        assert served(again.begin(trajectory, [user(text)])) == f"{role} to {text}"
        assert trajectory.index == index
    new = again.begin(again.trajectory("a"), [user("x")])
    assert isinstance(new, Opened) and new.rollout_id == "0-0.3.0", "one more is one more"


def test_replay_serves_equal_calls_once_each() -> None:
    before = Run()
    for number in range(3):
        before.say(before.trajectory(), [user("Hi")], f"number {number}")
    keys = {r.turn_key for r in before.rollouts.values()}
    again = Run(list(before.rollouts.values()))
    texts = [served(again.begin(again.trajectory(), [user("Hi")])) for _ in range(3)]
    assert texts == ["number 0", "number 1", "number 2"]
    fourth = again.begin(again.trajectory(), [user("Hi")])
    assert isinstance(fourth, Opened) and fourth.rollout.turn_key not in keys


def test_what_is_not_asked_for_again_is_named_to_the_turn() -> None:
    before = Run()
    trajectory = before.trajectory()
    first = before.say(trajectory, [user("Hi")], "four")
    kept = before.rollouts["0-0"].num_tokens
    before.say(trajectory, [user("Hi"), first, user("more")], "five")
    before.say(before.trajectory("judge"), [user("Judge")], "good")

    again = Run(list(before.rollouts.values()))
    trajectory = again.trajectory()
    again.begin(trajectory, [user("Hi")])
    other = again.begin(trajectory, [user("Hi"), first, user("something else")])
    assert isinstance(other, Opened) and other.rollout_id == "0-0.0.1"
    assert again.counts == {"turns/breaks/branch": 1}
    assert again.turns.record.unreplayed() == {"0-0": kept, "0-0.1.0": 0}
    rollout = up_to(before.rollouts["0-0"], kept)
    assert rollout.num_tokens == kept == rollout.num_sampled_tokens and rollout.stop_reason is StopReason.EOS


@pytest.mark.parametrize(
    ("reason", "max_tokens", "fits"),
    [
        (StopReason.PAUSED, None, True),
        (StopReason.PAUSED, 4, True),
        (StopReason.PAUSED, 3, False),
        (StopReason.LENGTH, 3, True),
        (StopReason.LENGTH, 2, False),
        (StopReason.LENGTH, 4, False),
        (StopReason.LENGTH, None, False),
        (StopReason.REPETITION, 9, True),
    ],
)
def test_a_turn_on_record_must_fit_the_limit_of_the_call(
    reason: StopReason, max_tokens: int | None, fits: bool
) -> None:
    before = Run()
    trajectory = before.trajectory()
    first = before.say(trajectory, [user("Hi")], "four")
    asked = [user("Hi"), first, user("more")]
    before.begin(trajectory, asked)
    rollout = before.rollouts["0-0"]
    arrays = np.array([1, 2, 3], np.int32), np.full(3, -1.0, np.float32)
    rollout.add(Segment(*arrays, 0, SamplingParams(), reason))
    rollout.stop_reason = None if reason is StopReason.PAUSED else reason

    again = Run(list(before.rollouts.values()))
    trajectory = again.trajectory()
    again.begin(trajectory, [user("Hi")])
    turn = again.begin(trajectory, asked, max_tokens=max_tokens)
    assert isinstance(turn, Continued | Replayed) is fits


@pytest.mark.parametrize(
    ("text", "reason", "stop", "fits"),
    [
        ("one two", StopReason.EOS, ["three"], True),
        ("one two", StopReason.EOS, ["one"], False),
        ("one two", StopReason.EOS, ["two"], False),
        ("one two", StopReason.STOP_STRING, ["two"], True),
        ("one two", StopReason.STOP_STRING, ["three"], False),
        ("one two", StopReason.STOP_STRING, [], False),
        ("one two", StopReason.STOP_STRING, ["one", "two"], False),
        ("one two;", StopReason.STOP_STRING, [], True),  # it ended as every turn of the run does
        ("one two", StopReason.REPETITION, ["two"], False),
        ("one two", StopReason.PAUSED, ["one"], False),
        ("one two", StopReason.PAUSED, ["three"], True),
    ],
)
def test_a_turn_on_record_must_fit_the_stop_strings_of_the_call(
    text: str, reason: StopReason, stop: list[str], fits: bool
) -> None:
    before = Run(stop=(";",))
    trajectory = before.trajectory()
    asked = [user("Hi"), before.say(trajectory, [user("Hi")], "four"), user("more")]
    before.begin(trajectory, asked)
    before.sample(before.rollouts["0-0"], text, reason)

    again = Run(list(before.rollouts.values()), stop=(";",))
    trajectory = again.trajectory()
    again.begin(trajectory, [user("Hi")])
    turn = again.begin(trajectory, asked, stop=tuple(stop))
    assert isinstance(turn, Continued | Replayed) is fits
    assert not isinstance(turn, Opened) or turn.rollout_id == "0-0.0.1"


def test_replay_ignores_rollouts_without_a_key() -> None:
    before = Run()
    before.say(before.trajectory("a"), [user("Hi")], "four")
    [old] = before.rollouts.values()
    old.turn_key = None
    again = Run([old])
    assert isinstance(again.begin(again.trajectory("a"), [user("Hi")]), Opened)
    assert again.turns.record.unreplayed() == {"0-0": 0}
