"""Programs in completions, and the forms of tests that data sets have."""

from __future__ import annotations

import json
import time
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollover.plugins.sandbox.cases import Cases, extract_code, read_cases, same_text, same_value
from rollover.plugins.sandbox.guest.values import to_json


@pytest.mark.parametrize(
    ("completion", "code"),
    [
        ("```python\nprint(1)\n```", "print(1)\n"),
        ("first ```python\na\n``` then ```py\nb\n``` said", "b\n"),
        ("```\nplain\n```", "plain\n"),
        ("```python\nprint(1)\n```\n```\noutput\n```", "print(1)\n"),
        ("```cpp\nint main() {}\n```", None),
        ("```python\ncut off", "cut off"),
        ("print(1)", "print(1)"),
        ("", None),
        ("``````python\n```", None),
    ],
)
def test_the_last_block_of_python_is_the_program(completion: str, code: str | None) -> None:
    assert extract_code(completion) == code


def test_prime_codes_rows() -> None:
    rows = {"inputs": ["1 2\n", ["3", "4"]], "outputs": ["3\n", ["7"]]}
    for truth in (rows, json.dumps(rows)):
        cases = read_cases({"reward_model": {"ground_truth": truth}, "data_source": "apps"})
        assert cases == Cases("stdin", ("1 2\n", "3\n4"), ("3\n", "7"))
    called = {"fn_name": "f", "inputs": ["1\n[2]", [3, [4]]], "outputs": ["[1]", [2]]}
    assert read_cases({"input_output": json.dumps(called)}) == Cases("calls", ([1, [2]], [3, [4]]), ([1], [2]), "f")
    keys = {"fn_name": "f", "inputs": ['{"1": "a"}'], "outputs": ['{"2": "b"}']}
    assert read_cases({"tests": keys}) == Cases("calls", ([{1: "a"}],), ({2: "b"},), "f")


def test_rows_of_python() -> None:
    mbpp = {"test_list": ["assert f(1) == 2"], "test_setup_code": "import math", "test_imports": ["import re"]}
    assert read_cases(mbpp) == Cases("tests", setup="import math\nimport re", tests=("assert f(1) == 2",))
    check = "def check(candidate):\n    assert candidate(1) == 2"
    assert read_cases({"test": check, "entry_point": "f"}) == Cases("tests", name="f", setup=check, tests=("check(f)",))
    code = "import math\nx = [3]\nf(x)\nassert x == [1]\nassert f(2)\ndef test_three():\n    assert f(3)"
    cases = read_cases({"answer": code})
    assert cases.tests == ("x = [3]\nf(x)\nassert x == [1]", "assert f(2)", "test_three()")
    assert len(cases) == 3
    assert cases.first(1).tests == ("x = [3]\nf(x)\nassert x == [1]",)
    assert read_cases({"tests": {"assert_case": ["assert f(1)"]}}).tests == ("assert f(1)",)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"question": "?"}, "needs tests; the task's columns are question. The forms are"),
        ({"tests": "x = 1"}, "no assert, no test_ function and no check"),
        ({"tests": "assert ("}, "are no Python"),
        ({"tests": {"inputs": ["1"], "outputs": []}}, "no inputs and outputs, as many of each"),
        ({"tests": {"inputs": ["x"], "outputs": ["1"], "fn_name": "f"}}, "an input of the task is no JSON"),
        ({"tests": {"inputs": ["1"], "outputs": ["x"], "fn_name": "f"}}, "an output of the task is no JSON"),
        ({"tests": 3}, "the tests of the task are a int"),
    ],
)
def test_a_row_that_has_no_tests_is_refused(columns: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_cases(columns)


def test_texts_are_compared_as_judges_do() -> None:
    assert same_text("1 2 \n3\n\n", "1 2\n3")
    assert same_text("0.333333333", "0.33333333334")
    assert same_text("a  b", "a b")
    assert not same_text("2 1", "1 2")
    assert not same_text("1.1", "1.2")
    assert not same_text("10000000000000000001", "10000000000000000002")
    assert not same_text("nan", "1")
    assert not same_text("", "1")


def equal(value: Any, expected: Any) -> bool:
    return same_value(to_json(value), expected)


def test_values_are_compared_as_in_prime_code() -> None:
    assert equal((1, (2,)), [1, [2]])
    assert equal([1, 2], [[1, 2]])
    assert equal(True, True)
    assert not equal([2, 1], [1, 2])
    assert not equal(None, [])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=4),
)


@given(JSON, JSON)
def test_forms_are_compared_as_the_values_are(value: Any, other: Any) -> None:
    assert equal(value, value)
    assert equal(value, other) is bool(value == other or (isinstance(other, list) and other and value == other[0]))


@pytest.mark.parametrize(
    ("value", "expected", "same"),
    [
        (Fraction(1, 2), 0.5, True),
        (Fraction(6, 3), 2, True),
        (Fraction(1, 3), 0.3333, False),
        (Decimal("0.50"), 0.5, True),
        (Decimal("NaN"), 1, False),
        (Decimal("Infinity"), 1, False),
        (complex(3, 0), 3, True),
        (10**5000, 10**5000, True),
        (10**5000, 10**5000 + 1, False),
        ({1: "a"}, {1: "a"}, True),
        ({1: "a", 2: "b"}, {1: "a"}, False),
        ({(1, 2): "a"}, {"1": "a"}, False),
        ({1, 2}, [1, 2], False),
        (range(2), [0, 1], False),
        (b"a", "a", False),
        (iter([1]), [1], False),
        ({}.keys(), [], True),
    ],
    ids=range(17),
)
def test_values_of_other_kinds(value: Any, expected: Any, same: bool) -> None:
    assert equal(value, expected) is same


COLLIDING = [i * (2**61 - 1) for i in range(45_000)]
DEEP: Any = 1
for _ in range(150_000):
    DEEP = {"l": [DEEP]}


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ({"s": COLLIDING}, 1),
        ({"d": [[key, 0] for key in COLLIDING]}, {i: 0 for i in range(45_000)}),
        ({"d": [[key, 0] for key in COLLIDING]}, {1: 0}),
        ({"l": [{"s": COLLIDING}]}, [[1]]),
        ({"D": "1e99999999"}, 5),
        ({"D": "1e999999999999999999"}, 5),
        ({"D": "9" * 10**6}, 5),
        ({"F": "1e99999999"}, 5),
        ({"F": ["f" * 500_000, "e" * 500_000]}, 5),
        ({"F": ["1", "0"]}, 5),
        ({"F": ["1"]}, 5),
        ({"F": [1, 2]}, 0.5),
        ({"h": "f" * 10**6}, 5),
        ({"h": "1_" * 10**5 + "1"}, 5),
        ({"h": 5}, 5),
        ({"c": [1, 2, 3]}, 5),
        ({"c": ["x"]}, 5),
        ({"l": 5}, [5]),
        ({"d": [[1]]}, {1: 1}),
        ({"d": [[{"l": []}, 1]]}, {1: 1}),
        ({"d": [[1, 1], [1, 1]]}, {1: 1, 2: 1}),
        ({"i": [1]}, [1]),
        ({"r": [0, 10**18, 1]}, [0]),
        ({"o": 0}, 0),
        ({"no": 1}, 1),
        ({"l": [], "t": []}, []),
        ({}, {}),
        ([1], [1]),
        (DEEP, [1]),
    ],
    ids=range(29),
)
def test_hostile_forms_are_wrong_at_once(form: Any, expected: Any) -> None:
    started = time.process_time()
    assert same_value(form, expected) is False
    assert time.process_time() - started < 2
