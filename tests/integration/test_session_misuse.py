"""A session used as it is not meant to be: by several tasks at once, twice, or after its end."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import runs
from runs import check_whole

import rollover
from rollover.track.tracker import Tracker


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    rollout = {"groups_per_step": 2, "group_size": 3, "max_new_tokens": 8, "in_flight_groups": 4}
    recipe = runs.write(folder, steps=4, rollout=rollout)
    return {"config": recipe, "num_tasks": 2, **changes}


def test_what_other_tasks_ask_for_waits_for_the_end_of_the_step(tmp_path: Path) -> None:
    """A checkpoint in the middle of a step would hold rollouts that the engine still extends."""
    made: list[int] = []

    async def walk(session: rollover.Session) -> None:
        async for step in session.steps():
            made.append(step.number)
            await asyncio.sleep(0)

    async def save(session: rollover.Session) -> None:
        for _ in range(4):
            await asyncio.sleep(0.01)
            await session.checkpoint()
            await session.evaluate()

    async def main() -> None:
        async with rollover.Session(**settings(tmp_path)) as session:
            await asyncio.gather(walk(session), walk(session), save(session))

    asyncio.run(main())
    assert sorted(made) == [1, 2, 3, 4]
    check_whole(tmp_path / "run", 4)


def test_steps_of_a_session_that_has_ended_are_refused(tmp_path: Path) -> None:
    async def main() -> None:
        async with rollover.Session(**settings(tmp_path)) as session:
            steps = session.steps()
            assert (await anext(steps)).number == 1
        with pytest.raises(RuntimeError, match="not open"):
            await anext(steps)

    asyncio.run(main())
    assert rollover.train(resume=tmp_path / "run", trust=True).finished


@pytest.mark.parametrize("used", ["inside", "entered", "closed"])
def test_a_session_is_entered_once(tmp_path: Path, used: str) -> None:
    async def main() -> None:
        session = rollover.Session(**settings(tmp_path))
        if used == "inside":
            async with session:
                with pytest.raises(RuntimeError, match="entered once"):
                    await session.__aenter__()
                assert [step.number async for step in session.steps()] == [1, 2, 3, 4]
            return
        if used == "entered":
            async with session:
                pass
        session.close()
        with pytest.raises(RuntimeError, match="entered once"):
            await session.__aenter__()

    asyncio.run(main())


def test_a_directory_is_free_again_where_a_run_could_not_begin(tmp_path: Path) -> None:
    """The error is kept, as a notebook keeps the last one, and with it whoever raised it."""

    def fails() -> Tracker:
        raise RuntimeError("no network")

    with pytest.raises(ValueError, match="no network") as kept:
        rollover.train(**settings(tmp_path, trackers=[fails]))
    assert rollover.train(**settings(tmp_path, trackers=[Tracker])).finished and kept.value


@pytest.mark.parametrize("text", ['{"run": {', "[1]", '{"algorithm": 3}'])
def test_a_damaged_configuration_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "config.resolved.json"
    file.write_text(text)
    with pytest.raises(ValueError, match="config.resolved.json is damaged"):
        rollover.open(tmp_path).config  # noqa: B018
    with pytest.raises(ValueError, match="config.resolved.json is damaged"):
        rollover.train(resume=tmp_path)


def test_sessions_that_end_in_the_order_in_which_they_began_give_the_signals_back(tmp_path: Path) -> None:
    async def main() -> None:
        before = signal.getsignal(signal.SIGINT)
        first, second = (rollover.Session(**settings(tmp_path / name)) for name in ("first", "second"))
        for session in (first, second):
            await session.__aenter__()
        await first.__aexit__(None, None, None)
        os.kill(os.getpid(), signal.SIGINT)
        assert second.interrupted and not first.interrupted
        await second.__aexit__(None, None, None)
        assert signal.getsignal(signal.SIGINT) is before

    asyncio.run(main())
