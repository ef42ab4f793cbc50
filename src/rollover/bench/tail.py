"""`rollover bench tail`: what rolling over saves where a few generations are long, on the real driver and engine.

One workload for every mode: groups of siblings whose lengths are forced, log-normal with a median of 64 and a 99th
percentile of 512 tokens. Modes differ by what is in flight and by what happens to the KV cache at a weight update.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import math
import time
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any

import rollover
from rollover.bench import machine, workload
from rollover.config import Config
from rollover.config.rollout import RolloutConfig
from rollover.engine.embedded.engine import EmbeddedEngine
from rollover.engine.protocol import ExtendRequest
from rollover.models.load import load_model, pick_device
from rollover.rollout.driver import Driver
from rollover.rollout.lifecycle import Lifecycle
from rollover.train.batch import build_batch
from rollover.train.setup import dtype_of, embedded_engine, prepare_process
from rollover.train.trainer import Trainer
from rollover.types import Reward, Rollout, Segment, Task

GROUPS, SIZE, PROMPT_TOKENS = 16, 4, 32
MEDIAN, P99, LONGEST = 64, 512, 1024
SYNC_BATCH = GROUPS * SIZE
STEPS = 3

SYNC = {"in_flight_groups": GROUPS, "interrupt": "never", "max_staleness": 0}
PARTIAL = {"in_flight_groups": 3 * GROUPS, "interrupt": "when_enough", "max_staleness": 2}


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


MODES = (
    Mode("sync", SYNC, SYNC_BATCH, warm_up=1, trains=True),
    Mode("partial", PARTIAL | {"kv_on_resume": "keep"}, 3 * SYNC_BATCH, warm_up=2, trains=True),
    Mode("partial_recompute", PARTIAL, 3 * SYNC_BATCH, warm_up=2),
    Mode("partial_at_sync_batch", PARTIAL | {"kv_on_resume": "keep"}, SYNC_BATCH, warm_up=2),
)


def forced_length(rollout_id: str) -> int:
    """Tokens of a rollout, by its id alone: the same in every mode."""
    digest = hashlib.blake2b(rollout_id.encode(), digest_size=8).digest()
    u = (int.from_bytes(digest, "little") + 0.5) / 2**64
    sigma = math.log(P99 / MEDIAN) / NormalDist().inv_cdf(0.99)
    return max(1, min(LONGEST, round(MEDIAN * math.exp(sigma * NormalDist().inv_cdf(u)))))


class _ForcedLengths:
    """An engine whose rollouts end at their forced length. All else is the engine's."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def extend(self, request: ExtendRequest) -> list[Segment]:
        left = forced_length(request.rollout_id) - len(request.generated_ids)
        return await self._engine.extend(dataclasses.replace(request, max_new_tokens=left))


@dataclass
class _Outcome:
    """Per measured step: seconds of generation and of the whole step, and the tokens generated in it.

    Generated, not trained: over many steps they are the same, and over few the trained ones of a partial mode hold
    tokens that were generated before the first measured step.
    """

    generate_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    train_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def rate(self, seconds: list[float]) -> float:
        return sum(self.tokens) / sum(seconds)


async def _score(rollouts: list[Rollout]) -> list[Reward]:
    return [Reward(float(r.sibling % 2)) for r in rollouts]


def _run_mode(mode: Mode, config: Config) -> _Outcome:
    """Warm-up steps, then STEPS training steps: generate, train (if the mode does), hand the weights over."""
    rollout = RolloutConfig.model_validate(
        {"groups_per_step": GROUPS, "group_size": SIZE, "max_new_tokens": LONGEST, **mode.rollout}
    )
    run = config.model_copy(
        update={
            "rollout": rollout,
            "engine": config.engine.model_copy(update={"max_running": mode.max_running, "kv_memory_gb": 6.0}),
        }
    )
    loaded = load_model(run.model, device=pick_device(run.model.device))
    vocab = loaded.model.config.get_text_config().vocab_size
    engine = embedded_engine(loaded, run)
    trainer = Trainer(loaded, run.train, run.algorithm, dtype=dtype_of(run), max_new_tokens=LONGEST)
    lifecycle = Lifecycle(rollout, mode.max_running)
    ledger = lifecycle.ledger
    forced: Any = _ForcedLengths(engine)
    cursor = iter(range(10**9))

    def next_task() -> tuple[Task, tuple[int, ...]]:
        i = next(cursor)
        return Task(task_id=str(i), source="bench", reward="", prompt=""), workload.prompt(vocab, PROMPT_TOKENS, i)

    driver = Driver(lifecycle, forced, next_task, _score, run_seed=0)
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
            engine.load_weights(step + 1, trainer.publish())
            driver.after_publish(step + 1)
            if step >= mode.warm_up:
                out.generate_s.append(generated - started)
                out.train_s.append(trained - generated)
                out.step_s.append(time.perf_counter() - started)
                out.tokens.append(ledger.generated_tokens - before)
            machine.progress(f"{mode.name}: step {step + 1} of {mode.warm_up + STEPS}")
        driver.request_stop()
        await engine.close()

    asyncio.run(go())
    return out


def _full_batch_rate(config: Config, batch: int) -> float:
    """Tokens per second with every slot busy all the time: what no schedule of this batch can pass."""
    loaded = load_model(config.model, dtype=dtype_of(config), device=pick_device(config.model.device))
    vocab = loaded.model.config.get_text_config().vocab_size
    engine = EmbeddedEngine(loaded.model, config.engine.model_copy(update={"max_running": batch, "kv_memory_gb": 6.0}))
    mean = round(MEDIAN * math.exp((math.log(P99 / MEDIAN) / NormalDist().inv_cdf(0.99)) ** 2 / 2))

    prompts = [workload.prompt(vocab, PROMPT_TOKENS, i // SIZE) for i in range(batch)]
    workload.generate(engine, prompts, 4)
    started = time.perf_counter()
    workload.generate(engine, prompts, mean)
    return batch * mean / (time.perf_counter() - started)


def run(config: Config, runs: int) -> dict[str, Any]:
    """Every mode for STEPS measured steps, not `runs`; generation rates, whole steps, and the bounds on both."""
    prepare_process(config)
    device = pick_device(config.model.device)
    versions = machine.describe(device)
    outcomes = {mode.name: _run_mode(mode, config) for mode in MODES}
    bounds = {batch: _full_batch_rate(config, batch) for batch in (SYNC_BATCH, 3 * SYNC_BATCH)}
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
                }
            )
    for batch, rate in bounds.items():
        results.append(
            {
                "case": "tail_bound", "system": "rollover, all slots busy", "version": rollover.__version__,
                "setting": f"{batch} at once", "tokens_per_s": rate, "spread": [rate, rate],
            }
        )  # fmt: skip
    sync, partial, same = outcomes["sync"], outcomes["partial"], outcomes["partial_at_sync_batch"]
    speedup = partial.rate(partial.generate_s) / sync.rate(sync.generate_s)
    training_share = sum(sync.train_s) / sum(sync.step_s)
    amdahl = 1 / (training_share + (1 - training_share) / speedup)
    step_speedup = partial.rate(partial.step_s) / sync.rate(sync.step_s)
    return {
        "benchmark": "tail",
        "machine": versions | {"matmul_gflops": machine.matmul_gflops(dtype_of(config), device)},
        "results": results,
        "training_share_of_a_sync_step": training_share,
        "amdahl_bound_on_the_step": amdahl,
        "ratios": {
            "tail_rollout_partial_vs_sync": speedup,
            "tail_rollout_partial_at_sync_batch_vs_sync": same.rate(same.generate_s) / sync.rate(sync.generate_s),
            "tail_partial_vs_work_conserving_bound": partial.rate(partial.generate_s) / bounds[3 * SYNC_BATCH],
            "tail_partial_at_sync_batch_vs_work_conserving_bound": same.rate(same.generate_s) / bounds[SYNC_BATCH],
            "tail_step_partial_vs_sync": step_speedup,
            "tail_step_vs_amdahl_bound": step_speedup / amdahl,
        },
    }
