"""Objects that a program handed over, and the names that a configuration has of them."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollover.functions import custom_function, load_function
from rollover.live_objects import hold, is_live, live_object, name_of, release

SRC = Path(__file__).parents[2] / "src"


def test_an_object_is_held_until_everyone_has_released_it() -> None:
    value = object()
    spec = hold(value, "thing")
    assert spec == "<python>:thing" and is_live(spec) and hold(value, "thing") == spec
    assert live_object(spec) is value
    release(spec)
    assert live_object(spec) is value
    release(spec)
    with pytest.raises(ValueError, match="went with its process.*rollover.train\\(resume="):
        live_object(spec)


def test_another_object_of_a_taken_name_gets_a_number() -> None:
    one, other = object(), object()
    specs = hold(one, "taken"), hold(other, "taken")
    assert specs == ("<python>:taken", "<python>:taken.2")
    assert live_object(specs[1]) is other
    for spec in specs:
        release(spec)


def test_a_live_function_is_loaded_as_any_other() -> None:
    spec = hold(lambda x: x + 1, "plus")
    try:
        assert load_function(spec, ".")(1) == 2
        assert custom_function("rollout.order", spec, "a number")(2) == 3
    finally:
        release(spec)
    with pytest.raises(ValueError, match="^rollout.order = '<python>:plus': .*Hand it over again"):
        custom_function("rollout.order", spec, "a number")


def test_what_is_no_function_is_refused() -> None:
    spec = hold([1], "rows")
    with pytest.raises(ValueError, match="not a function"):
        load_function(spec, ".")
    release(spec)


def test_the_name_is_that_of_the_code() -> None:
    def reward(completions, limit=3):
        return [len(c) > limit for c in completions]

    first = name_of(reward)
    assert first.startswith("reward-") and name_of(lambda: 1).startswith("lambda-")

    def reward(completions, limit=4):
        return [len(c) > limit for c in completions]

    assert name_of(reward) != first, "another default is another function"
    assert name_of(lambda c: c in {"a", "b"}) != name_of(lambda c: c in {"a", "c"})
    assert name_of(functools.partial(reward, limit=3)).startswith("reward-")
    assert name_of(Counting).startswith("Counting-") and name_of(Counting()) == name_of(Counting)


class Counting:
    def __call__(self, x: int) -> int:
        return x + 1


def test_the_name_is_the_same_in_another_process(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from rollover.live_objects import name_of\n"
        "f = lambda c, b=None: [x in {'one', 'two', 'three'} for x in c if x not in ('a', 1.5)]\n"
        "print(name_of(f))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(SRC)}
    told = {
        subprocess.run(
            [sys.executable, "mine.py"],
            env=environment | {"PYTHONHASHSEED": seed},
            cwd=tmp_path,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(told) == 1 and told.pop().startswith("lambda-")
