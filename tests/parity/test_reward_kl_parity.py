"""The KL in the reward against verl's apply_kl_penalty, and a refreshed reference against TRL's callback."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from local_trainer import build_batch
from rollover.config import AlgorithmConfig, Config
from rollover.trainer.batch import sampled
from rollover.trainer.kept_weights import KeptVersions, KeptWeights
from rollover.trainer.reward_kl import RewardKL
from rollover.types import Sample
from samples import group, rollout, segment

KINDS = {"k1": "kl", "abs": "abs", "k2": "mse", "k3": "low_var_kl"}


def groups(rng: np.random.Generator) -> list[Any]:
    """Three of four: two turns with a token of the environment between, scored at random."""
    made = []
    for g in range(3):
        rollouts = []
        for i in range(4):
            first, second = (segment([7] * int(rng.integers(1, 5)), logprob=-9.0) for _ in range(2))
            parts = [first, segment([8], trainable=False), second]
            rollouts.append(rollout(g, i, float(rng.normal()), parts))
        made.append(group(g, rollouts))
    return made


class Backend:
    """One that gives random log-probs: of the policy at the start of the step, and of the reference."""

    def __init__(self, rng: np.random.Generator, samples: list[Sample]) -> None:
        self.of = {
            version: {s.rollout_id: -3 * rng.random(int(s.mask.sum()), dtype=np.float32) for s in samples}
            for version in (None, 0)
        }

    def compute_logprobs(self, samples: list[Sample], version: Any = None) -> dict[str, np.ndarray]:
        return self.of[version]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("advantage", ["grpo", "dr_grpo", "rloo", "gae"])
@pytest.mark.parametrize("seed", range(2))
def test_penalised_rewards_and_the_coefficient_are_verls(seed: int, advantage: str, kind: str) -> None:
    core_algos, apply_kl_penalty = verls_penalty()
    rng = np.random.default_rng(seed)
    of = AlgorithmConfig.model_validate(
        {"advantage": advantage, "kl_coef": 0.3, "kl_in": "reward", "kl_kind": kind, "kl_target": 0.2, "kl_horizon": 50}
        | ({"kl_max": 10.0} if kind == "k3" else {})
    )
    given = groups(rng)
    samples = sampled(given)
    backend: Any = Backend(rng, samples)
    ours = RewardKL(backend, of)
    for i, s in enumerate(samples):  # on policy, as verl takes its samples to be
        behavior = s.behavior_logprobs.copy()
        behavior[s.mask] = backend.of[None][s.rollout_id]
        samples[i] = s.with_streams(behavior_logprobs=behavior)
    controller = core_algos.AdaptiveKLController(0.3, 0.2, 50)
    width = max(len(s.mask) for s in samples)
    mask_NT, old_NT, ref_NT, scores_NT = (torch.zeros(len(samples), width) for _ in range(4))
    scores = [r.reward.score for g in given for r in g.rollouts]
    for row, s in enumerate(samples):
        places = torch.from_numpy(np.flatnonzero(s.mask))
        mask_NT[row, places] = 1.0
        old_NT[row, places], ref_NT[row, places] = (
            torch.from_numpy(backend.of[version][s.rollout_id]) for version in (None, 0)
        )
        scores_NT[row, places[-1]] = scores[row]
    for _ in range(2):  # the second step has the coefficient that the first one left
        peer = SimpleNamespace(batch=Tensors(len(samples)))
        peer.batch |= {"response_mask": mask_NT, "token_level_scores": scores_NT}
        peer.batch |= {"old_log_probs": old_NT, "ref_log_prob": ref_NT}
        penalties = ours.penalties(samples)
        batch = build_batch(given, of, penalties=penalties)
        peer, metrics = apply_kl_penalty(peer, controller, KINDS[kind])
        rewards_NT = peer.batch["token_level_rewards"]
        assert metrics["actor/reward_kl_penalty"] == pytest.approx(penalties.kl, abs=1e-6)
        assert metrics["actor/reward_kl_penalty_coeff"] == pytest.approx(ours.coef)
        wanted_NT = rewards_NT if advantage == "gae" else verls(core_algos, advantage, rewards_NT, mask_NT)
        for row, s in enumerate(batch.samples):
            wanted = wanted_NT[row, : len(s.mask)].numpy()[s.mask]
            np.testing.assert_allclose(s.advantages[s.mask], wanted, rtol=1e-3, atol=1e-5)  # eps of a deviation
        ours.after_step(penalties)
        assert ours.coef == pytest.approx(controller.value)
    assert ours.coef != 0.3


class Tensors(dict[str, torch.Tensor]):
    """What verl's function reads of a TensorDict."""

    def __init__(self, num_rows: int) -> None:
        self.batch_size = (num_rows,)


def verls_penalty() -> tuple[Any, Callable[..., Any]]:
    """core_algos, and apply_kl_penalty of ray_trainer.py: its code alone, as that file imports what is not here."""
    core_algos = pytest.importorskip("verl.trainer.ppo.core_algos")
    masked_mean = pytest.importorskip("verl.utils.torch_functional").masked_mean
    source = (Path(core_algos.__file__).parent / "ray_trainer.py").read_text(encoding="utf-8")
    (of,) = [n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef) and n.name == "apply_kl_penalty"]
    names: dict[str, Any] = {"core_algos": core_algos, "masked_mean": masked_mean, "torch": torch, "DataProto": object}
    exec(compile(ast.Module([of], []), "ray_trainer.py", "exec"), names)
    return core_algos, names["apply_kl_penalty"]


def verls(core_algos: Any, advantage: str, rewards_NT: torch.Tensor, mask_NT: torch.Tensor) -> torch.Tensor:
    index = np.array([f"uid-{i // 4}" for i in range(len(mask_NT))], dtype=object)
    if advantage == "rloo":
        return core_algos.compute_rloo_outcome_advantage(rewards_NT, mask_NT, index)[0]
    normed = advantage == "grpo"
    return core_algos.compute_grpo_outcome_advantage(
        rewards_NT, mask_NT, index, norm_adv_by_std_in_grpo=normed, config=SimpleNamespace()
    )[0]


@pytest.mark.parametrize("alpha", [1.0, 0.6, 0.01])
def test_a_refreshed_reference_is_trls_bit_for_bit(alpha: float) -> None:
    """Where a training step is one optimizer step, which is what TRL counts."""
    callbacks = pytest.importorskip("trl.trainer.callbacks")
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)
    torch.manual_seed(0)
    policy, reference = torch.nn.Linear(5, 3), torch.nn.Linear(5, 3)
    reference.load_state_dict(policy.state_dict())
    callback = callbacks.SyncRefModelCallback(reference, accelerator)
    config = Config(algorithm={"kl_coef": 0.1, "reference_refresh_steps": 2, "reference_mixup": alpha})
    args = SimpleNamespace(ref_model_sync_steps=2, ref_model_mixup_alpha=alpha)
    kept = KeptWeights(dict(policy.named_parameters()))
    versions = KeptVersions(kept, config)
    versions.begin()
    for version in range(1, 6):
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.add_(torch.randn_like(parameter))
        versions.on_version(version)
        callback.on_step_end(args, SimpleNamespace(global_step=version), None, model=policy)
        state = kept.state()
        for name, parameter in reference.named_parameters():
            assert torch.equal(state[f"kept/reference/{name}"], parameter)
    assert not torch.equal(reference.weight, policy.weight), "version 5 is not taken in"
