"""workflow.resume of environments: what becomes of an episode whose object is lost, by kind, and what a class may do
wrong with it."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from heard import hear
from rollover import Observation
from rollover.config import Config
from rollover.envs.class_environment import ClassEnvironment, UserClassFailed
from rollover.envs.protocol import StateLost
from rollover.types import Reward, Rollout, RolloutState, StopReason
from unit.envs.played import add_turn, call, environment, new_rollout, reward_of, told, turn

HANGING = threading.Event()


@pytest.fixture(autouse=True)
def _let_go() -> Iterator[None]:
    HANGING.clear()
    yield
    HANGING.set()


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


class Both(Durable):
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
        (OnlyOne, {"resume": "restart"}, "restart", ["add", "snapshot"]),
        (ToolsByThoseNames, {}, "stateless", ["add", "restore", "snapshot"]),
        (ToolsByThoseNames, {"resume": "restart"}, "restart", ["add", "restore", "snapshot"]),
        (Plain, {}, "stateless", ["add"]),
        (Durable, {}, "snapshot", ["add"]),
        (Restarted, {}, "restart", ["add"]),
        (Both, {}, "stateless", ["add"]),
        (Both, {"resume": "snapshot"}, "snapshot", ["add"]),
        (Durable, {"resume": "restart"}, "restart", ["add"]),
        (Restarted, {"resume": "stateless"}, "stateless", ["add"]),
        (OnlyOne, {"resume": "stateless"}, "stateless", ["add", "snapshot"]),
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


class Needs(Durable):
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
        (Needs, {}, "has snapshot with other parameters .*'name'.*: write def snapshot"),
        (Bare, {}, r"has restore with other parameters .*def restore\(self, state\)"),
    ],
)  # fmt: skip
def test_class_without_snapshot_methods_is_refused_with_the_fix(made: type, workflow: dict, why: str) -> None:
    with pytest.raises(ValueError, match=f"workflow.environment = .*{why}"), environment(made, **workflow):
        pass


@pytest.mark.parametrize(
    ("workflow", "why"),
    [
        ({"resume": "restart"}, "workflow.resume has no effect without workflow.environment, workflow.function"),
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


class Infinite(Durable):
    def snapshot(self) -> Any:
        return float("inf")


class Raises(Durable):
    def snapshot(self) -> Any:
        raise OSError("the disk is full")


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
        (Infinite, "what snapshot() returns must be a JSON value, and inf (float) is none"),
        (Raises, "failed at snapshot: OSError: the disk is full (test_saved_states.py:"),
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
