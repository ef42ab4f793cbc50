"""`rollover train` whose reward function misbehaves in every way: training goes on, and counts what was lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import runs

from rollover import cli
from rollover.plugins.dashboard.indexed_run import IndexedRun
from rollover.plugins.dashboard.rollout_detail import rollout_detail
from rollover.track.metrics import validate

# Every second task misbehaves, each kind of failure in turn; a fault is that of one sample, not of its siblings.
REWARD = """
import ctypes, os, threading

def reward(data_source, solution_str, ground_truth, extra_info):
    number = int(ground_truth)
    if number % 2 == 0 and not os.path.exists(f"faults/{number}"):
        os.makedirs("faults", exist_ok=True)
        open(f"faults/{number}", "w").close()
        return (loop, quit, segfault, memory, deadlock, nan, fail)[number // 2 % 7]()
    return sum(c.isdigit() for c in solution_str) / 48

def loop():
    while True:
        pass

def quit():
    os._exit(3)

def segfault():
    ctypes.string_at(0)

def memory():
    return len(bytearray(4 << 30))

def deadlock():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()

def nan():
    return float("nan")

def fail():
    raise KeyError("no such thing")
"""


def test_training_goes_on_while_rewards_misbehave(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = runs.write(
        tmp_path,
        steps=6,
        rows=60,
        tasks={"shuffle": False},
        rewards={
            "function": f"{tmp_path / 'reward.py'}:reward",
            "num_workers": 2,
            "memory_gb": 1.0,
            "timeout_s": 3.0,
        },
    )
    (tmp_path / "reward.py").write_text(REWARD)
    # The probe is no place for faults: it may use the first task of all.
    (tmp_path / "faults").mkdir()
    (tmp_path / "faults" / "0").touch()
    code = cli.main(["train", str(recipe)])
    out = capsys.readouterr()
    assert code == 0 and "Traceback" not in out.err, out.err

    rows = runs.json_lines(tmp_path / "run" / "metrics.jsonl")
    for row in rows:
        validate(row)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    last = rows[-1]
    kinds = ("timeouts", "crashes", "out_of_memory", "errors", "quarantined", "retries")
    counted = [last[f"rewards/{kind}"] for kind in kinds]
    faults = sorted(int(path.name) // 2 % 7 for path in (tmp_path / "faults").iterdir() if path.name != "0")
    of_kind = [sum(fault in kind for fault in faults) for kind in ((0, 4), (1, 2), (3,), (5, 6))]
    assert counted == [*of_kind, 0, 0]
    assert min(of_kind) >= 1, "the run met every kind"
    assert sum(row["reward/missing"] for row in rows) > 0 and last["dropped/too_few_rewards/groups"] == 0
    assert last["rewards/busy_workers"] == last["rewards/queue"] == 0


RANKS = """
def reward(prompts, completions, **columns):
    texts = [text if isinstance(text, str) else text[-1]["content"] for text in completions]
    places = sorted(range(len(texts)), key=lambda i: (sum(map(str.isdigit, texts[i])), texts[i], i))
    return [float(places.index(i)) for i in range(len(texts))]
"""


def test_a_function_that_compares_siblings_sees_each_group_whole(tmp_path: Path) -> None:
    recipe = runs.write(tmp_path, steps=2, rewards={"function": f"{tmp_path / 'ranks.py'}:reward"})
    (tmp_path / "ranks.py").write_text(RANKS)
    assert cli.main(["train", str(recipe)]) == 0
    groups: dict[int, list[float]] = {}
    for record in runs.records(tmp_path / "run"):
        groups.setdefault(record["group_id"], []).append(record["score"])
    assert len(groups) >= 6 and all(sorted(scores) == [0.0, 1.0, 2.0] for scores in groups.values()), groups


def test_column_reward_trains_on_the_scores_of_the_data(tmp_path: Path) -> None:
    recipe = runs.write(tmp_path, steps=2, rewards={"function": "column"}, algorithm={"preset": "reinforce++"})
    lines = [{"prompt": f"count to {i}", "score": i % 7} for i in range(40)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert cli.main(["train", str(recipe)]) == 0
    for row in runs.json_lines(tmp_path / "run" / "metrics.jsonl"):
        records = [r for r in runs.records(tmp_path / "run") if r["step"] == row["step"]]
        of_group = {r["group_id"]: json.loads(r["columns"])["score"] for r in records if r["columns"]}
        scores = [of_group[r["group_id"]] for r in records]
        assert [r["score"] for r in records] == scores and row["reward/mean"] == pytest.approx(sum(scores) / 9)
        assert row["grad_norm"] > 0


@pytest.mark.parametrize("several", [False, True], ids=["one function", "several"])
def test_texts_of_a_reward_are_in_records_and_views_only(
    tmp_path: Path, several: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    function = f"{tmp_path / 'pred.py'}:scored"
    rows = [{"function": function}, {"function": "json", "weight": 0.0}]
    rewards = {"function": None, "functions": rows} if several else {"function": function}
    recipe = runs.write(tmp_path, steps=2, rewards=rewards)
    (tmp_path / "pred.py").write_text(
        "def scored(data_source, solution_str, ground_truth, extra_info):\n"
        "    pred = ''.join(c for c in solution_str if c.isdigit()) or 'none'\n"
        "    return {'score': solution_str.count('7'), 'acc': 1, 'pred': f'{ground_truth}?{pred}' + '.' * 2000}\n"
    )
    assert cli.main(["train", str(recipe)]) == 0
    name = "scored.pred" if several else "pred"
    records = [r for r in runs.records(tmp_path / "run") if r["outcome"] == "trained"]
    assert len(records) == 18
    for record in records:
        digits = "".join(c for c in record["completion"] if c.isdigit()) or "none"
        number = record["task_id"].rpartition("/")[2]
        assert record["texts"] == {name: f"{number}?{digits}{'.' * 2000}"[:1000]}
    for row in runs.json_lines(tmp_path / "run" / "metrics.jsonl"):
        assert not [key for key in row if "pred" in key] and row["reward/extra/" + name.replace("pred", "acc")] == 1
    capsys.readouterr()
    assert cli.main(["show", str(tmp_path / "run"), "--rollouts"]) == 0
    assert f"    {name}: " in capsys.readouterr().out
    seen = rollout_detail(IndexedRun(tmp_path / "run"), records[0]["step"], records[0]["rollout_id"])
    assert seen["texts"] == records[0]["texts"]
