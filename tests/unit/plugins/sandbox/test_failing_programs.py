"""A program that fails is worth 0, whatever it does: what it returns, raises or writes in the place of a result."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from rollover.plugins.sandbox.cases import read_cases
from rollover.plugins.sandbox.guarantees import probe_sandbox
from rollover.plugins.sandbox.judge import BrokenTests, Judge, RunLimits
from rollover.plugins.sandbox.launch import Launch

SECONDS = 3.0
NAMED = """
class {name}:
    def __str__(self): return '1e99999999'
    __repr__ = __str__
{name}.__module__ = '{module}'
def f(x): return {name}()
"""
RETURNED = {
    "a class that calls itself Fraction": NAMED.format(name="Fraction", module="fractions"),
    "a class that calls itself Decimal": NAMED.format(name="Decimal", module="decimal"),
    "a class that calls itself deque": NAMED.format(name="deque", module="collections"),
    "a large Decimal": "from decimal import Decimal\ndef f(x): return Decimal('1e999999')",
    "a large Fraction": "from fractions import Fraction\ndef f(x): return Fraction(3 ** 400_000, 2 ** 400_000)",
    "ints of one hash": "def f(x): return {i * (2**61 - 1) for i in range(45_000)}",
    "keys of one hash": "def f(x): return {i * (2**61 - 1): 0 for i in range(20_000)}",
    "a float that says it is all": "class F(float):\n    def __eq__(self, other): return True\ndef f(x): return F(3)",
    "a str that says it is all": "class S(str):\n    def __eq__(self, other): return True\ndef f(x): return S('3')",
    "a list in itself": "def f(x):\n    a = []\n    a.append(a)\n    return a",
    "an endless generator": "def f(x):\n    while True: yield 1",
    "surrogates": "def f(x): return '\\ud800'",
    "a function": "def f(x): return f",
    "a hostile repr": "class R:\n    def __repr__(self): raise SystemExit\ndef f(x): return R()",
    "a hostile class": "class R:\n    @property\n    def __class__(self): raise SystemExit\ndef f(x): return R()",
}
WRITTEN = {
    "a set of one hash": "{'s': [i * (2**61 - 1) for i in range(45_000)]}",
    "a dict of one hash": "{'d': [[i * (2**61 - 1), 0] for i in range(30_000)]}",
    "an exponent": "{'F': '1e99999999'}",
    "a large decimal": "{'D': '1e99999999999'}",
    "long parts": "{'F': ['f' * 200_000, 'e' * 200_000]}",
}
RAISED = {
    "SyntaxError": "def f(x): return eval('1 +')",
    "its own SyntaxError": "def f(x): raise SyntaxError('mine')",
    "IndentationError": "def f(x): exec(' a\\nb')",
    "TabError": "def f(x): raise TabError('t')",
    "EOFError": "def f(x): return input()",
    "RecursionError": "def f(x): return f(x)",
    "KeyboardInterrupt": "def f(x): raise KeyboardInterrupt",
    "SystemExit": "def f(x): raise SystemExit(0)",
    "GeneratorExit": "def f(x): raise GeneratorExit",
    "NotImplementedError": "def f(x): raise NotImplementedError",
    "AssertionError": "def f(x): assert False",
    "StopIteration": "def f(x): raise StopIteration",
    "UnicodeDecodeError": "def f(x): return b'\\xff'.decode()",
    "its own exception": "class E(Exception): pass\ndef f(x): raise E('e')",
    "os._exit": "import os\ndef f(x): os._exit(0)",
}

ENDS_THE_PROGRAM = {"os._exit", "KeyboardInterrupt", "SystemExit", "GeneratorExit"}


@pytest.fixture(scope="module", params=["bubblewrap", "process"])
def judge(request: pytest.FixtureRequest) -> Iterator[Judge]:
    launch = Launch(request.param)
    if not (found := probe_sandbox(launch)).holds:
        pytest.skip(f"this machine cannot give it: {found}")
    made = Judge(launch, RunLimits(SECONDS, output_bytes=1 << 20))
    yield made
    made.close()


def share(judge: Judge, code: str, **columns: object) -> float:
    started = time.monotonic()
    verdict = judge.judge(code, read_cases(columns))
    assert time.monotonic() - started < SECONDS + 15, verdict
    return verdict.share


@pytest.mark.parametrize("name", RETURNED)
def test_what_it_returns(name: str, judge: Judge) -> None:
    assert share(judge, RETURNED[name], tests={"fn_name": "f", "inputs": ["1"], "outputs": ["2"]}) == 0
    assert share(judge, RETURNED[name], tests="assert f(1) == 2") == 0


@pytest.mark.parametrize("name", WRITTEN)
def test_what_it_writes_in_the_place_of_a_result(name: str, judge: Judge) -> None:
    code = (
        "import json, os\n"
        "def f(x):\n"
        f"    line = json.dumps({{'test': 0, 'ended': 'ok', 'value': {WRITTEN[name]}}}) + chr(10)\n"
        "    view = line.encode()\n"
        "    while view: view = view[os.write(4, view):]\n"
        "    return 1"
    )
    assert share(judge, code, tests={"fn_name": "f", "inputs": ["1"], "outputs": ["2"]}) == 0


@pytest.mark.parametrize("name", RAISED)
def test_what_it_raises_fails_its_own_test_alone(name: str, judge: Judge) -> None:
    """Of three tests the first and the last meet a part of the program that works."""
    code = RAISED[name] + "\ndef g(x): return x"
    found = share(judge, code, test_list=["assert g(1) == 1", "assert f(2) == 2", "assert g(3) == 3"])
    assert found == pytest.approx(1 / 3 if name in ENDS_THE_PROGRAM else 2 / 3)
    assert share(judge, code, tests={"fn_name": "f", "inputs": ["1"], "outputs": ["2"]}) == 0


@pytest.mark.parametrize("setup", ["def check(f): eval('1 +')", "import nothing_of_this_name", "raise SystemExit"])
def test_tests_that_are_at_fault_are_told_apart(setup: str, judge: Judge) -> None:
    code = "def f(x): return x"
    if setup.startswith("def"):  # while they run, what they raise themselves is an error of the test
        assert share(judge, code, test=f"{setup}\ncheck(f)", entry_point="f") == 0
        return
    with pytest.raises(BrokenTests, match="the tests of the task cannot be run"):
        judge.judge(code, read_cases({"test_list": ["assert f(1) == 1"], "test_setup_code": setup}))
