"""Which rank computes which samples. Pure: the same samples, and the same number of ranks, give the same parts.

A group is never cut: its siblings share the copy of their prompt in a row.
"""

from __future__ import annotations

from rollover.trainer.packing import row_tokens
from rollover.types import Sample


def spread(samples: list[Sample], num_ranks: int) -> list[list[Sample]]:
    """The samples of each rank, whole groups in the order in which they came, with about as many tokens each.

    The largest group first, to the rank that has the fewest tokens so far (Graham 1969, "Bounds on Multiprocessing
    Timing Anomalies": at most 4/3 of the best spread). What has no loss token costs nothing, and goes with its group.
    """
    tokens: dict[int, int] = {}
    groups: dict[int, list[Sample]] = {}
    for s in samples:
        groups.setdefault(s.group_id, []).append(s)
    for group_id, group in groups.items():
        tokens[group_id] = row_tokens([s for s in group if s.mask.any()])
    loads = [0] * num_ranks
    rank_of: dict[int, int] = {}
    for group_id in sorted(groups, key=lambda g: -tokens[g]):  # equal ones in their order
        rank = loads.index(min(loads))
        rank_of[group_id] = rank
        loads[rank] += tokens[group_id]
    return [[s for s in samples if rank_of[s.group_id] == rank] for rank in range(num_ranks)]
