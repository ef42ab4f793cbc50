"""Loads and calls the function of a reward spec, in the worker process. Import-light: no torch, no numpy.

    NAME, NAME/RULE, NAME/{"parameter": ...}       a built-in reward (rewards/built_in.py)
    functions/[{"function": ..., "weight": ...}]   several functions, whose scores are summed
    module:function, path.py:function              a user's function, which sees the raw completion

Owns the accepted signatures (verl's and TRL's, as `def` or `async def`) and the meaning of return values. Knows no pipe
and no time limit.
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
from rollover.rewards.built_in import BUILT_IN, Item, composite_rows, make_function, parse_spec, row_names
from rollover.suggest import alike
from rollover.text import encodable, printable

_MAX_NAME_CHARS = 100
_MAX_TEXT_CHARS = 1000
RETURNED_NONE = "the function returned None"
MAX_REPLY_BYTES = 64 << 20
"""Limit for a reply of the worker process: one result, or those of a batch."""
Result = dict[str, Any]  # {"score", "extras"}, of a composite also {"shaping"}; or {"error"}
# One call scores one item; one item, with concurrent calls on one event loop; all items.
Mode = Literal["each", "together", "batch"]


@dataclass(frozen=True, slots=True)
class LoadedReward:
    """A loaded function. Unless `whole_groups`, a call scores one item, and its failure leaves other items valid."""

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
        """Score one item with a per-sample function. Its exceptions pass through."""
        if self.kind == "builtin":
            return to_result(self.function(item))
        return to_result(self._call(**self._arguments_of(item)))

    async def score_async(self, item: Item) -> Result:
        """Score one item with a function of mode "together", on the caller's event loop."""
        if self.kind == "builtin":
            return to_result(await self.function(item))
        return to_result(await self.function(**self._known(self._arguments_of(item))))

    def _arguments_of(self, item: Item) -> dict[str, Any]:
        """Return the four arguments of verl's compute_score."""
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
        """Return the arguments that the function takes. ValueError for a missing required one."""
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
    """Return the row's extra_info with verl's additions: number of turns, and scores of turns (none)."""
    found = item["columns"].get("extra_info")
    added = {"num_turns": item.get("num_turns", 2), "rollout_reward_scores": {}}
    return {**found, **added} if isinstance(found, dict) else added


@cache
def runner() -> asyncio.Runner:
    """Return the process's only event loop: a client session that a function keeps between calls belongs to it."""
    return asyncio.Runner()


async def _awaited(value: Any) -> Any:
    return await value


def _trl_completion(item: Item) -> str | list[dict[str, str]]:
    """Return the completion in TRL's form: a string for a string prompt, else a list of messages."""
    if isinstance(item["prompt"], str):
        return item["completion"]
    return [{"role": "assistant", "content": item["completion"]}]


def _results(values: Any, num: int) -> list[Result]:
    """Convert a batch function's return value. ValueError unless it is a list of `num` scores."""
    if hasattr(values, "tolist"):  # numpy array or tensor
        values = values.tolist()
    if not isinstance(values, list | tuple):
        raise ValueError(f"it returned {_short(values)}, expected a list of {num} scores")
    if len(values) != num:
        raise ValueError(f"it returned {len(values)} scores for {num} completions")
    return [to_result(value) for value in values]


def to_result(value: Any) -> Result:
    """Convert a return value for one completion to {"score", "extras"} and optionally "texts", or {"error"}.

    A dict has `score`, or `error` with the reason of a missing score. Its other finite numbers become extras, its texts
    are truncated to 1,000 characters.
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
    """Return the finite numbers among `values`."""
    numbers = {_name(key): _number(value) for key, value in values.items()}
    return {name: number for name, number in numbers.items() if number is not None and is_score(number)}


def _texts(values: Mapping[Any, Any]) -> dict[str, str]:
    """Return the texts among `values`, truncated."""
    found = ((_name(key), value[:_MAX_TEXT_CHARS]) for key, value in values.items() if isinstance(value, str))
    return {name: encodable(text) for name, text in found}


def _with_logged(result: Result, row: Mapping[str, Any]) -> Result:
    """Add the values that the function logged."""
    texts = {**result.get("texts", {}), **_texts(row)}
    return {**result, "extras": result["extras"] | _extras(row)} | ({"texts": texts} if texts else {})


def _name(key: Any) -> str:
    """Return a name that is valid in metric keys and files."""
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
    """Load a spec of one function. `base_dir`: base of relative paths. `further`: extra arguments of a user's function.

    ValueError if it is not found, its module cannot be imported, or its signature is invalid.
    """
    if found := parse_spec(spec):
        name, params = found
        function = make_function(name, params, base_dir)
        return LoadedReward(spec, "builtin", function, whole_groups=BUILT_IN[name].whole_groups)
    return with_signature(spec, load_function(spec, base_dir), further)


def with_signature(spec: str, function: Callable[..., Any], further: Mapping[str, Any] | None = None) -> LoadedReward:
    """Wrap `function`, named `spec`, with the calling convention of its parameters. ValueError for unknown ones."""
    parameters = inspect.signature(function).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    named = {n: p for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    names = frozenset(named)
    if "solution_str" in names:
        kind = "verl"
    elif "solution_strs" in names:
        kind = "verl_batch"
    elif names & TRL_PARAMETERS:
        kind = "trl"
    elif takes_any and not any(p.default is p.empty for p in named.values()):
        kind = "any"  # a wrapper: verl's arguments for rows with a data_source, else TRL's
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


class CompositeReward:
    """Weighted sum of several reward functions, with the interface of LoadedReward.

    Each function's score is an extra under its name. A function that returns None does not apply to the sample and is
    left out of the sum; the reward is missing if none applies or one fails. Scores of shaping functions are no part of
    the sum. It scores single items if all functions do, else whole groups.
    """

    def __init__(self, members: Sequence[_Member]) -> None:
        self.members = members
        self.mode: Mode = "each" if all(member.reward.mode == "each" for member in members) else "batch"

    def score_one(self, item: Item) -> Result:
        """Score one item with every function."""
        return self._sum([_score_or_error(member.reward, _isolated(member.reward, item)) for member in self.members])

    def score_all(self, items: list[Item]) -> list[Result]:
        """Score all items with every function. An exception of a batch function passes through."""
        columns = [_scores_of(member.reward, items) for member in self.members]
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


def _scores_of(reward: LoadedReward, items: list[Item]) -> list[Result]:
    items = [_isolated(reward, item) for item in items]
    if reward.mode == "batch":
        return reward.score_all(items)
    if reward.mode == "each":
        return [_score_or_error(reward, item) for item in items]

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


def _isolated(reward: LoadedReward, item: Item) -> Item:
    """Return the item with a copy of the task's columns, which a user's function may change."""
    return item if reward.kind == "builtin" else {**item, "columns": copy.deepcopy(item["columns"])}


def _score_or_error(reward: LoadedReward, item: Item) -> Result:
    try:
        return reward.score_one(item)
    except MemoryError:
        raise  # the worker has to be replaced
    except Exception as error:  # boundary: the user's function
        return {"error": explained(error)}


def load(
    spec: str, base_dir: str, functions: Mapping[str, Callable[..., Any]] | None = None
) -> LoadedReward | CompositeReward:
    """Load the reward of any `spec`. `functions`: function objects of the parent, by spec. ValueError as of
    `load_reward`."""
    rows = composite_rows(spec)
    if rows is None:
        return _load_member(spec, base_dir, functions or {})
    return CompositeReward(
        [
            _Member(
                _load_member(row["function"], base_dir, functions or {}, row.get("params")),
                name,
                row.get("weight", 1.0),
                row.get("shaping", False),
            )
            for row, name in zip(rows, row_names(rows), strict=True)
        ]
    )


def _load_member(
    spec: str,
    base_dir: str,
    functions: Mapping[str, Callable[..., Any]],
    further: Mapping[str, Any] | None = None,
) -> LoadedReward:
    if spec in functions:
        return with_signature(spec, functions[spec], further)
    return load_reward(spec, base_dir, further)


TRL_PARAMETERS = frozenset({"prompts", "completions", "completion_ids", "trainer_state", "log_metric", "log_extra"})
"""Parameters that occur in TRL's signature only."""


@dataclass(frozen=True, slots=True)
class TrainerState:
    """Fields of TRL's `trainer_state` that reward functions read.

    global_step: optimizer updates of the newest weights that sampled the completion. max_steps: updates of the whole
    run. epoch: completed passes over the data before the task's. num_train_epochs: passes of the run. log_history is
    empty. The defaults are passed at start-up.
    """

    global_step: int = 0
    max_steps: int = 1
    epoch: float = 0.0
    num_train_epochs: int = 1
    log_history: list[Any] = field(default_factory=list)


class Logged:
    """Values that one call logs with TRL's `log_metric` and `log_extra`, by completion."""

    def __init__(self, num_completions: int) -> None:
        self.rows: list[dict[str, Any]] = [{} for _ in range(num_completions)]

    def log_metric(self, name: str, value: float) -> None:
        self.log_extra(name, [float(value)] * len(self.rows))

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Log a value for each completion. ValueError for another number of values."""
        if len(values) != len(self.rows):
            raise ValueError(f"log_extra({column!r}): {len(values)} values for {len(self.rows)} completions")
        for row, value in zip(self.rows, values, strict=True):
            row[column] = value
