"""Importance weights, masks and diagnostics by hand, their bounds and invariances, and fact 3."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollover.algorithms.correction import (
    effective_sample_size,
    ess_step_scale,
    importance_weights,
    interpolated_proximal,
    mismatch_metrics,
    mismatch_summary,
    off_policy_sequence_mask,
    rejection_mask,
)
from rollover.algorithms.loss import policy_loss

# Ratios 3, 0.5, 1 and (second row) 0.1, 2; the last position of row two is no loss token.
PROXIMAL = torch.tensor([[3.0, 0.5, 1.0], [0.1, 2.0, 7.0]]).log()
BEHAVIOR = torch.zeros(2, 3)
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]]).bool()


def random_batch(seed: int, rows: int = 5, tokens: int = 7):
    """(proximal, behavior, mask, versions): ragged, with tokens that are no loss tokens inside, and one empty row."""
    generator = torch.Generator().manual_seed(seed)
    proximal, behavior = (-3 * torch.rand(rows, tokens, generator=generator) for _ in range(2))
    mask = torch.rand(rows, tokens, generator=generator) < 0.7
    mask[0] = False
    versions = torch.randint(0, 3, (rows, tokens), generator=generator).sort(-1).values
    return proximal, behavior, mask, versions


WEIGHING = [
    "token_truncate", "token_mask", "icepop", "segment_truncate", "segment_mask", "sequence_truncate", "sequence_mask"
]  # fmt: skip
MODES = [*WEIGHING, "geometric_mask"]
KINDS = ["k1", "k2", "k3"]
LEVELS = ["token", "sequence_sum", "sequence_mean", "sequence_max"]
VERSIONS = torch.tensor([[4, 4, 5], [5, 6, 9]])


def weigh(proximal, behavior, mask, *, mode, cap=2.0, floor=None, versions=VERSIONS) -> torch.Tensor:
    return importance_weights(
        proximal, behavior, mask, mode=mode, cap=cap, floor=floor, versions_BT=versions if "segment" in mode else None
    )


@pytest.mark.parametrize("mode", MODES)
@given(
    proximal=st.lists(st.floats(-400, 0, width=32), min_size=6, max_size=6),
    behavior=st.lists(st.floats(-400, 0, width=32), min_size=6, max_size=6),
)
def test_weights_are_finite_bounded_and_detached(mode, proximal: list[float], behavior: list[float]) -> None:
    p = torch.tensor(proximal).view(2, 3).requires_grad_(True)
    weights = weigh(p, torch.tensor(behavior).view(2, 3), MASK, mode=mode)
    assert weights.isfinite().all() and not weights.requires_grad
    assert float(weights.min()) >= 0 and float(weights.max()) <= 2.0
    assert float(weights[1, 2]) == 0.0


@pytest.mark.parametrize("mode", WEIGHING)
def test_log_ratios_are_bounded_to_20(mode) -> None:
    mask, versions = torch.ones(1, 2).bool(), torch.zeros(1, 2).long()
    near, far = torch.zeros(1, 2), torch.full((1, 2), -300.0)
    high = weigh(near, far, mask, mode=mode, cap=1e30, versions=versions)
    low = weigh(
        far, near, mask, mode=mode, floor=0.0 if "mask" in mode or mode == "icepop" else None, versions=versions
    )
    torch.testing.assert_close(high, torch.full((1, 2), math.exp(20.0)))
    torch.testing.assert_close(low, torch.full((1, 2), math.exp(-20.0)))
    for proximal, behavior in ((near, far), (far, near)):
        metrics = mismatch_metrics(proximal, behavior, mask, mode=mode, cap=2.0, versions_BT=versions)
        assert float(metrics["sum/bounded"]) == 2.0
        assert all(v.isfinite() for v in metrics.values())
    assert float(mismatch_metrics(near, near - 9.9, mask, mode=mode, cap=2.0, versions_BT=versions)["sum/bounded"]) == 0


@pytest.mark.parametrize("mode", MODES)
def test_equal_policies_have_weight_one(mode) -> None:
    """Fact 3: weights are exactly 1, every mask keeps all, the mismatch is exactly 0."""
    logprobs = -torch.rand(2, 3) * 8
    for cap, floor in ((1.0000001, 0.9999999), (1.0, 1.0)):  # the bounds themselves are inside
        assert torch.equal(weigh(logprobs, logprobs, MASK, mode=mode, cap=cap, floor=floor), MASK.float())
    metrics = mismatch_metrics(logprobs, logprobs, MASK, mode=mode, cap=1.0000001, versions_BT=VERSIONS)
    zero = ("sum/kl", "sum/k3", "max/logprob_abs", "sum/capped", "sum/below", "sum/bounded", "max/log_ppl_difference")
    assert [float(metrics[key]) for key in zero] == [0.0] * len(zero)
    assert float(metrics["sum/importance"]) == float(metrics["sum/weight"]) == 5.0
    summary = mismatch_summary({key: float(value) for key, value in metrics.items()})
    assert summary["ess_weight"] == summary["ess_token_ratio"] == summary["ess_sequence_ratio"] == 1.0
    assert summary["chi2_token"] == summary["chi2_sequence"] == 0.0


def test_mismatch_by_hand() -> None:
    metrics = mismatch_metrics(PROXIMAL, BEHAVIOR, MASK, mode="token_truncate", cap=1.5)
    logs = [math.log(r) for r in (3.0, 0.5, 1.0, 0.1, 2.0)]
    assert float(metrics["sum/logprob_abs"]) == pytest.approx(sum(abs(x) for x in logs), rel=1e-5)
    assert float(metrics["max/logprob_abs"]) == pytest.approx(math.log(10), rel=1e-5)
    assert float(metrics["sum/kl"]) == pytest.approx(-sum(logs), rel=1e-5)
    # Weights are reported before the cap.
    assert float(metrics["sum/importance"]) == pytest.approx(6.6, rel=1e-5)
    assert float(metrics["max/importance"]) == pytest.approx(3.0, rel=1e-5)
    assert float(metrics["sum/capped"]) == 2.0


def test_mismatch_of_sequences_and_of_no_correction() -> None:
    sequence = mismatch_metrics(PROXIMAL, BEHAVIOR, MASK, mode="sequence_mask", cap=1.2)
    assert float(sequence["max/importance"]) == pytest.approx(1.5, rel=1e-5)
    assert float(sequence["sum/importance"]) == pytest.approx(3 * 1.5 + 2 * 0.2, rel=1e-5)
    assert float(sequence["sum/capped"]) == 3.0
    uncorrected = mismatch_metrics(PROXIMAL, BEHAVIOR, MASK, mode="none", cap=1.2)
    assert float(uncorrected["max/importance"]) == pytest.approx(3.0, rel=1e-5)
    assert float(uncorrected["sum/capped"]) == 0.0


def segments(seed: int, mode: str, versions: torch.Tensor) -> torch.Tensor:
    proximal, behavior, mask, _ = random_batch(seed)
    return weigh(proximal, behavior, mask, mode=f"segment_{mode}", versions=versions)


@given(st.integers(0, 10_000), st.sampled_from(["truncate", "mask"]))
def test_segments_lie_between_tokens_and_sequences(seed: int, action: str) -> None:
    proximal, behavior, mask, versions = random_batch(seed)
    for level, ends in (("sequence", torch.full_like(versions, 3)), ("token", torch.arange(7).expand_as(versions))):
        expected = weigh(proximal, behavior, mask, mode=f"{level}_{action}")
        torch.testing.assert_close(segments(seed, action, ends), expected)
    got = segments(seed, action, versions)
    assert torch.equal(segments(seed, action, 1000 - 7 * versions), got), "only equality of versions counts"
    for row in range(5):
        for version in versions[row].unique():
            own = mask[row] & (versions[row] == version)
            ratio = float((proximal - behavior)[row][own].sum().exp())
            expected = min(ratio, 2.0) if action == "truncate" else ratio * (ratio <= 2.0)
            torch.testing.assert_close(got[row][own], torch.full((int(own.sum()),), expected))


@given(st.sampled_from([float("nan"), float("inf"), -float("inf"), 1e30]), st.integers(0, 10_000))
def test_masked_positions_influence_nothing(garbage: float, seed: int) -> None:
    proximal, behavior, mask, versions = random_batch(seed)
    spoiled = [torch.where(mask, x, garbage) for x in (proximal, behavior)]
    other_versions = torch.where(mask, versions, -5)
    for mode in MODES:
        clean = weigh(proximal, behavior, mask, mode=mode, versions=versions)
        for kind_of_mask in (mask, mask.int(), mask.float()):
            got = weigh(*spoiled, kind_of_mask, mode=mode, versions=other_versions)
            assert torch.equal(got, clean)
        assert torch.equal(clean[~mask], torch.zeros(int((~mask).sum())))
        metrics = mismatch_metrics(proximal, behavior, mask, mode=mode, cap=2.0, versions_BT=versions)
        assert metrics == mismatch_metrics(*spoiled, mask.int(), mode=mode, cap=2.0, versions_BT=other_versions)
    for kind in KINDS:
        for level in LEVELS:
            clean = rejection_mask(proximal, behavior, mask, kind=kind, level=level, high=0.7)
            assert torch.equal(rejection_mask(*spoiled, mask.int(), kind=kind, level=level, high=0.7), clean)
            assert not clean[~mask].any()
    advantages = torch.linspace(-1, 0.5, 35).view(5, 7)
    clean = off_policy_sequence_mask(advantages, proximal, behavior, mask, threshold=0.1)
    noisy = torch.where(mask, advantages, garbage)
    assert torch.equal(off_policy_sequence_mask(noisy, *spoiled, mask.int(), threshold=0.1), clean)
    for level in ("token", "sequence"):
        share = effective_sample_size(proximal.exp(), mask, level=level)
        assert torch.equal(effective_sample_size(torch.where(mask, proximal.exp(), garbage), mask, level=level), share)
    mixed = interpolated_proximal(behavior, proximal, versions, mask_BT=mask)
    age = torch.where(mask, versions.float(), garbage)
    assert torch.equal(interpolated_proximal(spoiled[1], spoiled[0], age, mask_BT=mask.int()), mixed)


@given(st.integers(0, 10_000), st.sampled_from(MODES))
def test_rows_and_order_of_tokens_do_not_matter(seed: int, mode) -> None:
    batch = random_batch(seed)
    whole = weigh(*batch[:3], mode=mode, versions=batch[3])
    alone = [weigh(*(x[i : i + 1] for x in batch[:3]), mode=mode, versions=batch[3][i : i + 1]) for i in range(5)]
    torch.testing.assert_close(torch.cat(alone), whole)
    flipped = weigh(*(x.flip(-1) for x in batch[:3]), mode=mode, versions=batch[3].flip(-1))
    torch.testing.assert_close(flipped.flip(-1), whole)


def test_a_ratio_that_is_no_number_is_outside_every_bound() -> None:
    spoiled = BEHAVIOR.clone()
    spoiled[0, 1] = float("nan")
    assert weigh(PROXIMAL, spoiled, MASK, mode="token_truncate")[0].isnan().tolist() == [False, True, False]
    for mode in ("token_mask", "icepop", "segment_mask", "sequence_mask", "geometric_mask"):
        assert float(weigh(PROXIMAL, spoiled, MASK, mode=mode, cap=5.0)[0, 1]) == 0.0
    assert not rejection_mask(PROXIMAL, spoiled, MASK, kind="k3", level="token", high=9.0)[0, 1]


@pytest.mark.parametrize(
    ("kind", "level", "high", "low", "expected"),
    [
        # k1 = -log ratio: -1.099, 0.693, 0 and 2.303, -0.693. The other levels and kinds: tests/parity.
        ("k1", "sequence_max", 2.0, None, [[1, 1, 1], [0, 0, 0]]),
        ("k1", "sequence_max", 2.4, -1.0, [[0, 0, 0], [1, 1, 0]]),
    ],
)
def test_rejection_of_the_largest_k1_by_hand(
    kind, level, high: float, low: float | None, expected: list[list[int]]
) -> None:
    got = rejection_mask(PROXIMAL, BEHAVIOR, MASK, kind=kind, level=level, high=high, low=low)
    assert got.dtype == torch.bool and got.int().tolist() == expected


@given(st.integers(0, 10_000), st.floats(0.05, 2.0))
def test_k1_rejects_what_the_masks_reject(seed: int, high: float) -> None:
    proximal, behavior, mask, _ = random_batch(seed)
    for level, mode in (("token", "icepop"), ("sequence_sum", "sequence_mask"), ("sequence_mean", "geometric_mask")):
        cap = math.exp(high)
        weights = weigh(proximal, behavior, mask, mode=mode, cap=cap, floor=1 / cap)
        kept = rejection_mask(proximal, behavior, mask, kind="k1", level=level, high=high)  # type: ignore[arg-type]
        assert torch.equal(weights > 0, kept)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", LEVELS)
def test_rejection_keeps_equal_policies_at_any_threshold(kind, level) -> None:
    logprobs = -torch.rand(2, 3) * 8
    assert torch.equal(rejection_mask(logprobs, logprobs, MASK, kind=kind, level=level, high=0.0), MASK)


def test_diagnostics_by_hand() -> None:
    """Ratios 3, 0.5, 1 and 0.1, 2 against behavior log-probs 0: products 1.5 and 0.2."""
    metrics = mismatch_metrics(PROXIMAL, BEHAVIOR, MASK, mode="icepop", cap=2.5)
    assert float(metrics["sum/below"]) == 1.0 and float(metrics["sum/capped"]) == 1.0
    assert float(metrics["sum/weight"]) == pytest.approx(3.5) and float(metrics["sum/weight_squared"]) == 5.25
    got = mismatch_summary({key: float(value) for key, value in metrics.items()})
    log_ppl = (-math.log(1.5) / 3, -math.log(0.2) / 2)
    expected = {
        "k3": (6.6 - 5 - math.log(0.3)) / 5,
        "kl": -math.log(0.3) / 5,
        "importance": 6.6 / 5,
        "capped": 0.2,
        "below": 0.2,
        "bounded": 0.0,
        "chi2_token": (9 + 0.25 + 1 + 0.01 + 4) / 5 - 1,
        "chi2_sequence": (2.25 + 0.04) / 2 - 1,
        "proximal_log_ppl": sum(log_ppl) / 2,
        "behavior_log_ppl": 0.0,
        "proximal_ppl": sum(map(math.exp, log_ppl)) / 2,
        "behavior_ppl": 1.0,
        "ppl_ratio": sum(map(math.exp, log_ppl)) / 2,
        "log_ppl_difference": sum(log_ppl) / 2,
        "log_ppl_abs_difference": (log_ppl[1] - log_ppl[0]) / 2,
        "log_ppl_difference_max": log_ppl[1],
        "log_ppl_difference_min": log_ppl[0],
        "ess_weight": 3.5**2 / (5 * 5.25),
        "ess_token_ratio": 6.6**2 / (5 * 14.26),
        "ess_sequence_ratio": 1.7**2 / (2 * 2.29),
    }
    assert {key: got[key] for key in expected} == pytest.approx(expected, rel=1e-5, abs=1e-7)
    shifted = mismatch_metrics(PROXIMAL - 2, BEHAVIOR - 2, MASK, mode="none", cap=2.5)
    again = mismatch_summary({key: float(value) for key, value in shifted.items()})
    assert again["behavior_log_ppl"] == pytest.approx(2.0) and again["ppl_ratio"] == pytest.approx(got["ppl_ratio"])
    assert again["weight"] == again["ess_weight"] == 1.0 and again["below"] == again["capped"] == 0.0
    nothing = mismatch_metrics(PROXIMAL, BEHAVIOR, ~MASK & MASK, mode="none", cap=2.5)
    assert mismatch_summary({}) == {} == mismatch_summary({key: float(value) for key, value in nothing.items()})


def test_below_uses_reciprocal_cap_without_floor() -> None:
    for floor, below in ((None, 2.0), (0.3, 1.0)):
        metrics = mismatch_metrics(PROXIMAL, BEHAVIOR, MASK, mode="token_truncate", cap=1.5, floor=floor)
        assert float(metrics["sum/below"]) == below


@given(st.integers(0, 10_000), st.integers(1, 4), st.sampled_from([*MODES, "none"]))
def test_diagnostics_add_up_over_micro_batches(seed: int, split: int, mode) -> None:
    proximal, behavior, mask, versions = random_batch(seed)
    totals: dict[str, float] = {}
    for rows in (slice(split), slice(split, 5)):
        args = (x[rows] for x in (proximal, behavior, mask))
        for key, value in mismatch_metrics(*args, mode=mode, cap=1.5, versions_BT=versions[rows]).items():
            join = max if key.startswith("max/") else float.__add__
            totals[key] = join(totals[key], float(value)) if key in totals else float(value)
    whole = mismatch_metrics(proximal, behavior, mask, mode=mode, cap=1.5, versions_BT=versions)
    assert totals == pytest.approx({key: float(value) for key, value in whole.items()}, rel=1e-5, abs=1e-5)
    weights = mask.float() if mode == "none" else weigh(proximal, behavior, mask, mode=mode, cap=1.5, versions=versions)
    summary = mismatch_summary(totals)
    share = float(effective_sample_size(weights, mask, level="token"))
    assert summary["ess_weight"] == pytest.approx(share, rel=1e-5)
    sequences = weigh(proximal, behavior, mask, mode="sequence_truncate", cap=1e9)
    share = float(effective_sample_size(sequences, mask, level="sequence"))
    assert summary["ess_sequence_ratio"] == pytest.approx(share, rel=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_no_loss_token_gives_zeros(mode) -> None:
    nothing = torch.zeros(2, 3)
    assert torch.equal(weigh(PROXIMAL, BEHAVIOR, nothing, mode=mode), nothing)


def test_errors_name_the_argument() -> None:
    def raises(match: str, **arguments) -> None:
        with pytest.raises(ValueError, match=match):
            importance_weights(PROXIMAL, BEHAVIOR, MASK, **arguments)
        with pytest.raises(ValueError, match=match):
            mismatch_metrics(PROXIMAL, BEHAVIOR, MASK, **arguments)

    raises("versions_BT is missing", mode="segment_truncate", cap=2.0)
    raises("versions_BT has shape", mode="segment_mask", cap=2.0, versions_BT=VERSIONS[:1])
    raises("cap", mode="token_mask", cap=0.0)
    raises("cap", mode="token_mask", cap=float("nan"))
    raises("floor", mode="token_mask", cap=2.0, floor=2.5)
    raises("floor", mode="token_truncate", cap=2.0, floor=-0.1)
    raises("floor = 2.0 must", mode="icepop", cap=0.5)

    def rejects(match: str, **arguments) -> None:
        with pytest.raises(ValueError, match=match):
            rejection_mask(PROXIMAL, BEHAVIOR, MASK, **arguments)

    rejects("kind", kind="k4", level="token", high=1.0)
    rejects("level", kind="k1", level="sequence", high=1.0)
    rejects("low", kind="k3", level="token", high=1.0, low=0.1)
    rejects("high", kind="k1", level="token", high=-1.0)
    rejects("high", kind="k2", level="token", high=float("nan"))
    with pytest.raises(ValueError, match="level"):
        effective_sample_size(PROXIMAL, MASK, level="batch")  # type: ignore[arg-type]


@pytest.mark.parametrize("level", LEVELS)
def test_rejection_bounds_ratios_and_ignores_masked_tokens(level) -> None:
    far, mask = torch.full((1, 3), -300.0), torch.tensor([[1, 0, 0]]).bool()
    assert torch.equal(rejection_mask(0 * far, far, mask, kind="k3", level=level, high=5e8), mask)
    assert not rejection_mask(0 * far, far, mask, kind="k3", level=level, high=4e8).any()
    assert torch.equal(rejection_mask(far, 0 * far, mask, kind="k1", level=level, high=20.0, low=19.0), mask)


def test_unknown_mode_is_an_error() -> None:
    for mode in ("token", "batch_mask", "none"):
        with pytest.raises(ValueError, match="not a correction"):
            importance_weights(PROXIMAL, BEHAVIOR, MASK, mode=mode, cap=2.0)  # type: ignore[arg-type]


def test_off_policy_sequence_mask_keeps_the_threshold_itself_and_passes_no_gradient() -> None:
    current = torch.tensor([[-0.75, -0.25]]).requires_grad_(True)
    args = (torch.tensor([-1.0]), current, torch.zeros(1, 2), torch.ones(1, 2))
    kept = off_policy_sequence_mask(*args, threshold=0.5)
    assert kept.all() and not kept.requires_grad
    assert not off_policy_sequence_mask(*args, threshold=0.4999).any()
    loss, _ = policy_loss(current, torch.zeros(1, 2), args[0], args[3], kind="reinforce")
    (gradient,) = torch.autograd.grad((loss * kept).sum(), current)
    torch.testing.assert_close(gradient, torch.ones(1, 2))


def test_effective_sample_size_by_hand() -> None:
    weights = torch.tensor([[3.0, 1.0, 2.0], [4.0, 2.0, 99.0]])
    assert float(effective_sample_size(weights, MASK, level="token")) == pytest.approx(144 / (5 * 34))
    # Row means 2 and 3.
    assert float(effective_sample_size(weights, MASK, level="sequence")) == pytest.approx(25 / (2 * 13))
    one = torch.tensor([[0.0, 7.0, 0.0], [0.0, 0.0, 5.0]])
    assert float(effective_sample_size(one, MASK, level="token")) == pytest.approx(1 / 5)
    assert float(effective_sample_size(one, MASK, level="sequence")) == pytest.approx(1 / 2)
    for nothing in ((torch.zeros(2, 3), MASK), (weights, torch.zeros(2, 3))):
        for level in ("token", "sequence"):
            assert float(effective_sample_size(*nothing, level=level)) == 0.0


@given(st.integers(0, 10_000), st.sampled_from(["token", "sequence"]), st.floats(0.01, 100))
def test_effective_sample_size_is_a_share_and_knows_no_scale(seed: int, level, scale: float) -> None:
    proximal, behavior, mask, _ = random_batch(seed)
    weights = (proximal - behavior).exp()
    share = effective_sample_size(weights, mask, level=level)
    count = int(mask.sum()) if level == "token" else int(mask.any(-1).sum())
    assert 1 / count - 1e-6 <= float(share) <= 1 + 1e-6
    torch.testing.assert_close(effective_sample_size(scale * weights, mask, level=level), share)
    torch.testing.assert_close(
        effective_sample_size(torch.full_like(weights, scale), mask, level=level), torch.ones(())
    )


def test_ess_step_scale_by_hand() -> None:
    for ess, expected in ((0.25, 0.5), (0.36, 0.6), (1.0, 1.0), (1.8, 1.0), (0.0, 0.0)):
        assert float(ess_step_scale(ess)) == pytest.approx(expected)
    share = effective_sample_size(torch.tensor([[1.0], [3.0]]), torch.ones(2, 1), level="sequence")
    assert float(ess_step_scale(share)) == pytest.approx(math.sqrt(0.8))


def test_interpolated_proximal_by_hand() -> None:
    behavior, current = torch.tensor([[-1.0, -1.0, -1.0, -1.0, -1.0]]), torch.tensor([[-3.0, -3.0, -3.0, -3.0, -9.0]])
    mask = torch.tensor([[1, 1, 1, 1, 0]])
    got = interpolated_proximal(behavior, current.requires_grad_(True), torch.tensor([[0, 1, 2, 4, 3]]), mask_BT=mask)
    torch.testing.assert_close(got, torch.tensor([[-1.0, -1.0, -2.0, -2.5, 0.0]]))
    assert not got.requires_grad
    old = interpolated_proximal(behavior, current, torch.full((1, 5), 10**6), mask_BT=mask)
    torch.testing.assert_close(old, torch.where(mask.bool(), current.detach(), 0.0), rtol=1e-5, atol=1e-5)


def test_interpolated_proximal_splits_the_whole_ratio() -> None:
    """weight(proximal, behavior) * ratio(current, proximal) is current / behavior at any staleness."""
    current, behavior, mask, versions = random_batch(3)
    proximal = interpolated_proximal(behavior, current, 5 - versions, mask_BT=mask)
    weights = importance_weights(proximal, behavior, mask, mode="token_truncate", cap=1e9)
    rest = torch.where(mask, current - proximal, 0.0).exp()
    torch.testing.assert_close(weights * rest, torch.where(mask, (current - behavior).exp(), 0.0))


def test_interpolated_proximal_refuses_a_negative_staleness() -> None:
    with pytest.raises(ValueError, match="staleness_BT is negative"):
        interpolated_proximal(BEHAVIOR, PROXIMAL, -torch.ones(2, 3), mask_BT=MASK)
