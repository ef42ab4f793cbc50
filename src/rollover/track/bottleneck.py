"""Who waits for whom: what a step, or a whole run, is bound by, and what to try. Pure.

    with rollout.overlap   trainer waits for rollouts    time/generate_s             generation-bound
                           trainer waits for rewards     time/score_s                reward-bound
                           engine waits for the trainer  wait/engine_for_trainer_s   trainer-bound
                           engine waits for rewards      wait/engine_for_rewards_s   one of the last two: see `_beside`
    without it             they work in turns: which takes longest, and what overlap could save at most

Never measures anything: the driver and the loop do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Bound = Literal["generation", "reward", "trainer", "balanced"]

SHARE = 0.1  # of a step's time: a shorter wait does not count as one
_PHASES: dict[Bound, str] = {"generation": "generation", "reward": "rewards", "trainer": "training"}
_MORE_AHEAD = "a larger rollout.max_staleness and rollout.in_flight_groups"
_ADVICE_BESIDE: dict[Bound, str] = {
    "generation": "more engine.threads or a larger engine.max_running",
    "reward": "more rewards.num_workers",
    "trainer": "fewer engine.threads or a larger train.micro_batch_tokens",
    "balanced": "",
}
_ADVICE_IN_TURNS: dict[Bound, str] = {
    "generation": 'a larger engine.max_running or rollout.interrupt = "when_enough"',
    "reward": "more rewards.num_workers",
    "trainer": "a larger train.micro_batch_tokens",
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """`bound`: what the step waits for most. `text`: that in one line, with its seconds. `advice`: options to try; ""
    if there is nothing to gain. It is a hint: a change may make another part the slowest."""

    bound: Bound
    text: str
    advice: str


def verdict(times: Mapping[str, float | int | None]) -> Verdict | None:
    """The verdict on a metrics row, or on the sums of several rows' time/ and wait/ keys. None without times.

    The step counts without its evaluation and checkpoints.
    """

    def of(key: str) -> float:
        return times.get(key) or 0.0

    step = of("time/step_s") - of("time/eval_s") - of("time/checkpoint_s")
    if step <= 0:
        return None
    generation, rewards = of("time/generate_s"), of("time/score_s")
    if "wait/engine_for_trainer_s" not in times:
        return _in_turns(step, {"generation": generation, "reward": rewards, "trainer": of("time/train_s")})
    return _beside(step, generation, rewards, of("wait/engine_for_trainer_s"), of("wait/engine_for_rewards_s"))


def _in_turns(step: float, phases: dict[Bound, float]) -> Verdict:
    """With overlap a step would still take as long as the longest of its phases.

    With train.streaming_min_groups they overlap in part already: a step is then shorter than the sum of its phases.
    """
    bound = max(phases, key=phases.__getitem__)
    saved = min(sum(phases.values()), step) - phases[bound]
    text = f"in turns: {_PHASES[bound]} {_of(phases[bound], step)}"
    if saved < SHARE * step:
        return Verdict(bound, text, _ADVICE_IN_TURNS[bound])
    text += f"; overlap saves at most {_number(saved)} s"
    return Verdict(bound, text, "rollout.overlap with rollout.max_staleness = 1")


def _beside(step: float, generation: float, rewards: float, idle: float, idle_for_rewards: float) -> Verdict:
    """The longest wait decides. `generation`, `rewards`: the trainer's; `idle`, `idle_for_rewards`: the engine's.

    While only rewards are under way the engine has no room for more groups. If the trainer then waits for rewards too,
    they are what both wait for; if it does not, room comes with its next step.
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
        return Verdict("balanced", text, "")
    text = {
        "generation": f"generation-bound: the trainer waited {_of(generation, step)} for rollouts",
        "reward": f"reward-bound: the trainer waited {_of(rewards, step)} for rewards",
        "trainer": f"trainer-bound: the engine stood idle {_of(waits['trainer'], step)}",
    }[bound]
    each_waits = bound != "reward" and trainer_waits and waits["trainer"] >= enough
    return Verdict(bound, text, _MORE_AHEAD if each_waits else _ADVICE_BESIDE[bound])


def _of(seconds: float, step: float) -> str:
    return f"{_number(seconds)} of {_number(step)} s"


def _number(seconds: float) -> str:
    return f"{seconds:.{2 if seconds < 1 else 1 if seconds < 100 else 0}f}"
