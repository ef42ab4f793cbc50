"""Which tasks and rollouts a run trains: replay, curricula, the data of other systems."""

from __future__ import annotations

import json
import re
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import pytest
import runs
import safetensors.torch
import torch

import tiny
from rollover import cli
from rollover.checkpoint.store import CheckpointStore
from rollover.tasks.reroll import ATTEMPT
from rollover.track.metrics import validate
from rollover.trainer.batch import Batch
from rollover.trainer.trainer import Trainer

# Replay and re-roll in the real loop: that they are called, in all modes


SPARSE = '''
def reward(prompts, completions, **columns):
    """1 for an answer with a 7 in it, else 0: of most groups every rollout fails."""
    return [float("7" in text) for text in completions]
'''
SYNC = {"interrupt": "never", "in_flight_groups": 3, "max_staleness": 0}
MODES: dict[str, dict[str, Any]] = {
    "streaming": {"complete_fraction": 0.5, "supplement": True, "in_flight_groups": 6},
    "mask": {"max_staleness": 0, "on_stale": "mask"},
}
BOTH: dict[str, dict[str, Any]] = {
    "replay": {"size": 6, "max_staleness": 4},
    "reroll": {"max_groups": 1, "start_fraction": 0.25, "size": 5},
}


def write(folder: Path, rollout: dict[str, Any], steps: int = 12, **tables: dict[str, Any]) -> Path:
    small = {"max_new_tokens": 12, "stop": ["x", "q"]}
    recipe = runs.write(folder, steps=steps, rollout=small | rollout, **tables)
    (folder / "reward.py").write_text(SPARSE)
    return recipe


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(folder / "run" / "model" / "model.safetensors")


def same_weights(a: Path, b: Path) -> bool:
    ours, theirs = weights(a), weights(b)
    return all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("mode", MODES)
def test_both_are_called_in_every_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd, mode: str) -> None:
    batches: list[Batch] = []
    plain = Trainer.train_step

    def spy(self: Trainer, batch: Batch) -> dict[str, float]:
        batches.append(batch)
        return plain(self, batch)

    monkeypatch.setattr(Trainer, "train_step", spy)
    assert cli.main(["train", str(write(tmp_path, MODES[mode], steps=16, **BOTH))]) == 0
    table, events = runs.rows(tmp_path), runs.trace(tmp_path / "run")
    consumed = Counter(e.version for e in events if e.kind == "consume")
    for row, batch in zip(table, batches, strict=True):
        validate(row)
        assert len({s.group_id for s in batch.samples}) == consumed[row["step"] - 1], "a step has its number of groups"
        assert row["tokens/generated"] == row["tokens/trained"] + row["tokens/dropped"] + row["tokens/held"]
        assert row["staleness/max"] <= row["staleness/bound"]
        assert 1 <= row.get("staleness/replayed_max", 1) <= 4
        assert ("staleness/replayed_max" in row) == bool(batch.replayed)
        assert 0 <= row["replay/size"] <= 6 and 0 <= row["reroll/size"] <= 5
    last = table[-1]
    assert last["replay/replaced"] == sum(len(b.replayed) for b in batches) > 0
    replayed = [s for b in batches for s in b.samples if s.group_id in b.replayed]
    assert last["tokens/replayed"] == sum(int(s.mask.sum()) for s in replayed) > 0
    assert all(s.advantages[s.mask].any() for s in replayed if s.mask.any())
    # Given again: the same task, not before a quarter of the run, at most one a step, with other draws.
    assert 0 < last["reroll/given"] <= 12
    assert last["reroll/queued"] == last["reroll/given"] + last["reroll/size"]
    output = capfd.readouterr()
    told = re.findall(r"re-roll: (\d+) failed tasks were given again, (\d+) wait", output.out + output.err)
    assert sum(int(given) for given, _ in told) == last["reroll/given"]
    assert all(int(waiting) <= 5 for _, waiting in told)
    attempts: dict[str, list[int]] = {}
    for record in runs.records(tmp_path / "run"):
        attempts.setdefault(record["task_id"], []).append(record["attempt"])
    assert any(min(of) == 0 and max(of) >= ATTEMPT for of in attempts.values())
    assert len({r["rollout_id"] for r in runs.records(tmp_path / "run")}) == len(runs.records(tmp_path / "run"))


PARTS = """
def seven(completions, **columns):
    return [float("7" in text) for text in completions]

def digits(completions, **columns):
    return [sum(c.isdigit() for c in text) for text in completions]

def odd(completions, answer, **columns):
    return [-float(int(number) % 2) for number in answer]
"""


def parts(folder: Path, **weights: float) -> dict[str, Any]:
    """The reward table of functions of PARTS with these weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "parts.py").write_text(PARTS)
    rows = [{"function": f"{folder / 'parts.py'}:{name}", "weight": weight} for name, weight in weights.items()]
    return {"function": None, "functions": rows}


def state_of(folder: Path) -> dict[str, Any]:
    """The state of replay and re-roll in the last checkpoint."""
    store = CheckpointStore(str(folder / "run" / "checkpoints"), keep=2)
    return json.loads(Path(store.open(store.list()[-1])["state.json"]).read_text())["reuse"]


def test_replay_score_adds_deviations_of_all_functions(tmp_path: Path) -> None:
    rewards = parts(tmp_path, seven=1.0, digits=0.25, odd=0.0)
    recipe = write(tmp_path, SYNC, steps=4, rewards=rewards, replay={"size": 64, "max_staleness": 8})
    assert cli.main(["train", str(recipe)]) == 0
    siblings: dict[int, list[dict[str, Any]]] = {}
    for record in runs.records(tmp_path / "run"):
        siblings.setdefault(record["group_id"], []).append(record)
    buffer = state_of(tmp_path)["buffer"]
    assert len(buffer["scores"]) > 2
    for saved, score in zip(buffer["groups"], buffer["scores"], strict=True):
        of = siblings[saved["group_id"]]
        spread = sum(statistics.stdev(r["extras"][name] for r in of) for name in ("seven", "digits"))
        assert score == pytest.approx(sum(abs(r["advantage"]) for r in of) * spread)


@pytest.mark.parametrize("failed_at_most", [0.0, "equal_zero"])
def test_reroll_equal_zero_queues_groups_of_zero_rewards(tmp_path: Path, failed_at_most: float | str) -> None:
    rewards = parts(tmp_path, seven=1.0, odd=0.5)
    reroll = {"max_groups": 1, "start_fraction": 0.9, "failed_at_most": failed_at_most}
    assert cli.main(["train", str(write(tmp_path, SYNC, steps=4, rewards=rewards, reroll=reroll))]) == 0
    answers = {int(task["columns"]["answer"]) % 2 for task, _ in state_of(tmp_path)["reroll"]["queue"]}
    assert answers == ({0} if failed_at_most == "equal_zero" else {0, 1})


def test_recorded_rollouts_are_replayed_alike(tmp_path: Path) -> None:
    recipe = write(tmp_path / "run1", SYNC, steps=8, replay=BOTH["replay"])
    assert cli.main(["train", str(recipe)]) == 0
    again = write(tmp_path / "run2", SYNC, steps=8, replay=BOTH["replay"])
    assert cli.main(["train", str(again), "--run.train_on_recorded", str(tmp_path / "run1" / "run" / "rollouts")]) == 0
    assert (
        runs.rows(tmp_path / "run2")[-1]["replay/replaced"] == runs.rows(tmp_path / "run1")[-1]["replay/replaced"] > 0
    )
    assert same_weights(tmp_path / "run1", tmp_path / "run2")


def test_a_checkpoint_from_before_starts_with_empty_buffers(tmp_path: Path) -> None:
    """Switching both on in the middle of a run is allowed; so is switching them off."""
    assert cli.main(["train", str(write(tmp_path, SYNC, steps=4))]) == 0
    assert cli.main(["train", str(write(tmp_path, SYNC, steps=10, **BOTH)), "--resume"]) == 0
    assert runs.rows(tmp_path)[-1]["replay/size"] > 0
    assert cli.main(["train", str(write(tmp_path, SYNC, steps=12)), "--resume"]) == 0
    assert "replay/size" not in runs.rows(tmp_path)[-1]


def test_snapshots_are_kept_for_replayed_versions(tmp_path: Path) -> None:
    """proximal = "snapshot" needs the weights of every version that a replayed token was sampled under."""
    recipe = write(tmp_path, SYNC, replay=BOTH["replay"], algorithm={"proximal": "snapshot"})
    assert cli.main(["train", str(recipe)]) == 0
    assert max(row.get("staleness/replayed_max", 0) for row in runs.rows(tmp_path)) >= 3
    # The engine samples in the trainer's numerics here, so that nothing is left for the weights to correct.
    assert all(row.get("importance/max", 1.0) == pytest.approx(1.0, abs=1e-3) for row in runs.rows(tmp_path))


# Curricula in whole runs: the tasks given follow the pass rates, and a stop changes no bit


CURRICULUM_REWARD = '''
def reward(prompts, completions, answer, **columns):
    """1, 0, or whether there is a 7 in the answer."""
    kind = {0: lambda text: 1.0, 1: lambda text: 0.0, 2: lambda text: float("7" in text or "3" in text)}
    return [kind[int(a) % 3](text) for a, text in zip(answer, completions)]
'''
BUCKETS = {"kind": "buckets", "easy_weight": 0.05, "hard_weight": 0.2}
VARIANCE = {"kind": "variance", "decay": 0.5, "min_weight": 0.1}
PARTIAL = {"interrupt": "when_enough", "in_flight_groups": 6, "max_staleness": 2}
# What rolls over is counted in tokens, and so the same in each run: with "when_enough" it depends on the clock.
BUDGET = {"interrupt": "token_budget", "token_budget": 5, "in_flight_groups": 6, "max_staleness": 3}


def of_curriculum(
    folder: Path, rollout: dict[str, Any], curriculum: dict[str, Any], steps: int = 10, **tables: Any
) -> Path:
    small = {"max_new_tokens": 12, "stop": ["x", "q"]}
    tables = {"tasks": {"eval_fraction": 0.001}, **tables, "tasks.curriculum": curriculum}
    file = runs.write(folder, steps=steps, rows=12, rollout=small | rollout, **tables)
    (folder / "reward.py").write_text(CURRICULUM_REWARD)
    return file


def train(*words: object) -> None:
    assert cli.main(["train", *map(str, words)]) == 0


def curricula(folder: Path) -> list[dict[str, float]]:
    return [
        {k: v for k, v in row.items() if k.startswith(("curriculum/", "tasks/", "reward/"))}
        for row in runs.rows(folder)
    ]


def given(folder: Path) -> list[tuple[str, int]]:
    """(task, attempt) of each group that was scored, in order of its step."""
    return [(r["task_id"], r["attempt"]) for r in runs.records(folder / "run") if r["sibling"] == 0]


def test_tasks_that_are_always_or_never_passed_are_given_less_often(tmp_path: Path) -> None:
    train(of_curriculum(tmp_path, PARTIAL, BUCKETS, steps=24))
    for row in runs.rows(tmp_path):
        validate(row)
    last = runs.rows(tmp_path)[-1]
    assert last["curriculum/known"] == 12 and last["curriculum/easy"] >= 4 and last["curriculum/hard"] >= 4
    assert last["curriculum/passed_over"] > 0
    counts = Counter(int(task.rpartition("/")[2]) % 3 for task, _ in given(tmp_path))
    assert counts[2] > max(counts[0], counts[1]), counts


def test_a_run_stopped_while_rollouts_roll_over_ends_as_one_that_was_not(tmp_path: Path) -> None:
    """The scores of rollouts in flight at the stop count as they would have."""
    train(of_curriculum(tmp_path / "whole", BUDGET, VARIANCE))
    file = of_curriculum(tmp_path / "stopped", BUDGET, VARIANCE)
    train(file, "--train.num_steps", 3)
    train(file, "--train.num_steps", 7, "--resume")
    train(file, "--resume")
    assert curricula(tmp_path / "stopped") == curricula(tmp_path / "whole")
    assert given(tmp_path / "stopped") == given(tmp_path / "whole")
    assert same_weights(tmp_path / "stopped", tmp_path / "whole")
    last = runs.rows(tmp_path / "whole")[-1]
    assert last["curriculum/passed_over"] > 0 and last["rollouts/resumed"] > 20


def test_it_may_begin_and_end_in_the_middle_of_a_run(tmp_path: Path) -> None:
    without = of_curriculum(tmp_path, SYNC, {}, steps=9)
    train(without, "--train.num_steps", 3)
    train(without, "--train.num_steps", 6, "--resume", "--tasks.curriculum.kind", "variance")
    assert runs.rows(tmp_path)[-1]["curriculum/known"] > 0
    train(without, "--resume")
    assert "curriculum/known" not in runs.rows(tmp_path)[-1]


# Data as verl's and TRL's users have it, through the configuration and a whole run: what the model reads, what the
# reward is given, what is held out; stopped in the middle of an epoch; and what is missing is named before a step


VERL_REWARD = '''
import json

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """verl's; what it was given is written down."""
    with open({log!r}, "a") as file:
        file.write(json.dumps([data_source, ground_truth, extra_info]) + "\\n")
    return float(any(c in solution_str for c in ground_truth))
'''
TRL_REWARD = '''
import json

def reward(prompts, completions, solution, level, **kwargs):
    """TRL's; what it was given is written down."""
    with open({log!r}, "a") as file:
        for row in zip(prompts, completions, solution, level):
            file.write(json.dumps([*row, sorted(kwargs)]) + "\\n")
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [sum(c.isdigit() for c in text) / 12 for text in texts]
'''


def verl_row(i: int, **changes: Any) -> dict[str, Any]:
    """As verl's examples/data_preprocess write them."""
    row = {
        "data_source": "mine/count",
        "prompt": [{"role": "system", "content": "be brief"}, {"role": "user", "content": f"count to {i}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(i)},
        "extra_info": {"index": i, "split": "train", "answer": f"it is {i}"},
    }
    return {k: v for k, v in (row | changes).items() if v is not ...}


def parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    datasets.Dataset.from_list(rows).to_parquet(str(path))
    return path


def recipe(folder: Path, sources: list[dict[str, Any]], steps: int = 6, **tables: Any) -> Path:
    """The usual tiny recipe with these sources; no reward for all of them."""
    small = {"max_new_tokens": 12} | SYNC
    path = runs.write(folder, steps=steps, rollout=small, rewards={"function": None}, **tables)
    lines = path.read_text().partition("[[tasks.sources]]")[0]
    for source in sources:
        lines += "[[tasks.sources]]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in source.items())
    path.write_text(lines)
    return path


def logged(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def peers(folder: Path) -> list[dict[str, Any]]:
    """verl's train and test files, and a conversational data set of TRL's that is streamed."""
    folder.mkdir()
    (folder / "verl_reward.py").write_text(VERL_REWARD.format(log=str(folder / "verl.log")))
    (folder / "trl_reward.py").write_text(TRL_REWARD.format(log=str(folder / "trl.log")))
    train_file = parquet(folder / "train.parquet", [verl_row(i) for i in range(10)])
    test_file = parquet(folder / "test.parquet", [verl_row(i) for i in range(8, 12)])
    turns = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "yes"}]
    rows = [
        {"prompt": [*turns, {"role": "user", "content": f"say {i}"}], "solution": str(i), "level": i % 3}
        for i in range(9)
    ]
    (folder / "trl.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "trl_test.jsonl").write_text(json.dumps(rows[8]) + "\n")
    verl = {"kind": "dataset", "path": str(train_file), "eval_path": str(test_file)}
    trl = {"kind": "dataset", "path": str(folder / "trl.jsonl"), "eval_path": str(folder / "trl_test.jsonl")}
    return [
        verl | {"reward": f"{folder}/verl_reward.py:compute_score", "weight": 2.0},
        trl | {"reward": f"{folder}/trl_reward.py:reward", "streaming": True},
    ]


def test_verl_and_trl_data_are_trained_as_they_are_and_resumed_in_an_epoch(tmp_path: Path) -> None:
    whole = recipe(tmp_path / "whole", peers(tmp_path / "one"), steps=10)
    train(whole)
    records = runs.records(tmp_path / "whole" / "run")
    prompts = {str(tiny.tokenizer().decode(record["prompt_ids"])) for record in records if record["prompt_ids"]}
    assert any("be brief" in text and "count to 3" in text for text in prompts), prompts
    assert any("hello" in text and "yes" in text and "say 3" in text for text in prompts), prompts
    held_out = ("count to 8", "count to 9", "say 8")
    assert not [text for text in prompts if any(words in text for words in held_out)], "they are in the held-out files"
    assert max(record["attempt"] for record in records) >= 1, "more than an epoch"
    for data_source, truth, extra in logged(tmp_path / "one" / "verl.log"):
        assert data_source == "mine/count" and verl_row(int(truth))["extra_info"].items() <= extra.items()
    for prompt, completion, solution, level, others in logged(tmp_path / "one" / "trl.log"):
        assert [m["role"] for m in prompt] == ["user", "assistant", "user"] and prompt[-1][
            "content"
        ] == f"say {solution}"
        assert completion[0]["role"] == "assistant" and level == int(solution) % 3 and "completion_ids" in others

    stopped = recipe(tmp_path / "stopped", peers(tmp_path / "two"), steps=10)
    train(stopped, "--train.num_steps", 3)  # in the first epoch of one, and in the second of the other
    train(stopped, "--resume")
    again = runs.records(tmp_path / "stopped" / "run")
    assert [(r["task_id"], r["attempt"], r["token_ids"]) for r in again] == [
        (r["task_id"], r["attempt"], r["token_ids"]) for r in records
    ]
    assert same_weights(tmp_path / "stopped", tmp_path / "whole")


# verl's data.reward_fn_key: another column than data_source chooses the reward of a task


REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": len(solution_str) / 100, "of_sums": float(data_source == "sums")}
"""
SCRIPT = """python3 -m verl.trainer.main_ppo data.train_files={folder}/rows.jsonl data.reward_fn_key=kind \\
    data.train_batch_size=4 actor_rollout_ref.actor.ppo_mini_batch_size=4 actor_rollout_ref.rollout.n=2 \\
    data.max_response_length=8 actor_rollout_ref.model.path={folder}/model \\
    custom_reward_function.path={folder}/mine.py trainer.total_training_steps=2 trainer.save_freq=-1 \\
    trainer.test_freq=-1 trainer.val_before_train=False
"""


def test_a_converted_script_with_another_column_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs.write(tmp_path)  # the toy model
    (tmp_path / "mine.py").write_text(REWARD)
    rows = [
        {"prompt": [{"role": "user", "content": f"{i} + 1"}], "kind": "sums" if i % 2 else "others",
         "reward_model": {"ground_truth": str(i + 1)}}
        for i in range(16)
    ]  # fmt: skip
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    script = tmp_path / "run.sh"
    script.write_text(SCRIPT.format(folder=tmp_path))
    assert cli.main(["convert", str(script)]) == 0, capsys.readouterr().err
    converted = tmp_path / "mine.toml"
    converted.write_text(capsys.readouterr().out)
    assert 'data_source_column = "kind"' in converted.read_text()
    assert cli.main(["train", str(converted), "--run.dir", str(tmp_path / "run")]) == 0
    records = runs.records(tmp_path / "run")
    assert len(records) == 16
    for record in records:
        is_sum = int(record["task_id"].rsplit("/", 1)[1]) % 2
        assert record["extras"]["of_sums"] == float(is_sum)


def test_a_column_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = runs.write(tmp_path)
    assert cli.main(["train", str(recipe), "--tasks.sources.0.data_source_column", "kind"]) == 2
    assert "has no data_source column 'kind'; its columns are prompt, answer" in capsys.readouterr().err


def test_a_row_without_a_value_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = runs.write(tmp_path, rows=0)
    rows = [{"prompt": f"count to {i}", "answer": str(i), "kind": None if i == 3 else "sums"} for i in range(8)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert cli.main(["train", str(recipe), "--tasks.sources.0.data_source_column", "kind"]) == 2
    said = capsys.readouterr().err
    assert "column 'kind' is empty, and chooses the reward: fill it" in said and "tasks.jsonl" in said
