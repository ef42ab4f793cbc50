"""The timeline of a planned run: what `rollover plan --svg` draws, synchronous above, the configuration below."""

from __future__ import annotations

from rollover.config import Config, PlanConfig
from rollover.config.rollout import RolloutConfig
from rollover.rollout.lifecycle import RunClock
from rollover.sim.plan import synchronous, with_epochs
from rollover.sim.simulate import Simulation
from rollover.sim.workload import Workload
from rollover.track.trace import PUBLISH, SPAN_END, SPAN_START, Trace, TraceEvent
from rollover.track.trace_svg import draw

MOST_STEPS = 8
MOST_SLOTS = 512


def timeline(config: Config, observed: list[list[int]] | None = None) -> str:
    """SVG of the first steps. ValueError where there are too many slots to see any."""
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
    """The trace that such a run would leave, in virtual seconds."""
    trace = Trace(RunClock())  # whose clock nobody asks: every event comes with its time
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
