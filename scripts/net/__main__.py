"""One command for the whole net (CONTRIBUTING.md); PYTHONPATH=scripts, from the root of the repository.

    python -m net --before COMMIT                      golden, resume and a selection of the kill matrix
    python -m net golden --before COMMIT --mode sync   one part, one mode
    python -m net kills --seed 3                       another selection
    python -m net kills --all                          every place in every mode (two hours)
    python -m net repeats                              which modes repeat themselves bit for bit

Ends with a table and exit code 1 where a part found a fault. COMMIT is checked out into a git worktree in a temporary
folder. Each run has one thread.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable

from .golden import differences, golden
from .kills import PLACES, kill_case, resume_case, selection
from .modes import MODES, Mode
from .trees import CURRENT, Bench, Failed, Tree, bench, checkout

PARTS = ("golden", "resume", "kills", "repeats")
MOST_LINES = 12  # of the findings of one case


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m net", description=__doc__, formatter_class=_FORMAT)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all but the last")
    parser.add_argument("--before", metavar="COMMIT", default="", help="the commit to compare with (golden, resume)")
    parser.add_argument("--mode", action="append", default=[], choices=list(MODES), help="may be repeated; all modes")
    parser.add_argument("--place", action="append", default=[], choices=list(PLACES), help="of the kills")
    parser.add_argument(
        "--seed", type=int, default=int(time.time()) // 86400, help="of the kills; another one each day"
    )
    parser.add_argument("--num", type=int, default=10, help="number of kills")
    parser.add_argument("--all", action="store_true", help="every place in every mode")
    parser.add_argument("--keep", action="store_true", help="keep the folders of the runs")
    options = parser.parse_args()
    parts = options.parts or ["golden", "resume", "kills"]
    if unknown := set(parts) - set(PARTS):
        parser.error(f"unknown part {sorted(unknown)[0]!r}: choose from {', '.join(PARTS)}")
    if not options.before and {"golden", "resume"} & set(parts):
        parser.error("golden and resume need --before COMMIT")
    os.environ["OMP_NUM_THREADS"] = "1"
    modes = [MODES[name] for name in options.mode or MODES]
    report = Report()
    CURRENT.check()
    with contextlib.ExitStack() as stack:
        runs = stack.enter_context(bench(options.keep))
        before = stack.enter_context(checkout(options.before, runs.folder)) if options.before else CURRENT
        for part in parts:
            for name, call in _cases(part, runs, before, modes, options):
                report.case(part, name, call)
    return report.end()


def _cases(
    part: str, runs: Bench, before: Tree, modes: list[Mode], options: argparse.Namespace
) -> list[tuple[str, Callable[[], list[str]]]]:
    """The cases of a part: a name, and what returns the findings."""
    if part == "golden":
        return [(_named(m), lambda m=m: golden(runs, before, CURRENT, m)) for m in modes]
    if part == "resume":
        return [(_named(m), lambda m=m: resume_case(runs, before, CURRENT, m)) for m in modes]
    if part == "repeats":
        return [(_named(m), lambda m=m: _repeats(runs, m)) for m in modes]
    if options.all or options.place or options.mode:
        cells = [(m.name, place) for m in modes for place in options.place or PLACES]
        cells = cells if options.all or options.place else cells[options.seed % len(PLACES) :: len(PLACES)]
    else:
        cells = selection(options.seed, options.num)
    return [
        (f"{m}, {place}", lambda m=m, place=place: kill_case(runs, CURRENT, MODES[m], place, options.seed))
        for m, place in cells
    ]


def _repeats(runs: Bench, mode: Mode) -> list[str]:
    """Differences of two runs of the current tree."""
    one = runs.whole(CURRENT, mode)
    return differences(one, runs.again(CURRENT, mode), CURRENT, CURRENT)


def _named(mode: Mode) -> str:
    return f"{mode.name} ({'exact' if mode.exact else 'bounded'})"


class Report:
    """Prints one line a case, its findings below, and a table at the end."""

    def __init__(self) -> None:
        self._counts: dict[str, list[float]] = defaultdict(lambda: [0, 0, 0.0])
        self._failed: list[str] = []

    def case(self, part: str, name: str, call: Callable[[], list[str]]) -> None:
        started = time.monotonic()
        try:
            findings = call()
        except Failed as error:
            findings = [str(error)]
        seconds = time.monotonic() - started
        counts = self._counts[part]
        counts[0] += 1
        counts[1] += bool(findings)
        counts[2] += seconds
        print(f"{part:8} {name:44} {'FAILED' if findings else 'ok':6} {seconds:6.1f} s", flush=True)
        for line in findings[:MOST_LINES]:
            print(f"         {line}", flush=True)
        if len(findings) > MOST_LINES:
            print(f"         and {len(findings) - MOST_LINES} more", flush=True)
        if findings:
            self._failed.append(f"{part} {name}")

    def end(self) -> int:
        print(f"\n{'part':8} {'cases':>6} {'failed':>7} {'time':>8}")
        for part, (cases, failed, seconds) in self._counts.items():
            print(f"{part:8} {cases:6.0f} {failed:7.0f} {seconds:6.0f} s")
        return bool(self._failed)


_FORMAT = argparse.RawDescriptionHelpFormatter

if __name__ == "__main__":
    sys.exit(main())
