"""What `rollover plan` says that the trainer holds: as many bytes as it does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollover import cli
from rollover.config.load import load_config
from rollover.sim.memory import trainer_memory
from rollover.sim.plan import Figures
from rollover.sim.simulate import Simulation
from rollover.sim.workload import Workload
from unit.sim.earlier_run import write_run

PPO = [("algorithm.preset", "ppo"), ("critic.model", "policy")]
KL = [("algorithm.kl_coef", "0.1")]
LORA = [("model.lora.rank", "8")]


def memory(*overrides: tuple[str, str]):
    return trainer_memory(load_config(["quickstart"], list(overrides)).config)


@pytest.mark.parametrize(
    ("overrides", "sizes"),
    [
        ([], {"policy": 18}),
        ([("model.dtype", "float32")], {"policy": 16}),
        ([("train.optimizer", "muon")], {"policy": 14}),
        ([("train.optimizer", "adamw_8bit")], {"policy": 12}),
        ([("train.optimizer", "sgd")], {"policy": 14}),
        ([("train.optimizer", "sgd"), ("train.momentum", "0")], {"policy": 10}),
        (KL, {"policy": 18, "reference": 2}),
        ([*KL, ("algorithm.reference_path", "other")], {"policy": 18, "reference": 2}),
        ([*KL, ("algorithm.reference_refresh_steps", "2")], {"policy": 18, "reference": 2}),
        (
            [*KL, ("algorithm.reference_refresh_steps", "2"), ("algorithm.reference_mixup", "0.5")],
            {"policy": 18, "reference": 4},
        ),
        (PPO, {"policy": 18, "critic": 18}),
        ([("algorithm.preset", "ppo")], {"policy": 18}),
        ([*PPO[:1], ("critic.model", "other"), ("train.optimizer", "sgd")], {"policy": 14, "critic (of its own)": 18}),
        ([("algorithm.proximal", "snapshot")], {"policy": 18, "earlier versions": 6}),
        ([*KL, *LORA], {"policy": 2}),
        ([("backend.type", "ranks")], {"policy": 16}),
        ([("backend.type", "ranks"), *KL], {"policy": 16, "reference": 2}),
        ([("backend.type", "tinker"), *LORA], {}),
    ],
)
def test_bytes_of_each_part(overrides: list[tuple[str, str]], sizes: dict[str, int]) -> None:
    assert {part.what: part.size for part in memory(*overrides).parts} == sizes


def test_the_models_size_makes_gigabytes_of_them() -> None:
    ranks = [("backend.type", "ranks"), ("backend.num_ranks", "4"), ("plan.parameters_b", "10")]
    held = memory(*ranks)
    assert (held.total_gb, held.spread_over, held.each_gb) == (160, 4, 40)
    assert held.lines() == [
        "Trainer      holds policy 16 bytes a parameter (weights 4, gradients 4, adamw 8): 160.0 GB, spread over 4"
        " ranks, 40.0 GB each, and activations"
    ]
    # A critic from elsewhere has a size of its own.
    assert memory(*PPO[:1], ("critic.model", "other"), ("plan.parameters_b", "10")).total_gb == 180
    assert memory(*PPO, ("plan.parameters_b", "10")).total_gb == 360
    assert memory(("backend.type", "tinker"), *LORA).lines() == []


def test_the_parameters_that_are_held_are_those_of_the_optimizer() -> None:
    """The sums above, of the trainer's own tensors."""
    torch = pytest.importorskip("torch")
    from rollover.trainer.optimizer import Optimizer

    for name in ("adamw", "muon", "sgd"):
        config = load_config(["quickstart"], [("train.optimizer", name), ("model.dtype", "bfloat16")]).config
        module = torch.nn.Linear(64, 64, bias=False)
        optimizer = Optimizer(module, config.train, 10, torch.bfloat16)
        module(torch.ones(1, 64, dtype=torch.bfloat16)).sum().backward()
        held = [*module.parameters(), *optimizer.masters, *optimizer.gradients()]
        optimizer.step()
        kept = [t for slot, t in optimizer.rule.state()[0].items() if t.numel() > 1]
        num_bytes = sum(t.numel() * t.element_size() for t in (*held, *kept))
        assert num_bytes == 64 * 64 * trainer_memory(config).parts[0].size, name


def test_an_epoch_more_takes_as_long_again(capsys: pytest.CaptureFixture[str]) -> None:
    def planned(*words: str) -> dict:
        assert cli.main(["plan", "quickstart", "--json", "--steps", "4", *words]) == 0
        return json.loads(capsys.readouterr().out)

    one, three = planned(), planned("--train.epochs_per_step", "3")
    assert (one["epochs_per_step"], three["epochs_per_step"]) == (1, 3)
    assert three["figures"]["train_s"] == pytest.approx(3 * one["figures"]["train_s"])
    assert three["figures"]["generate_s"] == pytest.approx(one["figures"]["generate_s"])
    assert one["assumed"]["train_tokens_per_s"] == three["assumed"]["train_tokens_per_s"]
    assert [part["size"] for part in one["memory"]["parts"]] == [18]


def test_the_rate_of_an_earlier_run_is_of_one_of_its_epochs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, [[8, 40], [12, 16]], lambda batch: 0.01 + 0.001 * batch, train_rate=100.0)
    for epochs in (1, 2):
        config = load_config(["quickstart"], [("train.epochs_per_step", str(epochs))]).config
        (tmp_path / "config.resolved.json").write_text(config.model_dump_json())
        assert cli.main(["plan", "quickstart", "--json", "--steps", "4", "--from-run", str(tmp_path)]) == 0
        rate = json.loads(capsys.readouterr().out)["assumed"]["train_tokens_per_s"]
        assert rate == pytest.approx(100.0 * epochs)


def test_the_recipe_of_128_gpus_is_planned() -> None:
    """Its scale, for two steps, and what its ranks hold: weights and moments of 32.5 billion parameters."""
    config = load_config(["dapo_qwen2.5_32b"], [("plan.steps", "2")]).config
    held = trainer_memory(config)
    assert (held.spread_over, held.total_gb) == (64, 520) and held.each_gb == pytest.approx(8.1, abs=0.05)
    plan, rollout = config.plan, config.rollout
    assert (plan.engines, plan.trainers) == (16, 64)
    workload = Workload(plan, rollout.rollouts_per_group, rollout.max_new_tokens)
    outcome = Simulation(rollout, plan, config.engine.max_running, workload).run()
    figures = Figures.from_outcome(outcome, plan)
    assert outcome.trained_rollouts == 2 * 512 * 16 and 60 < figures.step_s < 3600
