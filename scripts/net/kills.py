"""The kill matrix: SIGKILL at a place x mode, then `--resume`. Places are events seen in the run directory.

resumed(...)   checks a resumed run: every step, group and token once, and the weights of an uninterrupted run
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from .compare import check_run, compare_rows, compare_tensors, metrics_of, records_of, tensors_of
from .modes import MODES, STEPS, Mode
from .trees import Bench, Failed, Process, Tree

PAUSE_S = 0.06  # of each reward: steps of some 0.3 s
TOLERANCE = 1e-4  # of weights: tokens that were decoded before are prefilled after a kill, which rounds otherwise
Place = Callable[[Path, random.Random], Callable[[], bool]]


def _journal(run: Path) -> dict[str, int]:
    """Bytes of each journal file; of the rollout records, too, for the mode without a journal."""
    sizes = {}
    for file in (*(run / "journal").glob("*"), *(run / "rollouts").glob("*")):
        try:
            sizes[file.name] = file.stat().st_size
        except FileNotFoundError:
            continue
    return sizes


def _grown(run: Path, since: dict[str, int]) -> bool:
    return any(size > since.get(name, 0) for name, size in _journal(run).items())


def _committed(run: Path) -> list[str]:
    return sorted(path.parent.name for path in (run / "checkpoints").glob("step-*/COMMITTED"))


def _unfinished(run: Path) -> bool:
    """Whether a checkpoint is being written."""
    folder = run / "checkpoints"
    return folder.exists() and any(not (path / "COMMITTED").exists() for path in folder.iterdir())


def _lines(file: Path) -> int:
    try:
        return file.read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def _once_then(first: Callable[[], bool], then: Callable[[], Callable[[], bool]]) -> Callable[[], bool]:
    """A condition that begins to count when another one was met."""
    later: list[Callable[[], bool]] = []

    def reached() -> bool:
        if not later and first():
            later.append(then())
        return bool(later) and later[0]()

    return reached


def _after_checkpoint(run: Path, rng: random.Random) -> Callable[[], bool]:
    def journal_grows() -> Callable[[], bool]:
        since = _journal(run)
        return lambda: _grown(run, since)

    return _once_then(lambda: bool(_committed(run)), journal_grows)


def _after_next_step(run: Path, rng: random.Random) -> Callable[[], bool]:
    """The journal has a whole step since the checkpoint, and a part of another one."""

    def journal_grows() -> Callable[[], bool]:
        since = _journal(run)
        return lambda: _grown(run, since)

    rows = run / "metrics.jsonl"
    return _once_then(lambda: any(_lines(rows) > int(name[-6:]) for name in _committed(run)[-1:]), journal_grows)


def _random_instant(run: Path, rng: random.Random) -> Callable[[], bool]:
    """Up to 2 s after the first row, or, of a resumed run, after it touched its files."""
    began, wait_s = time.time(), rng.random() * 2

    def pause() -> Callable[[], bool]:
        until = time.monotonic() + wait_s
        return lambda: time.monotonic() > until

    def begun() -> bool:
        file = run / "trace.jsonl"
        return file.exists() and file.stat().st_mtime > began and _lines(file) > 0

    return _once_then(begun, pause)


def _resuming(run: Path, rng: random.Random) -> Callable[[], bool]:
    """Up to 50 ms after the first file changed: the run reads its checkpoint and journal, and cuts its files."""
    began, wait_s = time.time(), rng.random() * 0.05

    def pause() -> Callable[[], bool]:
        until = time.monotonic() + wait_s
        return lambda: time.monotonic() > until

    def touched() -> bool:
        try:
            return any(path.stat().st_mtime > began for path in run.iterdir())
        except FileNotFoundError:
            return False

    return _once_then(touched, pause)


def _trace_grows(run: Path, rng: random.Random) -> Callable[[], bool]:
    def grows() -> Callable[[], bool]:
        since = _lines(run / "trace.jsonl")
        return lambda: _lines(run / "trace.jsonl") > since

    return _once_then(lambda: _lines(run / "metrics.jsonl") >= 2, grows)


_JOURNAL: Place = lambda run, rng: lambda: sum(_journal(run).values()) > 0  # noqa: E731
# One place a kill: the run is resumed in between.
PLACES: dict[str, tuple[Place, ...]] = {
    "first journal bytes": (_JOURNAL,),
    "journal after a checkpoint": (_after_checkpoint,),
    "a step after a checkpoint": (_after_next_step,),
    "checkpoint being written": (lambda run, rng: lambda: _unfinished(run),),
    "checkpoint committed": (lambda run, rng: lambda: bool(_committed(run)),),
    "metrics row written": (lambda run, rng: lambda: _lines(run / "metrics.jsonl") >= 3,),
    "rollouts of a step": (lambda run, rng: lambda: (run / "rollouts" / "step-000003.jsonl").exists(),),
    "trace grows": (_trace_grows,),
    "model being written": (lambda run, rng: lambda: (run / "model").exists(),),
    "random instant": (_random_instant,),
    "twice in a row": (_random_instant, _random_instant),
    "during resume": (_after_next_step, _resuming),
}


def resumed(bench: Bench, folder: Path, current: Tree, mode: Mode, *, whole: Tree) -> list[str]:
    """Resume a killed run with the current tree, wait for its end, and check it. `whole`: the tree to compare with."""
    Process(current, folder, "--resume").finish()
    out = check_run(folder / "run", mode, STEPS)
    if mode.exact and mode.synchronous:
        runs = bench.whole(whole, mode) / "run", folder / "run"
        weights = [{k: t for k, t in tensors_of(run).items() if k.startswith("model/")} for run in runs]
        out += compare_tensors(weights[0], weights[1], TOLERANCE)
        tokens = [
            [{key: r[key] for key in ("rollout_id", "task_id", "step", "token_ids", "score")} for r in records_of(run)]
            for run in runs
        ]
        out += compare_rows(tokens[0], tokens[1], key=("rollout_id",), where="rollouts")
    return out


def killed(tree: Tree, folder: Path, places: tuple[Place, ...], rng: random.Random) -> bool:
    """Start a run, kill it at each place. False where it ended before the first one."""
    for number, place in enumerate(places):
        process = Process(tree, folder, *(["--resume"] if number else []))
        if not process.kill_at(place(folder / "run", rng)):
            return number > 0  # a resumed run may have little left to do
        steps = [row["step"] for row in metrics_of(folder / "run")]
        if steps != list(range(1, len(steps) + 1)):
            raise Failed(f"metrics.jsonl has steps {steps} after kill {number + 1}")
    return True


def kill_case(bench: Bench, current: Tree, mode: Mode, place: str, seed: int) -> list[str]:
    """One cell of the matrix. A run that ends before its place is tried twice more."""
    rng = random.Random(f"{seed} {mode.name} {place}")
    for _ in range(3):
        folder = bench.recipe(current, mode, PAUSE_S)
        if killed(current, folder, PLACES[place], rng):
            return resumed(bench, folder, current, mode, whole=current)
        shutil.rmtree(folder)
    return [f"the place {place!r} was missed three times"]


def selection(seed: int, num: int) -> list[tuple[str, str]]:
    """`num` cells (mode, place): every mode once, then again; places rotate with the seed."""
    modes, places = list(MODES), list(PLACES)
    order = random.Random(seed)
    order.shuffle(modes)
    order.shuffle(places)
    return [(modes[i % len(modes)], places[(i + i // len(modes)) % len(places)]) for i in range(num)]


def resume_case(bench: Bench, before: Tree, current: Tree, mode: Mode) -> list[str]:
    """Kill a run of the tree before in the second step after a checkpoint; resume it with the current tree."""
    rng = random.Random(mode.name)
    for _ in range(3):
        folder = bench.recipe(before, mode, PAUSE_S)
        if killed(before, folder, (_after_next_step,), rng):
            # The recipe as the current tree reads it; what the run recorded itself stays under the old names.
            fresh = bench.recipe(current, mode, PAUSE_S)
            shutil.copy(fresh / "recipe.toml", folder / "recipe.toml")
            shutil.copy(fresh / "functions.py", folder / "functions.py")
            return resumed(bench, folder, current, mode, whole=before)
    return ["the run ended before the kill three times"]
