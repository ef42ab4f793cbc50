"""maj@k: the chance that the answer which most of k samples give passes. Pure functions on plain numbers.

Exact, over all subsets and all ways to break a tie: where others draw subsets at random (verl) or take the first k
samples (lm-evaluation-harness), this is what they estimate.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

MOST = 16
"""The largest k of a real subset: the work grows with its cube. All samples together are no work."""


def majority_at_k(samples: Sequence[tuple[str | None, bool]], k: int) -> float:
    """Self-consistency (Wang et al. 2022, "Self-Consistency Improves Chain of Thought Reasoning in Language Models"):
    the expected pass of the answer with the most votes among k of the samples, drawn without replacement.

    samples: (the answer it votes for, or None: it abstains; whether it passes) of each. A tie is broken by lot; k
    samples that all abstain do not pass. Of one answer some samples may pass and others not: it passes by their share.
    Raises ValueError unless 1 <= k <= len(samples).
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


@functools.lru_cache(4096)  # most tasks of an evaluation have one of few patterns
def _chance_to_win(size: int, sizes: tuple[int, ...], silent: int, k: int) -> Fraction:
    """That one answer with `size` votes wins among k of all samples. `sizes`: the votes of each answer, its own too."""
    others = list(sizes)
    others.remove(size)
    ways = Fraction(0)
    for own in range(1, min(size, k) + 1):
        left = k - own
        # (how many votes of others are drawn, how many of them have as many as it) -> in how many ways
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
