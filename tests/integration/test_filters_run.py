"""Filters, statistics of tokens, and the reward pool in real runs."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import runs
import torch
from safetensors.torch import load_file

import tiny
from rollover import cli
from rollover.api.settings import settings_of_run
from rollover.cli import main
from rollover.config.load import load_config
from rollover.plugins.dashboard.indexed_run import IndexedRun
from rollover.plugins.dashboard.rollout_detail import rollout_detail
from rollover.plugins.dashboard.run_data import RunData
from rollover.run.sample import BranchPoint
from rollover.track.metrics import validate
from rollover.track.records import read_records
from rollover.track.token_stats import KEYS, by_token

# [filters] in whole runs: dynamic sampling fills every step, masks leave the loss, and a hopeless run ends


FIRST_IS_A_DIGIT = '''
def reward(prompts, completions, **columns):
    """1 for an answer that begins with a digit, a tenth at first: two thirds of the groups of four agree."""
    return [float(text[:1].isdigit()) for text in completions]

def without_tens(group):
    return "a tenth task" if group.group_id % 10 == 0 else None
'''
ALL_ALIKE = "def reward(prompts, completions, **columns): return [0.25 for _ in completions]\n"
MODES = {
    "partial": {"interrupt": "when_enough", "in_flight_groups": 8, "max_staleness": 2},
    "fully async": {"overlap": True, "interrupt": "on_weight_update", "in_flight_groups": 9, "max_staleness": 2},
}


def recipe(
    folder: Path, filters: dict[str, Any], rollout: dict[str, Any], reward: str = FIRST_IS_A_DIGIT, steps: int = 4
) -> Path:
    file = runs.write(
        folder,
        steps=steps,
        rollout={"group_size": 4, "max_new_tokens": 16, **rollout},
        algorithm={"preset": "dapo"},
        filters=filters,
        checkpoint={"every_steps": 1, "keep": 2, "save_final_model": False},
    )
    (folder / "reward.py").write_text(reward)
    return file


def rows_of(folder: Path) -> list[dict[str, float]]:
    rows = runs.rows(folder)
    for row in rows:
        assert row["tokens/generated"] == row["tokens/trained"] + row["tokens/dropped"] + row["tokens/held"]
        assert row["groups/admitted"] == row["groups/consumed"] + row["groups/dropped"] + row["groups/held"]
    return rows


def scores_by_outcome(folder: Path) -> dict[str, list[list[float]]]:
    """Outcome -> the scores of each group that ended so."""
    groups: dict[tuple[str, int], list[float]] = defaultdict(list)
    for record in runs.records(folder / "run"):
        groups[record["outcome"], record["group_id"]].append(record["score"])
    out: dict[str, list[list[float]]] = defaultdict(list)
    for (outcome, _), scores in groups.items():
        out[outcome].append(scores)
    return out


@pytest.mark.parametrize("mode", [MODES["partial"], MODES["fully async"]])
def test_dynamic_sampling_trains_full_steps_of_groups_with_a_signal(tmp_path: Path, mode: dict[str, Any]) -> None:
    assert main(["train", str(recipe(tmp_path, {"zero_variance": True}, mode))]) == 0
    rows = rows_of(tmp_path)
    assert [row["groups/consumed"] for row in rows] == [3, 6, 9, 12]
    assert all(row["groups/zero_variance"] == 0 and row["grad_norm"] > 0 for row in rows)
    assert all(row["train/zero_advantage_tokens"] == 0 for row in rows)
    last, groups = rows[-1], scores_by_outcome(tmp_path)
    assert last["filtered/zero_variance/groups"] == last["dropped/filtered/groups"] > 0
    assert len(groups["trained"]) == 12 and all(len(set(scores)) == 2 for scores in groups["trained"])
    filtered = groups["dropped:filtered"]
    assert all(len(set(scores)) == 1 for scores in filtered)
    # What is generated beside the last step may be filtered after its row was written.
    after = len(filtered) - last["dropped/filtered/groups"]
    assert after >= 0 if mode.get("overlap") else after == 0


def test_each_filter_has_its_counter_and_the_users_own_is_asked(tmp_path: Path) -> None:
    own = f"{tmp_path / 'reward.py'}:without_tens"
    filters = {"pass_rate_above": 0.0, "pass_rate_below": 0.9, "custom": own}
    assert main(["train", str(recipe(tmp_path, filters, MODES["partial"]))]) == 0
    last = rows_of(tmp_path)[-1]
    counts = {name: last.get(f"filtered/{name}/groups", 0) for name in ("pass_rate", "custom")}
    assert counts["pass_rate"] > 0 and sum(counts.values()) == last["dropped/filtered/groups"]
    trained = {r["group_id"] for r in runs.records(tmp_path / "run") if r["outcome"] == "trained"}
    assert not any(i % 10 == 0 for i in trained)


def test_tasks_of_filtered_groups_are_given_again(tmp_path: Path) -> None:
    """Every failed group is filtered, so that none of them is trained."""
    file = recipe(tmp_path, {"zero_variance": True}, MODES["partial"], steps=6)
    assert main(["train", str(file), "--reroll.max_groups", "2", "--reroll.start_fraction", "0.2"]) == 0
    assert rows_of(tmp_path)[-1]["reroll/given"] > 0
    attempts = {r["task_id"] for r in runs.records(tmp_path / "run") if r["attempt"] >= 1_000_000}
    assert attempts <= {r["task_id"] for r in runs.records(tmp_path / "run") if r["outcome"] == "dropped:filtered"}


def test_a_run_of_which_nothing_is_left_ends_and_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    filters = {"zero_variance": True, "give_up_after_steps": 8}
    file = recipe(tmp_path, filters, MODES["partial"])
    assert main(["train", str(file), "--train.num_steps", "2"]) == 0
    (tmp_path / "reward.py").write_text(ALL_ALIKE)
    assert main(["train", str(file), "--resume"]) == 2
    said = capsys.readouterr().err
    assert "filters: each of the last 24 scored groups was dropped" in said and "0.25, 0.25, 0.25, 0.25" in said
    before = rows_of(tmp_path)
    (tmp_path / "reward.py").write_text(FIRST_IS_A_DIGIT + "# works again\n")
    assert main(["train", str(file), "--resume"]) == 0
    rows = rows_of(tmp_path)
    assert rows[: len(before)] == before and [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows[-1]["dropped/filtered/groups"] >= before[-1]["dropped/filtered/groups"] + 24


def test_filters_that_give_up_before_the_first_step_leave_the_answers_and_a_checkpoint(tmp_path: Path, capsys) -> None:
    filters = {"zero_variance": True, "give_up_after_steps": 2}
    file = recipe(tmp_path, filters, MODES["fully async"], reward=ALL_ALIKE)
    assert main(["train", str(file)]) == 2
    said = capsys.readouterr().err
    assert "filters: each of the last 6 scored groups was dropped" in said
    assert "resume with --resume. The answers are in rollouts/" in said
    left = runs.records(tmp_path / "run")
    assert {r["outcome"] for r in left} == {"dropped:filtered"} and len(left) >= 24
    assert all(r["score"] == 0.25 and isinstance(r["completion"], str) for r in left)
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000000"]
    (tmp_path / "reward.py").write_text(FIRST_IS_A_DIGIT)
    assert main(["train", str(file), "--resume", "--filters.give_up_after_steps", "40"]) == 0
    rows = rows_of(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows[0]["dropped/filtered/groups"] >= len(left) // 4, "what was dropped before is counted"
    assert runs.records(tmp_path / "run")[: len(left)] == left


def test_a_shaped_score_has_the_penalty_that_the_score_has_not(tmp_path: Path) -> None:
    """All scores are alike, and groups are kept by how long their answers are."""
    filters = {"zero_variance": True, "give_up_after_steps": 20, "metric": "shaped_score"}
    file = recipe(tmp_path, filters, MODES["partial"], reward=ALL_ALIKE, steps=2)
    assert main(["train", str(file), "--rewards.overlong_buffer_tokens", "12"]) == 0
    rows = rows_of(tmp_path)
    assert [row["step"] for row in rows] == [1, 2] and all(row["grad_norm"] > 0 for row in rows)
    for record in runs.records(tmp_path / "run"):
        assert record["score"] == 0.25
    dropped = scores_by_outcome(tmp_path).get("dropped:filtered", [])
    assert len(dropped) == rows[-1]["dropped/filtered/groups"]


def test_masked_rollouts_leave_the_loss_and_stay_in_their_groups(tmp_path: Path) -> None:
    filters = {"mask_truncated": True, "mask_overlong": True, "overlong_tokens": 12}
    assert main(["train", str(recipe(tmp_path, filters, MODES["partial"], reward=runs.REWARD))]) == 0
    rows = rows_of(tmp_path)
    trained = [r for r in runs.records(tmp_path / "run") if r["outcome"] == "trained"]
    for row in rows:
        lengths = [r["num_tokens"] for r in trained if r["step"] == row["step"]]
        masked = [n for n in lengths if n > 12]
        assert (row["train/masked_rollouts"], row["train/masked_tokens"]) == (len(masked), sum(masked))
        assert row["tokens/step_trained"] == sum(lengths) - sum(masked)
    assert sum(row["train/masked_rollouts"] for row in rows) > 0
    assert any(row["grad_norm"] > 0 for row in rows)


# A run records what training made of each token: as computed from the weights of its checkpoints by transformers,
# in both formats, and on the page; and a recorded rollout goes on from one of its tokens


STEPS, CAP = 4, 1.01


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Partial rollouts, so that tokens are as old as two steps; a checkpoint after each."""
    folder = tmp_path_factory.mktemp("tokens")
    recipe = runs.write(
        folder,
        steps=STEPS,
        rollout={"max_new_tokens": 32},
        algorithm={"correction": "token_truncate", "correction_cap": CAP, "proximal": "step_start"},
        checkpoint={"every_steps": 1, "keep": STEPS + 1, "save_final_model": True},
        track={"format": ["jsonl", "parquet"]},
    )
    assert main(["train", str(recipe)]) == 0
    yield folder / "run"


def model_of(run: Path, version: int) -> Any:
    """The weights that a step at trainer `version` begins with."""
    model = tiny.model()
    model.set_attn_implementation("eager")
    if version:
        (path,) = (run / "checkpoints").glob(f"*{version:06d}/trainer-master*.safetensors")
        stored = {name.removeprefix("master/"): t for name, t in load_file(path).items()}
        missing, unexpected = model.load_state_dict(stored, strict=False)
        assert not unexpected and set(missing) <= {"lm_head.weight"}
    return model


def by_logits(record: dict[str, Any], model: Any) -> tuple[np.ndarray, np.ndarray]:
    """(log-probs, entropies) of all tokens of the answer."""
    ids = torch.tensor([*record["prompt_ids"], *record["token_ids"]])
    with torch.no_grad():
        logits = model(ids[None]).logits[0, len(record["prompt_ids"]) - 1 : -1].double()
    logs = torch.log_softmax(logits, -1)
    return logs.gather(1, torch.tensor(record["token_ids"])[:, None])[:, 0].numpy(), -(logs.exp() * logs).sum(
        -1
    ).numpy()


def test_the_numbers_of_each_token_are_those_of_the_closed_form(run: Path) -> None:
    models = {version: model_of(run, version) for version in range(STEPS)}
    stale = capped = 0
    trained = [r for r in read_records(run / "rollouts") if r["outcome"] == "trained" and r["loss_mask"]]
    assert len(trained) > STEPS
    for record in trained:
        tokens: Any = by_token(record)
        logprobs, entropies = by_logits(record, models[record["step"] - 1])
        mask, ratios = np.array(tokens["mask"]), np.exp(logprobs - np.array(record["logprobs"]))
        versions = np.repeat(
            [s["policy_version"] for s in record["segments"]], [s["num_tokens"] for s in record["segments"]]
        )
        assert mask.all(), "each is young enough, and sampled"
        assert tokens["advantages"] == pytest.approx([record["advantage"]] * record["num_tokens"], rel=1e-4)
        if record["advantage"] == 0:
            assert "importance_weights" not in tokens
            continue
        assert tokens["importance_weights"] == pytest.approx(ratios, rel=1e-3)
        assert tokens["loss_weights"] == pytest.approx(np.minimum(ratios, CAP), rel=1e-3)
        assert tokens["entropies"] == pytest.approx(entropies, rel=1e-3, abs=1e-4)
        stale += int((versions < record["step"] - 1).sum())
        capped += int((ratios > CAP).sum())
    assert stale and capped, "the run must have tokens of older weights, and ratios above the cap"


def test_the_tables_have_the_same(run: Path) -> None:
    lines = {(r["step"], r["rollout_id"]): r for r in runs.records(run)}
    tables = {(r["step"], r["rollout_id"]): r for r in read_records(run / "rollouts")}
    assert lines.keys() == tables.keys()
    for key, line in lines.items():
        assert line["credit"] == tables[key]["credit"]
        for name in KEYS:
            expected, found = line[name], tables[key][name]
            assert (expected is None) == (found is None), name
            assert expected is None or found == pytest.approx(expected, rel=1e-6, nan_ok=True), name


def test_the_page_tells_why_and_the_sum_is_the_advantage(run: Path) -> None:
    data = RunData(run)
    rows = data.answer("rollouts", {"outcome": "trained", "limit": "200"})["rows"]
    told = [data.answer("rollout", {"step": str(row["step"]), "id": row["id"]}) for row in rows if row["advantage"]]
    assert told
    for of in told:
        said = {s["about"]: s["text"] for s in of["why"]}
        *_, value = said["rule"].rstrip(".").split(" = ")
        assert float(value) == pytest.approx(of["advantage"], rel=2e-3, abs=1e-6), said
        assert said["tokens"] == f"{of['num_tokens']} of its {of['num_tokens']} tokens came to the loss."
        trained = of["tokens"]["trained"]
        assert len(trained["entropies"]) == len(trained["mask"]) == len(of["tokens"]["ids"])
        part = data.answer("rollout", {"step": str(of["step"]), "id": of["rollout_id"], "first": "3", "count": "2"})
        assert part["tokens"]["trained"]["entropies"] == trained["entropies"][3:5]


def test_the_texts_of_tokens_are_known_without_the_model(run: Path, tmp_path: Path) -> None:
    """On another machine, say, or before the run has saved any."""
    for name in ("config.resolved.json", "metrics.jsonl", "tokenizer.json", "rollouts"):
        (tmp_path / name).symlink_to(run / name)
    config = json.loads((run / "config.resolved.json").read_text())
    (tmp_path / "config.resolved.json").unlink()
    (tmp_path / "config.resolved.json").write_text(json.dumps(config | {"model": {"path": "nobody/has-this-model"}}))
    record = runs.records(run)[0]
    told = RunData(tmp_path).answer("rollout", {"step": str(record["step"]), "id": record["rollout_id"]})
    assert "".join(told["tokens"]["texts"]).removesuffix("<eos>") == record["completion"]


def sample(capsys: pytest.CaptureFixture[str], *words: str | Path) -> Any:
    capsys.readouterr()
    assert main(["sample", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_rollout_goes_on_from_a_token_as_it_did_or_with_newer_weights(run: Path, capsys) -> None:
    """Under the weights that sampled it the same tokens come, with their log-probs. Under the run's model others do."""
    record = next(
        r for r in runs.records(run) if r["num_tokens"] > 20 and {s["policy_version"] for s in r["segments"]} == {0}
    )
    place = f"{record['step']}/{record['rollout_id']}"
    (again,) = sample(capsys, "--from", run, f"{place}:7", "--model", run.parent / "model")
    assert again["token_ids"] == record["token_ids"][7:] and again["stop_reason"] == record["stop_reason"]
    assert again["logprobs"] == pytest.approx(record["logprobs"][7:], rel=1e-4, abs=1e-5)
    assert again["kept"] + again["text"] == record["completion"]
    newest = sample(capsys, "--from", run, place, "--num", "2", "--rollout.max_new_tokens", "9")
    assert [len(of["token_ids"]) <= 9 for of in newest] == [True, True] and newest[0] != newest[1]
    saved = sample(capsys, "--from", run, f"{place}:7", "--model", run / "model")
    (run / "model").rename(run / "away")
    try:
        assert sample(capsys, "--from", run, f"{place}:7") == saved, "the newest checkpoint has the same weights"
        assert main(["sample", "--from", str(run), f"{place}:7"]) == 0
        text, said = capsys.readouterr()
        assert text.startswith("kept: ") and f"checkpoint step-{STEPS:06d}" in said and "after 7 of" in said
    finally:
        (run / "away").rename(run / "model")
    (told,) = (RunData(run).answer("rollout", {"step": str(record["step"]), "id": record["rollout_id"]})["resume"],)
    assert told == f"rollover sample --from {run} {place}"


def test_a_finished_run_that_goes_on_has_newer_weights_than_it_ended_with(run: Path, capsys) -> None:
    """model/ is of the end before; --resume with more steps takes the mark of it away."""
    record = runs.records(run)[0]
    words = ["sample", "--from", str(run), f"{record['step']}/{record['rollout_id']}", "--rollout.max_new_tokens", "2"]
    capsys.readouterr()
    assert main(words) == 0 and "the model that the run ended with" in capsys.readouterr().err
    (run / "finished").rename(run / "not finished")
    try:
        assert main(words) == 0 and f"checkpoint step-{STEPS:06d}" in capsys.readouterr().err
    finally:
        (run / "not finished").rename(run / "finished")


def test_a_greedy_rollout_goes_on_greedily(run: Path) -> None:
    record = runs.records(run)[0]
    greedy = json.loads(json.dumps(record))
    for segment in greedy["segments"]:
        segment["sampling"]["temperature"] = 0.0
    config = load_config([settings_of_run(run, "--from")], [], require_sources=False).config
    warm, cold = (BranchPoint(of, 3).request(config, frozenset(), 0).sampling.temperature for of in (record, greedy))
    assert (warm, cold) == (config.rollout.temperature, 0.0)


def test_what_cannot_go_on_exits_2(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = runs.records(run)[0]
    place = f"{record['step']}/{record['rollout_id']}"

    def refused(*words: str | Path) -> str:
        assert main(["sample", *map(str, words)]) == 2
        return capsys.readouterr().err

    assert "names no rollout: write STEP/ID" in refused("--from", run, "somewhere")
    assert "no rollout 999-0 left the run" in refused("--from", run, "1/999-0")
    assert "give a token from 0 to" in refused("--from", run, f"{place}:100000")
    assert "leave --prompt and --columns out" in refused("--from", run, place, "--prompt", "x")
    assert "is not the directory of a run" in refused("--from", run / "nothing", place)
    assert "give FILE.toml, or a rollout of a run by --from" in refused("--prompt", "x")
    few = refused("--from", run, f"{place}:{record['num_tokens']}", "--rollout.max_new_tokens", "1")
    assert "tokens are kept: give an earlier token" in few


def test_without_token_stats_nothing_is_recorded_of_them(tmp_path: Path) -> None:
    recipe = runs.write(tmp_path, steps=1, track={"token_stats": False}, checkpoint={"save_final_model": False})
    assert main(["train", str(recipe)]) == 0
    trained = [r for r in runs.records(tmp_path / "run") if r["outcome"] == "trained"]
    assert trained and all(r[key] is None for r in trained for key in KEYS)
    assert all(r["credit"]["reward"] == r["score"] for r in trained)


def test_metrics_of_the_loss_leave_out_what_was_rejected(tmp_path: Path) -> None:
    """Counted by hand from the records: the loss mask, less what algorithm.rejection took out."""
    algorithm = {"rejection": {"token_k1": [-0.005, 0.003]}, "correction": "none", "allow_uncorrected": True}
    assert main(["train", str(runs.write(tmp_path, steps=5, algorithm=algorithm))]) == 0
    rejected = 0
    for row in runs.rows(tmp_path):
        ages: list[int] = []
        built = 0
        for record in runs.records(tmp_path / "run"):
            if record["step"] == row["step"] and record["outcome"] == "trained" and (tokens := by_token(record)):
                versions = np.repeat(
                    [s["policy_version"] for s in record["segments"]], [s["num_tokens"] for s in record["segments"]]
                )
                kept = np.array(tokens["mask"]) & ~np.array(tokens["rejected"])
                ages += (row["step"] - 1 - versions[kept]).tolist()
                built += sum(tokens["mask"])
        rejected += built - len(ages)
        assert row["tokens/step_trained"] == len(ages)
        assert row["staleness/mean"] == pytest.approx(np.mean(ages)) and row["staleness/max"] == max(ages)
        assert row["off_policy/rejected_share"] == pytest.approx(1 - len(ages) / built)
        assert row["speed/trained_tokens_per_s"] == pytest.approx(len(ages) / row["time/train_s"])
    assert rejected > 50


# `rollover train` whose reward function misbehaves in every way: training goes on, and counts what was lost


# Every second task misbehaves, each kind of failure in turn; a fault is that of one sample, not of its siblings.
REWARD = """
import ctypes, os, threading

def reward(data_source, solution_str, ground_truth, extra_info):
    number = int(ground_truth)
    if number % 2 == 0 and first(number):
        return (loop, quit, segfault, memory, deadlock, nan, fail)[number // 2 % 7]()
    return sum(c.isdigit() for c in solution_str) / 48

def first(number):
    # One answer of each task fails, whichever worker is first.
    os.makedirs("faults", exist_ok=True)
    try:
        open(f"faults/{number}", "x").close()
    except FileExistsError:
        return False
    return True

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


def test_training_goes_on_while_rewards_misbehave(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
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
            "timeout_s": 6.0,
        },
    )
    (tmp_path / "reward.py").write_text(REWARD)
    # The probe is no place for faults: it may use the first task of all.
    (tmp_path / "faults").mkdir()
    (tmp_path / "faults" / "0").touch()
    code = cli.main(["train", str(recipe)])
    out = capsys.readouterr()
    assert code == 0 and "Traceback" not in out.err, out.err

    rows = runs.rows(tmp_path)
    for row in rows:
        validate(row)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    last = rows[-1]
    kinds = ("timeouts", "crashes", "out_of_memory", "errors", "quarantined", "retries")
    counted = [last[f"rewards/{kind}"] for kind in kinds]
    faults = sorted(int(path.name) // 2 % 7 for path in (tmp_path / "faults").iterdir() if path.name != "0")
    of_kind = [sum(fault in kind for fault in faults) for kind in ((0, 4), (1, 2), (3,), (5, 6))]
    # Each of the two workers may be at a call when the run ends. On a loaded machine other calls time out too.
    not_over = [begun - num for begun, num in zip([*of_kind, 0, 0], counted, strict=True)]
    assert not_over[0] <= 2 and min(not_over[1:]) >= 0 and sum(not_over[1:]) <= 2
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
    for row in runs.rows(tmp_path):
        records = [r for r in runs.records(tmp_path / "run") if r["step"] == row["step"]]
        of_group = {r["group_id"]: json.loads(r["columns"])["score"] for r in records if r["columns"]}
        scores = [of_group[r["group_id"]] for r in records]
        assert [r["score"] for r in records] == scores and row["reward/mean"] == pytest.approx(sum(scores) / 9)
        assert row["grad_norm"] > 0


def test_texts_of_a_reward_are_in_records_and_views_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    functions = [{"function": f"{tmp_path / 'pred.py'}:scored"}, {"function": "json", "weight": 0.0}]
    recipe = runs.write(tmp_path, steps=2, rewards={"function": None, "functions": functions})
    (tmp_path / "pred.py").write_text(
        "def scored(data_source, solution_str, ground_truth, extra_info):\n"
        "    pred = ''.join(c for c in solution_str if c.isdigit()) or 'none'\n"
        "    return {'score': solution_str.count('7'), 'acc': 1, 'pred': f'{ground_truth}?{pred}' + '.' * 2000}\n"
    )
    assert cli.main(["train", str(recipe)]) == 0
    name = "scored.pred"
    records = [r for r in runs.records(tmp_path / "run") if r["outcome"] == "trained"]
    assert len(records) == 18
    for record in records:
        digits = "".join(c for c in record["completion"] if c.isdigit()) or "none"
        number = record["task_id"].rpartition("/")[2]
        assert record["texts"] == {name: f"{number}?{digits}{'.' * 2000}"[:1000]}
    for row in runs.rows(tmp_path):
        assert not [key for key in row if "pred" in key] and row["reward/extra/" + name.replace("pred", "acc")] == 1
    capsys.readouterr()
    assert cli.main(["show", str(tmp_path / "run"), "--rollouts"]) == 0
    assert f"    {name}: " in capsys.readouterr().out
    seen = rollout_detail(IndexedRun(tmp_path / "run"), records[0]["step"], records[0]["rollout_id"])
    assert seen["texts"] == records[0]["texts"]
