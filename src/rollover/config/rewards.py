"""[rewards], and the rules about it."""

from collections import Counter
from typing import Any

from rollover.config.table import Inert, Refused, Rule, Table, memory_rules, option
from rollover.system import cores


class RewardFunctionConfig(Table):
    """[[rewards.functions]]: one of several reward functions."""

    function: str = option(
        "",
        "A built-in reward by name, or your own function (module:function or path.py:function), as rewards.function.",
    )
    weight: float = option(1.0, "Factor of its score in the sum; 0: it is a metric alone.")
    name: str = option("", "Under which it is logged (reward/extra/NAME); empty = its own.")
    params: dict[str, Any] = option({}, "Parameters of a built-in reward, or further arguments of your own function.")


class RewardsConfig(Table):
    """[rewards]: how rollouts are scored."""

    function: str = option(
        "",
        "Reward of all sources that name none: module:function or path.py:function in TRL's signature"
        " f(prompts, completions, **columns) or verl's compute_score(data_source, solution_str, ground_truth,"
        " extra_info), or a built-in name.",
    )
    functions: list[RewardFunctionConfig] = option(
        [], "Several reward functions in the place of one: the score is the weighted sum of theirs."
    )
    by_data_source: dict[str, Any] = option(
        {},
        "Reward of a task by its column data_source, where neither its source nor rewards.function names one: name (*"
        " for any part) -> reward. They come before verl's own table, which holds in any case; where there are some, a"
        " task whose data_source has none is an error.",
    )
    timeout_s: float = option(30.0, "Limit of one call; then the worker is killed and the reward is missing.", gt=0)
    startup_timeout_s: float = option(120.0, "Limit of loading the function in its worker.", gt=0)
    num_workers: int = option(
        0,
        "Processes that score groups at the same time, one group each; 0 = one less than there are cores,"
        " at least 1 and at most 4.",
        ge=0,
        unless=("run.train_on_recorded",),
    )
    streaming: bool = option(
        True,
        "Score a rollout as soon as it stops, not with its whole group. Only functions of one sample; a"
        " batch function or an async def gets whole groups in any case.",
    )
    memory_gb: float = option(
        0.0,
        "Memory of one worker (Linux); a function that asks for more gets a MemoryError, and its reward is"
        " missing. 0 = no limit.",
        ge=0,
        unless=("run.train_on_recorded",),
    )
    retries: int = option(
        0,
        "Further tries of a call that exceeded its limit or died with its worker. An exception is an"
        " answer: it is not tried again.",
        ge=0,
        unless=("run.train_on_recorded",),
    )
    quarantine_after: int = option(
        3,
        "A task whose calls ended this many workers is not scored any more: its rewards are missing. 0 = never.",
        ge=0,
        unless=("run.train_on_recorded",),
    )
    repetition_penalty: float = option(
        0.0,
        "Subtracted from the score of a rollout that rollout.stop_repetition_tokens stopped.",
        ge=0,
        only_if=("rollout.stop_repetition_tokens",),
    )
    min_valid: int = option(2, "A group with fewer valid rewards is dropped (too_few_rewards).", ge=1)

    @property
    def num_processes(self) -> int:
        """`num_workers`, or the default for this machine."""
        return self.processes_of(cores())

    def processes_of(self, num_cores: int) -> int:
        """The same for a machine of so many cores."""
        return self.num_workers or min(4, max(1, num_cores - 1))

    def allowed_s(self, num_rollouts: int) -> float:
        """The longest that scoring so many rollouts may take by these limits, if the function loads at once."""
        return (1 + self.retries) * (self.startup_timeout_s + num_rollouts * self.timeout_s)


def _all_sources_have_one(config: Any) -> bool:
    return bool(config.tasks.sources) and all(source.reward for source in config.tasks.sources)


def _wrong_row(config: Any) -> str:
    """What is wrong with the rows of rewards.functions; "" if nothing."""
    rows = config.rewards.functions
    for i, row in enumerate(rows):
        key = f"rewards.functions.{i}"
        if not row.function:
            return f"{key}.function is missing: name a built-in reward, module:function or path.py:function"
        if row.name == "score":
            return f'{key}.name = "{row.name}": that is the name of something else. Give another'
    twice = [name for name, num in Counter(row.name for row in rows if row.name).items() if num > 1]
    if twice:
        return f'rewards.functions: {Counter(row.name for row in rows)[twice[0]]} have the name "{twice[0]}"'
    return ""


RULES: tuple[Rule, ...] = (
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
    Refused(("rewards.functions",), lambda c: bool(_wrong_row(c)), _wrong_row),
    Refused(
        ("rewards.by_data_source",),
        lambda c: not all(isinstance(spec, str) for spec in c.rewards.by_data_source.values()),
        lambda c: (
            f"rewards.by_data_source = {c.rewards.by_data_source}: every value must be a reward by name, for instance"
            ' { "openai/gsm8k" = "gsm8k" }'
        ),
    ),
    *memory_rules("rewards.memory_gb"),
)
