"""The Engine contract. No torch: fakes and remote engines import this too.

First generation, preemption, weight update and restart are all `extend`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from rollover.config.logits import LogitsProcessing
from rollover.types import Media, Prompt, SamplingParams, Segment, StopReason

if TYPE_CHECKING:
    import torch

    from rollover.config import RolloutConfig


CHECK_EVERY = 16  # tokens; at indices of the turn, so that interruptions change nothing
MIN_REPEATS = 4
_TOKENS_PER_CHARACTER = 4
_MARGIN = 8


class EngineDied(RuntimeError):
    """The engine has ended for good; retries are useless."""


class ServiceError(RuntimeError):
    """An outside service failed at a request, or refused it."""


class ImageRefused(ValueError):
    """An image of a prompt cannot be used. It ends the run, since retries are useless."""


class InvalidAnswer(ValueError):
    """The engine's answer cannot have been sampled by a policy of this run."""


@dataclass(frozen=True, slots=True)
class StopCriteria:
    """Criteria that end a turn before its budget is used.

    `token_ids`: any of these tokens, which is then the last. `strings`: any of these in the text of the turn.
    `repetition_tokens`: a pattern repeated over this many of the last tokens (0: never).
    """

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
    """Request to continue one rollout: `prompt` + `generated_ids` (all segments so far), by token ids.

    `later_media`: images within the generated ids. `max_new_tokens`: the remaining budget (>= 1). `seed` is
    `types.rollout_seed(...)`; the draw of a token depends only on `seed` and its index in the generated part. After
    `pause_after` new tokens (0: never) the rollout is interrupted, with its KV kept as for any interruption.
    `stop_reason` decides when it stops: strings and repetition of `stop` are searched in the generated part from index
    `text_start`, the first token of the present turn (0 for a single turn, however often it was interrupted).
    `processing` changes the logits before `sampling`; its answer begins at `text_start`.
    `may_continue`: after the turn an environment may append tokens, and the rollout be extended again. Engines should
    keep its KV for that until `release`, and prefill only the appended tokens.
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
    may_continue: bool = False
    processing: LogitsProcessing = LogitsProcessing()
    later_media: tuple[Media, ...] = ()

    def __post_init__(self) -> None:
        Prompt.check(self.prompt)

    @property
    def media(self) -> tuple[Media, ...]:
        """Return all images of the rollout."""
        return self.prompt.media + self.later_media

    @property
    def shown(self) -> Prompt:
        """Return the tokens that contain all images: the prompt, or all tokens if later ones show an image."""
        return Prompt(self.prompt.ids + self.generated_ids, self.media) if self.later_media else self.prompt

    def nothing(self) -> list[Segment]:
        """Return the answer to an interruption before any new token."""
        return [Segment.nothing(self.sampling, len(self.generated_ids))]


@dataclass(frozen=True, slots=True)
class WeightLoad:
    """Size and duration of a weight sync."""

    num_bytes: int
    seconds: float


class Engine(Protocol):
    """Contract (run tests/contract/ on your own engine).

    `extend` returns one Segment per policy version, at least one; every Segment but the last ends with PAUSED; the last
    one with PAUSED iff the rollout was interrupted (or got its `pause_after` tokens). The engine stamps the versions
    and each segment's `start`, so that the answer to another call of the same rollout is detected. Methods that return
    an answer are async, so that a remote engine does not block; the others return at once. An interrupted rollout
    without a new token returns one empty PAUSED segment. An `extend` that raises fails its rollout alone, and is
    retried from the rollout's tokens (docs/watchdog.md). EngineDied, ImageRefused and AssertionError end the run.
    """

    @property
    def max_tokens(self) -> int:
        """Longest rollout in tokens, prompt included. May block on a remote engine: first called in a thread."""
        ...

    @property
    def oldest_version(self) -> int:
        """Oldest policy version of any token sampled from now on: the staleness bound rests on it.

        It falls only if an older version is loaded (the trainer's backend was lost, and nothing runs). With one copy of
        the weights it is the version that was loaded last; with several servers, that of the one that lags most.
        """
        ...

    async def extend(self, request: ExtendRequest) -> list[Segment]: ...

    def interrupt(self, rollout_ids: Iterable[str] | None = None) -> None:
        """Stop these rollouts (None: all) after the current step; their `extend` returns the tokens so far."""
        ...

    async def progress(self, rollout_ids: Iterable[str]) -> dict[str, list[Segment]]:
        """Return the segments so far of the current `extend` of each of these rollouts, for snapshots and the watchdog.

        Rollouts that do not run are left out: segments of an earlier `extend` are never repeated.
        """
        ...

    async def queued(self, rollout_ids: Iterable[str]) -> set[str]:
        """Return the rollouts whose `extend` waits for room or prefill: they do not stall while others run."""
        ...

    def release(self, rollout_ids: Iterable[str]) -> None:
        """Free the KV of rollouts that will not be extended again. Unknown ids are ignored."""
        ...

    async def load_weights(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> WeightLoad:
        """Replace weights (names as in the model's state dict), and stamp their tokens with `version`.

        Returns when the engine has them; rollouts may run meanwhile. If tokens of older weights can still come after
        that, `oldest_version` stays older. With LoRA, full weights come once, then adapters alone, by the names of
        models/adapters.py.
        """
        ...

    def use_threads(self, num: int) -> None:
        """Use at most `num` CPU threads from now on. Engines without local computation ignore it."""
        ...

    def stats(self) -> dict[str, float]:
        """Return cumulative counters since start.

        engine/decode_steps, engine/prefill_tokens, engine/reprefill_tokens, engine/preemptions, kv/stale_prefix_tokens,
        kv/kept_tokens, kv/shared_prompt_tokens; gauge kv/bytes; optional engine/prefill_s, seconds in prefill.
        """
        ...

    async def close(self) -> None:
        """Interrupt running rollouts, and free all resources."""
        ...


class Sleeper(Protocol):
    """An engine that can leave its GPUs to the trainer (cluster.colocate)."""

    async def sleep(self) -> None:
        """Free the GPUs. No rollout runs; requests wait. `load_weights` wakes the engine, too."""
        ...

    async def wake(self) -> None:
        """Return when the engine generates again, with the newest weights. No effect if it is awake."""
        ...


# When a rollout stops: one rule for all engines. Stop strings and repetition are searched in the present turn, over
# earlier and new tokens: "ab" is found if "a" was sampled before an interruption, but never in an environment's text.
# Kimi k1.5 (arXiv 2501.12599, section 2.6.2) stops generations that repeat themselves, as they would run to the limit.


def stop_reason(
    request: ExtendRequest,
    num_new: int,
    last: Callable[[int], Sequence[int]],
    decode_text: Callable[[list[int]], str] | None,
) -> StopReason | None:
    """Return why `request` ends with the last of its `num_new` new tokens (at least one); None: it continues.

    `last(n)`: the last n tokens, `request.generated_ids` included; n is at most the length of the turn.
    `decode_text`: token ids -> text. Raises ValueError for stop strings without it.
    """
    stop = request.stop
    if last(1)[0] in stop.token_ids:
        return StopReason.EOS
    turn_length = len(request.generated_ids) + num_new - request.text_start
    if stop.strings:
        if decode_text is None:
            raise ValueError("stop strings need the engine's decode_text")
        # A character takes at most four tokens, so this tail holds any stop string that just ended.
        longest = max(map(len, stop.strings)) * _TOKENS_PER_CHARACTER + _MARGIN
        text = decode_text(list(last(max(0, min(longest, turn_length)))))
        if any(string in text for string in stop.strings):
            return StopReason.STOP_STRING
    if num_new >= request.max_new_tokens:
        return StopReason.LENGTH
    window = stop.repetition_tokens
    if window and turn_length >= window and turn_length % CHECK_EVERY == 0 and repeats_itself(last(window)):
        return StopReason.REPETITION
    return StopReason.PAUSED if num_new == request.pause_after else None


def before_stop(text: str, stop_strings: Sequence[str]) -> str:
    """Return the text up to the first stop string in it."""
    ends = [end for stop in stop_strings if (end := text.find(stop)) >= 0]
    return text[: min(ends, default=len(text))]


def last_of(request: ExtendRequest, new_tokens: Sequence[int]) -> Callable[[int], Sequence[int]]:
    """Return the `last` argument of `stop_reason` for a request and its new tokens."""

    def last(num: int) -> Sequence[int]:
        new = new_tokens[max(0, len(new_tokens) - num) :]
        before = num - len(new)
        return [*request.generated_ids[len(request.generated_ids) - before :], *new] if before > 0 else new

    return last


def repeats_itself(tokens: Sequence[int]) -> bool:
    """Return whether the tokens are one pattern, repeated at least MIN_REPEATS times."""
    return smallest_period(tokens) * MIN_REPEATS <= len(tokens)


def smallest_period(tokens: Sequence[int]) -> int:
    """Return the smallest p with tokens[i] == tokens[i - p] for all i >= p (Knuth-Morris-Pratt failure function)."""
    borders = [0] * len(tokens)
    length = 0
    for i in range(1, len(tokens)):
        while length and tokens[i] != tokens[length]:
            length = borders[length - 1]
        if tokens[i] == tokens[length]:
            length += 1
        borders[i] = length
    return len(tokens) - borders[-1] if borders else 0
