"""Modes, staleness, replay, re-roll, filters, streaming, KV policies: every pair; all of them under `slow`."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import runs

from rollover.cli import main

MODES: dict[str, dict[str, Any]] = {
    "never": {"interrupt": "never"},
    "when_enough": {"interrupt": "when_enough"},
    "token_budget": {"interrupt": "token_budget", "token_budget": 16},
    "supplement": {"interrupt": "when_enough", "supplement": True},
    "one step off": {"overlap": True, "interrupt": "never"},
    "fully async": {"overlap": True, "interrupt": "on_weight_update"},
}
AXES: dict[str, list[Any]] = {
    "mode": list(MODES),
    "staleness": [1, 2],
    "replay": [0, 6],
    "reroll": [0, 1],
    "kv": ["recompute", "keep", "salt"],
    "filters": ["none", "groups", "both"],
    "streaming": [0, 1],
}
# A reward of digits alone rarely differs between two siblings that are cut off early: some groups go, some stay.
FILTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "groups": {"zero_variance": True, "give_up_after_steps": 50},
    "both": {
        "pass_rate_below": 1.0,
        "pass_threshold": 0.03,
        "give_up_after_steps": 50,
        "mask_truncated": True,
        "mask_in_baseline": False,
    },
}
# With streaming the reward is of one sample, so that rollouts are scored as they stop.
EACH = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return sum(c.isdigit() for c in solution_str) / 48
"""
Case = tuple[Any, ...]
ALL: list[Case] = list(itertools.product(*AXES.values()))


def pairwise(cases: list[Case]) -> list[Case]:
    """Few of the cases that hold every pair of values of two axes: greedy."""

    def pairs(case: Case) -> set[tuple[int, Any, int, Any]]:
        return {(i, case[i], j, case[j]) for i, j in itertools.combinations(range(len(case)), 2)}

    missing, chosen = set().union(*map(pairs, cases)), []
    while missing:
        best = max(cases, key=lambda case: len(pairs(case) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return chosen


def recipe(folder: Path, case: Case, steps: int = 3) -> Path:
    mode, staleness, replay, reroll, kv, filters, streaming = case
    kv_on_resume = {} if mode == "never" else {"kv_on_resume": kv}
    (folder / "each.py").write_text(EACH)
    return runs.write(
        folder,
        steps=steps,
        rollout={
            "groups_per_step": 2, "group_size": 2, "max_new_tokens": 32, "max_staleness": staleness,
            "in_flight_groups": 2 * (staleness + (mode != "supplement")), **kv_on_resume, **MODES[mode],
        },
        replay={"size": replay, "max_staleness": 6} if replay else {},
        reroll={"max_groups": reroll, "start_fraction": 0.0, "failed_at_most": 0.5} if reroll else {},
        filters=FILTERS[filters],
        rewards={"function": f"{folder / 'each.py'}:compute_score"} if streaming else {},
        train={"streaming_min_groups": streaming},
        checkpoint={"every_steps": 1, "keep": 1, "save_final_model": False},
        watchdog={"rollout_timeout_s": 60.0},
    )  # fmt: skip


def check(folder: Path, steps: int) -> None:
    """The ledger balanced in every row, no token was beyond its bound, and nothing was trained twice."""
    rows = runs.json_lines(folder / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    for row in rows:
        assert row["tokens/generated"] == row["tokens/trained"] + row["tokens/dropped"] + row["tokens/held"]
        assert row["groups/admitted"] == row["groups/consumed"] + row["groups/dropped"] + row["groups/held"]
        by_filter = sum(value for key, value in row.items() if key.startswith("filtered/"))
        assert row["dropped/filtered/groups"] == by_filter
        assert row["staleness/max"] <= row["staleness/bound"]
        assert row.get("staleness/replayed_max", 0) <= 6
    trained = [r["rollout_id"] for r in runs.records(folder / "run") if r["outcome"] == "trained"]
    assert len(trained) == len(set(trained)) == steps * 4


def name(case: Case) -> str:
    return "-".join(map(str, case))


PAIRS = pairwise(ALL)


def test_the_pairs_are_all_there() -> None:
    for (i, first), (j, second) in itertools.combinations(enumerate(AXES.values()), 2):
        assert {(c[i], c[j]) for c in PAIRS} == set(itertools.product(first, second))
    assert len(PAIRS) < len(ALL) / 4


@pytest.mark.parametrize("case", PAIRS, ids=name)
def test_pairs(tmp_path: Path, case: Case) -> None:
    assert main(["train", str(recipe(tmp_path, case))]) == 0
    check(tmp_path, 3)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in ALL if case not in PAIRS], ids=name)
def test_all(tmp_path: Path, case: Case) -> None:
    assert main(["train", str(recipe(tmp_path, case))]) == 0
    check(tmp_path, 3)
