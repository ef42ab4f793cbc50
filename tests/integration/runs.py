"""A tiny run of the real program: model folder, dataset, reward, configuration, and how to read what it leaves."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher import REPOSITORY as REPOSITORY
from launcher import Run as Run
from launcher import environment as environment

import tiny
from rollover.checkpoint.store import CheckpointStore
from rollover.config.describe import toml_value
from rollover.track.trace import TRACE, TraceEvent, trace_events

REWARD = '''
def reward(prompts, completions, **columns):
    """Share of digits: something a model can learn, and that differs between siblings."""
    return [sum(c.isdigit() for c in text) / 48 for text in completions]
'''


def write(folder: Path, *, steps: int = 4, rows: int = 400, family: str = "llama", **tables: Mapping[str, Any]) -> Path:
    """A recipe with its model and dataset in `folder`; `tables` change or add values. Returns the recipe's path."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "model").exists():
        tiny.save(folder / "model", family)
    (folder / "reward.py").write_text(REWARD)
    with (folder / "tasks.jsonl").open("w") as file:
        for i in range(rows):
            file.write(json.dumps({"prompt": f"count to {i}", "answer": str(i)}) + "\n")
    values: dict[str, dict[str, Any]] = {
        "run": {"name": "tiny", "dir": str(folder / "run"), "threads": 1},
        "model": {"path": str(folder / "model"), "dtype": "float32"},
        "rollout": {
            "groups_per_step": 3,
            "group_size": 3,
            "max_new_tokens": 16,
            "in_flight_groups": 8,
            "interrupt": "when_enough",
            "max_staleness": 2,
        },
        "engine": {"max_running": 8, "kv_memory_gb": 0.1},
        "train": {"num_steps": steps, "learning_rate": 1e-3, "micro_batch_tokens": 256},
        "rewards": {"function": f"{folder / 'reward.py'}:reward"},
        "checkpoint": {"every_steps": 2, "keep": 2},
        "track": {"live": "plain"},
    }
    for table, changes in tables.items():
        values.setdefault(table, {}).update(changes)
    lines = []
    for table, fields in values.items():
        lines.append(f"[{table}]")
        lines += [f"{key} = {toml_value(value)}" for key, value in fields.items() if value is not None]
    lines += ["[[tasks.sources]]", 'kind = "dataset"', f"path = {json.dumps(str(folder / 'tasks.jsonl'))}"]
    path = folder / "recipe.toml"
    path.write_text("\n".join(lines) + "\n")
    return path


def command(*words: str | Path) -> list[str]:
    """As a user starts it. Where it does not matter how it starts, `start` and `rollover` are faster."""
    return [sys.executable, "-m", "rollover", *map(str, words)]


def start(*words: str | int | Path, log: Path | None = None, script: Path | None = None) -> Run:
    """`rollover WORDS` in a process of its own, or `script WORDS`."""
    return Run([str(word) for word in words], log, script)


def rollover(
    *words: str | int | Path, timeout: float = 600, script: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """`start` to its end."""
    run = start(*words, script=script)
    try:
        code = run.wait(timeout)
    finally:
        run.kill()
    return subprocess.CompletedProcess(run.args, code, run.out, run.err)


def rows(folder: Path) -> list[dict[str, Any]]:
    """The metrics of each step of the run in `folder`."""
    return json_lines(folder / "run" / "metrics.jsonl")


def json_lines(path: Path) -> list[dict[str, Any]]:
    """Complete lines only: a killed writer may have left half a line."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


def trace(run_dir: Path) -> list[TraceEvent]:
    """The run's trace, after a check that every event is there once, in order, and that none is told twice."""
    events = list(trace_events(run_dir / TRACE))
    assert [e.seconds for e in events] == sorted(e.seconds for e in events)
    once = Counter((e.kind, e.group, e.sibling) for e in events if e.kind in ("admit", "ready", "consume"))
    once.update(("published", e.version, None) for e in events if e.kind == "publish")
    assert all(n == 1 for n in once.values()), [key for key, n in once.items() if n > 1]
    assert not set(once) & {("consume", e.group, None) for e in events if e.kind == "drop"}
    running: set[tuple[int | None, int | str | None]] = set()
    acting: set[tuple[int | None, int | str | None]] = set()
    finished: set[tuple[int | None, int | str | None]] = set()
    for e in events:
        rollout = (e.group, e.sibling)
        if e.kind == "finish":
            assert rollout not in finished, f"{rollout} is finished twice"
            finished.add(rollout)
        if e.kind == "restart":  # the rollouts of an Episode leave, finished or not, for a new one
            left = {r for r in finished | acting if r[0] == e.group and str(r[1]).partition(".")[0] == str(e.sibling)}
            finished, acting = finished - left, acting - left
        if e.kind in ("start", "resume"):
            assert rollout not in running
            running.add(rollout)
        elif e.kind in ("park", "act") or (e.kind == "finish" and rollout not in acting):
            running.remove(rollout)
        elif e.kind in ("answer", "finish"):
            acting.remove(rollout)
        elif e.kind == "open":  # a further rollout, or the first one, whose agent was at work before its first call
            acting.discard(rollout)
        if e.kind == "again":  # its agent was lost before all of its Episode was scored
            finished.discard(rollout)
        if e.kind in ("act", "begin", "again"):
            acting.add(rollout)
    assert not running, "nothing runs between two steps"
    return events


def records(run_dir: Path, last_step: int | None = None) -> list[dict[str, Any]]:
    """Recorded rollouts of steps up to `last_step`."""
    out = []
    for path in sorted((run_dir / "rollouts").glob("step-*.jsonl")):
        if last_step is None or int(path.stem.removeprefix("step-")) <= last_step:
            out += json_lines(path)
    return out


def check_whole(
    run_dir: Path, steps: int, *, siblings: int = 3, tasks_once: bool = True, checkpoints: str | Path = ""
) -> None:
    """Every step once, the ledger balances in every row, nobody is trained twice, and the trace says the same.

    siblings: trained rollouts of a group; 0: as many as its episodes have. checkpoints: where they are, if not in the
    run's directory."""
    rows = json_lines(run_dir / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    for row in rows:
        assert row["tokens/generated"] == row["tokens/trained"] + row["tokens/dropped"] + row["tokens/held"]
    for key in ("tokens/generated", "groups/admitted", "groups/consumed", "rollouts/resumed"):
        values = [row[key] for row in rows]
        assert values == sorted(values), key
    told, store = trace(run_dir), CheckpointStore(str(checkpoints or run_dir / "checkpoints"), keep=2)
    ledger = json.loads(Path(store.open(store.list()[-1])["state.json"]).read_text())["ledger"]
    assert sum(e.tokens for e in told if e.kind in ("park", "act", "finish")) == ledger["generated_tokens"]
    assert sum(e.kind == "consume" for e in told) == rows[-1]["groups/consumed"]
    assert sum(e.kind == "admit" for e in told) == ledger["admitted_groups"]
    assert [e.version for e in told if e.kind == "publish"] == list(range(1, steps + 1))
    found = records(run_dir)
    ids = [r["rollout_id"] for r in found]
    assert ids and len(ids) == len(set(ids)), "a rollout was trained twice"
    assert not siblings or sum(r["outcome"] == "trained" for r in found) == rows[-1]["groups/consumed"] * siblings
    tasks = {r["group_id"]: r["task_id"] for r in found}
    assert len(set(tasks.values())) == len(tasks) or not tasks_once, "a task was given twice"
