"""`rollover plan`: predict speed, idleness, staleness and waste of a configuration, and of variants of it.

Simulates the configuration and its synchronous twin, then ranks variants on a fleet of the same proportions with at
most a few engines. Owns the figures of a plan (`Figures`) and the choice of variants; prints nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from rollover.cluster.plan import placement_of
from rollover.cluster.report import roles_on, summary
from rollover.config import Config, PlanConfig
from rollover.config.cluster import planned_devices
from rollover.config.load import Resolved
from rollover.config.rollout import RolloutConfig
from rollover.config.schema import default_of
from rollover.sim.earlier_run import read_run
from rollover.sim.memory import Memory, trainer_memory
from rollover.sim.simulate import Outcome, Simulation
from rollover.sim.workload import Workload
from rollover.system import cores

JSON_FORMAT = 1
_WARM_UP = 0.2  # share of the steps at the start, while the pipeline fills
_TWIN_ROLLOUTS = 80_000  # the steps of the synchronous twin are alike: few are enough if they are large
_VARIANT_ENGINES, _VARIANT_STEPS = 8, 40
_VARIANT_ROLLOUTS = 1024  # per step, with at least one engine
_STALENESSES = (1, 2, 4, 8)


@dataclass(frozen=True)
class Figures:
    """Figures of a simulated run after its warm-up. Shares are of 1, times in seconds, rates per second.

    `slots_idle`: share of slots without a rollout during generation. `engines_idle`, `trainers_idle`: share of the
    whole time. `dropped_share`: of generated tokens. `reprefill_share`: tokens prefilled again / all processed tokens.
    `staleness`: share of trained tokens by age.
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
    def from_outcome(cls, outcome: Outcome, plan: PlanConfig) -> Figures:
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
    """A variant and its figures. `speedup`: trained tokens per second relative to the synchronous twin."""

    in_flight_groups: int | str
    max_staleness: int
    engines: int
    trainers: int
    figures: Figures
    speedup: float


@dataclass(frozen=True)
class Plan:
    """The result of `rollover plan`. `best`: the fastest variant within the configured staleness bound.

    `memory`: of the trainer. `epochs`: passes over a step's groups, included in the figures. `nodes`: the roles of each
    node of [cluster]; `placed`: the same in one line; both empty on a single machine, or if [plan] has other engines
    and trainers than the rest of the configuration.
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
        """Return the JSON of docs/planning.md."""
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
    """Simulate `config`. `observed`: group lengths of an earlier run instead of the assumed distribution."""
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
    """Return [plan] with the training speed divided by train.epochs_per_step."""
    rate = config.plan.train_tokens_per_s / config.train.epochs_per_step
    return config.plan.model_copy(update={"train_tokens_per_s": rate})


def synchronous(rollout: RolloutConfig) -> RolloutConfig:
    """Return the settings of the same step without partial rollouts."""
    return RolloutConfig(
        groups_per_step=rollout.groups_per_step,
        group_size=rollout.group_size,
        greedy_baseline=rollout.greedy_baseline,
        max_new_tokens=rollout.max_new_tokens,
    )


def _variants(config: Config, plan: PlanConfig, workload: Workload) -> list[Variant]:
    """Simulate in-flight groups x staleness x engines and trainers; fastest first."""
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
                # One trainer stands for all, with their tokens per second in proportion.
                "train_tokens_per_s": plan.train_tokens_per_s * (trainers / shrink if trainers else 1),
                "steps": _VARIANT_STEPS,
            }
        )
        for rollout in _settings(
            config.rollout.model_copy(update={"groups_per_step": groups}), config.train.publish_every
        ):
            publish_every = config.train.publish_every if rollout.max_staleness else 1
            figures = _simulate(rollout, small, config.engine.max_running, workload, publish_every)
            base = base or figures  # the first one is synchronous, on the configured devices
            n = rollout.in_flight_groups
            given = n if isinstance(n, str) else round(n / groups * config.rollout.groups_per_step)
            speedup = figures.trained_tokens_per_s / base.trained_tokens_per_s
            out.append(Variant(given, rollout.max_staleness, engines, trainers, figures, speedup))
    return sorted(out, key=lambda v: -v.speedup)


def _settings(rollout: RolloutConfig, publish_every: int) -> Iterator[RolloutConfig]:
    """Yield the synchronous setting, then in-flight sizes for each staleness that train.publish_every allows."""
    yield synchronous(rollout)
    groups = rollout.groups_per_step
    interrupt = "when_enough" if rollout.interrupt == "never" and not rollout.overlap else rollout.interrupt
    for staleness in sorted({*_STALENESSES, rollout.max_staleness} - set(range(max(1, publish_every - 1)))):
        for in_flight in dict.fromkeys((2 * groups, (1 + staleness) * groups, "auto")):
            changes = {"in_flight_groups": in_flight, "max_staleness": staleness, "interrupt": interrupt}
            yield rollout.model_copy(update={**changes, "on_stale": "finish_first", "supplement": False})


def _splits(plan: PlanConfig) -> Iterator[tuple[int, int]]:
    """Yield (engines, trainers): as configured, then other splits of the same devices."""
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
    return Figures.from_outcome(Simulation(rollout, plan, slots, workload, publish_every=publish_every).run(), plan)


class PlanResult(NamedTuple):
    """`sources`: origin of each value of [plan] that is not its default. `config`: with the speeds of the earlier run.
    `observed`: its group lengths."""

    plan: Plan
    sources: dict[str, str]
    config: Config
    observed: list[list[int]] | None


def plan_config(
    resolved: Resolved, from_run: Path | None, say: Callable[[str], None] = lambda text: None
) -> PlanResult:
    """Plan a loaded configuration, with the lengths and speeds of `from_run` if given; `say` reports progress.

    ValueError if the files of `from_run` are unusable, or if [cluster] has no room for the processes.
    """
    config = resolved.config
    sources = {k.removeprefix("plan."): v for k, v in resolved.origin.items() if k.startswith("plan.")}
    observed = None
    if from_run is not None:
        observed, measured = read_run(from_run, say)
        config = config.model_copy(update={"plan": config.plan.model_copy(update=measured)})
        sources |= {key: "run" for key in (*measured, "lengths")}
    elif config.plan.turns == 1 and (named := _names_turns(config)):
        say(f"{named} makes episodes of several turns, which are planned as one turn each: set plan.turns")
    nodes = _nodes(config)  # first, because it may raise
    plan = make_plan(config, observed, progress=say)
    return PlanResult(replace(plan, **nodes), sources, config, observed)


def _nodes(config: Config) -> dict[str, Any]:
    """Return `nodes` and `placed` of a `Plan`; DoesNotFit (a ValueError) if [cluster] has no room."""
    own = {key: number for key, (number, _) in planned_devices(config).items()}
    plan = config.plan
    configured = {"plan.engines": plan.engines, "plan.trainers": plan.trainers}
    if config.cluster.type == "none" or any(own.get(key, default_of(key)) != n for key, n in configured.items()):
        return {}
    placement = placement_of(config, cores())
    nodes = {node.name: roles_on(config, placement, node.name) for node in placement.nodes}
    return {"nodes": nodes, "placed": summary(placement)}


def _names_turns(config: Config) -> str:
    """Return the option that may cause several turns, "" without one."""
    workflow = config.workflow
    return workflow.agent or ("workflow.environment" if workflow.environment else "")
