"""What an engine must do. No torch: fakes and remote engines import this too.

One way to continue: first generation, preemption, weight update and restart are all `extend`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from rollover.config.logits import LogitsProcessing
from rollover.types import Media, Prompt, SamplingParams, Segment

if TYPE_CHECKING:
    import torch

    from rollover.config import RolloutConfig


class EngineDied(RuntimeError):
    """The engine has ended for good: it is of no use to ask it again."""


class ServiceError(RuntimeError):
    """An outside service failed at a request, or refused it."""


class ImageRefused(ValueError):
    """An image of a prompt cannot be shown: to ask again does not help. It ends the run, which names the image."""


class InvalidAnswer(ValueError):
    """What the engine gave for a rollout is nothing that a policy of this run can have sampled."""


@dataclass(frozen=True, slots=True)
class StopCriteria:
    """Criteria that end a turn before its budget is used.

    `token_ids`: any of these tokens, which is then the last. `strings`: any of these in the text of the turn.
    `repetition_tokens`: a pattern repeated over this many of the last tokens (0: never)."""

    token_ids: frozenset[int] = frozenset()
    strings: tuple[str, ...] = ()
    repetition_tokens: int = 0

    @classmethod
    def of(
        cls, rollout: RolloutConfig, token_ids: Iterable[int], strings: Iterable[str] = (), *, training: bool = True
    ) -> StopCriteria:
        """Return the criteria of a configuration, with these tokens (EOS) and strings.

        `training` False leaves out repetition: an answer that is only read may still recover.
        """
        return cls(
            frozenset(token_ids) | frozenset(rollout.stop_token_ids),
            (*rollout.stop, *strings),
            rollout.stop_repetition_tokens if training else 0,
        )


@dataclass(frozen=True, slots=True)
class ExtendRequest:
    """Continue one rollout: `prompt` + `generated_ids` (all segments so far), by token ids. `later_media`: the images
    among the generated ids.

    `max_new_tokens` is the remaining budget (>= 1). `seed` is `types.rollout_seed(...)`; the draw of a token depends on
    `seed` and its absolute index in the generated part only. After `pause_after` new tokens (0: never) the rollout is
    interrupted, its KV kept as for any interruption. It stops as engine/stop.py says: strings and repetition of `stop`
    are looked for in the tokens from index `text_start` of the generated part on. That is 0 for an answer that began
    after the prompt, however often it was interrupted; the first token of the present turn where an environment wrote
    some of what came before.
    `processing` is done to the logits before `sampling`; its answer begins at `text_start`.
    `may_go_on`: after the turn an environment may write something, and the rollout be extended again. An engine that
    can keeps its KV for that until `release`, and prefills only what was appended.
    """

    rollout_id: str
    prompt: Prompt
    generated_ids: tuple[int, ...]
    max_new_tokens: int
    seed: int
    sampling: SamplingParams
    stop: StopCriteria = StopCriteria()
    pause_after: int = 0
    text_start: int = 0
    may_go_on: bool = False
    processing: LogitsProcessing = LogitsProcessing()
    later_media: tuple[Media, ...] = ()

    def __post_init__(self) -> None:
        Prompt.check(self.prompt)

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """Of `stop`: what an engine that hands on its requests can give to others."""
        return self.stop.token_ids

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Of `stop`."""
        return self.stop.strings

    @property
    def media(self) -> tuple[Media, ...]:
        """All images of the rollout."""
        return self.prompt.media + self.later_media

    @property
    def shown(self) -> Prompt:
        """The tokens in which all images lie: the prompt, or all tokens where later ones show an image."""
        return Prompt(self.prompt.ids + self.generated_ids, self.media) if self.later_media else self.prompt

    def nothing(self) -> list[Segment]:
        """The answer to an interruption before any new token."""
        return [Segment.nothing(self.sampling, len(self.generated_ids))]


@dataclass(frozen=True, slots=True)
class WeightLoad:
    """What a weight hand-over cost."""

    num_bytes: int
    seconds: float


class Engine(Protocol):
    """Contract (run tests/contract/ on your own engine).

    `extend` returns one Segment per policy version met on the way, at least one; every Segment but the last ends with
    PAUSED; the last one with PAUSED iff the rollout was interrupted (or got its `pause_after` tokens). The engine
    stamps versions, not the caller, and each segment's `start`: what it continues, so that an answer that belongs to
    another call of the same rollout can be refused. What needs an answer is awaited, so that an engine elsewhere holds
    nothing up; what needs none is not.
    An interrupted rollout that got no new token returns one empty PAUSED segment.
    An `extend` that raises fails its rollout alone: it is asked for again from the tokens that the rollout has
    (docs/watchdog.md). EngineDied, ImageRefused and AssertionError end the run.
    """

    @property
    def max_tokens(self) -> int:
        """The longest rollout, prompt included, that it can generate. It may wait for an engine elsewhere: asked for
        first in a thread of its own."""
        ...

    @property
    def oldest_version(self) -> int:
        """The oldest policy version that a token sampled from now on may have: the staleness bound rests on it.

        It never goes back, but where an older version is handed over: the trainer's backend was lost, and nothing runs.
        With one copy of the weights it is the version that was loaded last; with several engines behind this one some
        may lag, and it is that of the last of them. Each segment is stamped with its own version.
        """
        ...

    async def extend(self, request: ExtendRequest) -> list[Segment]: ...

    def interrupt(self, rollout_ids: Iterable[str] | None = None) -> None:
        """Stop these rollouts (None: all) after the current step; their `extend` returns what there is."""
        ...

    async def progress(self, rollout_ids: Iterable[str]) -> dict[str, list[Segment]]:
        """For each of these rollouts that runs, the segments of its current `extend` so far: for snapshots and the
        watchdog.

        A rollout that is not known to run is left out: what an earlier `extend` gave is never told again.
        """
        ...

    async def queued(self, rollout_ids: Iterable[str]) -> set[str]:
        """Those of these rollouts whose `extend` waits for room or for its prefill: they get no token, but do not stall
        while others do."""
        ...

    def release(self, rollout_ids: Iterable[str]) -> None:
        """These rollouts will not be extended again: forget what is kept for them (KV). Unknown ids are ignored."""
        ...

    async def load_weights(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> WeightLoad:
        """Replace weights (names as in the model's state dict) and stamp what they sample with `version`.

        Returns when the engine has them; what runs goes on meanwhile where the engine can. Should tokens of older
        weights still come after that, `oldest_version` says how old. With LoRA the weights come once, then adapters
        alone, by the names of models/adapters.py.
        """
        ...

    def use_threads(self, num: int) -> None:
        """Use at most `num` CPU threads from now on. An engine that uses none of this machine ignores it."""
        ...

    def stats(self) -> dict[str, float]:
        """Cumulative counters since start: engine/decode_steps, engine/prefill_tokens, engine/reprefill_tokens,
        engine/preemptions, kv/stale_prefix_tokens, kv/kept_tokens, kv/shared_prompt_tokens; gauge kv/bytes.
        Where it can be told: engine/prefill_s, seconds in prefill."""
        ...

    async def close(self) -> None:
        """Interrupt what runs and give everything back."""
        ...


class Sleeper(Protocol):
    """An engine that can leave its GPUs to the trainer (cluster.colocate)."""

    async def sleep(self) -> None:
        """Free the GPUs. Nothing runs; what is asked waits. New weights (`load_weights`) wake the engine, too."""
        ...

    async def wake(self) -> None:
        """Return when the engine generates again, with the newest weights. Nothing where it is awake."""
        ...
