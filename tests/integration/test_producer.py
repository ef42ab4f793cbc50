"""tasks.producer in the real loop: a class of the user's own makes the groups, with the run's engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import runs
from endings import train

from rollover.engine.embedded.engine import EmbeddedEngine

MINE = '''
from rollover.engine.protocol import ExtendRequest
from rollover.run.producer import ready_group
from rollover.types import Prompt, Reward, SamplingParams, Task, rollout_seed

class Mine:
    """Half of each step is one version old: it is generated a step before."""

    def __init__(self, config, tokenizer, engine):
        self.tokenizer, self.engine, self.left = tokenizer, engine, []

    async def produce(self, step, version):
        print("PRODUCE", step, version, flush=True)
        groups, self.left = self.left, []
        while len(groups) < 2:
            groups.append(await self.group(4 * step + len(groups)))
        self.left = [await self.group(4 * step + 2)]
        return groups

    async def group(self, group_id):
        task = Task(f"t{group_id}", "mine", "mine", prompt=f"count to {group_id}")
        prompt_ids = tuple(self.tokenizer(task.prompt)["input_ids"])
        segments = []
        for sibling in range(3):
            seed = rollout_seed(0, task.task_id, 0, sibling)
            request = ExtendRequest(f"{group_id}-{sibling}", Prompt(prompt_ids), (), 12, seed, SamplingParams())
            segments.append(await self.engine.extend(request))
        texts = [self.tokenizer.decode(s[0].token_ids) for s in segments]
        rewards = [Reward(sum(c.isdigit() for c in text) / 12) for text in texts]
        return ready_group(group_id, task, prompt_ids, segments, rewards)
'''


def test_a_run_with_a_producer_of_its_own(tmp_path: Path) -> None:
    rollout = {
        "max_new_tokens": 12,
        **dict.fromkeys(("groups_per_step", "group_size", "in_flight_groups", "interrupt")),
    }
    recipe = runs.write(
        tmp_path,
        steps=6,
        rollout=rollout | {"max_staleness": 1},
        tasks={"producer": f"{tmp_path / 'mine.py'}:Mine"},
        checkpoint={"every_steps": 3, "save_final_model": False},
    )
    (tmp_path / "mine.py").write_text(MINE)
    first = runs.rollover("train", recipe, "--train.num_steps", "4")
    assert first.returncode == 0, first.stderr
    rows = runs.json_lines(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert [row["staleness/max"] for row in rows] == [0, 1, 1, 1], "the engine has the new weights, the old group not"
    assert all(row["tokens/step_trained"] > 0 and row["grad_norm"] > 0 for row in rows)
    assert {r["group_id"] for r in runs.records(tmp_path / "run")} == {4, 5, 6, 9, 10, 13, 14, 17}
    resumed = runs.rollover("train", recipe, "--resume", "--train.num_steps", "6")
    assert resumed.returncode == 0, resumed.stderr
    assert "PRODUCE 5 4" in resumed.stdout and "PRODUCE 4 3" not in resumed.stdout
    assert len(runs.json_lines(tmp_path / "run" / "metrics.jsonl")) == 6


def test_a_producer_that_cannot_be_used_leaves_no_engine_open(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a notebook the process goes on, and the engine's own process would, too."""
    closed: list[EmbeddedEngine] = []
    close = EmbeddedEngine.close

    async def closing(engine: EmbeddedEngine) -> None:
        closed.append(engine)
        await close(engine)

    monkeypatch.setattr(EmbeddedEngine, "close", closing)
    (tmp_path / "mine.py").write_text("class Mine:\n    def __init__(self, *args):\n        pass\n")
    recipe = runs.write(
        tmp_path,
        rollout=dict.fromkeys(("groups_per_step", "group_size", "in_flight_groups", "interrupt")),
        tasks={"producer": f"{tmp_path / 'mine.py'}:Mine"},
    )
    code, text = train(capsys, recipe)
    assert code == 2 and "has no method produce" in text, text
    assert len(closed) == 1
