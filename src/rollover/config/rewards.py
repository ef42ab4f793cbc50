"""[rewards], and the rules about it."""

from typing import Any

from rollover.config.table import Inert, Rule, Table, memory_rules, option
from rollover.system import cores


class RewardsConfig(Table):
    """[rewards]: how rollouts are scored."""

    function: str = option(
        "",
        "Reward of all sources that name none: module:function or path.py:function in TRL's signature"
        " f(prompts, completions, **columns) or verl's compute_score(data_source, solution_str, ground_truth,"
        " extra_info).",
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


RULES: tuple[Rule, ...] = (
    Inert(("rewards.function",), ("tasks.sources",), _all_sources_have_one, "as every source sets its own reward"),
    *memory_rules("rewards.memory_gb"),
)
