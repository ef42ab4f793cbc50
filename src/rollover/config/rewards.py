"""[rewards], and the rules about it."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from rollover.config.table import MOST_GB, Inert, Refused, Rule, Table, memory_rules, option, wrong
from rollover.system import cores

CODE_TIMEOUT_S = 10.0  # of the reward code, where its parameters do not say
_CODE_SPARE_S = 2.0  # of a call, beside what the tests may take: the sandbox itself, and its grace
_TERMS = ("overlong", "repetition")  # of shaping, beside the functions that are
RESERVED = ("score", *_TERMS)  # which no row of rewards.functions can be named


class RewardFunctionConfig(Table):
    """[[rewards.functions]]: one of several reward functions."""

    function: str = option(
        "",
        "Built-in reward by name, or a custom function, as rewards.function.",
        entry_points="rewards",
    )
    weight: float = option(1.0, "Weight of its score in the sum; 0 = metric only.")
    name: str = option("", "Name in the logs (reward/extra/NAME); empty = name of the function.")
    params: dict[str, Any] = option({}, "Parameters of a built-in reward, or further arguments of a custom function.")
    shaping: bool = option(
        False,
        "Add its weighted score to the training reward only (shaping/NAME/mean): task scores, pass rates, filters"
        " and evaluations exclude it.",
    )


class RewardsConfig(Table):
    """[rewards]: scoring of rollouts."""

    function: str = option(
        "",
        "Default reward of all sources: module:function or path.py:function with TRL's signature f(prompts,"
        " completions, **columns) or verl's compute_score(data_source, solution_str, ground_truth, extra_info), or a"
        " built-in name.",
        entry_points="rewards",
    )
    functions: list[RewardFunctionConfig] = option(
        [], "Several reward functions in place of one: the score is their weighted sum."
    )
    by_data_source: dict[str, Any] = option(
        {},
        "Rewards by the column data_source, where neither the source nor rewards.function names one: name (with * as"
        " a wildcard) -> reward. They precede verl's own table, which always applies. A data_source in neither is an"
        " error, as in verl.",
        entry_points="rewards",
    )
    eval_function: str = option(
        "",
        "Reward of held-out tasks, as rewards.function; empty = the reward of training.",
        only_if=("eval.num_tasks",),
        entry_points="rewards",
    )
    timeout_s: float = option(
        30.0,
        "Time limit in seconds of one call. A timeout kills the worker, and the reward is missing. inf = no limit.",
        gt=0,
        unlimited=True,
    )
    startup_timeout_s: float = option(
        120.0, "Time limit in seconds for loading the function in its worker. inf = no limit.", gt=0, unlimited=True
    )
    num_workers: int = option(
        0,
        "Processes that score groups in parallel, one group each; 0 = number of cores minus one, at least 1 and at"
        " most 4.",
        ge=0,
    )
    streaming: bool = option(
        True,
        "Score each rollout as soon as it stops, without waiting for its group. Applies to per-sample functions;"
        " batch functions and async functions always get whole groups.",
    )
    memory_gb: float = option(
        0.0,
        "Memory limit of one worker (Linux). A function that exceeds it gets a MemoryError, and its reward is"
        " missing. 0 = no limit.",
        ge=0,
        le=MOST_GB,
    )
    retries: int = option(
        0,
        "Retries of a call that timed out or whose worker died. Exceptions are not retried.",
        ge=0,
    )
    quarantine_after: int = option(
        3,
        "Number of killed workers after which a task is no longer scored, and its rewards are missing. 0 = never.",
        ge=0,
    )
    repetition_penalty: float = option(
        0.0,
        "Shaping: penalty on the training reward of a rollout that rollout.stop_repetition_tokens stopped.",
        ge=0,
        only_if=("rollout.stop_repetition_tokens",),
    )
    overlong_buffer_tokens: int = option(
        0,
        "Shaping: length of the penalty zone before rollout.max_new_tokens; the penalty grows linearly within it"
        " (DAPO's soft overlong punishment; verl's overlong_buffer.len). 0 = off.",
        ge=0,
    )
    overlong_penalty: float = option(
        1.0,
        "Penalty at the end of that zone (verl's overlong_buffer.penalty_factor).",
        gt=0,
        only_if=("rewards.overlong_buffer_tokens",),
    )
    running_norm: Literal["none", "scale", "whiten"] = option(
        "none",
        "Shaping: divide training rewards by the running standard deviation of all rewards of the role (scale),"
        " after subtracting their running mean (whiten).",
    )
    clip_range: list[float] = option(
        [], "Shaping: [lowest, highest] training reward, after all other shaping. Empty: no limits."
    )
    min_valid: int = option(
        2, "Minimum number of valid rewards of a group. A group with fewer is dropped (too_few_rewards).", ge=1
    )

    @property
    def num_processes(self) -> int:
        """`num_workers`, or the default for this machine."""
        return self.processes_of(cores())

    def processes_of(self, num_cores: int) -> int:
        """Return the number of worker processes on a machine with `num_cores`."""
        return self.num_workers or min(4, max(1, num_cores - 1))

    def allowed_s(self, num_rollouts: int) -> float:
        """Return the time limit in seconds for scoring `num_rollouts`, without loading the function."""
        return (1 + self.retries) * (self.startup_timeout_s + num_rollouts * self.timeout_s)


def _all_sources_have_one(config: Any) -> bool:
    return bool(config.tasks.sources) and all(source.reward for source in config.tasks.sources)


def shaping_terms(config: Any) -> list[str]:
    """Return the names of the penalties and functions that shaping adds to the score."""
    rewards = config.rewards
    built_in = [rewards.overlong_buffer_tokens > 0, rewards.repetition_penalty > 0]
    named = [term for term, is_on in zip(_TERMS, built_in, strict=True) if is_on]
    own = (row.name or row.function.partition("/")[0].rpartition(":")[2] for row in rewards.functions if row.shaping)
    return [*named, *own]


def _not_weighed(config: Any) -> str:
    """Return the error for shaping terms that algorithm.reward_weights leaves out; "" without one."""
    weights = config.algorithm.reward_weights
    if not weights or "score" in weights:
        return ""
    if config.rewards.running_norm != "none":
        return "rewards.running_norm"
    if config.rewards.clip_range:
        return "rewards.clip_range"
    return next((f"the shaping {term!r}" for term in shaping_terms(config) if term not in weights), "")


def _wrong_row(config: Any) -> str:
    """Return the error of the rows of rewards.functions; "" if they are valid."""
    rows = config.rewards.functions
    for i, row in enumerate(rows):
        key = f"rewards.functions.{i}"
        if not row.function:
            return f"{key}.function is missing: name a built-in reward, module:function or path.py:function"
        if row.name in RESERVED:
            return f'{key}.name = "{row.name}": that is the name of something else. Give another'
    twice = [name for name, num in Counter(row.name for row in rows if row.name).items() if num > 1]
    if twice:
        return f'rewards.functions: {Counter(row.name for row in rows)[twice[0]]} have the name "{twice[0]}"'
    if rows and all(row.shaping for row in rows):
        return "rewards.functions: all are shaping, so that no rollout has a score. Let one have shaping = false"
    return ""


def _wrong_range(config: Any) -> bool:
    limits = config.rewards.clip_range
    return bool(limits) and (len(limits) != 2 or not limits[0] < limits[1])


def _written(config: Any) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """(its key, what is written, further parameters) of every reward that the configuration names."""
    rewards = config.rewards
    yield "rewards.function", rewards.function, {}
    yield "rewards.eval_function", rewards.eval_function, {}
    for i, row in enumerate(rewards.functions):
        yield f"rewards.functions.{i}", row.function, row.params
    for name, spec in rewards.by_data_source.items():
        yield f'rewards.by_data_source."{name}"', spec if isinstance(spec, str) else "", {}
    for i, source in enumerate(config.tasks.sources):
        yield f"tasks.sources.{i}.reward", source.reward, {}


def _slow_code(config: Any) -> str:
    """Return the first reward `code` whose tests may take as long as its worker has; "" if none may."""
    for key, spec, params in _written(config):
        name, _, rest = spec.partition("/")
        if name != "code":
            continue
        try:
            seconds = {**json.loads(rest or "{}"), **params}.get("timeout_s", CODE_TIMEOUT_S)
        except (ValueError, TypeError):  # who reads the parameters says so
            continue
        limit = config.rewards.timeout_s
        if isinstance(seconds, int | float) and seconds + _CODE_SPARE_S > limit:
            return (
                f"{key}: the reward code may run a program for timeout_s = {seconds:g} s, and rewards.timeout_s ="
                f" {limit:g} would end the worker before, its reward missing in place of 0. Set rewards.timeout_s to"
                f" {seconds + _CODE_SPARE_S:g} or more, or lower timeout_s of the reward"
            )
    return ""


RULES: tuple[Rule, ...] = (
    wrong(
        (
            "rewards.timeout_s",
            "rewards.function",
            "rewards.functions",
            "rewards.eval_function",
            "rewards.by_data_source",
            "tasks.sources",
        ),
        _slow_code,
    ),
    Inert(
        ("rewards.function", "rewards.functions", "rewards.by_data_source"),
        ("tasks.sources",),
        _all_sources_have_one,
        "as every source sets its own reward",
    ),
    Inert(
        ("rewards.by_data_source",),
        ("rewards.function", "rewards.functions"),
        lambda c: bool(c.rewards.function or c.rewards.functions),
        "as rewards.function or rewards.functions scores every task",
    ),
    Refused(
        ("rewards.function", "rewards.functions"),
        lambda c: bool(c.rewards.function and c.rewards.functions),
        lambda c: (
            f'rewards.function = "{c.rewards.function}" with rewards.functions: name it in one of these rows, or'
            " remove one of the two"
        ),
    ),
    wrong(("rewards.functions",), _wrong_row),
    Refused(
        ("rewards.by_data_source",),
        lambda c: not all(isinstance(spec, str) for spec in c.rewards.by_data_source.values()),
        lambda c: (
            f"rewards.by_data_source = {c.rewards.by_data_source}: every value must be a reward by name, for instance"
            ' { "openai/gsm8k" = "gsm8k" }'
        ),
    ),
    Refused(
        ("rewards.overlong_buffer_tokens", "rollout.max_new_tokens"),
        lambda c: c.rewards.overlong_buffer_tokens > c.rollout.max_new_tokens,
        lambda c: (
            f"rewards.overlong_buffer_tokens = {c.rewards.overlong_buffer_tokens} is above rollout.max_new_tokens ="
            f" {c.rollout.max_new_tokens}: it is the last part of it. Lower it"
        ),
    ),
    Refused(
        ("rewards.clip_range",),
        _wrong_range,
        lambda c: f"rewards.clip_range = {c.rewards.clip_range}: give [lowest, highest], for instance [-5.0, 5.0]",
    ),
    Refused(
        ("train.streaming_min_groups", "rewards.running_norm"),
        lambda c: c.train.streaming_min_groups > 0 and c.rewards.running_norm != "none",
        lambda c: (
            f'rewards.running_norm = "{c.rewards.running_norm}" with train.streaming_min_groups: the statistics are'
            " those of the whole step. Remove one of the two"
        ),
    ),
    Refused(
        ("workflow.credit", "rewards.running_norm", "rewards.clip_range"),
        lambda c: (
            c.workflow.credit == "turn_returns" and (c.rewards.running_norm != "none" or bool(c.rewards.clip_range))
        ),
        'workflow.credit = "turn_returns" with rewards.running_norm or rewards.clip_range: these are of the score,'
        " and a turn has rewards of its own beside it. Remove one of the two",
    ),
    Inert(
        ("rewards.overlong_buffer_tokens", "rewards.repetition_penalty", "rewards.running_norm", "rewards.clip_range"),
        ("algorithm.advantage", "workflow.roles"),
        lambda c: c.workflow.advantages(c.algorithm.advantage) == ("precomputed",),
        'with algorithm.advantage = "precomputed": advantages are not made of rewards',
    ),
    Refused(
        ("algorithm.reward_weights", "rewards.functions"),
        lambda c: bool(_not_weighed(c)),
        lambda c: (
            f"algorithm.reward_weights = {c.algorithm.reward_weights} leaves out {_not_weighed(c)}: it would have no"
            " effect. Give score (which has it), or the shaping by its name, a weight"
        ),
    ),
    *memory_rules("rewards.memory_gb"),
)
