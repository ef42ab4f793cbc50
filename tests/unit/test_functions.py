"""The user's own functions: a file is run once, and again if it was changed. And the built-in ones, by name."""

from __future__ import annotations

import asyncio
import bisect
import json
import os
from pathlib import Path
from typing import Any

import pytest

from rollover.config.backend import BACKENDS
from rollover.config.rollout import ENVIRONMENTS
from rollover.config.tasks import SOURCES
from rollover.config.train import ENGINES
from rollover.functions import Causes, CustomFunction, FunctionError, as_json, described, explained, load_function

COUNTS = "calls = []\ndef add(x):\n    calls.append(x)\n    return list(calls)\ndef seen():\n    return list(calls)\n"


def test_functions_of_one_file_share_its_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(COUNTS)
    assert load_function("mine.py:add", str(tmp_path))(1) == [1]
    monkeypatch.chdir(tmp_path)
    assert load_function("mine.py:add", ".")(2) == [1, 2], "the same file by another path"
    assert load_function(f"{tmp_path / 'mine.py'}:seen", "/")() == [1, 2]


@pytest.mark.parametrize("spec", ["mine", "mine.py", "mine.py:", ":f"])
def test_a_name_without_a_function_is_told_so(spec: str) -> None:
    with pytest.raises(ValueError, match=f"^'{spec}' is neither module:function nor path.py:function$"):
        load_function(spec, ".")


def test_a_file_that_was_changed_is_run_again(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def f(): return 1\n")
    assert load_function("mine.py:f", str(tmp_path))() == 1
    file.write_text("def f(): return 23\n")
    assert load_function("mine.py:f", str(tmp_path))() == 23
    before = file.stat()
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + 10**9))
    first, second = (load_function("mine.py:f", str(tmp_path)) for _ in range(2))
    assert first is second


def test_files_of_one_name_in_two_folders_are_two_modules(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").write_text(f"def f(): return {name!r}\n")
    assert [load_function("mine.py:f", str(tmp_path / name))() for name in ("a", "b", "a")] == ["a", "b", "a"]


def test_a_file_that_failed_is_tried_again(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import missing_module_of_mine\n")
    for _ in range(2):
        with pytest.raises(ValueError, match="importing .*mine.py failed: ModuleNotFoundError"):
            load_function("mine.py:f", str(tmp_path))


BUILT_IN = {**ENGINES, **ENVIRONMENTS, **BACKENDS, **{kind: about.make for kind, about in SOURCES.items()}}


@pytest.mark.parametrize("name", BUILT_IN)
def test_what_a_built_in_name_stands_for_is_there(name: str) -> None:
    assert callable(load_function(BUILT_IN[name], "."))


def cancels_at_once() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()


async def cancels_itself() -> None:
    cancels_at_once()
    await asyncio.sleep(60)


@pytest.mark.parametrize("function", [cancels_at_once, cancels_itself])
def test_a_function_that_cancels_itself_failed_and_who_awaits_it_goes_on(function) -> None:
    async def run() -> str:
        with pytest.raises(FunctionError, match="run.hooks = 'mine' failed: CancelledError"):
            await CustomFunction(function, "run.hooks", "mine", "nothing").awaited()
        await asyncio.sleep(0)
        return "goes on"

    assert asyncio.run(run()) == "goes on"


def test_who_awaits_a_function_can_be_cancelled_with_it() -> None:
    ended: list[str] = []

    async def waits() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("waits")

    async def run() -> None:
        task = asyncio.ensure_future(CustomFunction(waits, "run.hooks", "mine", "nothing").awaited())
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled() and ended == ["waits"]

    asyncio.run(run())


class Speechless(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)

    __repr__ = __str__


def test_an_error_or_a_value_that_cannot_be_shown_exits_nobody() -> None:
    assert explained(Speechless()) == "Speechless"
    assert described(Speechless()) == "(which cannot be shown) (Speechless)"


def test_of_an_error_of_megabytes_only_the_beginning_is_looked_at() -> None:
    class Text(str):
        def split(self, *args: Any) -> Any:
            assert len(self) < 10_000
            return super().split(*args)

        def __getitem__(self, at: Any) -> Any:
            return Text(super().__getitem__(at))

        def __format__(self, how: str) -> Any:
            assert len(self) < 10_000
            return super().__format__(how)

    class Long(Exception):
        def __str__(self) -> str:
            return Text("x y\n" * 10**6)

    assert explained(Long()).startswith("Long: x y x y") and len(explained(Long())) == 500


def test_a_cause_is_new_once_and_random_texts_come_to_an_end() -> None:
    causes = Causes()
    assert [causes.is_new(text) for text in ("at 3 s", "at 12 s", "at sea", "at sea")] == [True, False, True, False]
    assert sum(causes.is_new("x" * num) for num in range(1, 500)) < 30


def nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


def taken(levels: int) -> bool:
    try:
        as_json(nested(levels), "it")
    except ValueError:
        return False
    return True


def written_in(num_calls: int, text: str) -> str:
    """Read and written again, as part of more, by a program that is in so many calls."""
    return written_in(num_calls - 1, text) if num_calls else json.dumps({"groups": [{"kept": json.loads(text)}]})


def test_what_is_only_just_taken_can_be_written_and_read_deeper_in_the_program() -> None:
    most = bisect.bisect_left(range(5001), True, key=lambda levels: not taken(levels)) - 1
    assert most > 200
    assert written_in(50, json.dumps(nested(most)))
