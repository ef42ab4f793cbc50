"""The local backend and a toy one under the contract, and the training step on one that is not ours."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

import tiny
from contract import trainer_contract
from rollover.config import Config
from rollover.engine.build import EngineSetup, build_engine
from rollover.functions import FunctionError
from rollover.trainer.backend import BackendLost, TrainerBackend
from rollover.trainer.batch import Batch
from rollover.trainer.custom_backend import CustomBackend
from rollover.trainer.objective import Counts
from rollover.trainer.trainer import build_trainer
from samples import random_samples

TOY = f"{Path(__file__).with_name('toy_backend.py')}:Bigrams"
SAMPLES = random_samples(3)


def config(**tables: dict[str, Any]) -> Config:
    values: dict[str, dict[str, Any]] = {
        "model": {"dtype": "float32"},
        "run": {"threads": 1},
        "rollout": {"max_new_tokens": 16, "groups_per_step": 3},
        "train": {"learning_rate": 1e-2, "num_steps": 10, "micro_batch_tokens": 60},
        "engine": {"kv_memory_gb": 0.05},
    }
    return Config.model_validate(values | tables)


def local(*, engine: bool = True, **tables: dict[str, Any]) -> TrainerBackend:
    of, loaded = config(**tables), tiny.loaded()
    return build_trainer(of, loaded, build_engine(EngineSetup(of, lambda: loaded, 1)) if engine else None).backend


def toy() -> TrainerBackend:
    of = config(train={"learning_rate": 1.0, "num_steps": 10}, backend={"type": TOY})
    return build_trainer(of, tiny.loaded()).backend


def subject(**tables: dict[str, Any]) -> trainer_contract.Subject:
    return trainer_contract.Subject(lambda: local(**tables), SAMPLES)


SUBJECTS = {
    "local": subject(),
    "local, LoRA": subject(model={"dtype": "float32", "lora": {"rank": 4}}),
    "local, bfloat16": trainer_contract.Subject(
        lambda: local(engine=False, model={"dtype": "bfloat16"}), SAMPLES, samples_with_an_engine=False
    ),
    "toy": trainer_contract.Subject(toy, SAMPLES),
}


@pytest.mark.parametrize("name", SUBJECTS)
@pytest.mark.parametrize("check", trainer_contract.CHECKS, ids=lambda check: check.__name__)
def test_trainer_backend(check, name: str) -> None:
    asyncio.run(check(SUBJECTS[name]))


def test_the_step_over_minibatches_runs_on_a_backend_of_ones_own() -> None:
    """With several minibatches, rejection and what comes with it: it asks for nothing but the verbs."""
    of = config(
        train={"learning_rate": 1.0, "num_steps": 10, "minibatches_per_step": 3},
        algorithm={"rejection": {"token_k3": 2.0}, "ess_step_scaling": True},
        backend={"type": TOY},
    )
    trainer = build_trainer(of, tiny.loaded())
    metrics = [trainer.train_step(Batch(SAMPLES)) for _ in range(3)]
    assert trainer.policy_version == 3 and not trainer.in_update
    assert metrics[0]["ratio/max"] > 1.0 and 0 < metrics[0]["off_policy/rejected_share"] < 1
    assert all(row["grad_norm"] > 0 for row in metrics)


def test_accumulated_gradients_are_those_of_one_step_on_a_backend_of_ones_own() -> None:
    plain, streamed = (build_trainer(config(backend={"type": TOY}), tiny.loaded()) for _ in range(2))
    streamed.accumulate([s for s in SAMPLES if s.group_id == 1])
    expected, found = plain.train_step(Batch(SAMPLES)), streamed.train_step(Batch(SAMPLES))
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)


def test_what_is_no_backend_is_refused() -> None:
    with pytest.raises(FunctionError, match=r"a object without compute_logprobs, .*save_state"):
        build_trainer(config(backend={"type": TOY.replace("Bigrams", "without_verbs")}), tiny.loaded())
    with pytest.raises(ValueError, match="nowhere"):
        build_trainer(config(backend={"type": "nowhere:make"}), tiny.loaded())
    with pytest.raises(ValueError, match=r'"locl" is none of local.* Did you mean "local"'):
        config(backend={"type": "locl"})


def test_a_backend_with_the_third_argument_of_before_is_told_where_streams_are_now() -> None:
    backend = toy().backend  # type: ignore[attr-defined]
    backend.forward_backward = lambda samples, counts, known=MappingProxyType({}): None
    with pytest.raises(FunctionError, match=r"`known`. Now it gets samples and counts alone, .*proximal_logprobs"):
        CustomBackend(backend, TOY)


@pytest.mark.parametrize(
    ("verb", "gives", "why"),
    [
        ("compute_logprobs", lambda *_: {}, "its compute_logprobs returned None for rollout 0-0, which has"),
        ("compute_logprobs", lambda *_: exit(), "its compute_logprobs failed: SystemExit"),
        ("forward_backward", lambda *_: None, "its forward_backward returned None. Fix it: it must add the gradient"),
        ("optim_step", lambda *_, **__: {"grad_norm": "x"}, "its optim_step returned {'grad_norm': 'x'} (dict)"),
        ("save_state", lambda *_: {}, "its save_state returned {} (dict)"),
    ],
)
def test_what_a_backend_of_ones_own_does_wrongly_is_said_as_its_own_fault(verb: str, gives: Any, why: str) -> None:
    backend = toy()
    setattr(backend.backend, verb, gives)  # type: ignore[attr-defined]

    def every_verb() -> None:
        backend.compute_logprobs(SAMPLES)
        backend.forward_backward(SAMPLES, Counts.from_samples(SAMPLES))
        backend.optim_step()
        backend.save_state()

    with pytest.raises(FunctionError) as caught:
        every_verb()
    assert f"backend.type = {TOY!r}: {why}" in str(caught.value) and str(caught.value).endswith("(trainer/backend.py)")


def test_a_backend_of_ones_own_that_is_lost_says_so_itself() -> None:
    backend = toy()

    def lost(*_: Any) -> None:
        raise BackendLost("rank 1 has ended")

    backend.backend.compute_logprobs = lost  # type: ignore[attr-defined]
    with pytest.raises(BackendLost, match="^rank 1 has ended$"):
        backend.compute_logprobs(SAMPLES)
