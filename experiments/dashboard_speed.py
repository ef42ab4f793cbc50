"""How soon `rollover view` shows a large run, what that costs its server, and what writing the run had cost.

    python experiments/dashboard_speed.py [--steps 1050] [--rollouts 96] [--tokens 150] [--keep DIR]

Makes a run by the project's own writers (an answer of two policy versions each, a trace of all visits, every metric),
and asks for each view what the page asks, of a server that was started for it: the first time that anybody asks.
"first" is when all answers of the first view are there, "whole" when they are of the whole run, in seconds of the
clock; CPU is the server's. With a busy machine look at the CPU: the clock then tells of the others, too.
"""

from __future__ import annotations

import argparse
import gzip
import http.client
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlparse

import numpy as np

from rollover.plugins.dashboard.page_files import page_files
from rollover.track.jsonl import MetricsFile
from rollover.track.metric_keys import METRICS
from rollover.track.records import RolloutRecorder
from rollover.track.trace import TRACE, TraceEvent, TraceFile
from rollover.track.tracker import RecordedGroup
from rollover.types import Group, Prompt, Reward, Rollout, RolloutState, SamplingParams, Segment, StopReason, Task

GROUP_SIZE, SECONDS_A_STEP = 8, 5.0
TICKS = os.sysconf("SC_CLK_TCK")
CURVES = ",".join([of.key for of in METRICS if "{" not in of.key][:40])
VIEWS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "overview": [
        ("keys", {}),
        ("evaluations", {}),
        ("warnings", {}),
        ("metrics", {"keys": CURVES, "points": 600}),
        ("intervals", {}),
        ("staleness", {}),
    ],
    "rollouts": [("choices", {}), ("rollouts", {"offset": 0, "limit": 50})],
    "sorted": [("choices", {}), ("rollouts", {"sort": "staleness", "order": "down", "limit": 50})],
    "search": [("rollouts", {"text": "no such text", "limit": 50})],
    "over time": [("lanes", {"columns": 1200})],
    "rollout": [("rollout", {"step": 5, "id": "{group}-0", "count": 2000})],
    "ledger": [("ledger", {})],
}
"""What the page asks, view by view."""


def groups_of(step: int, rollouts: int, tokens: int, random_: np.random.Generator) -> list[RecordedGroup]:
    count = max(1, rollouts // GROUP_SIZE)
    told = []
    for number in range((step - 1) * count, step * count):
        task = Task(f"task-{number}", "sums", "own", messages=({"role": "user", "content": "What is it? " * 8},))
        each = []
        for sibling in range(GROUP_SIZE):
            parts = []
            for version, size in ((max(0, step - 2), tokens // 3), (step - 1, tokens - tokens // 3)):
                ids = random_.integers(0, 150_000, size, dtype=np.int32)
                logprobs = -random_.exponential(0.5, size).astype(np.float32)
                parts.append(Segment(ids, logprobs, version, SamplingParams(), StopReason.EOS, True))
            reward = Reward(float(random_.integers(2)))
            each.append(Rollout(number, sibling, task, parts, RolloutState.CONSUMED, StopReason.EOS, reward))
        texts = ["the answer is " + "some words of it " * (tokens // 5) for _ in each]
        told.append(RecordedGroup(Group(number, task, Prompt.of(range(60)), each), texts, [0.5] * len(each)))
    return told


def events_of(step: int, groups: list[RecordedGroup], rng: random.Random) -> list[TraceEvent]:
    now, version = SECONDS_A_STEP * step, step - 1
    found = [TraceEvent("generate_start", now, version), TraceEvent("generate_end", now + 4.8, version)]
    for of in groups:
        group = of.group.group_id
        found.append(TraceEvent("admit", now, version, group))
        for rollout in of.group.rollouts:
            start = now + rng.random()
            cut, end = start + rng.random() * 1.5, start + 1.6 + rng.random()
            segments = [(s.policy_version, len(s)) for s in rollout.segments]
            who = (group, rollout.sibling)
            found += [
                TraceEvent("start", start, version, *who),
                TraceEvent("park", cut, version, *who, tokens=segments[0][1], segments=(segments[0],)),
                TraceEvent("resume", cut + 0.01, version, *who, tokens=segments[0][1]),
                TraceEvent("finish", end, version, *who, tokens=segments[1][1], segments=(segments[1],)),
            ]
        found.append(TraceEvent("consume", now + 4.5, version, group, tokens=1000))
    found.append(TraceEvent("publish", now + 4.9, step))
    return sorted(found, key=lambda event: event.seconds)


def make(folder: Path, steps: int, rollouts: int, tokens: int) -> dict[str, float]:
    """Write the run. Seconds of the processor a step, by what was written."""
    rng, random_ = random.Random(0), np.random.default_rng(0)
    took: dict[str, float] = {"rollouts": 0.0, "trace": 0.0, "metrics": 0.0}
    keys = [of.key for of in METRICS if "{" not in of.key and of.key != "step"]
    (folder / "config.resolved.json").write_text('{"run": {"name": "large"}}')
    recorder, trace = RolloutRecorder(folder / "rollouts"), TraceFile(folder / TRACE)
    with MetricsFile(folder / "metrics.jsonl") as metrics:
        for step in range(1, steps + 1):
            groups = groups_of(step, rollouts, tokens, random_)
            events = events_of(step, groups, rng)
            row = {"step": step} | {key: rng.random() if place % 3 else step for place, key in enumerate(keys)}
            for name, work in (
                ("rollouts", lambda step=step, groups=groups: recorder.write(step, groups)),
                ("trace", lambda events=events: trace.write(events)),
                ("metrics", lambda row=row: metrics.write(row)),
            ):
                begun = time.process_time()
                work()
                took[name] += time.process_time() - begun
    return {name: seconds / steps for name, seconds in took.items()}


class Server:
    """`rollover view` of a run, in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rollover", "view", str(folder)], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.url = urlparse(self.process.stdout.readline().strip())
        assert self.url.hostname and self.url.port
        self.connection = http.client.HTTPConnection(self.url.hostname, self.url.port, timeout=600)
        self.moved = 0

    def get(self, path: str) -> bytes:
        self.connection.request("GET", path, headers={"Accept-Encoding": "gzip"})
        answer = self.connection.getresponse()
        body = answer.read()
        self.moved += len(body)
        if answer.status != 200:
            raise RuntimeError(f"{path}: {answer.status}")
        return gzip.decompress(body) if answer.headers.get("content-encoding") == "gzip" else body

    def ask(self, name: str, query: dict[str, Any]) -> Any:
        return json.loads(self.get(f"/api/runs/0/{name}?{urlencode(query)}"))

    @property
    def cpu(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    @property
    def memory(self) -> int:
        """The most that it ever had, in bytes."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()


def measure(folder: Path, group: int) -> Iterator[str]:
    """A line of a table for each view."""
    for view, questions in VIEWS.items():
        server = Server(folder)
        try:
            begun, cpu = time.monotonic(), server.cpu
            for name in page_files():
                server.get(f"/{name}")
            server.get("/api/runs")

            def ask(questions=questions, server=server) -> None:
                for name, query in questions:
                    given = {key: str(value).format(group=group) for key, value in query.items()}
                    told = server.ask(name, given)
                    while "text" in query and told["next"] is not None:  # as the page does, to the end
                        told = server.ask(name, {**given, "offset": told["next"]})

            ask()
            first, first_cpu, moved = time.monotonic() - begun, server.cpu - cpu, server.moved
            while server.ask("state", {})["reading"]:
                time.sleep(0.05)
            ask()
            whole, whole_cpu = time.monotonic() - begun, server.cpu - cpu
            yield (
                f"| {view} | {first:.2f} s ({first_cpu:.2f} s CPU) | {whole:.2f} s ({whole_cpu:.2f} s CPU) |"
                f" {moved / 1e6:.2f} MB | {server.memory / 2**20:.0f} MiB |"
            )
        finally:
            server.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("steps", 1050), ("rollouts", 96), ("tokens", 150)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--keep", type=Path, help="make the run here, or take the one that is here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "config.resolved.json").exists():
            took = make(folder, args.steps, args.rollouts, args.tokens)
            said = ", ".join(f"{name} {1e3 * seconds:.2f} ms" for name, seconds in took.items())
            print(f"writing a step of {args.rollouts} rollouts of {args.tokens} tokens: {said} of CPU", flush=True)
        sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
        print(f"{sum(sizes) / 1e6:.0f} MB in {len(sizes)} files; load {os.getloadavg()[0]:.1f}", flush=True)
        print("| view, asked cold | first | whole | moved | memory |\n|---|---|---|---|---|", flush=True)
        for line in measure(folder, group=4 * max(1, args.rollouts // GROUP_SIZE)):
            print(line, flush=True)


if __name__ == "__main__":
    main()
