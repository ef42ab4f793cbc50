"""Environments as classes of the user, and the states that they save."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from heard import hear
from rollover import Observation
from rollover.algorithms.credit import turn_returns
from rollover.config import Config
from rollover.envs.class_environment import ClassEnvironment, UserClassFailed
from rollover.envs.protocol import StateLost
from rollover.trajectories import episodes_of
from rollover.types import Group, Prompt, Reward, Rollout, RolloutState, StopReason, Task
from unit.envs import templates
from unit.envs.played import TASK, TOKENIZER, add_turn, call, environment, new_rollout, play, reward_of, told, turn

# workflow.environment: classes with tools as TRL has them. What a policy or a tool does wrong is told, not raised


class Counter:
    """As in TRL's documents: reset takes what it needs, a tool changes the state, which is scored."""

    def reset(self, answer: str, **columns: Any) -> str:
        self.count, self.answer = 0, int(answer)
        return f"\nCount to {self.answer}."

    def increment(self, step: int) -> int:
        """Adds to the counter.

        Args:
            step: how much to add
        """
        self.count += step
        return self.count

    def get_reward(self) -> float:
        return float(self.count == self.answer)


class Speechless(Exception):
    def __str__(self) -> str:
        sys.exit(3)


class Tools:
    """Some that go wrong."""

    def reset(self) -> None:
        self.reward = 0.5

    def echo(self, text: str) -> str:
        """Says it again.

        Args:
            text: what to say
        """
        return text

    def half(self) -> str:
        """A name of a file."""
        return b"a \xff b".decode(errors="surrogateescape")

    def speechless(self) -> str:
        """Raises what cannot be told."""
        raise Speechless

    def leave(self) -> str:
        """Leaves."""
        sys.exit(3)

    def fail(self) -> str:
        """Fails."""
        raise ValueError("the door is shut")

    def data(self) -> dict[str, Any]:
        """Data."""
        return {"a": [1, None], "b": "ü"}

    def thing(self) -> object:
        """Something."""
        return Strange()

    def hang(self) -> str:
        """Hangs."""
        HANGING.wait(30)
        return "too late"

    def much(self) -> str:
        """Says much."""
        return "lots of words " * 1_000_000

    def named(self, function: str, self_: str | None = None) -> str:
        """Has parameters of names that our own functions have.

        Args:
            function: which
            self_: whose
        """
        return f"{function} {self_}"

    async def slow(self, seconds: float, name: str) -> str:
        """Takes a while.

        Args:
            seconds: how long
            name: who
        """
        await asyncio.sleep(seconds)
        return name

    async def block(self) -> str:
        """Blocks its event loop."""
        HANGING.wait(30)
        return "too late"


class Strange:
    def __str__(self) -> str:
        raise RuntimeError("no text")


HANGING = threading.Event()
NAMES = "block, data, echo, fail, half, hang, leave, much, named, slow, speechless, thing"


@pytest.fixture(autouse=True)
def _let_go():
    HANGING.clear()
    yield
    HANGING.set()


def test_a_class_of_trl_is_played_and_scored() -> None:
    with environment(Counter) as env:
        prompt = TOKENIZER.decode(env.prompt(TASK).ids)
        assert "12*34?\nCount to 408.<|im_end|>" in prompt, "what reset says is added to the last message"
        assert '"name": "increment"' in prompt and "get_reward" not in prompt and '"name": "reset"' not in prompt
        right, wrong = new_rollout(), new_rollout(sibling=1)

        async def both() -> None:
            assert await told(env, right, call("increment", step=8) + call("increment", step=400)) == ["8", "408"]
            assert await told(env, wrong, call("increment", step=1)) == ["1"], "each rollout has an object of its own"
            assert await turn(env, right, "Done.") is None and await turn(env, wrong, "Done.") is None

        asyncio.run(both())
        assert reward_of(env, right).score == 1.0 and reward_of(env, wrong).score == 0.0
        assert env.scores_singly(TASK)
        stats = env.stats()
        assert stats["tools/calls"] == 3 and stats["episodes/done"] == 2 and stats["tools/time_s"] > 0


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (call("echo", text="hello"), "hello"),
        (call("leave"), "error: 3"),
        (call("speechless"), "error: Speechless"),
        (call("named", function="f", self_=None), "f None"),
        (call("fail"), "error: the door is shut"),
        (call("data"), '{"a": [1, null], "b": "ü"}'),
        (call("thing"), "error: no text"),
        (call("nothing"), f"error: there is no tool nothing, only {NAMES}"),
        (call("echo"), "error: missing a required argument: 'text'"),
        (call("echo", text=3), "error: text must be of the type string"),
        (call("echo", text="a", more=1), "error: got an unexpected keyword argument 'more'"),
        ("<tool_call>{", "error: the call cannot be read: </tool_call> is missing"),
        (call("slow", seconds=True, name="a"), "error: seconds must be of the type number"),
    ],
)  # fmt: skip
def test_what_goes_wrong_is_told_to_the_policy(text: str, answer: str) -> None:
    with environment(Tools) as env:
        assert play(env, text) == [[answer]]
        stats = env.stats()
        assert stats["tools/calls"] == 1
        assert stats["tools/malformed"] == ("cannot be read" in answer)
        assert stats["tools/errors"] == (answer.startswith("error") and "cannot be read" not in answer)


def test_answers_come_in_the_order_of_the_calls_however_they_end() -> None:
    with environment(Tools) as env:
        slow, fast = call("slow", seconds=0.2, name="first"), call("slow", seconds=0, name="second")
        texts = [slow + fast + call("echo", text="third") + fast]
        assert play(env, *texts) == [["first", "second", "third", "second"]]


def test_one_that_hangs_is_left_behind_and_takes_no_place() -> None:
    with environment(Tools, tool_timeout_s=1) as env:
        many = call("hang") * 2 + call("echo", text="here")
        (answers,) = play(env, many)
        assert answers[2] == "here" and all(a.startswith("error: no answer within 1") for a in answers[:2])
        stats = env.stats()
        assert (stats["tools/timeouts"], stats["tools/left_behind"], stats["tools/errors"]) == (2, 2, 0)


def test_an_async_tool_that_blocks_its_loop_does_not_block_ours() -> None:
    with environment(Tools, tool_timeout_s=1) as env:

        async def beside() -> tuple[list[str], int]:
            ticks, answered = 0, asyncio.ensure_future(told(env, new_rollout(), call("block")))
            while not answered.done():
                await asyncio.sleep(0.02)
                ticks += 1
            return await answered, ticks

        answers, ticks = asyncio.run(beside())
        assert answers[0].startswith("error: no answer within") and ticks >= 5
        assert play(env, call("slow", seconds=0, name="later")) == [["later"]], "later calls have another loop"
        assert env.stats()["tools/timeouts"] == 1


def test_an_enormous_answer_is_cut() -> None:
    with environment(Tools, max_tool_tokens=20) as env:
        ((answer,),) = play(env, call("much"))
        kept, _, rest = answer.partition("\n[cut off here: ")
        assert rest == "14,000,000 characters in all]" and kept.startswith("lots of words lots")
        assert len(TOKENIZER(kept)["input_ids"]) <= 20


def test_half_a_character_is_told_as_a_replacement() -> None:
    """Names of files and pages of other encodings have such; no tokenizer takes them."""
    with environment(Tools) as env:
        assert play(env, call("half")) == [["a \ufffd b"]]

    class Game:
        def reset(self) -> None: ...

        def step(self, message: str) -> Observation:
            return Observation("a \udcff b")

    with environment(Game) as env:
        assert asyncio.run(told(env, new_rollout(), "x", role="user")) == ["a \ufffd b"]


def test_an_attribute_reward_counts_and_else_the_tasks_function() -> None:
    class Bare(Tools):
        def reset(self) -> None:
            pass

    with environment(Tools) as env:
        rollout = new_rollout()
        asyncio.run(turn(env, rollout, "no call"))
        assert reward_of(env, rollout).score == 0.5
    with environment(Bare) as env:
        rollout = new_rollout()
        asyncio.run(turn(env, rollout, "no call"))
        assert not env.scores_singly(TASK)
        assert reward_of(env, rollout).score == -1.0


def test_the_last_turn_is_played_and_not_answered() -> None:
    with environment(Counter, max_turns=2) as env:
        rollout = new_rollout(Task("t", "s", "r", prompt="?", columns={"answer": "2"}))
        assert asyncio.run(told(env, rollout, call("increment", step=1))) == ["1"]
        assert asyncio.run(turn(env, rollout, call("increment", step=1))) is None
        assert reward_of(env, rollout).score == 1.0
        assert env.stats()["episodes/max_turns"] == 1 and env.stats()["episodes/done"] == 0


def test_a_turn_cut_off_by_the_budget_is_scored_without_it() -> None:
    with environment(Counter) as env:
        rollout = new_rollout()
        add_turn(rollout, "x" * 10_000, StopReason.LENGTH)
        assert rollout.num_tokens == 10_000
        assert reward_of(env, rollout).score == 0.0
        assert env.stats()["episodes/length"] == 1 and env.stats()["tools/calls"] == 0


# Objects are a cache


class Dice(Counter):
    """Its answers depend on more than the turns."""

    def increment(self, step: int) -> int:
        """Adds to the counter.

        Args:
            step: how much to add
        """
        return super().increment(step) + random.randrange(10**9)


def test_another_object_plays_the_same_turns_after_a_restart() -> None:
    with environment(Counter) as env:
        rollout = new_rollout()
        assert asyncio.run(told(env, rollout, call("increment", step=400))) == ["400"]
    with environment(Counter) as fresh:
        assert asyncio.run(told(fresh, rollout, call("increment", step=8))) == ["408"]
        assert fresh.stats()["tools/calls"] == 1, "a call is counted once"
        add_turn(rollout, "Done.")
        assert asyncio.run(fresh.next(rollout)) is None
    with environment(Counter) as scoring:
        assert reward_of(scoring, rollout).score == 1.0


def test_one_that_says_something_else_then_cannot_go_on() -> None:
    with environment(Dice) as env:
        rollout = new_rollout()
        asyncio.run(told(env, rollout, call("increment", step=1)))
    with environment(Dice) as fresh:
        with pytest.raises(ValueError, match="answers turn 1 of rollout 0-0 differently after a restart"):
            asyncio.run(turn(fresh, rollout, "Done."))
        reward = reward_of(fresh, rollout)
        assert reward.missing and "differently after a restart" in str(reward.error)


def test_resampled_turn_is_played_on_another_object() -> None:
    with environment(Counter) as env:
        rollout, again = new_rollout(), new_rollout()
        for of in (rollout, again):
            asyncio.run(told(env, of, call("increment", step=1)))
        add_turn(rollout, call("increment", step=2))
        add_turn(again, call("increment", step=5))
        for of, count in ((rollout, "3"), (again, "6"), (again, "6"), (rollout, "3")):
            said = asyncio.run(env.next(of))
            assert said is not None and f"tool\n{count}<|im_end|>" in TOKENIZER.decode(said.token_ids)


def test_objects_of_what_left_are_dropped() -> None:
    made: list[Any] = []

    class Kept(Counter):
        def __init__(self) -> None:
            made.append(self)

    with environment(Kept) as env:
        rollout = new_rollout()
        asyncio.run(told(env, rollout, call("increment", step=1)))
        num = len(made)
        env.release([rollout])
        asyncio.run(told(env, rollout, call("increment", step=1)))
        assert len(made) == num + 1


# What is no environment


class Both(Tools):
    def step(self, message: str) -> Observation:
        return Observation()


class Neither:
    def reset(self) -> None: ...


class Untyped(Neither):
    def tool(self, text):
        """Says it."""


class Undescribed(Neither):
    def tool(self, text: str) -> str:
        return text


class Unborn(Tools):
    def __init__(self, name: str) -> None: ...


class Saved(Tools):
    resume = "snapshot"


class BadExample(Tools):
    examples = ({"role": "user"},)


class Resetless:
    def tool(self) -> str:
        """One."""
        return ""


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (Both, "has step, as a game has, and the tools block, data.*: rename step"),
        (Neither, r"has neither tools nor step: give it public methods .* or step\(message\) -> Observation"),
        (Untyped, "the tool tool has no complete types.*Annotate every parameter"),
        (Undescribed, "the tool tool is not described.*Give it a docstring"),
        (Unborn, "missing 1 required positional argument: 'name'"),
        (Resetless, "has no method reset: write def reset"),
        (Saved, "has no snapshot and no restore: .*Write both, or set workflow.resume"),
        (BadExample, "in examples: write messages with role and content"),
    ],
)
def test_what_is_no_environment_is_refused_with_the_fix(made: type, why: str) -> None:
    with pytest.raises(ValueError, match=f"workflow.environment = .*{why}"), environment(made):
        pass


def test_a_template_that_refuses_tools_is_refused() -> None:
    with pytest.raises(ValueError, match="set a chat template that takes the role tool"):
        with environment(Tools, templates.ALTERNATING):
            pass


def test_a_template_that_drops_reasoning_is_said() -> None:
    class Game:
        def reset(self) -> None: ...

        def step(self, message: str) -> Observation:
            return Observation()

    with environment(Game, templates.QWEN3) as env:
        assert env.notice.startswith(
            "the chat template drops the reasoning of earlier turns when a message of the role"
        )
    for template in (templates.CHATML, templates.LLAMA3):
        with environment(Game, template) as env, environment(Tools, template) as with_tools:
            assert env.notice == with_tools.notice == ""


class Needs(Tools):
    def reset(self, answr: str) -> None: ...


class Random(Tools):
    def reset(self) -> str:
        return str(random.random())


class ResetFails(Tools):
    def reset(self) -> str:
        sys.exit(1)


class ResetHangs(Tools):
    def reset(self) -> str:
        HANGING.wait(30)
        return ""


class ResetNumber(Tools):
    def reset(self) -> int:
        return 3


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (Needs, 'takes answr in reset, but the data of test has no such column: .* Did you mean "answer"'),
        (Random, "returns different texts from reset for the same task"),
        (ResetFails, r"failed at reset: SystemExit: 1 \("),
        (ResetHangs, "failed at reset: it did not come back within 1"),
        (ResetNumber, r"returned 3 \(int\) from reset: it must be None, a text, or a list"),
    ],
)
def test_a_reset_that_does_not_fit_the_data_is_refused(made: type, why: str) -> None:
    with environment(made, tool_timeout_s=1) as env, pytest.raises(ValueError, match=why):
        env.prompt(TASK)


@pytest.mark.parametrize(
    ("value", "why"),
    [("one", "expected a number"), (float("nan"), "not finite"), (None, "returned None"), (ValueError("no"), "no")],
)
def test_a_reward_that_is_none_is_missing(value: Any, why: str) -> None:
    class Mine(Tools):
        def get_reward(self) -> Any:
            if isinstance(value, Exception):
                raise value
            return value

    with environment(Mine) as env:
        rollout = new_rollout()
        asyncio.run(turn(env, rollout, "no call"))
        reward = reward_of(env, rollout)
        assert reward.missing and why in str(reward.error)


def test_a_property_that_fails_is_a_missing_reward() -> None:
    class Mine(Tools):
        def reset(self) -> None: ...

        @property
        def reward(self) -> float:
            raise KeyError("not yet")

    with environment(Mine) as env:
        rollout = new_rollout()
        asyncio.run(turn(env, rollout, "no call"))
        reward = reward_of(env, rollout)
        assert reward.missing and "failed at its attribute reward: KeyError: 'not yet'" in str(reward.error)


@pytest.mark.parametrize(
    "seen", [None, "text", Observation(3), Observation("a", float("nan")), Observation("a", "1")]  # type: ignore[arg-type]
)  # fmt: skip
def test_a_step_that_returns_no_observation_fails_its_rollout(seen: Any) -> None:
    class Game:
        def reset(self) -> None: ...

        def step(self, message: str) -> Any:
            return seen

    with environment(Game) as env, pytest.raises(ValueError, match="it must be an Observation"):
        asyncio.run(turn(env, new_rollout(), "x"))


def test_the_rewards_of_a_games_turns_are_added() -> None:
    class Game:
        def reset(self, answer: str) -> None:
            self.left = 3

        async def step(self, message: str) -> Observation:
            self.left -= 1
            return Observation("x" * 10_000, reward=float(message), done=not self.left)

    with environment(Game, max_tool_tokens=5) as env:
        rollout = new_rollout()

        async def episode() -> list[list[str]]:
            seen = [await told(env, rollout, text, role="user") for text in ("0.5", "-2")]
            assert await turn(env, rollout, "4") is None
            return seen

        for (text,) in asyncio.run(episode()):
            assert text.endswith("[cut off here: 10,000 characters in all]") and len(text) < 100
        assert reward_of(env, rollout).score == 2.5
        assert env.stats()["episodes/done"] == 1 and env.stats()["tools/calls"] == 0


@pytest.mark.parametrize(
    ("texts", "returns"),
    [
        (("0.5", "-2", "4"), [0.5 - 2 / 2 + 4 / 4, -2 + 4 / 2, 4.0]),
        (("3",), [3.0]),
    ],
)
def test_the_rewards_of_a_games_turns_are_those_of_turn_returns(texts: tuple[str, ...], returns: list[float]) -> None:
    class Game:
        def reset(self, answer: str) -> None: ...

        def step(self, message: str) -> Observation:
            return Observation("more", reward=float(message), done=message == texts[-1])

    with environment(Game, credit="turn_returns") as env:
        rollout = new_rollout()

        async def episode() -> None:
            for text in texts[:-1]:
                await told(env, rollout, text, role="user")
            await turn(env, rollout, texts[-1])

        asyncio.run(episode())
        rollout.reward = reward_of(env, rollout)
        assert rollout.reward.score == sum(map(float, texts))
        [of] = episodes_of(Group(0, rollout.task, Prompt((5,)), [rollout]))
        assert turn_returns(of.trajectories[0], 0.5) == pytest.approx(returns)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"workflow": {"environment": "a:B"}, "rollout": {"environment": "c:d"}}, "a run has one of them. Remove"),
        ({"workflow": {"environment": "a:B"}, "tasks": {"chat": False}}, "Set tasks.chat = true"),
        (
            {"workflow": {"environment": "calculator.py"}},
            'workflow.environment = "calculator.py" is no function .*path.py:function',
        ),
        ({"workflow": {"environment": "a:B", "tool_format": "xml"}}, "none of hermes, json"),
        ({"workflow": {"function": "a:b", "command": ["c"]}}, 'workflow.function = "a:b" with workflow.command = '),
        (
            {"workflow": {"environment": "a:B", "command": ["c"]}},
            'with workflow.environment = "a:B": a run has one of them',
        ),
        ({"workflow": {"command": ["c"], "memory_gb": 0.01}}, "workflow.memory_gb = 0.01: a worker needs"),
    ],
)
def test_settings_that_cannot_be_are_refused(config: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Config.model_validate(config)


# workflow.resume of environments: what becomes of an episode whose object is lost, by kind, and what a class may do
# wrong with it


class Plain:
    """Says how many objects there were before it, and the numbers that it got: what it says does not follow from the
    turns."""

    number = itertools.count()

    def reset(self, answer: str) -> None:
        self.mine, self.added = next(Plain.number), []

    def add(self, number: int) -> str:
        """Adds it.

        Args:
            number: which
        """
        self.added.append(number)
        return f"{self.mine}: {self.added}"

    def get_reward(self) -> float:
        return float(sum(self.added))


class Durable(Plain):
    def snapshot(self) -> Any:
        return {"mine": self.mine, "added": self.added}

    def restore(self, state: dict[str, Any]) -> None:
        self.mine, self.added = state["mine"], state["added"]


class Async(Plain):
    async def snapshot(self) -> Any:
        await asyncio.sleep(0)
        return [self.mine, self.added]

    async def restore(self, state: list[Any]) -> None:
        await asyncio.sleep(0)
        self.mine, self.added = state


class Restarted(Plain):
    resume = "restart"


Kept = dict[tuple[int, int], str]


@contextmanager
def keeping(made: Any, kept: Kept, **workflow: Any) -> Iterator[ClassEnvironment]:
    """A process: its environment has what earlier ones kept, as JSON, and keeps more."""

    def keep(group_id: int, sibling: int, name: str, state: Any) -> None:
        kept[group_id, sibling] = json.dumps({name: state})

    with environment(made, keep=keep, **workflow) as env:
        for place, state in kept.items():
            env.recall(*place, json.loads(state))
        yield env


def in_state(rollout: Rollout, state: RolloutState) -> Rollout:
    rollout.state = state
    return rollout


# Which kind


class BothWays(Durable):
    resume = "stateless"


class OnlyOne(Plain):
    def snapshot(self) -> int:
        """A picture."""
        return 1


class ToolsByThoseNames(Plain):
    """Both are tools: they need what nobody but the policy can give them."""

    def snapshot(self, name: str) -> str:
        """Saves the page.

        Args:
            name: of the file
        """
        return name

    def restore(self, name: str, page: int) -> str:
        """Opens it.

        Args:
            name: of the file
            page: its number
        """
        return name


@pytest.mark.parametrize(
    ("made", "workflow", "kind", "tools"),
    [
        (OnlyOne, {}, "stateless", ["add", "snapshot"]),
        (ToolsByThoseNames, {}, "stateless", ["add", "restore", "snapshot"]),
        (Plain, {}, "stateless", ["add"]),
        (Durable, {}, "snapshot", ["add"]),
        (Restarted, {}, "restart", ["add"]),
        (BothWays, {}, "stateless", ["add"]),
        (BothWays, {"resume": "snapshot"}, "snapshot", ["add"]),
        (Durable, {"resume": "restart"}, "restart", ["add"]),
    ],
)
def test_kind_from_configuration_then_class_then_methods(
    made: type, workflow: dict[str, Any], kind: str, tools: list[str]
) -> None:
    with environment(made, **workflow) as env:
        assert (env.states.kind, env.user.tool_names) == (kind, tools)


def test_snapshot_methods_that_could_be_tools_are_reported() -> None:
    class Described(Durable):
        def snapshot(self) -> str:
            """Takes a picture."""
            return ""

        def restore(self, state: str) -> None:
            """Goes back.

            Args:
                state: where
            """

    with environment(Described) as env, environment(Durable) as other:
        assert (env.states.kind, env.user.tool_names) == ("snapshot", ["add"])
        assert "snapshot and restore, which save the state" in env.notice and not other.notice


class NoRestore(Plain):
    def snapshot(self) -> None: ...


class NoSnapshot(Plain):
    def restore(self, state: Any) -> None: ...


class Named(Plain):
    resume = "always"


class NeedsName(Durable):
    def snapshot(self, name: str) -> None: ...


class Bare(Durable):
    def restore(self) -> None: ...  # type: ignore[override]


@pytest.mark.parametrize(
    ("made", "workflow", "why"),
    [
        (OnlyOne, {"resume": "snapshot"}, "has no restore: .* where snapshot is a tool"),
        (Plain, {"resume": "snapshot"}, "has no snapshot and no restore: .*Write both, or set workflow.resume = "),
        (NoRestore, {}, r"has no restore: .*Write both, or set .* where snapshot is a tool"),
        (NoSnapshot, {"resume": "snapshot"}, "has no snapshot: .* where restore is a tool"),
        (Named, {}, 'has resume = "always": write one of stateless, snapshot, restart, or leave it out'),
        (NeedsName, {}, "has snapshot with other parameters .*'name'.*: write def snapshot"),
        (Bare, {}, r"has restore with other parameters .*def restore\(self, state\)"),
    ],
)  # fmt: skip
def test_class_without_snapshot_methods_is_refused_with_the_fix(made: type, workflow: dict, why: str) -> None:
    with pytest.raises(ValueError, match=f"workflow.environment = .*{why}"), environment(made, **workflow):
        pass


@pytest.mark.parametrize(
    ("workflow", "why"),
    [
        ({"function": "a:b", "resume": "snapshot"}, "no state to keep. Set it to \"stateless\" .* \"restart\""),
        ({"environment": "a:B", "resume": "always"}, "workflow.resume"),
    ],
)  # fmt: skip
def test_settings_without_such_a_state_are_refused(workflow: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Config.model_validate({"workflow": workflow})


# snapshot


@pytest.mark.parametrize("made", [Durable, Async])
def test_restored_object_repeats_no_turn(made: type) -> None:
    kept: Kept = {}
    with keeping(made, kept) as env:
        rollout = new_rollout()
        ((first,),) = [asyncio.run(told(env, rollout, call("add", number=1)))]
        mine = first.partition(":")[0]
    for number in (2, 3):
        with keeping(made, kept) as fresh:
            assert asyncio.run(told(fresh, rollout, call("add", number=number)))[0].startswith(f"{mine}: [1, 2")
            assert fresh.stats()["tools/calls"] == fresh.stats()["episodes/restored"] == 1
            assert fresh.stats()["episodes/unsaved"] == 0
    with keeping(made, kept) as scoring:
        in_state(rollout, RolloutState.SCORING)
        assert not scoring.has_lost(rollout) and reward_of(scoring, rollout).score == 6.0


def test_saved_answer_that_was_not_appended_is_reused() -> None:
    kept: Kept = {}
    with keeping(Durable, kept) as env:
        rollout = new_rollout()
        add_turn(rollout, call("add", number=7))
        said = asyncio.run(env.next(rollout))
    with keeping(Durable, kept) as fresh:
        again = asyncio.run(fresh.next(rollout))
        assert said is not None and again is not None and again.token_ids.tolist() == said.token_ids.tolist()
        assert fresh.stats()["tools/calls"] == 0


def test_interrupted_turn_is_played_on_the_earlier_state() -> None:
    kept: Kept = {}
    with keeping(Durable, kept) as env:
        rollout = new_rollout()
        asyncio.run(told(env, rollout, call("add", number=1)))
    before = dict(kept)
    with keeping(Durable, kept) as env:
        add_turn(rollout, call("add", number=2))
        said = asyncio.run(env.next(rollout))  # and the process ended before this was kept
    with keeping(Durable, before) as fresh:
        again = asyncio.run(fresh.next(rollout))
        assert said is not None and again is not None and again.token_ids.tolist() == said.token_ids.tolist()


def test_a_state_of_other_tokens_is_none() -> None:
    kept: Kept = {}
    with keeping(Durable, kept) as env:
        asyncio.run(told(env, new_rollout(), call("add", number=1)))
    with keeping(Durable, kept) as fresh:
        other = new_rollout()
        add_turn(other, call("add", number=2))
        other.add(asyncio.run(env.next(other)))  # type: ignore[arg-type]
        assert fresh.has_lost(in_state(other, RolloutState.PARKED))


def test_the_rewards_of_a_games_turns_are_kept() -> None:
    class Game:
        def reset(self) -> None:
            self.left = 3

        def step(self, message: str) -> Observation:
            self.left -= 1
            return Observation("more", reward=float(message), done=not self.left)

        def snapshot(self) -> int:
            return self.left

        def restore(self, state: int) -> None:
            self.left = state

    kept: Kept = {}
    rollout = new_rollout()
    for message in ("0.5", "-2", "4"):
        with keeping(Game, kept, credit="turn_returns") as env:
            ended = asyncio.run(turn(env, rollout, message)) is None
            assert ended == (message == "4")
    with keeping(Game, kept, credit="turn_returns") as env:
        assert reward_of(env, rollout) == Reward(2.5, turns=(0.5, -2.0, 1.5))
        assert env.stats()["episodes/done"] == 1


@pytest.mark.parametrize("resume", ["stateless", "snapshot"])
def test_smaller_budget_keeps_turns_of_a_finished_episode(resume: str) -> None:
    class Sum(Durable):
        def add(self, number: int) -> str:
            """Adds it.

            Args:
                number: which
            """
            self.added.append(number)
            return "added"

    kept: Kept = {}
    rollout = new_rollout()
    with keeping(Sum, kept, resume=resume, max_turns=2) as env:
        asyncio.run(told(env, rollout, call("add", number=1)))
        assert asyncio.run(turn(env, rollout, call("add", number=2))) is None
    with keeping(Sum, kept, resume=resume, max_turns=2) as smaller:
        smaller.max_tokens = rollout.num_tokens - 1
        assert not smaller.has_lost(in_state(rollout, RolloutState.SCORING))
        assert reward_of(smaller, rollout).score == 3.0
    with keeping(Sum, {}, resume="stateless", max_turns=2) as cut_off:
        cut_off.max_tokens = rollout.num_tokens
        assert reward_of(cut_off, rollout).score == 1.0, "nobody saw what used the budget up"


def test_failed_object_is_replaced_with_the_state_before_it() -> None:
    failures = [True]

    class Fails(Durable):
        def add(self, number: int) -> str:
            """Adds it.

            Args:
                number: which
            """
            self.added.append(100)  # half done
            return super().add(number)

        def get_reward(self) -> float:
            if failures:
                failures.pop()
                self.added.clear()
                raise OSError("busy")
            return super().get_reward()

    with keeping(Fails, {}) as env:
        rollout = new_rollout()
        asyncio.run(told(env, rollout, call("add", number=1)))
        add_turn(rollout, "Done.")
        asyncio.run(env.next(rollout))
        assert reward_of(env, rollout).score == 101.0 and not failures


class Large(Durable):
    def snapshot(self) -> Any:
        return "x" * 70_000


class NoJson(Durable):
    def snapshot(self) -> Any:
        return {"mine": {1, 2}}


class Exits(Durable):
    def snapshot(self) -> Any:
        sys.exit(3)


class Hangs(Durable):
    def snapshot(self) -> Any:
        HANGING.wait(60)


class Odd(Durable):
    def snapshot(self) -> Any:
        class Strange(dict):
            def items(self) -> Any:
                raise KeyError("nothing")

        return Strange(a=1)


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (Large, "what snapshot() returns has 70,002 bytes as JSON, and at most 65,536 are kept"),
        (NoJson, "what snapshot() returns must be a JSON value, and {'mine': {1, 2}} (dict) is none"),
        (Exits, "failed at snapshot: SystemExit: 3"),
        (Hangs, "failed at snapshot: it did not come back within 0.5 s (workflow.tool_timeout_s)"),
        (Odd, "nothing"),
    ],
)
def test_failed_snapshot_is_logged_and_counted(made: type, why: str) -> None:
    said: list[str] = []
    kept: Kept = {}
    with keeping(made, kept, tool_timeout_s=0.5) as env:
        hear(said)
        rollout, other = new_rollout(), new_rollout(sibling=1)
        for of in (rollout, other):
            for number in (1, 2):
                assert asyncio.run(told(env, of, call("add", number=number)))
        assert env.stats()["episodes/unsaved"] == 2, "once an episode"
        (line,) = said
        assert why in line.replace("tests/unit/envs/", "") and "0-0 continues, and would begin again" in line
        assert reward_of(env, other).score == 3.0 and not kept
        with pytest.raises(StateLost):
            asyncio.run(turn(fresh_of(made), rollout, "Done."))
    with keeping(made, kept) as fresh:
        assert fresh.has_lost(in_state(rollout, RolloutState.ACTING))


def fresh_of(made: type) -> ClassEnvironment:
    with environment(made, tool_timeout_s=0.5) as env:
        return env


class CannotRestore(Durable):
    def restore(self, state: Any) -> None:
        raise KeyError("mine")


class HangsThen(Durable):
    def restore(self, state: Any) -> None:
        HANGING.wait(60)


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (CannotRestore, "failed at restore: KeyError: 'mine'"),
        (HangsThen, "failed at restore: it did not come back within 0.5 s"),
    ],
)
def test_failed_restore_is_the_error_of_the_missing_reward(made: type, why: str) -> None:
    kept: Kept = {}
    with keeping(made, kept, tool_timeout_s=0.5) as env:
        rollout = new_rollout()
        asyncio.run(told(env, rollout, call("add", number=1)))
    with keeping(made, kept, tool_timeout_s=0.5, retries=0) as fresh:
        with pytest.raises(UserClassFailed, match=why):
            asyncio.run(turn(fresh, rollout, call("add", number=2)))
        assert fresh.stats()["tools/errors"] == 0, "it is no fault of the policy"
    with keeping(made, kept, tool_timeout_s=0.5, retries=0) as scoring:
        finished = new_rollout()
        finished.segments, finished.num_tokens = rollout.segments[:1], len(rollout.segments[0])
        reward = reward_of(scoring, finished)
        assert reward.missing and why in str(reward.error)


def test_an_object_may_change_the_state_that_it_got() -> None:
    class Changes(Durable):
        asked = 0

        def restore(self, state: dict[str, Any]) -> None:
            super().restore(state)
            state.clear()

        def get_reward(self) -> float:
            Changes.asked += 1
            if Changes.asked == 1:
                raise OSError("busy")
            return super().get_reward()

    kept: Kept = {}
    with keeping(Changes, kept) as env:
        rollout = new_rollout()
        asyncio.run(told(env, rollout, call("add", number=4)))
        add_turn(rollout, "Done.")
        asyncio.run(env.next(rollout))
    with keeping(Changes, kept) as fresh:
        assert reward_of(fresh, rollout).score == 4.0
        assert fresh.stats()["episodes/restored"] == 2


# restart


def test_under_restart_no_turn_that_was_answered_is_played_again() -> None:
    with environment(Restarted) as env:
        rollout = new_rollout()
        asyncio.run(told(env, rollout, call("add", number=1)))
        assert not env.has_lost(in_state(rollout, RolloutState.PARKED)), "its object is there"
    with environment(Restarted) as fresh:
        begun, acting = new_rollout(), new_rollout()
        add_turn(begun, "a part", StopReason.PAUSED)
        add_turn(acting, call("add", number=1))
        assert not fresh.has_lost(in_state(begun, RolloutState.PARKED)), "no object was asked anything"
        assert not fresh.has_lost(in_state(acting, RolloutState.ACTING)), "nothing was answered"
        assert fresh.has_lost(in_state(rollout, RolloutState.PARKED))
        add_turn(rollout, call("add", number=2))
        assert fresh.has_lost(in_state(rollout, RolloutState.ACTING))
        with pytest.raises(StateLost, match="has lost the object of rollout 0-0"):
            asyncio.run(fresh.next(rollout))
        assert fresh.has_lost(in_state(rollout, RolloutState.SCORING))
        for known in (StopReason.TIMEOUT, StopReason.ERROR):
            rollout.stop_reason = known
            assert not fresh.has_lost(rollout), "its reward is known"


def test_what_the_tasks_reward_function_scores_needs_no_object() -> None:
    class Unrewarded(Plain):
        resume = "restart"
        get_reward = None  # type: ignore[assignment]

    with environment(Unrewarded) as fresh:
        rollout = new_rollout()
        add_turn(rollout, "Done.")
        assert not fresh.has_lost(in_state(rollout, RolloutState.SCORING))
        assert reward_of(fresh, rollout).score == -1.0


def test_restart_game_failing_after_turn_one_begins_again() -> None:
    class Game:
        resume = "restart"

        def reset(self) -> None: ...

        def step(self, message: str) -> Observation:
            return Observation(str(1 / float(message)))

    with environment(Game) as env:
        with pytest.raises(UserClassFailed, match="failed at step: ZeroDivisionError"):
            asyncio.run(turn(env, new_rollout(), "0"))
        rollout = new_rollout()
        asyncio.run(turn(env, rollout, "1"))
        with pytest.raises(StateLost, match="failed at step: ZeroDivisionError"):
            asyncio.run(turn(env, rollout, "0"))


def test_restart_retries_the_reward_on_the_same_object() -> None:
    class Busy(Restarted):
        asked = 0

        def get_reward(self) -> float:
            Busy.asked += 1
            if Busy.asked == 1:
                raise OSError("busy")
            return super().get_reward()

    with environment(Busy) as env:
        rollout = new_rollout()
        asyncio.run(told(env, rollout, call("add", number=5)))
        add_turn(rollout, "Done.")
        asyncio.run(env.next(rollout))
        assert reward_of(env, rollout).score == 5.0 and Busy.asked == 2


def test_nothing_is_kept_of_another_kind() -> None:
    kept: Kept = {}
    for made, resume in ((Durable, "stateless"), (Durable, "restart")):
        with keeping(made, kept, resume=resume) as env:
            asyncio.run(told(env, new_rollout(), call("add", number=1)))
    with keeping(Durable, kept) as env:
        asyncio.run(told(env, new_rollout(group_id=-1), call("add", number=1)))
    assert not kept, "an evaluation is not kept either"
