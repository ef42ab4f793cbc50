"""Options of training in real runs: critic, distillation, LoRA, shaping, metrics, special tokens, threads."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import busy_machine
import numpy as np
import pytest
import runs
import safetensors.numpy
from endings import train

import rollover
import tiny
from rollover import cli
from rollover.cli import main
from rollover.config import Config, RunConfig
from rollover.processes import brief_waiting
from rollover.recipes.toy_model import character_tokenizer
from rollover.system import cores
from rollover.track.health import reason_nothing_trained
from rollover.track.metrics import validate

# PPO through the configuration: a critic of its own in a whole run, and with bad input


SYNC = {"interrupt": "never", "in_flight_groups": 3, "max_staleness": 0, "max_new_tokens": 12}
PPO = {"preset": "ppo"}
OWN: dict[str, Any] = {"model": "policy", "learning_rate": 1e-3, "head_learning_rate": 1e-2}


def write(folder: Path, steps: int = 4, rollout: dict[str, Any] = SYNC, **tables: Any) -> Path:
    tables = {"algorithm": PPO, "rewards": {"num_workers": 1}, **tables}
    return runs.write(folder, steps=steps, rollout=rollout, **tables)


def test_a_partial_run_with_a_model_of_its_own_tells_of_it(tmp_path: Path) -> None:
    """With a KL in the reward of every token, too."""
    critic = OWN | {"policy_waits_steps": 2, "bootstrap_truncated": True}
    of_tokens = PPO | {"kl_in": "reward", "kl_coef": 0.1}
    recipe = write(tmp_path, steps=6, rollout={}, critic=critic, algorithm=of_tokens)
    assert cli.main(["train", str(recipe)]) == 0
    table = runs.rows(tmp_path)
    for row in table:
        validate(row)
        assert row["critic/grad_norm"] > 0 and row["critic/skipped_steps"] == 0 and row["critic/learning_rate"] == 1e-3
        assert row["tokens/generated"] == row["tokens/trained"] + row["tokens/dropped"] + row["tokens/held"]
    assert [row["grad_norm"] > 0 for row in table] == [False, False, True, True, True, True]
    assert table[0]["critic/value_mean"] == 0 != table[-1]["critic/value_mean"]
    assert any(row["staleness/max"] for row in table)


def test_a_policy_that_would_never_be_trained_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write(tmp_path, critic={"policy_waits_steps": 4})
    assert cli.main(["train", str(recipe)]) == 2
    assert "the policy would never be trained" in capsys.readouterr().err


# Distillation through the configuration: without a usable reward, and over a refused resume


# No reward that could teach: half are missing, the others equal.
TOLD = """
def reward(prompts, completions, **columns):
    return [0.0 if i % 2 else None for i in range(len(completions))]

def told(task, messages):
    return [{"role": "system", "content": "The answer is " + "0123456789" * 3}, *messages]
"""
REFRESHED = {"teacher": "policy", "refresh_steps": 3, "discount": 0.5}


def of_distill(folder: Path, rollout: dict[str, Any], distill: dict[str, Any], steps: int = 7, **tables: Any) -> Path:
    recipe = runs.write(folder, steps=steps, rollout=rollout, distill=distill, rewards={"num_workers": 1}, **tables)
    (folder / "reward.py").write_text(TOLD)
    return recipe


def told(folder: Path) -> str:
    return f"{folder / 'reward.py'}:told"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    assert cli.main(["train", str(of_distill(folder, SYNC, REFRESHED | {"privileged": told(folder)}))]) == 0
    return folder


def test_groups_without_a_reward_that_teaches_are_trained(whole: Path) -> None:
    assert [row["step"] for row in runs.rows(whole)] == list(range(1, 8))
    for row in runs.rows(whole):
        validate(row)
        assert row["groups/dropped"] == 0 and row["tokens/step_trained"] == row["tokens/step_generated"]
        assert row["reward/missing"] == 6 and row["grad_norm"] > 0 and row["train/zero_advantage_tokens"] == 0
        assert 0 < row["time/teacher_s"] < row["time/train_s"]
    kl = [row["distill/kl"] for row in runs.rows(whole)]
    assert kl[0] > 0.01 and kl[-1] < kl[0], "the policy comes near its teacher"


@pytest.mark.parametrize(
    "mode",
    [
        {"train": {"streaming_min_groups": 1}},
        {"algorithm": {"rejection": {"token_k3": 0.1}, "loss": "gspo"}, "train": {"minibatches_per_step": 3}},
        {"rollout": {"max_staleness": 0, "on_stale": "mask"}, "model": {"lora": {"rank": 2}}},
    ],
    ids=["streaming", "rejection", "masked, LoRA"],
)
def test_another_model_teaches_in_every_mode(mode: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    """Partial rollouts, stale tokens and all: and the reports are of what was trained."""
    tiny.save(tmp_path / "teacher", seed=3)
    lora = mode.get("model", {}).pop("lora", None)
    words = [f"--model.lora.rank={lora['rank']}"] if lora else []
    tables = {name: values for name, values in mode.items() if name != "rollout"}
    recipe = of_distill(tmp_path, mode.get("rollout", {}), {"teacher": str(tmp_path / "teacher")}, steps=4, **tables)
    assert cli.main(["train", str(recipe), *words]) == 0
    for row in runs.rows(tmp_path):
        validate(row)
        # An estimate over sampled tokens, some of them of older weights: it may be a little below 0.
        assert row["grad_norm"] > 0 and row["distill/kl"] != 0


def test_a_checkpoint_without_the_weights_of_a_teacher_is_refused(tmp_path: Path, capsys) -> None:
    recipe = of_distill(tmp_path, SYNC, {"teacher": "policy", "privileged": told(tmp_path)}, steps=2)
    assert cli.main(["train", str(recipe)]) == 0
    capsys.readouterr()
    more = ["--resume", "--train.num_steps", "3"]
    assert cli.main(["train", str(recipe), *more, "--distill.refresh_steps", "4"]) == 2
    assert "distill.refresh_steps > 1: the checkpoint holds no such weights" in capsys.readouterr().err
    assert cli.main(["train", str(recipe), *more, "--distill.coef", "0.5"]) == 0
    resolved = json.loads((tmp_path / "run" / "config.resolved.json").read_text())
    assert resolved["distill"]["coef"] == 0.5 and len(runs.rows(tmp_path)) == 3


# Runs that begin with the adapters of another: they generate with them from the first token on


SYNC_64 = {"interrupt": "never", "in_flight_groups": 3, "max_staleness": 0}


def trained_lora(folder: Path, base: Path, **lora: Any) -> list[dict[str, Any]]:
    """The rows of a run of 2 steps over that base model."""
    model = {"path": str(base), "dtype": "float32"}
    recipe = runs.write(folder, steps=2, rollout=SYNC_64, model=model, train={"learning_rate": 1e-2})
    words = [f"--model.lora.{key}={json.dumps(value)}" for key, value in {"rank": 4, **lora}.items()]
    assert cli.main(["train", str(recipe), *words]) == 0
    return runs.rows(folder)


@pytest.mark.parametrize("kind", [{}, {"dora": True}], ids=["lora", "dora"])
def test_a_run_samples_from_the_adapters_that_it_begins_with(kind: dict[str, Any], tmp_path: Path) -> None:
    lora: dict[str, Any] = {"target_modules": ["all-linear"], **kind}
    first = trained_lora(tmp_path / "first", tmp_path / "first" / "model", **lora)
    folder = tmp_path / "first" / "run" / "model" / "adapter"
    second = trained_lora(tmp_path / "second", tmp_path / "first" / "model", path=str(folder), **lora)
    for row in first + second:
        assert row["mismatch/logprob_abs_max"] < 1e-4, row["step"]


# Shaping in whole runs: it is trained, and in no figure of the task


REWARDS: dict[str, Any] = {"overlong_buffer_tokens": 40, "overlong_penalty": 0.5, "running_norm": "scale"}
DR_GRPO = {"advantage": "dr_grpo"}  # to which the scale of rewards matters


def test_it_is_trained_and_in_no_figure_of_the_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evaluation = {"every_steps": 1, "num_tasks": 2}
    recipe = runs.write(
        tmp_path, steps=2, rollout={"max_new_tokens": 48}, rewards=REWARDS, algorithm=DR_GRPO, eval=evaluation
    )
    code, text = train(capsys, recipe)
    assert code == 0, text
    rows = runs.rows(tmp_path)
    records = [r for r in runs.records(tmp_path / "run") if r["outcome"] == "trained"]
    for row in rows:
        scores = [r["score"] for r in records if r["step"] == row["step"]]
        terms = [-0.5 * min(max(r["num_tokens"] - 8, 0) / 40, 1) for r in records if r["step"] == row["step"]]
        assert row["reward/mean"] == pytest.approx(sum(scores) / len(scores)) and min(scores) >= 0
        assert row["shaping/overlong/mean"] == pytest.approx(sum(terms) / len(terms)) != 0
        total = row["reward/mean"] + row["shaping/overlong/mean"]
        assert row["shaping/reward_mean"] * row["shaping/running_std"] == pytest.approx(total)
    evaluated = runs.json_lines(tmp_path / "run" / "eval.jsonl")
    assert evaluated and all(line["mean"] >= 0 for line in evaluated), "answers without a digit would be below 0"


def test_eval_shaped_adds_the_penalty_and_passes_by_task_score(tmp_path: Path, capsys) -> None:
    evaluation = {"num_tasks": 4, "samples_per_task": 2, "shaped": True, "pass_threshold": 0.0}
    recipe = runs.write(
        tmp_path, steps=1, rollout={"max_new_tokens": 48}, rewards=REWARDS, algorithm=DR_GRPO, eval=evaluation
    )
    code, text = train(capsys, recipe)
    assert code == 0, text
    answers = runs.json_lines(tmp_path / "run" / "evaluations" / "step-000001.jsonl")
    penalties = [-0.5 * min(max(answer["num_tokens"] - 8, 0) / 40, 1) for answer in answers]
    assert len(answers) == 8 and min(penalties) < 0
    for answer, penalty in zip(answers, penalties, strict=True):
        assert answer["task_score"] == pytest.approx(sum(map(str.isdigit, answer["answer"])) / 48)
        assert answer["score"] == pytest.approx(answer["task_score"] + penalty)
    row = runs.json_lines(tmp_path / "run" / "eval.jsonl")[-1]
    assert row["mean"] == pytest.approx(sum(answer["score"] for answer in answers) / 8) and row["mean"] < 0
    assert row["pass@1"] == 1.0


def test_eval_function_scores_held_out_tasks_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evaluation = {"num_tasks": 4}
    recipe = runs.write(tmp_path, steps=1, eval=evaluation)
    (tmp_path / "held_out.py").write_text(
        "def score(completions, **columns):\n    return [-2.0 for _ in completions]\n"
    )
    code, text = train(capsys, recipe, "--rewards.eval_function", f"{tmp_path / 'held_out.py'}:score")
    assert code == 0, text
    assert [row["mean"] for row in runs.json_lines(tmp_path / "run" / "eval.jsonl")] == [-2.0, -2.0]
    assert runs.rows(tmp_path)[-1]["reward/mean"] > 0
    where = ["--run.dir", str(tmp_path / "other")]
    code, text = train(capsys, recipe, *where, "--rewards.eval_function", "no_such_reward")
    assert code == 2 and "rewards.eval_function: 'no_such_reward' is neither built in" in text


# Metrics of a step that verl's users look for: times of its parts, prompts, advantages, batches drawn


PARTS = ("time/logprobs_s", "time/reference_s", "time/values_s", "time/update_s")


def rows_of(folder: Path, **tables: object) -> list[dict[str, float]]:
    recipe = runs.write(folder, steps=3, **tables)  # type: ignore[arg-type]
    assert cli.main(["train", str(recipe)]) == 0
    return runs.rows(folder)


def test_the_parts_of_a_ppo_step_are_timed(tmp_path: Path) -> None:
    rows = rows_of(
        tmp_path,
        algorithm={"advantage": "gae", "kl_coef": 0.01, "kl_in": "loss"},
        train={"epochs_per_step": 2},
    )
    for row in rows:
        assert all(row[part] > 0 for part in PARTS)
        assert sum(row[part] for part in PARTS) <= row["time/train_s"]
        assert 0 < row["time/critic_s"] < row["time/update_s"]
        assert "time/teacher_s" not in row


def test_the_passes_of_a_kl_in_the_reward_are_timed(tmp_path: Path) -> None:
    for row in rows_of(tmp_path, algorithm={"kl_coef": 0.01, "kl_in": "reward"}):
        parts = ("time/logprobs_s", "time/reference_s", "time/update_s")
        assert all(row[part] > 0 for part in parts)
        assert sum(row[part] for part in parts) <= row["time/train_s"]


def test_prompts_answers_advantages_and_batches(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, filters={"zero_variance": True})
    records = runs.records(tmp_path / "run")
    for row in rows:
        assert row["time/update_s"] > 0, "what a step does not do has no time"
        assert not {"time/reference_s", "time/values_s", "time/critic_s"} & row.keys()
        trained = [r for r in records if r["step"] == row["step"] and r["outcome"] == "trained"]
        prompts = [len(r["prompt_ids"]) for r in trained if r["prompt_ids"]]  # the first of a group has it
        assert [row[f"length/prompt_{name}"] for name in ("min", "max")] == [min(prompts), max(prompts)]
        assert np.isclose(row["length/prompt_mean"], np.mean(prompts))
        assert row["length/min"] <= row["length/mean"] <= row["length/max"]
        assert row["advantage/min"] < 0 < row["advantage/max"] and row["advantage/std"] > 0
        assert row["advantage/min"] <= row["advantage/mean"] <= row["advantage/max"]
    drawn = sum(row["groups/batches_drawn"] for row in rows) * 3  # groups a step
    assert np.isclose(drawn, rows[-1]["groups/admitted"])


# rollout.keep_special_tokens: <think> as a special token, in every text that a run makes of an answer


CODE = """
def of_trl(prompts, completions, **columns):
    text = completions[0] if isinstance(completions[0], str) else completions[0][-1]["content"]
    return [float(text == "<think>3</think>4")] * len(completions)

def of_verl(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str == "<think>3</think>4")
"""
ROWS = [{"prompt": f"{n}+1=", "answer": "4"} for n in range(8)]
FULL = '{"pattern": "<think>.+?</think>.+"}'


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Of a run whose answers are all <think>3</think>4<|end|><eos>; <|end|> ends turns in the chat template."""
    template = "{% for m in messages %}{{ m['role'] + ':' + m['content'] + '<|end|>' }}{% endfor %}"
    tokenizer = character_tokenizer(template + "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>", "<|end|>"]})
    ids = tokenizer.encode("<think>3</think>4<|end|>", add_special_tokens=False)
    tokenizer.save_pretrained(tmp_path / "model")
    tiny.model(vocab_size=len(tokenizer)).save_pretrained(tmp_path / "model")
    (tmp_path / "mine.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    return {
        "model": {"path": str(tmp_path / "model"), "dtype": "float32"},
        "tasks": ROWS, "threads": 1, "groups_per_step": 2, "group_size": 2, "max_new_tokens": 16, "num_steps": 1,
        "eval": {"num_tasks": 2, "at_start": True},
        "config": {
            "rollout.logits.forced_token_ids": [*ids, 1], "tasks.eval_fraction": 0.3, "track.live": "plain",
            "run.dir": str(tmp_path / "out"), "tasks.answer_rule": "full_text",
        },
    }  # fmt: skip


@pytest.mark.parametrize(("keep", "score", "text"), [(True, 1.0, "<think>3</think>4"), (False, 0.0, "34")])
def test_rewards_and_records_have_special_tokens(settings: dict[str, Any], keep: bool, score: float, text: str) -> None:
    functions = [{"function": name} for name in ("mine.py:of_trl", "mine.py:of_verl", f"format/{FULL}")]
    settings["config"] |= {"rewards.functions": functions, "rollout.keep_special_tokens": keep}
    run = rollover.train(**settings)
    records = list(run.records())
    assert {(record["completion"], record["score"]) for record in records} == {(text, 3 * score)}
    assert all(len(record["extras"]) == 3 and set(record["extras"].values()) == {score} for record in records)
    assert run.evaluations[0]["mean"] == 3 * score


# A run that trained nothing in its whole life ends with exit code 2 and the reason; one that is finished with 0


def test_a_run_that_is_not_to_train(tmp_path: Path) -> None:
    assert main(["train", str(runs.write(tmp_path, steps=0))]) == 0


TRAINED = {"grad_norm": 0.3, "train/updates": 1.0}


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([], "no step was made"),
        ([{"grad_norm": 0.0, "train/updates": 1.0}], "every gradient was 0. Look"),
        ([{"grad_norm": None, "train/updates": 0.0, "train/skipped_steps": 1.0}], "every update was skipped"),
        ([{"grad_norm": 0.0, "train/updates": 1.0}, TRAINED], ""),
        ([{"train/updates": 1.0}], ""),
    ],
)
def test_the_reason(rows: list[dict[str, Any]], reason: str) -> None:
    found = reason_nothing_trained(Config(), rows)
    assert found.startswith(reason) and bool(found) == bool(reason)


# run.threads: a run with "auto" trains and generates as it should, and with a number it is the same run every time


USUAL = {"in_flight_groups": None, "interrupt": "never", "max_staleness": None}
AHEAD = {"overlap": True, "in_flight_groups": 6, "max_staleness": 1, "interrupt": "on_weight_update"}


def trained_threads(folder: Path, threads: int | str, **tables: Any) -> list[dict[str, float]]:
    assert main(["train", str(runs.write(folder, steps=2, run={"threads": threads}, **tables))]) == 0
    return runs.rows(folder)


@pytest.mark.parametrize(
    "tables",
    [
        {"rollout": USUAL},
        {"rollout": AHEAD, "engine": {"kind": "process"}},
    ],
    ids=["synchronous", "beside generation"],
)
def test_auto_trains_and_generates(tmp_path: Path, tables: dict[str, Any]) -> None:
    rows = trained_threads(tmp_path, "auto", **tables)
    assert len(rows) == 2 and np.isfinite([row["loss"] for row in rows]).all()
    for row in rows:
        assert row["tokens/generated"] == row["tokens/trained"] + row["tokens/dropped"] + row["tokens/held"]
        assert row["mismatch/logprob_abs_max"] < 1e-3 or tables["rollout"] is AHEAD, "both compute the same"
        assert 1 <= row["train/threads"] <= cores()
    assert all(1 <= row["engine/threads"] <= cores() for row in rows if "engine/threads" in row)
    assert "engine/threads" in rows[-1] or "engine/threads" in rows[0]
    assert rows[-1]["engine/decode_s"] <= rows[-1]["engine/decode_thread_s"] <= cores() * rows[-1]["engine/decode_s"]


def test_a_number_is_that_number_and_the_same_run_every_time(tmp_path: Path) -> None:
    """fp32: no bit of the weights differs."""
    weights = []
    for name in ("one", "other"):
        rows = trained_threads(tmp_path / name, 2, rollout=USUAL)
        assert all(row["train/threads"] == row["engine/threads"] == 2 for row in rows)
        weights.append(safetensors.numpy.load_file(next((tmp_path / name / "run" / "model").glob("*.safetensors"))))
    one, other = weights
    assert one.keys() == other.keys() and all(np.array_equal(one[k], other[k]) for k in one)


def test_how_threads_wait_reaches_the_openmp_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GNU's prints what it has read, when it is loaded."""
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    recipe = runs.write(tmp_path, run={"threads": None})
    environment = runs.environment() | {"OMP_DISPLAY_ENV": "verbose"}
    words = runs.command(
        "sample", recipe, "--prompt", "count", "--rollout.max_new_tokens", "4", "--run.threads", "auto"
    )
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    if "GOMP_SPINCOUNT" not in done.stderr:
        pytest.skip("torch has another OpenMP library than GNU's")
    spins = brief_waiting(RunConfig(threads="auto"))["GOMP_SPINCOUNT"]
    assert f"GOMP_SPINCOUNT = '{spins}'" in done.stderr


@pytest.mark.slow
def test_the_script_for_a_busy_machine_compares_both_ways(tmp_path: Path) -> None:
    """Its speeds are not tested."""
    kinds = ("decode", "train")
    tiny.save(tmp_path / "model")
    words = ["--model", str(tmp_path / "model"), "--beside", "0", "1", "--runs", "1", "--what", *kinds]
    args = busy_machine.arguments(words)
    args.seconds = args.settle_s = 0.1
    said: list[dict[str, Any]] = []
    results = busy_machine.measure(args, said.append)
    assert [(r["beside"], r["what"], r["way"]) for r in results] == [
        (num, kind, way) for num in (0, 1) for kind in kinds for way in ("fixed", "auto")
    ]
    assert all(len(r["runs"]) == 1 and r["tokens_per_s"] > 0 for r in results)
    assert all(r["threads"] == cores() for r in results if r["way"] == "fixed")
    ratios = busy_machine.ratios(results)
    assert ratios["decode_fixed_beside_0"] == 1 and ratios[f"{kinds[-1]}_auto_beside_1"] > 0
