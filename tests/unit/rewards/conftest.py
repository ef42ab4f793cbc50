"""The working directory of tests with real reward workers."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: functions.py in it holds the test module's FUNCTIONS."""
    (tmp_path / "functions.py").write_text(request.module.FUNCTIONS)
    monkeypatch.chdir(tmp_path)
    return tmp_path
