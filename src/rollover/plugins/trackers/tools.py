"""All tools of others that a run is shown in: `Tools`, the tracker that hands each event on to the process of each.

Owns what is handed on (rows as they are, a sample of the rollouts), and what is said of a tool that fails, hangs or
does not keep up. None of them holds the run up, but for track.finish_s seconds at its end, and
track.artifacts_s where files of it are to go there.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollover.config import TrackConfig
from rollover.files import atomic_write_text
from rollover.plugins.trackers.names import TOOLS, check_installed
from rollover.plugins.trackers.sample import sample_of
from rollover.plugins.trackers.tool import without_secrets
from rollover.plugins.trackers.tool_process import ToolProcess
from rollover.track.jsonl import to_json
from rollover.track.tracker import Counted, Cut, RecordedGroup, Row, RunInfo

logger = logging.getLogger(__name__)

ID_FILE = "tracked_as"
FINISHED = "finished"  # of a run that has made all its steps
_SILENT_S = 60.0
_LAST_TWO = 2  # messages: the artifacts, and the end


class Tools(Counted):
    """The tools `names` of `track.trackers`. ValueError for one that is not installed."""

    def __init__(self, names: Sequence[str], config: TrackConfig) -> None:
        for name in names:
            check_installed(name)
        self._config = config
        self.tools = [ToolProcess(name, TOOLS[name].tracker, config.tracker_rollouts) for name in names]
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
        for tool in self.tools:
            tool.start()
        self._tell({"about": about}, always=True)

    def truncate(self, cut: Cut) -> None:
        self._tell({"cut": cut.step}, always=True)

    def on_step(self, row: Row) -> None:
        self._tell({"row": to_json(row)})
        now = time.monotonic()
        for tool in self.tools:
            if not tool.under_way or now < tool.last_sign + _SILENT_S:
                self._silent.discard(tool.name)
            elif tool.name not in self._silent:
                self._silent.add(tool.name)
                logger.warning(
                    f"track.trackers: {tool.name} has taken nothing for {now - tool.last_sign:.0f} s"
                    f" ({tool.under_way} messages wait for it); the run goes on without waiting"
                )
            if tool.lost and tool.name not in self._lossy:
                self._lossy.add(tool.name)
                logger.warning(
                    f"track.trackers: {tool.name} does not keep up, or is gone: what it misses is counted"
                    " (trackers/lost). It is told again from the files of the run as soon as it goes on, or with"
                    " --resume"
                )
        self._relay()

    def on_eval(self, row: Mapping[str, Any]) -> None:
        self._tell({"eval": to_json(row)})

    def on_groups(self, step: int, groups: Sequence[RecordedGroup]) -> None:
        if rows := sample_of(step, groups, self._config.tracker_rollouts):
            self._tell({"rollouts": rows, "step": step})

    def on_phase(self, name: str) -> None:
        self._failed = name == "stopped"
        self._relay()

    def close(self) -> None:
        config, deadline = self._config, time.monotonic() + self._config.finish_s
        try:
            hands_over = bool(config.artifacts) and not self._failed and self._finished.is_file()
            if hands_over:
                self._tell({"artifacts": config.artifacts}, always=True)
            for tool in self.tools:
                tool.close(self._failed)
            for tool in self.tools:
                if tool.wait(max(0.0, deadline - time.monotonic())) or not tool.under_way:
                    continue
                if hands_over and tool.under_way <= _LAST_TWO:
                    self._wait_for_artifacts(tool, deadline + config.artifacts_s)
                else:
                    tool.heard.append(
                        f"track.trackers: {tool.name} had not taken {tool.under_way} messages {config.finish_s:g} s"
                        " after the end (track.finish_s), and was ended"
                    )
        finally:
            for tool in self.tools:
                tool.kill()
        self._relay()

    def stats(self) -> dict[str, float]:
        """How often tools failed, and what they lost."""
        return {
            "trackers/failed": sum(tool.failures for tool in self.tools),
            "trackers/lost": sum(tool.lost for tool in self.tools),
        }

    def _wait_for_artifacts(self, tool: ToolProcess, deadline: float) -> None:
        limit_s = self._config.artifacts_s
        names = " and ".join(self._config.artifacts)
        logger.info(f"track.trackers: waiting for {tool.name} to take {names}, for {limit_s:g} s (track.artifacts_s)")
        if not tool.wait(max(0.0, deadline - time.monotonic())) and tool.under_way:
            tool.heard.append(
                f"track.trackers: {tool.name} had not taken {names} {limit_s:g} s later, and was ended; they are in"
                f" {self._finished.parent}"
            )

    def _tell(self, message: dict[str, Any], *, always: bool = False) -> None:
        for tool in self.tools:
            tool.tell(message, always=always)

    def _relay(self) -> None:
        """What was heard of the tools since, in the thread of the run."""
        for tool in self.tools:
            while tool.heard:
                logger.info(tool.heard.popleft())


def run_id(directory: Path) -> str:
    """What tools know the run by, over all its processes: 16 hexadecimal digits, in a file of the run."""
    path = directory / ID_FILE
    if not path.exists():
        atomic_write_text(path, secrets.token_hex(8) + "\n")
    return path.read_text().strip()
