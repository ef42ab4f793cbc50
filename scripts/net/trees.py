"""Trees of the repository, and runs of the command line in them. Nothing of the package is imported.

A run is seen from outside only: its exit code, its output, the files of its directory and its processes.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from .modes import Mode, write

REPOSITORY = Path(__file__).resolve().parents[2]
LIMIT_S = 300.0
_MARK = "ROLLOVER_NET"


_NAMES = ("CONFIG", "METRICS", "RECORDS", "TENSORS", "CODE", "NEW_METRICS", "NEW_RECORDS")
NO_RENAMES: dict[str, Any] = {**{name: {} for name in _NAMES}, "recipe": lambda tables: tables}


class Failed(Exception):
    """A part of the net found a fault; the message says where."""


@dataclass(frozen=True)
class Tree:
    """A checkout, and its table of renames: an empty one where it has none."""

    name: str
    path: Path

    @property
    def renames(self) -> dict[str, Any]:
        file = self.path / "scripts" / "net" / "renames.py"
        return runpy.run_path(str(file)) if file.exists() else NO_RENAMES

    def environment(self) -> dict[str, str]:
        """One thread everywhere; the package is this tree's."""
        return {
            **{name: value for name, value in os.environ.items() if not name.startswith("ROLLOVER_")},
            "PYTHONPATH": str(self.path / "src"),
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }

    def start(self, words: list[str], folder: Path, environment: dict[str, str], log: Path) -> Any:
        """`rollover WORDS` in `folder`, with both outputs in `log`: a subprocess.Popen, or what has its methods."""
        with log.open("w") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "rollover", *words],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def check(self) -> None:
        """Raise Failed where another tree's package would be imported."""
        words = [sys.executable, "-c", "import rollover; print(rollover.__file__)"]
        found = subprocess.run(words, env=self.environment(), capture_output=True, text=True, check=True).stdout
        if not Path(found.strip()).is_relative_to(self.path.resolve() / "src"):
            raise Failed(f"{self.name}: imports {found.strip()}, not the package in {self.path}")


CURRENT = Tree("current", REPOSITORY)


@contextlib.contextmanager
def checkout(commit: str, folder: Path) -> Iterator[Tree]:
    """The tree of a commit in a git worktree, which is removed at the end."""
    path = folder / "before"
    git = ["git", "-C", str(REPOSITORY), "worktree"]
    subprocess.run([*git, "add", "--detach", "--quiet", str(path), commit], check=True)
    try:
        tree = Tree("before", path)
        tree.check()
        yield tree
    finally:
        subprocess.run([*git, "remove", "--force", str(path)], check=False)


class Process:
    """`rollover train` of a recipe, in a session and a folder of its own."""

    def __init__(self, tree: Tree, folder: Path, *words: str) -> None:
        self.run_dir, self.log = folder / "run", folder / f"log-{time.time_ns()}.txt"
        self.mark = uuid.uuid4().hex
        self.started = time.time()
        environment = {**tree.environment(), _MARK: self.mark}
        self._process = tree.start(["train", "recipe.toml", *words], folder, environment, self.log)

    def ended(self) -> bool:
        return self._process.poll() is not None

    def finish(self) -> None:
        """Wait for the end. Raises Failed where it fails, hangs, or leaves a process."""
        try:
            code = self._process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise Failed(f"no end after {LIMIT_S:.0f} s: {self.output()}") from None
        if code:
            raise Failed(f"exit code {code}: {self.output()}")
        self.no_children()

    def kill_at(self, reached: Callable[[], bool], number: int = signal.SIGKILL) -> bool:
        """Send the signal as soon as `reached`, and wait for the end. False if the run ended before that.

        Raises Failed where SIGTERM leaves another exit code than 130, or no checkpoint of the last step.
        """
        limit = time.monotonic() + LIMIT_S
        while not self.ended():
            if reached():
                self.stop() if number == signal.SIGTERM else self.kill()
                return True
            if time.monotonic() > limit:
                self.kill()
                raise Failed(f"the place of the kill did not come in {LIMIT_S:.0f} s: {self.output()}")
            time.sleep(0.0005)
        if self._process.returncode:
            raise Failed(f"exit code {self._process.returncode} before the kill: {self.output()}")
        return False

    def stop(self) -> None:
        """SIGTERM: the run ends in order, and leaves a checkpoint of its last step."""
        self._process.send_signal(signal.SIGTERM)
        code = self._process.wait(LIMIT_S)
        lines = (self.run_dir / "metrics.jsonl").read_bytes().splitlines()
        if code == -signal.SIGTERM and (self.run_dir / "finished").exists():
            code = 0  # the run was over: Python takes its handlers back before the process ends
        if code and (code != 130 or not (self.run_dir / f"checkpoints/step-{len(lines):06}/COMMITTED").exists()):
            raise Failed(f"SIGTERM: exit code {code} after {len(lines)} steps: {self.output()}")
        self.no_children()

    def kill(self) -> None:
        """SIGKILL of the leader alone. Raises Failed where a child outlives it by 30 s; that one is then killed."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        self.no_children()

    def no_children(self) -> None:
        limit = time.monotonic() + 30
        while left := self._family():
            if time.monotonic() > limit:
                names = [" ".join(p.cmdline())[:120] for p in left]
                for process in left:
                    process.kill()
                raise Failed(f"child processes outlived the run: {names}")
            time.sleep(0.02)

    def _family(self) -> list[psutil.Process]:
        """The living processes that inherited the mark of this run."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(_MARK) == self.mark:
                    found.append(process)
        return found

    def output(self) -> str:
        """The last lines."""
        return " / ".join(self.log.read_text(errors="replace").strip().splitlines()[-4:])


class Bench:
    """A temporary folder of runs; an uninterrupted run of a tree and a mode is made once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._whole: dict[tuple[str, str], Path] = {}
        self._number = 0

    def recipe(self, tree: Tree, mode: Mode, pause_s: float = 0.0) -> Path:
        """The folder of a new recipe."""
        self._number += 1
        folder = self.folder / f"{self._number:03}-{mode.name}-{tree.name}"
        write(mode, folder, tree.renames, pause_s=pause_s)
        return folder

    def whole(self, tree: Tree, mode: Mode) -> Path:
        """The folder of an uninterrupted run."""
        key = (tree.name, mode.name)
        if key not in self._whole:
            folder = self.recipe(tree, mode)
            Process(tree, folder).finish()
            self._whole[key] = folder
        return self._whole[key]

    def again(self, tree: Tree, mode: Mode) -> Path:
        """The folder of one more uninterrupted run."""
        self._whole.pop((tree.name, mode.name), None)
        return self.whole(tree, mode)


@contextlib.contextmanager
def bench(keep: bool = False) -> Iterator[Bench]:
    folder = Path(tempfile.mkdtemp(prefix="rollover-net-"))
    try:
        yield Bench(folder)
    finally:
        if keep:
            print(f"kept: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
