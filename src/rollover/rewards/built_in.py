"""The built-in rewards by name, and specs, the text form of rewards. Import-light.

    gsm8k    exact_match/boxed    gsm8k/{"method": "flexible"}    functions/[{"function": "gsm8k", "weight": 0.5}, ...]

The reward worker makes the function of a built-in, once per spec, and imports the packages that it needs.
docs/rewards.md lists the limits of each built-in.
"""

from __future__ import annotations

import fnmatch
import inspect
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

from rollover.live_objects import own_name
from rollover.registry import PLUGINS, registered, why_unknown
from rollover.suggest import alike, did_you_mean

# prompt: str | list of messages; completion: str; completion_ids; num_turns; trainer_state; columns; source
Item = dict[str, Any]


@dataclass(frozen=True)
class BuiltIn:
    """A built-in reward.

    `make`: module:function that takes the reward's parameters and returns a function (`def` or `async def`) from an
    item, or from a list of items (`whole_groups`), to a valid return value of reward functions. Its parameter
    `base_dir`, if any, is the base of relative paths. It raises ValueError for wrong parameters or a missing package.
    `states`: module:function with the same parameters that describes, in a line, the reward on this machine.
    """

    make: str
    needs_answer: bool = True
    whole_groups: bool = False
    states: str = ""


BUILT_IN = {
    "exact_match": BuiltIn("rollover.rewards.rules:exact_match"),
    "reasoning_gym": BuiltIn("rollover.rewards.rules:reasoning_gym", needs_answer=False),
    "last_number": BuiltIn("rollover.rewards.rules:last_number"),
    "boxed": BuiltIn("rollover.rewards.math_rules:boxed"),
    "gsm8k": BuiltIn("rollover.rewards.rules:gsm8k"),
    "math_dapo": BuiltIn("rollover.rewards.math_rules:math_dapo"),
    "math": BuiltIn("rollover.rewards.math_rules:math"),
    "multiple_choice": BuiltIn("rollover.rewards.rules:multiple_choice"),
    "search_qa": BuiltIn("rollover.rewards.rules:search_qa"),
    "column": BuiltIn("rollover.rewards.rules:column", needs_answer=False),
    "json": BuiltIn("rollover.rewards.rules:json_text", needs_answer=False),
    "format": BuiltIn("rollover.rewards.rules:pattern", needs_answer=False),
    "llm_judge": BuiltIn("rollover.rewards.llm_judge:llm_judge", needs_answer=False),
    "reward_model": BuiltIn("rollover.rewards.reward_model:reward_model", needs_answer=False, whole_groups=True),
    "code": BuiltIn(PLUGINS["rewards"]["code"], needs_answer=False, states=PLUGINS["reward_statements"]["code"]),
}
_SEVERAL = "functions/"
_WITH_RULE = ("exact_match", "reasoning_gym")  # they read answers by tasks.answer_rule

# verl's choice by data_source (verl/utils/reward_score/__init__.py, 0.9.1), where the function exists here.
BY_DATA_SOURCE = {
    "openai/gsm8k": "gsm8k",
    "lighteval/MATH": "boxed",
    "DigitalLearningGmbH/MATH-lighteval": "boxed",
    "HuggingFaceH4/MATH-500": "boxed",
    "math_dapo": "math_dapo",
    "math": "math_dapo",
    "math_dapo_reasoning": "math_dapo",
    "aime*": "math_dapo",
    "numina_*": "math",
    "searchR1_*": "search_qa",
    "codecontests": "code",
    "apps": "code",
    "codeforces": "code",
    "taco": "code",
}
# verl has a function for these, which is not built in here: rows without another reward are an error.
NOT_BUILT_IN = {
    "hiyouga/geometry3k": "answers about images",
}


def parse_spec(spec: str) -> tuple[str, dict[str, Any]] | None:
    """Return name and parameters of a built-in's spec; None for another one. ValueError for invalid parameters."""
    name, slash, rest = spec.partition("/")
    if name not in BUILT_IN or (slash and name not in _WITH_RULE and not rest.startswith("{")):
        return None
    if not rest:
        return name, {}
    if not rest.startswith("{"):
        return name, {"rule": rest}
    try:
        params = json.loads(rest)
    except ValueError as error:
        raise ValueError(f"the reward {spec!r}: its parameters are no JSON ({error})") from None
    return name, params


def make_spec(name: str, params: Mapping[str, Any], rule: str = "") -> str:
    """Return the spec of a built-in. `rule`: answer rule, unless `params` has one. ValueError for an unknown
    parameter."""
    params = dict(params)
    if name in _WITH_RULE and rule:
        params.setdefault("rule", rule)
    _check(name, params)
    if not params:
        return name
    return f"{name}/{params['rule']}" if params.keys() == {"rule"} else f"{name}/{json.dumps(params, sort_keys=True)}"


def with_rule(spec: str, rule: str) -> str:
    """Return a built-in's spec with its answer rule; another spec unchanged. ValueError as of `make_spec`."""
    found = parse_spec(spec)
    return spec if found is None else make_spec(*found, rule)


def make_function(name: str, params: Mapping[str, Any], base_dir: str) -> Callable[[Any], Any]:
    """Make the function of a built-in. ValueError as of `BuiltIn.make`."""
    _check(name, params)
    make = _maker(name)
    places = {"base_dir": base_dir} if "base_dir" in inspect.signature(make).parameters else {}
    try:
        return make(**params, **places)
    except TypeError as error:
        raise ValueError(f"the reward {name} with {json.dumps(dict(params))}: {error}") from error


def statements(spec: str) -> list[str]:
    """Return a line about each built-in of the spec on this machine. ValueError as of `make_function`."""
    out = []
    for name, params in filter(None, map(parse_spec, specs_in(spec))):
        if states := BUILT_IN[name].states:
            out.append(f"{name}: {_function(states)(**params)}")
    return out


def spec_by_data_source(data_source: str, own: Mapping[str, str]) -> str:
    """Return the reward of a data_source, as in a configuration: from the table `own`, else verl's. ValueError for an
    unknown one, as in verl."""
    for table in (own, BY_DATA_SOURCE):
        if data_source in table:
            return table[data_source]
        if found := next((spec for name, spec in table.items() if fnmatch.fnmatchcase(data_source, name)), None):
            return found
    about = f" (it is of {what}, for which none is built in)" if (what := NOT_BUILT_IN.get(data_source)) else ""
    raise ValueError(
        f"there is no reward for data_source {data_source!r}{about}: name one, for all rows in rewards.function or for"
        f' these, for instance rewards.by_data_source = {{ "{data_source}" = "path.py:function" }}'
    )


def unknown_message(spec: str, key: str) -> str:
    """Return the error message for an unknown `spec`."""
    others = registered("rewards")
    if spec in others:
        return f"{key}: {spec!r} {why_unknown('rewards', spec)}"
    near = alike(spec, [*BUILT_IN, *others])
    hint = f"; did you mean {near[0]!r}?" if near else ""
    installed = f" nor registered by a package ({', '.join(others)})" if others else ""
    return (
        f"{key}: {spec!r} is neither built in ({', '.join(BUILT_IN)}){installed} nor module:function nor"
        f" path.py:function{hint}"
    )


def needs_answer(spec: str) -> bool:
    """Return whether a built-in of this spec cannot score a task without an answer."""
    found = [parse_spec(one) for one in specs_in(spec)]
    return any(one is not None and BUILT_IN[one[0]].needs_answer for one in found)


def answer_rules(spec: str) -> list[str]:
    """Return the answer rules of the built-ins of this spec."""
    found = filter(None, map(parse_spec, specs_in(spec)))
    rules = ("last_number" if name == "last_number" else params.get("rule") for name, params in found)
    return [rule for rule in rules if rule]


# Composite rewards


def composite_spec(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the spec of several functions. A row: {"function": spec} and optionally "weight" (1), "name", "shaping"
    (False), and "params", arguments of a user's function."""
    return _SEVERAL + json.dumps(rows, sort_keys=True)


def composite_rows(spec: str) -> list[dict[str, Any]] | None:
    """Return the rows of a composite spec; None for another spec."""
    return json.loads(spec.removeprefix(_SEVERAL)) if spec.startswith(_SEVERAL) else None


def specs_in(spec: str) -> list[str]:
    """Return the specs of a composite's functions, or the spec itself."""
    rows = composite_rows(spec)
    return [spec] if rows is None else [row["function"] for row in rows]


def row_names(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the rows: given, or the function's, numbered if repeated."""
    given = {row["name"] for row in rows if row.get("name")}
    out: list[str] = []
    for row in rows:
        own = _plain(row["function"])
        numbered = itertools.chain([own], (f"{own}.{k}" for k in itertools.count(2)))
        out.append(row.get("name") or next(n for n in numbered if n not in {*out, *given}))
    return out


def score_names(spec: str) -> list[str]:
    """Return the names of the functions whose weighted scores make up the reward `spec`; [] unless it has several."""
    rows = composite_rows(spec) or []
    named = zip(rows, row_names(rows), strict=True)
    return [name for row, name in named if row.get("weight", 1.0) != 0 and not row.get("shaping", False)]


def _plain(spec: str) -> str:
    return spec.partition("/")[0] if parse_spec(spec) else own_name(spec).strip("<>")


def display_name(spec: str) -> str:
    """Return a reward's name in messages: `exact_match`, `mine.py:score`, or `math + format`."""
    rows = composite_rows(spec)
    if rows is not None:
        return " + ".join(row_names(rows))
    return spec.partition("/")[0] if parse_spec(spec) else spec


def _check(name: str, params: Mapping[str, Any]) -> None:
    known = [p for p in inspect.signature(_maker(name)).parameters if p != "base_dir"]
    for param in params:
        if param not in known:
            has = f"it has {', '.join(known)}" if known else "it has none"
            raise ValueError(f"the reward {name} has no parameter {param!r}: {has}{did_you_mean(param, known)}")


@cache
def _maker(name: str) -> Callable[..., Callable[[Any], Any]]:
    return _function(BUILT_IN[name].make)


def _function(spec: str) -> Callable[..., Any]:
    module, _, function = spec.partition(":")
    return getattr(import_module(module), function)
