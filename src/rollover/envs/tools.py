"""Tools for a policy: their definitions as a text, and the calls that are in an assistant's text. Runs no tool.

Nothing here raises for what a policy wrote: a call that cannot be read is a MalformedCall with the reason.

How a policy writes calls is workflow.tool_format: a built-in format, or a class of the user's own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rollover.config.workflow import TOOL_FORMATS
from rollover.functions import OwnFunction, described, own_function
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
    """One call of a tool, as the policy wrote it. Whether there is such a tool is not looked at."""

    name: str
    arguments: dict[str, Any]
    """JSON values that can be written and tokenised: no NaN, no lone surrogate."""


@dataclass(frozen=True)
class MalformedCall:
    """What begins like a call and cannot be read."""

    text: str
    why: str
    """A sentence without its full stop, to tell the policy."""


def tool_schemas(tools: Iterable[Callable[..., Any]]) -> list[dict[str, Any]]:
    """The JSON schema of each function, made of its name, types and docstring by transformers' `get_json_schema`.

    ValueError names the tool and the fix where a type or a description is missing, or where two have one name.
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
    """The text that tells a policy of the tools, and how to call them: "hermes" or "json" (see read_calls)."""
    lines = "\n".join(json.dumps(schema, ensure_ascii=False) for schema in schemas)
    return f"You can call these tools:\n<tools>\n{lines}\n</tools>\n\n{_how_to_call(tool_format)}"


def with_system_text(messages: Iterable[Mapping[str, Any]], text: str) -> list[dict[str, Any]]:
    """The messages with `text` at the end of their system message; in a new first one if they begin without."""
    out = [dict(message) for message in messages]
    if out and out[0]["role"] == "system":
        out[0]["content"] = joined(out[0]["content"], f"\n\n{text}")
    else:
        out.insert(0, {"role": "system", "content": text})
    return out


def read_calls(text: str, tool_format: str = "hermes") -> list[Call | MalformedCall]:
    """The calls in an assistant's text, in their order; an empty list where there is none.

    "hermes": JSON objects between <tool_call> and </tool_call>, with any text around them. "json": a text that begins
    with { or [ (or a fence of Markdown before it) is made of calls alone: objects, one after another, with or without
    commas or semicolons between them, or lists of objects; any other text has no call. The arguments are under
    "arguments" or "parameters". ValueError for another format, and for no text.
    """
    _how_to_call(tool_format)
    return list(_hermes(text) if tool_format == "hermes" else _json(text))


class ToolFormat(Protocol):
    """A class of one's own is made without arguments."""

    def definitions(self, schemas: Schemas, /) -> str:
        """What the system message says of the tools (JSON schemas, as tools.tool_schemas makes them) and of how to
        call them; a worked example, too, where the model needs one."""
        ...

    def read(self, text: str, /) -> Sequence[Call | MalformedCall]:
        """The calls in a turn of the policy, in their order. Raises for no text: what cannot be read is a
        MalformedCall."""
        ...


class _BuiltIn:
    def __init__(self, name: str) -> None:
        self.name = name

    def definitions(self, schemas: Schemas, /) -> str:
        return definitions(schemas, self.name)

    def read(self, text: str, /) -> list[Call | MalformedCall]:
        return read_calls(text, self.name)


class _Own:
    """Checks what the user's own returns: FunctionError."""

    def __init__(self, spec: str) -> None:
        make = own_function(KEY, spec, "a format of calls: an object with definitions(schemas) and read(text)")
        made = make()
        for name in ("definitions", "read"):
            if not callable(getattr(made, name, None)):
                raise make.refused(f"a {type(made).__name__} without a method {name}")
        self._definitions = OwnFunction(made.definitions, KEY, spec, "the text that tells the policy of the tools")
        self._read = OwnFunction(made.read, KEY, spec, "a list of Call and MalformedCall (rollover.envs.tools)")

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
    """The format that workflow.tool_format names. FunctionError where a class of one's own is none."""
    return _BuiltIn(name) if name in TOOL_FORMATS else _Own(name)


# Private


def _how_to_call(tool_format: str) -> str:
    if tool_format not in _HOW_TO_CALL:
        raise ValueError(f"the format of tool calls {tool_format!r} is none of {', '.join(_HOW_TO_CALL)}")
    return _HOW_TO_CALL[tool_format]


def _hermes(text: str) -> Iterator[Call | MalformedCall]:
    at = 0
    while (start := text.find(_OPEN, at)) >= 0:
        try:
            # JSON first: one of its strings may hold the closing tag.
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
    """The index of the next character that is no white space and none of `also`."""
    while at < len(text) and (text[at].isspace() or text[at] in also):
        at += 1
    return at


def _value(text: str, at: int) -> tuple[Any, int]:
    """The JSON value that begins at `at`, after white space, and the index behind it. ValueError if there is none."""
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
    if len(digits) > 1000:  # Python refuses a few thousand in words of its own
        raise ValueError("a number has more than 1,000 digits")
    return int(digits)


_DECODER = json.JSONDecoder(object_pairs_hook=_without_doubles, parse_constant=_no_constant, parse_int=_integer)
