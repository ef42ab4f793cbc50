"""`rollover bench tail`: what rolling over saves where a few generations are long, on the real driver and engine.

One workload for every mode: groups of siblings whose lengths are forced, log-normal with a median of 64 and a 99th
percentile of 512 tokens. Modes differ by what is in flight and by what happens to the KV cache at a weight update.
Beside each mode stands what the planner (sim/) predicts for it from this machine's decode speeds in the same run.

Answers of up to 160,000 tokens (`--lengths 160k`) run in virtual time: the planner alone, with assumed speeds.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import rollover
from benchmarks import machine, workload
from local_trainer import build_batch, local_trainer
from rollover.config import Config, PlanConfig
from rollover.config.rollout import RolloutConfig
from rollover.engine.build import embedded_engine
from rollover.engine.embedded.engine import EmbeddedEngine
from rollover.engine.protocol import ExtendRequest
from rollover.envs.build import SingleTurn
from rollover.models.devices import dtype_of, pick_device
from rollover.models.load import load_model
from rollover.models.threads import prepare_process
from rollover.rollout.driver import Driver
from rollover.rollout.lifecycle import Lifecycle
from rollover.rollout.requests import Requests
from rollover.sim.plan import Figures
from rollover.sim.simulate import Simulation
from rollover.sim.workload import Workload
from rollover.staleness import group_staleness
from rollover.types import Prompt, Reward, Rollout, Segment, Task

GROUPS, SIZE, PROMPT_TOKENS = 16, 4, 32
MEDIAN, P99, LONGEST = 64, 512, 1024
SYNC_BATCH = GROUPS * SIZE
STEPS = 3
DECODE_BATCHES = [1, 16, 32, SYNC_BATCH, 2 * SYNC_BATCH]
SPEED_TOKENS = 24  # decode steps of one measurement

SYNC = {"in_flight_groups": GROUPS, "interrupt": "never", "max_staleness": 0}
# Chosen with `rollover plan`: with a staleness of 2 the bound itself leaves slots idle (docs/performance.md).
PARTIAL = {"in_flight_groups": "auto", "interrupt": "when_enough", "max_staleness": 8}
TIGHT = {"in_flight_groups": 3 * GROUPS, "interrupt": "when_enough", "max_staleness": 2}


@dataclass(frozen=True)
class Mode:
    """`trains`: whole steps are measured. Where only generation is, the weights are handed over unchanged.

    `warm_up`: steps before the measured ones, of which only the last trains. At the start all that rolls over is young.
    """

    name: str
    rollout: dict[str, Any]
    max_running: int
    warm_up: int
    trains: bool = False

    @property
    def config(self) -> RolloutConfig:
        sizes = {"groups_per_step": GROUPS, "group_size": SIZE, "max_new_tokens": LONGEST}
        return RolloutConfig.model_validate({**sizes, **self.rollout})


MODES = (
    Mode("sync", SYNC, SYNC_BATCH, warm_up=1, trains=True),
    Mode("partial", PARTIAL | {"kv_on_resume": "keep"}, 2 * SYNC_BATCH, warm_up=4, trains=True),
    Mode("partial_at_sync_batch", PARTIAL | {"kv_on_resume": "keep"}, SYNC_BATCH, warm_up=2),
    Mode("partial_recompute", PARTIAL, SYNC_BATCH, warm_up=2),
    Mode("partial_staleness_2", TIGHT | {"kv_on_resume": "keep"}, SYNC_BATCH, warm_up=3),
)
# The case that APR (verl-recipe, pull request 58) names: answers of up to 160,000 tokens, here on 64 engines.
LONG_GROUPS, LONG_SIZE, LONGEST_160K, LONG_SLOTS, LONG_STEPS = 128, 8, 160_000, 64, 20
LONG_PLAN = PlanConfig(
    engines=64,
    lengths="pareto",
    median_tokens=8000,
    p99_tokens=120_000,
    sibling_correlation=0.5,
    prompt_tokens=200,
    decode_batches=[1, 16, 64],
    decode_step_s=[0.008, 0.012, 0.020],
    prefill_tokens_per_s=20_000,
    train_tokens_per_s=2100,
    weight_sync_s=5,
    steps=LONG_STEPS,
)
LONG_MODES = {
    "sync": SYNC | {"in_flight_groups": LONG_GROUPS},
    "partial": PARTIAL | {"kv_on_resume": "keep"},
    "partial_recompute": PARTIAL,
    "partial_staleness_2": TIGHT | {"in_flight_groups": 3 * LONG_GROUPS, "kv_on_resume": "keep"},
}
PLAN = PlanConfig(median_tokens=MEDIAN, p99_tokens=P99, prompt_tokens=PROMPT_TOKENS)
WORKLOAD = Workload(PLAN, SIZE, LONGEST)


class _ForcedLengths:
    """An engine whose rollouts end at their forced length. All else is the engine's."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def extend(self, request: ExtendRequest) -> list[Segment]:
        group, sibling = map(int, request.rollout_id.split("-"))
        left = WORKLOAD.lengths(group)[sibling] - len(request.generated_ids)
        return await self._engine.extend(dataclasses.replace(request, max_new_tokens=left))


@dataclass
class _Outcome:
    """Per measured step: seconds of generation and of the whole step, and the tokens generated in it.

    Generated, not trained: over many steps they are the same, and over few the trained ones of a partial mode hold
    tokens that were generated before the first measured step. `staleness`: of each trained group's oldest token.
    """

    generate_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    train_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)
    when: float = 0.0  # in the middle of the measured steps

    def rate(self, seconds: list[float]) -> float:
        return sum(self.tokens) / sum(seconds)


async def _score(rollouts: list[Rollout]) -> list[Reward]:
    return [Reward(float(r.sibling % 2)) for r in rollouts]


def _run_mode(mode: Mode, config: Config) -> _Outcome:
    """Warm-up steps, then STEPS training steps: generate, train (if the mode does), hand the weights over."""
    rollout = mode.config
    run = config.model_copy(
        update={
            "rollout": rollout,
            "engine": config.engine.model_copy(update={"max_running": mode.max_running, "kv_memory_gb": 6.0}),
        }
    )
    loaded = load_model(run.model, device=pick_device(run.model.device))
    vocab = loaded.model.config.get_text_config().vocab_size
    engine = embedded_engine(loaded, run)
    trainer = local_trainer(loaded, run.train, run.algorithm, dtype=dtype_of(run), max_new_tokens=LONGEST)
    lifecycle = Lifecycle(rollout, mode.max_running)
    ledger = lifecycle.ledger
    forced: Any = _ForcedLengths(engine)
    cursor = iter(range(10**9))

    def next_task() -> tuple[Task, Prompt]:
        i = next(cursor)
        prompt = Prompt(workload.prompt(vocab, PROMPT_TOKENS, i))
        return Task(task_id=str(i), source="bench", reward="", prompt=""), prompt

    driver = Driver(lifecycle, forced, next_task, SingleTurn(_score), Requests(lifecycle.config, 0))
    out = _Outcome()

    async def go() -> None:
        for step in range(mode.warm_up + STEPS):
            started, before = time.perf_counter(), ledger.generated_tokens
            groups = await driver.collect(step)
            generated = time.perf_counter()
            assert groups is not None
            if mode.trains and step >= mode.warm_up - 1:
                trainer.train_step(build_batch(groups, run.algorithm))
            trained = time.perf_counter()
            await engine.load_weights(step + 1, await trainer.backend.publish())
            driver.on_new_version(step + 1)
            if step >= mode.warm_up:
                out.generate_s.append(generated - started)
                out.train_s.append(trained - generated)
                out.step_s.append(time.perf_counter() - started)
                out.tokens.append(ledger.generated_tokens - before)
                out.staleness += [group_staleness(g, step) or 0 for g in groups]
            machine.progress(f"{mode.name}: step {step + 1} of {mode.warm_up + STEPS}")
        out.when = time.perf_counter() - sum(out.step_s) / 2
        driver.interrupt_for_good()
        await engine.close()

    asyncio.run(go())
    return out


class _Speeds:
    """What the planner needs to know of this machine: decode steps by batch size, and prefill.

    Measured before and after the modes, as the machine drifts; for each mode interpolated to the time it ran. Contexts
    are as long as those of what runs in a partial mode: long answers run longer, so they are met more often.
    """

    def __init__(self, config: Config) -> None:
        loaded = load_model(config.model, dtype=dtype_of(config), device=pick_device(config.model.device))
        self._vocab = loaded.model.config.get_text_config().vocab_size
        options = config.engine.model_copy(update={"max_running": max(DECODE_BATCHES), "kv_memory_gb": 6.0})
        self._engine = EmbeddedEngine(loaded.model, options)
        lengths = [n for task in range(512) for n in WORKLOAD.lengths(task)]
        self._context = PROMPT_TOKENS + round(sum(n * n for n in lengths) / sum(lengths) / 2)
        self._measured: list[tuple[float, dict[str, Any]]] = []  # (when, values of PlanConfig)

    def measure(self) -> None:
        self._seconds(max(DECODE_BATCHES), 2, PROMPT_TOKENS)
        step_s = []
        for num in DECODE_BATCHES:
            once = self._seconds(num, 1, self._context)
            step_s.append((self._seconds(num, 1 + SPEED_TOKENS, self._context) - once) / SPEED_TOKENS)
            machine.progress(f"{num} sequences: {step_s[-1] * 1e3:.0f} ms a decode step")
        one = self._seconds(1, 1, PROMPT_TOKENS) - step_s[0]
        many = max(1e-6, self._seconds(max(DECODE_BATCHES), 1, PROMPT_TOKENS) - step_s[-1])
        prefilled = max(DECODE_BATCHES) // SIZE * PROMPT_TOKENS
        values = {"decode_step_s": step_s, "prefill_min_s": max(1e-6, one), "prefill_tokens_per_s": prefilled / many}
        self._measured.append((time.perf_counter(), values))

    def plan(self, when: float) -> PlanConfig:
        """What it was at that time."""
        (begin, first), (end, last) = self._measured
        weight = (when - begin) / (end - begin)

        def between(name: str) -> Any:
            a, b = np.asarray(first[name]), np.asarray(last[name])
            return (a + weight * (b - a)).tolist()

        return PLAN.model_copy(update={"decode_batches": DECODE_BATCHES, **{name: between(name) for name in first}})

    def _seconds(self, num: int, tokens: int, prompt_tokens: int) -> float:
        """To continue `num` sequences, SIZE to a prompt, by so many tokens."""
        prompts = [workload.prompt(self._vocab, prompt_tokens, i // SIZE) for i in range(num)]
        started = time.perf_counter()
        workload.generate(self._engine, prompts, tokens)
        return time.perf_counter() - started


def _predicted_rate(mode: Mode, plan: PlanConfig) -> float:
    """Tokens per second of generation in the same steps, by the planner."""
    plan = plan.model_copy(update={"steps": mode.warm_up + STEPS})
    steps = Simulation(mode.config, plan, mode.max_running, WORKLOAD).run().steps[mode.warm_up :]
    return sum(s.generated_tokens for s in steps) / sum(s.generate_s for s in steps)


def _all_slots_busy(plan: PlanConfig, slots: int) -> float:
    """Tokens per second with every slot busy all the time: what no schedule of this batch can pass (closed form)."""
    step_s = plan.decode_step_s[plan.decode_batches.index(slots)]
    prompts = PROMPT_TOKENS / SIZE / WORKLOAD.mean / plan.prefill_tokens_per_s
    return 1 / (step_s / slots + prompts)


def run_160k() -> dict[str, Any]:
    """Whole steps of LONG_MODES in virtual time: trained tokens per second after the warm-up, beside synchronous."""
    sizes = {"groups_per_step": LONG_GROUPS, "group_size": LONG_SIZE, "max_new_tokens": LONGEST_160K}
    lengths = Workload(LONG_PLAN, LONG_SIZE, LONGEST_160K)
    figures = {}
    for name, settings in LONG_MODES.items():
        machine.progress(f"{name}: {LONG_STEPS} steps in virtual time")
        rollout = RolloutConfig.model_validate({**sizes, **settings})
        figures[name] = Figures.from_outcome(Simulation(rollout, LONG_PLAN, LONG_SLOTS, lengths).run(), LONG_PLAN)
    results = [
        {
            "case": "tail_160k",
            "system": f"rollover {name}",
            "version": rollover.__version__,
            "setting": f"{LONG_MODES[name]}, {LONG_PLAN.engines} engines of {LONG_SLOTS} slots",
            "tokens_per_s": f.trained_tokens_per_s,
            "step_s": f.step_s,
            "slots_idle": f.slots_idle,
            "staleness_mean": f.staleness_mean,
            "staleness_max": f.staleness_max,
        }
        for name, f in figures.items()
    ]
    sync = figures["sync"].trained_tokens_per_s
    return {
        "benchmark": "tail_160k",
        "machine": "virtual time, assumed speeds",
        "assumed": LONG_PLAN.model_dump(mode="json"),
        "results": results,
        "ratios": {
            f"tail_160k_{name}_vs_sync": f.trained_tokens_per_s / sync for name, f in figures.items() if name != "sync"
        },
    }


def run(config: Config, runs: int) -> dict[str, Any]:
    """Every mode for STEPS measured steps, not `runs`; generation rates, whole steps, bounds and predictions."""
    prepare_process(config)
    device = pick_device(config.model.device)
    versions = machine.describe(device)
    speeds = _Speeds(config)
    speeds.measure()
    outcomes = {mode.name: _run_mode(mode, config) for mode in MODES}
    speeds.measure()
    plans = {name: speeds.plan(o.when) for name, o in outcomes.items()}
    predicted = {mode.name: _predicted_rate(mode, plans[mode.name]) for mode in MODES}
    results = []
    for mode in MODES:
        o = outcomes[mode.name]
        for what, seconds in (("generation", o.generate_s), ("step", o.step_s))[: 1 + mode.trains]:
            rates = [t / s for t, s in zip(o.tokens, seconds, strict=True)]
            results.append(
                {
                    "case": f"tail_{what}",
                    "system": f"rollover {mode.name}",
                    "version": rollover.__version__,
                    "setting": f"{mode.rollout}, {mode.max_running} at once",
                    "tokens_per_s": o.rate(seconds),
                    "spread": [min(rates), max(rates)],
                    "group_staleness_mean": sum(o.staleness) / len(o.staleness),
                    "group_staleness_max": max(o.staleness),
                }
            )
        results[-1 - mode.trains]["predicted_tokens_per_s"] = predicted[mode.name]
    for name, slots in (("partial_at_sync_batch", SYNC_BATCH), ("partial", 2 * SYNC_BATCH)):
        rate = _all_slots_busy(plans[name], slots)
        results.append(
            {
                "case": "tail_bound", "system": "rollover, all slots busy", "version": rollover.__version__,
                "setting": f"{slots} at once", "tokens_per_s": rate, "spread": [rate, rate],
            }
        )  # fmt: skip
    return {
        "benchmark": "tail",
        "machine": versions | {"matmul_gflops": machine.matmul_gflops(dtype_of(config), device)},
        "decode_step_s": {name: dict(zip(DECODE_BATCHES, p.decode_step_s, strict=True)) for name, p in plans.items()},
        "results": results,
        "training_share_of_a_sync_step": sum(outcomes["sync"].train_s) / sum(outcomes["sync"].step_s),
        "ratios": _ratios(outcomes, plans, predicted),
    }


def _ratios(
    outcomes: dict[str, _Outcome], plans: dict[str, PlanConfig], predicted: dict[str, float]
) -> dict[str, float]:
    rates = {name: o.rate(o.generate_s) for name, o in outcomes.items()}
    sync, partial = outcomes["sync"], outcomes["partial"]
    speedup = rates["partial"] / rates["sync"]
    training_share = sum(sync.train_s) / sum(sync.step_s)
    amdahl = 1 / (training_share + (1 - training_share) / speedup)
    step_speedup = partial.rate(partial.step_s) / sync.rate(sync.step_s)
    out = {
        "tail_rollout_partial_vs_sync": speedup,
        "tail_partial_vs_work_conserving_bound": rates["partial"] / _all_slots_busy(plans["partial"], 2 * SYNC_BATCH),
        "tail_partial_at_sync_batch_vs_work_conserving_bound": (
            rates["partial_at_sync_batch"] / _all_slots_busy(plans["partial_at_sync_batch"], SYNC_BATCH)
        ),
        "tail_step_partial_vs_sync": step_speedup,
        "tail_amdahl_bound_on_the_step": amdahl,
        "tail_step_vs_amdahl_bound": step_speedup / amdahl,
    }
    for name in ("partial_at_sync_batch", "partial_recompute", "partial_staleness_2"):
        out[f"tail_rollout_{name}_vs_sync"] = rates[name] / rates["sync"]
    for name in rates.keys() - {"sync"}:
        # The planner's speedup over sync by the measured one.
        out[f"tail_planned_vs_measured_{name}"] = predicted[name] / predicted["sync"] / (rates[name] / rates["sync"])
    return out
