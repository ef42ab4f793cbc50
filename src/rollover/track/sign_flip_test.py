"""Whether two evaluations of the same tasks differ: paired by task, with a p-value. Pure functions on plain numbers.

The task is what was drawn at random: several samples of one task are not independent, so a task counts by the mean of
its scores, and the null hypothesis is about tasks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MOST_EXACT = 20
"""Tasks that differ, up to which every assignment of signs is looked at (2^20)."""
NUM_DRAWN = 20_000
_ROUNDING = 1e-9  # relative: sums of the same numbers in another order are the same sum


def sign_flip_p(differences: Sequence[float], seed: int = 0) -> float:
    """Two-sided p-value of "the sign of each difference is a coin flip" by the size of their sum (Fisher's
    randomization test for matched pairs, 1935, "The Design of Experiments", section 21).

    Exact for up to MOST_EXACT differences that are not 0. Above that NUM_DRAWN assignments are drawn, and the p-value
    is (1 + those as extreme) / (1 + NUM_DRAWN), which is never too small (Phipson and Smyth 2010, "Permutation P-values
    Should Never Be Zero"). 1 where nothing differs.
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
