"""Driver, engine process and reward pool together, while what can go wrong does: kills, hangs, delays, forks.

    .venv/bin/python scripts/fuzz.py --seconds 3600 --seed 1

Real processes and a tiny random model; the weights stay what they are while their version grows, so the tokens of a
rollout follow from its seed alone. A life of the run ends after some steps, or by giving up as it should, and the next
one begins from a snapshot. After each step the script checks

- the ledger: every group, rollout and token in exactly one account; no group trained twice, none skipped;
- every rollout of a step, and every one that is held: the tokens and log-probs that it gets without any interruption,
  each with one version, no version outside the staleness bound;
- every reward: the score of that rollout's own text, which depends on every character and on the task, or missing;
and after each life that no process is left, whatever started it. Prints counts as JSON; exit code 1 after a failure.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import os
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests"), str(ROOT / "scripts")]
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import fuzz_rewards  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from fuzz_rewards import own_score  # noqa: E402
from fuzz_trouble import Trouble, left_over, marked_processes  # noqa: E402

import tiny  # noqa: E402
from rollover.config import Config  # noqa: E402
from rollover.engine.embedded.engine import EmbeddedEngine  # noqa: E402
from rollover.engine.process.engine import EngineDied, ProcessEngine  # noqa: E402
from rollover.engine.protocol import ExtendRequest, StopCriteria  # noqa: E402
from rollover.envs.build import SingleTurn  # noqa: E402
from rollover.logs import messages_to  # noqa: E402
from rollover.models.load import LoadedModel, load_model  # noqa: E402
from rollover.rewards.pool import RewardPool  # noqa: E402
from rollover.rewards.scorer import make_scorer  # noqa: E402
from rollover.rollout.driver import Driver  # noqa: E402
from rollover.rollout.lifecycle import Event, EventKind, Lifecycle  # noqa: E402
from rollover.rollout.requests import Requests  # noqa: E402
from rollover.rollout.watchdog import Watchdog  # noqa: E402
from rollover.run.resume import check_restored  # noqa: E402
from rollover.staleness import group_staleness  # noqa: E402
from rollover.types import Group, Prompt, Rollout, RolloutState, SamplingParams, StopReason, Task, rollout_seed  # noqa: E402

EOS = 1
_MIN_STEPS = 3
MODES: list[dict[str, Any]] = [
    {"max_staleness": 0},
    {"in_flight_groups": 5, "interrupt": "when_enough", "max_staleness": 2},
    {"in_flight_groups": 5, "interrupt": "token_budget", "token_budget": 20, "max_staleness": 2},
    {"in_flight_groups": 4, "interrupt": "on_weight_update", "max_staleness": 1, "overlap": True},
    {"in_flight_groups": 4, "interrupt": "never", "max_staleness": 1, "overlap": True},
]


def config_of(folder: Path, rng: random.Random) -> Config:
    rollout = {"groups_per_step": 2, "group_size": 3, "max_new_tokens": 64, "temperature": 1.0, **rng.choice(MODES)}
    kv_on_resume = rng.choice(["recompute", "keep", "salt"])
    if rollout.get("overlap") or "interrupt" in rollout:  # else nothing is resumed
        rollout["kv_on_resume"] = kv_on_resume
    values = {
        "model": {"path": str(folder / "model"), "dtype": "float32", "device": "cpu"},
        "engine": {"kv_memory_gb": 0.05, "max_running": 8, "kind": "process"},
        "rollout": rollout,
        "rewards": {
            "timeout_s": 2.0,
            "startup_timeout_s": 60.0,
            "num_workers": 2,
            "retries": rng.choice([0, 1]),
            "streaming": rng.random() < 0.7,
        },
        "watchdog": {"rollout_timeout_s": 8.0, "grace_s": 3.0, "reward_timeout_s": 30.0, "max_stalls": 4},
        "train": {"num_steps": 10**9},
    }
    return Config.model_validate(values)


def task_of(index: int) -> Task:
    name = ("one", "one", "batch", "together")[index % 4]
    spec = f"{Path(fuzz_rewards.__file__)}:{name}"
    return Task(f"task-{index}", "fuzz", spec, prompt=f"count to {index}", columns={"answer": f"task-{index}"})


class Snapshot:
    """What a checkpoint would hold, and what must have been trained by then."""

    def __init__(self, lifecycle: Lifecycle, version: int, trained: set[int], dropped: set[int]) -> None:
        state, arrays = lifecycle.state_dict()
        self.state, self.arrays = json.loads(json.dumps(state)), copy.deepcopy(arrays)
        self.version, self.trained, self.dropped = version, set(trained), set(dropped)


class Fuzz:
    """A run and all that is done to it. `counts`: what happened."""

    def __init__(self, folder: Path, seed: int, rng: random.Random) -> None:
        self.folder, self.seed, self.rng = folder, seed, rng
        self.counts: Counter[str] = Counter()
        self.said: list[str] = []
        tiny.save(folder / "model")
        self.loaded: LoadedModel = load_model(config_of(folder, rng).model)
        self.weights = [(name, p.detach()) for name, p in self.loaded.model.named_parameters()]
        self.snapshot: Snapshot | None = None

    async def run(self, seconds: float, say: Callable[[str], None]) -> None:
        """For so many seconds, and on a slow machine until a few steps were made."""
        self.end = time.monotonic() + seconds
        while not self._is_over():
            await self._live()
            self.counts["lives"] += 1
            say(json.dumps(self.counts))
            left = await left_over()
            assert not left, f"processes were left over: {left}"

    # A life

    def _is_over(self) -> bool:
        return time.monotonic() > self.end and self.counts["steps"] >= _MIN_STEPS

    async def _live(self) -> None:
        self._build()
        await self.engine.load_weights(self.version, self.weights)
        if self.version:
            self.driver.on_new_version(self.version)
        trouble = Trouble(self.rng, self.engine, self.pool, self.lifecycle, self.counts)
        troubling = asyncio.ensure_future(trouble.make())
        try:
            for _ in range(self.rng.choice([3, 10, 40])):
                if self._is_over():
                    break
                await self._step()
                if self.rng.random() < 0.5:
                    self.snapshot = await self._saved()
        except EngineDied:
            self.counts["lives that ended: the engine died again and again"] += 1
        except ValueError as error:  # what the product says when nothing works any more
            assert "rewards" in str(error) or "the last" in str(error), error
            self.counts["lives that ended: too little worked"] += 1
        finally:
            troubling.cancel()
            await asyncio.wait([troubling])
            await self.driver.abandon()
            await self.engine.close()
            await self.pool.close()
            driver = self.driver
            for name, num in (
                self.pool.stats() | driver.watchdog.stats() | driver.retrying_engine.stats() | self.engine.stats()
            ).items():
                if name in _COUNTED:
                    self.counts[name] += int(num)
        if not troubling.cancelled():
            troubling.result()

    def _build(self) -> None:
        rng = self.rng
        self.config = config_of(self.folder, rng)
        if self.snapshot is not None and rng.random() < 0.1:
            self.snapshot = None
        rollout = self.config.rollout
        self.lifecycle = Lifecycle(rollout, self.config.engine.max_running, listeners=[self._on_event])
        self.version, self.trained, self.dropped = 0, set(), set()
        if self.snapshot is not None:
            saved = copy.deepcopy(self.snapshot)
            try:
                self.lifecycle.load_state_dict(saved.state, saved.arrays)
                check_restored(self.lifecycle, saved.version, 1000)
                self.version, self.trained, self.dropped = saved.version, saved.trained, saved.dropped
            except ValueError:  # another mode, whose bound what is held has passed
                self.snapshot = None
                self.lifecycle = Lifecycle(rollout, self.config.engine.max_running, listeners=[self._on_event])
        self.engine = ProcessEngine(self.config, 1)
        self.pool = RewardPool(self.config.rewards)
        self.driver = Driver(
            self.lifecycle,
            self.engine,
            self._next_task,
            SingleTurn(make_scorer(self.pool, self.loaded.tokenizer, self.config), self.pool.scores_singly),
            Requests(rollout, self.seed, [EOS]),
            Watchdog(self.config.watchdog, self.config.rewards.allowed_s(rollout.group_size)),
        )
        assert self.engine.max_tokens > 64, "a run asks it before it begins, and waits for the model"

    def on_message(self, text: str) -> None:
        self.said.append(text)
        self.counts["refused answers"] += "is refused" in text

    def _next_task(self) -> tuple[Task, Prompt]:
        task = task_of(self.lifecycle.cache.num_admitted)
        return task, Prompt.of(self.loaded.tokenizer.encode(str(task.prompt)))

    def _on_event(self, event: Event) -> None:
        gone = {EventKind.CONSUME: self.trained, EventKind.DROP: self.dropped}.get(event.kind)
        if gone is not None:
            assert event.group.group_id not in self.trained | self.dropped, "a group left twice"
            gone.add(event.group.group_id)
        if event.reason is not None:
            self.counts[f"dropped groups: {event.reason.value}"] += 1

    async def _step(self) -> None:
        groups = await self.driver.collect(self.version)
        assert groups, "the stream has no end, and nobody asked it to stop"
        bound = self.config.staleness_bound
        for group in groups:
            assert (group_staleness(group, self.version) or 0) <= bound
        overlap = self.config.rollout.overlap
        if overlap:
            self.driver.generate_ahead(self.version)
        await self._check(groups)
        await asyncio.sleep(self.rng.random() * 0.2)  # the training
        if overlap and self.config.rollout.interrupt == "never":
            await self.driver.drain()
        self.version += 1
        await self.engine.load_weights(self.version, self.weights)
        self.driver.on_new_version(self.version)
        self.counts["steps"] += 1

    async def _saved(self) -> Snapshot:
        if self.config.rollout.overlap:
            await self.driver.interrupt_all()
        states = {r.state for g in self.lifecycle.cache.groups.values() for r in g.rollouts}
        assert RolloutState.RUNNING not in states
        self.counts["snapshots"] += 1
        return Snapshot(self.lifecycle, self.version, self.trained, self.dropped)

    # What must hold

    async def _check(self, groups: list[Group]) -> None:
        self.lifecycle.check()
        cache = self.lifecycle.cache
        assert self.trained | self.dropped | cache.groups.keys() == set(range(cache.num_admitted))
        prompts = {r: g.prompt for g in [*groups, *cache.groups.values()] for r in g.rollouts}
        # What runs is appended to while the reference is computed: what there is now is what is checked.
        held = [(r, [s for s in r.segments], r.stop_reason) for r in prompts if r.segments]
        expected = await self._uninterrupted([(r, prompts[r]) for r, _, _ in held])
        for (rollout, segments, stop_reason), (tokens, logprobs, reason) in zip(held, expected, strict=True):
            ours = [int(t) for s in segments for t in s.token_ids]
            assert ours == tokens[: len(ours)], f"{rollout.rollout_id}: {ours} is not the beginning of {tokens}"
            ours_lp = np.concatenate([s.logprobs for s in segments])
            assert np.allclose(ours_lp, logprobs[: len(ours)], atol=1e-3), f"{rollout.rollout_id}: log-probs"
            if stop_reason is not None:
                assert len(ours) == len(tokens) and stop_reason is reason, f"{rollout.rollout_id} stopped early"
            versions = [s.policy_version for s in segments]
            assert versions == sorted(versions) and versions[-1] <= self.version + 1, (rollout.rollout_id, versions)
        for rollout in (r for r in prompts if r.reward is not None):
            self._check_reward(rollout)
        self.counts["trained rollouts"] += sum(len(g.rollouts) for g in groups)
        self.counts["trained tokens"] += sum(r.num_tokens for g in groups for r in g.rollouts)
        self.counts["resumed rollouts"] += sum(len(r.segments) > 1 for g in groups for r in g.rollouts)

    def _check_reward(self, rollout: Rollout) -> None:
        assert rollout.reward is not None
        if rollout.reward.score is None:
            self.counts["missing rewards"] += 1
            return
        text = self.loaded.tokenizer.decode(rollout.token_ids(), skip_special_tokens=True)
        own = own_score(rollout.task.task_id, text)
        assert rollout.reward.score == own, f"{rollout.rollout_id} has the reward {rollout.reward}, not its own {own}"
        self.counts["rewards"] += 1

    async def _uninterrupted(
        self, rollouts: list[tuple[Rollout, Prompt]]
    ) -> list[tuple[list[int], np.ndarray, StopReason]]:
        """Tokens, log-probs and stop reason of each, generated alone in this process from its first token on."""
        engine = EmbeddedEngine.over(self.loaded.model, self.loaded, self.config)
        budget = self.config.rollout.max_new_tokens
        requests = [
            ExtendRequest(
                rollout_id=r.rollout_id,
                prompt=prompt,
                generated_ids=(),
                max_new_tokens=budget,
                seed=rollout_seed(self.seed, r.task.task_id, r.task.attempt, r.sibling),
                sampling=SamplingParams(temperature=1.0),
                stop=StopCriteria(frozenset([EOS])),
            )
            for r, prompt in rollouts
        ]
        answers = await asyncio.gather(*map(engine.extend, requests))
        await engine.close()
        assert all(len(segments) == 1 for segments in answers)
        return [(s.token_ids.tolist(), s.logprobs, s.stop_reason) for (s,) in answers]


_COUNTED = (
    "engine/restarts",
    "rewards/timeouts",
    "rewards/crashes",
    "rewards/errors",
    "rewards/retries",
    "rewards/quarantined",
    "watchdog/stalled_rollouts",
    "watchdog/stalled_rewards",
    "watchdog/refused_answers",
    "engine/failed_extends",
)


def fuzz(seconds: float, seed: int, say: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Counts of what happened, of which `say` tells after each life.

    Whatever must hold and does not raises an AssertionError with a note of the seed.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        run = Fuzz(Path(folder), seed, random.Random(seed))
        try:
            with marked_processes():
                with messages_to(run.on_message):
                    asyncio.run(run.run(seconds, say))
        except BaseException as error:
            error.add_note(f"seed {seed}, after {time.monotonic() - started:.0f} s; {dict(run.counts)}")
            error.add_note("said last: " + "\n  ".join(run.said[-20:]))
            raise
        finally:
            torch.set_num_threads(threads)
    return {"seed": seed, "seconds": round(time.monotonic() - started, 1), **dict(sorted(run.counts.items()))}


def main() -> int:
    parser = argparse.ArgumentParser(description="Fuzz driver, engine process and reward pool together.")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    try:
        say = partial(print, file=sys.stderr, flush=True)
        print(json.dumps(fuzz(arguments.seconds, arguments.seed, say), indent=2))
    except Exception:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
