from __future__ import annotations

from rollover.run.losses import Losses


def test_losses_are_too_many_without_a_new_step_in_between() -> None:
    losses = Losses(2)
    for number in (3, 4):
        losses.on_step(number)
        for _ in range(2):
            losses.on_loss()
            assert not losses.too_many
    losses.on_step(3)  # made again: it had come further
    losses.on_loss()
    assert losses.too_many and losses.total == 5 and losses.in_a_row == 3
    losses.on_step(5)
    assert not losses.too_many


def test_none_is_borne_where_none_may_be() -> None:
    losses = Losses(0)
    losses.on_step(1)
    losses.on_loss()
    assert losses.too_many
