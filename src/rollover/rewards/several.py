"""Several reward functions as one: the score is the sum of theirs, as in TRL, and each one's is logged by its name.

Owns how their results become one: a function that returns None does not apply to the sample and is left out of its sum;
where none applies, or where one fails, the reward is missing. Runs in the reward worker.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from rollover.functions import explained
from rollover.rewards.registry import (
    BUILTINS,
    RETURNED_NONE,
    Item,
    LoadedReward,
    Mode,
    Result,
    load_reward,
    runner,
    with_signature,
)

_DEFAULT_RULE = "last_number"  # of tasks.answer_rule


class SeveralRewards:
    """A list of reward functions under one name of the configuration. `members`: functions, or specs of functions."""

    def __init__(self, members: Sequence[Callable[..., Any] | str]) -> None:
        self.members = tuple(members)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("several rewards are called one by one, in the reward worker")


class LoadedSum:
    """The loaded members, scored for a whole group at a time. For the worker: as a LoadedReward of mode "batch"."""

    mode: Mode = "batch"

    def __init__(self, members: Sequence[LoadedReward]) -> None:
        self.members = members
        self.names = _names(members)

    def score_all(self, items: list[Item]) -> list[Result]:
        """Score all items with every member. What a batch function raises passes through: no item has its score."""
        columns = [_scored(member, items) for member in self.members]
        return [self._sum([column[i] for column in columns]) for i in range(len(items))]

    def _sum(self, results: list[Result]) -> Result:
        scores: dict[str, float] = {}
        for name, result in zip(self.names, results, strict=True):
            if "score" in result:
                scores[name] = result["score"]
            elif result["error"] != RETURNED_NONE:
                return {**result, "error": f"{name}: {result['error']}"}
        if not scores:
            return {"error": RETURNED_NONE}
        return {"score": sum(scores.values()), "extras": scores}


def _scored(reward: LoadedReward, items: list[Item]) -> list[Result]:
    if reward.mode == "batch":
        return reward.score_all(items)
    if reward.mode == "each":
        return [_one(reward, item) for item in items]

    async def together() -> list[Result]:
        return await asyncio.gather(*(one(item) for item in items))

    async def one(item: Item) -> Result:
        try:
            return await reward.score_async(item)
        except Exception as error:  # boundary: the user's function
            return {"error": explained(error)}

    return runner().run(together())


def _one(reward: LoadedReward, item: Item) -> Result:
    try:
        return reward.score_one(item)
    except MemoryError:
        raise  # the worker has to be replaced
    except Exception as error:  # boundary: the user's function
        return {"error": explained(error)}


def _names(members: Sequence[LoadedReward]) -> list[str]:
    """The members' own names, with a number behind one that comes again."""
    out: list[str] = []
    for member in members:
        name = member.spec.rpartition(":")[2].partition("/")[0]
        out.append(
            next(n for n in itertools.chain([name], (f"{name}.{k}" for k in itertools.count(2))) if n not in out)
        )
    return out


def loaded(spec: str, base_dir: str, function: Callable[..., Any] | None = None) -> LoadedReward | LoadedSum:
    """The reward that `spec` names; `function`: the object itself, if a program gave it. Raises as `load_reward`."""
    if function is None:
        return load_reward(spec, base_dir)
    if isinstance(function, SeveralRewards):
        return LoadedSum([_member(member, base_dir) for member in function.members])
    return with_signature(spec, function)


def _member(member: Callable[..., Any] | str, base_dir: str) -> LoadedReward:
    if isinstance(member, str):
        return load_reward(f"{member}/{_DEFAULT_RULE}" if member in BUILTINS else member, base_dir)
    return with_signature(getattr(member, "__name__", type(member).__name__).strip("<>"), member)
