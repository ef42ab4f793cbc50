"""How long a call of the reward `code` takes, warm, one after the other: wall and CPU, beside a bare Python's start.

python experiments/sandbox_speed.py [calls]
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

from rollover.rewards.sandbox.cases import cases_of
from rollover.rewards.sandbox.guarantees import probed
from rollover.rewards.sandbox.judge import Judge
from rollover.rewards.sandbox.launch import Launch

ROWS = {
    "one text": ("print(int(input()) + 1)", {"tests": {"inputs": ["1"], "outputs": ["2"]}}),
    "eight calls": (
        "def f(x):\n    return x + 1",
        {"tests": {"fn_name": "f", "inputs": [str(i) for i in range(8)], "outputs": [str(i + 1) for i in range(8)]}},
    ),
    "three asserts": ("def f(x):\n    return x + 1", {"test_list": [f"assert f({i}) == {i + 1}" for i in range(3)]}),
}


def measured(call: Callable[[], object], num: int) -> str:
    """Median and quartiles of the wall time of a call, and its CPU time with that of its children, in ms."""
    call()
    before, walls = _cpu_s(), []
    for _ in range(num):
        began = time.perf_counter()
        call()
        walls.append(1e3 * (time.perf_counter() - began))
    low, middle, high = statistics.quantiles(walls, n=4)
    return f"{middle:6.1f} ms ({low:.1f} to {high:.1f}); CPU {1e3 * (_cpu_s() - before) / num:5.1f} ms"


def _cpu_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("calls", type=int, nargs="?", default=50)
    num = parser.parse_args().calls
    bare = [sys.executable, "-I", "-S", "-c", "pass"]
    print(f"{'a bare Python':40s} {measured(lambda: subprocess.run(bare, check=True), num)}")
    for launch in (Launch("bubblewrap"), Launch("process"), Launch("process", namespaces=False)):
        if not (found := probed(launch)).holds:
            print(found)
            continue
        judge = Judge(launch)
        for name, (code, columns) in ROWS.items():
            cases = cases_of(columns)
            assert judge.judge(code, cases).share == 1
            label = f"{launch.kind}{'' if launch.namespaces else ' without namespaces'}, {name}"
            print(f"{label:40s} {measured(lambda: judge.judge(code, cases), num)}")  # noqa: B023
        judge.close()


if __name__ == "__main__":
    main()
