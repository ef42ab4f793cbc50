"""Turns on record, and which of them a call continues."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollover.envs.protocol import written
from rollover.trajectories import up_to
from rollover.types import Prompt, Rollout, SamplingParams, Segment, StopReason, Task
from rollover.workflows.conversations import Break, Call, Chats, Conversation, Match, canonical, match, text_of
from rollover.workflows.episode import EpisodeTrajectory
from rollover.workflows.turns import Continued, EpisodeLimits, Opened, Replayed, Turns, turn_key
from unit.envs import templates

# What is on record of an Episode, and which of it a run of the function asks for again: no engine, no host


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
def test_recorded_turn_must_fit_the_limit(reason: StopReason, max_tokens: int | None, fits: bool) -> None:
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
def test_recorded_turn_must_fit_the_stop_strings(text: str, reason: StopReason, stop: list[str], fits: bool) -> None:
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


# A call continues a Rollout exactly where it has all messages of it, as they were returned, and new ones


OPENING = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2+2?"}]
ANSWER = {"role": "assistant", "content": "4"}
MORE = {"role": "user", "content": "And 3+3?"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def after(answer: dict[str, Any] = ANSWER, key: str = "0-0", tools: list[Any] | None = None) -> Conversation:
    return Conversation.opened(key, OPENING, tools or []).with_answer(answer)


GROWN = after().with_call([*OPENING, ANSWER, MORE])
GOES_ON = [*OPENING, ANSWER, MORE]


@pytest.mark.parametrize(
    ("messages", "tools", "conversations", "expected"),
    [
        (OPENING, [], [], Match()),
        (GOES_ON, [], [after()], Match("0-0", (MORE,))),
        (GOES_ON, [], [after(key="0-0"), after(key="0-0.1")], Match("0-0", (MORE,))),  # the oldest of equal ones
        (GOES_ON, [TOOL], [after(tools=[copy.deepcopy(TOOL)])], Match("0-0", (MORE,))),
        ([MORE], [], [after()], Match(reason=Break.HISTORY)),
        ([*OPENING, {"role": "assistant", "content": "5"}, MORE], [], [after()], Match(reason=Break.HISTORY)),
        ([*GOES_ON, {"role": "assistant", "content": "made up"}, MORE], [], [after()], Match(reason=Break.HISTORY)),
        (OPENING, [], [after()], Match(reason=Break.BRANCH)),
        ([*OPENING, ANSWER], [], [after()], Match(reason=Break.BRANCH)),
        ([*OPENING, ANSWER, {"role": "user", "content": "Sure?"}], [], [GROWN], Match(reason=Break.BRANCH)),
        (
            [*OPENING, ANSWER, {"role": "user", "content": "?"}],
            [],
            [GROWN.with_answer(ANSWER)],
            Match(reason=Break.BRANCH),
        ),
        (GOES_ON, [TOOL], [after()], Match(reason=Break.TOOLS)),
        # The reason is that of the nearest conversation.
        (GOES_ON, [], [after(tools=[TOOL]), Conversation.opened("far", [MORE], [])], Match(reason=Break.TOOLS)),
    ],
)
def test_match_of_a_call_and_conversations(messages: Any, tools: Any, conversations: Any, expected: Match):
    assert match(messages, tools, conversations) == expected


def test_match_follows_neither_template_nor_unfinished_turn():
    found = match(GOES_ON, [], [after()], can_follow=lambda role: role != "user")
    assert found == Match(reason=Break.TEMPLATE)
    assert match([*OPENING, ANSWER], [], [Conversation.opened("0-0", OPENING, [])]).key is None


def rewritten(message: dict[str, Any]) -> dict[str, Any]:
    """As a client may send it: other ids, spaces and order of keys, keys of its own, parts of text, no content."""
    out: dict[str, Any] = {"refusal": None, "annotations": [], **message}
    if out["content"]:
        out["content"] = [{"type": "text", "text": out["content"]}]
    else:
        del out["content"]
    if "tool_calls" in out:
        out["tool_calls"] = [
            {
                "function": {
                    "arguments": json.dumps(json.loads(c["function"]["arguments"]), indent=1, sort_keys=True),
                    "name": c["function"]["name"],
                },
                "id": "other",
            }
            for c in out["tool_calls"]
        ]
    return out


TEXTS = st.text(max_size=8)
JSONS = st.dictionaries(TEXTS, st.integers() | TEXTS | st.booleans() | st.lists(st.floats(-9, 9), max_size=2))


@st.composite
def assistants(draw: st.DrawFn) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": draw(TEXTS)}
    calls = draw(st.lists(st.tuples(TEXTS, JSONS), max_size=2))
    if calls:
        message["tool_calls"] = [
            {"id": str(i), "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
            for i, (name, arguments) in enumerate(calls)
        ]
    return message


@settings(max_examples=30)
@given(st.lists(assistants(), min_size=1, max_size=4), st.data())
def test_reformatted_messages_continue_the_rollout(turns: list[Any], data: st.DataObject):
    conversation, messages = Conversation.opened("0-0", OPENING, []), list(OPENING)
    for turn in turns[:-1]:
        messages = [*messages, turn, {"role": "tool", "content": data.draw(TEXTS), "tool_call_id": "x"}]
        conversation = conversation.with_answer(turn).with_call(messages)
    conversation = conversation.with_answer(turns[-1])
    sent = [rewritten(m) if m["role"] == "assistant" else m for m in [*messages, turns[-1]]]
    assert match([*sent, MORE], [], [conversation]) == Match("0-0", (MORE,))


@given(assistants(), assistants())
def test_what_the_policy_did_not_say_is_another_history(said: dict[str, Any], sent: dict[str, Any]):
    found = match([*OPENING, sent, MORE], [], [after(said)])
    assert (found.key == "0-0") == (canonical([said]) == canonical([sent]))
    if found.key is None:
        assert found.reason is not None


def test_a_content_that_is_no_text_is_refused():
    assert text_of([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]) == "ab"
    with pytest.raises(ValueError, match="parts of the types text"):
        text_of([{"type": "image_url", "image_url": {}}])


@given(st.lists(st.integers(0, 99), max_size=4), st.integers(0, 2), st.sampled_from(["policy", "judge"]))
def test_turn_keys_tell_questions_apart_and_are_stable(prompt: list[int], occurrence: int, role: str):
    told = Prompt.of(prompt)
    key = turn_key(role, told, 5, ["]]"], occurrence)
    assert key == turn_key(role, Prompt.of(prompt), 5, ("]]",), occurrence)
    others = [
        turn_key(role + "x", told, 5, ["]]"], occurrence),
        turn_key(role, Prompt.of([*prompt, 1]), 5, ["]]"], occurrence),
        turn_key(role, told, 6, ["]]"], occurrence),
        turn_key(role, told, None, ["]]"], occurrence),
        turn_key(role, told, 5, [], occurrence),
        turn_key(role, told, 5, ["]]"], occurrence + 1),
    ]
    assert key not in others and 0 <= key < 2**64
