"""Requests to the engine: built from held rollouts, validated, and retried with backoff.

    the engine returns          action
    tokens or a stop            return them; earlier failures are reset
    nothing, uninterrupted      retry, as long as the watchdog lets the rollout wait
    an error or an invalid      retry from the tokens of the rollout; after watchdog.max_failures in a row `extend`
    answer                      raises ExtendFailed, and the rollout's group is dropped

A rollout counts as running during a pause: the watchdog sees that it gets no token, and an interruption ends the pause.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from rollover.back_off import back_off_s
from rollover.config import WatchdogConfig
from rollover.config.rollout import RolloutConfig
from rollover.engine.protocol import Engine, EngineDied, ExtendRequest, ImageRefused, InvalidAnswer, StopCriteria
from rollover.engine.validate import are_segments, continuation_error
from rollover.envs.protocol import AS_CONFIGURED, TurnOptions
from rollover.rollout.failure_limit import FailureLimit
from rollover.types import Rollout, SamplingParams, Segment, StopReason, rollout_seed

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 1.0  # after an empty answer
_QUERY_LIMIT_S = 600.0  # of `progress` and `queued` if watchdog.rollout_timeout_s is 0
_LONGEST_RETRY_S = 30.0  # after a failure; the first pause is watchdog.retry_s
_GREEDY = SamplingParams(temperature=0.0)


class Requests:
    """Builder of a run's requests.

    `stop_token_ids` (EOS) add to those of the config. `may_continue`: see ExtendRequest.
    """

    def __init__(
        self, config: RolloutConfig, run_seed: int, stop_token_ids: Iterable[int] = (), *, may_continue: bool = False
    ) -> None:
        self.config, self.run_seed, self.may_continue = config, run_seed, may_continue
        self._sampling = config.sampling
        self._processing = config.logits.processing()
        self._stop_token_ids = frozenset(stop_token_ids)

    def sampling_for(self, rollout: Rollout) -> SamplingParams:
        return _GREEDY if rollout.greedy else self._sampling

    def continuation(self, rollout: Rollout, turn: TurnOptions = AS_CONFIGURED) -> ExtendRequest:
        """Return the request for the next tokens of a rollout.

        `turn`: options of the present turn. Stop strings are searched in all text of that turn, interrupted or not.
        """
        most = self.config.max_new_tokens if turn.most_tokens is None else turn.most_tokens
        episode = rollout.sibling if turn.seed_key is None else f"{rollout.sibling}/{turn.seed_key}"
        return ExtendRequest(
            rollout_id=rollout.rollout_id,
            prompt=rollout.prompt,
            generated_ids=tuple(rollout.token_ids()),
            max_new_tokens=most - rollout.num_tokens,
            seed=rollout_seed(self.run_seed, rollout.task.task_id, rollout.task.attempt, episode),
            sampling=self.sampling_for(rollout),
            stop=StopCriteria.of(self.config, self._stop_token_ids, turn.stop),
            pause_after=self.config.pause_after(rollout),
            text_start=_turn_start(rollout),
            may_continue=self.may_continue,
            processing=self._processing,
            later_media=rollout.later_media,
        )

    def empty_answer(self, rollout: Rollout) -> list[Segment]:
        """Return an answer without tokens, as after an interruption."""
        return [Segment.nothing(self.sampling_for(rollout), rollout.num_tokens)]

    def end_without_turn(self, rollout: Rollout) -> Segment:
        """Return the segment that ends a rollout whose Episode made no call."""
        nothing = Segment.nothing(self.sampling_for(rollout), rollout.num_tokens)
        return replace(nothing, stop_reason=StopReason.ENV_DONE, trainable=False)


def _turn_start(rollout: Rollout) -> int:
    """Return the index of the first token of the present turn: after the last one that an environment wrote."""
    start = end = 0
    for segment in rollout.segments:
        end += len(segment)
        if not segment.trainable:
            start = end
    return start


class ExtendFailed(ValueError):
    """The engine failed at a rollout too often in a row."""


class RetryingEngine:
    """Validates the answers of `engine`, and retries failed requests with exponential backoff.

    Logs the first failure after an answer, and every rollout that gets only empty answers for long.
    `failure_limit` ends the run if the engine fails at everything.
    """

    def __init__(
        self,
        engine: Engine,
        config: WatchdogConfig,
        failure_limit: FailureLimit | None = None,
    ) -> None:
        self._engine, self._config, self._failure_limit = engine, config, failure_limit
        self._interrupted: dict[str, asyncio.Event] = {}  # by id of each rollout that is being extended
        self._failures: Counter[str] = Counter()  # by rollout id: in a row, without an answer in between
        self._failing = False  # whether there was a failure, and no answer since
        self._unanswered: set[str] = set()  # names of the queries that failed the last time
        self._counts = dict.fromkeys(("engine/empty_answers", "engine/failed_extends", "watchdog/refused_answers"), 0)

    async def extend(self, request: ExtendRequest) -> list[Segment]:
        """Return at least one token or a stop; an empty answer only if the rollout was interrupted.

        Raises ExtendFailed after watchdog.max_failures failures in a row, even with interruptions in between.
        AssertionError, EngineDied, ImageRefused and the failure limit's error are raised at once.
        """
        rollout_id, num_empty = request.rollout_id, 0
        interrupted = self._interrupted[rollout_id] = asyncio.Event()
        try:
            while True:
                why, segments = await self._try_extend(request)
                if why is not None:
                    pause_s = self._on_failure(rollout_id, why)
                elif _has_result(segments) or interrupted.is_set():
                    return segments
                else:
                    num_empty += 1
                    pause_s = self._on_empty_answer(rollout_id, num_empty)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(interrupted.wait(), pause_s)
                    return request.nothing()
        finally:
            del self._interrupted[rollout_id]

    def interrupt(self, rollout_ids: Iterable[str] | None = None) -> None:
        """Interrupt these rollouts (None: all of them)."""
        wanted = self._interrupted.keys() if rollout_ids is None else set(rollout_ids := list(rollout_ids))
        for rollout_id in wanted & self._interrupted.keys():
            self._interrupted[rollout_id].set()
        self._engine.interrupt(rollout_ids)

    def release(self, rollout_ids: Iterable[str]) -> None:
        """Free the resources of rollouts that left."""
        rollout_ids = list(rollout_ids)
        for rollout_id in rollout_ids:
            self._failures.pop(rollout_id, None)
        self._engine.release(rollout_ids)

    async def progress(self, rollout_ids: Collection[str]) -> dict[str, list[Segment]]:
        """Return the segments so far of those of these rollouts that run; {} if the engine fails or is too late."""
        found = await self._query("progress", self._engine.progress, rollout_ids, Mapping) or {}
        return {i: list(segments) for i in rollout_ids if are_segments(segments := found.get(i))}

    async def queued(self, rollout_ids: Collection[str]) -> set[str]:
        """Return those of these rollouts that wait in the engine; none if the engine fails or is too late."""
        return set(await self._query("queued", self._engine.queued, rollout_ids, Collection) or ())

    def stats(self) -> dict[str, float]:
        """Return cumulative counters."""
        return {name: float(num) for name, num in self._counts.items()}

    async def _query(
        self, name: str, method: Callable[[Collection[str]], Awaitable[Any]], ids: Collection[str], kind: type
    ) -> Any:
        """Return the engine's answer about these rollouts if it is a `kind`, else None: the run continues without it.

        Logs the first failure after an answer. The limit is twice watchdog.rollout_timeout_s: an engine that has that
        limit itself (engine/process) can act first.
        """
        limit_s = 2 * self._config.rollout_timeout_s or _QUERY_LIMIT_S
        try:
            async with asyncio.timeout(limit_s):
                answer = await method(ids)
            if isinstance(answer, kind):
                self._unanswered.discard(name)
                return answer
            why = f"it says {answer!r:.100}"
        except (AssertionError, EngineDied):
            raise
        except TimeoutError as error:
            why = str(error) or f"no answer within {limit_s:.3g} s"
        except Exception as error:  # boundary: callers do without the answer
            why = f"{type(error).__name__}: {error}"
        if name not in self._unanswered:
            self._unanswered.add(name)
            logger.warning(
                f"the engine fails at {name} ({why}): until it answers, the progress of running rollouts is unknown"
            )
        return None

    async def _try_extend(self, request: ExtendRequest) -> tuple[str | None, list[Segment]]:
        """Call `extend` once. Returns (error, None if it succeeded; the segments of the answer)."""
        oldest_version = self._engine.oldest_version
        try:
            segments = await self._engine.extend(request)
        except (AssertionError, EngineDied, ImageRefused):
            raise
        except InvalidAnswer as error:
            self._counts["watchdog/refused_answers"] += 1
            return str(error), []
        except Exception as error:  # boundary: it fails its rollout, not the run
            self._counts["engine/failed_extends"] += 1
            return f"{type(error).__name__}: {error}", []
        why = continuation_error(segments, len(request.generated_ids), request.max_new_tokens, oldest_version)
        if why is not None:
            self._counts["watchdog/refused_answers"] += 1
            return f"its answer is refused, as {why}", []
        if _has_result(segments):
            self._failing = False
            self._failures.pop(request.rollout_id, None)
            if self._failure_limit is not None:
                self._failure_limit.on_answer()
        return None, segments

    def _on_failure(self, rollout_id: str, why: str) -> float:
        """Return the seconds until the retry."""
        if self._failure_limit is not None:
            self._failure_limit.on_failure(why)
        self._failures[rollout_id] += 1
        num = self._failures[rollout_id]
        if num >= self._config.max_failures:
            raise ExtendFailed(f"the engine failed {num} times in a row at rollout {rollout_id} ({why})")
        pause_s = back_off_s(num, self._config.retry_s, _LONGEST_RETRY_S)
        if not self._failing:
            logger.warning(f"the engine failed at rollout {rollout_id} ({why}): retry in {pause_s:.3g} s")
        self._failing = True
        return pause_s

    def _on_empty_answer(self, rollout_id: str, num: int) -> float:
        """Return the seconds until the retry."""
        self._counts["engine/empty_answers"] += 1
        pause_s = back_off_s(num, _FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        if pause_s == _LONGEST_PAUSE_S > back_off_s(num - 1, _FIRST_PAUSE_S, _LONGEST_PAUSE_S):
            logger.warning(
                f"the engine returns no token for rollout {rollout_id} without an interruption: retry"
                f" every {_LONGEST_PAUSE_S:g} s"
            )
        return pause_s


def _has_result(segments: list[Segment]) -> bool:
    """Return whether the answer has a token or a stop."""
    return any(map(len, segments)) or segments[-1].stop_reason is not StopReason.PAUSED
