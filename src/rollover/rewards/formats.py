"""Built-in rewards of the form of a completion: JSON, and a pattern. They need no answer."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

_FENCED = re.compile(r"```(?:json)?[ \t]*\n(.*?)\n?[ \t]*```", re.DOTALL | re.IGNORECASE)


def json_text(schema: Any = None, fenced: bool = True, base_dir: str = ".") -> Callable[[dict[str, Any]], float]:
    """1 where the whole completion is JSON (RFC 8259: no NaN), and fits `schema`, else 0.

    `schema`: a JSON schema as a table, or the path of a file that holds one; references of it to other documents are
    not fetched. `fenced`: a completion with exactly one fenced block of Markdown is that block.
    """
    fits = None if schema is None else _validator(schema, base_dir)

    def score(item: dict[str, Any]) -> float:
        text = item["completion"]
        blocks = _FENCED.findall(text) if fenced else []
        try:
            value = json.loads(blocks[0] if len(blocks) == 1 else text, parse_constant=_no_constant)
        except (ValueError, RecursionError):
            return 0.0
        return float(fits is None or fits(value))

    return score


def pattern(pattern: str, match: str = "full") -> Callable[[dict[str, Any]], float]:
    """1 where the completion matches the regular expression `pattern` of Python's re, else 0.

    `match`: full (all of it), start, or search (anywhere). A dot is any character but a line's end, unless the pattern
    begins with (?s).
    """
    try:
        compiled = re.compile(pattern)
    except (re.error, TypeError) as error:
        raise ValueError(f"the reward format: pattern = {pattern!r} is no regular expression: {error}") from None
    matches = {"full": compiled.fullmatch, "start": compiled.match, "search": compiled.search}.get(match)
    if matches is None:
        raise ValueError(f"the reward format: match = {match!r} is none of full, start, search")
    return lambda item: float(matches(item["completion"]) is not None)


def _validator(schema: Any, base_dir: str) -> Callable[[Any], bool]:
    try:
        import jsonschema.exceptions
        import jsonschema.validators
        import referencing
    except ImportError as error:
        raise ValueError(
            "the reward json with a schema needs the package jsonschema: pip install 'rollover[json]'"
        ) from error
    if isinstance(schema, str):
        try:
            schema = json.loads((Path(base_dir) / schema).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"the reward json: schema = {schema!r} cannot be read: {error}") from None
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.validators.Draft202012Validator)
    try:
        kind.check_schema(schema)
    except jsonschema.exceptions.SchemaError as error:
        raise ValueError(f"the reward json: schema is no JSON schema: {error.message}") from None
    return kind(schema, registry=referencing.Registry()).is_valid


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not of JSON")
