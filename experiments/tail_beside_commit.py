"""Whether this tree is as fast as an earlier commit: `rollover bench tail` in both, step by step in turn.

    .venv/bin/python experiments/tail_beside_commit.py COMMIT

A machine that drifts by a quarter within minutes cannot tell 2 % between two runs one after the other. Here each tree's
benchmark is stopped (SIGSTOP) whenever it reports a step, and goes on when the other has made the same step; who goes
first changes with every step. Both make the same tokens. Printed are the seconds of each step of the modes `sync` and
`partial`, training included, and the ratios of the sums and of the steps.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LAST = "partial: step 7 of 7"  # what comes after it is not compared


class Tree:
    """The benchmark of one tree, which is stopped between its reports."""

    def __init__(self, path: Path) -> None:
        command = [sys.executable, "-m", "rollover", "bench", "tail", "--json"]
        self._process = subprocess.Popen(
            command,
            cwd=path,
            env=os.environ | {"PYTHONPATH": str(path / "src")},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def next_report(self) -> tuple[str, float]:
        """Let it run to its next report, and stop it. Returns what it reports, and the seconds since it went on."""
        assert self._process.stderr is not None
        os.killpg(self._process.pid, signal.SIGCONT)
        started = time.perf_counter()
        for line in self._process.stderr:
            if line.startswith("rollover: bench: "):
                os.killpg(self._process.pid, signal.SIGSTOP)
                return line.removeprefix("rollover: bench: ").strip(), time.perf_counter() - started
        raise SystemExit(f"the benchmark has ended with {self._process.wait()}")

    def close(self) -> None:
        """End it."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def compare(new: Tree, old: Tree) -> list[tuple[str, float, float]]:
    """For each step of the two modes: what was reported, and the seconds of both trees."""
    steps = []
    while not steps or steps[-1][0] != LAST:
        first, second = (new, old) if len(steps) % 2 else (old, new)
        seconds = {}
        for tree in (first, second):
            report, seconds[tree] = tree.next_report()
        if ": step " in report:
            steps.append((report, seconds[new], seconds[old]))
            print(f"{report}: {seconds[new]:.2f} s, {seconds[old]:.2f} s", flush=True)
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("commit", help="the earlier one")
    commit = parser.parse_args().commit
    with tempfile.TemporaryDirectory() as folder:
        there = Path(folder) / "tree"
        subprocess.run(["git", "worktree", "add", "-q", "--detach", there, commit], cwd=ROOT, check=True)
        trees = []
        try:
            trees = [Tree(ROOT), Tree(there)]
            steps = compare(*trees)
        finally:
            for tree in trees:
                tree.close()
            subprocess.run(["git", "worktree", "remove", "--force", there], cwd=ROOT, check=True)
    ratios = [new / old for _, new, old in steps]
    whole = sum(new for _, new, _ in steps) / sum(old for _, _, old in steps)
    print(f"seconds of this tree by those of {commit}: {whole:.3f} of the sums; of the {len(steps)} steps")
    print(f"median {statistics.median(ratios):.3f}, from {min(ratios):.3f} to {max(ratios):.3f}")


if __name__ == "__main__":
    main()
