"""What a policy meets: asked after every generation that stopped, whether the rollout goes on, and what it is worth.

    policy's turn ──stopped──▶ next ──Segment──▶ appended: no loss, no log-prob ──▶ the policy's next turn
                                 └───None──▶ done ──▶ score ──▶ rewards

Run tests/contract/environment_contract.py on your own.
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


class WrongTurn(ValueError):
    """What an environment gave after a turn is nothing that it can write there: the run ends with it."""


class BeginAgain(ValueError):
    """What an environment knew of a rollout is lost: it cannot go on, and begins again from its prompt."""


class Environment(Protocol):
    """The task's side of a rollout. Many rollouts are asked for at once, on one event loop.

    Where `next` raises it is asked again, workflow.retries times, then the rollout's reward is missing; where `score`
    does the rewards are. What may fail, like a tool, is better answered with tokens that say so.
    """

    async def next(self, rollout: Rollout) -> Segment | None:
        """What the environment writes after the policy's turn; None: the rollout is done, with its own stop reason.

        `rollout` is a copy with the tokens of that turn, and `stop_reason` says why it ended. The answer is made by
        `written`. It may be asked for again with the same tokens, or with other ones from the same point, as a turn is
        repeated after a kill or a stall. So it must depend on the rollout's tokens alone.
        """
        ...

    def score(self, rollouts: list[Rollout], /) -> Awaitable[list[Reward]]:
        """One reward for each of these rollouts of one group, in order. They are done."""
        ...

    def scores_singly(self, task: Task, /) -> bool:
        """Whether the rollouts of the task are scored one by one, each when it is done; else a group is at once."""
        ...


@dataclass(frozen=True)
class TurnOptions:
    """What one turn of the policy asks for, where it is not as the configuration has it."""

    most_tokens: int | None = None
    """So many tokens at most in the whole rollout."""
    stop: tuple[str, ...] = ()
    """Strings that end it, besides rollout.stop."""
    seed_key: int | None = None
    """Of its draws; None: the sibling's own."""


AS_CONFIGURED = TurnOptions()


Keep = Callable[[int, int, str, Any], None]
"""Told (group id, sibling, name, JSON value) of what is to be known again after a kill: Lifecycle.keep."""


def keeps_nothing(group_id: int, sibling: int, name: str, value: Any) -> None:
    """A `Keep` where nothing is resumed."""


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
        """The task's prompt as token ids; `instead`: of what a teacher reads in the place of its messages or text."""
        if instead is not None:
            task = replace(task, **({"prompt": instead} if task.messages is None else {"messages": tuple(instead)}))
        assert self._encode is not None
        return self._encode(task)

    def options(self, rollout: Rollout) -> TurnOptions:
        """What the rollout's next turn asks for."""
        return AS_CONFIGURED

    def recall(self, group_id: int, sibling: int, kept: Mapping[str, Any]) -> None:
        """Restore what was kept of a held rollout (`Keep`), by name; also by an earlier process."""

    def has_lost(self, rollout: Rollout) -> bool:
        """Whether a held rollout at which nobody is at work can neither go on nor be scored, and has to begin again."""
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
    """What an environment writes after a turn of `rollout`: tokens that no policy sampled, so they are never trained.

    `tokens`: their ids, or a Prompt where they show images, whose offsets count from the first of these tokens
    (`Chat.continuation`). `done`: nothing follows (StopReason.ENV_DONE); otherwise the policy goes on. Without `done`
    there is a token at least.
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


def why_not_written(answer: object, rollout: Rollout, vocab_size: int) -> str | None:
    """Why this cannot be what an environment writes after the turn of `rollout`; None: it can.

    Every token id of the model is below `vocab_size`.
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


def why_no_rewards(answer: object, num: int) -> str | None:
    """Why this cannot be the rewards of `num` rollouts; None: it can."""
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
    """NumPy's numbers, too, which an environment may compute its rewards with."""
    return isinstance(value, Real) and not isinstance(value, bool)


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


@dataclass(frozen=True)
class Observation:
    """What `step(message)` of an environment of one's own returns.

    text: what the policy is told, unless the episode is done: a text, or a list of content parts, where it shows
    images ({"type": "image", "image": a path, bytes or a PIL image}). reward: of this turn; those of an episode are
    added. done: the episode ends here.
    """

    text: str | Sequence[Mapping[str, Any]] = ""
    reward: float = 0.0
    done: bool = False
