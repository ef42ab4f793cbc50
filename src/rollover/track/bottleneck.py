"""The bottleneck of a step or of a whole run, and options to try. Pure.

    with rollout.overlap   trainer waits for rollouts    time/generate_s             generation-bound
                           trainer waits for rewards     time/score_s                reward-bound
                           engine waits for the trainer  wait/engine_for_trainer_s   trainer-bound
                           engine waits for rewards      wait/engine_for_rewards_s   one of the last two (_overlapped)
    without it             phases run in sequence: the longest one, and the most that overlap could save

The driver and the loop measure; this module only compares.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Bound = Literal["generation", "reward", "trainer", "balanced"]

SHARE = 0.1  # share of a step's time below which a wait is ignored
_PHASES: dict[Bound, str] = {"generation": "generation", "reward": "rewards", "trainer": "training"}
_ADVICE_BOTH_WAIT = "a larger rollout.max_staleness and rollout.in_flight_groups"
_ADVICE_OVERLAPPED: dict[Bound, str] = {
    "generation": "more engine.threads or a larger engine.max_running",
    "reward": "more rewards.num_workers",
    "trainer": "fewer engine.threads or a larger train.micro_batch_tokens",
    "balanced": "",
}
_ADVICE_SEQUENTIAL: dict[Bound, str] = {
    "generation": 'a larger engine.max_running or rollout.interrupt = "when_enough"',
    "reward": "more rewards.num_workers",
    "trainer": "a larger train.micro_batch_tokens",
}


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """`bound`: the longest wait. `text`: one line with its seconds. `advice`: options to try, "" if there is nothing to
    gain; a hint only, as another part may become the slowest."""

    bound: Bound
    text: str
    advice: str


def find_bottleneck(times: Mapping[str, float | int | None]) -> Bottleneck | None:
    """Find the bottleneck of a step; None without times.

    `times`: a metrics row, or sums of the time/ and wait/ keys of several rows, without evaluation and checkpoints.
    """

    def seconds(key: str) -> float:
        return times.get(key) or 0.0

    step = seconds("time/step_s") - seconds("time/eval_s") - seconds("time/checkpoint_s")
    if step <= 0:
        return None
    generation, rewards = seconds("time/generate_s"), seconds("time/score_s")
    if "wait/engine_for_trainer_s" not in times:
        return _sequential(step, {"generation": generation, "reward": rewards, "trainer": seconds("time/train_s")})
    idle, idle_for_rewards = seconds("wait/engine_for_trainer_s"), seconds("wait/engine_for_rewards_s")
    return _overlapped(step, generation, rewards, idle, idle_for_rewards)


def _sequential(step: float, phases: dict[Bound, float]) -> Bottleneck:
    # With overlap a step still takes as long as its longest phase. With train.streaming_min_groups the phases overlap
    # in part already, so a step is shorter than their sum.
    bound = max(phases, key=phases.__getitem__)
    saved = min(sum(phases.values()), step) - phases[bound]
    text = f"in turns: {_PHASES[bound]} {_of(phases[bound], step)}"
    if saved < SHARE * step:
        return Bottleneck(bound, text, _ADVICE_SEQUENTIAL[bound])
    text += f"; overlap saves at most {_number(saved)} s"
    return Bottleneck(bound, text, "rollout.overlap with rollout.max_staleness = 1")


def _overlapped(step: float, generation: float, rewards: float, idle: float, idle_for_rewards: float) -> Bottleneck:
    """Return the longest wait. `generation`, `rewards`: the trainer's; `idle`, `idle_for_rewards`: the engine's.

    While only rewards are pending the engine has no room for more groups. If the trainer waits for rewards too, both
    wait for them; otherwise the trainer's next step makes room.
    """
    enough = SHARE * step
    trainer_waits = generation + rewards >= enough
    for_rewards = rewards >= enough
    waits: dict[Bound, float] = {
        "generation": generation,
        "reward": rewards + (idle_for_rewards if for_rewards else 0.0),
        "trainer": idle + (0.0 if for_rewards else idle_for_rewards),
    }
    bound = max(waits, key=waits.__getitem__)
    if waits[bound] < enough:
        waited, stood = _number(generation + rewards), _number(idle + idle_for_rewards)
        text = f"balanced: the trainer waited {waited} s, the engine {stood} s of {_number(step)} s"
        return Bottleneck("balanced", text, "")
    text = {
        "generation": f"generation-bound: the trainer waited {_of(generation, step)} for rollouts",
        "reward": f"reward-bound: the trainer waited {_of(rewards, step)} for rewards",
        "trainer": f"trainer-bound: the engine stood idle {_of(waits['trainer'], step)}",
    }[bound]
    each_waits = bound != "reward" and trainer_waits and waits["trainer"] >= enough
    return Bottleneck(bound, text, _ADVICE_BOTH_WAIT if each_waits else _ADVICE_OVERLAPPED[bound])


def _of(seconds: float, step: float) -> str:
    return f"{_number(seconds)} of {_number(step)} s"


def _number(seconds: float) -> str:
    return f"{seconds:.{2 if seconds < 1 else 1 if seconds < 100 else 0}f}"
