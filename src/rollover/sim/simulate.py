"""A run under a virtual clock: the real scheduler, cache and ledger on simulated engines, without a model.

    phase (admit, start, stop, score; as the driver does) -> train -> sync weights -> ...

With rollout.overlap generation continues during training, and gets new weights as in run/loop.py.

Owns the virtual clock and the engines' policy version. The Lifecycle makes every decision; Fleet and plan give every
duration. Pure: no asyncio, no wall clock; equal input gives equal output. Tokens have lengths and versions, but no ids.
"""

from __future__ import annotations

import gc
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from rollover.config import PlanConfig
from rollover.config.rollout import RolloutConfig
from rollover.rollout.lifecycle import Event, Lifecycle, RunClock, environment_is_next, segments_to_append
from rollover.sim.fleet import Fleet
from rollover.sim.workload import EventQueue, Segments, Turns, Workload, is_partial
from rollover.staleness import staleness
from rollover.types import Group, Prompt, Reward, Rollout, RolloutState, StopReason, Task

_TASK = Task(task_id="", source="plan", reward="", prompt="")
_REWARD = Reward(1.0)
# A member of an Enum class is slow to look up.
_PAUSED, _EOS, _LENGTH = StopReason.PAUSED, StopReason.EOS, StopReason.LENGTH
_ACTING, _PARKED = RolloutState.ACTING, RolloutState.PARKED
_NEVER = float("inf")
_SHARED_SPEED = 0.5  # of engines and trainer on the same devices; engine.threads has the same default


@dataclass(slots=True)
class _SimulatedGroup:
    """State of a held group, by sibling. `lengths`: end of the present turn unless something stops it earlier; `later`:
    ends of the later turns. `kv_on`, `kv_version`: engine and version of its KV. `prompt_on`: engines with the KV of
    the prompt. `appended`: tokens from the environment that no engine has seen."""

    lengths: list[int]
    kv_on: list[int | None]
    kv_version: list[int]
    prompt_on: set[int] = field(default_factory=set)
    later: list[list[int]] = field(default_factory=list)
    appended: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """One training step, in virtual seconds and tokens. `staleness`: tokens in the loss by their age in versions.

    The trainer waits `generate_s` for rollouts and `score_s` for scores alone, trains, and waits `sync_s` for the
    weight sync (with interrupt = "never" running rollouts end first). `generating_s`: time in which the engines
    generate; `overlapped_s`: the part of it during training.
    """

    version: int
    generate_s: float
    score_s: float
    train_s: float
    sync_s: float
    generating_s: float
    overlapped_s: float
    generated_tokens: int
    trained_tokens: int
    staleness: Counter[int]

    @property
    def seconds(self) -> float:
        return self.generate_s + self.score_s + self.train_s + self.sync_s


@dataclass(slots=True)
class Outcome:
    """Result of a simulated run. `slot_s`: slots x seconds of decoding; `slots`: of all engines."""

    slots: int
    steps: list[SimulatedStep] = field(default_factory=list)
    slot_s: float = 0.0
    prefill_tokens: int = 0
    reprefilled_tokens: int = 0
    ledger: dict[str, float] = field(default_factory=dict)
    partial_rollouts: int = 0
    trained_rollouts: int = 0


class Simulation:
    """A simulated run. `listeners` get every event of the lifecycle with its virtual time.

    Several engines stop rollouts every few milliseconds, so stops within a quarter of the shortest decode step are
    handled together. With one engine each stop is handled at its time. The engines get new weights after every
    `publish_every` steps.
    """

    def __init__(
        self,
        config: RolloutConfig,
        plan: PlanConfig,
        slots_per_engine: int,
        workload: Workload,
        listeners: Sequence[Callable[[Event], None]] = (),
        num_tasks: int | None = None,
        publish_every: int = 1,
    ) -> None:
        self.config, self.plan, self.workload = config, plan, workload
        self.now = 0.0
        self.version = 0
        self.engine_version = 0
        self.publish_every = publish_every
        self.fleet = Fleet(plan, slots_per_engine)
        self.outcome = Outcome(slots=plan.engines * slots_per_engine)
        self._num_tasks, self._stream_ended = num_tasks, False
        self.clock = RunClock(lambda: self.now)
        self.lifecycle = Lifecycle(
            config, plan.engines * slots_per_engine, min_valid_rewards=1, listeners=listeners, clock=self.clock
        )
        self._resolution_s = self.fleet.step_s[1] / 4 if plan.engines > 1 else 0.0
        self._recompute = config.kv_on_resume == "recompute"
        self._prompt = Prompt((0,) * plan.prompt_tokens)
        self._segments, self._turns = Segments(), Turns(plan)
        self._generating_s = 0.0
        self._groups: dict[int, _SimulatedGroup] = {}
        self._scoring: EventQueue[int] = EventQueue()  # group ids
        self._acting: EventQueue[Rollout] = EventQueue()

    def run(self) -> Outcome:
        """Simulate plan.steps steps, fewer if the tasks run out."""
        with _garbage_collection_off():
            for version in range(self.plan.steps):
                if not self._train_step(version):
                    break
        self.lifecycle.check()
        self.outcome.slot_s, self.outcome.prefill_tokens = self.fleet.slot_s, self.fleet.prefill_tokens
        self.outcome.ledger = self.lifecycle.metrics()
        return self.outcome

    def train_seconds(self, tokens: int) -> float:
        """Return the duration of a training step over so many tokens."""
        speed = _SHARED_SPEED if self.config.overlap and not self.plan.trainers else 1.0
        return tokens / (self.plan.train_tokens_per_s * (self.plan.trainers or self.plan.engines) * speed)

    def _train_step(self, version: int) -> bool:
        self.version = version
        self.clock.on_version(version)
        before, generating = self.lifecycle.ledger.generated_tokens, self._generating_s
        self._segments.clear()
        self.lifecycle.scheduler.begin_step(version, self.engine_version)
        generate_s, score_s = self._collect(version)
        groups = self.lifecycle.consume(version, self._stream_ended)
        if not groups:
            return False
        ages, tokens = _trained(groups, self.config.oldest_in_loss(version), version)
        tokens += len(groups) * len(self._prompt)
        self.outcome.trained_rollouts += sum(len(group.rollouts) for group in groups)
        self.outcome.partial_rollouts += sum(is_partial(rollout) for group in groups for rollout in group.rollouts)
        train_s = self.train_seconds(tokens)
        if self.config.overlap:
            train_s, overlapped_s, sync_s = self._train_meanwhile(version, train_s)
            generating_s = self._generating_s - generating
        else:
            sync_s = self.plan.weight_sync_s if self._syncs_weights(version) else 0.0
            self.now += train_s + sync_s
            overlapped_s, generating_s = 0.0, generate_s
        if self._syncs_weights(version):
            self.engine_version = version + 1
        for group in [*groups, *self.lifecycle.on_new_version(version + 1)]:
            del self._groups[group.group_id]
        step = SimulatedStep(
            version, generate_s, score_s, train_s, sync_s, generating_s, overlapped_s,
            generated_tokens=self.lifecycle.ledger.generated_tokens - before,
            trained_tokens=sum(ages.values()),
            staleness=ages,
        )  # fmt: skip
        self.outcome.steps.append(step)
        return True

    def _syncs_weights(self, version: int) -> bool:
        return (version + 1) % self.publish_every == 0

    def _collect(self, version: int) -> tuple[float, float]:
        """Simulate one generation phase, as Driver.collect. Returns seconds waited for rollouts, and for scores
        alone."""
        started, generating = self.now, self._generating_s
        scheduler = self.lifecycle.scheduler
        while True:
            self._admit(version)
            if scheduler.to_consume(version, self._stream_ended) is not None:
                break
            self._dispatch(self.lifecycle.start(version))
            self._wait()
        if self.config.overlap:
            generate_s = self._generating_s - generating
            return generate_s, max(0.0, self.now - started - generate_s)
        interrupted = scheduler.to_interrupt(version, self._stream_ended)
        if stopped := self.fleet.interrupt(interrupted, self.now):  # some end at the same time
            self._handle(stopped)
        generated = self.now
        while self._scoring:
            self.now = max(self.now, self._scoring.first)
            self._handle([])
        return generated - started, self.now - generated

    def _train_meanwhile(self, version: int, train_s: float) -> tuple[float, float, float]:
        """Simulate training with generation in parallel, then the weight sync.

        Returns the seconds of training, of generation during it, and of the weight sync. On shared devices an idle
        engine leaves its share to the trainer, as Run._take_cores does.
        """
        started, ends, generating, alone = self.now, self.now + train_s, self._generating_s, False
        self.lifecycle.scheduler.begin_step(version + 1, self.engine_version)
        if not self.plan.trainers:
            self.fleet.set_speed(_SHARED_SPEED, self.now)
        while True:
            self._admit(version + 1)
            self._dispatch(self.lifecycle.start(version + 1))
            if not self.plan.trainers and not alone and self.fleet.next_time() == _NEVER:
                alone, ends = True, self.now + (ends - self.now) * _SHARED_SPEED
            if self.now >= ends and self.now < min(self._scoring.first, self._acting.first):
                break
            self._wait(ends)
        if not self.plan.trainers:
            self.fleet.set_speed(1.0, self.now)
        overlapped_s = self._generating_s - generating
        if self._syncs_weights(version):
            if self.config.interrupt == "never":
                while self.fleet.next_time() < _NEVER:
                    self._wait()
            self._update_in_flight()
        return ends - started, overlapped_s, self.now - ends

    def _update_in_flight(self) -> None:
        """Pause running rollouts for the weight sync; they continue in a new segment, as in Engine.load_weights."""
        running = self.fleet.running(self.now)
        for _, rollout, num_tokens in running:
            self._segments.on_new_weights(rollout, num_tokens, self.engine_version)
        self.fleet.pause(self.plan.weight_sync_s)
        self.now += self.plan.weight_sync_s
        if self.config.kv_on_resume != "keep":
            for group in self._groups.values():
                group.prompt_on.clear()
        for engine, rollout, num_tokens in running if self._recompute else ():
            group = self._groups[rollout.group_id]
            prefill = rollout.num_tokens + num_tokens
            if engine not in group.prompt_on:
                prefill += len(self._prompt)
                group.prompt_on.add(engine)
            if prefill:
                self.outcome.reprefilled_tokens += prefill
                self.fleet.prefill(engine, prefill, self.now)

    def _admit(self, version: int) -> None:
        for _ in range(self.lifecycle.scheduler.num_to_admit()):
            task = self.lifecycle.cache.num_admitted
            if task == self._num_tasks:
                self._stream_ended = True
                return
            group = self.lifecycle.admit(_TASK, self._prompt, version)
            lengths, later = self._turns.split(self.workload.lengths(task))
            num = len(lengths)
            self._groups[group.group_id] = _SimulatedGroup(lengths, [None] * num, [version] * num, later=later)

    def _dispatch(self, started: list[Rollout]) -> None:
        version = self.engine_version
        fleet, longest = self.fleet, self.config.max_new_tokens
        for rollout in started:
            group, sibling, so_far = self._groups[rollout.group_id], rollout.sibling, rollout.num_tokens
            kv_on = group.kv_on[sibling]
            engine = fleet.place(kv_on)
            left = min(group.lengths[sibling], longest) - so_far
            if budget := self.config.pause_after(rollout):
                left = min(left, budget)
            fresh = engine == kv_on and (group.kv_version[sibling] == version or not self._recompute)
            appended = group.appended.pop(sibling, 0)
            prefill = appended if fresh else so_far
            if not fresh and engine not in group.prompt_on:
                prefill += len(self._prompt)
                group.prompt_on.add(engine)
            if so_far:
                self.outcome.reprefilled_tokens += prefill - appended
            fleet.start(rollout, engine, left, prefill, self.now)
            group.kv_on[sibling], group.kv_version[sibling] = engine, version

    def _wait(self, until: float = _NEVER) -> None:
        """Advance to the next stop, answer or score, at most to `until`, and handle everything that is due."""
        begun, next_stop = self.now, self.fleet.next_time()
        other_at = min(self._scoring.first, self._acting.first)
        self.now = max(self.now, min(next_stop + self._resolution_s, other_at, until))
        assert self.now < _NEVER, "nothing runs, and a step lacks groups"
        if next_stop < _NEVER:
            self._generating_s += self.now - begun
        self._handle(self.fleet.stopped(self.now))

    def _handle(self, stopped: list[tuple[Rollout, int]]) -> None:
        """Handle stopped rollouts, then answers of environments, then scores, as Player.handle_done."""
        answered, scored = self._acting.due(self.now), self._scoring.due(self.now)
        self._append(stopped)
        for rollout in sorted(answered, key=lambda rollout: (rollout.group_id, rollout.sibling)):
            if rollout.group_id in self._groups:  # dropped meanwhile otherwise
                self._answer(rollout)
        for group_id in sorted(scored):
            group = self.lifecycle.cache.groups[group_id]
            if self.lifecycle.set_rewards(group, [_REWARD] * len(group.rollouts)) is not True:
                del self._groups[group_id]

    def _append(self, stopped: list[tuple[Rollout, int]]) -> None:
        longest = self.config.max_new_tokens
        for rollout, num_tokens in stopped:
            group, sibling = self._groups[rollout.group_id], rollout.sibling
            so_far = rollout.num_tokens + num_tokens
            reason = _PAUSED
            if so_far == group.lengths[sibling]:
                reason = _EOS
            elif so_far == longest:
                reason = _LENGTH
            segments = self._segments.on_stop(rollout, num_tokens, self.engine_version, reason)
            acts = self._turns.num > 1 and environment_is_next(rollout, segments, longest)
            self._on_stop(self.lifecycle.append(rollout, segments, acts=acts))
            if rollout.state is _ACTING:
                self._acting.add(self.now + self._turns.seconds(group.later[sibling]), rollout)

    def _answer(self, rollout: Rollout) -> None:
        """Append the environment's answer: the next turn begins, or the episode ends."""
        group, sibling = self._groups[rollout.group_id], rollout.sibling
        later = group.later[sibling]
        answer = self._turns.answer(rollout, later)
        self._on_stop(self.lifecycle.append(rollout, segments_to_append(rollout, answer, self.config.max_new_tokens)))
        if rollout.state is _PARKED:
            group.lengths[sibling], group.appended[sibling] = later.pop(0), self._turns.num_written

    def _on_stop(self, complete: Group | None) -> None:
        if complete is not None:
            self._scoring.add(self.now + self.plan.reward_s, complete.group_id)


@contextmanager
def _garbage_collection_off() -> Iterator[None]:
    """Disable cyclic garbage collection: nothing here is cyclic, and the search takes a third of the time."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _trained(groups: list[Group], oldest: int, version: int) -> tuple[Counter[int], int]:
    """Return the tokens in the loss by staleness (policy versions from `oldest` on), and the tokens that the trainer
    processes after the prompts, those of environments included."""
    tokens: defaultdict[int, int] = defaultdict(int)  # by policy version
    context = 0
    for group in groups:
        for rollout in group.rollouts:
            for segment in rollout.segments:
                if segment.trainable:
                    tokens[segment.policy_version] += segment.num_tokens
                else:
                    context += segment.num_tokens
    ages = Counter({staleness(v, version): num for v, num in tokens.items() if v >= oldest})
    return ages, context + sum(tokens.values())
