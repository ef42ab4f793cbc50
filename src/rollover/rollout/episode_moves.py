"""Transitions of the rollouts of an Episode, which come and go while their group is held: cache, scheduler and ledger
told together, as lifecycle.py does for all others. Pure.

    WAITING ── begin_acting ──▶ ACTING, its agent is at work ── open_rollout ──▶ WAITING, with a call's prompt
    any but RUNNING ── restart_episode ──▶ DROPPED (restarted), and a WAITING one comes in their place
    any but RUNNING ── act_again ──▶ ACTING: its agent was lost, and is at work again ── cut_rollout ──▶ what the agent
    did not ask for again leaves (restarted)
"""

from __future__ import annotations

from typing import Any

from rollover.rollout.lifecycle import EventKind, Lifecycle
from rollover.rollout.scheduler import rollout_acts_again, rollout_left, rollout_opened, rollouts_replaced
from rollover.types import DropReason, Group, Rollout, RolloutState

_FINISHED = (RolloutState.SCORING, RolloutState.READY)


def begin_acting(lifecycle: Lifecycle, rollout: Rollout) -> None:
    """The first rollout of an Episode, WAITING without a token: its agent is at work, and it takes no slot until a
    call comes."""
    lifecycle.cache.begin_acting(rollout.rollout_id)
    lifecycle.scheduler.on_park(rollout)
    lifecycle.emit(EventKind.BEGIN, lifecycle.cache.groups[rollout.group_id], rollout)


def open_rollout(lifecycle: Lifecycle, rollout: Rollout) -> Rollout:
    """A call opens `rollout` in its group, which is held. Where that has one of this id, without a token, that gets the
    prompt and the role. Returns the one that is held, which may start."""
    group = lifecycle.cache.groups[rollout.group_id]
    held = lifecycle.cache.open(rollout)
    if held is rollout:
        lifecycle.ledger.admitted_rollouts += 1
    rollout_opened(lifecycle.scheduler, held, joins=held is rollout)
    lifecycle.emit(EventKind.OPEN, group, held)
    return held


def restart_episode(lifecycle: Lifecycle, group: Group, sibling: int) -> Rollout:
    """All rollouts of the Episode leave, and one without a token comes. None of them runs. Returns the new one."""
    leaving = [r for r in group.rollouts if r.sibling == sibling]
    first = Rollout(group.group_id, sibling, group.task, greedy=leaving[0].greedy, prompt=group.prompt)
    unfinished = sum(r.state not in _FINISHED for r in leaving)
    lifecycle.cache.replace(leaving, first)
    lifecycle.ledger.admitted_rollouts += 1
    lifecycle.ledger.on_leave(leaving, DropReason.RESTARTED)
    rollouts_replaced(lifecycle.scheduler, leaving, unfinished, first)
    lifecycle.emit(EventKind.RESTART, group, first, reason=DropReason.RESTARTED)
    return first


def act_again(lifecycle: Lifecycle, rollout: Rollout) -> None:
    """A rollout, which does not run, of an Episode whose agent was lost: another one is at work, and goes on with it
    when it asks for that turn again."""
    if rollout.state is RolloutState.ACTING:
        return
    finished = rollout.state in _FINISHED
    lifecycle.cache.act_again(rollout.rollout_id)
    rollout_acts_again(lifecycle.scheduler, rollout, finished=finished)
    lifecycle.emit(EventKind.AGAIN, lifecycle.cache.groups[rollout.group_id], rollout)


def cut_rollout(lifecycle: Lifecycle, rollout: Rollout, num_tokens: int) -> Rollout:
    """What comes after so many tokens of an ACTING rollout leaves (restarted), as its agent, at work again, did not ask
    for it. So does the rollout, where those are none and its Episode has others. Returns what is held in its place, or
    the one that left."""
    left = lifecycle.cache.cut(rollout.rollout_id, num_tokens)
    if left.state is RolloutState.DROPPED:
        lifecycle.ledger.on_leave([left], DropReason.RESTARTED)
        rollout_left(lifecycle.scheduler, left)
    else:
        restarted = lifecycle.ledger.dropped[DropReason.RESTARTED]
        restarted.tokens += rollout.num_sampled_tokens - left.num_sampled_tokens
    lifecycle.emit(EventKind.CUT, lifecycle.cache.groups[rollout.group_id], left, reason=DropReason.RESTARTED)
    return left


def keep(lifecycle: Lifecycle, group_id: int, sibling: int, name: str, value: Any) -> None:
    """An Episode of a held group keeps this JSON value over a kill, in the place of what it had under the name."""
    lifecycle.cache.keep(group_id, sibling, name, value)
    lifecycle.emit(EventKind.KEEP, lifecycle.cache.groups[group_id], kept=(sibling, name, value))
