"""scripts/kernel_times.py: every case runs, and is named once."""

from __future__ import annotations

import json
import sys

import kernel_times
import pytest

from rollover.models import kernels


def test_each_case_is_timed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    if kernels.for_device("cpu") is None:
        pytest.skip("there is no C++ compiler here")
    monkeypatch.setattr(kernel_times, "CACHED", ((1, 5), (3, 4)))
    monkeypatch.setattr(kernel_times, "PROMPTS", ((2, 3),))
    monkeypatch.setattr(kernel_times, "VOCAB", 500)
    monkeypatch.setattr(sys, "argv", ["kernel_times.py", "--repeat", "2", "--layers", "2"])
    kernel_times.main()
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    kinds = [row["case"] for row in rows]
    assert kinds == ["attention"] * 2 + ["prefill"] + ["draw"] * len(kernel_times.DRAWS)
    assert len({row["sizes"] for row in rows}) == len(rows) and all(row["microseconds"] > 0 for row in rows)
