"""experiments/async_speed.py runs: an engine elsewhere, in a process that computes nothing. Speeds are not tested."""

from __future__ import annotations

import pytest

import async_speed


@pytest.mark.slow
def test_both_modes_are_compared_at_equal_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_speed, "MODEL", {})  # the smallest one: what its figures are is not tested
    out = async_speed.compare("remote_engine", steps=2, repeats=1, say=lambda _: None)
    (result,) = out["runs"]
    assert result["engine"] == "elsewhere" and result["ratio"] > 0
    assert result["synchronous"]["staleness"] == 0 < result["asynchronous"]["staleness"] <= 3
    assert result["synchronous"]["mean_tokens"] == pytest.approx(result["asynchronous"]["mean_tokens"], rel=0.2)
    assert result["synchronous"]["generate_s"] >= 0.9 * out["token_s"] * 80  # the longest of 64 answers
