"""Scoring of a run's rollouts: score requests made of rollouts, and warnings about failing or constant rewards."""

from __future__ import annotations

import logging
import re
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from itertools import groupby
from typing import Any, Generic, TypeVar

from rollover.config import Config
from rollover.envs.chat import answer_decoder
from rollover.rewards.answers import answer_of, extract_answer, reference_answer
from rollover.rewards.built_in import display_name, parse_spec
from rollover.rewards.pool import RewardPool
from rollover.rewards.protocol import Rewarder, ScoreRequest, ScoringPool
from rollover.rewards.registry import TrainerState
from rollover.types import Reward, Rollout, Task


def make_scorer(
    rewarder: Rewarder, tokenizer: Any, config: Config
) -> Callable[[list[Rollout]], Awaitable[list[Reward]]]:
    """Return the driver's scorer, which decodes the completions of a group's rollouts and scores them by `rewarder`."""

    decode = answer_decoder(tokenizer, config.rollout.keep_special_tokens)

    async def score(rollouts: list[Rollout]) -> list[Reward]:
        requests = [
            ScoreRequest(
                r.task,
                decode(ids),
                tuple(ids),
                _num_turns(r),
                trainer_state(config, r.task, max(r.versions, default=0)),
            )
            for r in rollouts
            for ids in [r.token_ids()]
        ]
        return await rewarder.score(requests)

    return score


def trainer_state(config: Config, task: Task, version: int) -> TrainerState:
    """Return the `trainer_state` of an answer to `task` whose newest token was sampled under policy `version`."""
    updates = config.train.updates_per_step
    max_steps = config.train.num_steps * updates
    return TrainerState(version * updates, max_steps, float(task.attempt), config.tasks.epochs or sys.maxsize)


def _num_turns(rollout: Rollout) -> int:
    """Count the prompt as one turn, and the segments of an interrupted turn once."""
    return 1 + sum(1 for _ in groupby(segment.trainable for segment in rollout.segments))


logger = logging.getLogger(__name__)

_MAX_CHARS = 160

Scorer = TypeVar("Scorer", bound=Rewarder)


class RewardObserver(Generic[Scorer]):
    """A Rewarder that passes requests to `rewarder`, for training and evaluation. For each reward function it logs the
    first failure, and if the first `num_equal` scores (0: never) are all equal."""

    def __init__(self, rewarder: Scorer, num_equal: int = 0) -> None:
        self.rewarder, self.num_equal = rewarder, num_equal
        self._failed: set[str] = set()  # reward specs with a logged failure
        self._num_scored = self._num_missing = 0
        self._errors: Counter[str] = Counter()  # by error text with its numbers replaced by 0
        self._examples: dict[str, str] = {}
        self._equal: dict[str, tuple[float, int]] = {}  # function -> first score, and how many equal it (-1: not all)

    async def score(self, requests: list[ScoreRequest]) -> list[Reward]:
        rewards = await self.rewarder.score(requests)
        for request, reward in zip(requests, rewards, strict=True):
            if reward.score is None:
                self._on_missing(request.task, reward.error or "no reason given")
            else:
                self._on_score(request, reward.score)
        return rewards

    async def close(self) -> None:
        await self.rewarder.close()

    def commonest_error(self) -> str:
        """Return `31 of 400 rewards failed; most often (28 times): KeyError: 'x' (mine.py:7)`; "" if none did."""
        if not self._errors:
            return ""
        (key, num), *others = self._errors.most_common()
        often = f"most often ({num} times): " if others else ""
        text = self._examples[key]
        return f"{self._num_missing} of {self._num_scored + self._num_missing} rewards failed; {often}{text}"

    def _on_missing(self, task: Task, error: str) -> None:
        self._num_missing += 1
        key = re.sub(r"\d+", "0", error)
        self._errors[key] += 1
        self._examples.setdefault(key, error)
        if task.reward not in self._failed:
            self._failed.add(task.reward)
            logger.warning(
                f"reward {display_name(task.reward)} failed for task {task.task_id}: {error}."
                " Its reward is missing; later failures are counted (rewards/*)"
            )

    def _on_score(self, request: ScoreRequest, score: float) -> None:
        self._num_scored += 1
        task = request.task
        first, num = self._equal.get(task.reward, (score, 0))
        if num < 0:
            return
        self._equal[task.reward] = first, num + 1 if score == first else -1
        if num + 1 == self.num_equal and score == first:
            logger.warning(
                f"every reward of {display_name(task.reward)} so far is {score:g} ({num + 1} of them), from which"
                f" nothing can be learned. For example task {task.task_id}: the answer {_shown(request.completion)}"
                f" scored {score:g}. The function {_inputs(task, request.completion)}"
            )


def _inputs(task: Task, completion: str) -> str:
    """Describe the inputs of the reward function."""
    found = parse_spec(task.reward)
    if found is not None and "rule" in found[1]:
        rule = found[1]["rule"]
        answer, expected = extract_answer(completion, rule), answer_of(task.columns)
        read = "no answer" if answer is None else f"the answer {_shown(answer)}"
        expected = "none" if expected is None else _shown(reference_answer(expected))
        return f"read {read} by tasks.answer_rule = {rule!r}; expected is {expected}"
    columns = ", ".join(f"{key} = {_shown(value)}" for key, value in task.columns.items()) or "no further columns"
    if isinstance(task.reward_prompt, str):
        forms = "prompts and completions as strings"
    else:
        forms = 'prompts and completions as lists of messages (the text is completion[-1]["content"])'
    return f"was given {forms} (solution_str: the text alone), and {columns}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_CHARS else text[: _MAX_CHARS - 3] + "..."


def build_rewarder(config: Config, *, training: bool, pool: ScoringPool | None = None) -> RewardObserver[ScoringPool]:
    """Build the rewarder of a run: an observer of a pool of worker processes, `.rewarder`. Starts no process.

    `pool`: the workers; None: processes of this machine. `training`: warn if all scores of the first two steps are
    equal, as nothing can be learned from them (except from a teacher, or with shaping, which separates equal scores).
    """
    shaped = config.rewards.overlong_buffer_tokens or any(row.shaping for row in config.rewards.functions)
    warns = training and not config.distill.teacher and not shaped
    per_step = config.rollout.groups_per_step * config.rollout.group_size
    return RewardObserver(pool or RewardPool(config.rewards), num_equal=2 * per_step if warns else 0)
