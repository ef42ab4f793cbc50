"""What environments are made from."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollover.config import Config
from rollover.types import Reward, Rollout, Task

if TYPE_CHECKING:
    from rollover.models.processor import Processor

Scorer = Callable[[list[Rollout]], Awaitable[list[Reward]]]


@dataclass(frozen=True)
class EnvironmentSetup:
    """What an environment is made from."""

    config: Config
    tokenizer: Any
    """Of the model that is trained."""
    score: Scorer
    """Asks the reward function of the rollouts' task, with the text of all their tokens: see Environment.score."""
    scores_singly: Callable[[Task], bool]
    """See Environment.scores_singly."""
    vocab_size: int
    """Every token id of the model is below it."""
    processor: Processor | None = None
    """Of a vision-language model, for `Chat`; None: the model takes text alone."""
