"""A rollout's role is its own: what a restarted run is configured with does not change it."""

from __future__ import annotations

import pytest

from unit.rollout.run import PARTIAL, Run


@pytest.mark.parametrize(
    ("before", "after"), [((2, True), (3, True)), ((3, False), (2, True)), ((2, True), (2, False))]
)
def test_another_group_size_makes_no_rollout_greedy_and_none_of_them_trained(
    before: tuple[int, bool], after: tuple[int, bool]
) -> None:
    def run(size: int, greedy: bool) -> Run:
        return Run(group_size=size, greedy_baseline=greedy, **(PARTIAL | {"in_flight_groups": 6}))

    first = run(*before)
    first.steps(2)
    roles = {r.rollout_id: r.greedy for g in first.cache.groups.values() for r in g.rollouts}
    assert roles, "nothing is held"
    resumed = run(*after)
    resumed.load(first.save())
    seen = {r.rollout_id: r for batch in resumed.steps(6) for g in batch for r in g.rollouts}
    checked = 0
    for rollout_id, greedy in roles.items():
        if rollout_id in seen:
            rollout = seen[rollout_id]
            assert rollout.greedy is greedy
            assert {s.sampling.temperature for s in rollout.segments} == {0.0 if greedy else 1.0}
            checked += 1
    assert checked
    new = [r for i, r in seen.items() if i not in roles]
    size, greedy = after
    assert new and all(r.greedy is (greedy and r.sibling == size) for r in new)
