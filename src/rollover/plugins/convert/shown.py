"""Tools of others that a run is shown in (W&B, MLflow...): what other systems say of them as values of [track].

None of it changes a result, and nothing is written that a file does not say: no tool is used because it is another
system's default.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rollover.config.run import TOOLS
from rollover.plugins.convert.mapping import Options, Unanswered

_EMPTY = (None, "", "null", "none")


def trackers(names: Sequence[str]) -> dict[str, Any]:
    """track.trackers of the tools `names`. Unanswered names those that there are none of."""
    found = [name for name in dict.fromkeys(names) if name in TOOLS]
    values = {"track.trackers": found} if found else {}
    if missing := [name for name in names if name not in TOOLS]:
        raise Unanswered(f"there is no {', '.join(missing)}: a run is shown in {', '.join(TOOLS)}", values)
    return values


def completions(tools: Callable[[Options], Sequence[str]]) -> Any:
    """The function of a row that switches texts on: they go to a tool where they went there before."""
    return lambda value, options: {} if value else where(tools, "track.tracker_rollouts")(0, options)


def where(tools: Callable[[Options], Sequence[str]], key: str, of: Sequence[str] = TOOLS) -> Any:
    """The function of a row: the option is `key` where one of the tools `of` is named, and has no effect elsewhere."""

    def to(value: Any, options: Options) -> dict[str, Any]:
        return {key: value} if value not in _EMPTY and set(of) & set(tools(options)) else {}

    return to
