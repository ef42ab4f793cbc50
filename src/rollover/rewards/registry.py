"""Finds and calls the function behind a reward spec, inside the worker process. Import-light: no torch, no numpy.

Owns the two accepted signatures (each as `def` or `async def`) and the meaning of what a function returns. Never talks
to a pipe and never sets a time limit. A spec is one of
    NAME, NAME/RULE, NAME/{"parameter": ...}       a built-in reward (rewards/built_in.py)
    functions/[{"function": ..., "weight": ...}]   several (rewards/composite.py)
    module:function, path.py:function              a user's function, which sees the raw completion
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from rollover.functions import MOST_SCORE, explained, is_score, load_function, shortened
from rollover.rewards.answers import answer_of
from rollover.rewards.built_in import BUILT_IN, Item, made, members_of, names_of, parsed
from rollover.suggest import alike
from rollover.text import encodable, printable

_MAX_NAME_CHARS = 100
_MAX_TEXT_CHARS = 1000
RETURNED_NONE = "the function returned None"
MAX_REPLY_BYTES = 64 << 20
"""Of one result, or of those of a batch, on its way from the worker process."""
Result = dict[str, Any]  # {"score", "extras"}, of several also {"shaping"}; or {"error"}
# What one call scores: one item; one item, several calls at a time on one event loop; all items.
Mode = Literal["each", "together", "batch"]


@dataclass(frozen=True, slots=True)
class LoadedReward:
    """A function ready to be called. Unless whole_groups one call scores one item: a failure leaves others valid."""

    spec: str
    kind: Literal["builtin", "verl", "verl_batch", "trl", "any"]
    function: Callable[..., Any]
    parameters: frozenset[str] = frozenset()
    takes_any: bool = False  # it has **kwargs: every column is passed
    required: frozenset[str] = frozenset()  # parameters without a default
    further: Mapping[str, Any] = field(default_factory=dict)  # arguments that the configuration gives
    whole_groups: bool = False

    @property
    def mode(self) -> Mode:
        if self.whole_groups:
            return "batch"
        functions = (self.function, type(self.function).__call__)  # an object may have an async __call__
        return "together" if any(map(inspect.iscoroutinefunction, functions)) else "each"

    def score_one(self, item: Item) -> Result:
        """Score one item with a per-sample function. What the function raises passes through."""
        if self.kind == "builtin":
            return to_result(self.function(item))
        return to_result(self._call(**self._arguments_of(item)))

    async def score_async(self, item: Item) -> Result:
        """`score_one` of a function whose mode is "together", on the caller's event loop."""
        if self.kind == "builtin":
            return to_result(await self.function(item))
        return to_result(await self.function(**self._known(self._arguments_of(item))))

    def _arguments_of(self, item: Item) -> dict[str, Any]:
        """The four arguments of verl's compute_score."""
        columns = item["columns"]
        if self.parameters & {"ground_truth", "ground_truths"} and answer_of(columns) is None:
            raise ValueError(
                f"the function takes ground_truth, but the task has no answer (its columns: {', '.join(columns)});"
                " set tasks.sources.answer_column"
            )
        return {
            "data_source": columns.get("data_source") or item["source"],
            "solution_str": item["completion"],
            "ground_truth": answer_of(columns),
            "extra_info": _extra_info(item),
        }

    def score_all(self, items: list[Item]) -> list[Result]:
        """Score all items with one call of a batch function. Raises ValueError for a wrong length or type."""
        if self.kind == "any" and all(item["columns"].get("data_source") for item in items):
            return [to_result(self._call(**self._arguments_of(item))) for item in items]
        if self.kind == "builtin":
            return _results(self.function(items), len(items))
        if self.kind == "verl_batch":
            rows = [self._arguments_of(item) for item in items]
            return _results(self._call(**{f"{name}s": [row[name] for row in rows] for name in _OF_VERL}), len(items))
        return self._call_as_trl(items)

    def _call_as_trl(self, items: list[Item]) -> list[Result]:
        logged = Logged(len(items))
        states = [TrainerState(**item.get("trainer_state", {})) for item in items]
        columns = dict.fromkeys(name for item in items for name in item["columns"])
        names = [name for name in columns if name not in ("completion", "completion_ids")]  # as TRL
        arguments = {
            "completion_ids": [item.get("completion_ids", []) for item in items],
            **{name: [item["columns"].get(name) for item in items] for name in names},
            "prompts": [item["prompt"] for item in items],
            "completions": [_trl_completion(item) for item in items],
            "trainer_state": max(states, key=lambda state: state.global_step),
            "log_metric": logged.log_metric,
            "log_extra": logged.log_extra,
        }
        results = _results(self._call(**arguments), len(items))
        return [
            result if "error" in result else _with_logged(result, row)
            for result, row in zip(results, logged.rows, strict=True)
        ]

    def _call(self, **arguments: Any) -> Any:
        value = self.function(**self._known(arguments))
        return runner().run(_awaited(value)) if inspect.isawaitable(value) else value

    def _known(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments that the function takes. ValueError if it needs one that is not there."""
        arguments = {**arguments, **self.further}
        if missing := sorted(self.required - arguments.keys()):
            near = [n for m in missing for n in alike(m, arguments)]
            raise ValueError(
                f"the function takes {', '.join(missing)}, but the data has no such column: it is given"
                f" {', '.join(arguments)}" + (f". Did you mean {' or '.join(near)}?" if near else "")
            )
        return arguments if self.takes_any else {n: v for n, v in arguments.items() if n in self.parameters}


_OF_VERL = ("data_source", "solution_str", "ground_truth", "extra_info")


def _extra_info(item: Item) -> dict[str, Any]:
    """The row's, with what verl adds: the number of turns, and the scores that were given in the course of the
    conversation (none)."""
    found = item["columns"].get("extra_info")
    told = {"num_turns": item.get("num_turns", 2), "rollout_reward_scores": {}}
    return {**found, **told} if isinstance(found, dict) else told


@cache
def runner() -> asyncio.Runner:
    """The process's one event loop: a client session that a function keeps between calls belongs to its loop."""
    return asyncio.Runner()


async def _awaited(value: Any) -> Any:
    return await value


def _trl_completion(item: Item) -> str | list[dict[str, str]]:
    """TRL: plain strings for prompts that are strings in the data, lists of messages for those that are messages."""
    if isinstance(item["prompt"], str):
        return item["completion"]
    return [{"role": "assistant", "content": item["completion"]}]


def _results(values: Any, num: int) -> list[Result]:
    """What a batch function returned for `num` completions. ValueError where it is no list of so many."""
    if hasattr(values, "tolist"):  # numpy array or tensor
        values = values.tolist()
    if not isinstance(values, list | tuple):
        raise ValueError(f"it returned {_short(values)}, expected a list of {num} scores")
    if len(values) != num:
        raise ValueError(f"it returned {len(values)} scores for {num} completions")
    return [to_result(value) for value in values]


def to_result(value: Any) -> Result:
    """Return {"score", "extras"} and maybe "texts" of what a function returned for one completion, or {"error"}.

    A dict must have `score`. Its other finite numbers become extras, its texts stay, cut to 1,000 characters. One with
    `error` in its place says why there is no score.
    """
    extras: dict[str, float] = {}
    texts: dict[str, str] = {}
    if isinstance(value, dict):
        if "score" not in value and "error" in value:
            return {"error": shortened(str(value["error"]))}
        if "score" not in value:
            return {"error": f"the function returned a dict without 'score': {_short(value)}"}
        rest = {key: other for key, other in value.items() if key != "score"}
        extras, texts = _extras(rest), _texts(rest)
        value = value["score"]
    if value is None:
        return {"error": RETURNED_NONE}
    score = _number(value)
    if score is None:
        return {"error": f"the function returned {_short(value)}, expected a number"}
    if not math.isfinite(score):
        return {"error": f"the function returned {score}, which is not finite"}
    if not is_score(score):
        return {
            "error": f"the function returned {score:g}: give scores within {MOST_SCORE:g}, sums of larger ones overflow"
        }
    return {"score": score, "extras": extras} | ({"texts": texts} if texts else {})


def _extras(values: Mapping[Any, Any]) -> dict[str, float]:
    """The finite numbers among `values`."""
    numbers = {_name(key): _number(value) for key, value in values.items()}
    return {name: number for name, number in numbers.items() if number is not None and is_score(number)}


def _texts(values: Mapping[Any, Any]) -> dict[str, str]:
    """The texts among `values`, cut."""
    found = ((_name(key), value[:_MAX_TEXT_CHARS]) for key, value in values.items() if isinstance(value, str))
    return {name: encodable(text) for name, text in found}


def _with_logged(result: Result, row: Mapping[str, Any]) -> Result:
    """The result with what its function logged beside it."""
    texts = {**result.get("texts", {}), **_texts(row)}
    return {**result, "extras": result["extras"] | _extras(row)} | ({"texts": texts} if texts else {})


def _name(key: Any) -> str:
    """An extra's name, as it can stand in the key of a metric and in a file."""
    return printable(str(key))[:_MAX_NAME_CHARS] or "?"


def _number(value: Any) -> float | None:
    if getattr(value, "shape", None) == ():  # numpy scalar, or array or tensor without dimensions
        value = value.item()
    if not isinstance(value, bool | int | float):
        return None
    try:
        return float(value)
    except OverflowError:  # of an int
        return math.inf if value > 0 else -math.inf


def _short(value: Any) -> str:
    return f"{type(value).__name__} {shortened(value)}"


# Loading


def load_reward(spec: str, base_dir: str, further: Mapping[str, Any] | None = None) -> LoadedReward:
    """Resolve `spec`. A relative path is relative to `base_dir`. Raises ValueError saying what could not be found or
    what is wrong with the signature; an error raised while importing the user's module becomes one too.

    `further`: arguments of a function of the user's own beside those of its signature."""
    if found := parsed(spec):
        name, params = found
        function = made(name, params, base_dir)
        return LoadedReward(spec, "builtin", function, whole_groups=BUILT_IN[name].whole_groups)
    return with_signature(spec, load_function(spec, base_dir), further)


def with_signature(spec: str, function: Callable[..., Any], further: Mapping[str, Any] | None = None) -> LoadedReward:
    """`function` under the name `spec`, to be called as its parameters tell. ValueError where they tell no way."""
    parameters = inspect.signature(function).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    named = {n: p for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    names = frozenset(named)
    if "solution_str" in names:
        kind = "verl"
    elif "solution_strs" in names:
        kind = "verl_batch"
    elif names & NAMES:
        kind = "trl"
    elif takes_any and not any(p.default is p.empty for p in named.values()):
        kind = "any"  # a wrapper, say: called as verl's where the rows have a data_source, else as TRL's
    else:
        raise ValueError(
            f"{spec} has the parameters ({', '.join(parameters)}); expected TRL's f(prompts, completions, **columns),"
            " verl's compute_score(data_source, solution_str, ground_truth, extra_info), or the same for a whole batch"
            " (data_sources, solution_strs, ground_truths, extra_infos)"
        )
    if unknown := [name for name in further or {} if name not in names and not takes_any]:
        raise ValueError(f"{spec} has no parameter {unknown[0]!r}: it has {', '.join(parameters)}")
    required = frozenset(n for n, p in named.items() if p.default is p.empty)
    return LoadedReward(spec, kind, function, names, takes_any, required, further or {}, whole_groups=kind != "verl")


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


NAMES = frozenset({"prompts", "completions", "completion_ids", "trainer_state", "log_metric", "log_extra"})
"""Parameters that only functions of TRL's signature have."""


@dataclass(frozen=True, slots=True)
class TrainerState:
    """Fields of TRL's `trainer_state` that reward functions read.

    global_step: optimizer updates behind the newest weights that sampled the completion. max_steps: updates of the
    whole run. epoch: passes over the data before the one that the task belongs to. num_train_epochs: passes that the
    data permits. log_history is empty. The defaults are those of the call at start-up.
    """

    global_step: int = 0
    max_steps: int = 1
    epoch: float = 0.0
    num_train_epochs: int = 1
    log_history: list[Any] = field(default_factory=list)


class Logged:
    """The values that one call logs with `log_metric` and `log_extra`, by completion."""

    def __init__(self, num_completions: int) -> None:
        self.rows: list[dict[str, Any]] = [{} for _ in range(num_completions)]

    def log_metric(self, name: str, value: float) -> None:
        self.log_extra(name, [float(value)] * len(self.rows))

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """ValueError unless there is a value for each completion."""
        if len(values) != len(self.rows):
            raise ValueError(f"log_extra({column!r}): {len(values)} values for {len(self.rows)} completions")
        for row, value in zip(self.rows, values, strict=True):
            row[column] = value
