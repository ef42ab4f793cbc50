"""The evaluations of a run: its held-out tasks, the same ones every time, and the rows of eval.jsonl.

Owns the encoded tasks, and that there is one evaluation a policy version. Never decides when there is one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from rollover.config import Config
from rollover.run.evaluate import EvalTasks, encode_tasks, evaluate
from rollover.run.parts import Parts, held_out_tasks
from rollover.run.stop import Stop
from rollover.track.sinks import JsonlSink


class HeldOut:
    """Evaluates with the run's engine; `rows` is its eval.jsonl. `say` prints a line."""

    def __init__(self, config: Config, parts: Parts, stop: Stop, rows: JsonlSink, say: Callable[[str], None]) -> None:
        self.config, self.parts, self.stop, self.rows, self.say = config, parts, stop, rows, say
        self._tasks: EvalTasks | None = None

    @property
    def newest(self) -> dict[str, Any] | None:
        """The evaluation of the present policy version; None if it has none."""
        rows = self.rows.rows()
        return rows[-1] if rows and rows[-1]["step"] == self.parts.trainer.policy_version else None

    async def evaluate(self) -> dict[str, Any] | None:
        """The new row of eval.jsonl; None where a stop cut it off: it waits for no answer and no score.

        ValueError if no task can be evaluated, or every reward fails.
        """
        config, parts = self.config, self.parts
        version, started = parts.trainer.policy_version, time.perf_counter()
        if self._tasks is None:
            tasks = held_out_tasks(config, self.say)
            self._tasks = encode_tasks(tasks, parts.loaded.tokenizer, parts.prompts.max_prompt_tokens)
        result = await self.stop.unless_requested(
            evaluate(
                self._tasks,
                parts.engine,
                parts.observed,
                parts.loaded.tokenizer,
                config,
                parts.stop_token_ids,
                self.say,
            )
        )
        if result is None:
            return None
        seconds = time.perf_counter() - started
        self.rows.write({"step": version, "policy_version": version, "seconds": seconds, **result})
        self.say(f"held-out mean reward after {version} steps: {result['mean']:.3f}")
        return self.newest
