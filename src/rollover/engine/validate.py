"""Validation of what an engine, or a service behind one, returns; and CustomEngine, which wraps a user's engine.

    a service's tokens ──valid_logprobs──▶ engine ──CustomEngine──▶ RetryingEngine ──continuation_error──▶ rollout

Owns the error messages. Segment.why_not_sampled checks the log-probs alone.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeGuard

from rollover.engine.protocol import Engine, EngineDied, ExtendRequest, InvalidAnswer, WeightLoad
from rollover.functions import CustomObject, FunctionError, described, explained, is_number, shortened, was_cancelled
from rollover.logs import terminal
from rollover.openai_wire import NO_LOGPROB
from rollover.types import Segment, StopReason, why_not_in_vocabulary

if TYPE_CHECKING:
    import torch


_MOST_ROUNDING = 1e-3  # services compute log-probs by log_softmax in float32, which rounds by less


def valid_logprobs(
    token_ids: Sequence[int], logprobs: Sequence[float], vocab_size: int | None
) -> tuple[list[float], str]:
    """Return the log-probs of the tokens before the first invalid one, and the error of that token ("" without one).

    Rounding above 0 is clipped. A logit or a probability above 0 is an error: clipped to 0 it would become an
    importance weight of 1 / probability.
    """
    found: list[float] = []
    for token, value in zip(token_ids, logprobs, strict=True):
        if not NO_LOGPROB < value <= _MOST_ROUNDING:  # NaN, too
            return found, f"gave token {token} the invalid log-prob {value:g} (they are finite, and at most 0)"
        if vocab_size is not None and token >= vocab_size:
            return found, f"gave token {token}, and the model has {vocab_size}"
        found.append(min(0.0, value))
    return found, ""


def are_segments(answer: object) -> TypeGuard[Sequence[Segment]]:
    return isinstance(answer, list | tuple) and all(isinstance(segment, Segment) for segment in answer)


def segments_error(answer: object, vocab_size: Callable[[], int], newest_version: float) -> str | None:
    """Return why no policy of a run with versions <= `newest_version` can have sampled this answer; None if it is
    valid.

    `vocab_size()`: every token id is below it.
    """
    if not are_segments(answer):
        return f"it is {described(answer)}, not a list of Segment"
    return next(filter(None, (_why_none(segment, vocab_size, newest_version) for segment in answer)), None)


def _why_none(segment: Segment, vocab_size: Callable[[], int], newest_version: float) -> str | None:
    ids, version, start = segment.token_ids, segment.policy_version, segment.start
    if ids.dtype.kind not in "iu":
        return f"its token ids are {ids.dtype}, not integers"
    if segment.logprobs.dtype.kind != "f":
        return f"its log-probs are {segment.logprobs.dtype}, not floating-point numbers"
    if not isinstance(segment.stop_reason, StopReason):
        return f"its stop_reason is {described(segment.stop_reason)}, not a StopReason"
    # The journal writes these as JSON, which has no NumPy integers.
    if not isinstance(version, int):
        return f"its policy_version is {shortened(version)}, not an int"
    if not isinstance(start, int | None):
        return f"its start is {shortened(start)}, not an int"
    if len(segment) and version > newest_version:
        return f"it has tokens of policy version {version}, and the newest weights that it got are of {newest_version}"
    return why_not_in_vocabulary(ids, vocab_size()) if len(segment) else None


def continuation_error(
    segments: Sequence[Segment], num_tokens: int, remaining: int, oldest_version: int = 0
) -> str | None:
    """Return why `segments` cannot continue a rollout of `num_tokens` with `remaining` budget; None if they can.

    They must begin where the rollout ends (if the engine stamps `start`), so that no token is doubled or missing, and
    stay within the budget. Their versions must not fall, nor be below `oldest_version`, on which the staleness bound
    rests. All but the last end with PAUSED. Every log-prob must be valid (Segment.why_not_sampled).
    """
    if not segments:
        return "it has no segment"
    next_token, num_new = num_tokens, 0
    for segment in segments:
        if segment.start not in (None, next_token):
            return f"it begins with token {segment.start}, and token {next_token} comes next"
        num_new += segment.num_tokens
        next_token += segment.num_tokens
    if num_new > remaining:
        return f"it has {num_new} tokens, and the rollout may get {remaining}"
    reasons = [segment.stop_reason for segment in segments]
    if any(reason is not StopReason.PAUSED for reason in reasons[:-1]):
        return "it continues after the rollout has stopped"
    if reasons[-1] is StopReason.PAUSED and num_new == remaining:
        return "it is paused, with nothing left to generate"
    versions = [segment.policy_version for segment in segments if segment.num_tokens]
    if versions != sorted(versions):
        return f"its policy versions go back: {versions}"
    if versions and versions[0] < oldest_version:
        return f"it has tokens of policy version {versions[0]}, below the engine's oldest_version = {oldest_version}"
    return next(filter(None, (segment.why_not_sampled() for segment in segments)), None)


def resumable_segments(segments: Sequence[Segment], num_tokens: int, remaining: int) -> list[Segment]:
    """Return the segments of an unfinished `extend` if its rollout can continue from them, else [].

    The rollout has `num_tokens` tokens and may get `remaining` more.
    """
    found = [s for s in segments if len(s)]
    paused = all(s.stop_reason is StopReason.PAUSED for s in found)
    return found if found and paused and continuation_error(found, num_tokens, remaining) is None else []


# Contract of each method, to complete "it must ...".
_MUST = {
    "max_tokens": "be a property with the tokens of the longest rollout, an integer",
    "oldest_version": "be a property with a policy version that was loaded, an integer",
    "interrupt": "stop the rollouts that it is given, and may raise nothing",
    "progress": "return a dict: rollout id -> list of Segment",
    "queued": "return a set of rollout ids",
    "release": "forget the rollouts that it is given, and may raise nothing",
    "load_weights": "take the weights, and return a WeightLoad",
    "use_threads": "take a number of threads, and may raise nothing",
    "stats": "return a dict of numbers by name",
    "close": "end what runs, and may raise nothing",
}


class CustomEngine(CustomObject):
    """A user's `engine`, made by the function `spec` of engine.kind, with validated answers.

    `vocab_size()`: every token id is below it; called at the first answer, as it may load a model. `newest_version`:
    the newest policy version that the engine can have so far; infinite without a trainer, when versions are the
    engine's own. Further attributes of the engine can be read from here.

    `extend` raises the engine's errors, and InvalidAnswer for tokens that no policy of this run can have sampled: both
    fail one rollout. Other methods raise FunctionError, which names the method and its contract. All of them pass on
    EngineDied and AssertionError, which end the run.
    """

    _must, _file, _passed_on = _MUST, "engine/protocol.py", (AssertionError, EngineDied)

    def __init__(self, engine: Engine, spec: str, vocab_size: Callable[[], int], newest_version: float = 0) -> None:
        super().__init__(engine, "engine.kind", spec)
        self.engine = engine
        self._vocab_size, self._newest_version = vocab_size, newest_version
        self._handled_before = sys.exc_info()[1]  # if created within an `except`

    @property
    def max_tokens(self) -> int:
        return self._integer("max_tokens")

    @property
    def oldest_version(self) -> int:
        version = self._integer("oldest_version")
        if version > (newest := self._newest_version):
            raise self._failed("oldest_version", f"gave {version}, and the newest that it got is {newest}")
        return version

    async def extend(self, request: ExtendRequest) -> list[Segment]:
        try:
            answer = await self.engine.extend(request)
        except (SystemExit, asyncio.CancelledError) as error:  # boundary: it fails its rollout, as an error does
            if was_cancelled(error):
                raise
            raise RuntimeError(explained(error)) from error
        self._check("extend", answer)
        if not answer:
            raise InvalidAnswer(
                f"engine.kind = {self.spec!r}: the answer of its extend is refused, as it has no segment"
            )
        return answer

    def interrupt(self, rollout_ids: Iterable[str] | None = None) -> None:
        with self._calling("interrupt"):
            self.engine.interrupt(rollout_ids)

    async def progress(self, rollout_ids: Iterable[str]) -> dict[str, list[Segment]]:
        """Return the valid entries. Raises InvalidAnswer if there are only invalid ones."""
        with self._calling("progress"):
            found = await self.engine.progress(rollout_ids)
        if not isinstance(found, Mapping):
            raise self._failed("progress", f"gave {described(found)}")
        believed, refused = {}, None
        for rollout_id, segments in found.items():
            try:
                self._check("progress", segments)
            except InvalidAnswer as error:
                refused = error
            else:
                believed[rollout_id] = segments
        if refused is not None and not believed:
            raise refused
        return believed

    async def queued(self, rollout_ids: Iterable[str]) -> set[str]:
        with self._calling("queued"):
            found = await self.engine.queued(rollout_ids)
        if not isinstance(found, set | frozenset | list | tuple) or not all(isinstance(i, str) for i in found):
            raise self._failed("queued", f"gave {described(found)}")
        return set(found)

    def release(self, rollout_ids: Iterable[str]) -> None:
        with self._calling("release"):
            self.engine.release(rollout_ids)

    async def load_weights(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> WeightLoad:
        # Set first: while it loads, some of its tokens may already be of this version.
        self._newest_version = max(self._newest_version, version)
        failures: list[Exception] = []

        def source() -> Iterator[tuple[str, torch.Tensor]]:
            try:
                yield from tensors
            except Exception as error:
                failures.append(error)
                raise

        try:
            with self._calling("load_weights"):
                load = await self.engine.load_weights(version, source())
        except FunctionError:
            if failures:  # reading the weights failed: not the engine's fault
                raise failures[0] from None
            raise
        if not is_number(getattr(load, "num_bytes", None)):
            raise self._failed("load_weights", f"gave {described(load)}")
        return load

    def use_threads(self, num: int) -> None:
        with self._calling("use_threads"):
            self.engine.use_threads(num)

    def stats(self) -> dict[str, float]:
        with self._calling("stats"):
            found = self.engine.stats()
        if not isinstance(found, Mapping) or not all(isinstance(name, str) for name in found):
            raise self._failed("stats", f"gave {described(found)}")
        return dict(found)

    async def close(self) -> None:
        """Close the engine. If the run already ends with an error, errors of this call are printed, not raised."""
        ends_with = sys.exc_info()[1]
        if ends_with is self._handled_before:
            ends_with = None
        try:
            with self._calling("close"):
                await self.engine.close()
        except (FunctionError, AssertionError, EngineDied) as error:
            if ends_with is None:
                raise
            if not isinstance(error, FunctionError):
                error = self._failed("close", f"failed: {explained(error)}")
            terminal.warning(str(error))

    # Private

    def _check(self, method: str, answer: object) -> None:
        """Raise InvalidAnswer unless these are valid segments of this run."""
        if (why := segments_error(answer, self._vocab_size, self._newest_version)) is not None:
            raise InvalidAnswer(f"engine.kind = {self.spec!r}: the answer of its {method} is refused, as {why}")
