"""How a policy writes calls: workflow.tool_format, a built-in one or a class of the user's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from rollover.config.workflow import TOOL_FORMATS
from rollover.envs.tools import Call, MalformedCall, definitions, read_calls
from rollover.functions import OwnFunction, described, own_function

KEY = "workflow.tool_format"
Schemas = Sequence[Mapping[str, Any]]


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
