"""What the engine is asked for a held rollout: its tokens, what is left of its budget, its own randomness. And what
follows a turn of the policy: whether its environment is asked, and what of that one's answer is appended. Pure.
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
from rollover.engine.protocol import Engine, EngineDied, ExtendRequest, ImageRefused, StopCriteria, WrongAnswer
from rollover.engine.validate import are_segments, why_no_continuation
from rollover.envs.protocol import AS_CONFIGURED, TurnOptions
from rollover.rollout.failure_limit import FailureLimit
from rollover.rollout.scheduler_state import token_budget
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


logger = logging.getLogger(__name__)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 1.0  # after an answer with nothing
_LONGEST_ANSWER_S = 600.0  # limit on `progress` and `queued` where watchdog.rollout_timeout_s is 0
_LONGEST_RETRY_S = 30.0  # after a failure; the first pause is watchdog.retry_s


class ExtendFailed(ValueError):
    """The engine failed at a rollout too often in a row, and is not asked for this rollout again."""


class Asker:
    """What the driver, or an evaluation, asks of `engine`.

    It logs the first failure after an answer, and every rollout that gets nothing for long.
    `failure_limit` ends the run where the engine fails at everything.
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
        self._silent: set[str] = set()  # names of the questions that had no answer the last time
        self._counts = dict.fromkeys(("engine/empty_answers", "engine/failed_extends", "watchdog/refused_answers"), 0)

    async def extend(self, request: ExtendRequest) -> list[Segment]:
        """At least one token, or a stop; nothing only where the rollout was interrupted.

        ExtendFailed after watchdog.max_failures failures in a row, whether or not interruptions came between them.
        Errors of our own (AssertionError), the end of the engine (EngineDied) and the failure limit's error are raised
        at once.
        """
        rollout_id, num_empty = request.rollout_id, 0
        interrupted = self._interrupted[rollout_id] = asyncio.Event()
        try:
            while True:
                why, segments = await self._ask(request)
                if why is not None:
                    pause_s = self._on_failure(rollout_id, why)
                elif _says_something(segments) or interrupted.is_set():
                    return segments
                else:
                    num_empty += 1
                    pause_s = self._on_nothing(rollout_id, num_empty)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(interrupted.wait(), pause_s)
                    return request.nothing()
        finally:
            del self._interrupted[rollout_id]

    def interrupt(self, rollout_ids: Iterable[str] | None = None) -> None:
        """Interrupt these rollouts (None: all of them)."""
        asked = self._interrupted.keys() if rollout_ids is None else set(rollout_ids := list(rollout_ids))
        for rollout_id in asked & self._interrupted.keys():
            self._interrupted[rollout_id].set()
        self._engine.interrupt(rollout_ids)

    def release(self, rollout_ids: Iterable[str]) -> None:
        """These rollouts have left the system."""
        rollout_ids = list(rollout_ids)
        for rollout_id in rollout_ids:
            self._failures.pop(rollout_id, None)
        self._engine.release(rollout_ids)

    async def progress(self, rollout_ids: Collection[str]) -> dict[str, list[Segment]]:
        """What those of these rollouts that run have so far. None where the engine fails or does not answer in time."""
        found = await self._answer_to("progress", self._engine.progress, rollout_ids, Mapping) or {}
        return {i: list(segments) for i in rollout_ids if are_segments(segments := found.get(i))}

    async def queued(self, rollout_ids: Collection[str]) -> set[str]:
        """Those of these rollouts that wait in the engine. None where it fails or does not answer in time."""
        return set(await self._answer_to("queued", self._engine.queued, rollout_ids, Collection) or ())

    def stats(self) -> dict[str, float]:
        """Cumulative counters."""
        return {name: float(num) for name, num in self._counts.items()}

    async def _answer_to(
        self, name: str, question: Callable[[Collection[str]], Awaitable[Any]], of: Collection[str], kind: type
    ) -> Any:
        """The engine's answer to a question about these rollouts, if it is a `kind`; else None, and the run goes on.

        The first time without an answer is said. The limit is twice watchdog.rollout_timeout_s: an engine that keeps to
        that limit itself, as the one in a process of its own does, has time to act before.
        """
        limit_s = 2 * self._config.rollout_timeout_s or _LONGEST_ANSWER_S
        try:
            async with asyncio.timeout(limit_s):
                answer = await question(of)
            if isinstance(answer, kind):
                self._silent.discard(name)
                return answer
            why = f"it says {answer!r:.100}"
        except (AssertionError, EngineDied):
            raise
        except TimeoutError as error:
            why = str(error) or f"no answer within {limit_s:.3g} s"
        except Exception as error:  # boundary: whoever asks can do without
            why = f"{type(error).__name__}: {error}"
        if name not in self._silent:
            self._silent.add(name)
            logger.warning(f"the engine fails at {name} ({why}): until it answers, nothing is known of what runs")
        return None

    async def _ask(self, request: ExtendRequest) -> tuple[str | None, list[Segment]]:
        """Ask the engine once. Returns why it failed, None if it did not, and the segments of its answer."""
        oldest_version = self._engine.oldest_version
        try:
            segments = await self._engine.extend(request)
        except (AssertionError, EngineDied, ImageRefused):
            raise
        except WrongAnswer as error:
            self._counts["watchdog/refused_answers"] += 1
            return str(error), []
        except Exception as error:  # boundary: it fails its rollout, not the run
            self._counts["engine/failed_extends"] += 1
            return f"{type(error).__name__}: {error}", []
        why = why_no_continuation(segments, len(request.generated_ids), request.max_new_tokens, oldest_version)
        if why is not None:
            self._counts["watchdog/refused_answers"] += 1
            return f"its answer is refused, as {why}", []
        if _says_something(segments):
            self._failing = False
            self._failures.pop(request.rollout_id, None)
            if self._failure_limit is not None:
                self._failure_limit.on_answer()
        return None, segments

    def _on_failure(self, rollout_id: str, why: str) -> float:
        """Seconds until it is asked again."""
        if self._failure_limit is not None:
            self._failure_limit.on_failure(why)
        self._failures[rollout_id] += 1
        num = self._failures[rollout_id]
        if num >= self._config.max_failures:
            raise ExtendFailed(f"the engine failed {num} times in a row at rollout {rollout_id} ({why})")
        pause_s = back_off_s(num, self._config.retry_s, _LONGEST_RETRY_S)
        if not self._failing:
            logger.warning(f"the engine failed at rollout {rollout_id} ({why}): it is asked again in {pause_s:.3g} s")
        self._failing = True
        return pause_s

    def _on_nothing(self, rollout_id: str, num: int) -> float:
        """Seconds until it is asked again."""
        self._counts["engine/empty_answers"] += 1
        pause_s = back_off_s(num, _FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        if pause_s == _LONGEST_PAUSE_S > back_off_s(num - 1, _FIRST_PAUSE_S, _LONGEST_PAUSE_S):
            logger.warning(
                f"the engine answers without a token for rollout {rollout_id}, though nobody interrupted it: it"
                f" is asked again every {_LONGEST_PAUSE_S:g} s"
            )
        return pause_s


def _says_something(segments: list[Segment]) -> bool:
    """Whether the answer has a token or a stop."""
    return any(map(len, segments)) or segments[-1].stop_reason is not StopReason.PAUSED
