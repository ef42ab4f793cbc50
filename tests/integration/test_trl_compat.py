"""rollover.compat.trl: scripts for TRL as they are, and their reward functions."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import runs
from reward_functions import has_letter, share_of_letters, unique_chars
from transformers import TrainerCallback

import rollover
import tiny
from documents import blocks
from rollover.api.settings import Arguments
from rollover.compat import trl as ours
from rollover.config import ConfigError
from rollover.plugins.trl.arguments import convert_arguments

# TRL's scripts over `rollover.compat.trl`: what its documentation shows, on a tiny model and rows of the test's own


LETTERS = "abcdefgh"
TEXTS = [{"prompt": f"say {a}{b}", "letter": a} for a in LETTERS for b in LETTERS[:3]]
CHATS = [{"prompt": [{"role": "user", "content": row["prompt"]}], "letter": row["letter"]} for row in TEXTS]
FAST = {
    "use_cpu": True, "bf16": False, "learning_rate": 2e-2, "per_device_train_batch_size": 8, "num_generations": 4,
    "max_completion_length": 6, "max_steps": 3, "logging_steps": 1, "save_strategy": "no", "report_to": "none",
    "gradient_checkpointing": False, "lr_scheduler_type": "constant",
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.save(tmp_path_factory.mktemp("compat") / "model"))


def dataset(rows: list[dict[str, Any]]) -> Any:
    return pytest.importorskip("datasets").Dataset.from_list(rows)


def test_the_program_of_the_page_runs(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    monkeypatch.chdir(tmp_path)
    (block,) = [b for b in blocks() if b.page.name == "coming-from.md" and b.language == "python"]
    exec(compile(block.text.replace("smollm2-135m", model), block.name, "exec"), {"__name__": "page"})
    assert len((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()) == 2


def test_the_quick_start(model: str, tmp_path: Path) -> None:
    args = ours.GRPOConfig(output_dir=str(tmp_path / "out"), **FAST)
    trainer = ours.GRPOTrainer(model=model, reward_funcs=share_of_letters, args=args, train_dataset=dataset(TEXTS))
    output = trainer.train()
    assert output.global_step == trainer.state.global_step == 3
    records = list(trainer.run.records())
    assert [sum(r["step"] == n for r in records) for n in (1, 2, 3)] == [8, 8, 8]
    assert {r["prompt"] for r in records} <= {row["prompt"] for row in TEXTS}  # as they are, without a chat template
    steps = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert [entry["step"] for entry in steps] == [1, 2, 3]
    assert steps[0]["rewards/share_of_letters/mean"] == steps[0]["reward"]
    trainer.save_model(str(tmp_path / "saved"))
    assert trainer.model.num_parameters() == tiny.model().num_parameters()
    assert (tmp_path / "saved" / "config.json").is_file()


@pytest.mark.slow
def test_several_rewards_with_weights_on_messages(model: str, tmp_path: Path) -> None:
    args = ours.GRPOConfig(str(tmp_path / "out"), reward_weights=[0.5, 2.0], steps_per_generation=2, **FAST)
    trainer = ours.GRPOTrainer(
        model=tiny.model(), reward_funcs=[unique_chars, has_letter], args=args, train_dataset=dataset(CHATS),
        eval_dataset=dataset(CHATS[:3]), processing_class=tiny.tokenizer(),
    )  # fmt: skip
    before = trainer.model.get_input_embeddings().weight.detach().clone()
    trainer.train()
    assert trainer.state.global_step == 4  # two updates a step
    assert not before.equal(trainer.model.get_input_embeddings().weight)
    records = list(trainer.run.records())
    assert len(records) == 2 * 16
    for record in records:
        parts = {name: record["extras"].get(name) for name in ("unique_chars", "has_letter")}
        assert record["score"] == pytest.approx(0.5 * parts["unique_chars"] + 2.0 * (parts["has_letter"] or 0.0))
        assert (parts["has_letter"] is None) == (record["columns"]["letter"] == "a")
    assert trainer.state.log_history[0]["has_letter.asked"] == 2.0
    assert 0 < trainer.evaluate()["eval_reward"] < 10


@pytest.mark.slow
def test_adapters(model: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    args = ours.GRPOConfig(str(tmp_path / "out"), beta=0.04, loss_type="grpo", **FAST)
    trainer = ours.GRPOTrainer(
        model=model, reward_funcs=lambda completions, **_: [float(len(c)) for c in completions], args=args,
        train_dataset=dataset(TEXTS), peft_config=peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"]),
    )  # fmt: skip
    trainer.train()
    assert trainer.run.config["model"]["lora"]["rank"] == 4
    trainer.save_model(str(tmp_path / "saved"))
    saved = json.loads((tmp_path / "saved" / "adapter_config.json").read_text())
    assert (saved["r"], saved["lora_alpha"]) == (4, 8)


def peft_model(model: str, **options: Any) -> Any:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model)
    lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **options)
    return peft.get_peft_model(base, lora)


def test_peft_model_is_trained_in_place(model: str, tmp_path: Path) -> None:
    adapted = peft_model(model, init_lora_weights=False)
    before = {name: tensor.detach().clone() for name, tensor in adapted.named_parameters()}
    fields = FAST | {"max_steps": 1, "learning_rate": 1e-3}
    trainer = ours.GRPOTrainer(
        model=adapted, reward_funcs=share_of_letters, train_dataset=TEXTS,
        args=ours.GRPOConfig(str(tmp_path / "out"), warmup_ratio=0.5, max_prompt_length=50, **fields),
    )  # fmt: skip
    trainer.train()
    config = trainer.run.config
    assert (config["model"]["lora"]["rank"], config["model"]["lora"]["target_modules"]) == (4, ["q_proj", "v_proj"])
    assert config["tasks"]["max_prompt_tokens"] == 50 and config["train"]["warmup_ratio"] == 0
    assert config["model"]["lora"]["path"]
    for name, tensor in adapted.named_parameters():
        same = tensor.equal(before[name])
        assert same == (".lora_" not in name), name
        if not same:  # one step away from those that were handed over
            assert (tensor - before[name]).abs().max() < 2e-3, name


def test_peft_model_with_a_second_configuration_is_refused(model: str, tmp_path: Path) -> None:
    adapted = peft_model(model)
    with pytest.raises(ConfigError, match="is a PeftModel, which has adapters: leave out peft_config"):
        ours.GRPOTrainer(adapted, share_of_letters, ours.GRPOConfig(str(tmp_path)), TEXTS, peft_config=object())


class Stops(TrainerCallback):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        self.seen.append(f"step {state.global_step}")
        control.should_training_stop = state.global_step == 2
        return control

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.seen += ["log"] if "reward" in logs else []

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append("end")


def test_a_callback_is_told_and_ends_the_run_and_a_reward_sees_the_step(model: str, tmp_path: Path) -> None:
    def late(completions: list[str], trainer_state: Any, **kwargs: Any) -> list[float]:
        import sys

        assert "torch" not in sys.modules, "a worker loads no trainer"
        return [float(trainer_state.global_step) for _ in completions]

    callback = Stops()
    args = ours.GRPOConfig(str(tmp_path / "out"), **{**FAST, "max_steps": 9})
    trainer = ours.GRPOTrainer(model, late, args, TEXTS, callbacks=[callback])
    trainer.train()
    assert callback.seen == ["step 1", "log", "step 2", "log", "end"]
    assert [row["reward/mean"] for row in trainer.run.metrics] == [0.0, 1.0]
    trainer.save_model(str(tmp_path / "saved"))
    assert (tmp_path / "saved" / "config.json").is_file()


@pytest.mark.slow
def test_a_run_is_evaluated_before_it_begins_and_goes_on_in_another_program(model: str, tmp_path: Path) -> None:
    def trainer(max_steps: int) -> ours.GRPOTrainer:
        args = ours.GRPOConfig(str(tmp_path / "out"), **{**FAST, "max_steps": max_steps})
        return ours.GRPOTrainer(model, share_of_letters, args, TEXTS, eval_dataset=TEXTS[:3])

    first = trainer(2)
    before = first.evaluate()
    assert 0 <= before["eval_reward"] <= 1 and first.state.log_history[-1]["step"] == 0
    assert (tmp_path / "out" / "before_training").is_dir() and not (tmp_path / "out" / "metrics.jsonl").exists()
    first.train()
    records = {r["rollout_id"]: r["completion"] for r in first.run.records()}
    with pytest.raises(ValueError, match="holds a run already"):
        trainer(3).train()
    second = trainer(3)
    output = second.train(resume_from_checkpoint=True)
    assert output.global_step == 3 and [row["step"] for row in second.run.metrics] == [1, 2, 3]
    assert [entry["step"] for entry in second.state.log_history if "reward" in entry] == [3]
    kept = {r["rollout_id"]: r["completion"] for r in second.run.records() if r["step"] <= 2}
    assert kept == records and len(kept) == 16
    assert 0 <= second.evaluate()["eval_reward"] <= 1
    with pytest.raises(ConfigError, match="is no run's folder"):
        trainer(3).train(resume_from_checkpoint=str(tmp_path))


def fields_of(model: str, **fields: Any) -> dict[str, Any]:
    """Keys of ours that a GRPOConfig with these fields says."""
    return convert_arguments(
        ours.GRPOConfig("out", max_steps=2, **fields), model=model, reward_funcs=[share_of_letters],
        train_dataset=TEXTS, eval_dataset=None, peft_config=None, refused={},
    ).values  # fmt: skip


def test_fields_of_earlier_releases_are_taken(model: str) -> None:
    assert not {"tasks.truncation", "train.warmup_ratio"} & fields_of(model).keys()
    found = fields_of(model, max_prompt_length=256, warmup_ratio=0.1)
    assert (found["tasks.max_prompt_tokens"], found["tasks.truncation"]) == (256, "left")
    assert found["train.warmup_ratio"] == 0.1
    both = fields_of(model, warmup_steps=3, warmup_ratio=0.1)
    assert both["train.warmup_steps"] == 3 and "train.warmup_ratio" not in both


def test_rewards_with_names_of_settings_get_others(model: str) -> None:
    def score(completions: list[str], **columns: Any) -> list[float]:
        return [1.0 for _ in completions]

    def run(*rewards: Any) -> Any:
        args = ours.GRPOConfig("out", max_steps=2)
        return convert_arguments(
            args, model=model, reward_funcs=rewards, train_dataset=TEXTS, eval_dataset=None, peft_config=None,
            refused={},
        )  # fmt: skip

    assert run(score, score, share_of_letters).reward_names == ["score_reward", "score_reward_2", "share_of_letters"]
    assert run(score).reward_names == ["score"] and "rewards.functions" not in run(score).values
    Arguments(config=run(score, share_of_letters).values, tasks=TEXTS).settle().release()


def test_a_run_is_shown_in_the_tools_that_report_to_names(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def track(**fields: Any) -> dict[str, Any]:
        return {key: value for key, value in fields_of(model, **fields).items() if key.startswith("track.")}

    assert track() == track(report_to="none", run_name="r") == {}
    assert track(report_to="wandb") == {"track.trackers": ["wandb"], "track.tracker_rollouts": 0}
    shown = track(report_to=["trackio", "tensorboard"], project="mine", log_completions=True)
    assert shown == {"track.trackers": ["trackio", "tensorboard"], "track.project": "mine"}
    monkeypatch.setattr("rollover.plugins.trl.arguments.is_installed", lambda name: name == "mlflow")
    assert track(report_to="all")["track.trackers"] == ["mlflow"]
    with pytest.warns(UserWarning, match="report_to=.'comet_ml', 'mlflow'.*there is no comet_ml"):
        assert track(report_to=["comet_ml", "mlflow"])["track.trackers"] == ["mlflow"]


class Streamed:
    """Rows without a length, as datasets.IterableDataset."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        yield from TEXTS


class NeedsMore(TrainerCallback):
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        raise AssertionError


@pytest.mark.parametrize(
    ("fields", "arguments", "said"),
    [
        ({"use_adaptive_entropy": True}, {}, "use_adaptive_entropy: the weight of the entropy bonus is fixed"),
        ({"neftune_noise_alpha": 5.0}, {}, "neftune_noise_alpha"),
        ({"loss_type": "surprise"}, {}, "loss_type: surprise is no loss"),
        ({"reward_weights": [1.0, 2.0]}, {}, "2 weights of 1 reward functions"),
        ({}, {"tools": [len]}, "tools: tools are methods of a class"),
        ({}, {"environment_factory": object}, "environment_factory"),
        ({}, {"rollout_func": len}, "rollout_func"),
        ({}, {"quantization_config": object()}, "quantization_config"),
        ({}, {"optimizers": (object(), None)}, "optimizers"),
        ({}, {"callbacks": [NeedsMore()]}, "NeedsMore.on_pre_optimizer_step would never be called"),
        ({}, {"train_dataset": [{"question": "1"}]}, "no column prompt"),
        ({"max_steps": -1}, {"train_dataset": Streamed()}, "set max_steps"),
        ({}, {"train_dataset": iter(TEXTS)}, "which is read once"),
        ({"max_steps": -1}, {"train_dataset": TEXTS[:1]}, "has 1 rows, and a step takes 2"),
        ({}, {"eval_dataset": {"a": TEXTS}}, "eval_dataset is a dict of a"),
        ({}, {"peft_config": object()}, "peft_config is a object"),
        ({}, {"reward_funcs": [3]}, "reward_funcs has a int"),
    ],
)
def test_what_has_no_counterpart_is_refused_by_name(
    model: str, tmp_path: Path, fields: dict[str, Any], arguments: dict[str, Any], said: str
) -> None:
    given = {"model": model, "reward_funcs": share_of_letters, "train_dataset": TEXTS} | arguments
    with pytest.raises(ConfigError, match=said):
        ours.GRPOTrainer(args=ours.GRPOConfig(str(tmp_path), **{**FAST, **fields}), **given)


def test_epochs_become_steps_and_enumerations_are_read(model: str, tmp_path: Path) -> None:
    from transformers import SchedulerType

    fields = {**FAST, "max_steps": -1, "num_train_epochs": 2, "lr_scheduler_type": SchedulerType.COSINE}
    trainer = ours.GRPOTrainer(model, share_of_letters, ours.GRPOConfig(str(tmp_path), **fields), TEXTS)
    assert trainer.state.max_steps == 2 * len(TEXTS) // 2
    with pytest.raises(TypeError, match="not_a_field"):
        ours.GRPOConfig(not_a_field=1)  # type: ignore[call-arg]


@pytest.mark.slow
def test_it_learns_as_trl_does_of_as_many_samples(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One seed, 25 steps of 16 samples each: the share of letters rises by as much, give or take a third."""
    trl = pytest.importorskip("trl")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    fields = {**FAST, "max_steps": 25, "per_device_train_batch_size": 16, "learning_rate": 5e-3, "seed": 7}

    def learned(library: Any, make: Callable[[Any], Any]) -> tuple[list[float], Any]:
        args = library.GRPOConfig(output_dir=str(tmp_path / library.__name__), disable_tqdm=True, **fields)
        trainer = make(args)
        trainer.train()
        return [entry["reward"] for entry in trainer.state.log_history if "reward" in entry], trainer

    samples: list[int] = []

    def counted(completions: list[str], **kwargs: Any) -> list[float]:
        samples.append(len(completions))
        return share_of_letters(completions)

    theirs, _ = learned(
        trl, lambda args: trl.GRPOTrainer(model, counted, args, dataset(TEXTS), processing_class=tiny.tokenizer())
    )
    mine, trainer = learned(ours, lambda args: ours.GRPOTrainer(model, share_of_letters, args, dataset(TEXTS)))
    assert samples == [16] * 25
    records = list(trainer.run.records())
    assert [sum(r["step"] == n for r in records) for n in range(1, 26)] == samples

    def rise(rewards: list[float]) -> float:
        return sum(rewards[-5:]) / 5 - sum(rewards[:5]) / 5

    print(f"rise of TRL {rise(theirs):.3f}, here {rise(mine):.3f}")
    assert rise(theirs) > 0.15
    assert rise(mine) == pytest.approx(rise(theirs), rel=1 / 3)


def test_off_policy_mask_threshold_of_zero_masks(model: str, tmp_path: Path) -> None:
    args = ours.GRPOConfig(
        str(tmp_path / "out"), off_policy_mask_threshold=0.0, num_iterations=3, **{**FAST, "max_steps": 6}
    )
    trainer = ours.GRPOTrainer(model=model, reward_funcs=share_of_letters, args=args, train_dataset=dataset(TEXTS))
    trainer.train()
    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert max(row.get("off_policy/masked_share", 0.0) for row in rows) > 0


# Reward functions of TRL's signature in runs without TRL's trainer


CODE = """
def warm(completions, trainer_state=None, log_metric=None, log_extra=None, **columns):
    log_metric("twice", 2 * trainer_state.global_step)
    log_extra("chars", [len(text) for text in completions])
    return [trainer_state.global_step / trainer_state.max_steps for _ in completions]
"""


def test_trl_reward_sees_the_step_and_logs(tmp_path: Path) -> None:
    runs.write(tmp_path)
    reward = f"{tmp_path}/rewards.py:warm"
    (tmp_path / "rewards.py").write_text(CODE)
    run = rollover.train(
        config={"rewards.functions": [{"function": reward}]},
        model={"path": str(tmp_path / "model"), "dtype": "float32"},
        tasks=[{"prompt": f"count to {i}"} for i in range(8)],
        threads=1, groups_per_step=2, group_size=2, max_new_tokens=4, num_steps=2,
        train={"minibatches_per_step": 2}, **{"run.dir": str(tmp_path / "out"), "track.live": "plain"},
    )  # fmt: skip
    prefix = "reward/extra/warm."
    assert [row["reward/mean"] for row in run.metrics] == [0.0, 0.5]
    assert [row[f"{prefix}twice"] for row in run.metrics] == [0.0, 4.0]
    of = [record["extras"][prefix.removeprefix("reward/extra/") + "chars"] for record in run.records()]
    assert of == [float(len(record["completion"])) for record in run.records()]
