"""Every option of verl's own PPO trainer is known to `rollover convert`, and its defaults ask nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollover.plugins.convert.conversion import SYSTEMS
from rollover.plugins.convert.files import flatten
from rollover.plugins.convert.mapping import convert

verl = pytest.importorskip("verl")
yaml = pytest.importorskip("yaml")


@pytest.mark.parametrize("trainer", ["ppo_trainer", "ppo_megatron_trainer"])
def test_every_option_of_verls_trainer_is_known_and_its_defaults_ask_nothing(trainer: str) -> None:
    path = Path(verl.__file__).parent / "trainer" / "config" / f"_generated_{trainer}.yaml"
    options = flatten(yaml.safe_load(path.read_text(encoding="utf-8")))
    system = SYSTEMS["verl"]
    assert len(options) > 500
    assert [name for name in options if not any(row.matches(name) for row in system.rows)] == []
    plain = {name: value for name, value in options.items() if "${" not in str(value)}
    assert convert(system, plain).questions == {}


def test_warm_up_is_within_one_training_step_of_verls() -> None:
    """verl's schedule moves once a training step and begins at 0, ours moves with every update and ends as it does."""
    import torch
    from verl.utils.torch_functional import get_constant_schedule_with_warmup

    from rollover.config.load import load_config
    from rollover.trainer.optimizer import learning_rate

    given = {"data.train_batch_size": 128, "actor_rollout_ref.actor.ppo_mini_batch_size": 32}
    given |= {"actor_rollout_ref.actor.optim.lr_warmup_steps": 5, "actor_rollout_ref.actor.optim.lr": 1.0}
    done = convert(SYSTEMS["verl"], dict(SYSTEMS["verl"].base) | given)
    train = load_config([{key: value for key, (value, _) in done.values.items()}]).config.train
    assert train.updates_per_step == 4
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = get_constant_schedule_with_warmup(optimizer, num_warmup_steps=5)
    for step in range(8):
        (before,) = theirs.get_last_lr()
        optimizer.step()
        theirs.step()
        (after,) = theirs.get_last_lr()
        for update in range(4 * step, 4 * step + 4):
            assert before <= learning_rate(train, update, total_steps=400) <= after + 1e-9


def test_options_that_change_what_is_learned_are_in_no_pattern_of_those_that_do_not() -> None:
    system = SYSTEMS["verl"]
    for option, value in {
        "reward.reward_manager.module.path": "mine.py",
        "reward_model.reward_manager": "mine",
        "actor_rollout_ref.actor.fsdp_config.dtype": "float16",
        "actor_rollout_ref.actor.megatron.override_transformer_config.moe_aux_loss_coeff": 0.01,
        "actor_rollout_ref.actor.fsdp_config.qat.enable": True,
        "actor_rollout_ref.rollout.val_kwargs.top_k": 20,
        "actor_rollout_ref.rollout.quantization": "fp8",
        "trainer.v1.trainer_mode": "separate_async",
        "actor_rollout_ref.surprise_workers": 1,
    }.items():
        assert option in convert(system, dict(system.base) | {option: value}).questions, option
