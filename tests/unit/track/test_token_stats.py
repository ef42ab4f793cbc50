"""How what training made of each token is written: rounded, and read back as it was, from both formats."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recorded_run import group, recorded
from rollover.track.records import Format, RolloutRecorder, read_records, read_rollouts
from rollover.track.token_stats import KEYS, TokenStats, by_token, mask_from_run_lengths, rounded, run_lengths
from rollover.track.tracker import RecordedCredit, RecordedGroup


@given(st.lists(st.booleans()))
def test_a_mask_is_its_runs(mask: list[bool]) -> None:
    lengths = run_lengths(np.array(mask, bool))
    assert sum(lengths) == len(mask) and all(lengths[1:]), lengths
    assert mask_from_run_lengths(lengths).tolist() == mask


@given(st.lists(st.floats(width=32), min_size=1))
def test_numbers_have_five_digits(values: list[float]) -> None:
    array = np.array(values, np.float32)
    (found,) = rounded(array[None])
    if not np.isfinite(array).any():
        assert found is None
        return
    assert found is not None
    shown = found * len(values) if len(found) == 1 else found
    for value, told in zip(array.tolist(), shown, strict=True):
        if not np.isfinite(value):
            assert told is None
            continue
        assert told is not None and told == pytest.approx(value, rel=1e-4, abs=1e-18)
        if 1e-12 < abs(value) < 1e9:
            mantissa = repr(abs(told)).partition("e")[0].replace(".", "").strip("0")
            assert len(mantissa) <= 6 or abs(value) > 1e5, told


def test_one_number_stands_for_all() -> None:
    rows = np.array([[0.25, 0.25], [0.0, 0.0], [-0.0, 1.0], [0.25, np.nan], [np.nan, np.inf]], np.float32)
    assert rounded(rows) == [[0.25], [0.0], [0.0, 1.0], [0.25, None], None]


def stats() -> TokenStats:
    return TokenStats(
        mask=np.array([True, False, True, True]),
        rejected=np.array([False, True, False]),
        advantages=np.full(3, -0.5, np.float32),
        importance_weights=np.array([1.0, 2.5, 0.333333], np.float32),
        loss_weights=np.array([1.0, 0.0, 0.333333], np.float32),
        entropies=np.array([0.1234567, np.nan, 2.0], np.float32),
    )


BY_TOKEN = {
    "mask": [True, False, True, True],
    "rejected": [False, False, True, False],
    "advantages": [-0.5, None, -0.5, -0.5],
    "importance_weights": [1.0, None, 2.5, 0.33333],
    "loss_weights": [1.0, None, 0.0, 0.33333],
    "entropies": [0.12346, None, None, 2.0],
}


def told(of: RecordedGroup) -> RecordedGroup:
    credit = RecordedCredit(0, 0.75, {"overlong": -0.25}, 0.125, "")
    left_out = RecordedCredit(None, None, {}, None, "truncated: ended at the length limit")
    return replace(of, credits=[credit, left_out], tokens=[stats(), None])


@pytest.mark.parametrize("of_format", ["jsonl", "parquet"])
def test_it_comes_back_from_either_format(tmp_path: Path, of_format: Format) -> None:
    if of_format == "parquet":
        pytest.importorskip("pyarrow")
    recorder = RolloutRecorder(tmp_path, formats=(of_format,))
    recorder.write(1, [told(recorded(group(0, [1.0, 0.0], num_tokens=4)))])
    recorder.write(1, [recorded(group(1, [1.0]))])
    first, second, third = read_records(tmp_path)
    found: Any = by_token(first)
    assert found.keys() == BY_TOKEN.keys()
    for name, values in BY_TOKEN.items():
        assert [None if x is None else pytest.approx(x, rel=1e-6) for x in values] == found[name], name
    assert first["credit"] == {
        "compared": 0,
        "reward": 0.75,
        "terms": {"overlong": -0.25},
        "kl_penalty": 0.125,
        "left_out": None,
    }
    assert second["credit"] == {
        "compared": None, "reward": None, "terms": None, "kl_penalty": None,
        "left_out": "truncated: ended at the length limit",
    }  # fmt: skip
    assert by_token(second) is by_token(third) is None and third["credit"] is None
    assert all(second[key] is None for key in KEYS)
    ((one, _),) = read_rollouts(tmp_path)
    assert one.rollouts[0].num_tokens == 4


def test_a_line_is_as_it_is_documented(tmp_path: Path) -> None:
    path = RolloutRecorder(tmp_path).write(1, [told(recorded(group(0, [1.0, 0.0], num_tokens=4)))])
    line = path.read_text().splitlines()[0]
    assert line.endswith(
        '"loss_mask": [0, 1, 1, 2], "rejected": [2, 1, 1], "advantages": [-0.5], "importance_weights":'
        ' [1.0, 2.5, 0.33333], "loss_weights": [1.0, 0.0, 0.33333], "entropies": [0.12346, null, 2.0]}'
    )
    assert list(json.loads(line))[-len(KEYS) - 2 :] == ["token_ids", "logprobs", *KEYS]


def test_a_mask_of_another_length_is_said() -> None:
    with pytest.raises(ValueError, match="loss_mask is of 4 tokens, and there are 5"):
        by_token(stats().record() | {"num_tokens": 5})
