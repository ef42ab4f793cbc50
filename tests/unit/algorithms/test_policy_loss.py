"""Policy losses: by hand, by finite differences, their invariances, and their metrics."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch

from rollover.algorithms.correction import importance_weights
from rollover.algorithms.loss import (
    LOSSES,
    NOT_SPLIT_INVARIANT,
    aggregate,
    entropy_bonus,
    high_entropy_mask,
    policy_loss,
)
from rollover.config import AlgorithmConfig
from rollover.config.traits import LOSSES as TRAITS

# The aggregation that makes each kind the loss of its paper, and bounds that some tokens of `batch` pass.
MODES = {kind: "token-mean" for kind in LOSSES} | {
    "gspo": "seq-mean-token-mean",
    "gmpo": "seq-mean-token-mean",
    "sapo": "seq-mean-token-mean",
    "luspo": "seq-mean-token-sum",
}
WEIGHING = ("decoupled", "vespo")  # they read the behavior policy
WIDE = {"cov_low": -1e9, "cov_high": 1e9, "share": 1.0}
EVERYWHERE = {"clip_cov": WIDE, "kl_cov": {"share": 1.0, "kl_coef": 0.3}}


def batch(rows: int = 4, length: int = 6, seed: int = 0, step: float = 0.4) -> dict[str, torch.Tensor]:
    """Ragged rows; probabilities are large enough that the bounds of dppo bind too."""
    generator = torch.Generator().manual_seed(seed)
    old = -1.5 * torch.rand(rows, length, generator=generator)
    return {
        "logprobs_BT": (old + step * torch.randn(rows, length, generator=generator)).clamp(max=-1e-3),
        "old_logprobs_BT": old,
        "advantages_BT": torch.randn(rows, generator=generator),
        "mask_BT": torch.arange(length) < torch.tensor([length, 2, length - 1, 4, 1, 3] * rows)[:rows, None],
    }


def options(kind: str, data: dict[str, torch.Tensor]) -> dict:
    if kind in WEIGHING:
        return {"behavior_logprobs_BT": data["old_logprobs_BT"] - 0.3, "weight_cap": 1.2}
    return EVERYWHERE.get(kind, {})


def loss_and_gradient(kind: str, data: dict[str, torch.Tensor], denominator: float | None = None, **given):
    logprobs = data["logprobs_BT"].clone().requires_grad_(True)
    chosen = given or options(kind, data)
    loss_BT, metrics = policy_loss(**(data | {"logprobs_BT": logprobs}), kind=kind, **chosen)
    loss = aggregate(loss_BT, data["mask_BT"], MODES[kind], denominator=denominator)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return loss.detach(), gradient, loss_BT.detach(), metrics


def test_clip_by_hand() -> None:
    ratios = torch.tensor([[1.5, 1.5, 0.5, 0.5, 1.1, 9.0]])
    advantages = torch.tensor([[1.0, -1.0, 1.0, -1.0, 2.0, 1.0]])
    mask = torch.tensor([[True, True, True, True, True, False]])
    loss, metrics = policy_loss(ratios.log(), torch.zeros(1, 6), advantages, mask, kind="clip", clip_high=0.28)
    # The clip binds only where it makes the objective smaller.
    torch.testing.assert_close(loss, torch.tensor([[-1.28, 1.5, -0.5, 0.8, -2.2, 0.0]]))
    assert {k: round(float(v), 5) for k, v in metrics.items()} == {
        "count/tokens": 5.0,
        "sum/ratio": 5.1,
        "max/ratio": 1.5,
        "sum/clipped": 2.0,
    }


def test_reinforce_is_minus_logprob_times_advantage_of_the_row() -> None:
    logprobs = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]])
    loss, metrics = policy_loss(
        logprobs, logprobs, torch.tensor([2.0, -1.0]), torch.tensor([[True, True], [True, False]]), kind="reinforce"
    )
    assert loss.tolist() == [[2.0, 4.0], [-3.0, 0.0]]
    assert float(metrics["sum/clipped"]) == 0.0 and float(metrics["sum/ratio"]) == 3.0


def row(kind: str, ratios: list[float], advantage: float | list[float], *, logprob: float = -1.0, **given):
    """Loss, gradient of its sum, and clipped tokens of one row with these ratios."""
    logprobs = torch.full((1, len(ratios)), logprob, requires_grad=True)
    old = logprobs.detach() - torch.tensor([ratios]).log()
    advantages = torch.tensor([advantage] if isinstance(advantage, list) else [[advantage] * len(ratios)])
    loss, metrics = policy_loss(logprobs, old, advantages, torch.ones(1, len(ratios)), kind=kind, **given)
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    return loss.detach()[0], gradient[0], float(metrics["sum/clipped"])


def close(got: torch.Tensor, *expected: float) -> None:
    torch.testing.assert_close(got, torch.tensor(expected), atol=1e-5, rtol=1e-5)


def test_gspo_by_hand() -> None:
    """Ratios 4 and 1/4 are a sequence ratio of 1: nothing clipped. 2 and 2 are one of 2, clipped for A > 0 alone."""
    loss, gradient, clipped = row("gspo", [4.0, 0.25], 2.0)
    close(loss, -2.0, -2.0)
    close(gradient, -2.0, -2.0)
    assert clipped == 0
    loss, gradient, clipped = row("gspo", [4.0, 1.0], 1.0, clip_high=0.5)
    close(loss, -1.5, -1.5)
    close(gradient, 0.0, 0.0)
    assert clipped == 2
    loss, gradient, _ = row("gspo", [4.0, 1.0], -1.0, clip_high=0.5)
    close(torch.stack([loss, gradient]).flatten(), 2.0, 2.0, 2.0, 2.0)


def test_gmpo_by_hand() -> None:
    """A > 0: 4 is cut to e^0.4, 1/4 is not: geometric mean sqrt(e^0.4 / 4). A < 0: the other way round."""
    loss, gradient, clipped = row("gmpo", [4.0, 0.25], 1.0, clip_low=0.4, clip_high=0.4)
    expected = math.sqrt(math.exp(0.4) / 4)
    close(loss, -expected, -expected)
    close(gradient, 0.0, -expected)
    assert clipped == 1
    loss, gradient, clipped = row("gmpo", [4.0, 0.25], -1.0, clip_low=0.4, clip_high=0.4)
    expected = math.sqrt(4 * math.exp(-0.4))
    close(loss, expected, expected)
    close(gradient, expected, 0.0)
    assert clipped == 1


def test_cispo_by_hand() -> None:
    loss, gradient, clipped = row("cispo", [0.1, 1.1, 3.0], 2.0, logprob=-1.5, clip_low=1.0, clip_high=1.0)
    close(loss, 0.3, 3.3, 6.0)
    close(gradient, -0.2, -2.2, -4.0)  # a clipped token keeps a gradient
    assert clipped == 1


def test_clip_cov_drops_tokens_of_high_covariance() -> None:
    """Means of A and log-prob are 0 and -2: covariances 0, 2, 0, 6. One token lies in (1, 5)."""
    logprobs = torch.tensor([[-2.0, -4.0, -2.0, 1.0]])
    logprobs -= logprobs.mean() + 2
    advantages = torch.tensor([[1.0, -1.0, -2.0, 2.0]])
    mask = torch.ones(1, 4)

    def dropped(**given) -> list[int]:
        loss, metrics = policy_loss(logprobs, logprobs, advantages, mask, kind="clip_cov", **given)
        assert float(metrics["sum/clipped"]) == float((loss == 0).sum())
        return (loss[0] == 0).nonzero()[:, 0].tolist()

    assert dropped(share=1.0) == [1]
    assert dropped(share=1.0, cov_high=9.0) == [1, 3]
    assert dropped(share=1.0, cov_low=2.5) == []
    # A share below one token still drops one; the generator decides which.
    draws = [dropped(cov_high=9.0, generator=torch.Generator().manual_seed(i)) for i in range(8)]
    assert {tuple(d) for d in draws} == {(1,), (3,)}
    assert draws == [dropped(cov_high=9.0, generator=torch.Generator().manual_seed(i)) for i in range(8)]


def test_clip_cov_does_not_drop_what_the_clip_has_stopped() -> None:
    """Token 0 is clipped, its loss stays; token 1 is dropped."""
    logprobs, old = torch.tensor([[-1.0, -1.0, -3.0]]), torch.tensor([[-2.0, -1.0, -3.0]])
    loss, metrics = policy_loss(
        logprobs,
        old,
        torch.tensor([[2.0, 2.0, -1.0]]),
        torch.ones(1, 3),
        kind="clip_cov",
        share=1.0,
        cov_low=0.1,
        cov_high=1.0,
    )
    close(loss[0], -2.4, 0.0, 1.0)
    assert float(metrics["sum/clipped"]) == 2


def test_decoupled_by_hand() -> None:
    """old / behavior = 4 is capped at 3, current / old = 1.5 clipped at 1.2."""
    old, behavior = torch.full((1, 2), -1.0), torch.tensor([[-1.0 - math.log(4.0), -1.0 + math.log(2.0)]])
    logprobs = old + torch.tensor([[1.5, 1.1]]).log()
    loss, metrics = policy_loss(
        logprobs,
        old,
        torch.tensor([2.0]),
        torch.ones(1, 2),
        kind="decoupled",
        behavior_logprobs_BT=behavior,
        weight_cap=3.0,
    )
    close(loss[0], -3 * 1.2 * 2, -0.5 * 1.1 * 2)
    assert float(metrics["sum/clipped"]) == 1 and float(metrics["max/ratio"]) == pytest.approx(1.5)


@pytest.mark.parametrize("dual_clip", [None, 1.5])
def test_decoupled_with_proximal_equal_to_behavior_is_clip(dual_clip) -> None:
    data = batch(step=0.8)
    given = {"behavior_logprobs_BT": data["old_logprobs_BT"], "dual_clip": dual_clip}
    decoupled, clip = (
        loss_and_gradient("decoupled", data, **given),
        loss_and_gradient("clip", data, dual_clip=dual_clip),
    )
    assert torch.equal(decoupled[0], clip[0]) and torch.equal(decoupled[1], clip[1]) and decoupled[3] == clip[3]


def test_decoupled_is_clip_times_the_weights_of_the_correction() -> None:
    data = batch()
    behavior = data["old_logprobs_BT"] + 0.5 * torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    _, _, decoupled, _ = loss_and_gradient("decoupled", data, behavior_logprobs_BT=behavior, weight_cap=1.3)
    _, _, clip, _ = loss_and_gradient("clip", data)
    weights = importance_weights(data["old_logprobs_BT"], behavior, data["mask_BT"], mode="token_truncate", cap=1.3)
    torch.testing.assert_close(decoupled, weights * clip)


# cispo and dppo weigh the log-prob by a constant: no function of the log-probs has their gradient. See the next test.
SURROGATES = {"cispo", "dppo_tv", "dppo_kl"}
DUAL = [("clip", 1.1), ("decoupled", 1.1)]


@pytest.mark.parametrize(("kind", "dual_clip"), [(k, None) for k in LOSSES if k not in {*SURROGATES, "vespo"}] + DUAL)
def test_gradient_equals_finite_differences(kind: str, dual_clip: float | None) -> None:
    """Of the aggregated loss, entry by entry; sequence ratios tie the tokens of a row together."""
    step, smooth = 1e-2, 0
    data = batch(seed=3) | {"dual_clip": dual_clip}
    given = options(kind, data)
    if kind == "clip_cov":
        given = WIDE | {"share": 0.3, "generator": None}

    def at(logprobs: torch.Tensor) -> tuple[float, torch.Tensor]:
        torch.manual_seed(0)
        x = logprobs.clone().requires_grad_(True)
        loss_BT, _ = policy_loss(**(data | {"logprobs_BT": x}), kind=kind, **given)
        loss = aggregate(loss_BT, data["mask_BT"], MODES[kind])
        return float(loss.detach()), torch.autograd.grad(loss, x)[0]

    _, gradient = at(data["logprobs_BT"])
    for i, j in data["mask_BT"].nonzero().tolist():
        nudge = torch.zeros(4, 6)
        nudge[i, j] = step
        (up, gradient_up), (down, gradient_down) = (at(data["logprobs_BT"] + s * nudge) for s in (1, -1))
        # A kink of a clip within the step makes the difference quotient meaningless.
        if abs(gradient_up - gradient_down)[i, j] > 0.04 * abs(gradient_up + gradient_down)[i, j] / 2 + 1e-5:
            continue
        smooth += bool(gradient[i, j] != 0)
        assert (up - down) / (2 * step) == pytest.approx(float(gradient[i, j]), abs=5e-5, rel=2e-3)
    assert smooth >= 5
    assert torch.equal(gradient[~data["mask_BT"]], torch.zeros(int((~data["mask_BT"]).sum())))


@pytest.mark.parametrize("kind", sorted(SURROGATES))
def test_surrogate_gradient_is_weighted_or_bounded(kind: str) -> None:
    """Where nothing binds it is the gradient of -r A, by finite differences; elsewhere the bound's or 0."""
    data = batch(seed=3)
    mask = data["mask_BT"]
    _, gradient, _, metrics = loss_and_gradient(kind, data)

    def objective(shift: float) -> torch.Tensor:
        return policy_loss(**(data | {"logprobs_BT": data["logprobs_BT"] + shift}), kind="kl_cov", kl_coef=0.0)[0]

    numeric = (objective(1e-2) - objective(-1e-2)) / 2e-2 / mask.sum()
    free = ((gradient - numeric).abs() < 1e-3 * numeric.abs()) & mask
    bound = torch.zeros(())
    if kind == "cispo":
        side = torch.where(data["logprobs_BT"] > data["old_logprobs_BT"], 1.2, 0.8)
        bound = (-side * data["advantages_BT"][:, None] / mask.sum())[mask & ~free]
    torch.testing.assert_close(gradient[mask & ~free], bound.expand(int((mask & ~free).sum())))
    assert int(free.sum()) >= 4 and int((mask & ~free).sum()) == float(metrics["sum/clipped"]) >= 2


@pytest.mark.parametrize("kind", LOSSES)
def test_equal_policies_give_policy_gradient_without_clipping(kind: str) -> None:
    data = batch()
    data["old_logprobs_BT"] = data["logprobs_BT"]
    given = {kind: {"behavior_logprobs_BT": data["logprobs_BT"]} for kind in WEIGHING}
    given["clip_cov"] = {"cov_low": 1e9, "cov_high": 2e9}
    logprobs = data["logprobs_BT"].clone().requires_grad_(True)
    loss, metrics = policy_loss(**(data | {"logprobs_BT": logprobs}), kind=kind, **given.get(kind, {}))
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    advantages = torch.ones(4) if kind == "nll" else data["advantages_BT"]  # examples have none
    torch.testing.assert_close(gradient, torch.where(data["mask_BT"], -advantages[:, None], 0.0))
    assert float(metrics["max/ratio"]) == 1.0 and metrics["sum/ratio"] == metrics["count/tokens"] == 17
    assert float(metrics["sum/clipped"]) == (1 if kind == "kl_cov" else 0)  # kl_cov counts the token that pays


@pytest.mark.parametrize("kind", ["clip", "gspo", "gmpo", "decoupled"])
def test_without_an_advantage_nothing_is_clipped(kind: str) -> None:
    data = batch(step=2.0) | {"advantages_BT": torch.zeros(4)}
    loss, gradient, _, metrics = loss_and_gradient(kind, data, **(options(kind, data) or {"clip_low": 0.1}))
    assert float(metrics["sum/clipped"]) == 0 and float(loss) == 0 and not gradient.any()


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", LOSSES)
def test_what_lies_under_the_mask_does_not_matter(kind: str, garbage: float) -> None:
    data = batch()
    given = options(kind, data)
    mask = data["mask_BT"]
    dirty = data | {"advantages_BT": data["advantages_BT"][:, None].expand_as(mask)}
    dirty = {k: v if k == "mask_BT" else torch.where(mask, v, garbage) for k, v in dirty.items()}
    dirty_given = {k: torch.where(mask, v, garbage) if torch.is_tensor(v) else v for k, v in given.items()}
    clean_result, dirty_result = loss_and_gradient(kind, data, **given), loss_and_gradient(kind, dirty, **dirty_given)
    for clean, got in zip(clean_result[:3], dirty_result[:3], strict=True):
        assert torch.equal(clean, got)
    assert clean_result[3] == dirty_result[3]
    assert torch.equal(dirty_result[1][~mask], torch.zeros(int((~mask).sum())))


@pytest.mark.parametrize("kind", LOSSES)
def test_order_of_rows_and_padding_do_not_matter(kind: str) -> None:
    data = batch(rows=6)
    loss, gradient, _, _ = loss_and_gradient(kind, data)
    order = torch.tensor([3, 5, 0, 1, 4, 2])
    permuted = {k: v[order] for k, v in data.items()}
    padded = {k: torch.nn.functional.pad(v, (2, 3)) if v.ndim == 2 else v for k, v in data.items()}
    permuted_loss, permuted_gradient, _, _ = loss_and_gradient(kind, permuted)
    padded_loss, padded_gradient, _, _ = loss_and_gradient(kind, padded)
    torch.testing.assert_close(permuted_loss, loss)
    torch.testing.assert_close(permuted_gradient, gradient[order])
    torch.testing.assert_close(padded_loss, loss)
    torch.testing.assert_close(padded_gradient, torch.nn.functional.pad(gradient, (2, 3)))


@pytest.mark.parametrize("kind", LOSSES)
def test_losses_are_split_invariant_except_named_kinds(kind: str) -> None:
    data = batch(rows=6)
    given = {"clip_cov": {"share": 0.3, "cov_low": 0.0}, "kl_cov": {"share": 0.3}}.get(kind, {})
    denominator = float(data["mask_BT"].sum()) if MODES[kind] == "token-mean" else 6.0
    torch.manual_seed(0)
    parts = [slice(0, 2), slice(2, 6)]
    whole = loss_and_gradient(kind, data, denominator, **given)
    split = [loss_and_gradient(kind, {k: v[i] for k, v in data.items()}, denominator, **given) for i in parts]
    same = torch.allclose(split[0][0] + split[1][0], whole[0], atol=1e-6)
    same &= torch.allclose(torch.cat([p[1] for p in split]), whole[1], atol=1e-6)
    assert same == (kind not in NOT_SPLIT_INVARIANT)


@pytest.mark.parametrize("kind", LOSSES)
def test_an_empty_call_is_zero(kind: str) -> None:
    data = batch()
    data["mask_BT"] = torch.zeros(4, 6)
    loss, gradient, _, metrics = loss_and_gradient(kind, data)
    assert float(loss) == 0.0 and not gradient.any() and not any(float(v) for v in metrics.values())


@pytest.mark.parametrize("kind", LOSSES)
def test_only_the_current_policy_gets_a_gradient(kind: str) -> None:
    data = {k: v.clone().requires_grad_(v.is_floating_point()) for k, v in batch().items()}
    given = {k: v.detach().requires_grad_(True) if torch.is_tensor(v) else v for k, v in options(kind, data).items()}
    policy_loss(**data, kind=kind, **given)[0].sum().backward()
    assert data.pop("logprobs_BT").grad is not None
    assert all(v.grad is None for v in [*data.values(), *given.values()] if torch.is_tensor(v))


@pytest.mark.parametrize("kind", LOSSES)
def test_absurd_ratios_stay_finite(kind: str) -> None:
    logprobs = torch.tensor([[0.0, -300.0], [0.0, -1.0]], requires_grad=True)
    old = torch.tensor([[-300.0, 0.0], [-300.0, -1.0]])
    given = {"behavior_logprobs_BT": -old - 300} if kind in WEIGHING else {}
    loss, _ = policy_loss(logprobs, old, torch.tensor([-1.0, 1.0]), torch.ones(2, 2).bool(), kind=kind, **given)
    loss.sum().backward()
    assert loss.isfinite().all() and logprobs.grad is not None and logprobs.grad.isfinite().all()


@pytest.mark.parametrize("kind", sorted(set(LOSSES) - NOT_SPLIT_INVARIANT - set(WEIGHING)))
def test_metrics_of_the_parts_combine_to_those_of_the_whole(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    current, old, advantages = (torch.randn(6, 4, generator=generator) for _ in range(3))
    mask = torch.rand(6, 4, generator=generator) > 0.4
    _, whole = policy_loss(current, old, advantages, mask, kind=kind)
    parts = [policy_loss(current[i], old[i], advantages[i], mask[i], kind=kind)[1] for i in (slice(2), slice(2, 6))]
    for key, value in whole.items():
        values = torch.stack([p[key] for p in parts])
        torch.testing.assert_close(values.max() if key.startswith("max/") else values.sum(), value)


def test_errors_name_the_argument_and_the_fix() -> None:
    x, mask = torch.zeros(2, 3), torch.ones(2, 3)
    with pytest.raises(ValueError, match="policy loss: use one of clip, reinforce, .*decoupled"):
        policy_loss(x, x, x, mask, kind="ppo")
    with pytest.raises(
        ValueError, match="cap is not an option .*'dppo_tv': its options are clip_low, clip_high, ratio_cap"
    ):
        policy_loss(x, x, x, mask, kind="dppo_tv", cap=2.0)
    with pytest.raises(ValueError, match="dual_clip is not an option of the policy loss 'reinforce': .* none"):
        policy_loss(x, x, x, mask, kind="reinforce", dual_clip=3.0)
    with pytest.raises(ValueError, match="needs the option behavior_logprobs_BT"):
        policy_loss(x, x, x, mask, kind="decoupled")
    with pytest.raises(ValueError, match="behavior_logprobs_BT is .1, 3.: give it"):
        policy_loss(x, x, x, mask, kind="decoupled", behavior_logprobs_BT=x[:1])
    with pytest.raises(ValueError, match="dual_clip = 1.0"):
        policy_loss(x, x, x, mask, kind="clip", dual_clip=1.0)
    with pytest.raises(ValueError, match="tau_positive"):
        policy_loss(x, x, x, mask, kind="sapo", tau_negative=0.0)
    for wrong in ({"old_logprobs_BT": x[:, :2]}, {"advantages_BT": x[0]}, {"mask_BT": mask[:1]}):
        arguments = {"old_logprobs_BT": x, "advantages_BT": x, "mask_BT": mask} | wrong
        with pytest.raises(ValueError, match=f"{[*wrong][0]} is .* shape of logprobs_BT"):
            policy_loss(x, **arguments, kind="clip")
    for kind in NOT_SPLIT_INVARIANT:
        with pytest.raises(ValueError, match="share = 0"):
            policy_loss(x, x, x, mask, kind=kind, share=0)
    with pytest.raises(ValueError, match="beta = 0"):
        policy_loss(x, x, x, mask, kind="dro", beta=0)
    with pytest.raises(ValueError, match="must be above 0"):
        policy_loss(x, x, x, mask, kind="vespo", behavior_logprobs_BT=x, k_positive=0.0)
    for kind in ("cispo", "sapo"):
        with pytest.raises(ValueError, match="level = 'row'"):
            policy_loss(x, x, x, mask, kind=kind, level="row")


def test_entropy_bonus_rewards_entropy() -> None:
    entropy = torch.tensor([[1.0, 2.0, math.nan]], requires_grad=True)
    term = entropy_bonus(entropy, torch.tensor([[1, 1, 0]]), coef=0.1)
    close(term.detach()[0], -0.1, -0.2, 0.0)
    (gradient,) = torch.autograd.grad(term.sum(), entropy)
    close(gradient[0], -0.1, -0.1, 0.0)


def test_high_entropy_mask_keeps_the_share_of_highest_entropy() -> None:
    entropy = torch.tensor([[0.1, 0.9, 0.3, math.nan], [0.5, 0.7, 0.2, math.inf]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 0]])
    assert entropy[high_entropy_mask(entropy, mask, share=0.2)].tolist() == pytest.approx([0.9, 0.7])
    assert entropy[high_entropy_mask(entropy, mask, share=0.1)].tolist() == pytest.approx([0.9])
    assert high_entropy_mask(entropy, mask, share=1.0).equal(mask.bool())
    assert high_entropy_mask(torch.ones(2, 4), mask).equal(mask.bool())  # ties at the bound stay in
    assert not high_entropy_mask(entropy, torch.zeros(2, 4)).any()
    # 0.3 * 10 rounds to above 3: the fourth smallest of 11 stays in.
    assert int(high_entropy_mask(torch.arange(11.0)[None], torch.ones(1, 11), share=0.7).sum()) == 8
    with pytest.raises(ValueError, match="share = 1.5"):
        high_entropy_mask(entropy, mask, share=1.5)


of_every_loss = pytest.mark.parametrize("kind", LOSSES)


def traits_batch(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    old = -2 * torch.rand(6, 8, generator=generator)
    return {
        "logprobs_BT": (old + 0.5 * torch.randn(6, 8, generator=generator)).clamp(max=-1e-3),
        "old_logprobs_BT": old,
        "advantages_BT": torch.tensor([2.0, -1.0, 0.0, 1.0, 0.0, -2.0]),
        "mask_BT": torch.rand(6, 8, generator=generator) > 0.2,
    }


def traits_options(kind: str) -> dict[str, Any]:
    out: dict[str, Any] = {"behavior_logprobs_BT": torch.full((6, 8), -1.0)} if TRAITS[kind].weighs else {}
    if kind == "vespo":
        out["weight_cap"] = 1.1  # without one only the ratio to the behavior policy is left
    if kind == "clip_cov":
        out |= {"cov_low": 0.4, "share": 1.0}  # every candidate is dropped: no draw
    return out | ({"share": 0.2} if kind == "kl_cov" else {})


def traits_gradient(kind: str, data: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    logprobs = data["logprobs_BT"].clone().requires_grad_(True)
    loss_BT, _ = policy_loss(**(data | {"logprobs_BT": logprobs}), kind=kind, **traits_options(kind))
    return loss_BT.detach(), torch.autograd.grad(loss_BT.sum(), logprobs)[0]


@of_every_loss
def test_ratio(kind: str) -> None:
    data = traits_batch()
    moved = data | {"old_logprobs_BT": data["old_logprobs_BT"] - 0.3}
    same = torch.equal(traits_gradient(kind, data)[1], traits_gradient(kind, moved)[1])
    assert TRAITS[kind].ratio is not same


@of_every_loss
def test_vanishes(kind: str) -> None:
    """Whether the gradient is the same without the rows whose advantage is 0."""

    def same(data: dict[str, torch.Tensor]) -> bool:
        loud_B1 = (data["advantages_BT"] != 0)[:, None]
        without = data | {"mask_BT": data["mask_BT"] & loud_B1}
        return torch.equal(traits_gradient(kind, data)[1], traits_gradient(kind, without)[1])

    assert TRAITS[kind].vanishes == all(same(traits_batch(seed)) for seed in range(10))


@of_every_loss
def test_options(kind: str) -> None:
    names = inspect.signature(LOSSES[kind]).parameters
    assert ({"clip_low", "clip_high"} <= names.keys()) == TRAITS[kind].bounds
    assert ("dual_clip" in names) == TRAITS[kind].dual_clip
    assert ("behavior_logprobs_BT" in names) == TRAITS[kind].weighs


@of_every_loss
def test_bounds_are_the_same_by_default_wherever_a_loss_is_called_from(kind: str) -> None:
    """By itself, through `policy_loss`, or from a configuration."""
    own, general = (inspect.signature(function).parameters for function in (LOSSES[kind], policy_loss))
    for name in ("clip_low", "clip_high"):
        default = AlgorithmConfig.model_fields[name].default
        assert general[name].default == default
        assert name not in own or own[name].default == default


@of_every_loss
def test_by_row(kind: str) -> None:
    data = traits_batch()
    loss_BT, _ = traits_gradient(kind, data)
    spread = max(float(row[mask].max() - row[mask].min()) for row, mask in zip(loss_BT, data["mask_BT"], strict=True))
    by_row = spread < 1e-6
    # GSPO's tokens hold equal values too, but each passes the gradient of its own log-prob: token weights belong there.
    assert TRAITS[kind].by_row == (by_row and kind not in ("gspo", "luspo"))


def test_nothing_is_assumed_of_a_loss_of_ones_own() -> None:
    own = AlgorithmConfig(loss="mine.py:loss")
    assert own.needs_every_token and own.corrects and own.weight == "token_truncate"
    for proximal in ("behavior", "snapshot", "interpolated"):
        assert not AlgorithmConfig(loss="mine.py:loss", proximal=proximal).corrects


@of_every_loss
def test_losses_of_the_ratio_are_alike_where_it_is_1(kind: str) -> None:
    """What the notice about traits_options of the ratio says (config/settle.py)."""
    data = traits_batch()
    data["old_logprobs_BT"] = data["logprobs_BT"].clone()
    same = torch.allclose(traits_gradient(kind, data)[1], traits_gradient("reinforce", data)[1])
    assert TRAITS[kind].by_ratio is same
