"""Worker process of workflow.num_processes, which runs the user's plain function (parent's end: workflows/pool.py).

    in   {"op": "load", "spec"}                                out  {"pid"}, or a failure
    in   {"op": "play", "values": {"task", "base_url", ..}}    out  {"answer": null, {"reward"} or {"rewards"}}, or one

Failures are those of rewards/child.py. The load message contains a function object of the parent as a pickle
(rewards/serialization.py). The function runs in the main thread; the parent limits its time by killing the process.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from rollover.functions import CustomFunction, custom_function
from rollover.processes import limit_memory
from rollover.rewards.serialization import unpacked
from rollover.types import Reward, Task
from rollover.workers.child import Calls, clear_alarm, failure_of
from rollover.workflows.protocol import IN_WORKER, KEY, RETURNS, Answer, checked_answer, wanted_by


def main(memory_bytes: str) -> None:
    """Answer calls until the parent ends. `memory_bytes`: 0 is no limit."""
    limit_memory(int(memory_bytes))
    calls = Calls()
    sys.path[:0] = [os.getcwd()]
    loaded: _Loaded | None = None
    for call in calls:
        try:
            if call["op"] == "load":
                loaded = _Loaded(call)
                reply = {"pid": os.getpid()}
            else:
                assert loaded is not None
                reply = {"answer": answer_to_json(loaded.play(call["values"]))}
        except BaseException as error:  # boundary: the user's function, SystemExit and KeyboardInterrupt included
            reply = failure_of(error)
        clear_alarm()
        calls.reply(**reply)


class _Loaded:
    """The function, and the HTTP client that its runs share."""

    def __init__(self, request: dict[str, Any]) -> None:
        spec = request["spec"]
        if "functions" in request:
            self._own = CustomFunction(unpacked(request)[spec], KEY, spec, RETURNS)
        else:
            self._own = custom_function(KEY, spec, RETURNS)
        self._wanted = wanted_by(self._own.function, spec, IN_WORKER)
        self._client: Any = None

    def play(self, values: dict[str, Any]) -> Answer:
        values["task"] = Task.from_json(values["task"])
        if "client" in self._wanted:
            values["client"] = self._client_of(values["base_url"], values["api_key"])
        return checked_answer(self._own.function(**{name: values[name] for name in self._wanted}), self._own)

    def _client_of(self, base_url: str, api_key: str) -> Any:
        if self._client is None:
            import openai

            self._client = openai.OpenAI(base_url=base_url, api_key="none", timeout=None)
        return self._client.with_options(api_key=api_key)


def answer_to_json(answer: Answer) -> dict[str, Any] | None:
    if isinstance(answer, dict):
        return {"rewards": {role: reward.to_json() for role, reward in answer.items()}}
    return None if answer is None else {"reward": answer.to_json()}


def answer_from_json(saved: Any) -> Answer:
    """Invert `answer_to_json`. ValueError, TypeError or LookupError for an invalid value."""
    if saved is None:
        return None
    if "rewards" in saved:
        return {role: Reward(**reward) for role, reward in saved["rewards"].items()}
    return Reward(**saved["reward"])
