"""External trackers of a run (`track.trackers = ["wandb"]`): one adapter process per tracker.

    run ──send──▶ AdapterProcess ──▶ child.py ──▶ adapter
    run ◀─messages── replies ◀──────────┘

Sends rows as they are and a sample of the rollouts; reports adapters that fail, hang or fall behind. Training never
waits for an adapter. The end of the run waits at most track.finish_s, and track.artifacts_s while files are uploaded.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import secrets
import subprocess
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollover.config import TrackConfig
from rollover.files import atomic_write_text
from rollover.plugins.trackers.adapter import redacted, without_secrets
from rollover.plugins.trackers.sample import sample_of
from rollover.processes import child_environment
from rollover.track.jsonl import to_json
from rollover.track.tracker import CountingTracker, Cut, RecordedGroup, Row, RunInfo
from rollover.workers.worker import Reply, Worker

logger = logging.getLogger(__name__)

ID_FILE = "tracked_as"
FINISHED = "finished"  # file of a run with all its steps
_SILENT_S = 60.0
_LAST_TWO = 2  # messages: the artifacts, and the end


class ExternalTrackers(CountingTracker):
    """The tracker that sends the events of a run to the adapter processes `names`; ValueError if one is not
    installed."""

    def __init__(self, names: Sequence[str], config: TrackConfig) -> None:
        for name in names:
            check_installed(name)
        self._config = config
        self.adapters = [AdapterProcess(name, ADAPTERS[name].adapter, config.tracker_rollouts) for name in names]
        self._silent: set[str] = set()
        self._lossy: set[str] = set()
        self._failed = False
        self._finished = Path()

    @property
    def wants_groups(self) -> bool:
        return self._config.tracker_rollouts > 0

    def on_start(self, run: RunInfo) -> None:
        about = {
            "id": run_id(run.directory),
            "name": run.name,
            "directory": str(run.directory.absolute()),
            "project": self._config.project,
            "group": self._config.group,
            "entity": self._config.entity,
            "tags": list(self._config.tags),
            "config": without_secrets(to_json(run.config)),
        }
        self._finished = run.directory / FINISHED
        for adapter in self.adapters:
            adapter.start()
        self._send({"about": about}, always=True)

    def truncate(self, cut: Cut) -> None:
        self._send({"cut": cut.step}, always=True)

    def on_step(self, row: Row) -> None:
        self._send({"row": to_json(row)})
        now = time.monotonic()
        for adapter in self.adapters:
            if not adapter.num_pending or now < adapter.last_reply_at + _SILENT_S:
                self._silent.discard(adapter.name)
            elif adapter.name not in self._silent:
                self._silent.add(adapter.name)
                logger.warning(
                    f"track.trackers: {adapter.name} has taken nothing for {now - adapter.last_reply_at:.0f} s"
                    f" ({adapter.num_pending} messages are pending); the run continues without waiting"
                )
            if adapter.lost and adapter.name not in self._lossy:
                self._lossy.add(adapter.name)
                logger.warning(
                    f"track.trackers: {adapter.name} does not keep up, or has ended: lost messages are counted"
                    " (trackers/lost). They are sent again from the files of the run when it recovers, or with"
                    " --resume"
                )
        self._relay()

    def on_eval(self, row: Mapping[str, Any]) -> None:
        self._send({"eval": to_json(row)})

    def on_groups(self, step: int, groups: Sequence[RecordedGroup]) -> None:
        if rows := sample_of(step, groups, self._config.tracker_rollouts):
            self._send({"rollouts": rows, "step": step})

    def on_phase(self, name: str) -> None:
        self._failed = name == "stopped"
        self._relay()

    def close(self) -> None:
        config, deadline = self._config, time.monotonic() + self._config.finish_s
        try:
            hands_over = bool(config.artifacts) and not self._failed and self._finished.is_file()
            if hands_over:
                self._send({"artifacts": config.artifacts}, always=True)
            for adapter in self.adapters:
                adapter.close(self._failed)
            for adapter in self.adapters:
                if adapter.wait(max(0.0, deadline - time.monotonic())) or not adapter.num_pending:
                    continue
                if hands_over and adapter.num_pending <= _LAST_TWO:
                    self._wait_for_artifacts(adapter, deadline + config.artifacts_s)
                else:
                    adapter.messages.append(
                        f"track.trackers: {adapter.name} had not taken {adapter.num_pending} messages"
                        f" {config.finish_s:g} s after the end (track.finish_s), and was ended"
                    )
        finally:
            for adapter in self.adapters:
                adapter.kill()
        self._relay()

    def stats(self) -> dict[str, float]:
        """Return the numbers of failures and of lost messages."""
        return {
            "trackers/failed": sum(adapter.failures for adapter in self.adapters),
            "trackers/lost": sum(adapter.lost for adapter in self.adapters),
        }

    def _wait_for_artifacts(self, adapter: AdapterProcess, deadline: float) -> None:
        limit_s = self._config.artifacts_s
        names = " and ".join(self._config.artifacts)
        logger.info(
            f"track.trackers: waiting for {adapter.name} to take {names}, for {limit_s:g} s (track.artifacts_s)"
        )
        if not adapter.wait(max(0.0, deadline - time.monotonic())) and adapter.num_pending:
            adapter.messages.append(
                f"track.trackers: {adapter.name} had not taken {names} {limit_s:g} s later, and was ended; they are in"
                f" {self._finished.parent}"
            )

    def _send(self, message: dict[str, Any], *, always: bool = False) -> None:
        for adapter in self.adapters:
            adapter.send(message, always=always)

    def _relay(self) -> None:
        # Called in the thread of the run: the messages come from other threads.
        for adapter in self.adapters:
            while adapter.messages:
                logger.info(adapter.messages.popleft())


def run_id(directory: Path) -> str:
    """Return the run's id for trackers, constant over its processes: 16 hexadecimal digits, in a file of the run."""
    path = directory / ID_FILE
    if not path.exists():
        atomic_write_text(path, secrets.token_hex(8) + "\n")
    return path.read_text().strip()


MAX_PENDING = 256
"""Most messages without a reply; further ones are lost."""
_MAX_MESSAGES = 100
_LISTEN_LIMIT_S = 5.0
_LAST_CHARS = 300


class AdapterProcess:
    """The process of one adapter. Only `wait` blocks. `name`: of the tracker; `arguments`: for child.main."""

    def __init__(self, name: str, *arguments: object) -> None:
        self.name, self._arguments = name, arguments
        self.lost = 0  # messages
        self.failures = 0
        self.messages: deque[str] = deque(maxlen=_MAX_MESSAGES)  # lines for the user
        self.last_reply_at = time.monotonic()  # time of the last reply, or of the first message after an idle time
        self._gap = False
        self._gone, self._closing, self._missed = False, False, False
        self._said: set[str] = set()
        self._worker: Worker | None = None
        self._listener = threading.Thread(target=self._listen, name=f"{name}-listener", daemon=True)
        self._printed = b""  # the end of its output: the last line explains a crash

    @property
    def num_pending(self) -> int:
        """Messages without a reply."""
        return 0 if self._worker is None or self._gone else self._worker.num_pending

    def start(self) -> None:
        """Start the process. It and its children end with this process."""
        try:
            self._worker = Worker(
                self.name,
                "rollover.plugins.trackers.child",
                self.name,
                *self._arguments,
                kept=True,
                environment=child_environment(OMP_NUM_THREADS="1"),
                stderr=subprocess.PIPE,
                on_end=self._on_end,
            )
        except OSError as error:  # no memory for a process, say
            self._ended(f"its process cannot be started ({error})")
            return
        self._listener.start()

    def send(self, message: dict[str, Any], *, always: bool = False) -> None:
        """Send a message without waiting. Beyond MAX_PENDING it is lost and counted, unless `always`."""
        if self._gone or self._worker is None or (self.num_pending >= MAX_PENDING and not always):
            self.lost += 1
            self._gap = True
            return
        if not self.num_pending:
            self.last_reply_at = time.monotonic()
        self._worker.submit(message | {"gap": True} if self._gap else message, self._on_reply)
        self._gap = False

    def close(self, failed: bool) -> None:
        """Send the last message, after which the process ends."""
        self._closing = True
        self.send({"close": failed}, always=True)

    def wait(self, limit_s: float) -> bool:
        """Return whether the process ends within the limit."""
        return self._worker is None or self._worker.wait(limit_s)

    def kill(self) -> None:
        """Kill the process, and return when it has ended."""
        self._gone = True
        if self._worker is not None:
            self._worker.close()

    # The methods below run in threads of the Worker and of the listener.

    def _on_reply(self, reply: Reply) -> bool:
        if isinstance(reply, Exception):
            if not self._gone:
                self.lost += 1
                self._missed = True
            return True
        self.last_reply_at = time.monotonic()
        if "say" in reply:
            self.messages.append(reply["say"])
        elif "failed" in reply:
            self.failures += 1
            again = ", and it is tried again with the next step" if reply.get("again", True) else ""
            self._say(f"failed: {reply['failed']}; the run continues{again}")
        return "done" in reply

    def _on_end(self, worker: Worker) -> None:
        if not self._gone and (self._missed or not self._closing):
            self._ended(f"its process ended{self._last_words()}")

    def _listen(self) -> None:
        assert self._worker is not None and self._worker.stderr is not None
        with self._worker.stderr as pipe:
            while piece := os.read(pipe.fileno(), 1 << 16):
                self._printed = (self._printed + piece)[-10 * _LAST_CHARS :]

    def _ended(self, why: str) -> None:
        self._gone = True
        self.failures += 1
        self._say(f"{why}; the run continues without it")

    def _say(self, what: str) -> None:
        if what not in self._said and len(self._said) < _MAX_MESSAGES:
            self._said.add(what)
            self.messages.append(f"track.trackers: {self.name} {what} (trackers/failed counts; reported once)")

    def _last_words(self) -> str:
        self._listener.join(_LISTEN_LIMIT_S)
        lines = self._printed.decode("utf-8", "replace").strip().splitlines()
        return f" ({redacted(lines[-1])[:_LAST_CHARS]})" if lines else ""


@dataclass(frozen=True)
class AdapterSpec:
    """`adapter`: module:Class; `library`: the package that it imports. Our extra has the name of the tracker."""

    adapter: str
    library: str


_HERE = "rollover.plugins.trackers"
ADAPTERS = {
    "wandb": AdapterSpec(f"{_HERE}.wandb_adapter:Wandb", "wandb"),
    "tensorboard": AdapterSpec(f"{_HERE}.tensorboard_adapter:TensorBoard", "tensorboard"),
    "trackio": AdapterSpec(f"{_HERE}.trackio_adapter:Trackio", "trackio"),
    "mlflow": AdapterSpec(f"{_HERE}.mlflow_adapter:MLflow", "mlflow"),
    "swanlab": AdapterSpec(f"{_HERE}.swanlab_adapter:SwanLab", "swanlab"),
}


def check_installed(name: str) -> None:
    """Raise ValueError with the pip command if the tracker's library is missing."""
    if not is_installed(name):
        raise ValueError(f'track.trackers: {name} is not installed: pip install "rollover[{name}]"')


def is_installed(name: str) -> bool:
    """Return whether the tracker's library is installed, without importing it, which takes seconds."""
    found = importlib.util.find_spec(ADAPTERS[name].library)
    return found is not None and found.origin is not None  # not a bare folder, such as wandb's in the working directory
