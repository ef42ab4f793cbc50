"""Off-policy correction against the installed TRL and verl: their code runs, and differences are asserted as such."""

from __future__ import annotations

import ast
import inspect
import math
import textwrap
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rollover.algorithms.correction import (
    effective_sample_size,
    importance_weights,
    mismatch_metrics,
    mismatch_summary,
    off_policy_sequence_mask,
    rejection_mask,
)

grpo_trainer = pytest.importorskip("trl.trainer.grpo_trainer")
verl = pytest.importorskip("verl.trainer.ppo.rollout_corr_helper")

SEEDS = range(6)
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def batch(seed: int, *, empty_row: bool = True, spread: float = 0.6, rows: int = 9, tokens: int = 11):
    """(proximal, behavior, mask): ragged rows with holes (as of tool output). Row 0 has no loss token if `empty_row`.

    In row 1 both policies are equal: verl fails with ZeroDivisionError where every weight is 0.
    """
    generator = torch.Generator().manual_seed(seed)
    behavior = -3 * torch.rand(rows, tokens, generator=generator)
    proximal = behavior + spread * torch.randn(rows, tokens, generator=generator)
    proximal[1] = behavior[1]
    lengths = torch.randint(2, tokens + 1, (rows,), generator=generator)
    mask = torch.arange(tokens) < lengths[:, None]
    mask &= torch.rand(rows, tokens, generator=generator) < 0.85
    mask[:, 0] = True
    mask[0] &= not empty_row
    return proximal, behavior, mask


def verl_weights(proximal, behavior, mask, level: str, threshold) -> tuple[torch.Tensor, dict[str, float]]:
    return verl.compute_rollout_correction_weights(
        proximal - behavior, mask.float(), rollout_is=level, rollout_is_threshold=threshold
    )


def summary(proximal, behavior, mask, **arguments) -> dict[str, float]:
    metrics = mismatch_metrics(proximal, behavior, mask, **arguments)
    return mismatch_summary({key: float(value) for key, value in metrics.items()})


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("spread", [0.6, 30.0])  # the second passes the bound of 20 on both sides
def test_verl_weights(seed: int, level: str, spread: float) -> None:
    args = batch(seed, spread=spread)
    for cap in (1.3, 2.0, 1e12):
        expected, _ = verl_weights(*args, level, cap)
        got = importance_weights(*args, mode=f"{level}_truncate", cap=cap)  # type: ignore[arg-type]
        torch.testing.assert_close(got, expected, **CLOSE)
        for floor in (0.7, 1 / cap):
            expected, _ = verl_weights(*args, level, f"{floor!r}_{cap!r}")
            got = importance_weights(*args, mode=f"{level}_mask", cap=cap, floor=floor)  # type: ignore[arg-type]
            torch.testing.assert_close(got, expected, **CLOSE)
            if level == "token":
                assert torch.equal(importance_weights(*args, mode="icepop", cap=cap, floor=floor), got)
    assert torch.equal(
        importance_weights(*args, mode="icepop", cap=1.3),
        importance_weights(*args, mode="icepop", cap=1.3, floor=1 / 1.3),
    )


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@pytest.mark.parametrize("level", ["token", "sequence_sum", "sequence_mean", "sequence_max"])
def test_verl_rejection(seed: int, kind: Any, level: Any) -> None:
    option = f"{level.replace('sequence', 'seq')}_{kind}"
    if option == "seq_max_k1":
        assert option not in verl.SUPPORTED_ROLLOUT_RS_OPTIONS, "verl has learned it: compare"
        return
    proximal, behavior, mask = args = batch(seed)
    kept = set()
    for high in (0.02, 0.1, 0.15, 0.2, 0.3, 0.5, 1.5, 4.0):
        thresholds: list[tuple[str, float | None]] = [(repr(high), None)]
        if kind == "k1":
            # verl bounds k1 by the logarithms of two ratios behavior / proximal; one number means "its reciprocal_it".
            thresholds = [(repr(math.exp(high)), None), (f"0.9_{math.exp(high)!r}", math.log(0.9))]
        for threshold, low in thresholds:
            expected, _ = verl.compute_rollout_rejection_mask(proximal - behavior, mask.float(), option, threshold)
            got = rejection_mask(*args, kind=kind, level=level, high=high, low=low)
            assert torch.equal(got.float(), expected)
            kept.add(int(got.sum()))
    assert len(kept) > 2, "the thresholds must tell the tokens apart"


@pytest.mark.parametrize("seed", SEEDS)
def test_verl_rejection_options_combine_as_the_product_of_ours(seed: int) -> None:
    proximal, behavior, mask = args = batch(seed)
    options, thresholds = "token_k2,seq_mean_k3,seq_sum_k1", "0.6,0.3,0.3_4.0"
    expected, _ = verl.compute_rollout_rejection_mask(proximal - behavior, mask.float(), options, thresholds)
    ours = (
        rejection_mask(*args, kind="k2", level="token", high=0.6)
        & rejection_mask(*args, kind="k3", level="sequence_mean", high=0.3)
        & rejection_mask(*args, kind="k1", level="sequence_sum", low=math.log(0.3), high=math.log(4.0))
    )
    assert torch.equal(ours.float(), expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_verl_geometric_rejection_is_our_geometric_mask(seed: int) -> None:
    """Deliberate: our bounds are of proximal / behavior as in every other mode, verl's k1 bounds are of the inverse."""
    proximal, behavior, mask = args = batch(seed)
    for floor, cap in ((0.9, 1.3), (0.7, 1.05)):
        threshold = f"{1 / cap!r}_{1 / floor!r}"
        expected, _ = verl.compute_rollout_rejection_mask(proximal - behavior, mask.float(), "seq_mean_k1", threshold)
        got = importance_weights(*args, mode="geometric_mask", cap=cap, floor=floor)
        assert torch.equal(got, expected)
        assert 0 < float(got.sum()) < float(mask.sum())


# verl's name of what our summary has under another, or the same, name.
OFF_POLICY = {
    "kl": "kl",
    "k3_kl": "k3",
    "training_ppl": "proximal_ppl",
    "training_log_ppl": "proximal_log_ppl",
    "rollout_ppl": "behavior_ppl",
    "rollout_log_ppl": "behavior_log_ppl",
    "log_ppl_diff": "log_ppl_difference",
    "log_ppl_abs_diff": "log_ppl_abs_difference",
    "log_ppl_diff_max": "log_ppl_difference_max",
    "log_ppl_diff_min": "log_ppl_difference_min",
    "ppl_ratio": "ppl_ratio",
    "chi2_token": "chi2_token",
    "chi2_seq": "chi2_sequence",
}


@pytest.mark.parametrize("seed", SEEDS)
def test_verl_off_policy_metrics(seed: int) -> None:
    args = batch(seed, empty_row=False)
    expected = verl.compute_offpolicy_metrics(args[0], args[1], args[2].float())
    assert set(expected) == set(OFF_POLICY), "all that verl computes"
    got = summary(*args, mode="none", cap=2.0)
    assert {key: got[ours] for key, ours in OFF_POLICY.items()} == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_verl_counts_rows_without_a_loss_token_as_sequences() -> None:
    """Deliberate: such a row is no sequence here; verl counts it with ratio and perplexity 1."""
    args = batch(0)
    theirs = verl.compute_offpolicy_metrics(args[0], args[1], args[2].float())
    ours = summary(*args, mode="none", cap=2.0)
    for key in ("training_ppl", "rollout_log_ppl", "log_ppl_diff", "ppl_ratio", "chi2_seq"):
        blank = 1.0 if key in ("training_ppl", "ppl_ratio") else 0.0
        assert theirs[key] == pytest.approx((8 * ours[OFF_POLICY[key]] + blank) / 9, rel=1e-5)
        assert abs(theirs[key] - ours[OFF_POLICY[key]]) > 1e-3
    for key in ("kl", "k3_kl", "chi2_token"):
        assert theirs[key] == pytest.approx(ours[OFF_POLICY[key]], rel=1e-5)


def test_verl_does_not_bound_k3() -> None:
    """Deliberate: one token with log-ratio 40 gives k3 = exp(40) there, exp(20) here, and is counted as bounded."""
    args = (torch.tensor([[0.0, -1.0]]), torch.tensor([[-40.0, -1.0]]), torch.ones(1, 2))
    assert verl.compute_offpolicy_metrics(*args)["k3_kl"] == pytest.approx(math.exp(40) / 2, rel=1e-4)
    ours = summary(*args, mode="none", cap=2.0)
    assert ours["k3"] == pytest.approx(math.exp(20) / 2, rel=1e-4) and ours["bounded"] == 0.5


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_verl_weight_metrics(seed: int, level: str) -> None:
    args = batch(seed)
    for cap, floor in ((1.5, None), (1.5, 0.8)):
        threshold = cap if floor is None else f"{floor}_{cap}"
        weights, expected = verl_weights(*args, level, threshold)
        mode: Any = f"{level}_{'truncate' if floor is None else 'mask'}"
        got = summary(*args, mode=mode, cap=cap, floor=floor)
        assert got["weight"] == pytest.approx(expected["rollout_is_mean"], rel=1e-5)
        assert got["ess_weight"] == pytest.approx(expected["rollout_is_eff_sample_size"], rel=1e-5)
        share = float(effective_sample_size(weights, args[2], level="token"))
        assert share == pytest.approx(expected["rollout_is_eff_sample_size"], rel=1e-5)
        if floor is not None:
            assert got["capped"] + got["below"] == pytest.approx(expected["rollout_is_oob_ratio"], rel=1e-5)
        if level == "token":
            assert got["capped"] == pytest.approx(expected["rollout_is_ratio_fraction_high"], rel=1e-5)
            assert got["below"] == pytest.approx(expected["rollout_is_ratio_fraction_low"], rel=1e-5)


def test_verl_counts_bounded_sequences_and_we_tokens() -> None:
    """Deliberate: sum/capped counts tokens in every mode, so that shares of modes can be compared."""
    proximal = torch.tensor([[1.0, 0.0, 0.0], [-1.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    _, theirs = verl_weights(proximal, torch.zeros(2, 3), mask, "sequence", 2.0)
    ours = summary(proximal, torch.zeros(2, 3), mask, mode="sequence_truncate", cap=2.0)
    assert theirs["rollout_is_ratio_fraction_high"] == theirs["rollout_is_ratio_fraction_low"] == 0.5
    assert ours["capped"] == 0.75 and ours["below"] == 0.25


def test_verl_lets_nan_under_the_mask_through() -> None:
    """Deliberate: NaN * 0 is NaN in verl's weights; ours are exactly 0 where the mask is."""
    proximal, behavior, mask = torch.zeros(1, 2), torch.tensor([[0.0, float("nan")]]), torch.tensor([[1, 0]])
    theirs, _ = verl_weights(proximal, behavior, mask, "token", 2.0)
    assert theirs.isnan().tolist() == [[False, True]]
    ours = importance_weights(proximal, behavior, mask, mode="token_truncate", cap=2.0)
    assert torch.equal(ours, torch.tensor([[1.0, 0.0]]))


def test_verls_ess_is_undefined_for_zero_weights() -> None:
    """Deliberate: nothing left is a share of 0 here."""
    args = (torch.ones(1, 2), torch.zeros(1, 2), torch.ones(1, 2))
    with pytest.raises(ZeroDivisionError):
        verl_weights(*args, "token", "0.5_2.0")
    weights = importance_weights(*args, mode="icepop", cap=2.0)
    assert float(effective_sample_size(weights, args[2], level="token")) == 0.0


def trl_ratio_block():
    """Compiled from the installed GRPOTrainer: the statement that makes the importance ratios, inside a long method."""
    source = textwrap.dedent(inspect.getsource(grpo_trainer.GRPOTrainer._generate_and_score_completions))
    blocks = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.If)
        and any(
            isinstance(inner, ast.Assign) and ast.unparse(inner.targets[0]) == "sequence_level_is"
            for inner in node.body
        )
    ]
    assert len(blocks) == 1, "TRL has changed: find the statement again"
    return compile(ast.Module(body=[blocks[0]], type_ignores=[]), "trl", "exec")


TRL_BLOCK = trl_ratio_block()


def trl_ratio(proximal, behavior, mask, mode: str, clip_max: float | None, clip_min: float | None) -> torch.Tensor:
    trainer = SimpleNamespace(
        use_vllm=True,
        vllm_importance_sampling_correction=True,
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_max=clip_max,
        vllm_importance_sampling_clip_min=clip_min,
    )
    scope = {
        "self": trainer,
        "torch": torch,
        "math": math,
        "old_per_token_logps": proximal,
        "sampling_per_token_logps": behavior,
        "completion_mask": mask.int(),
        "tool_mask": None,
    }
    exec(TRL_BLOCK, scope)
    ratio = scope["vllm_importance_sampling_ratio"]
    assert isinstance(ratio, torch.Tensor)
    return ratio


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_trl_weights(seed: int, mode: Any) -> None:
    """Deliberate: TRL leaves a ratio at masked positions and relies on the loss mask; ours are 0 there."""
    args = batch(seed)
    for clip_max, clip_min in ((3.0, None), (1.2, 0.8), (3.0, 0.5), (None, 0.9)):
        expected = trl_ratio(*args, mode, clip_max, clip_min)
        got = importance_weights(*args, mode=mode, cap=math.inf if clip_max is None else clip_max, floor=clip_min)
        torch.testing.assert_close(got, expected * args[2], **CLOSE)
        # [B, T] of a token mode; [B, 1] of a sequence mode.
        under_mask = (expected.expand_as(got))[~args[2]]
        assert bool((under_mask != 0).any()) and not bool(got[~args[2]].any())


def test_trl_does_not_bound_the_log_ratio() -> None:
    """Deliberate: exp(20) is the largest ratio here; TRL's may overflow."""
    proximal, behavior, mask = torch.zeros(1, 2), torch.full((1, 2), -60.0), torch.ones(1, 2).bool()
    assert bool(trl_ratio(proximal, behavior, mask, "sequence_truncate", None, 0.1).isinf().all())
    ours = importance_weights(proximal, behavior, mask, mode="sequence_truncate", cap=math.inf, floor=0.1)
    torch.testing.assert_close(ours, torch.full((1, 2), math.exp(20.0)))


def test_trl_gives_a_missing_log_prob_weight_one() -> None:
    """Deliberate: a NaN at a loss position is an error here, which a truncated weight shows and a mask drops."""
    args = (torch.zeros(1, 2), torch.tensor([[0.0, float("nan")]]), torch.ones(1, 2).bool())
    assert trl_ratio(*args, "token_truncate", 3.0, None).tolist() == [[1.0, 1.0]]
    ours = importance_weights(*args, mode="token_truncate", cap=3.0)
    assert ours.isnan().tolist() == [[False, True]]
    assert importance_weights(*args, mode="token_mask", cap=3.0).tolist() == [[1.0, 0.0]]


@pytest.mark.parametrize("seed", SEEDS)
def test_trl_off_policy_mask(seed: int) -> None:
    proximal, behavior, mask = batch(seed, spread=0.4)
    generator = torch.Generator().manual_seed(100 + seed)
    kept = set()
    for advantages in (torch.randn(9, generator=generator), torch.randn(9, 11, generator=generator)):
        for threshold in (-0.1, 0.0, 0.05, 0.5):
            expected = grpo_trainer.GRPOTrainer.get_off_policy_mask(
                advantages=advantages[:, None] if advantages.ndim == 1 else advantages,
                per_token_logps=proximal,
                sampling_per_token_logps=behavior,
                mask=mask.int(),
                off_policy_threshold=threshold,
            )
            got = off_policy_sequence_mask(advantages, proximal, behavior, mask, threshold=threshold)
            assert torch.equal(got, (expected * mask).bool())
            kept.add(int(got.sum()))
    assert len(kept) > 2
