"""A plan as text (assumptions, figures, table of variants), and its first steps as SVG."""

from __future__ import annotations

from collections.abc import Mapping

from rollover.config import Config, PlanConfig
from rollover.config.rollout import RolloutConfig
from rollover.rollout.lifecycle import RunClock
from rollover.sim.plan import Figures, Plan, Variant, synchronous, with_epochs
from rollover.sim.simulate import Simulation
from rollover.sim.workload import Workload
from rollover.track.trace import PUBLISH, SPAN_END, SPAN_START, Trace, TraceEvent
from rollover.track.trace_svg import draw

_BAR = 30
_SHOWN = 12  # variants


def as_text(plan: Plan, sources: dict[str, str]) -> str:
    """Format a plan. `sources`: the origin of each value of [plan] that is not a default."""
    lines = [*_assumptions(plan, sources), "", *_comparison(plan), "", *_staleness(plan.figures), "", *_variants(plan)]
    return "\n".join(lines) + "\n"


def _assumptions(plan: Plan, sources: dict[str, str]) -> list[str]:
    a, r = plan.assumed, plan.config
    where = {key: sources.get(key, "default") for key in type(a).model_fields}
    speeds = ", ".join(f"{b}: {s * 1e3:.3g} ms" for b, s in zip(a.decode_batches, a.decode_step_s, strict=True))
    together = "at half the speed each meanwhile" if r.overlap else "in turns"
    trainers = f"{a.trainers:,} trainers" if a.trainers else f"which train too, {together}"
    epochs = f", {plan.epochs} times over a step's groups" if plan.epochs > 1 else ""
    if where["lengths"] == "run":
        lengths = "lengths of the run's own groups"
    else:
        lengths = f"{a.lengths} lengths, median {a.median_tokens:g}, 99th percentile {a.p99_tokens:g} tokens"
    return [
        f"Step         {r.groups_per_step:,} groups x {r.group_size}, at most {r.max_new_tokens:,} tokens; {lengths}"
        f" ({where['lengths']})",
        *_turns(plan, where),
        f"Devices      {a.engines:,} engines x {plan.slots_per_engine} slots ({where['engines']}), {trainers}"
        f" ({where['trainers']})",
        *([f"Nodes        {plan.placed}"] if plan.placed else []),
        f"Decode step  {speeds} by batch size ({where['decode_step_s']})",
        f"Training     {a.train_tokens_per_s:,.0f} tokens/s a device ({where['train_tokens_per_s']}){epochs};"
        f" weights live after {a.weight_sync_s:g} s ({where['weight_sync_s']});"
        f" prefill {a.prefill_tokens_per_s:,.0f} tokens/s ({where['prefill_tokens_per_s']})",
        *plan.memory.lines(),
    ]


def _turns(plan: Plan, where: Mapping[str, str]) -> list[str]:
    a = plan.assumed
    if a.turns == 1:
        return []
    return [
        f"Episodes     {a.turns} turns ({where['turns']}); {a.tool_tokens} tokens are appended after {a.tool_s:g} s"
        f" ({where['tool_s']}) between two of them"
    ]


def _comparison(plan: Plan) -> list[str]:
    yours, sync = plan.figures, plan.synchronous
    rows = [
        ("step", f"{yours.step_s:,.2f} s", f"{sync.step_s:,.2f} s"),
        ("  95th percentile", f"{yours.step_s_p95:,.2f} s", f"{sync.step_s_p95:,.2f} s"),
        ("  waiting for rollouts", f"{yours.generate_s:,.2f} s", f"{sync.generate_s:,.2f} s"),
        ("  training", f"{yours.train_s:,.2f} s", f"{sync.train_s:,.2f} s"),
        ("trained tokens/s", f"{yours.trained_tokens_per_s:,.0f}", f"{sync.trained_tokens_per_s:,.0f}"),
        ("generated tokens/s meanwhile", f"{yours.generated_tokens_per_s:,.0f}", f"{sync.generated_tokens_per_s:,.0f}"),
        ("slots idle in generation", _share(yours.slots_idle), _share(sync.slots_idle)),
        ("engines idle", _share(yours.engines_idle), _share(sync.engines_idle)),
        ("trainers idle", _share(yours.trainers_idle), _share(sync.trainers_idle)),
        ("rollouts of >= 2 segments", _share(yours.partial_share), _share(sync.partial_share)),
        ("tokens dropped", _share(yours.dropped_share), _share(sync.dropped_share)),
        ("tokens prefilled again", _share(yours.reprefill_share), _share(sync.reprefill_share)),
    ]  # fmt: skip
    lines = [f"{'':<34}{'yours':>14}{'synchronous':>14}"]
    lines += [f"{name:<34}{a:>14}{b:>14}" for name, a, b in rows]
    return [*lines, f"{'speedup (trained tokens/s)':<34}{plan.speedup:>13.2f}x"]


def _staleness(figures: Figures) -> list[str]:
    lines = [f"Staleness of trained tokens: mean {figures.staleness_mean:.2f}, largest {figures.staleness_max}"]
    most = max(figures.staleness.values())
    for age, share in figures.staleness.items():
        lines.append(f"  {age:>3} {'#' * round(_BAR * share / most):<{_BAR}} {_share(share)}")
    return lines


def _variants(plan: Plan) -> list[str]:
    lines = [
        "What if (on a fleet of the same proportions, 8 engines at most; speedup over synchronous training here)",
        "  in flight staleness  engines trainers  speedup mean age idle slots",
    ]
    for v in plan.variants[:_SHOWN]:
        lines.append(_row(v) + ("  <- best in your staleness" if v == plan.best else ""))
    if plan.best not in plan.variants[:_SHOWN]:
        lines += ["  ...", _row(plan.best) + "  <- best in your staleness"]
    return lines


def _row(v: Variant) -> str:
    trainers = f"{v.trainers:,}" if v.trainers else "same"
    return (
        f"  {v.in_flight_groups!s:>9} {v.max_staleness:>9} {v.engines:>8,} {trainers:>8} {v.speedup:>7.2f}x"
        f" {v.figures.staleness_mean:>8.2f} {_share(v.figures.slots_idle):>10}"
    )


def _share(value: float) -> str:
    return f"{100 * value:.1f} %"


MOST_STEPS = 8
MOST_SLOTS = 512


def timeline(config: Config, observed: list[list[int]] | None = None) -> str:
    """Draw the first steps as SVG, synchronous training above; ValueError with too many slots."""
    rollout, plan, slots = config.rollout, with_epochs(config), config.engine.max_running
    if plan.engines * slots > MOST_SLOTS:
        raise ValueError(
            f"--svg draws every slot: {plan.engines} engines x {slots} are more than {MOST_SLOTS}. Give fewer --engines"
        )
    plan = plan.model_copy(update={"steps": min(plan.steps, MOST_STEPS)})
    workload = Workload(plan, rollout.rollouts_per_group, rollout.max_new_tokens, observed or ())
    return draw(
        [
            ("synchronous (planned)", planned_trace(synchronous(rollout), plan, slots, workload)),
            ("this configuration (planned)", planned_trace(rollout, plan, slots, workload, config.train.publish_every)),
        ]
    )


def planned_trace(
    rollout: RolloutConfig, plan: PlanConfig, slots: int, workload: Workload, publish_every: int = 1
) -> list[TraceEvent]:
    """Simulate a run and return its trace, in virtual seconds."""
    trace = Trace(RunClock())  # the clock is unused: every event has its time
    outcome = Simulation(rollout, plan, slots, workload, [trace.on_event], publish_every=publish_every).run()
    events, begun = trace.drain(), 0.0
    for step in outcome.steps:
        generated = begun + step.generate_s + step.score_s
        trained = generated + step.train_s
        events += [
            TraceEvent("generate" + SPAN_START, begun, step.version),
            TraceEvent("generate" + SPAN_END, generated, step.version),
            TraceEvent("train" + SPAN_START, generated, step.version),
            TraceEvent("train" + SPAN_END, trained, step.version),
        ]
        if (step.version + 1) % publish_every == 0:
            events.append(TraceEvent(PUBLISH, trained + step.sync_s, step.version + 1))
        begun = trained + step.sync_s
    return sorted(events, key=lambda event: event.seconds)
