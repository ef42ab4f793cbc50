"""The reference policy: other weights than the initial ones, refreshed ones, and the model without its adapters."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_trainer
import torch
from tiny_trainer import restored

import tiny
from rollover.config import Config, LoraConfig
from rollover.config.table import UNSETTLED
from rollover.models.load import load_model
from rollover.trainer.auxiliary_models import load_reference
from rollover.trainer.backend import REFERENCE, Stream
from rollover.trainer.batch import Batch
from rollover.trainer.local_backend import LocalBackend
from rollover.trainer.trainer import Trainer
from samples import random_samples

SAMPLES = random_samples(3)


def trainer(algorithm: Mapping[str, Any], **options: Any) -> Trainer:
    return tiny_trainer.trainer({"kl_coef": 0.1, **algorithm}, num_steps=20, adam_eps=1e-8, **options)


def of(made: Trainer, version: Any = REFERENCE) -> Stream:
    return made.backend.compute_logprobs(SAMPLES, version)


def largest_difference(ours: Stream, theirs: Stream) -> float:
    return max(float(np.abs(ours[key] - theirs[key]).max()) for key in theirs)


def parameters(made: Trainer) -> dict[str, torch.Tensor]:
    assert isinstance(made.backend, LocalBackend)
    return {name: p.detach().clone() for name, p in made.backend.model.named_parameters()}


def test_a_refreshed_reference_is_the_policy_of_that_step() -> None:
    made, seen = trainer({"reference_refresh_steps": 2}), {}
    for version in range(5):
        seen[version] = of(made, None)
        expected = seen[version - version % 2]
        assert all(np.array_equal(found, expected[key]) for key, found in of(made).items())
        kl = made.train_step(Batch(SAMPLES))["kl/reference"]
        assert (kl == 0.0) == (version % 2 == 0), "taken in at steps 2 and 4, after their updates"
    assert largest_difference(seen[0], seen[4]) > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_small_share_of_the_policy_is_not_rounded_away(dtype: torch.dtype) -> None:
    made = trainer({"reference_refresh_steps": 1, "reference_mixup": 0.001}, dtype=dtype)
    before = {k: t.clone() for k, t in made.backend.save_state()[0].items() if k.startswith("kept/reference/")}
    made.train_step(Batch(SAMPLES))
    after = made.backend.save_state()[0]
    assert before
    for name, kept in before.items():
        assert after[name].dtype == torch.float32
        now = parameters(made)[name.rpartition("/")[2]].float()
        torch.testing.assert_close(after[name], kept + 0.001 * (now - kept.float()), rtol=0, atol=1e-7)
    assert any(not torch.equal(after[name], kept) for name, kept in before.items())


# Another model


def config(path: Path, **tables: Mapping[str, Any]) -> Config:
    values = {"model": {"path": str(path), "dtype": "float32"}, "algorithm": {"kl_coef": 0.1}}
    values |= {name: {**values.get(name, {}), **table} for name, table in tables.items()}
    return Config.model_validate(values, context=UNSETTLED)


def test_another_models_weights_are_the_reference(tmp_path: Path) -> None:
    policy, other = tiny.save(tmp_path / "policy"), tiny.save(tmp_path / "other", seed=1)
    path = {"reference_path": str(other)}
    whole = config(policy, algorithm=path)
    loaded = load_model(whole.model)
    made = trainer(path, loaded=loaded, reference=load_reference(whole, loaded))
    theirs = trainer({}, loaded=load_model(config(other).model))
    for _ in range(2):
        assert all(np.array_equal(found, of(theirs, 0)[key]) for key, found in of(made).items())
        assert made.train_step(Batch(SAMPLES))["kl/reference"] > 0.01, "in the first step, too"
    assert load_reference(config(policy), loaded) is None
    # A restart has them from the checkpoint.
    again = trainer(path, reference=parameters(trainer({})))
    restored(made, again)
    assert again.train_step(Batch(SAMPLES)) == made.train_step(Batch(SAMPLES))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"intermediate_size": 128}, r"is \[128, 64\], and the policy's \[96, 64\]"),
        ({"num_hidden_layers": 3}, "only the reference has the weight model.layers.2"),
        ({"family": "qwen3"}, "only the reference has the weight model.layers.0.self_attn.k_norm"),
        ({"rms_norm_eps": 1e-3}, "rms_norm_eps is 0.001, and the policy's 1e-06"),
    ],
    ids=str,
)
def test_a_model_of_another_architecture_is_refused(other: dict[str, Any], message: str, tmp_path: Path) -> None:
    policy, path = tiny.save(tmp_path / "policy"), tiny.save(tmp_path / "other", **other)
    whole = config(policy, algorithm={"reference_path": str(path)})
    with pytest.raises(ValueError, match=message) as error:
        load_reference(whole, load_model(whole.model))
    assert "algorithm.reference_path = " in str(error.value)
    with pytest.raises(ValueError, match=r"algorithm.reference_path = .*cannot be loaded|there is no such folder"):
        load_reference(config(policy, algorithm={"reference_path": "./none"}), load_model(whole.model))


# Adapters

LORA = LoraConfig(rank=4)


@pytest.mark.parametrize("algorithm", [{}, {"reference_path": "model"}], ids=str)
def test_lora_base_is_reference_without_copy(algorithm: dict[str, Any]) -> None:
    made, base = trainer(algorithm, lora=LORA), trainer({})
    for _ in range(2):
        made.train_step(Batch(SAMPLES))
        assert largest_difference(of(made), of(base, 0)) < 1e-6 < largest_difference(of(made, None), of(base, 0))
    kept = [name for name in made.backend.save_state()[0] if name.startswith("kept/")]
    assert all("lora_" in name for name in kept) and bool(kept) == (not algorithm)
    assert made.train_step(Batch(SAMPLES))["grad_norm"] > 0, "the adapters are trained on"


def test_adapters_are_refreshed_as_they_are() -> None:
    made = trainer({"reference_refresh_steps": 2}, lora=LORA)
    for _ in range(2):
        made.train_step(Batch(SAMPLES))
    assert all(np.array_equal(found, of(made, None)[key]) for key, found in of(made).items())
