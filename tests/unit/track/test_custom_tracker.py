"""A tracker of the user's own: found by its name, told of all, and never what ends a run."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from heard import hear
from rollover.config import Config
from rollover.config.load import load_config
from rollover.track.build import build_trackers
from rollover.track.tracker import CustomTracker, Cut, RecordedGroup, Tracker, Trackers
from samples import group, rollout, segment


class Failing(Tracker):
    """Raises at every event, in the way that it is given."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def on_step(self, row: Mapping[str, Any]) -> None:
        raise self.error

    def on_message(self, text: str) -> None:
        raise self.error


def guarded(tracker: Tracker) -> tuple[Trackers, list[str]]:
    """The tracker as a run has it, and what the user is told."""
    said: list[str] = []

    class Listening(Tracker):
        def on_message(self, text: str) -> None:
            said.append(text)

    trackers = Trackers()
    trackers.add("ours", Listening())
    trackers.add("mine.py:Mine", CustomTracker(tracker, "mine.py:Mine"))
    hear(trackers.on_message)
    return trackers, said


@pytest.mark.parametrize("error", [ValueError("wrong"), SystemExit(3), asyncio.CancelledError("own loop")])
def test_one_that_raises_is_reported_once_and_counted(error: BaseException) -> None:
    trackers, said = guarded(Failing(error))
    for step in (1, 2):
        trackers.on_step({"step": step})
    (told,) = said
    assert told.startswith(f"track.trackers: mine.py:Mine failed: {type(error).__name__}: {error} (")
    assert "test_custom_tracker.py" in told and "the run continues" in told
    # Two steps, and the message about the first of them.
    assert trackers.stats() == {"trackers/failed": 3}


def test_ctrl_c_is_no_failure_of_a_tracker() -> None:
    trackers, _ = guarded(Failing(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        trackers.on_step({"step": 1})


def test_ours_do_raise() -> None:
    trackers = Trackers()
    trackers.add("ours", Failing(OSError("full")))
    with pytest.raises(OSError, match="full"):
        trackers.on_step({"step": 1})
    assert trackers.stats() == {}, "there is none of the user's own"


def test_wants_groups_follows_the_trackers() -> None:
    class Counting(Tracker):
        def on_groups(self, step: int, groups: Any) -> None:
            pass

    assert guarded(Counting())[0].wants_groups and not guarded(Failing(ValueError()))[0].wants_groups


def config(spec: str) -> Config:
    return load_config([], [("track.trackers", f'["{spec}"]')], require_sources=False).config


@pytest.mark.parametrize(
    ("code", "wrong"),
    [
        ("", "has no function 'Mine'"),
        ("Mine = 3", "is 3, not a function"),
        ("class Mine:\n    pass", "it must return a rollover.Tracker"),
        ("def Mine(run):\n    pass", "failed: TypeError: Mine() missing 1 required positional argument"),
        ("def Mine():\n    raise OSError('no account')", "failed: OSError: no account (mine.py:2)"),
    ],
)
def test_one_that_is_none_ends_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, wrong: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(code)
    with pytest.raises(ValueError, match="track.trackers = 'mine.py:Mine'") as raised:
        build_trackers(config("mine.py:Mine"), tmp_path)
    assert wrong in str(raised.value)


def test_rollouts_that_are_not_recorded_are_cut_all_the_same(tmp_path: Path) -> None:
    overrides = [("track.rollouts", "false")]
    off = build_trackers(load_config([], overrides, require_sources=False).config, tmp_path)
    (tmp_path / "rollouts" / "step-000001.jsonl").touch()
    off.on_groups(2, [])
    assert not off.wants_groups
    off.truncate(Cut(0))
    assert not list((tmp_path / "rollouts").iterdir())


class Late(Tracker):
    async def on_step(self, row: Mapping[str, Any]) -> None:  # type: ignore[override]
        raise AssertionError("nobody awaits it")


def test_an_async_def_is_a_failure_that_is_told() -> None:
    trackers, said = guarded(Late())
    trackers.on_step({"step": 1})
    assert len(said) == 1 and "Late.on_step is an async def, which is never awaited" in said[0]
    assert trackers.stats() == {"trackers/failed": 1}


class Undecided(Tracker):
    @property
    def wants_groups(self) -> bool:
        raise KeyError("maybe")


def test_one_that_cannot_say_what_it_wants_gets_no_groups() -> None:
    trackers, said = guarded(Undecided())
    assert not trackers.wants_groups and len(said) == 1 and trackers.stats() == {"trackers/failed": 1}


class Taking(Tracker):
    def on_groups(self, step: int, groups: Sequence[RecordedGroup]) -> None:
        for recorded in groups:
            recorded.group.rollouts[0].segments.clear()
            recorded.group.rollouts[0].reward = None
            recorded.group.rollouts.pop()
            recorded.completions.clear()  # type: ignore[attr-defined]


def test_what_it_does_to_groups_is_its_own_business() -> None:
    """A replay buffer, and a loop of the user's own, go on with them."""
    trackers, said = guarded(Taking())
    of = group(0, [rollout(0, sibling, 0.5, [segment([1, 2])]) for sibling in range(2)])
    told = RecordedGroup(of, ["a", "b"], [0.5, 0.5])
    trackers.on_groups(1, [told])
    assert not said and len(of.rollouts) == 2 and told.completions == ["a", "b"]
    assert [(r.token_ids(), r.num_tokens, r.reward is None) for r in of.rollouts] == [([1, 2], 2, False)] * 2
