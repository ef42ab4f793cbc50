"""What the engine is asked for a held rollout: its tokens, what is left of its budget, its own randomness. And what
follows a turn of the policy: whether its environment is asked, and what of that one's answer is appended. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from rollover.config.rollout import RolloutConfig
from rollover.engine.protocol import ExtendRequest, StopCriteria
from rollover.envs.protocol import AS_CONFIGURED, TurnOptions, written
from rollover.rollout.slots import token_budget
from rollover.types import Rollout, SamplingParams, Segment, StopReason, rollout_seed

_GREEDY = SamplingParams(temperature=0.0)


class Requests:
    """Makes the requests of one run.

    `stop_token_ids` (EOS) add to those of the config. `may_go_on`: see ExtendRequest.
    """

    def __init__(
        self, config: RolloutConfig, run_seed: int, stop_token_ids: Iterable[int] = (), *, may_go_on: bool = False
    ) -> None:
        self.config, self.run_seed, self.may_go_on = config, run_seed, may_go_on
        self._sampling = config.sampling
        self._processing = config.logits.processing()
        self._stop_token_ids = frozenset(stop_token_ids)

    def sampling_of(self, rollout: Rollout) -> SamplingParams:
        return _GREEDY if rollout.greedy else self._sampling

    def to_go_on(self, rollout: Rollout, turn: TurnOptions = AS_CONFIGURED) -> ExtendRequest:
        """First tokens or further ones, as its present `turn` asks. All text of that turn counts for stop strings,
        interrupted or not."""
        most = self.config.max_new_tokens if turn.most_tokens is None else turn.most_tokens
        episode = rollout.sibling if turn.seed_key is None else f"{rollout.sibling}/{turn.seed_key}"
        return ExtendRequest(
            rollout_id=rollout.rollout_id,
            prompt=rollout.prompt,
            generated_ids=tuple(rollout.token_ids()),
            max_new_tokens=most - rollout.num_tokens,
            seed=rollout_seed(self.run_seed, rollout.task.task_id, rollout.task.attempt, episode),
            sampling=self.sampling_of(rollout),
            stop=StopCriteria.of(self.config, self._stop_token_ids, turn.stop),
            pause_after=token_budget(rollout, self.config),
            text_start=_turn_start(rollout),
            may_go_on=self.may_go_on,
            processing=self._processing,
            later_media=rollout.later_media,
        )

    def nothing_for(self, rollout: Rollout) -> list[Segment]:
        """An answer without a token, as of an interruption: the rollout goes on from what it has."""
        return [Segment.nothing(self.sampling_of(rollout), rollout.num_tokens)]

    def no_turn(self, rollout: Rollout) -> Segment:
        """What ends a rollout that its Episode never asked anything of."""
        nothing = Segment.nothing(self.sampling_of(rollout), rollout.num_tokens)
        return replace(nothing, stop_reason=StopReason.ENV_DONE, trainable=False)


def _turn_start(rollout: Rollout) -> int:
    """Where the present turn begins: after the last token that an environment wrote."""
    start = end = 0
    for segment in rollout.segments:
        end += len(segment)
        if not segment.trainable:
            start = end
    return start


def is_asked(rollout: Rollout, segments: Sequence[Segment], max_new_tokens: int) -> bool:
    """Whether an environment is asked when `segments`, of an extension, come next.

    An interrupted generation has no turn of the environment after it, nor one that used up the rollout's budget, nor a
    rollout without a token.
    """
    num_tokens = rollout.num_tokens + sum(map(len, segments))
    return segments[-1].stop_reason is not StopReason.PAUSED and 0 < num_tokens < max_new_tokens


def to_append(rollout: Rollout, answer: Segment | None, max_new_tokens: int) -> list[Segment]:
    """What is appended to a rollout whose environment gave `answer`; nothing where it is done."""
    if answer is None:
        return []
    if len(answer) + (answer.stop_reason is StopReason.PAUSED) > max_new_tokens - rollout.num_tokens:
        return [ending(rollout, StopReason.LENGTH)]  # it does not fit, or leaves the policy no token
    return [answer]


def ending(rollout: Rollout, reason: StopReason) -> Segment:
    """An answer without a token, after which the rollout is done for that reason."""
    return replace(written(rollout, ()), stop_reason=reason)
