"""Calls of a policy answered by tools: what goes wrong is told to the policy, and never fails the rollout.

Owns the counts of calls, and how long an answer may be.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rollover.envs.tools import Call, MalformedCall
from rollover.envs.user_code import Outcome, UserCode
from rollover.functions import said_by
from rollover.images import NotStored, is_image
from rollover.tasks.image_parts import holds_media, with_images_of_program
from rollover.text import printable, whole_characters

Content = str | list[dict[str, Any]]
"""Of a message: a text, or parts, as in types.Task."""
_CHARS_PER_TOKEN = 64  # a text of more than that per token is cut before it is tokenised: it may be gigabytes
_MAX_ERROR_CHARS = 500
_JSON_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


@dataclass
class CallCounts:
    """Of calls, each counted once: `errors` are those of calls that could be read, time-outs apart."""

    calls: int = 0
    malformed: int = 0
    errors: int = 0
    timeouts: int = 0
    time_s: float = 0.0

    def stats(self) -> dict[str, float]:
        return {f"tools/{name}": float(value) for name, value in asdict(self).items()}


class ToolCalls:
    """Answers calls by tools. `schemas` of the tools (tools.tool_schemas); an answer has at most `max_tokens`."""

    def __init__(self, code: UserCode, schemas: Sequence[Mapping[str, Any]], tokenizer: Any, max_tokens: int) -> None:
        self.code, self.tokenizer, self.max_tokens = code, tokenizer, max_tokens
        functions = [schema["function"] for schema in schemas]
        self._properties = {f["name"]: f["parameters"].get("properties", {}) for f in functions}

    async def answers(
        self, calls: Sequence[Call | MalformedCall], tools: Mapping[str, Callable[..., Any]], counts: CallCounts
    ) -> list[Content]:
        """What the policy is told, one content a call in the order of the calls: a text, or parts with images.

        Calls of `async def` tools that follow each other run at once; every other call begins when the one before has
        ended, as tools of one object share its state.
        """
        told: list[Content] = []
        for _, run in itertools.groupby(enumerate(calls), key=lambda item: self._run_of(*item, tools)):
            told += await asyncio.gather(*(self._answer(call, tools, counts) for _, call in run))
        return told

    def cut(self, content: Content) -> Content:
        """The content, whose texts have at most `max_tokens` tokens: else the first of them, and how much is missing.
        Images stay."""
        if isinstance(content, str):
            return self._cut(content)
        return [part | {"text": self._cut(part["text"])} if part["type"] == "text" else part for part in content]

    # Private

    def _cut(self, text: str) -> str:
        head = whole_characters(text[: self.max_tokens * _CHARS_PER_TOKEN])
        ids = self.tokenizer(head, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        if len(ids) <= self.max_tokens and len(text) <= self.max_tokens * _CHARS_PER_TOKEN:
            return head
        kept = self.tokenizer.decode(ids[: self.max_tokens], clean_up_tokenization_spaces=False)
        return f"{kept}\n[cut off here: {len(text):,} characters in all]"

    @staticmethod
    def _run_of(number: int, call: Call | MalformedCall, tools: Mapping[str, Callable[..., Any]]) -> int:
        """The same for calls that may run at once."""
        together = isinstance(call, Call) and inspect.iscoroutinefunction(tools.get(call.name))
        return -1 if together else number

    async def _answer(
        self, call: Call | MalformedCall, tools: Mapping[str, Callable[..., Any]], counts: CallCounts
    ) -> Content:
        counts.calls += 1
        if isinstance(call, MalformedCall):
            counts.malformed += 1
            return f"error: the call cannot be read: {call.why}"
        if why := self._why_wrong(call, tools):
            counts.errors += 1
            return f"error: {why}"
        outcome = await self.code.call(_to_content(tools[call.name]), **call.arguments)
        counts.time_s += outcome.seconds
        counts.timeouts += outcome.timed_out
        if isinstance(outcome.error, NotStored):
            raise outcome.error  # no fault of the tool
        counts.errors += outcome.error is not None
        return f"error: {_told_of(outcome)}" if outcome.failed else self.cut(outcome.value)

    def _why_wrong(self, call: Call, tools: Mapping[str, Callable[..., Any]]) -> str:
        """Why the call is not made; "": it is."""
        if call.name not in tools:
            return f"there is no tool {printable(call.name[:50])}, only {', '.join(tools)}"
        try:
            inspect.signature(tools[call.name]).bind(**call.arguments)
        except TypeError as error:
            return printable(str(error))[:_MAX_ERROR_CHARS]
        for name, value in call.arguments.items():
            schema = self._properties[call.name].get(name, {})
            if value is None and schema.get("nullable"):
                continue
            wanted = schema.get("type")
            kinds = [wanted] if isinstance(wanted, str) else wanted
            if isinstance(kinds, list) and not any(_is_a(value, kind) for kind in kinds):
                return f"{name} must be of the type {' or '.join(map(str, kinds))}"
        return ""


def _is_a(value: Any, kind: str) -> bool:
    """Whether a JSON value is of a type of JSON schema; one that is not known here takes any."""
    if isinstance(value, bool):
        return kind == "boolean" or kind not in _JSON_TYPES
    return kind not in _JSON_TYPES or isinstance(value, _JSON_TYPES[kind])


def _told_of(outcome: Outcome) -> str:
    """What the policy is told of a call that failed: no more of the user's program than the error says."""
    if outcome.timed_out:
        return f"no answer within {outcome.limit_s:g} seconds"  # the same whenever it is asked again
    assert outcome.error is not None
    return (said_by(outcome.error) or type(outcome.error).__name__)[:_MAX_ERROR_CHARS]


def _to_content(tool: Callable[..., Any]) -> Callable[..., Any]:
    """The tool, with its result as a content: made where the tool runs, as that is the user's code, too."""
    if inspect.iscoroutinefunction(tool):

        async def called(**arguments: Any) -> Content:
            return content_of(await tool(**arguments))

        return called

    def called_at_once(**arguments: Any) -> Any:
        result = tool(**arguments)
        return _content_later(result) if inspect.isawaitable(result) else content_of(result)

    return called_at_once


async def _content_later(result: Any) -> Content:
    return content_of(await result)


def content_of(value: Any) -> Content:
    """A result as the content of a message. Content parts with an image, and images of Pillow, are shown; other lists
    and dicts become JSON where that can hold them, everything else is as `str` says. BadImage as `with_images`, and for
    a list with media that is no list of content parts."""
    if isinstance(value, str):
        return value
    if is_image(value):
        value = [{"type": "image", "image": value}]
    if isinstance(value, list | tuple) and holds_media(value):
        return with_images_of_program([{"content": value}])[0]["content"]
    if isinstance(value, dict | list | tuple):
        try:
            return json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError):
            pass
    return str(value)
