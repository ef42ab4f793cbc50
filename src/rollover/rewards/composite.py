"""Several reward functions as one: the score is the weighted sum of theirs, and each one's is logged by its name.

Owns the spec of several, and how their results become one: a function that returns None does not apply to the sample
and is left out of its sum; where none applies, or where one fails, the reward is missing. What a function of shaping
returns is no part of the score. None sees what another did to its arguments. Runs in the reward worker.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollover.functions import MOST_SCORE, explained, is_score
from rollover.rewards.built_in import members_of, names_of
from rollover.rewards.registry import (
    RETURNED_NONE,
    Item,
    LoadedReward,
    Mode,
    Result,
    load_reward,
    runner,
    with_signature,
)


@dataclass(frozen=True)
class _Member:
    reward: LoadedReward
    name: str
    weight: float
    shaping: bool


class LoadedSum:
    """The loaded members. For the worker as a LoadedReward: of one sample at a time where all of them are, else of a
    whole group."""

    def __init__(self, members: Sequence[_Member]) -> None:
        self.members = members
        self.mode: Mode = "each" if all(member.reward.mode == "each" for member in members) else "batch"

    def score_one(self, item: Item) -> Result:
        """Score one item with every member."""
        return self._sum([_one(member.reward, _own(member.reward, item)) for member in self.members])

    def score_all(self, items: list[Item]) -> list[Result]:
        """Score all items with every member. What a batch function raises passes through: no item has its score."""
        columns = [_scored(member.reward, items) for member in self.members]
        return [self._sum([column[i] for column in columns]) for i in range(len(items))]

    def _sum(self, results: list[Result]) -> Result:
        total, num, extras, shaping, texts = 0.0, 0, {}, {}, {}
        for member, result in zip(self.members, results, strict=True):
            if "error" in result:
                if result["error"] != RETURNED_NONE:
                    return {**result, "error": f"{member.name}: {result['error']}"}
                continue
            texts |= {f"{member.name}.{name}": text for name, text in result.get("texts", {}).items()}
            if member.shaping:
                shaping[member.name] = member.weight * result["score"]
                continue
            extras[member.name] = result["score"]
            extras |= {f"{member.name}.{name}": value for name, value in result["extras"].items()}
            total, num = total + member.weight * result["score"], num + 1
        if not num:
            return {"error": RETURNED_NONE}
        if not all(map(is_score, (total, *shaping.values()))):
            return {"error": f"the weighted sum of the functions' scores is beyond {MOST_SCORE:g}"}
        rest = {"shaping": shaping, "texts": texts}
        return {"score": total, "extras": extras} | {name: values for name, values in rest.items() if values}


def _scored(reward: LoadedReward, items: list[Item]) -> list[Result]:
    items = [_own(reward, item) for item in items]
    if reward.mode == "batch":
        return reward.score_all(items)
    if reward.mode == "each":
        return [_one(reward, item) for item in items]

    async def together() -> list[Result]:
        return await asyncio.gather(*(one(item) for item in items))

    async def one(item: Item) -> Result:
        try:
            return await reward.score_async(item)
        except MemoryError:
            raise  # the worker has to be replaced
        except Exception as error:  # boundary: the user's function
            return {"error": explained(error)}

    return runner().run(together())


def _own(reward: LoadedReward, item: Item) -> Item:
    """The item, of which a function of the user's own may do with the task's columns as it likes."""
    return item if reward.kind == "builtin" else {**item, "columns": copy.deepcopy(item["columns"])}


def _one(reward: LoadedReward, item: Item) -> Result:
    try:
        return reward.score_one(item)
    except MemoryError:
        raise  # the worker has to be replaced
    except Exception as error:  # boundary: the user's function
        return {"error": explained(error)}


def loaded(
    spec: str, base_dir: str, functions: Mapping[str, Callable[..., Any]] | None = None
) -> LoadedReward | LoadedSum:
    """The reward that `spec` names; `functions`: the objects that a program gave, by their specs. Raises as
    `load_reward`."""
    rows = members_of(spec)
    if rows is None:
        return _loaded(spec, base_dir, functions or {})
    return LoadedSum(
        [
            _Member(
                _loaded(row["function"], base_dir, functions or {}, row.get("params")),
                name,
                row.get("weight", 1.0),
                row.get("shaping", False),
            )
            for row, name in zip(rows, names_of(rows), strict=True)
        ]
    )


def _loaded(
    spec: str,
    base_dir: str,
    functions: Mapping[str, Callable[..., Any]],
    further: Mapping[str, Any] | None = None,
) -> LoadedReward:
    if spec in functions:
        return with_signature(spec, functions[spec], further)
    return load_reward(spec, base_dir, further)
