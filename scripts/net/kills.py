"""The kill matrix: SIGKILL at a place x mode, then `--resume`. Places are events seen in the run directory.

resumed(...)   checks a resumed run: every step, group and token once, and what an uninterrupted run has
Before         what a run had when it was killed: the resumed one keeps it
"""

from __future__ import annotations

import random
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from .compare import (
    Row,
    check_run,
    compare_rows,
    compare_tensors,
    held_tokens,
    json_lines,
    metrics_of,
    records_of,
    steady,
    tensors_of,
)
from .modes import MODES, STEPS, Mode
from .trees import Bench, Failed, Process, Tree

PAUSE_S = 0.06  # of each reward: steps of some 0.3 s
# Of weights and metrics: tokens that were decoded before are prefilled after a kill, which rounds otherwise.
TOLERANCE = 1e-4
# Metrics of the processes that made a step: after a kill they differ, and rollouts have a further segment.
OF_PROCESSES = (
    "engine/",
    "kv/",
    "weights/",
    "mismatch/",
    "rollouts/",
    "tokens/step_generated",
    "tokens/step_processed",
)
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
    "SIGTERM": (_random_instant,),
}


@dataclass
class Before:
    """What a run had at its kills: told rows, and the tokens of its newest checkpoint."""

    rows: list[Row] = field(default_factory=list)
    checkpoints: list[str] = field(default_factory=list)  # the newest
    tokens: dict[str, list[int]] = field(default_factory=dict)

    def look(self, run: Path, at: str, mode: Mode) -> None:
        """Raise Failed where something of the kill before is lost."""
        rows = metrics_of(run)
        if (steps := [row["step"] for row in rows]) != list(range(1, len(steps) + 1)):
            raise Failed(f"metrics.jsonl has steps {steps} {at}")
        if mode.keeps_rows and rows[: len(self.rows)] != self.rows:
            raise Failed(f"metrics.jsonl: rows of {len(self.rows)} steps changed or were lost {at}")
        checkpoints = _committed(run)
        if checkpoints[-1:] < self.checkpoints:
            raise Failed(f"checkpoint {self.checkpoints[-1]} is lost {at}: {checkpoints}")
        self.rows, self.checkpoints = rows, checkpoints[-1:]
        final = {r["rollout_id"]: r["token_ids"] for r in records_of(run)}
        for tokens in (held := held_tokens(run)), final:
            for name, ids in self.tokens.items():
                if tokens.get(name, ids)[: len(ids)] != ids:
                    raise Failed(f"rollout {name}: the first {len(ids)} tokens, of a checkpoint, changed {at}")
        self.tokens |= held


def resumed(bench: Bench, folder: Path, current: Tree, mode: Mode, *, whole: Tree, before: Before) -> list[str]:
    """Resume a killed run with the current tree, wait for its end, and check it. `whole`: the tree to compare with."""
    Process(current, folder, "--resume").finish()
    before.look(folder / "run", "after the end", mode)
    out = check_run(folder / "run", mode, STEPS)
    if not (mode.synchronous and (mode.exact or mode.still)):
        return out
    runs = bench.whole(whole, mode) / "run", folder / "run"
    kept = ("rollout_id", "task_id", "attempt", "step", "token_ids", "score", "stop_reason")
    tokens = [[{key: r[key] for key in kept} for r in records_of(run)] for run in runs]
    out += compare_rows(tokens[0], tokens[1], key=("rollout_id",), where="rollouts")
    if mode.exact and whole == current:
        evals = [[steady(row) for row in json_lines(run / "eval.jsonl")] for run in runs]
        out += compare_rows(evals[0], evals[1], key=("step",), where="eval.jsonl", tolerance=TOLERANCE)
        rows = [[{k: v for k, v in steady(row).items() if not k.startswith(OF_PROCESSES)} for row in metrics_of(run)]
                for run in runs]  # fmt: skip
        out += compare_rows(rows[0], rows[1], key=("step",), where="metrics.jsonl", tolerance=TOLERANCE)
    if mode.exact:
        tensors = [{k: t for k, t in tensors_of(run).items() if not k.endswith(":segment_offsets")} for run in runs]
        out += compare_tensors(tensors[0], tensors[1], TOLERANCE)
    return out


def killed(
    tree: Tree, folder: Path, mode: Mode, places: tuple[Place, ...], rng: random.Random, number: int = signal.SIGKILL
) -> Before | None:
    """Start a run, end it at each place by that signal. None where it ended before the first one."""
    before = Before()
    for start, place in enumerate(places):
        process = Process(tree, folder, *(["--resume"] if start else []))
        if not process.kill_at(place(folder / "run", rng), number):
            return before if start else None  # a resumed run may have little left to do
        before.look(folder / "run", f"after kill {start + 1}", mode)
    return before


def kill_case(bench: Bench, current: Tree, mode: Mode, place: str, seed: int) -> list[str]:
    """One cell of the matrix. A run that ends before its place is tried twice more."""
    rng = random.Random(f"{seed} {mode.name} {place}")
    for _ in range(3):
        folder = bench.recipe(current, mode, PAUSE_S)
        number = signal.SIGTERM if place == "SIGTERM" else signal.SIGKILL
        if before := killed(current, folder, mode, PLACES[place], rng, number):
            return resumed(bench, folder, current, mode, whole=current, before=before)
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
        if had := killed(before, folder, mode, (_after_next_step,), rng):
            # The recipe as the current tree reads it; what the run recorded itself stays under the old names.
            fresh = bench.recipe(current, mode, PAUSE_S)
            shutil.copy(fresh / "recipe.toml", folder / "recipe.toml")
            shutil.copy(fresh / "functions.py", folder / "functions.py")
            return resumed(bench, folder, current, mode, whole=before, before=had)
    return ["the run ended before the kill three times"]
