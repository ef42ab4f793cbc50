"""verl's prime_code and the reward `code` give the same score to the same programs and tests."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rollover.plugins.sandbox.cases import extract_code, read_cases
from rollover.plugins.sandbox.guarantees import choose_sandbox
from rollover.plugins.sandbox.judge import Judge

pytest.importorskip("verl")
STDIN = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}
CALLS = {"fn_name": "f", "inputs": ["[3, 1]\n2", "[]\n0"], "outputs": ["[1, 3, 2]", "[0]"]}
SIGNATURE = "class Solution:\n    def f(self, a: List[int], b: int):\n        "


@pytest.mark.parametrize(
    ("code", "tests", "share"),
    [
        ("a, b = map(int, input().split())\nprint(a + b)", STDIN, 1.0),
        ("import sys\nprint(sum(map(int, sys.stdin.read().split())), ' ')", STDIN, 1.0),
        ("if __name__ == '__main__':\n    print(sum(map(int, input().split())))", STDIN, 1.0),
        ("input()\nprint(3.0000001)", {"inputs": ["x"], "outputs": ["3.0"]}, 1.0),
        ("input()\nprint(3)", STDIN, 0.5),
        ("no program", STDIN, 0.0),
        ("def f(a, b):\n    return tuple(sorted(a) + [b])", CALLS, 1.0),
        (SIGNATURE + "return list(chain(sorted(a), [b]))", CALLS, 1.0),
        ("def g():\n    pass", CALLS, 0.0),
    ],
)
def test_the_share_of_tests_is_verls(code: str, tests: dict[str, Any], share: float) -> None:
    from verl.utils.reward_score import prime_code

    completion = f"So:\n```python\n{code}\n```"
    theirs, _ = prime_code.compute_score(completion, json.dumps(tests), continuous=True)
    assert float(theirs) == share
    assert ours(completion, tests) == share


def test_a_program_may_call_exit_here() -> None:
    """verl takes it away, so that such a program fails there."""
    from verl.utils.reward_score import prime_code

    completion = "```python\nprint(sum(map(int, input().split())))\nexit()\n```"
    assert float(prime_code.compute_score(completion, json.dumps(STDIN), continuous=True)[0]) == 0
    assert ours(completion, STDIN) == 1


def test_a_function_that_passes_half_of_its_tests_has_half_the_score_here() -> None:
    """verl runs all tests at once, and where one fails each by itself, without the name of the function that they call:
    then no test passes, right or wrong. With the name it has the share that is ours."""
    from verl.utils.reward_score import prime_code
    from verl.utils.reward_score.prime_code.utils import check_correctness

    code = "def f(a, b):\n    return [0]"  # right for the second call alone
    completion = f"```python\n{code}\n```"
    assert float(prime_code.compute_score(completion, json.dumps(CALLS), continuous=True)[0]) == 0
    single = {"inputs": CALLS["inputs"][1:], "outputs": CALLS["outputs"][1:]}
    assert check_correctness(single | {"fn_name": "f"}, code, timeout=10, debug=False)[0] == [True]
    assert check_correctness(single, code, timeout=10, debug=False)[0] != [True]
    assert ours(completion, CALLS) == 0.5


def ours(completion: str, tests: dict[str, Any]) -> float:
    try:
        launch, _ = choose_sandbox("auto", allow_weak=False)
    except ValueError as error:
        pytest.skip(str(error))
    code = extract_code(completion)
    assert code is not None
    judge = Judge(launch, ahead=False)
    try:
        return judge.judge(code, read_cases({"reward_model": {"ground_truth": json.dumps(tests)}})).share
    finally:
        judge.close()
