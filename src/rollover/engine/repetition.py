"""When an answer goes round in circles: the rule by which engines stop it. Pure; no torch.

Kimi k1.5 (arXiv 2501.12599, section 2.6.2) stops generations that repeat themselves, as they would run to the limit.
"""

from __future__ import annotations

from collections.abc import Sequence

CHECK_EVERY = 16  # tokens; at indices of the turn, so that interruptions change nothing
MIN_REPEATS = 4


def repeats_itself(generated_ids: Sequence[int], window: int) -> bool:
    """Whether the last `window` tokens generated in a turn are one pattern, repeated at least MIN_REPEATS times.

    To be asked after every token. It looks at every CHECK_EVERY-th, which costs 1 / CHECK_EVERY of the window's length.
    """
    num = len(generated_ids)
    if not window or num < window or num % CHECK_EVERY:
        return False
    return smallest_period(generated_ids[num - window :]) * MIN_REPEATS <= window


def smallest_period(tokens: Sequence[int]) -> int:
    """The smallest p with tokens[i] == tokens[i - p] for all i >= p (Knuth, Morris and Pratt's failure function)."""
    borders = [0] * len(tokens)
    length = 0
    for i in range(1, len(tokens)):
        while length and tokens[i] != tokens[length]:
            length = borders[length - 1]
        if tokens[i] == tokens[length]:
            length += 1
        borders[i] = length
    return len(tokens) - borders[-1] if borders else 0
