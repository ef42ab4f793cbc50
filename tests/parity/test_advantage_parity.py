"""Advantages against TRL and verl, by calling their code; differences that are meant are asserted as such.

verl works on token-level rewards: the outcome is put on a random loss token, its result compared on every loss token.
TRL computes advantages inside a method of its trainers: the method is called on a stand-in that has no model.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from rollover.algorithms import advantage
from rollover.algorithms.advantage import optimal_token_baseline

verl = pytest.importorskip("verl.trainer.ppo.core_algos")
trl = pytest.importorskip("trl")

NAN = float("nan")
SEEDS = pytest.mark.parametrize("seed", range(8))
CLOSE: dict[str, Any] = dict(atol=1e-5, rtol=1e-5)


class Data:
    """Random rewards in ragged, interleaved groups of two and more, with ragged masks that have gaps."""

    def __init__(self, seed: int, *, binary: bool = False, singletons: bool = False, num_rewards: int = 1) -> None:
        generator = torch.Generator().manual_seed(seed)
        sizes = [2, 3, 5, 4, 8] + [1] * (2 * singletons)
        self.N, self.T = sum(sizes), 9
        self.group_N = torch.repeat_interleave(torch.tensor([5, 2, 9, 0, 7, 4, 6][: len(sizes)]), torch.tensor(sizes))
        self.group_N = self.group_N[torch.randperm(self.N, generator=generator)]
        self.rewards_NR = 3 * torch.randn(self.N, num_rewards, generator=generator) + 1
        if binary:
            self.rewards_NR = (self.rewards_NR > 0).float()
        self.rewards_N = self.rewards_NR[:, 0]
        self.mask_NT = torch.rand(self.N, self.T, generator=generator) < 0.6
        self.mask_NT[torch.arange(self.N), torch.randint(self.T, (self.N,), generator=generator)] = True
        self.lengths_N = self.mask_NT.sum(-1)
        self.last_N = (self.mask_NT * torch.arange(self.T)).argmax(-1)
        self.single_N = torch.stack([(self.group_N == g).sum() == 1 for g in self.group_N])
        self.dense_NT = torch.randn(self.N, self.T, generator=generator) * self.mask_NT
        self.values_NT = torch.randn(self.N, self.T, generator=generator)

    @property
    def outcome_NT(self) -> torch.Tensor:
        out = torch.zeros(self.N, self.T)
        out[torch.arange(self.N), self.last_N] = self.rewards_N
        return out

    @property
    def index(self) -> np.ndarray:
        """Group names, as verl has them."""
        return np.array([f"uid-{g}" for g in self.group_N.tolist()], dtype=object)

    def verl(self, name: str, **arguments: Any) -> torch.Tensor:
        function = verl.get_adv_estimator_fn(name)
        mask = self.mask_NT.float()
        return function(token_level_rewards=self.outcome_NT, response_mask=mask, index=self.index, **arguments)[0]

    def spread(self, advantages_N: torch.Tensor) -> torch.Tensor:
        return advantages_N[:, None] * self.mask_NT


# verl


@SEEDS
@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize(("by_std", "std"), [(True, "sample"), (False, "none")])
@pytest.mark.parametrize("name", ["grpo", "grpo_vectorized"])
def test_grpo_of_verl(name: str, by_std: bool, std, binary: bool, seed: int) -> None:
    data = Data(seed, binary=binary)
    got = advantage.grpo(data.rewards_N, data.group_N, std=std, eps=1e-6)
    torch.testing.assert_close(data.spread(got), data.verl(name, norm_adv_by_std_in_grpo=by_std), **CLOSE)
    if std == "none":
        torch.testing.assert_close(advantage.dr_grpo(data.rewards_N, data.group_N), got)


@SEEDS
@pytest.mark.parametrize("name", ["rloo", "rloo_vectorized"])
def test_rloo_of_verl(name: str, seed: int) -> None:
    data = Data(seed, singletons=name == "rloo_vectorized")
    torch.testing.assert_close(
        data.spread(advantage.rloo(data.rewards_N, data.group_N)), data.verl(name).float(), **CLOSE
    )


@SEEDS
def test_opo_of_verl(seed: int) -> None:
    data = Data(seed)
    got = advantage.opo(data.rewards_N, data.lengths_N, data.group_N)
    torch.testing.assert_close(data.spread(got), data.verl("opo"), **CLOSE)


@SEEDS
def test_remax_of_verl(seed: int) -> None:
    """verl: the reward still to come minus the baseline, for an outcome the same at every loss token; r in gaps."""
    data = Data(seed)
    greedy = torch.randn(data.N, generator=torch.Generator().manual_seed(seed))
    got, theirs = data.spread(advantage.remax(data.rewards_N, greedy)), data.verl("remax", reward_baselines=greedy)
    torch.testing.assert_close(got[data.mask_NT], theirs[data.mask_NT], **CLOSE)
    assert theirs[~data.mask_NT].any()


@SEEDS
@pytest.mark.parametrize(("by_std", "std"), [(True, "sample"), (False, "none")])
def test_passk_of_verl_is_the_whole_group(by_std: bool, std, seed: int) -> None:
    data = Data(seed)
    theirs = data.verl("grpo_passk", config={"norm_adv_by_std_in_grpo": by_std})
    got = advantage.grpo_passk(data.rewards_N, data.group_N, k=data.N, std=std, eps=1e-6)
    torch.testing.assert_close(data.spread(got), theirs, **CLOSE)
    # A smaller k gives advantages to more than the best of a group.
    other = advantage.grpo_passk(data.rewards_N, data.group_N, k=2, std=std, eps=1e-6)
    assert (other > 0).sum() > (theirs.sum(-1) > 0).sum()


@SEEDS
@pytest.mark.parametrize("binary", [False, True])
def test_gpg_of_verl(binary: bool, seed: int) -> None:
    data = Data(seed, binary=binary)
    torch.testing.assert_close(data.spread(advantage.gpg(data.rewards_N, data.group_N)), data.verl("gpg"), **CLOSE)


# verl adds its epsilon, 1e-8, to the variance of the batch; ours goes to the standard deviation.


@SEEDS
def test_reinforce_plus_plus_of_verl(seed: int) -> None:
    data, config = Data(seed), SimpleNamespace(gamma=1.0)
    theirs = data.verl("reinforce_plus_plus", config=config)
    got, _ = advantage.reinforce_plus_plus_tokens(data.outcome_NT, data.mask_NT, eps=1e-8)
    torch.testing.assert_close(got, theirs, **CLOSE)
    per_rollout = advantage.reinforce_plus_plus(data.rewards_N, lengths_N=data.lengths_N, eps=1e-8)
    torch.testing.assert_close(data.spread(per_rollout), theirs, **CLOSE)


@SEEDS
def test_discounted_dense_reinforce_plus_plus_of_verl(seed: int) -> None:
    """A reward at every token, as with KL in the reward, and gaps in the mask."""
    data, function = Data(seed), verl.get_adv_estimator_fn("reinforce_plus_plus")
    theirs = function(data.dense_NT, data.mask_NT.float(), config=SimpleNamespace(gamma=0.8))
    got = advantage.reinforce_plus_plus_tokens(data.dense_NT, data.mask_NT, gamma=0.8, eps=1e-8)
    for ours, their in zip(got, theirs, strict=True):
        torch.testing.assert_close(ours, their, **CLOSE)


@SEEDS
def test_reinforce_plus_plus_baseline_of_verl(seed: int) -> None:
    data = Data(seed)
    got = advantage.reinforce_plus_plus_baseline(data.rewards_N, data.group_N, lengths_N=data.lengths_N, eps=1e-8)
    torch.testing.assert_close(data.spread(got), data.verl("reinforce_plus_plus_baseline"), **CLOSE)


@SEEDS
def test_gae_of_verl(seed: int) -> None:
    """verl whitens, and leaves numbers on masked positions; on loss tokens both streams agree."""
    data, function = Data(seed), verl.get_adv_estimator_fn("gae")
    theirs, their_returns = function(data.dense_NT, data.values_NT, data.mask_NT.float(), 0.9, 0.7)
    advantages, returns = advantage.gae(data.dense_NT, data.values_NT, data.mask_NT, gamma=0.9, lam=0.7)
    mask = data.mask_NT
    torch.testing.assert_close(returns[mask], their_returns[mask], **CLOSE)
    torch.testing.assert_close(advantage.whiten(advantages, mask, eps=1e-8)[mask], theirs[mask], **CLOSE)
    assert theirs[~mask].any() and not advantages[~mask].any() and not returns[~mask].any()


@SEEDS
@pytest.mark.parametrize(("by_std", "std"), [(True, "sample"), (False, "none")])
@pytest.mark.parametrize("weights", [None, [1.0, 0.5, 2.0]])
def test_gdpo_of_verl(weights: list[float] | None, by_std: bool, std, seed: int) -> None:
    data = Data(seed, num_rewards=3)
    # verl puts each outcome on the last token that its attention mask has, so rows here are masks without gaps.
    data.mask_NT = torch.arange(data.T) < data.lengths_N[:, None]
    keys = ["a", "b", "c"]
    theirs = data.verl(
        "gdpo",
        norm_adv_by_std_in_grpo=by_std,
        config={"gdpo_reward_keys": keys, "gdpo_reward_weights": weights},
        non_tensor_batch=dict(zip(keys, data.rewards_NR.T.numpy(), strict=True)),
        batch={
            "prompts": torch.zeros(data.N, 2),
            "attention_mask": torch.cat([torch.ones(data.N, 2), data.mask_NT], 1).long(),
        },
    )
    weights_R = None if weights is None else torch.tensor(weights)
    lengths_N = data.lengths_N
    got = advantage.gdpo(data.rewards_NR, data.group_N, weights_R, std=std, lengths_N=lengths_N, eps=1e-6)
    torch.testing.assert_close(data.spread(got), theirs, **CLOSE)


@SEEDS
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("name", "align"), [("optimal_token_baseline", "positions"), ("tir_optimal_token_baseline", "loss_tokens")]
)
def test_optimal_token_baseline_of_verl(name: str, align: Any, weighted: bool, seed: int) -> None:
    """With rewards of tokens. Masks without gaps for the first, which takes a row's end from its number of tokens."""
    data = Data(seed)
    if name == "optimal_token_baseline":
        data.mask_NT = torch.arange(data.T) < data.lengths_N[:, None]
    generator = torch.Generator().manual_seed(seed)
    logprobs, squares = (
        -2 * torch.rand(data.N, data.T, generator=generator),
        torch.rand(data.N, data.T, generator=generator),
    )
    rho = 0.5 + torch.rand(data.N, data.T, generator=generator) if weighted else None
    for rewards in (data.dense_NT * data.mask_NT, data.dense_NT.cumsum(-1) * data.mask_NT):
        theirs, _ = verl.get_adv_estimator_fn(name)(
            token_level_rewards=rewards,
            response_mask=data.mask_NT.float(),
            index=data.index,
            old_log_probs=logprobs,
            sum_pi_squared=squares,
            rollout_is_weights=rho,
        )
        got = optimal_token_baseline(
            rewards, data.mask_NT, data.group_N, logprobs, squares, weights_BT=rho, align=align
        )
        torch.testing.assert_close(got, theirs, **CLOSE)
        assert got.any()


def test_deliberate_optimal_baseline_of_single_row() -> None:
    data = Data(0, singletons=True)
    ones = torch.full((data.N, data.T), 0.5)
    arguments = dict(index=data.index, old_log_probs=ones.log(), sum_pi_squared=ones)
    theirs, returns = verl.get_adv_estimator_fn("optimal_token_baseline")(
        token_level_rewards=data.outcome_NT, response_mask=data.mask_NT.float(), **arguments
    )
    got = optimal_token_baseline(data.outcome_NT, data.mask_NT, data.group_N, ones.log(), ones)
    single = data.single_N
    assert not got[single].any()
    torch.testing.assert_close(theirs[single], (returns * data.mask_NT)[single], **CLOSE)
    assert not torch.allclose(got[~single], theirs[~single])  # verl counts the tokens of a row for their places


@pytest.mark.parametrize("name", ["grpo", "grpo_vectorized", "rloo", "opo"])
def test_of_a_singleton_group_verl_gives_the_reward_itself(name: str) -> None:
    """Deliberate: without a sibling there is no baseline, and r alone would push every such rollout up or down."""
    data, single = Data(0, singletons=True), Data(0, singletons=True).single_N
    ours = {
        "grpo": lambda: advantage.grpo(data.rewards_N, data.group_N, eps=1e-6),
        "rloo": lambda: advantage.rloo(data.rewards_N, data.group_N),
        "opo": lambda: advantage.opo(data.rewards_N, data.lengths_N, data.group_N),
    }[name.removesuffix("_vectorized")]()
    theirs = data.verl(name)
    assert single.sum() == 2 and not ours[single].any()
    torch.testing.assert_close(theirs[single], data.spread(data.rewards_N)[single], **CLOSE)
    torch.testing.assert_close(theirs[~single], data.spread(ours)[~single], **CLOSE)


def test_singleton_groups_change_only_verls_statistics() -> None:
    data = Data(0, singletons=True)
    ours = advantage.reinforce_plus_plus_baseline(data.rewards_N, data.group_N, lengths_N=data.lengths_N, eps=1e-8)
    theirs = data.verl("reinforce_plus_plus_baseline")
    assert not ours[data.single_N].any()
    assert (data.spread(ours) - theirs).abs()[~data.single_N].max() > 1e-3


def test_passk_of_a_singleton_group_is_an_error_in_verl() -> None:
    data = Data(0, singletons=True)
    with pytest.raises(ValueError, match="at least 2 samples"):
        data.verl("grpo_passk", config={})
    assert not advantage.grpo_passk(data.rewards_N, data.group_N, k=2)[data.single_N].any()


def test_the_default_eps_is_that_of_trl_and_differs_from_verl() -> None:
    """At a standard deviation of 1e-3, eps 1e-4 takes a tenth off."""
    data = Data(3)
    data.rewards_N.mul_(1e-3)
    ours, theirs = data.spread(advantage.grpo(data.rewards_N, data.group_N)), data.verl("grpo")
    assert (ours - theirs).abs().max() > 0.01


# TRL


def trl_advantages(
    trainer: Any, rewards_NR: torch.Tensor, group_size: int, weights_R: torch.Tensor | None = None, **settings: Any
) -> torch.Tensor:
    """What a TRL trainer makes of rewards, in consecutive groups of `group_size`."""
    N, R = rewards_NR.shape
    stub, ids, texts = MagicMock(), [[1]] * N, ["a"] * N
    stub.environment_factories = stub.environments = stub.tools = stub.pad_to_multiple_of = stub.reward_clip_range = (
        None
    )
    stub.use_vllm = stub.mask_truncated_completions = stub.normalize_advantages = False
    stub.model.training, stub.beta, stub._tokenizer.pad_token_id = True, 0.0, 0
    stub.accelerator = SimpleNamespace(device=torch.device("cpu"), process_index=0, gather=lambda x: x)
    stub.args.steps_per_generation = stub.args.gradient_accumulation_steps = stub.num_iterations = 1
    stub._generate.return_value = (ids, ids, None, texts, None, {}, None, None)
    if trainer is trl.RLOOTrainer:
        stub._generate.return_value = (ids, ids, texts)
    stub._get_per_token_logps_and_entropies.return_value = (torch.zeros(N, 1), None, None)
    stub._calculate_rewards.return_value = rewards_NR
    stub.reward_weights = torch.ones(R) if weights_R is None else weights_R
    stub.reward_funcs = stub.reward_func_names = [f"reward{i}" for i in range(R)]
    stub.num_generations = group_size
    stub._metrics, stub._logs = {"train": defaultdict(list)}, defaultdict(list, rewards=defaultdict(list))
    stub._pending_extra_logs, stub._pending_metrics = {}, {}
    for name, value in settings.items():
        setattr(stub, name, value)
    return trainer._generate_and_score_completions(stub, [{"prompt": "x"}] * N)["advantages"]


def rewards_and_groups(seed: int, num_rewards: int = 1, missing: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Rewards [24, R] in 6 groups of 4, a share of them missing, but at least two left of each in a group."""
    generator = torch.Generator().manual_seed(seed)
    rewards = 3 * torch.randn(24, num_rewards, generator=generator)
    lost = torch.rand(24, num_rewards, generator=generator) < missing
    lost[::4] = lost[1::4] = False
    return rewards.masked_fill(lost, NAN), torch.arange(24) // 4


@SEEDS
@pytest.mark.parametrize(("scale", "std"), [("group", "sample"), ("batch", "batch"), ("none", "none")])
def test_grpo_of_trl(scale: str, std, seed: int) -> None:
    rewards, groups = rewards_and_groups(seed, missing=0.5)
    settings = dict(multi_objective_aggregation="sum_then_normalize", scale_rewards=scale)
    theirs = trl_advantages(trl.GRPOTrainer, rewards, 4, **settings)
    assert rewards.isnan().any() and theirs.abs().max() > 0.5
    torch.testing.assert_close(advantage.grpo(rewards[:, 0], groups, std=std), theirs, **CLOSE)


@SEEDS
@pytest.mark.parametrize("weights_R", [None, torch.tensor([0.5, 2.0, 1.0])])
def test_sum_then_normalize_of_trl(weights_R: torch.Tensor | None, seed: int) -> None:
    rewards, groups = rewards_and_groups(seed, 3, missing=0.3)
    rewards[7] = NAN
    settings = dict(multi_objective_aggregation="sum_then_normalize", scale_rewards="group")
    theirs = trl_advantages(trl.GRPOTrainer, rewards, 4, weights_R, **settings)
    got = advantage.sum_then_normalize(rewards, groups, weights_R, missing="zero")
    torch.testing.assert_close(got, theirs, **CLOSE)
    # Deliberate: by default a sum that lacks a part is missing, and not a sum with a 0 in it.
    partial = rewards.isnan().any(-1)
    default = advantage.sum_then_normalize(rewards, groups, weights_R)
    assert not default[partial].any() and theirs[partial].any()


@SEEDS
@pytest.mark.parametrize("weights_R", [None, torch.tensor([0.5, 2.0, 1.0])])
def test_gdpo_of_trl(weights_R: torch.Tensor | None, seed: int) -> None:
    rewards, groups = rewards_and_groups(seed, 3, missing=0.3)
    rewards[7] = NAN
    settings = dict(multi_objective_aggregation="normalize_then_sum", scale_rewards="group")
    theirs = trl_advantages(trl.GRPOTrainer, rewards, 4, weights_R, **settings)
    torch.testing.assert_close(advantage.gdpo(rewards, groups, weights_R), theirs, **CLOSE)


def test_trls_gdpo_counts_rollouts_without_siblings() -> None:
    """Deliberate: it has advantage 0 either way, but there it makes the standard deviation smaller."""
    rewards, groups = rewards_and_groups(0, 2)
    rewards[1:4] = NAN
    settings = dict(multi_objective_aggregation="normalize_then_sum", scale_rewards="group")
    theirs = trl_advantages(trl.GRPOTrainer, rewards, 4, **settings)
    ours = advantage.gdpo(rewards, groups)
    assert float(ours[0]) == 0 and abs(float(theirs[0])) < 1e-6
    # 20 rollouts with a baseline, 21 with a reward; both sums of squares are the same.
    torch.testing.assert_close(theirs[4:] / ours[4:], torch.full((20,), (20 / 19) ** 0.5), atol=1e-4, rtol=1e-4)


@SEEDS
def test_rloo_of_trl(seed: int) -> None:
    rewards, groups = rewards_and_groups(seed, missing=0.3)
    theirs = trl_advantages(trl.RLOOTrainer, rewards, 4)
    torch.testing.assert_close(advantage.rloo(rewards[:, 0], groups), theirs, **CLOSE)


@SEEDS
def test_trls_normalised_rloo_is_reinforce_plus_plus_baseline(seed: int) -> None:
    """n / (n - 1) cancels in the batch's standard deviation."""
    rewards, groups = rewards_and_groups(seed)
    theirs = trl_advantages(trl.RLOOTrainer, rewards, 4, normalize_advantages=True)
    got = advantage.reinforce_plus_plus_baseline(rewards[:, 0], groups, eps=1e-4 * 3 / 4)
    torch.testing.assert_close(got, theirs, **CLOSE)


@SEEDS
def test_grpo_of_trls_asynchronous_trainer(seed: int) -> None:
    """Population standard deviation, eps 1e-8, one group at a time."""
    worker = pytest.importorskip("trl.experimental.async_grpo.async_rollout_worker")
    rewards = rewards_and_groups(seed, missing=0.3)[0][:4, 0]
    scores = [None if r.isnan() else float(r) for r in rewards]
    sequences = [[SimpleNamespace(input_ids=[1], completion_mask=[1], old_log_probs=[0.0])]] * 4
    of = SimpleNamespace(
        prompts=["x"] * 4,
        completions=["a"] * 4,
        completions_ids=[[1]] * 4,
        completions_sequences=sequences,
        reward_kwargs={},
        tool_call_counts=[0] * 4,
        tool_failure_counts=[0] * 4,
        model_version=0,
        group_id=0,
    )
    stub = SimpleNamespace(
        reward_funcs=[lambda **_: scores], reward_func_names=["r"], _env_reward_types=[], _provides_rollout_reward=False
    )
    (cls,) = [c for c in vars(worker).values() if hasattr(c, "_score_group")]
    samples = asyncio.run(cls._score_group(stub, of))
    got = advantage.grpo(rewards, torch.zeros(4), std="population", eps=1e-8)
    torch.testing.assert_close(got, torch.tensor([s.advantage for s in samples]), **CLOSE)
