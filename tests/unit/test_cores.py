"""How many cores a run may use: those that its process may run on, and what a container's limit pays for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rollover.system import cores


@pytest.mark.parametrize(
    ("text", "num"),
    [
        ("max 100000\n", 8),
        ("100000 100000\n", 1),
        ("150000 100000\n", 2),
        ("1000 100000\n", 1),
        ("6400000 100000\n", 8),
        ("", 8),
        ("what is this\n", 8),
    ],
)
def test_a_containers_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, num: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    limit = tmp_path / "cpu.max"
    assert cores(limit) == 8, "there is no such file"
    limit.write_text(text)
    assert cores(limit) == num
