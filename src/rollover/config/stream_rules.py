"""What cannot be had of a dataset that is streamed: whatever needs all of its rows before the first task."""

from __future__ import annotations

from collections.abc import Callable

from rollover.config import Config, TaskSourceConfig
from rollover.config.rule import Refused


def _first(config: Config, like: Callable[[TaskSourceConfig], bool]) -> str:
    """The name of the first source that is like that; "" if none is."""
    return next((f"tasks.sources.{i}" for i, s in enumerate(config.tasks.sources) if like(s)), "")


def _streamed(config: Config) -> str:
    return _first(config, lambda s: s.streaming)


def _with_keys(config: Config) -> str:
    return _first(config, lambda s: s.kind != "reasoning_gym" and bool(s.problem_key))


def _streamed_and_named(config: Config) -> str:
    return _first(config, lambda s: s.streaming and s.names_held_out)


REFUSED: tuple[Refused, ...] = (
    Refused(
        ("tasks.sources",),
        lambda c: bool(_streamed(c) and _with_keys(c)),
        lambda c: (
            f"{_with_keys(c)}.problem_key with {_streamed(c)}.streaming: a text with several keys could be held out and"
            " trained, so all rows of all datasets are looked at before the first task, and a stream may have no end."
            " Remove one of the two"
        ),
    ),
    Refused(
        ("tasks.sources",),
        lambda c: bool(_streamed_and_named(c) and _first(c, lambda s: not s.names_held_out)),
        lambda c: (
            f"{_streamed_and_named(c)}.streaming with held-out rows of its own, beside"
            f" {_first(c, lambda s: not s.names_held_out)}, of which a hash holds some out: those would be compared"
            " with all rows of the stream. Give both held-out rows of their own (eval_path, eval_split), or none"
        ),
    ),
)
