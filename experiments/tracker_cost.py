"""What a tracker whose server never answers costs a run: the share of its steps that is spent on telling it.

    .venv/bin/python experiments/tracker_cost.py [--tools wandb,mlflow,trackio,swanlab,tensorboard] [--steps 40]

The real program (`rollover train`, a tiny model, 9 rollouts a step of which 4 are shown), with each tool in turn. The
server is on loopback: it takes every connection and says nothing. TensorBoard has none: what it costs where all is
well. Counted is what the run's own threads do for the tool, in time (the median of the steps) and in seconds of the
processor, against the steps of the same run; and how long the end is held up. On a busy machine the time is mostly that
of other processes, and seconds of the processor alone say what it costs.
A step of the tiny model takes a tenth of a second: of a real one the share is smaller.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "integration"))
import runs

from rollover.cli import main as rollover
from rollover.plugins.trackers.external import ADAPTERS, ExternalTrackers, is_installed
from rollover.workers.worker import Worker

TOLD = ("truncate", "on_step", "on_eval", "on_groups", "on_phase", "stats")
FINISH_S = 5.0
SERVERS = ("WANDB_BASE_URL", "MLFLOW_TRACKING_URI", "TRACKIO_SERVER_URL", "SWANLAB_API_HOST")


class Spent:
    """Seconds, and of them seconds of the processor, of what is counted; the first as of each step."""

    def __init__(self) -> None:
        self.wall_s = self.cpu_s = 0.0
        self.steps: list[float] = [0.0]

    def counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            wall, cpu = time.perf_counter(), time.thread_time()
            try:
                return function(*args, **options)
            finally:
                self.wall_s += time.perf_counter() - wall
                self.cpu_s += time.thread_time() - cpu
                if function.__name__ == "on_step":
                    self.steps.append(self.wall_s)

        return call


def silent_server() -> str:
    """Its address. It keeps every connection that it takes."""
    server, kept = socket.create_server(("127.0.0.1", 0)), []

    def take() -> None:
        while True:
            kept.append(server.accept())

    threading.Thread(target=take, daemon=True).start()
    return f"http://127.0.0.1:{server.getsockname()[1]}"


def environment(folder: Path) -> None:
    address = silent_server()
    os.environ |= dict.fromkeys(SERVERS, address)
    os.environ |= {"WANDB_API_KEY": "f00dfeed" * 5, "WANDB_MODE": "online", "SWANLAB_API_KEY": "f00dfeed" * 5}
    os.environ |= {
        "SWANLAB_MODE": "online",
        "TRACKIO_WRITE_TOKEN": "f00dfeed" * 5,
        "TRACKIO_DIR": str(folder / "trackio"),
    }


def measure(tool: str, steps: int, folder: Path) -> dict[str, float]:
    told, written, ended = Spent(), Spent(), Spent()
    for name in TOLD:
        setattr(ExternalTrackers, name, told.counted(getattr(ExternalTrackers, name)))
    plain = {name: getattr(Worker, name) for name in ("_write", "_supervise")}
    for name, function in plain.items():  # whole threads: of them only the processor's time counts
        setattr(Worker, name, written.counted(function))
    ExternalTrackers.close = ended.counted(ExternalTrackers.close)
    track = {"trackers": [tool], "finish_s": FINISH_S, "live": "off"}
    recipe = runs.write(folder / tool, steps=steps, rollout={"max_new_tokens": 48}, track=track)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    if code := rollover(["train", str(recipe)]):
        raise SystemExit(f"{tool}: exit code {code}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    rows = runs.json_lines(folder / tool / "run" / "metrics.jsonl")
    of_steps = sum(row["time/step_s"] for row in rows)
    return {
        "steps": len(rows),
        "step_ms": 1e3 * of_steps / len(rows),
        "told_ms": 1e3 * median(after - before for before, after in pairwise(told.steps)),
        "told_cpu_ms": 1e3 * told.cpu_s / len(rows),
        "share": median(after - before for before, after in pairwise(told.steps)) / (of_steps / len(rows)),
        "share_of_processor": told.cpu_s / of_steps,
        "share_of_threads": written.cpu_s / of_steps,
        "end_s": ended.wall_s,
        "children_cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "failed": rows[-1]["trackers/failed"],
        "lost": rows[-1]["trackers/lost"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tools", default=",".join(name for name in ADAPTERS if is_installed(name)))
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    tools = args.tools.split(",")
    if len(tools) > 1:  # each in a process of its own: what is counted in one is not in the next
        for tool in tools:
            words = [sys.executable, __file__, "--tools", tool, "--steps", str(args.steps)]
            if os.spawnv(os.P_WAIT, sys.executable, words):
                raise SystemExit(1)
        return
    with tempfile.TemporaryDirectory() as folder:
        environment(Path(folder))
        found = measure(tools[0], args.steps, Path(folder))
        print(json.dumps({"tool": tools[0]} | {name: round(value, 5) for name, value in found.items()}), flush=True)


if __name__ == "__main__":
    main()
