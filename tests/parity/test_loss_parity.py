"""Policy losses, value loss and aggregation against the functions of verl and TRL: values and gradients."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rollover.algorithms.kl import bias_corrected_kl, kl_penalty
from rollover.algorithms.loss import aggregate, entropy_bonus, high_entropy_mask, policy_loss, value_loss

core_algos = pytest.importorskip("verl.trainer.ppo.core_algos")
actor = pytest.importorskip("verl.workers.config.actor")
grpo_trainer = pytest.importorskip("trl.trainer.grpo_trainer")
gmpo_trainer = pytest.importorskip("trl.experimental.gmpo.gmpo_trainer")
async_grpo = pytest.importorskip("trl.experimental.async_grpo.async_grpo_trainer")

SEEDS = range(4)
TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}
Data = dict[str, torch.Tensor]


def batch(seed: int, *, rows: int = 5, length: int = 9, step: float = 0.4, empty_row: bool = False) -> Data:
    """Ragged rows with holes, one advantage per row, probabilities up to 1."""
    generator = torch.Generator().manual_seed(seed)
    old = -2 * torch.rand(rows, length, generator=generator)
    mask = torch.rand(rows, length, generator=generator) > 0.2
    mask &= torch.arange(length) < torch.randint(2, length + 1, (rows, 1), generator=generator)
    mask[:, 0] = True
    if empty_row:
        mask[1] = False
    return {
        "logprobs_BT": (old + step * torch.randn(rows, length, generator=generator)).clamp(max=-1e-3),
        "old_logprobs_BT": old,
        "advantages_BT": torch.randn(rows, generator=generator),
        "mask_BT": mask,
    }


def ours(
    data: Data, kind: str, mode: Any, *, norm: float | None = None, **options
) -> tuple[torch.Tensor, torch.Tensor]:
    logprobs = data["logprobs_BT"].clone().requires_grad_(True)
    loss_BT, _ = policy_loss(**(data | {"logprobs_BT": logprobs}), kind=kind, **options)
    loss = aggregate(loss_BT, data["mask_BT"], mode, norm=norm)
    return loss.detach(), torch.autograd.grad(loss, logprobs)[0]


def assert_same(got: tuple[torch.Tensor, torch.Tensor], peer: tuple[torch.Tensor, torch.Tensor]) -> None:
    torch.testing.assert_close(got[0], peer[0], **TOLERANCE)
    torch.testing.assert_close(got[1], peer[1], **TOLERANCE)
    assert peer[1].any()


def verl(data: Data, name: str, mode: str, **config) -> tuple[torch.Tensor, torch.Tensor]:
    of_policy = ("ppo_kl_coef", "dro_beta")
    policy = actor.PolicyLossConfig(**{k: config.pop(k) for k in list(config) if "cov" in k or k in of_policy})
    settings = actor.FSDPActorConfig(ppo_micro_batch_size_per_gpu=1, rollout_n=1, policy_loss=policy, **config)
    logprobs = data["logprobs_BT"].clone().requires_grad_(True)
    advantages = data["advantages_BT"]
    if advantages.ndim == 1:
        advantages = advantages[:, None].expand_as(logprobs)
    loss, _ = core_algos.get_policy_loss_fn(name)(
        data["old_logprobs_BT"], logprobs, advantages, data["mask_BT"].float(), mode, settings
    )
    return loss.detach(), torch.autograd.grad(loss, logprobs)[0]


class Accelerator:
    """One process."""

    num_processes = 1
    sync_gradients = True

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def gather_for_metrics(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def reduce(self, x: torch.Tensor, reduction: str) -> torch.Tensor:
        return x

    def pad_across_processes(self, x: torch.Tensor, **_) -> torch.Tensor:
        return x


def trl(
    data: Data, loss_type: str, *, level: str = "token", trainer_class: Any = None, entropy: Any = None, **settings
) -> tuple[torch.Tensor, torch.Tensor]:
    """TRL's own `_compute_loss`, on a trainer that has no model: the log-probs are given."""
    logprobs = data["logprobs_BT"].clone().requires_grad_(True)
    trainer = object.__new__(trainer_class or grpo_trainer.GRPOTrainer)
    defaults: dict[str, Any] = {
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "beta": 0.0,
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "use_vllm": False,
        "max_completion_length": logprobs.shape[1],
        "entropy_coef": 0.0,
    }
    arguments = {"delta": None, "use_bias_correction_kl": False, "steps_per_generation": 1}
    arguments |= {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05}
    arguments |= {"vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0}
    arguments |= {k: settings.pop(k) for k in list(settings) if k in arguments}
    reference = settings.pop("ref_logprobs_BT", None)
    importance = settings.pop("importance_BT", None)
    entropy = torch.zeros_like(logprobs) if entropy is None else entropy
    trainer.__dict__.update(
        defaults | settings,
        loss_type=loss_type,
        importance_sampling_level=level,
        aux_loss_enabled=False,
        use_adaptive_entropy=False,
        _entropy_bonus_enabled=settings.get("entropy_coef", 0.0) != 0.0,
        current_gradient_accumulation_steps=1,
        args=SimpleNamespace(**arguments),
        model=SimpleNamespace(training=True),
        accelerator=Accelerator(),
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, entropy, None),
    )
    mask = data["mask_BT"].long()
    inputs = {
        "prompt_ids": torch.zeros(len(mask), 1).long(),
        "prompt_mask": torch.ones(len(mask), 1).long(),
        "completion_ids": torch.zeros_like(mask),
        "completion_mask": mask,
        "advantages": data["advantages_BT"],
        "old_per_token_logps": data["old_logprobs_BT"],
        "num_items_in_batch": mask.sum(),
        "ref_per_token_logps": reference,
        "importance_sampling_ratio": importance,
    }
    loss = trainer._compute_loss(None, inputs)
    return loss.detach(), torch.autograd.grad(loss, logprobs)[0]


# --- verl


@pytest.mark.parametrize("dual_clip", [3.0, 1.3])
@pytest.mark.parametrize("seed", SEEDS)
def test_clip_is_verls_vanilla(seed: int, dual_clip: float) -> None:
    data = batch(seed, step=0.8)
    peer = verl(data, "vanilla", "token-mean", clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=dual_clip)
    assert_same(ours(data, "clip", "token-mean", clip_high=0.28, dual_clip=dual_clip), peer)


def test_deliberate_dual_clip_is_optional() -> None:
    data = batch(0, step=2.0)
    peer = verl(data, "vanilla", "token-mean")
    assert not torch.allclose(ours(data, "clip", "token-mean")[0], peer[0], rtol=1e-2)


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
@pytest.mark.parametrize("seed", SEEDS)
def test_dppo_is_verls(seed: int, name: str) -> None:
    data = batch(seed, step=0.8)
    bounds = {"dppo_tv": (0.1, 0.15), "dppo_kl": (0.02, 0.03)}[name]
    peer = verl(data, name, "token-mean", clip_ratio_low=bounds[0], clip_ratio_high=bounds[1], clip_ratio_c=1.7)
    got = ours(data, name, "token-mean", clip_low=bounds[0], clip_high=bounds[1], ratio_cap=1.7)
    assert_same(got, peer)
    assert int((got[1] == 0).sum()) > int((~data["mask_BT"]).sum())  # some tokens are blocked


@pytest.mark.parametrize("mode", ["seq-mean-token-mean", "token-mean"])
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_gspo_is_verls(seed: int, per_token: bool, mode: str) -> None:
    data = batch(seed)
    if per_token:
        data["advantages_BT"] = torch.randn(5, 9, generator=torch.Generator().manual_seed(seed))
    peer = verl(data, "gspo", mode, clip_ratio_low=0.05, clip_ratio_high=0.08)
    assert_same(ours(data, "gspo", mode, clip_low=0.05, clip_high=0.08), peer)


def test_deliberate_gspo_bounds_log_ratio_by_20() -> None:
    data = batch(0)
    data["old_logprobs_BT"] = data["logprobs_BT"] - 12.0
    data["advantages_BT"] = -torch.ones(5)
    got = ours(data, "gspo", "seq-mean-token-mean")
    peer = verl(data, "gspo", "seq-mean-token-mean")
    torch.testing.assert_close(torch.stack([got[0], peer[0]]).log(), torch.tensor([12.0, 10.0]))
    assert got[1].any() and not peer[1].any()


@pytest.mark.parametrize("seed", SEEDS)
def test_sapo_is_verls(seed: int) -> None:
    data = batch(seed, step=0.8)
    peer = verl(data, "sapo", "token-mean", tau_pos=1.3, tau_neg=2.1)  # verl averages per sequence whatever the mode
    assert_same(ours(data, "sapo", "seq-mean-token-mean", tau_positive=1.3, tau_negative=2.1), peer)


@pytest.mark.parametrize("seed", SEEDS)
def test_cispo_is_verls(seed: int) -> None:
    data = batch(seed, step=0.8)
    peer = verl(data, "cispo", "token-mean", clip_ratio_low=0.3, clip_ratio_high=0.4)
    assert_same(ours(data, "cispo", "token-mean", clip_low=0.3, clip_high=0.4), peer)


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_gmpo_is_verls_geo_mean(seed: int, per_token: bool) -> None:
    data = batch(seed, step=0.8)
    if per_token:
        data["advantages_BT"] = torch.randn(5, 9, generator=torch.Generator().manual_seed(seed))
    peer = verl(data, "geo_mean", "not used", clip_ratio_low=0.3, clip_ratio_high=0.4)
    assert_same(ours(data, "gmpo", "seq-mean-token-mean", clip_low=0.3, clip_high=0.4), peer)


def test_deliberate_gmpo_ignores_rows_without_tokens() -> None:
    data = batch(0, empty_row=True)
    loss, gradient = ours(data, "gmpo", "seq-mean-token-mean")
    assert_same((loss * 4 / 5, gradient * 4 / 5), verl(data, "geo_mean", "not used"))
    # TRL gives such a row the ratio 1, and with it a loss, -A, without a gradient.
    constant = -data["advantages_BT"][1] / 5
    peer = trl(data, "gmpo", trainer_class=gmpo_trainer.GMPOTrainer)
    assert_same((loss * 4 / 5 + constant, gradient * 4 / 5), peer)


@pytest.mark.parametrize("seed", SEEDS)
def test_clip_cov_is_verls_and_draws_the_same_tokens(seed: int) -> None:
    data = batch(seed, rows=12)
    data["advantages_BT"] = torch.randn(12, 9, generator=torch.Generator().manual_seed(seed))
    torch.manual_seed(seed)
    peer = verl(data, "clip_cov", "token-mean", clip_cov_ratio=0.1, clip_cov_lb=0.1, clip_cov_ub=2.0)
    options = {"share": 0.1, "cov_low": 0.1, "cov_high": 2.0}
    generator = torch.Generator().manual_seed(seed)
    assert_same(ours(data, "clip_cov", "token-mean", generator=generator, **options), peer)
    other = ours(data, "clip_cov", "token-mean", generator=generator, **options)
    assert not torch.allclose(other[1], peer[1])


@pytest.mark.parametrize("seed", SEEDS)
def test_kl_cov_is_verls(seed: int) -> None:
    data = batch(seed, rows=12)
    data["advantages_BT"] = torch.randn(12, 9, generator=torch.Generator().manual_seed(seed))
    peer = verl(data, "kl_cov", "token-mean", kl_cov_ratio=0.1, ppo_kl_coef=0.7)
    assert_same(ours(data, "kl_cov", "token-mean", share=0.1, kl_coef=0.7), peer)


@pytest.mark.parametrize("seed", SEEDS)
def test_reinforce_is_verls_gpg(seed: int) -> None:
    data = batch(seed)
    assert_same(ours(data, "reinforce", "token-mean"), verl(data, "gpg", "token-mean"))


@pytest.mark.parametrize("seed", SEEDS)
def test_importance_sampling_is_verls_kl_cov_without_its_penalty(seed: int) -> None:
    data = batch(seed, step=0.8)
    peer = verl(data, "kl_cov", "token-mean", kl_cov_ratio=0.1, ppo_kl_coef=0.0)
    assert_same(ours(data, "importance_sampling", "token-mean"), peer)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum"])
@pytest.mark.parametrize("beta", [0.3, 1.0])
@pytest.mark.parametrize("seed", SEEDS)
def test_dro_is_verls(seed: int, beta: float, mode: str) -> None:
    data = batch(seed, step=0.8)
    assert_same(ours(data, "dro", mode, beta=beta), verl(data, "dro", mode, dro_beta=beta))


def test_deliberate_dro_has_a_default_beta_and_verls_has_none() -> None:
    data = batch(0)
    with pytest.raises(ValueError, match="dro_beta must be a positive value"):
        verl(data, "dro", "token-mean")
    assert_same(ours(data, "dro", "token-mean"), verl(data, "dro", "token-mean", dro_beta=1.0))


MODES = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"]


@pytest.mark.parametrize("empty_row", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", SEEDS)
def test_aggregate_is_verls(seed: int, mode: Any, empty_row: bool) -> None:
    """Also on a micro-batch of a larger batch, where both are told the global counts."""
    data = batch(seed, empty_row=empty_row)
    mask, results = data["mask_BT"], []
    for told in (False, True):
        for norm in (None, 20.0):
            loss = data["logprobs_BT"].clone().requires_grad_(True)
            denominator = {"token-mean": 123.0, "token-sum": None}.get(mode, 17.0) if told else None
            known: dict[str, Any] = {"batch_num_tokens": 123, "global_batch_size": 17} if told else {}
            peer = core_algos.agg_loss(loss, mask.float(), mode, loss_scale_factor=norm, **known)
            got = aggregate(loss, mask, mode, denominator=denominator, norm=norm)
            assert_same(*(((x.detach(), torch.autograd.grad(x, loss)[0])) for x in (got, peer)))
            results.append(float(got.detach()))
    assert mode == "token-sum" or results[0] != results[2]


@pytest.mark.parametrize("clip", [0.2, 0.5])
@pytest.mark.parametrize("seed", SEEDS)
def test_value_loss_is_verls(seed: int, clip: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    values, old, returns = torch.randn(3, 5, 9, generator=generator)
    mask = batch(seed)["mask_BT"]
    values.requires_grad_(True)
    peer, _ = core_algos.compute_value_loss(values, returns, old, mask.float(), clip)
    got = aggregate(value_loss(values, old, returns, mask, clip=clip), mask, "token-mean")
    assert_same(*(((x.detach(), torch.autograd.grad(x, values)[0])) for x in (got, peer)))


# --- TRL

CLIP_MODES = {"grpo": "seq-mean-token-mean", "bnpo": "token-mean", "dapo": "token-mean", "luspo": "seq-mean-token-sum"}


@pytest.mark.parametrize("loss_type", CLIP_MODES)
@pytest.mark.parametrize("seed", SEEDS)
def test_clip_is_trls(seed: int, loss_type: str) -> None:
    """TRL's luspo with token ratios is the clip, with sequence sums."""
    data = batch(seed, step=0.8)
    peer = trl(data, loss_type, epsilon_high=0.28)
    assert_same(ours(data, "clip", CLIP_MODES[loss_type], clip_high=0.28), peer)


@pytest.mark.parametrize("seed", SEEDS)
def test_dr_grpo_is_trls(seed: int) -> None:
    data = batch(seed)
    peer = trl(data, "dr_grpo", max_completion_length=20)
    assert_same(ours(data, "clip", "seq-mean-token-sum-norm", norm=20.0), peer)


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "luspo"])
def test_deliberate_trl_counts_rows_without_tokens(loss_type: str) -> None:
    data = batch(0, empty_row=True)
    mode = {"dr_grpo": "seq-mean-token-sum-norm"}.get(loss_type) or CLIP_MODES[loss_type]
    loss, gradient = ours(data, "clip", mode)
    assert_same((loss * 4 / 5, gradient * 4 / 5), trl(data, loss_type))


@pytest.mark.parametrize("seed", SEEDS)
def test_dual_clip_is_trls_delta(seed: int) -> None:
    data = batch(seed, step=0.8)
    peer = trl(data, "dapo", delta=1.5)
    assert_same(ours(data, "clip", "token-mean", dual_clip=1.5), peer)
    assert not torch.allclose(ours(data, "clip", "token-mean")[1], peer[1])


@pytest.mark.parametrize(("kind", "loss_type"), [("gspo", "grpo"), ("luspo", "luspo")])
@pytest.mark.parametrize("seed", SEEDS)
def test_sequence_ratios_are_trls(seed: int, kind: str, loss_type: str) -> None:
    data = batch(seed)
    peer = trl(data, loss_type, level="sequence", epsilon_low=0.05, epsilon_high=0.08)
    assert_same(ours(data, kind, CLIP_MODES[loss_type], clip_low=0.05, clip_high=0.08), peer)


def test_deliberate_gspo_per_token_advantages_differ_from_trl() -> None:
    """TRL's ratio spreads the row's mean advantage over all its tokens; GSPO-token keeps each token's own."""
    data = batch(0)
    data["old_logprobs_BT"] = data["logprobs_BT"]
    data["advantages_BT"] = torch.randn(5, 9, generator=torch.Generator().manual_seed(0))
    mask, advantages = data["mask_BT"], torch.where(data["mask_BT"], data["advantages_BT"], 0.0)
    count = mask.sum(-1, keepdim=True)
    _, got = ours(data, "gspo", "seq-mean-token-mean")
    _, peer = trl(data, "grpo", level="sequence")
    torch.testing.assert_close(got, -advantages / count / 5)
    torch.testing.assert_close(peer, torch.where(mask, -advantages.sum(-1, keepdim=True) / count**2 / 5, 0.0))


@pytest.mark.parametrize("seed", SEEDS)
def test_cispo_is_trls(seed: int) -> None:
    """TRL's epsilon_high is the bound of the ratio, not its distance from 1."""
    data = batch(seed, step=0.8)
    peer = trl(data, "cispo", epsilon_high=1.4)
    assert_same(ours(data, "cispo", "token-mean", clip_low=1.0, clip_high=0.4), peer)


@pytest.mark.parametrize("seed", SEEDS)
def test_sapo_is_trls(seed: int) -> None:
    data = batch(seed, step=0.8)
    assert_same(ours(data, "sapo", "seq-mean-token-mean"), trl(data, "sapo"))


@pytest.mark.parametrize("seed", SEEDS)
def test_cispo_and_sapo_of_the_sequence_ratio_are_trls(seed: int) -> None:
    data = batch(seed, step=0.8)
    peer = trl(data, "cispo", level="sequence", epsilon_high=1.1)
    assert_same(ours(data, "cispo", "token-mean", clip_low=1.0, clip_high=0.1, level="sequence"), peer)
    assert_same(ours(data, "sapo", "seq-mean-token-mean", level="sequence"), trl(data, "sapo", level="sequence"))


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_vespo_is_trls(seed: int, corrected: bool) -> None:
    """The weights that truncate old / behavior enter the product over the row."""
    data = batch(seed, step=0.3)
    behavior = data["old_logprobs_BT"]
    weights = None
    if corrected:
        behavior = behavior + 0.3 * torch.randn(5, 9, generator=torch.Generator().manual_seed(seed))
        ratio = torch.exp(data["old_logprobs_BT"] - behavior)
        weights = torch.where(data["mask_BT"], ratio.clamp(max=1.2), 1.0)
    options = {"behavior_logprobs_BT": behavior, "weight_cap": 1.2}
    peer = trl(data, "vespo", importance_BT=weights)
    assert_same(ours(data, "vespo", "token-mean", **options), peer)
    shaped = {"vespo_k_pos": 1.5, "vespo_lambda_pos": 1.0, "vespo_k_neg": 1.0, "vespo_lambda_neg": 4.0}
    peer = trl(data, "vespo", importance_BT=weights, **shaped)
    names = {"k_positive": 1.5, "lambda_positive": 1.0, "k_negative": 1.0, "lambda_negative": 4.0}
    assert_same(ours(data, "vespo", "token-mean", **options, **names), peer)


@pytest.mark.parametrize("seed", SEEDS)
def test_trls_bnpo_depends_on_local_batches(seed: int) -> None:
    """The mean over local batches of their token means: of rows, of groups, or of the whole it is an aggregation of
    ours. Deliberate: of anything else it is none, as the loss must not depend on how rows are packed."""
    data = batch(seed, rows=6, step=0.8)
    group_B = torch.tensor([0, 0, 1, 1, 2, 2])
    for rows, mode in ((1, "seq-mean-token-mean"), (2, "prompt-mean"), (6, "token-mean")):
        parts = [trl({k: v[i : i + rows] for k, v in data.items()}, "bnpo") for i in range(0, 6, rows)]
        losses, gradients = zip(*parts, strict=True)
        x = data["logprobs_BT"].clone().requires_grad_(True)
        loss_BT, _ = policy_loss(**(data | {"logprobs_BT": x}), kind="clip")
        loss = aggregate(loss_BT, data["mask_BT"], mode, group_B=group_B)
        peer = sum(losses) / len(parts), torch.cat(gradients) / len(parts)
        assert_same((loss.detach(), torch.autograd.grad(loss, x)[0]), peer)


@pytest.mark.parametrize("seed", SEEDS)
def test_gmpo_is_trls(seed: int) -> None:
    data = batch(seed, step=0.8)
    peer = trl(data, "gmpo", trainer_class=gmpo_trainer.GMPOTrainer, epsilon_low=0.4, epsilon_high=0.4)
    assert_same(ours(data, "gmpo", "seq-mean-token-mean", clip_low=0.4, clip_high=0.4), peer)


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_policy_loss_plus_kl_is_trls(seed: int, corrected: bool) -> None:
    data = batch(seed)
    mask, old = data["mask_BT"], data["old_logprobs_BT"]
    ref = old + 0.5 * torch.randn(5, 9, generator=torch.Generator().manual_seed(seed))
    peer = trl(data, "dapo", beta=0.3, ref_logprobs_BT=ref, use_bias_correction_kl=corrected)
    x = data["logprobs_BT"].clone().requires_grad_(True)
    loss_BT, _ = policy_loss(**(data | {"logprobs_BT": x}), kind="clip")
    if corrected:
        kl_BT = bias_corrected_kl(x, ref, old, mask_BT=mask)
    else:
        kl_BT = kl_penalty(x, ref, "k3", mask_BT=mask)
    loss = aggregate(loss_BT + 0.3 * kl_BT, mask, "token-mean")
    assert_same((loss.detach(), torch.autograd.grad(loss, x)[0]), peer)


@pytest.mark.parametrize("share", [0.2, 0.37, 0.5, 0.999])
@pytest.mark.parametrize("seed", SEEDS)
def test_high_entropy_mask_is_trls(seed: int, share: float) -> None:
    trainer = object.__new__(grpo_trainer.GRPOTrainer)
    trainer.accelerator = Accelerator()
    for length in range(2, 12):
        mask = batch(seed, length=length)["mask_BT"]
        entropy = torch.rand(5, length, generator=torch.Generator().manual_seed(seed))
        entropy[entropy < 0.2] = 0.1  # some ties
        peer = trainer.get_high_entropy_mask(entropy, mask.long(), 1 - share)
        assert high_entropy_mask(entropy, mask, share=share).equal(peer)


@pytest.mark.parametrize("seed", SEEDS)
def test_loss_of_high_entropy_tokens_and_entropy_bonus_are_trls(seed: int) -> None:
    """The policy term keeps the count of all tokens as its denominator; the bonus is a mean over the chosen tokens."""
    data = batch(seed)
    entropy = torch.rand(5, 9, generator=torch.Generator().manual_seed(seed))
    peer = trl(data, "dapo", entropy=entropy, top_entropy_quantile=0.3, entropy_coef=0.01)
    chosen = high_entropy_mask(entropy, data["mask_BT"], share=0.3)
    bonus = aggregate(entropy_bonus(entropy, chosen, coef=0.01), chosen, "token-mean")
    x = data["logprobs_BT"].clone().requires_grad_(True)
    loss_BT, _ = policy_loss(**(data | {"logprobs_BT": x, "mask_BT": chosen}), kind="clip")
    loss = aggregate(loss_BT, data["mask_BT"], "token-mean") + bonus
    assert_same((loss.detach(), torch.autograd.grad(loss, x)[0]), peer)


@pytest.mark.parametrize("seed", SEEDS)
def test_clip_is_that_of_trls_async_trainer(seed: int) -> None:
    """Its rows are packed into one; the loss is the clip's token mean."""
    data = batch(seed, step=0.8)
    mask = data["mask_BT"]
    x = data["logprobs_BT"].clone().requires_grad_(True)
    count = int(mask.sum())
    trainer = object.__new__(async_grpo.AsyncGRPOTrainer)
    trainer.__dict__.update(
        epsilon_low=0.2,
        epsilon_high=0.28,
        aux_loss_enabled=False,
        current_gradient_accumulation_steps=1,
        accelerator=Accelerator(),
        _metrics={"train": defaultdict(list)},
        **dict.fromkeys(["_step_forward_tokens", "_step_trained_tokens", "_step_seq_len_weighted"], 0.0),
        **dict.fromkeys(["_step_samples", "_step_forward_s"], 0.0),
    )
    ones = torch.ones(1, count).long()
    advantages = data["advantages_BT"][:, None].expand_as(x)[mask][None]
    inputs = {name: ones for name in ("attention_mask", "input_ids", "position_ids", "shift_labels")}
    inputs |= {name: ones for name in ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")}
    inputs |= {
        "token_index": torch.arange(count)[None],
        "old_log_probs": data["old_logprobs_BT"][mask][None],
        "advantages": advantages,
        "segment_id": torch.zeros(1, count).long(),
        "tree_max_seqlens": torch.tensor([[count, count]]),
        "global_n_tokens": torch.tensor([count]),
        "global_n_forward_tokens": torch.tensor([count]),
        "mean_seq_len": torch.tensor([1.0]),
    }
    output = SimpleNamespace(log_probs=x[mask][None], entropy=torch.zeros(1, count))
    loss = trainer.compute_loss(lambda **_: output, inputs)
    peer = (loss.detach(), torch.autograd.grad(loss, x)[0])
    assert_same(ours(data, "clip", "token-mean", clip_high=0.28), peer)
