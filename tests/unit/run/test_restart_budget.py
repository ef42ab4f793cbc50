from __future__ import annotations

from rollover.run.setup import RestartBudget


def test_losses_are_too_many_without_a_new_step_in_between() -> None:
    budget = RestartBudget(2)
    for number in (3, 4):
        budget.on_step(number)
        for _ in range(2):
            budget.on_loss()
            assert not budget.is_exceeded
    budget.on_step(3)  # made again: it had come further
    budget.on_loss()
    assert budget.is_exceeded and budget.total == 5 and budget.in_a_row == 3
    budget.on_step(5)
    assert not budget.is_exceeded


def test_none_is_borne_where_none_may_be() -> None:
    budget = RestartBudget(0)
    budget.on_step(1)
    budget.on_loss()
    assert budget.is_exceeded
