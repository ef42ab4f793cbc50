"""Statistics of evaluations and lengths: intervals, pass@k, maj@k, a paired test, a censored mean. Pure functions.

The unit of resampling is the task: rollouts of one task are not independent, so every interval and test uses one value
per task.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

PER_K = re.compile(r"(pass|maj)@\d+")  # metrics of an evaluation for k samples
Z_95 = 1.959963984540054  # 97.5 % quantile of the normal distribution


def mean_interval(values: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """Return the mean and its 95 % interval, mean +- z * s / sqrt(n) (normal approximation, s with n - 1).

    With one value the interval is (-inf, inf). Raises ValueError without values.
    """
    if not values:
        raise ValueError("mean of no values: every task of the evaluation lacks a score")
    count = len(values)
    mean = math.fsum(values) / count
    if count == 1:
        return mean, (-math.inf, math.inf)
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    half = Z_95 * math.sqrt(variance / count)
    return mean, (mean - half, mean + half)


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Estimate, without bias, the chance that at least one of k samples passes: 1 - C(n - c, k) / C(n, k).

    Chen et al. 2021, "Evaluating Large Language Models Trained on Code", eq. 1. Raises ValueError unless
    0 <= num_passed <= num_samples and 1 <= k <= num_samples.
    """
    if not 0 <= num_passed <= num_samples:
        raise ValueError(f"num_passed = {num_passed} is not within 0 and num_samples = {num_samples}")
    if not 1 <= k <= num_samples:
        raise ValueError(f"k = {k} is not within 1 and num_samples = {num_samples}: sample more, or lower k")
    return 1.0 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)


def wilson_interval(num_passed: float, num_trials: float) -> tuple[float, float]:
    """Return the 95 % interval of a proportion (Wilson 1927, "Probable Inference", no continuity correction).

    Stays within [0, 1] and has a width even at 0 and 1. Fractional counts are allowed (an effective sample size).
    """
    if num_trials <= 0 or not 0 <= num_passed <= num_trials:
        raise ValueError(f"a proportion needs 0 <= num_passed <= num_trials > 0, got {num_passed} of {num_trials}")
    rate, spread = num_passed / num_trials, Z_95**2 / num_trials
    centre = (rate + spread / 2) / (1 + spread)
    half = Z_95 * math.sqrt(rate * (1 - rate) / num_trials + spread / (4 * num_trials)) / (1 + spread)
    return max(0.0, centre - half), min(1.0, centre + half)


def proportion_interval(rates: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the mean of per-task values in [0, 1].

    The normal interval of `mean_interval` if it lies within (0, 1). Wilson's, with the tasks as trials, if it reaches 0
    or 1, if all values are equal (the sample shows no spread, but other tasks may), or if each value is 0 or 1. For
    values in between Wilson's is too wide, never too narrow.
    """
    _, (low, high) = mean_interval(rates)
    if 0 < low < high < 1 and not set(rates) <= {0.0, 1.0}:
        return low, high
    return wilson_interval(min(math.fsum(rates), len(rates)), len(rates))


def censored_mean(known: Mapping[int, int], at_least: Mapping[int, int]) -> float:
    """Return the mean of positive numbers, some of which (`at_least`) are only known as lower bounds.

    known, at_least: number -> count. Kaplan and Meier 1958, "Nonparametric Estimation from Incomplete Observations":
    the area under the survival curve up to the largest number in either. The plain mean if `at_least` is empty.
    Unbiased if the censoring does not depend on the remaining length. NaN without numbers.
    """
    left = sum(known.values()) + sum(at_least.values())
    if not left:
        return math.nan
    mean, surviving, before = 0.0, 1.0, 0
    for number in sorted({*known, *at_least}):
        mean += surviving * (number - before)
        surviving *= 1 - known.get(number, 0) / left
        left -= known.get(number, 0) + at_least.get(number, 0)
        before = number
    return mean


def summarise_eval(
    scores: Iterable[tuple[str, str, Sequence[float | None]]],
    threshold: float,
    ks: Iterable[int] = (1,),
    votes: Mapping[str, Sequence[str | None]] | None = None,
    majority_ks: Iterable[int] = (),
    passing: Mapping[str, Sequence[float | None]] | None = None,
) -> dict[str, Any]:
    """Summarise an evaluation, as a whole and by source.

    scores: per task (source, task_id, the scores of its rollouts, None if missing). A rollout passes if its score is at
    least `threshold`. `votes`: by task_id the answer of each rollout, None if it abstains. `passing`: by task_id the
    scores that `threshold` applies to, if they differ from `scores` (eval.shaped). Returns {"mean", "ci": [low, high],
    "pass@k" and "pass@k_ci" for each k, "maj@k" and "maj@k_ci" for each of `majority_ks`, if every counted task has
    enough scores, "tasks", "samples", "missing", "sources": {source: the same without sources}}.

    A task without any score counts in "missing" only. mean and ci: mean_interval over per-task means (ci None with one
    task). pass@k_ci, maj@k_ci: `proportion_interval` over tasks. Without scores "mean" and "ci" are None.
    """
    rows = [
        (source, _samples(list(values), (votes or {}).get(task_id), (passing or {}).get(task_id)))
        for source, task_id, values in scores
    ]
    wanted, majority = sorted(set(ks)), sorted(set(majority_ks)) if votes is not None else []
    summary = _summarise([samples for _, samples in rows], threshold, wanted, majority)
    sources = dict.fromkeys(source for source, _ in rows)
    summary["sources"] = {
        name: _summarise([samples for source, samples in rows if source == name], threshold, wanted, majority)
        for name in sources
    }
    return summary


def parts_of(evaluation: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return label -> summary of the parts of an evaluation: by source, data_source, role and setting."""
    parts = dict(evaluation.get("sources", {}))
    parts |= {f"data_source {name}": row for name, row in evaluation.get("data_sources", {}).items()}
    parts |= {f"role {name}": row for name, row in evaluation.get("roles", {}).items()}
    return parts | {f"setting {name}": row for name, row in evaluation.get("settings", {}).items()}


# Of each sample of a task: its score, its vote, and the score that the threshold applies to.
_Samples = list[tuple[float | None, str | None, float | None]]


def _samples(
    scores: Sequence[float | None], votes: Sequence[str | None] | None, passing: Sequence[float | None] | None
) -> _Samples:
    return list(zip(scores, votes or [None] * len(scores), passing or scores, strict=True))


def _proportion(name: str, rates: list[float]) -> dict[str, Any]:
    return {name: math.fsum(rates) / len(rates), f"{name}_ci": list(proportion_interval(rates))}


def _summarise(tasks: list[_Samples], threshold: float, ks: list[int], majority_ks: list[int]) -> dict[str, Any]:
    valid = [
        scored
        for task in tasks
        if (scored := [(s, vote, (s if p is None else p) >= threshold) for s, vote, p in task if s is not None])
    ]
    counts = {
        "tasks": len(valid),
        "samples": sum(map(len, valid)),
        "missing": sum(score is None for task in tasks for score, *_ in task),
    }
    if not valid:
        return {"mean": None, "ci": None, **counts}
    mean, interval = mean_interval([math.fsum(score for score, *_ in task) / len(task) for task in valid])
    summary: dict[str, Any] = {"mean": mean, "ci": list(interval) if len(valid) > 1 else None}
    fewest = min(map(len, valid))
    for k in (k for k in ks if k <= fewest):
        rates = [pass_at_k(len(task), sum(passed for *_, passed in task), k) for task in valid]
        summary |= _proportion(f"pass@{k}", rates)
    for k in (k for k in majority_ks if k <= fewest):
        rates = [majority_at_k([(vote, passed) for _, vote, passed in task], k) for task in valid]
        summary |= _proportion(f"maj@{k}", rates)
    return {**summary, **counts}


MAX_MAJORITY_K = 16
"""Largest k below the number of samples: the work grows with its cube. k = all samples is cheap."""


def majority_at_k(samples: Sequence[tuple[str | None, bool]], k: int) -> float:
    """Return maj@k: the chance that the most frequent answer among k samples passes.

    Wang et al. 2022, "Self-Consistency Improves Chain of Thought Reasoning in Language Models"; the k samples are drawn
    without replacement. Exact over all subsets and tie breaks: random subsets (verl) or the first k samples
    (lm-evaluation-harness) estimate this value. samples: (answer or None if it abstains, passes). A tie is broken at
    random; k abstaining samples do not pass. An answer that passes in some samples only passes by their share. Raises
    ValueError unless 1 <= k <= len(samples).
    """
    num = len(samples)
    if not 1 <= k <= num:
        raise ValueError(f"k = {k} is not within 1 and the number of samples, {num}: sample more, or lower k")
    votes = Counter(answer for answer, _ in samples)
    passed = Counter(answer for answer, passes in samples if passes)
    silent = votes.pop(None, 0)
    if not votes:
        return 0.0
    if k == num:
        most = max(votes.values())
        winners = [answer for answer, number in votes.items() if number == most]
        return sum(passed[answer] for answer in winners) / most / len(winners)
    sizes = tuple(sorted(votes.values()))
    chances = {size: _chance_to_win(size, sizes, silent, k) for size in set(sizes) if size}
    return float(sum(Fraction(passed[answer], size) * chances[size] for answer, size in votes.items()))


@functools.lru_cache(4096)  # most tasks have one of few vote patterns
def _chance_to_win(size: int, sizes: tuple[int, ...], silent: int, k: int) -> Fraction:
    """Chance that one answer with `size` votes wins among k samples. `sizes`: votes of each answer, its own too."""
    others = list(sizes)
    others.remove(size)
    ways = Fraction(0)
    for own in range(1, min(size, k) + 1):
        left = k - own
        # (drawn votes of other answers, answers that tie with it) -> number of ways
        drawn: dict[tuple[int, int], int] = {
            (number, 0): math.comb(silent, number) for number in range(min(silent, left) + 1)
        }
        for other in others:
            further: dict[tuple[int, int], int] = {}
            for (used, ties), number in drawn.items():
                for more in range(min(other, own, left - used) + 1):
                    place = (used + more, ties + (more == own))
                    further[place] = further.get(place, 0) + number * math.comb(other, more)
            drawn = further
        whole = sum(Fraction(number, 1 + ties) for (used, ties), number in drawn.items() if used == left)
        ways += math.comb(size, own) * whole
    return ways / math.comb(sum(sizes) + silent, k)


MOST_EXACT = 20
"""Most differing tasks for an exact test over all 2^20 sign assignments."""
NUM_DRAWN = 20_000
_ROUNDING = 1e-9  # relative: sums of the same numbers in another order are the same sum


def sign_flip_p(differences: Sequence[float], seed: int = 0) -> float:
    """Return the two-sided p-value of "the sign of each difference is a coin flip", by the size of their sum.

    Fisher's randomization test for matched pairs (1935, "The Design of Experiments", section 21). Exact for up to
    MOST_EXACT nonzero differences. Above that NUM_DRAWN assignments are drawn, and the p-value is
    (1 + those as extreme) / (1 + NUM_DRAWN), which is never too small (Phipson and Smyth 2010, "Permutation P-values
    Should Never Be Zero"). 1 if nothing differs.
    """
    values_N = np.array([value for value in differences if value != 0], dtype=np.float64)
    if not len(values_N):
        return 1.0
    bound = abs(values_N.sum()) - _ROUNDING * np.abs(values_N).sum()
    if len(values_N) <= MOST_EXACT:
        sums = np.zeros(1)
        for value in values_N:
            sums = np.concatenate([sums + value, sums - value])
        return float(np.mean(np.abs(sums) >= bound))
    random, extreme = np.random.default_rng(seed), 0
    for _ in range(NUM_DRAWN // 1000):
        signs_DN = random.integers(0, 2, (1000, len(values_N)), dtype=np.int8) * 2.0 - 1.0
        extreme += int(np.sum(np.abs(signs_DN @ values_N) >= bound))
    return (1 + extreme) / (1 + NUM_DRAWN)
