from pydantic import Field

from rollover.config.base import Table
from rollover.system import cores


class RewardsConfig(Table):
    """[rewards]: how rollouts are scored."""

    function: str = Field(
        default="",
        description="Reward of all sources that name none: module:function or path.py:function in TRL's signature"
        " f(prompts, completions, **columns) or verl's compute_score(data_source, solution_str, ground_truth,"
        " extra_info).",
    )
    timeout_s: float = Field(
        default=30.0, gt=0, description="Limit of one call; then the worker is killed and the reward is missing."
    )
    startup_timeout_s: float = Field(default=120.0, gt=0, description="Limit of loading the function in its worker.")
    num_workers: int = Field(
        default=0,
        ge=0,
        description="Processes that score groups at the same time, one group each; 0 = one less than there are cores,"
        " at least 1 and at most 4.",
    )
    streaming: bool = Field(
        default=True,
        description="Score a rollout as soon as it stops, not with its whole group. Only functions of one sample; a"
        " batch function or an async def gets whole groups in any case.",
    )
    memory_gb: float = Field(
        default=0.0,
        ge=0,
        description="Memory of one worker (Linux); a function that asks for more gets a MemoryError, and its reward is"
        " missing. 0 = no limit.",
    )
    retries: int = Field(
        default=0,
        ge=0,
        description="Further tries of a call that ran into its limit or died with its worker. An exception is an"
        " answer: it is not tried again.",
    )
    quarantine_after: int = Field(
        default=3,
        ge=0,
        description="A task whose calls ended so many workers is not scored any more: its rewards are missing."
        " 0 = never.",
    )
    repetition_penalty: float = Field(
        default=0.0,
        ge=0,
        description="Subtracted from the score of a rollout that rollout.stop_repetition_tokens stopped.",
    )
    min_valid: int = Field(
        default=2, ge=1, description="A group with fewer valid rewards is dropped (too_few_rewards)."
    )

    @property
    def num_processes(self) -> int:
        """`num_workers`, or the default for this machine."""
        return self.num_workers or min(4, max(1, cores() - 1))

    def allowed_s(self, num_rollouts: int) -> float:
        """The longest that scoring so many rollouts may take by these limits, if the function loads at once."""
        return (1 + self.retries) * (self.startup_timeout_s + num_rollouts * self.timeout_s)
