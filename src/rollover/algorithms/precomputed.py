"""Advantages that come with a trajectory (algorithm.advantage = "precomputed"): checked, and laid out per token.

They are in the Rewards of its Rollouts (`Reward.advantages`): a number for the whole Rollout, or for each of its turns
a number, or one for each token of that turn. A mismatch is an error. Numpy, no torch.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from rollover.functions import is_number
from rollover.trajectories import Trajectory, TrajectoryGroup, turns_of
from rollover.types import Rollout


def precomputed_advantages(trajectory: Trajectory) -> list[np.ndarray]:
    """Return float32 [n] for each Rollout, over its tokens after the prompt; 0 where an environment wrote them.

    ValueError, with role, turn and fix, for missing advantages, a wrong number of them, or one that is not finite.
    """
    given = [None if r.reward is None else r.reward.advantages for r in trajectory.rollouts]
    num, turns = sum(len(of) for of in given if isinstance(of, tuple)), len(trajectory.turns)
    if all(isinstance(of, tuple) for of in given) and num != turns:
        raise ValueError(
            f"{trajectory}: {num} advantages for {turns} turns. Give one for each turn, or a single number for all"
        )
    return [_of_rollout(rollout, str(trajectory)) for rollout in trajectory.rollouts]


def count_precomputed_turns(compared: TrajectoryGroup) -> tuple[int, int]:
    """Return (turns of the scored trajectories with an advantage, all of their turns)."""
    brought = total = 0
    for rollout in (r for t in compared.trajectories if t.valid for r in t.rollouts):
        num, given = len(turns_of(rollout)), None if rollout.reward is None else rollout.reward.advantages
        total += num
        brought += sum(map(_is_complete, given)) if isinstance(given, tuple) else num * (given is not None)
    return brought, total


def is_precomputed(compared: TrajectoryGroup) -> bool:
    """Return whether all scored trajectories have an advantage for each of their turns and tokens."""
    valid = [t for t in compared.trajectories if t.valid]
    given = [r.reward.advantages if r.reward else None for t in valid for r in t.rollouts]
    return bool(valid) and all(map(_is_complete, given))


def undeclared_error(trajectory: Trajectory, *, taught: bool = False) -> str | None:
    """Return the error for a trajectory with advantages that its role does not use; None: it has none.

    `taught`: a teacher replaces its advantages.
    """
    if all(r.reward is None or r.reward.advantages is None for r in trajectory.rollouts):
        return None
    asked = f'Set algorithm.advantage or workflow.roles.{trajectory.role}.advantage to "precomputed"'
    if not taught:
        asked += ', or workflow.own_advantages to "auto"'
    if taught:
        asked += ' and distill.mix to "add"'
    return f"{trajectory} has precomputed advantages, which the configuration does not use. {asked}, or leave them out"


# Private


def _is_complete(given: Any) -> bool:
    return all(map(_is_complete, given)) if isinstance(given, tuple) else given is not None


def _of_rollout(rollout: Rollout, whose: str) -> np.ndarray:
    given: Any = None if rollout.reward is None else rollout.reward.advantages
    turns = turns_of(rollout)
    whole = f"{whose}, rollout {rollout.rollout_id}"
    if given is None:
        raise ValueError(
            f"{whole}: it has no advantages, and those of its role are to come with it (precomputed). Give"
            " Reward.advantages: a number, or a list with one for each turn (0 where nothing is to be learned)"
        )
    out = np.zeros(rollout.num_tokens, dtype=np.float32)
    if not isinstance(given, tuple):
        for turn in turns:
            out[turn.start : turn.end] = _number(given, whole)
        return out
    if len(given) != len(turns):
        raise ValueError(
            f"{whole}: {len(given)} advantages for {len(turns)} turns. Give Reward.advantages one for each turn, or a"
            " single number"
        )
    for index, (turn, value) in enumerate(zip(turns, given, strict=True)):
        of_turn = f"turn {index} of {whole}"
        if not isinstance(value, tuple):
            out[turn.start : turn.end] = _number(value, of_turn)
        elif len(value) != len(turn):
            raise ValueError(
                f"{of_turn}: {len(value)} advantages for {len(turn)} tokens. Give one for each token, or a single"
                " number for the turn"
            )
        else:
            out[turn.start : turn.end] = [_number(v, f"token {i} of {of_turn}") for i, v in enumerate(value)]
    return out


def _number(value: Any, whose: str) -> float:
    if value is None:
        raise ValueError(f"{whose} has no advantage: give every turn and token one (0 where nothing is to be learned)")
    if not is_number(value) or not math.isfinite(value):
        raise ValueError(f"{whose} has the advantage {value!r}: it must be a finite number")
    return float(value)
