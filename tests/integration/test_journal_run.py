"""SIGKILL between two checkpoints: with the journal a run loses the last moments of what ran, and nothing else."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
import runs

from rollover.checkpoint.store import CheckpointStore

LOGGED = Path(__file__).with_name("logged.py")
JOURNAL_S = 0.2
CHECKPOINT: dict[str, Any] = {"every_steps": 50, "journal_s": JOURNAL_S, "save_final_model": False}
# Nobody else asks the engine how far it is, and no answers are given but for training.
QUIET: dict[str, Any] = {"watchdog": {"rollout_timeout_s": 0.0, "reward_timeout_s": 0.0}, "eval": {"num_tasks": 0}}


class Killed:
    """A run that is killed again and again; `recipe` is resumed each time."""

    def __init__(self, recipe: Path) -> None:
        self.recipe, self.run_dir = recipe, recipe.parent / "run"
        self.metrics = self.run_dir / "metrics.jsonl"
        self.starts = 0
        self.tokens: dict[str, int] = {}  # by rollout, as the last process had them
        self.at_beat: dict[str, int] = {}  # and as it had them when the journal last got them
        self.lost = 0

    def log(self, start: int) -> Path:
        return self.recipe.parent / f"log-{start}.jsonl"

    def steps(self) -> int:
        return len(runs.json_lines(self.metrics))

    def start(self, *words: str) -> runs.Run:
        resume = ["--resume"] if self.starts else []
        self.starts += 1
        said = self.recipe.parent / f"said-{self.starts}"
        return runs.start(self.log(self.starts), "train", self.recipe, *resume, *words, log=said, script=LOGGED)

    def said(self) -> str:
        return (self.recipe.parent / f"said-{self.starts}").read_text()

    def kill(self, seconds: float, more_steps: int) -> None:
        """SIGKILL so many seconds after the process has told `more_steps` more of its steps."""
        before = self.steps()
        process = self.start()
        deadline = time.monotonic() + 600
        log = self.log(self.starts)
        try:
            while self.steps() < before + more_steps or not any(x["kind"] == "extend" for x in runs.json_lines(log)):
                assert process.poll() is None, self.said()
                assert time.monotonic() < deadline
                time.sleep(0.005)
            time.sleep(seconds)
            assert process.poll() is None, self.said()
        finally:
            process.kill()
            process.wait()
        steps = [row["step"] for row in runs.json_lines(self.metrics)]
        assert steps == list(range(1, len(steps) + 1)), "duplicate or missing steps"
        assert len(steps) >= before + more_steps, "told steps are gone"
        self.look()

    def look(self) -> None:
        """What the process began with is what the one before it had, but for the last moments of what ran.

        Those are the steps after its last beat, which ended at most JOURNAL_S and two steps later.
        """
        begun: dict[str, int] = {}
        tokens: dict[str, int] = {}
        at_beat: dict[str, int] = {}
        asked: dict[str, int] = {}
        since: float | None = None  # when the first line after a beat was written
        late = 0  # steps that ended when the next beat was due, or later
        for line in runs.json_lines(self.log(self.starts)):
            at_beat = asked  # nothing comes between the question and the writing
            if since is None:
                since, late = float(line["time"]), 0
            if line["kind"] == "extend":
                begun.setdefault(line["rollout"], line["tokens"])
            elif line["kind"] == "step":
                tokens |= line["tokens"]
                late += line["time"] > since + JOURNAL_S
                assert late <= 2, "one was under way, and one may be begun: more is more than the beat's own time"
            else:
                asked, since = dict(tokens), None
        for rollout, num in begun.items():
            assert num <= self.tokens.get(rollout, 0), "tokens that nobody sampled"
            assert num >= self.at_beat.get(rollout, 0), f"{rollout} lost tokens that the journal had"
            self.lost += self.tokens.get(rollout, 0) - num
        self.tokens, self.at_beat = self.tokens | tokens, self.at_beat | at_beat


def check_whole(run_dir: Path, steps: int, *, tasks_once: bool = True, checkpoints: str = "") -> None:
    """Every step once, the ledger balances in every row, nobody is trained twice, and the trace says the same."""
    rows = runs.json_lines(run_dir / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    for row in rows:
        assert row["tokens/generated"] == row["tokens/trained"] + row["tokens/dropped"] + row["tokens/held"]
    for key in ("tokens/generated", "groups/admitted", "groups/consumed", "rollouts/resumed"):
        values = [row[key] for row in rows]
        assert values == sorted(values), key
    told, store = runs.trace(run_dir), CheckpointStore(checkpoints or str(run_dir / "checkpoints"), keep=2)
    ledger = json.loads(Path(store.open(store.list()[-1])["state.json"]).read_text())["ledger"]
    assert sum(e.tokens for e in told if e.kind in ("park", "act", "finish")) == ledger["generated_tokens"]
    assert sum(e.kind == "consume" for e in told) == rows[-1]["groups/consumed"]
    assert sum(e.kind == "admit" for e in told) == ledger["admitted_groups"]
    assert [e.version for e in told if e.kind == "publish"] == list(range(1, steps + 1))
    records = runs.records(run_dir)
    ids = [r["rollout_id"] for r in records]
    assert len(ids) == len(set(ids)), "a rollout was trained twice"
    assert sum(r["outcome"] == "trained" for r in records) == rows[-1]["groups/consumed"] * 3
    tasks = {r["group_id"]: r["task_id"] for r in records}
    assert len(set(tasks.values())) == len(tasks) or not tasks_once, "a task was given twice"


@pytest.mark.parametrize("kills", [4, pytest.param(40, marks=pytest.mark.slow)])
def test_sigkill_at_random_moments_loses_the_last_moments_only(tmp_path: Path, kills: int) -> None:
    rng = random.Random(kills)
    recipe = runs.write(tmp_path, steps=10_000, rows=20_000, checkpoint=CHECKPOINT, **QUIET)
    run = Killed(recipe)
    for _ in range(kills):
        run.kill(rng.random() * 0.7, rng.randrange(3))
    last = run.steps() + 2
    process = run.start("--train.num_steps", str(last))
    assert process.wait(600) == 0, run.said()
    run.look()
    check_whole(run.run_dir, last)
    journal = list((run.run_dir / "journal").iterdir())
    assert len(journal) == 1, "the files before the last checkpoint are deleted"
