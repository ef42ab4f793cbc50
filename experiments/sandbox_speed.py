"""How long a call of the reward `code` takes, warm, one after the other: wall and the judge's CPU, beside a Python's.

Then the CPU of all processes of a sandbox, which the load of the machine changes least.

python experiments/sandbox_speed.py [calls]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

from rollover.plugins.sandbox.cases import read_cases
from rollover.plugins.sandbox.guarantees import probe_sandbox
from rollover.plugins.sandbox.guest import program, runner
from rollover.plugins.sandbox.guest.locks import prepare_filter
from rollover.plugins.sandbox.guest.values import to_json
from rollover.plugins.sandbox.judge import Judge, RunLimits
from rollover.plugins.sandbox.launch import Launch

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


def sandbox_cpu(name: str, num: int) -> str:
    """CPU of a sandbox, from its fork to its end, with all its processes: of kind process, without namespaces."""
    code, columns = ROWS[name]
    cases, policy = read_cases(columns), Launch("process", namespaces=False).policy()
    rows = [list(map(to_json, row)) for row in cases.inputs] if cases.kind == "calls" else list(cases.inputs)
    limits = dataclasses.asdict(RunLimits())
    request = {"mode": cases.kind, "code": code, "name": cases.name, "inputs": rows, "limits": limits}
    line = json.dumps(request).encode() + b"\n"
    _run_in_sandbox(line, policy)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    said = [_run_in_sandbox(line, policy) for _ in range(num)][-1]
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert said.count(b'"ended": "ok"') == len(cases), said
    return f"CPU {1e3 * (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / num:5.1f} ms"


def _run_in_sandbox(line: bytes, policy: dict[str, object]) -> bytes:
    """What it says of a request; this process is its template."""
    (reads, tells), (hears, says) = os.pipe(), os.pipe()
    sandbox = os.fork()
    if sandbox == 0:
        os.dup2(reads, 0)
        os.dup2(says, 1)
        os.closerange(3, 64)
        try:
            runner._run_one(policy)  # pyright: ignore[reportPrivateUsage]
        finally:
            os._exit(0)
    os.close(reads)
    os.close(says)
    os.write(tells, line)
    said = b""
    while data := os.read(hears, 1 << 16):
        said += data
    os.waitpid(sandbox, 0)
    os.close(hears)
    os.close(tells)
    return said


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
        if not (found := probe_sandbox(launch)).holds:
            print(found)
            continue
        judge = Judge(launch)
        for name, (code, columns) in ROWS.items():
            cases = read_cases(columns)
            assert judge.judge(code, cases).share == 1
            label = f"{launch.kind}{'' if launch.namespaces else ' without namespaces'}, {name}"
            print(f"{label:40s} {measured(lambda: judge.judge(code, cases), num)}")  # noqa: B023
        judge.close()
    for name in program.MODULES:
        __import__(name)
    prepare_filter()
    for name in ("one text", "eight calls"):
        print(f"{'a sandbox and all in it, ' + name:40s} {sandbox_cpu(name, num)}")


if __name__ == "__main__":
    main()
