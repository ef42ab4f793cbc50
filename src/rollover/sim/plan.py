"""`rollover plan`: what a configuration will do, before it runs: speed, idleness, staleness, waste, and what-ifs.

Simulates the configuration and its synchronous twin, then variants of it on a fleet of the same proportions but at most
a few engines, and ranks them. Owns the figures of a plan (`Figures`) and the choice of variants; prints nothing.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from rollover.config import Config, PlanConfig
from rollover.config.rollout import RolloutConfig
from rollover.sim.memory import Memory, trainer_memory
from rollover.sim.simulate import Outcome, Simulation
from rollover.sim.workload import Workload

JSON_FORMAT = 1
_WARM_UP = 0.2  # share of the steps, at the start, whose pipeline is still filling
_TWIN_ROLLOUTS = 80_000  # the synchronous twin's steps are all alike: fewer are enough where they are large
_VARIANT_ENGINES, _VARIANT_STEPS = 8, 40
_VARIANT_ROLLOUTS = 1024  # of a step, as long as an engine is left
_STALENESSES = (1, 2, 4, 8)


@dataclass(frozen=True)
class Figures:
    """What a simulated run comes to, after its warm-up. Shares are of 1, times in seconds, rates per second.

    `slots_idle`: share of slots without a rollout while generating. `engines_idle` and `trainers_idle`: share of the
    whole time in which these devices do not work for the run. `dropped_share`: of generated tokens. `reprefill_share`:
    prefill of what had been computed before, by all tokens processed. `staleness`: share of trained tokens by age.
    """

    step_s: float
    step_s_p95: float
    generate_s: float
    train_s: float
    trained_tokens_per_s: float
    generated_tokens_per_s: float
    slots_idle: float
    engines_idle: float
    trainers_idle: float
    staleness: dict[int, float]
    staleness_mean: float
    staleness_max: int
    partial_share: float
    dropped_share: float
    reprefill_share: float

    @classmethod
    def of(cls, outcome: Outcome, plan: PlanConfig) -> Figures:
        steps = outcome.steps[math.floor(len(outcome.steps) * _WARM_UP) :]
        total = sum(s.seconds for s in steps)
        generating = sum(s.generating_s for s in steps)
        training = sum(s.train_s for s in steps)
        ages = sum((s.staleness for s in steps), start=Counter[int]())
        trained = sum(ages.values())
        if not trained:
            raise ValueError(
                'rollout.on_stale = "mask" would leave no token in the loss: all are older than rollout.max_staleness'
                " when they are trained. Raise it"
            )
        generated = outcome.ledger["tokens/generated"]
        times = sorted(s.seconds for s in steps)
        working = generating + (0 if plan.trainers else training - sum(s.overlapped_s for s in steps))
        return cls(
            step_s=total / len(steps),
            step_s_p95=times[math.ceil(0.95 * len(times)) - 1],
            generate_s=sum(s.generate_s for s in steps) / len(steps),
            train_s=training / len(steps),
            trained_tokens_per_s=trained / total,
            generated_tokens_per_s=sum(s.generated_tokens for s in steps) / generating if generating else 0.0,
            slots_idle=1 - outcome.slot_s / (outcome.slots * sum(s.generating_s for s in outcome.steps)),
            engines_idle=1 - working / total,
            trainers_idle=1 - (training if plan.trainers else working) / total,
            staleness={age: ages[age] / trained for age in sorted(ages)},
            staleness_mean=sum(age * n for age, n in ages.items()) / trained,
            staleness_max=max(ages, default=0),
            partial_share=outcome.partial_rollouts / outcome.trained_rollouts,
            dropped_share=outcome.ledger["tokens/dropped"] / generated,
            reprefill_share=outcome.reprefilled_tokens / (generated + outcome.prefill_tokens),
        )


@dataclass(frozen=True)
class Variant:
    """A setting tried, and what came of it. `speedup`: trained tokens per second by those of the synchronous twin."""

    in_flight_groups: int | str
    max_staleness: int
    engines: int
    trainers: int
    figures: Figures
    speedup: float


@dataclass(frozen=True)
class Plan:
    """The whole answer. `best`: the fastest variant within the staleness that the configuration allows.

    `memory`: what the trainer holds. `epochs`: passes over a step's groups, whose time is in the figures.
    `nodes`: the roles that each node of [cluster] would have, and `placed`, the same in one line; empty where
    everything is on this machine, or [plan] has other engines and trainers than the rest of the configuration.
    """

    config: RolloutConfig
    assumed: PlanConfig
    slots_per_engine: int
    figures: Figures
    synchronous: Figures
    variants: list[Variant]
    best: Variant
    memory: Memory
    epochs: int = 1
    nodes: dict[str, list[str]] = field(default_factory=dict)
    placed: str = ""

    @property
    def speedup(self) -> float:
        return self.figures.trained_tokens_per_s / self.synchronous.trained_tokens_per_s

    def as_json(self) -> dict[str, Any]:
        """See docs/planning.md."""
        return {
            "format": JSON_FORMAT,
            "rollout": self.config.model_dump(mode="json"),
            "assumed": self.assumed.model_dump(mode="json"),
            "slots_per_engine": self.slots_per_engine,
            "nodes": self.nodes,
            "epochs_per_step": self.epochs,
            "memory": self.memory.as_json(),
            "figures": asdict(self.figures),
            "synchronous": asdict(self.synchronous),
            "speedup": self.speedup,
            "variants": [asdict(v) for v in self.variants],
            "best": asdict(self.best),
        }


def make_plan(
    config: Config,
    observed: list[list[int]] | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Plan:
    """Simulate `config`. `observed`: group lengths of an earlier run, in place of the assumed distribution."""
    rollout, plan, slots = config.rollout, with_epochs(config), config.engine.max_running
    workload = Workload(plan, rollout.rollouts_per_group, rollout.max_new_tokens, observed or ())
    size = rollout.groups_per_step * rollout.rollouts_per_group
    progress(f"simulating {plan.steps} steps of {size:,} rollouts on {plan.engines:,} engines")
    figures = _simulate(rollout, plan, slots, workload, config.train.publish_every)
    progress("simulating synchronous training")
    twin_steps = min(plan.steps, max(5, _TWIN_ROLLOUTS // size))
    twin = _simulate(synchronous(rollout), plan.model_copy(update={"steps": twin_steps}), slots, workload)
    progress("simulating variants")
    variants = _variants(config, plan, workload)
    allowed = [v for v in variants if v.max_staleness <= rollout.max_staleness] or variants
    best = max(allowed, key=lambda v: v.speedup)
    memory, epochs = trainer_memory(config), config.train.epochs_per_step
    return Plan(rollout, config.plan, slots, figures, twin, variants, best, memory, epochs)


def with_epochs(config: Config) -> PlanConfig:
    """[plan], whose trainers pass over a step's groups as often as train.epochs_per_step says."""
    rate = config.plan.train_tokens_per_s / config.train.epochs_per_step
    return config.plan.model_copy(update={"train_tokens_per_s": rate})


def synchronous(rollout: RolloutConfig) -> RolloutConfig:
    """The same step without anything that rolls over."""
    return RolloutConfig(
        groups_per_step=rollout.groups_per_step,
        group_size=rollout.group_size,
        greedy_baseline=rollout.greedy_baseline,
        max_new_tokens=rollout.max_new_tokens,
    )


def _variants(config: Config, plan: PlanConfig, workload: Workload) -> list[Variant]:
    """In-flight groups x staleness x engines and trainers, fastest first."""
    size = config.rollout.groups_per_step * config.rollout.rollouts_per_group
    shrink = max(1.0, plan.engines / _VARIANT_ENGINES, min(plan.engines, size / _VARIANT_ROLLOUTS))
    groups = max(2, round(config.rollout.groups_per_step / shrink))
    out = []
    base: Figures | None = None
    for engines, trainers in _splits(plan):
        small = plan.model_copy(
            update={
                "engines": max(1, round(engines / shrink)),
                "trainers": min(1, trainers),
                # One trainer stands for all: the same tokens per second, by the same proportion.
                "train_tokens_per_s": plan.train_tokens_per_s * (trainers / shrink if trainers else 1),
                "steps": _VARIANT_STEPS,
            }
        )
        for rollout in _settings(
            config.rollout.model_copy(update={"groups_per_step": groups}), config.train.publish_every
        ):
            publish_every = config.train.publish_every if rollout.max_staleness else 1
            figures = _simulate(rollout, small, config.engine.max_running, workload, publish_every)
            base = base or figures  # the first one is synchronous, on the devices as they are given
            n = rollout.in_flight_groups
            given = n if isinstance(n, str) else round(n / groups * config.rollout.groups_per_step)
            speedup = figures.trained_tokens_per_s / base.trained_tokens_per_s
            out.append(Variant(given, rollout.max_staleness, engines, trainers, figures, speedup))
    return sorted(out, key=lambda v: -v.speedup)


def _settings(rollout: RolloutConfig, publish_every: int) -> Iterator[RolloutConfig]:
    """The synchronous one, then what may be in flight under each staleness that the weights of the engines allow."""
    yield synchronous(rollout)
    groups = rollout.groups_per_step
    interrupt = "when_enough" if rollout.interrupt == "never" and not rollout.overlap else rollout.interrupt
    for staleness in sorted({*_STALENESSES, rollout.max_staleness} - set(range(max(1, publish_every - 1)))):
        for in_flight in dict.fromkeys((2 * groups, (1 + staleness) * groups, "auto")):
            changes = {"in_flight_groups": in_flight, "max_staleness": staleness, "interrupt": interrupt}
            yield rollout.model_copy(update={**changes, "on_stale": "finish_first", "supplement": False})


def _splits(plan: PlanConfig) -> Iterator[tuple[int, int]]:
    """(engines, trainers): as given, then other shares of the same devices."""
    yield plan.engines, plan.trainers
    devices = plan.engines + plan.trainers
    if plan.trainers:
        yield devices, 0
    shares = dict.fromkeys(max(1, round(devices * share)) for share in (0.25, 0.5, 0.75))
    for trainers in shares if devices > 1 else ():
        if (devices - trainers, trainers) != (plan.engines, plan.trainers) and trainers < devices:
            yield devices - trainers, trainers


def _simulate(
    rollout: RolloutConfig, plan: PlanConfig, slots: int, workload: Workload, publish_every: int = 1
) -> Figures:
    return Figures.of(Simulation(rollout, plan, slots, workload, publish_every=publish_every).run(), plan)


def speeds_of_run(rows: list[dict[str, Any]], prompt_tokens: float) -> dict[str, Any]:
    """PlanConfig values that the metrics of a run tell: decode steps by batch size, prefill, training, hand-over.

    The time of a decode step is fitted as a line over the steps' mean batch sizes; prefill is none of it, nor the time
    in which the run waited for environments alone (plan.tool_s has that). Servers tell neither: of a run on servers
    there are none. ValueError if there are too few.
    """
    of_servers = bool(rows) and rows[-1].get("engine/servers") is not None
    decoding = {} if of_servers else _decode_steps(rows) | _prefill(rows[-1])
    tokens = rows[-1]["tokens/trained"]  # as a simulation counts them: masked ones too, and no replayed ones
    prompts = rows[-1]["groups/consumed"] * prompt_tokens  # of all steps: metrics.jsonl begins with the first
    train_s = sum(row["time/train_s"] for row in rows)
    return decoding | {
        "train_tokens_per_s": (tokens + prompts) / train_s,
        "weight_sync_s": statistics.mean([s for row in rows if (s := row["time/weights_s"])] or [0.0]),
    }


def _decode_steps(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The part of `speeds_of_run` that decode steps tell."""
    points: list[tuple[float, float]] = []
    clean: list[tuple[float, float]] = []  # without the decode steps of an evaluation, which the engine counts too
    before: dict[str, Any] = {}
    for row in rows:
        steps = row["engine/decode_steps"] - before.get("engine/decode_steps", 0.0)
        prefill_s = (row.get("engine/prefill_s") or 0.0) - (before.get("engine/prefill_s") or 0.0)
        if steps > 0 and row["tokens/step_generated"] > 0:
            decoding = max(0.0, row["time/generate_s"] - prefill_s - (row.get("wait/environment_s") or 0.0))
            points.append((row["tokens/step_generated"] / steps, decoding / steps))
            if before and not row.get("time/eval_s"):  # before the first step there may have been one
                clean.append(points[-1])
        before = row
    points = clean if len(clean) > 1 else points
    if len(points) < 2:
        raise ValueError("--from-run: the run's metrics.jsonl has fewer than two steps that generated something")
    batches, seconds = zip(*points, strict=True)
    slope, base = 0.0, statistics.mean(seconds)
    if max(batches) > 1.2 * min(batches):
        slope, base = statistics.linear_regression(batches, seconds)
        if base <= 0 or slope < 0:  # noise: in proportion to the batch, or constant
            slope, base = (sum(seconds) / sum(batches), 1e-4) if slope >= 0 else (0.0, statistics.mean(seconds))
    most = max(2, round(max(batches)))
    return {"decode_batches": [1, most], "decode_step_s": [base + slope, base + slope * most]}


def _prefill(last: dict[str, Any]) -> dict[str, Any]:
    """The part that the last row's counters of prefill tell."""
    tokens = sum(last.get(f"engine/{key}_tokens") or 0.0 for key in ("prefill", "reprefill"))
    seconds = last.get("engine/prefill_s") or 0.0
    return {"prefill_tokens_per_s": tokens / seconds, "prefill_min_s": 0.0} if tokens and seconds else {}
