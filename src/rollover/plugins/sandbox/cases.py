"""The program in a completion, the tests of a row in the formats of data sets, and the comparison of outputs.

Runs nothing: Python in rows is only parsed.
"""

from __future__ import annotations

import ast
import json
import math
import re
from dataclasses import dataclass, replace
from typing import Any, Literal

from rollover.plugins.sandbox.guest import values

_FENCE = re.compile(r"```[ \t]*+([\w+#.-]*+)[^\n`]*+\n(.*?)(?:```|\Z)", re.DOTALL)  # as CommonMark: no ` behind it
_PYTHON = ("python", "py", "python3")
_RELATIVE, _ABSOLUTE = 1e-5, 1e-8  # as numpy's allclose, which verl's prime_code compares with
_FORMS = (
    "The forms are: inputs and outputs, with or without fn_name, as JSON (verl's prime_code, APPS' input_output);"
    " test_list (MBPP); test and entry_point (HumanEval); Python code with asserts"
)


@dataclass(frozen=True)
class Cases:
    """Tests of a row. stdin: input and output texts. calls: arguments and results of the function `name`. tests: Python
    code, each of `tests` after `setup`."""

    kind: Literal["stdin", "calls", "tests"]
    inputs: tuple[Any, ...] = ()
    outputs: tuple[Any, ...] = ()
    name: str = ""
    setup: str = ""
    tests: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.tests if self.kind == "tests" else self.inputs)

    def first(self, num: int) -> Cases:
        """Return the first `num` tests."""
        return replace(self, inputs=self.inputs[:num], outputs=self.outputs[:num], tests=self.tests[:num])


def extract_code(completion: str) -> str | None:
    """Return the program of a completion, as verl's prime_code: its last Python block, else its last block without a
    language, else (without any block) the whole text. None if empty."""
    blocks = _FENCE.findall(completion)
    python = [code for language, code in blocks if language.lower() in _PYTHON]
    plain = [code for language, code in blocks if not language]
    code = (python or plain or [""])[-1] if blocks else completion
    return code if code.strip() else None


def read_cases(columns: dict[str, Any]) -> Cases:
    """Read the tests of a row. ValueError if there are none or they are invalid."""
    reward_model = columns.get("reward_model")
    truth = reward_model.get("ground_truth") if isinstance(reward_model, dict) else None
    if columns.get("test_list"):
        setup = [columns.get("test_setup_code") or "", *(columns.get("test_imports") or [])]
        return _asserts("\n".join(setup), list(columns["test_list"]))
    name = str(columns.get("entry_point") or "")
    for found in (truth, *(columns.get(key) for key in ("tests", "test", "input_output", "ground_truth", "answer"))):
        if found is not None and found != "":
            return _cases(found, name)
    raise ValueError(f"the reward code needs tests; the task's columns are {', '.join(columns) or 'none'}. {_FORMS}")


def _cases(found: Any, name: str) -> Cases:
    if isinstance(found, str):
        try:
            parsed = json.loads(found)
        except ValueError:
            return _python(found, name)
        if not isinstance(parsed, dict | list):
            return _python(found, name)
        found = parsed
    if isinstance(found, list) and all(isinstance(test, str) for test in found):
        return _asserts("", found)
    if not isinstance(found, dict):
        raise ValueError(f"the tests of the task are a {type(found).__name__}. {_FORMS}")
    if found.get("assert_case"):
        return _asserts("", list(found["assert_case"]))
    inputs, outputs = found.get("inputs"), found.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or not inputs or len(inputs) != len(outputs):
        raise ValueError(f"the tests of the task have no inputs and outputs, as many of each. {_FORMS}")
    if function := found.get("fn_name"):
        arguments = tuple(_arguments(each) for each in inputs)
        return Cases("calls", arguments, tuple(_result(each) for each in outputs), name=str(function))
    return Cases("stdin", tuple(map(_joined, inputs)), tuple(map(_joined, outputs)))


def _joined(text: Any) -> str:
    return "\n".join(map(str, text)) if isinstance(text, list) else str(text)


def _arguments(given: Any) -> list[Any]:
    """Return arguments from a JSON value per line, or from a list."""
    try:
        values = [json.loads(line) for line in given.split("\n")] if isinstance(given, str) else list(given)
    except (ValueError, TypeError) as error:
        raise ValueError(f"an input of the task is no JSON in each line: {error}") from None
    return [_with_numbers(value) for value in values]


def _result(given: Any) -> Any:
    try:
        value = json.loads(given) if isinstance(given, str) else given
    except ValueError as error:
        raise ValueError(f"an output of the task is no JSON: {error}") from None
    return [_with_numbers(item) for item in value] if isinstance(value, list) else _with_numbers(value)


def _with_numbers(value: Any) -> Any:
    """Convert the keys of a JSON table to integers if all of them are."""
    if isinstance(value, dict) and value and all(re.fullmatch(r"-?\d+", key) for key in value):
        return {int(key): item for key, item in value.items()}
    return value


# Python


def _asserts(setup: str, tests: list[str]) -> Cases:
    for code in (setup, *tests):
        _parsed(code)
    return Cases("tests", setup=setup, tests=tuple(tests))


def _parsed(code: str) -> ast.Module:
    try:
        return ast.parse(code)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ValueError(f"the tests of the task are no Python: {error}. {_FORMS}") from None


def _python(code: str, name: str) -> Cases:
    """Return a test per assert (with the statements before it), function test_*, and call of HumanEval's check."""
    body = _parsed(code).body
    kept = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
    setup = [node for node in body if isinstance(node, kept)]
    functions = [node.name for node in setup if isinstance(node, ast.FunctionDef)]
    tests, pending = [], []
    for node in body:
        if not isinstance(node, kept):
            pending.append(node)
            if isinstance(node, ast.Assert) or _calls_check(node):
                tests.append(_text(pending))
                pending = []
    if "check" in functions and name and not any("check(" in test for test in tests):
        tests.append(_text([*pending, *ast.parse(f"check({name})").body]))
        pending = []
    tests += [f"{function}()" for function in functions if function.startswith("test_")]
    if not tests:
        raise ValueError(f"the tests of the task have no assert, no test_ function and no check. {_FORMS}")
    if pending:
        tests[-1] += "\n" + _text(pending)
    return Cases("tests", name=name, setup=_text(setup), tests=tuple(tests))


def _calls_check(node: ast.stmt) -> bool:
    call = node.value if isinstance(node, ast.Expr) else None
    return isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "check"


def _text(nodes: list[Any]) -> str:
    return ast.unparse(ast.Module(nodes, []))


# Comparison


def same_text(output: str, expected: str) -> bool:
    """Compare texts without white space at line ends, else word by word, as verl's prime_code: numbers with a fraction
    may differ by a relative 1e-5."""
    left, right = ([line.strip() for line in text.strip().splitlines()] for text in (output, expected))
    if left == right:
        return True
    words, wanted = output.split(), expected.split()
    return len(words) == len(wanted) and all(map(_same_word, words, wanted))


def _same_word(word: str, wanted: str) -> bool:
    if word == wanted:
        return True
    if len(word) > 100 or len(wanted) > 100 or (word.lstrip("-").isdigit() and wanted.lstrip("-").isdigit()):
        return False
    try:
        number, reference = float(word), float(wanted)
    except ValueError:
        return False
    return math.isfinite(reference) and abs(number - reference) <= _ABSOLUTE + _RELATIVE * abs(reference)


def same_value(form: Any, expected: Any) -> bool:
    """Return whether a form (guest/values.py) has a value equal to `expected`, with tuples as lists.

    `expected` comes from JSON, and may be wrapped in a list of one, as in APPS. The form may be hostile: only numbers
    of bounded size are created from it, in time proportional to its length.
    """
    try:
        return _same(form, expected) or (isinstance(expected, list) and bool(expected) and _same(form, expected[0]))
    except RecursionError:
        return False


def _same(form: Any, expected: Any) -> bool:
    if not isinstance(form, dict):
        plain = form is None or isinstance(form, bool | int | float | str)
        return plain and not isinstance(expected, list | dict) and bool(form == expected)
    if len(form) != 1:
        return False
    ((mark, content),) = form.items()
    if mark in ("l", "t"):
        alike = isinstance(content, list) and isinstance(expected, list) and len(content) == len(expected)
        return alike and all(map(_same, content, expected))
    if mark == "d":
        return isinstance(content, list) and isinstance(expected, dict) and _same_items(content, expected)
    number = isinstance(expected, int | float) and values.number(mark, content)
    return number is not False and bool(number == expected)


def _same_items(pairs: list[Any], expected: dict[Any, Any]) -> bool:
    """Look keys up in `expected`: the program's keys could all have one hash, which takes quadratic time."""
    found = set()
    if len(pairs) != len(expected):
        return False
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2:
            return False
        key = pair[0]
        if not (key is None or isinstance(key, bool | int | float | str)) or key not in expected:
            return False
        found.add(key)
        if not _same(pair[1], expected[key]):
            return False
    return len(found) == len(expected)
