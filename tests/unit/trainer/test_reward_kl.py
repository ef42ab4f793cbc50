"""The KL in the reward (algorithm.kl_in = "reward"): whose log-probs it is of, where it enters, and its coefficient."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_trainer import trainer

from local_trainer import build_batch
from rollover import Played, ready_episodes
from rollover.algorithms.filters import rollout_filters
from rollover.algorithms.kl import AdaptiveKL
from rollover.config import AlgorithmConfig, FiltersConfig, WorkflowConfig
from rollover.config.traits import ADVANTAGES
from rollover.trainer.batch import Batch, sampled
from rollover.trainer.reward_kl import Penalties, RewardKL
from rollover.types import Group, Reward, Sample, SamplingParams, Segment, StopReason, Task

TASK = Task("t0", "test", "mine", prompt="x")


def kl_config(**values: Any) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate({"advantage": "dr_grpo", "kl_coef": 0.5, "kl_in": "reward", **values})


class Known:
    """A backend that knows the log-probs of the policy as it is (None), and of the reference (0)."""

    def __init__(self, policy: dict[str, Any], reference: dict[str, Any]) -> None:
        self.of: dict[Any, dict[str, Any]] = {None: policy, 0: reference}

    def compute_logprobs(self, samples: list[Sample], version: Any = None) -> dict[str, np.ndarray]:
        return {s.rollout_id: np.asarray(self.of[version][s.rollout_id], np.float32) for s in samples}


def known(policy: dict[str, Any], reference: dict[str, Any], **values: Any) -> RewardKL:
    backend: Any = Known(policy, reference)
    return RewardKL(backend, kl_config(**values))


def segment(*tokens: int, trainable: bool = True, version: int = 0) -> Segment:
    ids = np.array(tokens, dtype=np.int32)
    return Segment(ids, np.full(len(ids), -9.0, np.float32), version, SamplingParams(), StopReason.EOS, trainable)


def group(scores: list[float | None], segments: Callable[[int], list[Segment]]) -> Group:
    """A single context of each score."""
    rewards = [Reward(score, error=None if score is not None else "e") for score in scores]
    return ready_episodes(0, TASK, [[Played([((5, 6), segments(i))], r, "policy")] for i, r in enumerate(rewards)])


def turns(i: int) -> list[Segment]:
    """Two turns of two tokens and of one, with a token of the environment between."""
    return [segment(10, 11), segment(7, trainable=False), segment(12)]


def penalties(tokens: dict[str, list[float]]) -> Penalties:
    return Penalties({key: np.array(of, np.float32) for key, of in tokens.items()}, 0.0, 1.0, len(tokens))


def advantages(batch: Batch) -> dict[str, list[float]]:
    return {s.rollout_id: [float(a) for a in s.advantages[s.mask]] for s in batch.samples if s.mask.any()}


def test_what_is_taken_off_by_hand() -> None:
    """coef * (log policy - log reference) at sampled tokens, whatever the sampler's own log-probs (-9 here) are."""
    of = group([1.0, 0.0], turns)
    samples = sampled([of])
    made = known(
        {"0-0": [-1.0, -2.0, -1.0], "0-1": [-1.0, -1.0, -1.0]}, {"0-0": [-1.5, -1.0, -3.0], "0-1": [-1.0, -1.0, -4.0]}
    ).penalties(samples)
    assert made.tokens["0-0"].tolist() == [0.25, -0.5, 0.0, 1.0] and made.tokens["0-1"].tolist() == [0.0, 0.0, 0.0, 1.5]
    # The mean has the weights policy/behavior, which are at the bound of 2 here.
    assert made.kl == pytest.approx(2 * ((0.5 - 1 + 2) / 3 + 3 / 3) / 2) and made.num_rollouts == 2 and made.coef == 0.5
    batch = build_batch([of], kl_config(), penalties=made)
    # 1 - 0.75 = 0.25 and 0 - 1.5 = -1.5: 0.875 from their mean.
    assert advantages(batch) == {"0-0": [0.875] * 3, "0-1": [-0.875] * 3}
    assert [r.reward.score for r in of.rollouts if r.reward] == [1.0, 0.0], "scores stay what they are"
    assert batch.credited.compared[0][0].trajectories[0].reward == Reward(1.0)


def test_k3_and_its_bound_are_taken_off_as_configured() -> None:
    samples = sampled([group([1.0], lambda _: [segment(10, 11)])])
    streams = {"0-0": [-4.0, -1.0]}, {"0-0": [-1.0, -1.0]}
    k3 = np.exp(3.0) - 3.0 - 1
    assert known(*streams, kl_kind="k3").penalties(samples).tokens["0-0"] == pytest.approx([0.5 * k3, 0.0])
    assert known(*streams, kl_kind="k3", kl_max=10.0).penalties(samples).tokens["0-0"] == pytest.approx([5.0, 0.0])


def test_masked_rollouts_are_compared_with_their_kl() -> None:
    """What leaves the loss stays in the baseline, as the same kind of reward; what is too old for the loss does not
    count, as no later token answers for it."""
    of = group([1.0, 0.0], lambda i: [segment(10, version=i), segment(11, version=2)])
    whole, recent = (sampled([of], oldest) for oldest in (0, 1))
    assert [s.mask.tolist() for s in whole] == [[True, True], [True, True]]
    assert [s.mask.tolist() for s in recent] == [[False, True], [True, True]]

    cut = replace(segment(12), stop_reason=StopReason.LENGTH)
    of = group([1.0, 0.0], lambda i: [segment(10, 11), cut if i else segment(12)])
    masks = rollout_filters(FiltersConfig(mask_truncated=True))
    assert [s.mask.sum() for s in sampled([of])] == [3, 3]
    batch = build_batch([of], kl_config(), masks=masks, penalties=penalties({"0-0": [0, 0, 0], "0-1": [1, 1, 2]}))
    assert advantages(batch) == {"0-0": [2.5] * 3}, "1 is 2.5 above the mean of 1 and 0 - 4"


def test_rewards_of_turns_lose_the_kl_of_their_own_turn() -> None:
    """gamma 1/2: (0 - 3) + (1 - 4) / 2 = -4.5 and 1 - 4 = -3; without a KL 0.5 and 1."""
    of = group([1.0, 1.0], turns)
    workflow = WorkflowConfig.model_validate({"credit": "turn_returns", "turn_gamma": 0.5})
    batch = build_batch([of], kl_config(), workflow=workflow, penalties=penalties({"0-0": [1.0, 2.0, 0.0, 4.0]}))
    mean = (-4.5 - 3.0 + 0.5 + 1.0) / 4
    assert advantages(batch) == {
        "0-0": [-4.5 - mean, -4.5 - mean, -3.0 - mean],
        "0-1": [0.5 - mean, 0.5 - mean, 1.0 - mean],
    }


@pytest.mark.parametrize("advantage", [name for name, traits in ADVANTAGES.items() if traits.over_tokens])
def test_a_critic_and_others_over_tokens_get_rewards_per_token(advantage: str) -> None:
    of = group([1.0, None], turns)
    taken = penalties({"0-0": [0.25, -0.5, 9.0, 1.0], "0-1": [0.25, -0.5, 9.0, 1.0]})
    batch = build_batch([of], kl_config(advantage=advantage), penalties=taken)
    assert advantages(batch) == {"0-0": [-0.25, 0.5, 0.0]}, "the score at the last token; a missing one is not trained"
    assert batch.samples[0].advantages.tolist() == [-0.25, 0.5, 0.0, 0.0], "and nothing at the environment's token"


def test_the_expected_gradient_is_that_of_reward_less_kl_though_tokens_are_stale() -> None:
    """Every sequence of two tokens out of three, drawn from a behavior policy that is neither the current one nor the
    reference: with the log-probs of the step's start, and not with the sampler's, the gradient is the objective's."""
    generator, coef = torch.Generator().manual_seed(0), 0.7
    logits, behavior, reference = (torch.randn(4, 3, generator=generator) for _ in range(3))
    logits.requires_grad_(True)
    scores = torch.randn(9, generator=generator)
    sequences = list(itertools.product(range(3), repeat=2))

    def tokens(table: torch.Tensor) -> torch.Tensor:
        """Log-probs of the tokens of each sequence [9, 2]; row 0 of the table is before the first token."""
        logp = table.log_softmax(-1)
        return torch.stack([torch.stack([logp[0, a], logp[1 + a, b]]) for a, b in sequences])

    policy_NT, behavior_NT, reference_NT = tokens(logits), tokens(behavior), tokens(reference)
    policy_N = policy_NT.sum(-1)
    kl = (policy_N.exp() * (policy_N - reference_NT.sum(-1))).sum()
    (wanted,) = torch.autograd.grad((policy_N.exp() * scores).sum() - coef * kl, logits, retain_graph=True)

    samples = sampled([group([0.0] * 9, lambda _: [segment(10, 11)])])
    weights_N = (policy_N - behavior_NT.sum(-1)).detach().exp() * behavior_NT.sum(-1).exp()  # behavior's, corrected

    def found(start_NT: torch.Tensor) -> torch.Tensor:
        streams = ({f"0-{i}": table.detach()[i].numpy() for i in range(9)} for table in (start_NT, reference_NT))
        taken = known(*streams, kl_coef=coef).penalties(samples).tokens
        rewards_N = scores - torch.tensor([float(taken[f"0-{i}"].sum()) for i in range(9)])
        return torch.autograd.grad((weights_N * rewards_N * policy_N).sum(), logits, retain_graph=True)[0]

    torch.testing.assert_close(found(policy_NT), wanted, atol=1e-6, rtol=1e-5)
    kl_to_behavior = (policy_N.exp() * (policy_N - behavior_NT.sum(-1))).sum()
    (away,) = torch.autograd.grad(kl_to_behavior, logits, retain_graph=True)
    torch.testing.assert_close(found(behavior_NT), wanted + coef * away, atol=1e-6, rtol=1e-5)
    assert away.abs().max() > 0.1, "the sampler's log-probs would have led elsewhere"


def test_the_mean_of_stale_tokens_is_the_kl_of_the_policy() -> None:
    """Enumerated over three tokens that the reference sampled: unweighted it would be -KL(reference || policy)."""
    policy, reference = (torch.tensor(p).log().numpy() for p in ([0.5, 0.3, 0.2], [0.35, 0.35, 0.3]))
    found = plain = 0.0
    for token in range(3):
        (sample,) = sampled([group([0.0], lambda _: [segment(10)])])
        sample = sample.with_streams(behavior_logprobs=reference[token : token + 1])
        d = known({"0-0": [policy[token]]}, {"0-0": [reference[token]]}).penalties([sample])
        found += float(np.exp(reference[token])) * d.kl
        plain += float(np.exp(reference[token]) * d.tokens["0-0"][0]) / 0.5
    assert found == pytest.approx(float((np.exp(policy) * (policy - reference)).sum()), abs=1e-6) and plain < 0 < found


def test_the_coefficient_follows_the_target_and_survives_a_restart() -> None:
    values = {"kl_coef": 0.1, "kl_target": 0.05, "kl_horizon": 20}
    made = known({}, {}, **values)
    expected = AdaptiveKL(0.1, 0.05, 20)
    for kl in (0.2, 0.01, 0.055):
        metrics = made.after_step(Penalties({}, kl, made.coef, 8))
        assert metrics == {"kl/in_reward": kl, "kl/coef": expected.coef}
        expected = expected.update(kl, 8)
        assert made.coef == expected.coef
    again = known({}, {}, **values)
    again.load_state_dict(made.state_dict())
    assert again.coef == made.coef != 0.1
    changed = known({}, {}, **(values | {"kl_coef": 0.3}))
    changed.load_state_dict(made.state_dict())
    assert changed.coef == 0.3, "a coefficient that was set anew holds"
    fixed = known({}, {}, kl_coef=0.1)
    fixed.after_step(Penalties({}, 5.0, 0.1, 8))
    fixed.load_state_dict(made.state_dict())
    assert fixed.coef == 0.1
    fixed.load_state_dict({})
    assert fixed.coef == 0.1, "a checkpoint of before knows none"


def test_a_logprob_that_is_none_is_refused() -> None:
    samples = sampled([group([1.0], lambda _: [segment(10)])])
    with pytest.raises(ValueError, match="rollout 0-0: a log-prob .* is not finite"):
        known({"0-0": [-1.0]}, {"0-0": [-np.inf]}).penalties(samples)


def test_a_step_tells_of_it_and_trains_without_a_reference_in_the_loss() -> None:
    algorithm = kl_config(kl_coef=0.1, kl_target=0.01, kl_horizon=8)
    made = trainer(algorithm)
    assert made.reward_kl is not None
    of, rows = group([1.0, 0.0, 0.5, 0.0], turns), []
    for _ in range(3):
        taken = made.reward_kl.penalties(sampled([of]))
        rows.append(made.train_step(build_batch([of], algorithm, penalties=taken)))
    assert [row["kl/coef"] for row in rows[:2]] == pytest.approx([0.1, 0.1 * (1 - 0.2 * 4 / 8)])
    assert rows[0]["kl/in_reward"] == 0.0 and rows[2]["kl/in_reward"] != 0.0
    assert not any("kl/reference" in row for row in rows)
