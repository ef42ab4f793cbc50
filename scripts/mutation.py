"""Would the tests notice? Runs them against random mutants of the core, each in a temporary copy of the repository.

    nice -n 10 .venv/bin/python scripts/mutation.py --seed 1 --num 200 --calls calls.json --out mutation
    .venv/bin/python scripts/mutation.py --seed 1 --num 200 --out mutation --only 17 40     these alone, again

Kinds of change: scripts/mutants.py. A first run of the tests without a change finds out which of them call which
function and how long they take (`--calls` keeps that in a file; later runs add the test files that it does not know).
A mutant meets the tests that call the changed function, until one fails: those of its own file and room
(tests/unit/<package>), then two minutes' worth of the others (`--wider-s`), the quickest first. A test that takes ten
times as long as it did, and a minute more, counts as failed. What survives is listed with its difference in OUT.txt;
OUT.json has everything. Whether a survivor changes nothing that could be seen, or only speed, is for a reader to judge.

It is not part of any test run: two hundred mutants take an hour or two on one core.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import faulthandler
import importlib
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from mutants import Mutant, mutants

ROOT = Path(__file__).resolve().parents[1]
CORE = ["rollout", "algorithms", "checkpoint", "types.py", "rewards/pool.py",
        *(f"trainer/{name}.py" for name in ("batch", "critic", "objective", "packing", "optimizer", "replay_buffer",
                                            "reuse", "streams"))]  # fmt: skip
TESTS = ["tests/unit", "tests/contract", "tests/parity", "tests/integration"]
# They call everything, and are about something else: speed, recipes, pictures.
LEFT_OUT = ["tests/integration/test_bench.py", "tests/integration/test_vllm_peer.py",
            "tests/integration/test_async_speed.py", "tests/integration/test_staleness_experiment.py",
            "tests/integration/test_modes_table.py", "tests/integration/test_presets.py", "tests/unit/models",
            "tests/unit/test_help_speed.py", "tests/unit/algorithms/test_bandit.py"]  # fmt: skip
KILLED, SURVIVED = "killed", "survived"
# What the tests import beside the package. It is imported once, and every mutant's process is a fork of this one.
HEAVY = ["torch", "transformers.models.auto.modeling_auto", "transformers.models.llama.modeling_llama", "peft",
         "transformers.models.qwen2.modeling_qwen2", "safetensors.torch", "safetensors.numpy", "hypothesis.strategies",
         "pydantic", "rich.live", "fsspec.core", "psutil", "asyncio", "tokenizers"]  # fmt: skip
_NEVER_YET = 2_000_000_000  # a time in seconds, after that of every file here
_changes = itertools.count()


class Calls:
    """Plugin of the first run: which test calls which function of the package, and how long it takes."""

    def __init__(self, package: str) -> None:
        self.package = package
        self.tests: dict[str, dict[str, Any]] = {}
        self.failed: list[str] = []
        self._codes: set[Any] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None):
        def profile(frame, event, argument) -> None:
            if event == "call":
                self._codes.add(frame.f_code)

        self._codes.clear()
        started = time.monotonic()
        threading.setprofile(profile)
        sys.setprofile(profile)
        try:
            return (yield)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # pyright: ignore[reportArgumentType]
            called = {
                f"{code.co_filename[len(self.package) + 1 :]}:{code.co_qualname.partition('.<locals>')[0]}"
                for code in list(self._codes)
                if code.co_filename.startswith(self.package)
            }
            self.tests[item.nodeid] = {"seconds": time.monotonic() - started, "calls": sorted(called)}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)


class Meet:
    """Plugin of a mutant's run: these tests in this order, each with a time limit; remembers the first that fails."""

    def __init__(self, limits: dict[str, float], answer: Path) -> None:
        self.limits, self.answer = limits, answer
        self.failed: list[str] = []

    def pytest_sessionstart(self) -> None:
        with contextlib.suppress(ImportError):
            from hypothesis import Phase, settings

            # No shrinking: that a test fails is enough.
            phases = (Phase.explicit, Phase.generate)
            settings.register_profile("mutant", settings(), phases=phases, report_multiple_bugs=False)
            settings.load_profile("mutant")

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        by_id = {item.nodeid: item for item in items}
        items[:] = [by_id[name] for name in self.limits if name in by_id]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.answer.write_text(f"{nodeid} (time)")  # what remains where it ends the process
        faulthandler.dump_traceback_later(self.limits[nodeid], exit=True)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        faulthandler.cancel_dump_traceback_later()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)
            self.answer.write_text(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.answer.write_text(f"{report.nodeid} (import)")


def copy_repository(folder: Path) -> Path:
    """Everything that git tracks or would track, as it is in the working tree."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, target)
    return folder


def in_child(folder: Path, work: Any, log: Path) -> int:
    """Call `work` in a fork of this process, in `folder`, where the package is the folder's. Returns its exit code.

    A fork, because importing torch takes longer than most tests.
    """
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 3
    try:
        os.setsid()
        with log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.chdir(folder)
        os.environ["PYTHONPATH"] = str(folder / "src")
        sys.path[:0] = [str(folder / "src")]
        code = int(work())
    finally:
        os._exit(code)


def run_tests(tests: list[str], plugin: object, *more: str) -> int:
    left_out = [f"--ignore={name}" for name in LEFT_OUT]
    return pytest.main([*tests, "-q", "-p", "no:cacheprovider", "--no-header", *left_out, *more], plugins=[plugin])


def find_calls(folder: Path, tests: list[str]) -> dict[str, dict[str, Any]]:
    """The first run: {test: seconds, functions that it calls}, of those that pass."""
    answer = folder / "calls.json"

    def work() -> int:
        calls = Calls(str(folder / "src" / "rollover"))
        run_tests(tests, calls)
        answer.write_text(json.dumps({"tests": calls.tests, "failed": calls.failed}))
        return 0

    in_child(folder, work, folder / "calls.log")
    if not answer.exists():
        raise SystemExit((folder / "calls.log").read_text()[-3000:])
    found = json.loads(answer.read_text())
    for name in found["failed"]:
        print(f"left out, as it fails without a change: {name}", flush=True)
        found["tests"].pop(name, None)
    return found["tests"]


def known_calls(file: Path | None, tests: list[str], folder: Path) -> dict[str, dict[str, Any]]:
    """What `file` knows of the tests, and a first run of those whose files it does not know."""
    calls = json.loads(file.read_text()) if file is not None and file.exists() else {}
    known, new = set(files_of(calls)), []
    for name in tests:
        path = ROOT / name
        for test in sorted(path.rglob("test_*.py")) if path.is_dir() else [path]:
            relative = str(test.relative_to(ROOT))
            if relative not in known and not any(relative.startswith(left_out) for left_out in LEFT_OUT):
                new.append(relative)
    if new:
        calls |= find_calls(folder, new)
        if file is not None:
            file.write_text(json.dumps(calls))
    return calls


def files_of(tests: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(name.partition("::")[0] for name in tests))


def limits(tests: list[str], calls: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Seconds that each may take."""
    return {name: 60 + 10 * calls[name]["seconds"] for name in tests}


def room_of(mutant: Mutant) -> str:
    """The folder of the tests of its package."""
    folders = Path(mutant.path).relative_to("src/rollover").parts[:-1]
    room = folders[:2] if folders[:1] == ("plugins",) else folders[:1]  # of each plugin by itself
    return "/".join(("tests/unit", *room, ""))


def parts(mutant: Mutant, tests: list[str], calls: dict[str, dict[str, Any]], wider_s: float) -> list[list[str]]:
    """Those of its own file, the others of its room, all others: most files need not be imported, for most mutants.

    Of the others, the quickest first, as many as took `wider_s` together.
    """
    room = room_of(mutant)
    own = f"{room}test_{Path(mutant.path).stem}"
    of_rank: dict[int, list[str]] = {0: [], 1: [], 2: []}
    for name in tests:
        rank = 0 if name.startswith(own) else 1 if name.startswith(room) else 2
        wider_s -= calls[name]["seconds"] if rank == 2 else 0
        if wider_s >= 0 or rank < 2:
            of_rank[rank].append(name)
    return [part for part in of_rank.values() if part]


def tests_of(mutant: Mutant, function: str | None, calls: dict[str, dict[str, Any]]) -> list[str]:
    """What a mutant meets. `function`: `file:name` of what is changed; None: it runs at import, so all of the room."""
    met = [name for name, of in calls.items() if function in of["calls"]]
    if function is None:
        met = [name for name in calls if name.startswith(room_of(mutant))]
    return sorted(met, key=lambda name: calls[name]["seconds"])


def functions_of(source: str) -> list[tuple[int, int, str]]:
    """(first and last line of the body, qualified name) of every function and method that is in no other function."""

    def within(node: ast.AST, prefix: str) -> Iterator[tuple[int, int, str]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                yield from within(child, f"{prefix}{child.name}.")
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield child.lineno, child.end_lineno or child.lineno, prefix + child.name

    return list(within(ast.parse(source), ""))


def function_at(mutant: Mutant, functions: list[tuple[int, int, str]]) -> str | None:
    """The function around a mutant; None: the class or the module, and what a function's head says."""
    around = [name for start, end, name in functions if start < mutant.line <= end]
    return f"{Path(mutant.path).relative_to('src/rollover')}:{around[0]}" if around else None


def meet(
    mutant: Mutant, tests: list[str], calls: dict[str, dict[str, Any]], folder: Path, wider_s: float
) -> dict[str, Any]:
    """Run the tests against one mutant in `folder`, which is as it was afterwards."""
    path, answer = folder / mutant.path, folder / "answer"
    source, times = path.read_text(), path.stat()
    answer.unlink(missing_ok=True)
    path.write_text(mutant.apply(source))
    started = time.monotonic()
    os.utime(path, (time.time(), _NEVER_YET + next(_changes)))  # its compiled form is known by that
    code = 0
    try:
        for part in parts(mutant, tests, calls, wider_s):
            if not code:
                plugin = Meet(limits(part, calls), answer)
                code = in_child(folder, lambda part=part, p=plugin: run_tests(files_of(part), p, "-x"), folder / "log")
    finally:
        path.write_text(source)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    by = answer.read_text() if code and answer.exists() else "" if code == 0 else "the tests could not run"
    return {
        "status": KILLED if code else SURVIVED, "by": by, "tests": len(tests),
        "seconds": round(time.monotonic() - started, 1),
    }  # fmt: skip


def failing_without_a_change(killers: set[str], calls: dict[str, dict[str, Any]], folder: Path) -> set[str]:
    """Which of these tests fail in `folder` as it is: what they killed says nothing."""
    answer = folder / "answer"
    plugin = Meet(limits(sorted(killers & calls.keys()), calls), answer)

    def work() -> int:
        run_tests(files_of(plugin.limits), plugin)
        answer.write_text(json.dumps(plugin.failed))
        return 0

    in_child(folder, work, folder / "killers.log")
    return set(json.loads(answer.read_text()))


def difference(mutant: Mutant, source: str) -> str:
    lines = [text.splitlines(keepends=True) for text in (source, mutant.apply(source))]
    return "".join(difflib.unified_diff(*lines, mutant.path, mutant.path, n=2))


def work_through(
    chosen: dict[int, Mutant], calls: dict[str, dict[str, Any]], folder: Path, results: Path, wider_s: float
) -> None:
    """Every mutant, one after the other; a line of `results` for each."""
    sources = {m.path: (folder / m.path).read_text() for m in chosen.values()}
    functions = {path: functions_of(source) for path, source in sources.items()}
    for number, mutant in chosen.items():
        tests = tests_of(mutant, function_at(mutant, functions[mutant.path]), calls)
        row = {"number": number, "file": mutant.path, "line": mutant.line, "kind": mutant.kind}
        row |= meet(mutant, tests, calls, folder, wider_s) | {"diff": difference(mutant, sources[mutant.path])}
        with results.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{number:4} {row['status']:8} {mutant.path}:{mutant.line} {mutant.kind} {row['seconds']} s {row['by']}",
              flush=True)  # fmt: skip


def report(rows: list[dict[str, Any]], seed: int, sites: int) -> str:
    count = Counter(row["status"] for row in rows)
    lines = [f"seed {seed}: {len(rows)} of {sites} mutants, {count[KILLED]} killed, {count[SURVIVED]} survived"]
    by_file: dict[str, Counter[str]] = defaultdict(Counter)
    for row in rows:
        by_file[row["file"]][row["status"]] += 1
    lines += [f"  {path}: {of[KILLED]} killed, {of[SURVIVED]} survived" for path, of in sorted(by_file.items())]
    for row in rows:
        if row["status"] == SURVIVED:
            lines += ["", f"{row['number']}: {row['kind']}, {row['tests']} tests", row["diff"].rstrip("\n")]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="which mutants are drawn")
    parser.add_argument("--num", type=int, default=200, help="how many mutants are drawn")
    parser.add_argument("--files", nargs="+", default=CORE, help="files and folders below src/rollover")
    parser.add_argument("--only", type=int, nargs="+", help="numbers of the drawn mutants to run; otherwise all")
    parser.add_argument("--tests", nargs="+", default=TESTS, help="what the first run runs")
    parser.add_argument("--calls", type=Path, help="what the first run found: read if it is there, else written")
    parser.add_argument(
        "--wider-s", type=float, default=120, help="seconds' worth of tests outside its room that a mutant meets"
    )
    parser.add_argument("--workers", type=int, default=1, help="mutants that are run at once")
    parser.add_argument("--out", default="mutation", help="OUT.json and OUT.txt are written")
    args = parser.parse_args()
    # Before torch is imported: bit equality is claimed for one thread, and a fork has no others.
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in HEAVY:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)

    every: list[Mutant] = []
    for name in args.files:
        path = ROOT / "src" / "rollover" / name
        for file in sorted(path.glob("*.py")) if path.is_dir() else [path]:
            every += mutants(file.read_text(), str(file.relative_to(ROOT)))
    drawn = random.Random(args.seed).sample(every, min(args.num, len(every)))
    numbers = args.only if args.only else list(range(len(drawn)))
    with tempfile.TemporaryDirectory(prefix="mutation-") as temporary:
        folders = [copy_repository(Path(temporary) / str(i)) for i in range(args.workers)]
        calls = known_calls(args.calls, args.tests, folders[0])
        results, workers = Path(temporary) / "results", []
        for i, folder in enumerate(folders):
            chosen = {number: drawn[number] for number in numbers[i :: len(folders)]}
            if (worker := os.fork()) == 0:
                try:
                    work_through(chosen, calls, folder, results, args.wider_s)
                finally:
                    sys.stdout.flush()
                    os._exit(0)
            workers.append(worker)
        for worker in workers:
            os.waitpid(worker, 0)
        rows = sorted(map(json.loads, results.read_text().splitlines()), key=lambda row: row["number"])
        for name in sorted(failing_without_a_change({row["by"] for row in rows}, calls, folders[0])):
            print(f"fails without a change too, now: {name}", flush=True)
            for row in rows:
                row["status"] = SURVIVED if row["by"] == name else row["status"]
    Path(f"{args.out}.json").write_text(
        json.dumps({"seed": args.seed, "mutants": len(every), "results": rows}, indent=1)
    )
    text = report(rows, args.seed, len(every))
    Path(f"{args.out}.txt").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
