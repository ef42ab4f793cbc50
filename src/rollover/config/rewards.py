from pydantic import Field

from rollover.config.base import Table


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
    repetition_penalty: float = Field(
        default=0.0,
        ge=0,
        description="Subtracted from the score of a rollout that rollout.stop_repetition_tokens stopped.",
    )
    min_valid: int = Field(
        default=2, ge=1, description="A group with fewer valid rewards is dropped (too_few_rewards)."
    )

    def allowed_s(self, num_rollouts: int) -> float:
        """The longest that scoring so many rollouts may take by these limits, if the function loads at once."""
        return self.startup_timeout_s + num_rollouts * self.timeout_s
