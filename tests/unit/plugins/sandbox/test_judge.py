"""The judge of programs: its processes, cases, and programs that fail."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollover.plugins.sandbox import guarantees
from rollover.plugins.sandbox.cases import Cases, extract_code, read_cases, same_text, same_value
from rollover.plugins.sandbox.guarantees import ProbeResult, choose_sandbox, probe_sandbox
from rollover.plugins.sandbox.guest.values import to_json
from rollover.plugins.sandbox.judge import BrokenTests, Judge, RunLimits, Verdict
from rollover.plugins.sandbox.launch import Launch, SandboxFailed, Template

# Programs that mean well: what they may use, and how their tests end. In whichever sandbox this machine has


@pytest.fixture(scope="module")
def launch() -> Launch:
    try:
        return choose_sandbox("auto", allow_weak=False)[0]
    except ValueError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def judge(launch: Launch) -> Iterator[Judge]:
    judge = Judge(launch, RunLimits(30.0))
    yield judge
    judge.close()


def ends(judge: Judge, code: str, **columns: Any) -> tuple[str, ...]:
    return judge.judge(code, read_cases(columns)).ends


def test_texts_in_and_out(judge: Judge) -> None:
    rows = {"inputs": ["1", "2", "3"], "outputs": ["2", "4", "7"]}
    verdict = judge.judge("print(int(input()) * 2)", read_cases({"tests": rows}))
    assert verdict == Verdict(("passed", "passed", "wrong"), "wrong")
    assert verdict.share == pytest.approx(2 / 3)


def test_each_input_meets_a_fresh_program(judge: Judge) -> None:
    code = "import sys, math\nmath.seen = getattr(math, 'seen', 0) + 1\nprint(math.seen)"
    assert ends(judge, code, tests={"inputs": ["", ""], "outputs": ["1", "1"]}) == ("passed", "passed")


def test_calls_of_functions_and_of_solutions(judge: Judge) -> None:
    rows = {"fn_name": "f", "inputs": ["[3, 1]\n2", "[]\n0"], "outputs": ["[1, 3, 2]", "[0]"]}
    assert ends(judge, "def f(a, b):\n    return tuple(sorted(a) + [b])", tests=rows) == ("passed", "passed")
    # Names of the usual modules need no import, as in verl.
    code = "class Solution:\n    def f(self, a: List[int], b: int):\n        return list(chain(sorted(a), [b]))"
    assert ends(judge, code, tests=rows) == ("passed", "passed")
    assert ends(judge, "def g(): pass", tests=rows) == ("error", "error")
    assert ends(judge, "def f(a, b):\n    return [1, 3, 2]", tests=rows) == ("passed", "wrong")


CALLS = {"fn_name": "f", "inputs": ["0", "1", "2"], "outputs": ["1", "2", "3"]}


@pytest.mark.parametrize(
    ("code", "wanted"),
    [
        # Each call meets the program loaded anew, in the process of the calls before it.
        ("n = 0\ndef f(x):\n    global n\n    n += 1\n    return x + n", ("passed", "passed", "passed")),
        ("import math\ndef f(x):\n    math.n = getattr(math, 'n', 0) + 1\n    return math.n", ("passed",) * 3),
        # One that ends the process fails alone.
        ("import os\ndef f(x):\n    x != 1 or os._exit(0)\n    return x + 1", ("passed", "error", "passed")),
        ("import sys\ndef f(x):\n    x != 1 or sys.exit(3)\n    return x + 1", ("passed", "error", "passed")),
        ("import os\ndef f(x):\n    x != 1 or os.abort()\n    return x + 1", ("passed", "died", "passed")),
        ("def f(x):\n    if x == 1: raise ValueError\n    return x + 1", ("passed", "error", "passed")),
        # What the calls before it kept is none of its memory, and what they printed none of its output.
        ("import math\ndef f(x):\n    vars(math)[str(x)] = bytearray(100 << 20)\n    return x + 1", ("passed",) * 3),
        ("def f(x):\n    print('a' * 40000)\n    return x + 1", ("passed",) * 3),
        ("def f(x):\n    print('a' * (40000 if x != 1 else 400000))\n    return x + 1", ("passed", "output", "passed")),
        # It may say what it likes of other calls: there is nothing to know, and nothing is taken for another's.
        ("import os\ndef f(x):\n    os.write(4, b'no\\n{\"test\": 7, \"ended\": \"ok\"}\\n[]\\n')\n    return x + 1",
         ("passed",) * 3),
    ],
)  # fmt: skip
def test_calls_in_a_process_fail_alone(launch: Launch, code: str, wanted: tuple[str, ...]) -> None:
    judge = Judge(launch, RunLimits(memory_bytes=220 << 20, output_bytes=60_000), ahead=False)
    try:
        assert judge.judge(code, read_cases({"tests": CALLS})).ends == wanted
    finally:
        judge.close()


def test_a_call_whose_thread_does_not_end_is_out_of_time(launch: Launch) -> None:
    code = (
        "import threading, time\ndef f(x):\n    if x == 2:\n"
        "        threading.Thread(target=time.sleep, args=(1000,)).start()\n    return x + 1"
    )
    judge = Judge(launch, RunLimits(seconds=4.0), ahead=False)
    try:
        assert judge.judge(code, read_cases({"tests": CALLS})).ends == ("passed", "passed", "timeout")
    finally:
        judge.close()


def test_what_python_can_is_there(judge: Judge) -> None:
    code = """
import asyncio, collections, dataclasses, datetime, decimal, fractions, functools, hashlib, heapq, itertools, random, re
import statistics, string, sys, threading, time, typing, os
sys.setrecursionlimit(10000)
out = []
threading.stack_size(1 << 26)
thread = threading.Thread(target=lambda: out.append(sum(range(10))))
thread.start(); thread.join()
async def later():
    await asyncio.sleep(0.001)
    return 45
def deep(n):
    return 0 if n == 0 else 1 + deep(n - 1)
assert out == [asyncio.run(later())] and deep(5000) == 5000
assert random.random() < 1 and time.time() > 1e9 and datetime.datetime.now().year > 2000
assert os.getcwd() == "/" and sys.stdin.readline() == "one\\n" and input() == "two"
print(sys.stdin.read().strip()); sys.exit()
"""
    verdict = judge.judge(code, read_cases({"tests": {"inputs": ["one\ntwo\nthree"], "outputs": ["three"]}}))
    assert verdict == Verdict(("passed",)), verdict


def test_asserts_in_a_sandbox_of_their_own(judge: Judge) -> None:
    code = "def f(x):\n    if x < 0:\n        raise ValueError('no')\n    return x + 1"
    tests = ["assert f(1) == 2", "assert f(1) == 3", "f(-1)", "assert f(2) == 3", "assert g(1)"]
    assert ends(judge, code, test_list=tests) == ("passed", "wrong", "error", "passed", "error")
    raises = "try:\n    f(-1)\n    assert False\nexcept ValueError:\n    pass\nassert f(0) == 1"
    assert ends(judge, code, tests=raises) == ("passed",)
    check = "def check(candidate):\n    assert candidate(1) == 2\n    assert candidate(x=2) == 3"
    assert ends(judge, code, test=check, entry_point="f") == ("passed",)


def test_values_of_many_kinds_cross(judge: Judge) -> None:
    code = """
from collections import Counter, defaultdict, deque, namedtuple, OrderedDict
from fractions import Fraction
from decimal import Decimal
class Odd(list):
    pass
P = namedtuple("P", "x y")
VALUES = [None, True, 1, -2.5, float("inf"), "a\\ud800", b"b", [1, [2]], (1, (2,)), {1: {2}}, frozenset([1]), 1 + 2j,
          range(3), 2 ** 40000, Counter("aab"), defaultdict(int, a=1), deque([1]), P(1, 2), Odd([1]), Fraction(1, 3),
          Decimal("0.1"), OrderedDict(a=1), {(1, 2): [None]}]
def value(i): return VALUES[i]
def gives(): yield from (1, 2)
def zipped(): return zip("ab", [1, 2])
def same(x): return x
def grow(a, d, s): a.append(1); d["k"] = 2; s.add(3)
class Stack:
    def __init__(self, items=()): self.items = list(items)
    def push(self, item): self.items.append(item); return self
    def __getitem__(self, i): return self.items[i]
class Solution:
    def twice(self, x): return 2 * x
"""
    wanted = (
        "[None, True, 1, -2.5, float('inf'), 'a\\ud800', b'b', [1, [2]], (1, (2,)), {1: {2}}, frozenset([1]), 1 + 2j,"
        " range(3), 2 ** 40000, {'a': 2, 'b': 1}, {'a': 1}, deque([1]), (1, 2), [1], Fraction(1, 3), Decimal('0.1'),"
        " {'a': 1}, {(1, 2): [None]}]"
    )
    setup = f"from collections import deque\nfrom fractions import Fraction\nfrom decimal import Decimal\nW = {wanted}"
    tests = [
        "assert [value(i) for i in range(len(W))] == W and all(type(value(i)) is type(w) for i, w in enumerate(W))",
        "assert [same(w) for w in W] == W",
        "assert list(gives()) == [1, 2] and list(zipped()) == [('a', 1), ('b', 2)]",
        "a, d, s = [0], {}, set()\ngrow(a, d, s)\nassert (a, d, s) == ([0, 1], {'k': 2}, {3})",
        "t = Stack([1]).push(2)\nassert t.items == [1, 2] and t[1] == 2 and same(t).push(3)[2] == 3",
        "assert Solution().twice(2) == 4 and twice(2) == 4",
    ]
    verdict = judge.judge(code, read_cases({"test_list": tests, "test_setup_code": setup}))
    assert verdict == Verdict(("passed",) * 6), verdict


def test_tests_that_cannot_be_run_are_nobodys_fault(judge: Judge) -> None:
    code = "def f(x):\n    return x"
    for broken in ("import no_such_module\nassert f(1)", "assert f(lambda: 1)", "x = 1 / 0\nassert f(1)"):
        row = {"test_list": ["assert f(1)"], "test_setup_code": broken} if "lambda" not in broken else {"tests": broken}
        with pytest.raises(BrokenTests, match="the tests of the task cannot be run"):
            judge.judge(code, read_cases(row))


def test_a_program_that_does_not_load_fails_all_tests(judge: Judge) -> None:
    verdict = judge.judge("import nothing_there", read_cases({"test_list": ["assert f(1)", "assert f(2)"]}))
    assert verdict.ends == ("error", "error")
    assert "nothing_there" in verdict.detail


def test_the_limits_of_the_configuration_hold() -> None:
    launch, _ = choose_sandbox("auto", allow_weak=True)
    judge = Judge(launch, RunLimits(30.0, 1 << 28, 1000), ahead=False)
    rows = {"inputs": ["10", "10000"], "outputs": ["x" * 10, "x" * 10000]}
    assert ends(judge, "print('x' * int(input()))", tests=rows) == ("passed", "output")
    code = "a = bytearray(int(input()) << 20)\nprint(1)"
    assert ends(judge, code, tests={"inputs": ["100", "300"], "outputs": ["1", "1"]}) == ("passed", "memory")


def test_it_stops_at_the_first_failure_where_all_count() -> None:
    launch, _ = choose_sandbox("auto", allow_weak=True)
    judge = Judge(launch, RunLimits(5.0), stop_at_failure=True, ahead=False)
    code = "import time\nn = int(input())\ntime.sleep(n)\nprint(1)"
    rows = {"inputs": ["0", "0", "1000"], "outputs": ["1", "2", "1"]}
    assert ends(judge, code, tests=rows) == ("passed", "wrong", "wrong")


# Processes


def commands_with(text: str) -> list[str]:
    """The command lines of all processes that have this text in theirs."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            line = path.read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
            found += [line] if text in line else []
    return found


@pytest.mark.parametrize("launch", [Launch("bubblewrap"), Launch("process")], ids=lambda launch: launch.kind)
def test_one_that_is_ended_while_it_starts_leaves_nothing(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    if probe_sandbox(launch).failed:
        pytest.skip(str(probe_sandbox(launch)))
    mark = f"# {os.urandom(8).hex()}"
    command = [*launch.command()[:-1], f"{mark}\n{launch.command()[-1]}"]
    monkeypatch.setattr(Launch, "command", lambda self: command)
    for delay in range(10):
        template = Template(launch)
        time.sleep(delay * 0.001)
        template.close()
    deadline = time.monotonic() + 10
    while commands_with(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert commands_with(mark) == []


# The choice


class Machine:
    """Stands for machines of other kinds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **found: ProbeResult) -> None:
        monkeypatch.setattr(guarantees, "probe_sandbox", lambda launch: found[launch.kind])


def test_bubblewrap_is_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch, bubblewrap=ProbeResult("bubblewrap"), process=ProbeResult("process"))
    assert choose_sandbox("auto", allow_weak=False)[0].kind == "bubblewrap"
    assert choose_sandbox("process", allow_weak=False)[0].kind == "process"


def test_a_process_stands_in_for_a_bubblewrap_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(
        monkeypatch,
        bubblewrap=ProbeResult("bubblewrap", failed="not installed"),
        process=ProbeResult("process", ("user",)),
    )
    launch, found = choose_sandbox("auto", allow_weak=False)
    assert launch.kind == "process"
    assert str(found) == ("process holds network, reading, writing, processes, memory; it does not hold user")


@pytest.mark.parametrize("what", ["network", "reading", "writing", "processes", "memory"])
def test_nothing_runs_where_a_guarantee_is_missing(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(
        monkeypatch,
        bubblewrap=ProbeResult("bubblewrap", failed="not installed"),
        process=ProbeResult("process", (what,)),
    )
    with pytest.raises(ValueError, match=f"it does not hold {what}.*bubblewrap.*allow_weak = true"):
        choose_sandbox("auto", allow_weak=False)
    assert choose_sandbox("auto", allow_weak=True)[0].kind == "process"


def test_a_sandbox_without_its_locks_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe is an attack, which succeeds where nothing is locked."""
    monkeypatch.setattr(Launch, "policy", lambda self: dict.fromkeys(("namespaces", "landlock", "user"), False) | {
        "paths": [], "in_namespaces": False
    })  # fmt: skip
    found = probe_sandbox(Launch("process"))
    assert "reading" in found.broken
    assert not found.holds


def test_a_sandbox_that_does_not_start_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Launch, "command", lambda self: ["/no/such/program"])
    assert "cannot be started" in probe_sandbox(Launch("process")).failed
    with pytest.raises(SandboxFailed):
        Judge(Launch("process"), ahead=False).judge("", read_cases({"tests": "assert f(1)"}))
    monkeypatch.setattr(Launch, "command", lambda self: ["/bin/false"])
    assert "did not come up" in probe_sandbox(Launch("process")).failed


def test_a_program_whose_sandbox_is_killed_from_outside_has_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """By somebody who frees memory, say: it would be a silent 0 of a program that may be right."""
    if shutil.which("bwrap") is None or not probe_sandbox(Launch("bubblewrap")).holds:
        pytest.skip("no bubblewrap")
    started: list[int] = []
    plain = subprocess.Popen

    def noted(*args: Any, **options: Any) -> Any:
        process = plain(*args, **options)
        started.append(process.pid)
        return process

    monkeypatch.setattr(subprocess, "Popen", noted)
    judge = Judge(Launch("bubblewrap"), RunLimits(60.0), ahead=False)
    try:
        rows = read_cases({"tests": {"inputs": [""], "outputs": ["1"]}})
        assert judge.judge("print(1)", rows).share == 1
        killer = threading.Timer(1.0, lambda: os.kill(started[-1], signal.SIGKILL))
        killer.start()
        with pytest.raises(SandboxFailed, match="from outside"):
            judge.judge("import time\ntime.sleep(50)\nprint(1)", rows)
        killer.join()
        assert judge.judge("print(1)", rows).share == 1
    finally:
        judge.close()


# Programs in completions, and the forms of tests that data sets have


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


# A program that fails is worth 0, whatever it does: what it returns, raises or writes in the place of a result


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
    "an exponent": "{'F': '1e99999999'}",
}
RAISED = {
    "SyntaxError": "def f(x): return eval('1 +')",
    "its own SyntaxError": "def f(x): raise SyntaxError('mine')",
    "RecursionError": "def f(x): return f(x)",
    "KeyboardInterrupt": "def f(x): raise KeyboardInterrupt",
    "SystemExit": "def f(x): raise SystemExit(0)",
    "GeneratorExit": "def f(x): raise GeneratorExit",
    "AssertionError": "def f(x): assert False",
    "StopIteration": "def f(x): raise StopIteration",
    "its own exception": "class E(Exception): pass\ndef f(x): raise E('e')",
    "os._exit": "import os\ndef f(x): os._exit(0)",
}

ENDS_THE_PROGRAM = {"os._exit", "KeyboardInterrupt", "SystemExit", "GeneratorExit"}


@pytest.fixture(scope="module", params=["bubblewrap", "process"])
def judge_of(request: pytest.FixtureRequest) -> Iterator[Judge]:
    launch = Launch(request.param)
    if not (found := probe_sandbox(launch)).holds:
        pytest.skip(f"this machine cannot give it: {found}")
    made = Judge(launch, RunLimits(SECONDS, output_bytes=1 << 20))
    yield made
    made.close()


def share(judge_of: Judge, code: str, **columns: object) -> float:
    started = time.monotonic()
    verdict = judge_of.judge(code, read_cases(columns))
    assert time.monotonic() - started < SECONDS + 15, verdict
    return verdict.share


@pytest.mark.parametrize("name", RETURNED)
def test_what_it_returns(name: str, judge_of: Judge) -> None:
    assert share(judge_of, RETURNED[name], tests={"fn_name": "f", "inputs": ["1"], "outputs": ["2"]}) == 0
    assert share(judge_of, RETURNED[name], tests="assert f(1) == 2") == 0


@pytest.mark.parametrize("name", WRITTEN)
def test_what_it_writes_in_the_place_of_a_result(name: str, judge_of: Judge) -> None:
    code = (
        "import json, os\n"
        "def f(x):\n"
        f"    line = json.dumps({{'test': 0, 'ended': 'ok', 'value': {WRITTEN[name]}}}) + chr(10)\n"
        "    view = line.encode()\n"
        "    while view: view = view[os.write(4, view):]\n"
        "    return 1"
    )
    assert share(judge_of, code, tests={"fn_name": "f", "inputs": ["1"], "outputs": ["2"]}) == 0


@pytest.mark.parametrize("name", RAISED)
def test_what_it_raises_fails_its_own_test_alone(name: str, judge_of: Judge) -> None:
    """Of three tests the first and the last meet a part of the program that works."""
    code = RAISED[name] + "\ndef g(x): return x"
    found = share(judge_of, code, test_list=["assert g(1) == 1", "assert f(2) == 2", "assert g(3) == 3"])
    assert found == pytest.approx(1 / 3 if name in ENDS_THE_PROGRAM else 2 / 3)
    assert share(judge_of, code, tests={"fn_name": "f", "inputs": ["1"], "outputs": ["2"]}) == 0


@pytest.mark.parametrize("setup", ["def check(f): eval('1 +')", "import nothing_of_this_name", "raise SystemExit"])
def test_tests_that_are_at_fault_are_told_apart(setup: str, judge_of: Judge) -> None:
    code = "def f(x): return x"
    if setup.startswith("def"):  # while they run, what they raise themselves is an error of the test
        assert share(judge_of, code, test=f"{setup}\ncheck(f)", entry_point="f") == 0
        return
    with pytest.raises(BrokenTests, match="the tests of the task cannot be run"):
        judge_of.judge(code, read_cases({"test_list": ["assert f(1) == 1"], "test_setup_code": setup}))
