"""Environments: they answer the policy's turns, decide when a rollout is done, and score it.

    policy's turn ──stopped──▶ next ──Segment──▶ appended: no loss, no log-prob ──▶ the policy's next turn
                                 └───None──▶ done ──▶ score ──▶ rewards

Run tests/contract/environment_contract.py on a custom environment.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from rollover.config import Config
from rollover.functions import is_score
from rollover.types import Media, Prompt, Reward, Rollout, Segment, StopReason, Task, why_not_in_vocabulary

if TYPE_CHECKING:
    from rollover.models.processor import Processor


class InvalidTurn(ValueError):
    """An environment returned an invalid answer to a turn, which ends the run."""


class StateLost(ValueError):
    """The environment has lost the state of a rollout, which begins again from its prompt."""


class Environment(Protocol):
    """The task's side of a rollout. Its methods run concurrently for many rollouts, on one event loop.

    If `next` raises, it is retried workflow.retries times, then the rollout's reward is missing. If `score` raises, the
    rewards are missing. Report the failure of a tool, say, in the answer's tokens instead.
    """

    async def next(self, rollout: Rollout) -> Segment | None:
        """Return the answer to the policy's turn, made by `written`; None: the rollout is done, with its stop reason.

        `rollout` is a copy that includes that turn; `stop_reason` is the turn's. After a kill or a stall, a turn is
        repeated with the same or other tokens, so the answer must depend on the rollout's tokens only.
        """
        ...

    def score(self, rollouts: list[Rollout], /) -> Awaitable[list[Reward]]:
        """Return one reward for each of these finished rollouts of one group, in order."""
        ...

    def scores_singly(self, task: Task, /) -> bool:
        """Return whether each rollout of the task is scored as soon as it is done; else a group is scored together."""
        ...


@dataclass(frozen=True)
class TurnOptions:
    """Options of one turn of the policy that differ from the configuration."""

    most_tokens: int | None = None
    """Maximum number of tokens of the whole rollout."""
    stop: tuple[str, ...] = ()
    """Stop strings, besides rollout.stop."""
    seed_key: int | None = None
    """Key of the turn's random draws; None: the sibling's."""


AS_CONFIGURED = TurnOptions()


Keep = Callable[[int, int, str, Any], None]
"""(group id, sibling, name, JSON value): stores a value that survives a kill (Lifecycle.keep)."""


def keeps_nothing(group_id: int, sibling: int, name: str, value: Any) -> None:
    """Discard the value: a `Keep` where nothing is resumed."""


class RunEnvironment(Environment):
    """Base of the environments that a run plays: an Environment with further methods. Defaults fit one without state.

    build.py wraps custom environments. `encode`: encodes the prompts of tasks; None: they are not needed."""

    notice: str = ""
    """What the user should know before the run; "": nothing."""
    has_turns: bool = True
    """Whether it may write something after a turn of the policy."""
    agents: Any = None
    """The Episodes (workflows/episodes.py) that agents play; None: no agent plays."""

    def __init__(self, encode: Callable[[Task], Prompt] | None = None) -> None:
        self._encode = encode

    def prompt(self, task: Task, instead: Sequence[Mapping[str, str]] | str | None = None) -> Prompt:
        """Return the task's prompt as token ids. `instead`: messages or text that replace the task's, for a teacher."""
        if instead is not None:
            task = replace(task, **({"prompt": instead} if task.messages is None else {"messages": tuple(instead)}))
        assert self._encode is not None
        return self._encode(task)

    def options(self, rollout: Rollout) -> TurnOptions:
        """Return the options of the rollout's next turn."""
        return AS_CONFIGURED

    def recall(self, group_id: int, sibling: int, kept: Mapping[str, Any]) -> None:
        """Restore what was kept of a held rollout (`Keep`), by name; also by an earlier process."""

    def has_lost(self, rollout: Rollout) -> bool:
        """Whether an idle held rollout can neither continue nor be scored, and has to restart."""
        return False

    def on_restart(self, rollout: Rollout, kept: Mapping[str, Any]) -> None:
        """Prepare for the rollout to start again. `kept`: as for `recall`."""

    def release(self, rollouts: Iterable[Rollout]) -> None:
        """Free what is held for rollouts that left the system."""

    def stats(self) -> dict[str, float]:
        """Its metrics: cumulative counters."""
        return {}

    def for_evaluation(self) -> RunEnvironment:
        """Return the environment for an evaluation that runs beside training."""
        return self

    async def close(self) -> None:
        """End its processes and tasks."""


def written(rollout: Rollout, tokens: Sequence[int] | Prompt, *, done: bool = False) -> Segment:
    """Return the Segment that an environment appends after a turn of `rollout`. Its tokens are never trained.

    `tokens`: their ids, or a Prompt with images, whose offsets count from the first of these tokens
    (`Chat.continuation`). `done`: the rollout ends (StopReason.ENV_DONE); else the policy continues, and there must be
    at least one token.
    """
    last = rollout.segments[-1]
    token_ids, media = (tokens.ids, tokens.media) if isinstance(tokens, Prompt) else (tokens, ())
    return Segment(
        token_ids=np.asarray(token_ids, dtype=np.int32),
        logprobs=np.zeros(len(token_ids), dtype=np.float32),
        policy_version=last.policy_version,
        sampling=last.sampling,
        stop_reason=StopReason.ENV_DONE if done else StopReason.PAUSED,
        trainable=False,
        start=rollout.num_tokens,
        media=tuple(image.moved(len(rollout.prompt) + rollout.num_tokens) for image in media),
    )


def turn_error(answer: object, rollout: Rollout, vocab_size: int) -> str | None:
    """Return what is wrong with an environment's answer to a turn of `rollout`, or None.

    `vocab_size`: exclusive bound of token ids.
    """
    num_tokens = rollout.num_tokens
    if not isinstance(answer, Segment):
        return f"it is a {type(answer).__name__}, and no Segment"
    if answer.trainable:
        return "its tokens are marked as sampled by the policy"
    if answer.token_ids.dtype.kind not in "iu":
        return f"its token ids are {answer.token_ids.dtype}, not integers"
    if answer.start not in (None, num_tokens):
        return f"it begins with token {answer.start}, and token {num_tokens} comes next"
    if answer.stop_reason not in (StopReason.PAUSED, StopReason.ENV_DONE):
        return f"it ends with {answer.stop_reason.value}"
    if answer.stop_reason is StopReason.PAUSED and not len(answer):
        return "it has no token, and is not the end"
    first = len(rollout.prompt) + num_tokens
    for image in answer.media:
        if not (
            isinstance(image, Media) and first <= image.offset <= image.offset + image.count <= first + len(answer)
        ):
            return (
                f"its media have {image!r:.200}, which does not lie within its tokens {first} to {first + len(answer)}"
            )
    return why_not_in_vocabulary(answer.token_ids, vocab_size)


def rewards_error(answer: object, num: int) -> str | None:
    """Return what is wrong with an environment's rewards of `num` rollouts, or None."""
    if not isinstance(answer, list | tuple) or not all(isinstance(reward, Reward) for reward in answer):
        return f"{answer!r:.100} is no list of Reward"
    if len(answer) != num:
        return f"there are {len(answer)} for {num} rollouts"
    for reward in answer:
        if reward.score is not None and not (_is_number(reward.score) and is_score(reward.score)):
            return f"{reward.score!r:.100} is no score: give a number within 1e30"
        if not isinstance(reward.extras, Mapping):
            return f"its extras are {reward.extras!r:.100}, and no mapping"
        for name, value in reward.extras.items():
            if not (isinstance(name, str) and name.isprintable() and name and _is_number(value)):
                return f"its extras have {value!r:.100} for {name!r:.100}"
    return None


def _is_number(value: object) -> bool:
    """Whether it is a number; NumPy's count, booleans do not."""
    return isinstance(value, Real) and not isinstance(value, bool)


Scorer = Callable[[list[Rollout]], Awaitable[list[Reward]]]


@dataclass(frozen=True)
class EnvironmentSetup:
    """Inputs of an environment factory."""

    config: Config
    tokenizer: Any
    """Of the trained model."""
    score: Scorer
    """Scores rollouts with their task's reward function, on the text of all their tokens: see Environment.score."""
    scores_singly: Callable[[Task], bool]
    """See Environment.scores_singly."""
    vocab_size: int
    """Exclusive bound of the model's token ids."""
    processor: Processor | None = None
    """Of a vision-language model, for `Chat`; None: the model takes text only."""


@dataclass(frozen=True)
class Observation:
    """Result of `step(message)` of a game (workflow.environment).

    text: the policy's next message, unless the episode is done: a text, or a list of content parts with images
    ({"type": "image", "image": a path, bytes or a PIL image}). reward: of this turn; an episode's rewards are summed.
    done: the episode ends.
    """

    text: str | Sequence[Mapping[str, Any]] = ""
    reward: float = 0.0
    done: bool = False
