"""Before the first step: which reward functions are called once."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollover.config import Config
from rollover.run.setup import preflight
from rollover.types import Task

TRACKERS: Any = SimpleNamespace(on_phase=lambda text: None, on_message=lambda text: None)


class Pool:
    def __init__(self) -> None:
        self.probed: list[str] = []

    async def probe(self, task: Task) -> None:
        self.probed.append(task.reward)


@pytest.mark.parametrize(
    ("column", "expected"),
    [("data_source", {"gsm8k", "math_dapo", "exact_match/last_number"}), ("kind", {"exact_match/last_number"})],
)
def test_every_reward_that_data_sources_give_is_called(tmp_path: Path, column: str, expected: set[str]) -> None:
    names = ["openai/gsm8k", "aime2024", None]
    rows = [{"prompt": f"q {i}", column: names[i % 3], "answer": str(i)} for i in range(30)]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"kind": "dataset", "path": str(tmp_path / "d.jsonl")}
    pool: Any = Pool()
    asyncio.run(preflight(Config.model_validate({"tasks": {"sources": [source]}}), pool, TRACKERS))
    assert sorted(pool.probed) == sorted(expected), "each once"
