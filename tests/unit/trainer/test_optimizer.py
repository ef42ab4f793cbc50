"""Masters, accumulation, clipping, schedules, and state."""

from __future__ import annotations

import math

import pytest
import torch

import tiny
from rollover.config import Config, TrainConfig
from rollover.trainer.optimizer import Optimizer, learning_rate


def config(**values) -> TrainConfig:
    return TrainConfig.model_validate({"learning_rate": 1e-2, "max_grad_norm": 0.0, **values})


def linear(dtype: torch.dtype = torch.float32, **values) -> tuple[torch.nn.Linear, Optimizer]:
    torch.manual_seed(0)
    module = torch.nn.Linear(8, 4)
    return module, Optimizer(module, config(**values), 10, dtype)


def test_schedules_by_hand() -> None:
    def rates(**values) -> list[float]:
        cfg = config(learning_rate=1.0, warmup_steps=2, min_lr_ratio=0.1, **values)
        return [learning_rate(cfg, step, 6) for step in (0, 1, 2, 4, 6, 99)]

    assert rates(schedule="constant") == [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert rates(schedule="linear") == pytest.approx([0.5, 1.0, 1.0, 0.55, 0.1, 0.1])
    assert rates(schedule="cosine") == pytest.approx([0.5, 1.0, 1.0, 0.55, 0.1, 0.1])
    quarter = config(learning_rate=1.0, schedule="cosine")
    assert learning_rate(quarter, 1, 4) == pytest.approx(0.5 * (1 + math.cos(math.pi / 4)))


def test_a_warmup_ratio_is_a_share_of_all_steps_rounded_up() -> None:
    cfg = config(learning_rate=1.0, warmup_ratio=0.25, schedule="linear")
    assert [learning_rate(cfg, step, 10) for step in range(4)] == pytest.approx([1 / 3, 2 / 3, 1.0, 1.0])
    assert learning_rate(cfg, 10, 10) == 0.0
    assert learning_rate(config(learning_rate=1.0, warmup_ratio=0.0), 0, 10) == 1.0
    with pytest.raises(ValueError, match="train.warmup_ratio has no effect with train.warmup_steps = 5"):
        Config.model_validate({"train": {"warmup_ratio": 0.1, "warmup_steps": 5}})


def test_float32_equals_torch_adamw_with_clipping_and_decay_on_matrices_only() -> None:
    module, optimizer = linear(weight_decay=0.1, max_grad_norm=0.5, schedule="linear", adam_beta2=0.95)
    torch.manual_seed(0)
    reference = torch.nn.Linear(8, 4)
    adamw = torch.optim.AdamW(
        [{"params": [reference.weight], "weight_decay": 0.1}, {"params": [reference.bias], "weight_decay": 0.0}],
        betas=(0.9, 0.95),
    )
    for step in range(4):
        x = torch.randn(5, 8, generator=torch.Generator().manual_seed(step))
        module(x).square().sum().backward()
        reference(x).square().sum().backward()
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        for param_group in adamw.param_groups:
            param_group["lr"] = 1e-2 * (1 - step / 10)
        adamw.step()
        adamw.zero_grad()
        metrics = optimizer.step()
        assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-5) and metrics["grad_norm"] > 0.5
        assert metrics["learning_rate"] == pytest.approx(1e-2 * (1 - step / 10))
        torch.testing.assert_close(module.weight, reference.weight, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(module.bias, reference.bias, atol=1e-6, rtol=1e-5)


def test_bf16_gradients_accumulate_in_float32() -> None:
    """1 + 64 x 2^-10: in bf16 every small addend would be lost."""
    module, optimizer = linear(torch.bfloat16)
    for scale in [1.0] + [2.0**-10] * 64:
        (module.weight.sum() * scale).backward()
        assert module.weight.grad is None, "the bf16 gradient is freed as soon as it is added"
    gradient = optimizer.gradients()[0]
    assert gradient.dtype == torch.float32
    assert torch.equal(gradient, torch.full((4, 8), 1.0625))


def test_bf16_updates_below_its_resolution_add_up_in_the_masters() -> None:
    module, optimizer = linear(torch.bfloat16, learning_rate=1e-5)
    torch.nn.init.ones_(optimizer.masters[0])
    optimizer.load_state(*optimizer.state())
    assert module.weight.dtype == torch.bfloat16 and bool((module.weight == 1).all())
    for step in range(250):
        module.weight.sum().backward()
        optimizer.step()
        if step == 0:
            assert bool((module.weight == 1).all()), "one step of 1e-5 is lost in bf16"
    torch.testing.assert_close(optimizer.masters[0], torch.full((4, 8), 1 - 250e-5), atol=1e-5, rtol=0)
    assert bool((module.weight < 1).all()), "but not the sum of 250"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_non_finite_gradient_skips_the_step_and_is_counted(dtype: torch.dtype, bad: float) -> None:
    module, optimizer = linear(dtype)
    before = module.weight.detach().clone()
    (module.weight.sum() * bad).backward()
    assert optimizer.step()["train/skipped_steps"] == 1.0
    assert torch.equal(module.weight, before) and not optimizer.gradients()
    module.weight.sum().backward()
    metrics = optimizer.step()
    assert metrics["train/skipped_steps"] == 0.0 and metrics["grad_norm"] == pytest.approx(math.sqrt(32))
    assert not torch.equal(module.weight, before) and module.weight.isfinite().all()


def test_a_rate_that_is_not_finite_skips_the_step_too() -> None:
    """The effective sample size of weights that are not finite scales it; the gradient may be sound all the same."""
    module, optimizer = linear(torch.float32)
    before = module.weight.detach().clone()
    module.weight.sum().backward()
    assert optimizer.step(float("nan"))["train/skipped_steps"] == 1.0
    assert torch.equal(module.weight, before)


def test_tied_weights_have_one_master_with_both_gradients() -> None:
    model = tiny.model()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    optimizer = Optimizer(model, config(), 10, torch.bfloat16)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert optimizer.names.count("model.embed_tokens.weight") == 1 and "lm_head.weight" not in optimizer.names
    (model.lm_head.weight.sum() + 2 * model.model.embed_tokens.weight.sum()).backward()
    assert bool((optimizer.gradients()[0] == 3).all())
    optimizer.step()
    assert torch.equal(model.lm_head.weight, optimizer.masters[0].bfloat16())


def test_only_parameters_are_cast() -> None:
    """Rotary frequencies in bf16 would turn position 500 by a radian."""
    model = tiny.model()
    frequencies = model.model.rotary_emb.inv_freq.clone()
    Optimizer(model, config(), 10, torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert torch.equal(model.model.rotary_emb.inv_freq, frequencies)


def test_frozen_parameters_have_no_master() -> None:
    module = torch.nn.Linear(8, 4)
    module.bias.requires_grad_(False)
    optimizer = Optimizer(module, config(), 10, torch.bfloat16)
    assert optimizer.names == ["weight"] and module.bias.dtype == torch.bfloat16


def test_loading_the_state_of_the_start_forgets_the_moments() -> None:
    module, optimizer = linear()
    tensors, meta = optimizer.state()
    start = {k: v.clone() for k, v in tensors.items()}
    (module.weight * torch.arange(8)).sum().backward()
    optimizer.step()
    optimizer.load_state(start, meta)
    assert optimizer.state()[0].keys() == start.keys() and optimizer.step_count == 0


def test_state_of_another_model_is_refused() -> None:
    tensors, meta = linear()[1].state()
    other = Optimizer(torch.nn.Linear(9, 4), config(), 10, torch.float32)
    with pytest.raises(ValueError, match="another model"):
        other.load_state(tensors, meta)
