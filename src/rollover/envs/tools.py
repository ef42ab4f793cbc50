"""Tools of a policy: their definitions as text, the calls in an assistant's text, and their answers.

workflow.tool_format says how a policy writes calls: a built-in format, or the user's class. Errors of the policy never
fail the rollout: a malformed call, a wrong argument, or a failing tool is answered with an error message.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from rollover.config.workflow import TOOL_FORMATS
from rollover.envs.user_code import Outcome, UserCode
from rollover.functions import CustomFunction, custom_function, described, said_by
from rollover.images import NotStored, is_image
from rollover.tasks.image_parts import holds_media, with_images_of_program
from rollover.text import printable, whole_characters
from rollover.types import joined

KEY = "workflow.tool_format"
Schemas = Sequence[Mapping[str, Any]]
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_HOW_TO_CALL = {
    "hermes": (
        "To call a tool, write a JSON object with its name and its arguments between <tool_call> and </tool_call>:\n"
        '<tool_call>\n{"name": "the tool", "arguments": {"an argument": "its value"}}\n</tool_call>'
    ),
    "json": (
        "To call a tool, write nothing but a JSON object with its name and its arguments, or a list of them:\n"
        '{"name": "the tool", "arguments": {"an argument": "its value"}}'
    ),
}


@dataclass(frozen=True)
class Call:
    """A tool call that the policy wrote. The tool may not exist."""

    name: str
    arguments: dict[str, Any]
    """Valid JSON values: no NaN, no lone surrogate."""


@dataclass(frozen=True)
class MalformedCall:
    """Text that begins like a call and cannot be parsed."""

    text: str
    why: str
    """The error for the policy, a sentence without its full stop."""


def tool_schemas(tools: Iterable[Callable[..., Any]]) -> list[dict[str, Any]]:
    """Return the JSON schema of each function, from its name, types and docstring (transformers' `get_json_schema`).

    ValueError, with tool and fix, for a missing type or description, or two tools with one name.
    """
    from transformers.utils.chat_template_utils import (
        DocstringParsingException,
        TypeHintParsingException,
        get_json_schema,
    )

    schemas: dict[str, dict[str, Any]] = {}
    for tool in tools:
        name = getattr(tool, "__name__", repr(tool))
        try:
            schema = get_json_schema(tool)  # type: ignore[arg-type]
        except TypeHintParsingException as error:
            raise ValueError(
                f"the tool {name} has no complete types: {error}. Annotate every parameter, as in def"
                f" {name}(expression: str) -> str"
            ) from error
        except DocstringParsingException as error:
            raise ValueError(
                f"the tool {name} is not described: {error}. Give it a docstring that says what it does, with a"
                " line for each parameter below 'Args:'"
            ) from error
        if name in schemas:
            raise ValueError(f"two tools have the name {name}: rename one, as calls find a tool by its name")
        schemas[name] = schema
    return list(schemas.values())


def definitions(schemas: Sequence[Mapping[str, Any]], tool_format: str = "hermes") -> str:
    """Return the text that describes the tools and how to call them: "hermes" or "json" (see `read_calls`)."""
    lines = "\n".join(json.dumps(schema, ensure_ascii=False) for schema in schemas)
    return f"You can call these tools:\n<tools>\n{lines}\n</tools>\n\n{_how_to_call(tool_format)}"


def with_system_text(messages: Iterable[Mapping[str, Any]], text: str) -> list[dict[str, Any]]:
    """Return the messages with `text` appended to their system message, which is added if they begin without one."""
    out = [dict(message) for message in messages]
    if out and out[0]["role"] == "system":
        out[0]["content"] = joined(out[0]["content"], f"\n\n{text}")
    else:
        out.insert(0, {"role": "system", "content": text})
    return out


def read_calls(text: str, tool_format: str = "hermes") -> list[Call | MalformedCall]:
    """Return the calls in an assistant's text, in order.

    "hermes": JSON objects between <tool_call> and </tool_call>, with any text around them. "json": a text that begins
    with { or [ (after an optional Markdown fence) consists of calls: objects, with or without commas or semicolons
    between them, or lists of objects; any other text has no call. The key of the arguments is "arguments" or
    "parameters". Raises ValueError for another format only, never for a text.
    """
    _how_to_call(tool_format)
    return list(_hermes(text) if tool_format == "hermes" else _json(text))


class ToolFormat(Protocol):
    """Format of tool calls. The user's class is constructed without arguments."""

    def definitions(self, schemas: Schemas, /) -> str:
        """Return the system message's text about the tools (schemas as of `tool_schemas`) and how to call them, with
        an example if the model needs one."""
        ...

    def read(self, text: str, /) -> Sequence[Call | MalformedCall]:
        """Return the calls in a turn of the policy, in order. Never raises: return a MalformedCall instead."""
        ...


class _BuiltIn:
    def __init__(self, name: str) -> None:
        self.name = name

    def definitions(self, schemas: Schemas, /) -> str:
        return definitions(schemas, self.name)

    def read(self, text: str, /) -> list[Call | MalformedCall]:
        return read_calls(text, self.name)


class _CustomFormat:
    """The user's format. FunctionError for an invalid return value."""

    def __init__(self, spec: str) -> None:
        make = custom_function(KEY, spec, "a format of calls: an object with definitions(schemas) and read(text)")
        made = make()
        for name in ("definitions", "read"):
            if not callable(getattr(made, name, None)):
                raise make.refused(f"a {type(made).__name__} without a method {name}")
        self._definitions = CustomFunction(made.definitions, KEY, spec, "the text that tells the policy of the tools")
        self._read = CustomFunction(made.read, KEY, spec, "a list of Call and MalformedCall (rollover.envs.tools)")

    def definitions(self, schemas: Schemas, /) -> str:
        text = self._definitions([dict(schema) for schema in schemas])
        if not isinstance(text, str):
            raise self._definitions.refused(described(text))
        return text

    def read(self, text: str, /) -> list[Call | MalformedCall]:
        calls = self._read(text)
        if not isinstance(calls, list | tuple) or not all(isinstance(c, Call | MalformedCall) for c in calls):
            raise self._read.refused(described(calls))
        return list(calls)


def build_tool_format(name: str) -> ToolFormat:
    """Build the format that workflow.tool_format names. FunctionError for an invalid class."""
    return _BuiltIn(name) if name in TOOL_FORMATS else _CustomFormat(name)


# Private


def _how_to_call(tool_format: str) -> str:
    if tool_format not in _HOW_TO_CALL:
        raise ValueError(f"the format of tool calls {tool_format!r} is none of {', '.join(_HOW_TO_CALL)}")
    return _HOW_TO_CALL[tool_format]


def _hermes(text: str) -> Iterator[Call | MalformedCall]:
    at = 0
    while (start := text.find(_OPEN, at)) >= 0:
        try:
            # Parse the JSON first: one of its strings may contain the closing tag.
            value, end = _value(text, start + len(_OPEN))
            end = _skip(text, end)
            if not text.startswith(_CLOSE, end):
                raise ValueError(f"{_CLOSE} does not follow its JSON object")
            at = end + len(_CLOSE)
            call = _call(value, text[start:at])
        except ValueError as error:
            close = text.find(_CLOSE, start)
            at = len(text) if close < 0 else close + len(_CLOSE)
            call = MalformedCall(text[start:at], str(error) if close >= 0 else f"{_CLOSE} is missing")
        yield call


def _json(text: str) -> Iterator[Call | MalformedCall]:
    text = text.strip()
    if text.startswith("```"):
        text = text.removeprefix("```").removeprefix("json").removesuffix("```").strip()
    if not text.startswith(("{", "[")):
        return
    at = 0
    while at < len(text):
        try:
            value, end = _value(text, at)
        except ValueError as error:
            yield MalformedCall(text[at:], str(error))
            return
        for one in value if isinstance(value, list) else [value]:
            yield _call(one, text[at:end])
        at = _skip(text, end, ",;")


def _skip(text: str, at: int, also: str = "") -> int:
    """Return the index of the next character that is neither white space nor in `also`."""
    while at < len(text) and (text[at].isspace() or text[at] in also):
        at += 1
    return at


def _value(text: str, at: int) -> tuple[Any, int]:
    """Return the JSON value at `at`, after white space, and the index behind it. ValueError if there is none."""
    try:
        value, end = _DECODER.raw_decode(text, _skip(text, at))
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()  # no lone surrogate, and no 1e999
    except json.JSONDecodeError as error:
        raise ValueError(f"it is no JSON: {error.msg} at character {error.pos - at + 1}") from error
    except UnicodeEncodeError as error:
        raise ValueError("it has half a character: a surrogate without the other one") from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    return value, end


def _call(value: Any, text: str) -> Call | MalformedCall:
    if not isinstance(value, dict):
        return MalformedCall(text, "a call is a JSON object")
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters"))
    if not isinstance(name, str) or not name:
        return MalformedCall(text, 'its "name" is no text')
    if not isinstance(arguments, dict):
        return MalformedCall(text, 'its "arguments" are no JSON object')
    return Call(name, arguments)


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) < len(pairs):
        raise ValueError("a key of an object is there twice")
    return out


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _integer(digits: str) -> int:
    if len(digits) > 1000:  # Python's own limit has another message
        raise ValueError("a number has more than 1,000 digits")
    return int(digits)


_DECODER = json.JSONDecoder(object_pairs_hook=_without_doubles, parse_constant=_no_constant, parse_int=_integer)


Content = str | list[dict[str, Any]]
"""Content of a message: a text, or parts as in types.Task."""
_CHARS_PER_TOKEN = 64  # a longer text, which may be gigabytes, is truncated before it is tokenised
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
    """Counts of tool calls. `errors`: of well-formed calls, without timeouts."""

    calls: int = 0
    malformed: int = 0
    errors: int = 0
    timeouts: int = 0
    time_s: float = 0.0

    def stats(self) -> dict[str, float]:
        return {f"tools/{name}": float(value) for name, value in asdict(self).items()}


class ToolCalls:
    """Runs tools to answer calls. `schemas`: of the tools (`tool_schemas`). `max_tokens`: maximum of an answer."""

    def __init__(self, code: UserCode, schemas: Sequence[Mapping[str, Any]], tokenizer: Any, max_tokens: int) -> None:
        self.code, self.tokenizer, self.max_tokens = code, tokenizer, max_tokens
        functions = [schema["function"] for schema in schemas]
        self._properties = {f["name"]: f["parameters"].get("properties", {}) for f in functions}

    async def answers(
        self, calls: Sequence[Call | MalformedCall], tools: Mapping[str, Callable[..., Any]], counts: CallCounts
    ) -> list[Content]:
        """Run the calls. Return one content per call, in order: a text, or parts with images.

        Consecutive calls of `async def` tools run concurrently; every other call runs after the one before, since tools
        of one object share its state.
        """
        contents: list[Content] = []
        for _, run in itertools.groupby(enumerate(calls), key=lambda item: self._run_of(*item, tools)):
            contents += await asyncio.gather(*(self._answer(call, tools, counts) for _, call in run))
        return contents

    def truncate(self, content: Content) -> Content:
        """Truncate the texts of a content to `max_tokens` tokens, with a note of their full length. Images stay."""
        if isinstance(content, str):
            return self._truncated(content)
        return [part | {"text": self._truncated(part["text"])} if part["type"] == "text" else part for part in content]

    # Private

    def _truncated(self, text: str) -> str:
        head = whole_characters(text[: self.max_tokens * _CHARS_PER_TOKEN])
        ids = self.tokenizer(head, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        if len(ids) <= self.max_tokens and len(text) <= self.max_tokens * _CHARS_PER_TOKEN:
            return head
        kept = self.tokenizer.decode(ids[: self.max_tokens], clean_up_tokenization_spaces=False)
        return f"{kept}\n[cut off here: {len(text):,} characters in all]"

    @staticmethod
    def _run_of(number: int, call: Call | MalformedCall, tools: Mapping[str, Callable[..., Any]]) -> int:
        """Return a key that is equal for calls which may run concurrently."""
        together = isinstance(call, Call) and inspect.iscoroutinefunction(tools.get(call.name))
        return -1 if together else number

    async def _answer(
        self, call: Call | MalformedCall, tools: Mapping[str, Callable[..., Any]], counts: CallCounts
    ) -> Content:
        counts.calls += 1
        if isinstance(call, MalformedCall):
            counts.malformed += 1
            return f"error: the call cannot be read: {call.why}"
        if error := self._call_error(call, tools):
            counts.errors += 1
            return f"error: {error}"
        outcome = await self.code.call(_to_content(tools[call.name]), **call.arguments)
        counts.time_s += outcome.seconds
        counts.timeouts += outcome.timed_out
        if isinstance(outcome.error, NotStored):
            raise outcome.error  # a full disk, say: not an error of the tool
        counts.errors += outcome.error is not None
        return f"error: {_error_text(outcome)}" if outcome.failed else self.truncate(outcome.value)

    def _call_error(self, call: Call, tools: Mapping[str, Callable[..., Any]]) -> str:
        """Return what is wrong with the call, or ""."""
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
    """Whether a JSON value has a type of JSON schema; an unknown type accepts any value."""
    if isinstance(value, bool):
        return kind == "boolean" or kind not in _JSON_TYPES
    return kind not in _JSON_TYPES or isinstance(value, _JSON_TYPES[kind])


def _error_text(outcome: Outcome) -> str:
    """Return the error message for the policy, which shows nothing of the user's program but the error's text."""
    if outcome.timed_out:
        return f"no answer within {outcome.limit_s:g} seconds"  # the limit, not the time: equal in every repetition
    assert outcome.error is not None
    return (said_by(outcome.error) or type(outcome.error).__name__)[:_MAX_ERROR_CHARS]


def _to_content(tool: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the tool so that it returns a content. The conversion may run user code, so it runs with the tool."""
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
    """Convert a tool's result to a message's content. Content parts with an image, and Pillow images, are shown; other
    lists and dicts become JSON if possible, everything else `str`. BadImage as of `with_images`, and for a list with
    media that is no list of content parts."""
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
