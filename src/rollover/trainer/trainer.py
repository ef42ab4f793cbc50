"""The training step over minibatches: samples with per-token streams in, one more policy version out.

    samples ──estimate, reject, distill, weigh, complete──▶ samples with all streams ──every minibatch, once an epoch──▶
    updates ──forward_backward, optim_step──▶ policy version + 1

Calls only the verbs of a `TrainerBackend`, and knows no algorithm by name: [algorithm] says what a step needs. Owns
which samples form a minibatch and an update (a function of samples, seed and policy version), which log-probs are
computed under which weights and when, what is rejected, and the gradient that is accumulated before the rest of its
step is known.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from rollover.algorithms.token_batch import MAX_LOG_RATIO
from rollover.config import Config, TrainConfig
from rollover.config.backend import BACKENDS
from rollover.engine.protocol import Engine
from rollover.functions import FunctionError, make_named
from rollover.models.devices import pick_device
from rollover.models.load import LoadedModel
from rollover.models.threads import Team
from rollover.track.token_stats import TokenStats
from rollover.trainer.backend import TEACHER, BackendLost, BackendSetup, RunBackend, Stream, TrainerBackend, Version
from rollover.trainer.batch import Batch
from rollover.trainer.custom_backend import CustomBackend
from rollover.trainer.distill import Divergence, teacher_inputs, with_teacher_advantages
from rollover.trainer.objective import (
    STAT_ENTROPY,
    STAT_LOGPROB,
    STAT_WEIGHT,
    Counts,
    Tally,
    rate_scale,
    start_kl,
    step_metrics,
    totals_of,
)
from rollover.trainer.ranks.group import Ranks
from rollover.trainer.reward_kl import RewardKL
from rollover.trainer.streams import (
    SAMPLE_STREAMS,
    STATISTICS,
    STREAMS,
    Minibatches,
    all_rejected_message,
    compared_stream,
    declared_by_loss,
    with_stream,
    with_weights,
    without_rejected,
)
from rollover.trainer.token_advantages import estimate_tokens, estimate_with_critic, with_bootstrap_token
from rollover.types import Sample


@dataclass(frozen=True)
class Update:
    """One optimizer step: the samples whose gradient is computed, and the counts of its whole minibatch.

    `counts` includes the samples that are left out because their advantages are 0.
    """

    samples: list[Sample]
    counts: Counts


class UpdateProgress:
    """Loss tokens of a step's updates that a backend has computed; read from another thread."""

    def __init__(self, backend: RunBackend) -> None:
        self.backend, self._before, self._total = backend, 0, 0

    def begin(self, updates: Sequence[Update]) -> None:
        """Start counting for these updates."""
        self._before = self.backend.trained_tokens or 0
        self._total = sum(int(s.mask.sum()) for update in updates for s in update.samples)

    def tokens(self) -> tuple[int, int]:
        """Return (computed tokens, all tokens); (0, 0) for a backend that does not count them."""
        computed = self.backend.trained_tokens
        return (0, 0) if computed is None else (computed - self._before, self._total)


class TokenStatsCollector:
    """Statistics of each token of a step (track.token_stats), from the passes that the step makes anyway.

    With several epochs the first pass counts. With `Config.tells_tokens` off it collects nothing, and `stats` is empty.
    """

    def __init__(self, config: Config) -> None:
        self.on, self._compared = config.tells_tokens, compared_stream(config.algorithm)
        self.reset()

    def reset(self) -> None:
        """Discard everything collected."""
        self._passes: list[Tally] = []

    def add_pass(self, sums: Tally, *, first: bool) -> None:
        """Add the sums of a pass over a minibatch. `first`: its first pass in this step."""
        if self.on and first:
            self._passes.append(sums)  # tensors stay on the device until the step is done
        else:
            sums.drop_token_stats()

    def stats(self, before: Sequence[Sample], used: Iterable[Sample]) -> dict[str, TokenStats]:
        """Return the statistics of rollouts that had a token in the loss, by rollout id, and reset.

        `before`: the samples of the batch; `used`: the samples as the loss had them, without rejected tokens.
        """
        if not self.on:
            return {}
        columns = {key: values for sums in self._passes for key, values in sums.pop_token_stats().items()}
        by_id = {s.rollout_id: s for s in used}
        found = {s.rollout_id: self._of(s, by_id[s.rollout_id], columns) for s in before if s.mask.any()}
        self.reset()
        return found

    def _of(self, before: Sample, used: Sample, columns: Stream) -> TokenStats:
        mask, behavior_M = before.mask, before.behavior_logprobs[before.mask]
        in_loss_M = used.mask[mask]
        logprobs_M, weights_M, entropies_M = np.full((3, len(behavior_M)), np.nan, np.float32)
        weights_M[~in_loss_M] = 0.0
        if (compared := used.streams.get(self._compared)) is not None:  # algorithm.rejection needed it
            logprobs_M[~in_loss_M] = compared[mask][~in_loss_M]
        if (columns_MK := columns.get(before.rollout_id)) is not None:
            logprobs_M[in_loss_M] = columns_MK[:, STAT_LOGPROB]
            weights_M[in_loss_M] = columns_MK[:, STAT_WEIGHT]
            entropies_M[in_loss_M] = columns_MK[:, STAT_ENTROPY]
        importance_M = np.exp(np.clip(logprobs_M - behavior_M, -MAX_LOG_RATIO, MAX_LOG_RATIO))
        return TokenStats(mask, ~in_loss_M, used.advantages[mask], importance_M, weights_M, entropies_M)


class Trainer:
    """Training steps of one run on `backend`.

    The backend holds everything that a checkpoint needs, except the coefficient of `reward_kl`. Between two steps this
    object holds only what `accumulate` was given, `token_stats` and `trained`. `team`: the CPU threads that the backend
    computes with, shared with the engine (run/pipeline.py).
    """

    def __init__(self, backend: RunBackend, config: Config, team: Team) -> None:
        self.backend, self.team, self.whole_config = backend, team, config
        self.config, self.algorithm = config.train, config.algorithm
        self.distill, self.critic = config.distill, config.critic
        self.declared = declared_by_loss(config)
        self.streams = [name for name, of in STREAMS.items() if of.used(config) or name in self.declared]
        self.seed = config.run.seed  # of the shuffles of further epochs
        self.reward_kl = RewardKL(backend, config.algorithm) if config.algorithm.kl_in_reward else None
        self.token_stats: Mapping[str, TokenStats] = {}  # by rollout id, of the newest step
        self.computed = UpdateProgress(backend)
        self.trained: list[Sample] = []  # as the newest step's loss had them: final advantages, no rejected tokens
        self._stats = TokenStatsCollector(config)
        self.in_update = False  # the weights belong to no version: no checkpoint now
        self._accumulated: dict[str, Sample] = {}  # rollout_id -> sample whose gradient is accumulated
        self._given: dict[str, np.ndarray] = {}  # rollout_id -> advantages that `accumulate` was given
        self._accumulated_sums = Tally()
        self._divergence = Divergence()  # from the teacher, over the tokens scored so far
        self._mean_weight = 1.0  # importance weight of the step, which weights are divided by
        self.seconds: dict[str, float] = {}  # of the newest step, by metric (time/update_s)
        self._seconds: dict[str, float] = {}  # of the current step

    @property
    def policy_version(self) -> int:
        """Training steps completed by the current weights."""
        return self.backend.policy_version

    def train_step(self, batch: Batch) -> dict[str, float]:
        """Train one step: an update of every minibatch, once an epoch, unless train.max_kl ends them.

        Raises `policy_version` by one; returns the step's metrics. Samples whose advantages are all 0 (a group that
        agrees) add nothing to the gradient: they count in the denominators and are not computed, unless
        `train.skip_zero_advantage` is off or the algorithm needs them. ValueError, before anything changes, if
        algorithm.rejection leaves no token.
        """
        assert batch.samples, "a training step needs at least one sample"
        samples = self._estimate(batch)
        assert all(np.array_equal(self._given.get(s.rollout_id, s.advantages), s.advantages) for s in samples)
        samples = [self._accumulated.get(s.rollout_id, s) for s in samples]
        minibatches = split_groups(samples, self.config.minibatches_per_step)
        minibatches = self._map_fresh(minibatches, self._prepare, lambda s: True)
        rejected = batch.num_loss_tokens - sum(s.num_loss_tokens for part in minibatches for s in part)
        if rejected and rejected == batch.num_loss_tokens:
            why = all_rejected_message(self.algorithm, rejected)
            raise ValueError(f"step {self.policy_version + 1} has no token in its loss: {why}")
        minibatches = self._map_fresh(minibatches, self._complete, self._is_computed)
        draws = f"{self.seed}/minibatches/{self.policy_version}"
        updates = updates_of(minibatches, self.config, draws, self._is_computed)
        first_epoch = updates[: len(minibatches)]
        skipped_tokens = sum(u.counts.tokens - Counts.from_samples(u.samples).tokens for u in first_epoch)
        if self._accumulated:
            (only,) = updates
            fresh = [s for s in only.samples if s.rollout_id not in self._accumulated]
            updates = [Update(fresh, replace(only.counts, divided=False))]
        metrics = self._update(updates)
        self.trained = [s for part in minibatches for s in part]
        self.token_stats = self._stats.stats(batch.samples, self.trained)
        metrics["train/zero_advantage_tokens"] = float(skipped_tokens)
        if self.reward_kl is not None and batch.penalties is not None:
            metrics |= self.reward_kl.after_step(batch.penalties)
            for part, seconds in batch.penalties.seconds.items():
                self._add_seconds(part, seconds)
        if self.algorithm.rejection:
            metrics["off_policy/rejected_share"] = rejected / max(1, batch.num_loss_tokens)
        if self.algorithm.correction_normalize:
            metrics["importance/normalizer"] = self._mean_weight
        if self.distill.teacher:
            metrics |= self._divergence.metrics()
            self._divergence = Divergence()
        self.seconds, self._seconds = self._seconds, {}
        return metrics

    def accumulate(self, samples: list[Sample]) -> None:
        """Add the gradient of whole groups before the rest of their step is known (`train_step`)."""
        assert self.config.updates_per_step == 1 and not self.algorithm.advantage_traits.over_tokens
        given = {s.rollout_id: s.advantages for s in samples}
        (samples,) = self._complete(self._prepare([samples]))
        counts = replace(Counts.from_samples(samples), divided=False)
        with self.timed("update"):
            sums = self.backend.forward_backward(self._for_update(samples, 0), counts)
        self._accumulated_sums.absorb(sums)
        self._accumulated |= {s.rollout_id: s for s in samples}
        self._given |= given

    def discard_accumulated(self) -> None:
        """Discard what `accumulate` added: its step is not trained now."""
        self.backend.forget_gradients()
        self._reset_accumulated()
        self._stats.reset()
        self._divergence, self._seconds = Divergence(), {}

    def close(self) -> None:
        """Close the backend."""
        self.backend.close()

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Count the seconds of a block as time/<part>_s."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._add_seconds(part, time.perf_counter() - started)

    def logprobs(self, minibatches: Minibatches, version: Version | None = None, timed_as: str = "logprobs") -> Stream:
        """Return the log-probs of the loss tokens under the weights of `version`.

        They are computed minibatch by minibatch, packed as in training.
        """
        with self.timed(timed_as):
            return {k: v for part in minibatches for k, v in self.backend.compute_logprobs(part, version).items()}

    # Private

    def _add_seconds(self, part: str, seconds: float) -> None:
        key = f"time/{part}_s"
        self._seconds[key] = self._seconds.get(key, 0.0) + seconds

    def _reset_accumulated(self) -> None:
        self._accumulated, self._given, self._accumulated_sums = {}, {}, Tally()

    def _is_computed(self, sample: Sample) -> bool:
        """Return whether the sample may add to the gradient."""
        skips = self.config.skip_zero_advantage and not self.algorithm.needs_every_token
        return not skips or bool(sample.advantages[sample.mask].any())

    def _update(self, planned: list[Update]) -> dict[str, float]:
        """Compute the gradient and make the optimizer step of each update; return the step's metrics."""
        tallies: list[Tally] = []
        updates: list[dict[str, float]] = []
        largest_kl = None
        self.computed.begin(planned)
        for index, update in enumerate(planned):
            part, count = update.samples, update.counts
            sums, divisor = Tally(), 1.0
            if not count.divided:
                # `accumulate` added a part: the divisor is known only now.
                divisor = max(1.0, replace(count, divided=True).divisor(self.algorithm.aggregation))
                sums = self._accumulated_sums
            if part or count.divided:
                with self.timed("update"):
                    of_part = self.backend.forward_backward(self._for_update(part, index), count)
                sums.absorb(of_part)
            if not count.divided:
                sums.divide("sum/loss", divisor)
                self._reset_accumulated()
            self.in_update = True
            if index and self.config.max_kl:
                kl = start_kl(sums.totals())
                largest_kl = max(kl, largest_kl or 0.0)
                if not kl <= self.config.max_kl:
                    self._skip_updates(len(planned) - index)
                    break
            rate = rate_scale(sums.totals()) if self.algorithm.ess_step_scaling else 1.0
            last = index == len(planned) - 1
            with self.timed("update"):
                updates.append(self.backend.optim_step(rate, divisor=divisor, ends_step=last))
            if (of_critic := updates[-1].pop("time/critic_s", None)) is not None:
                self._add_seconds("critic", of_critic)
            self._stats.add_pass(sums, first=index < len(planned) // self.config.epochs_per_step)
            tallies.append(sums)
        self.in_update = False
        of_kl = {} if largest_kl is None else {"kl/step_start": largest_kl}
        return step_metrics(totals_of(tallies), updates) | of_kl

    def _skip_updates(self, left: int) -> None:
        """Skip the last `left` updates of the step.

        They still count in the schedule of the learning rate: without a gradient an optimizer step changes no weight.
        """
        self.backend.forget_gradients()
        for index in range(left):
            self.backend.optim_step(0.0, ends_step=index == left - 1)

    def _estimate(self, batch: Batch) -> list[Sample]:
        """Add STATISTICS if the step needs them, and estimate advantages per token if algorithm.advantage does.

        With a critic the samples then have the streams "values" and "returns".
        """
        samples = batch.samples
        if self.algorithm.needs_statistics:
            with self.timed("logprobs"):
                found = self.backend.compute_statistics(samples)
            for column, name in enumerate(STATISTICS):
                samples = with_stream(samples, name, {k: values[:, column] for k, values in found.items()})
        if self.algorithm.needs_critic:
            with self.timed("values"):
                values = self.backend.compute_values(
                    with_bootstrap_token(samples) if self.critic.bootstrap_truncated else samples
                )
            return estimate_with_critic(self.algorithm, samples, values, batch.credited.roles)
        if self.algorithm.advantage_traits.over_tokens:
            return estimate_tokens(self.algorithm, samples, batch.credited.roles)
        return samples

    def _map_fresh(
        self,
        minibatches: Minibatches,
        change: Callable[[Minibatches], Minibatches],
        concerns: Callable[[Sample], bool],
    ) -> list[list[Sample]]:
        """Apply `change` to the samples that satisfy `concerns` and are not yet accumulated."""
        fresh = [[s for s in part if s.rollout_id not in self._accumulated and concerns(s)] for part in minibatches]
        made = {s.rollout_id: s for part in change(fresh) for s in part}
        return [[made.get(s.rollout_id, s) for s in part] for part in minibatches]

    def _prepare(self, minibatches: Minibatches) -> Minibatches:
        """Reject tokens, add a teacher's advantages and the weights: minibatches as the loss counts them."""
        return self._weigh(self._distill(self._reject(minibatches)))

    def _reject(self, minibatches: Minibatches) -> Minibatches:
        """Remove the tokens that algorithm.rejection rejects.

        Needs the log-probs at the start of the step of all minibatches, the first one included.
        """
        if not self.algorithm.rejection:
            return minibatches
        compared = self._with_compared(minibatches)
        return [[without_rejected(self.algorithm, s, self.policy_version) for s in part] for part in compared]

    def _distill(self, minibatches: Minibatches) -> Minibatches:
        """Add the advantages that a teacher gives ([distill]).

        Runs after the rejection: a rejected token must not be in the discounted sum of an earlier one. The policy that
        is compared with the teacher is that of the step's start.
        """
        if not self.distill.teacher:
            return minibatches
        policy = "proximal_logprobs" if self.algorithm.proximal_policy == "step_start" else "start_logprobs"
        minibatches = self._with_stream(policy, minibatches)
        taught = [teacher_inputs(self.distill, part) for part in minibatches]
        found = self.logprobs(taught, TEACHER, "teacher")
        ids = {s.rollout_id for part in taught for s in part}
        scored = [
            [s if s.rollout_id not in ids else with_stream([s], "teacher_logprobs", found)[0] for s in part]
            for part in minibatches
        ]
        return [with_teacher_advantages(self.distill, part, policy, self._divergence) for part in scored]

    def _weigh(self, minibatches: Minibatches) -> Minibatches:
        if self.algorithm.correction_normalize:
            minibatches = self._with_compared(minibatches)
        minibatches, self._mean_weight = with_weights(self.algorithm, minibatches, self.policy_version)
        return minibatches

    def _complete(self, minibatches: Minibatches) -> Minibatches:
        """Add the other streams that the loss reads, all under the weights of the step's start or kept ones."""
        epochs = self.config.epochs_per_step
        for name in self.streams:
            # The first update computes a current stream in its own forward pass: only later updates read it.
            skip = 1 if self._is_current(name) and epochs == 1 else 0
            if not (self._is_current(name) and len(minibatches) * epochs == 1):
                minibatches = [*minibatches[:skip], *self._with_stream(name, minibatches[skip:])]
        return minibatches

    def _with_stream(self, name: str, minibatches: Minibatches) -> Minibatches:
        """Add the stream, if the samples lack it and this step computes it."""
        compute = STREAMS[name].compute
        samples = [s for part in minibatches for s in part]
        if compute is None or (samples and all(name in s.streams for s in samples)):
            return minibatches
        found = compute(self, minibatches)
        return [with_stream(part, name, found) for part in minibatches]

    def _with_compared(self, minibatches: Minibatches) -> Minibatches:
        """Add the log-probs that rejection and weights compare with."""
        name, known = compared_stream(self.algorithm), STATISTICS[0]
        if self.algorithm.needs_statistics and self.algorithm.proximal_policy != "snapshot":
            return [[s.with_streams(**{name: s.streams.get(name, s.streams[known])}) for s in p] for p in minibatches]
        return self._with_stream(name, minibatches)

    def _is_current(self, name: str) -> bool:
        """Return whether the first update computes the stream anyway, and the loss does not declare it."""
        return STREAMS[name].is_current(self.whole_config) and name not in self.declared

    def _for_update(self, samples: Sequence[Sample], index: int) -> list[Sample]:
        """Return the samples with only the streams that the loss of the update at `index` reads."""
        names = {*SAMPLE_STREAMS, *(name for name in self.streams if index or not self._is_current(name))}
        return [s.only(names) for s in samples]


def split_groups(samples: list[Sample], parts: int, draw: random.Random | None = None) -> list[list[Sample]]:
    """Split samples into `parts` minibatches of whole groups, in order, with about as many groups each.

    `draw`: shuffles the groups first; the samples of a group stay in order.
    """
    ids = list(dict.fromkeys(s.group_id for s in samples))
    if draw is not None:
        draw.shuffle(ids)
    chunks = [set(c.tolist()) for c in np.array_split(np.asarray(ids), parts) if len(c)]
    return [[s for s in samples if s.group_id in chunk] for chunk in chunks]


def updates_of(
    minibatches: list[list[Sample]], config: TrainConfig, key: str, computed: Callable[[Sample], bool]
) -> list[Update]:
    """Return the updates of a step, whose first epoch is over `minibatches`.

    `key`: seed of the shuffles of further epochs. `computed`: whether a sample has a gradient.
    """
    return [
        Update([s for s in part if computed(s)], Counts.from_samples(part))
        for part in _of_all_epochs(minibatches, config, key)
    ]


def _of_all_epochs(minibatches: list[list[Sample]], config: TrainConfig, key: str) -> Iterator[list[Sample]]:
    yield from minibatches
    samples = [s for part in minibatches for s in part]
    for epoch in range(1, config.epochs_per_step):
        if config.reshuffle and len(minibatches) > 1:
            yield from split_groups(samples, len(minibatches), random.Random(f"{key}/{epoch}"))
        else:
            yield from minibatches


def build_trainer(
    config: Config,
    loaded: LoadedModel,
    engine: Engine | None = None,
    logs: Path | None = None,
    make_ranks: Callable[[], Ranks] | None = None,
) -> Trainer:
    """Build the trainer, on the backend that backend.type names, with the model `loaded` (float32).

    `engine`: what the backend may sample with. `logs`, `make_ranks`: see BackendSetup. ValueError if a custom function
    returns no backend; BackendLost if the backend fails while it starts.
    """
    team = Team.from_config(config.run, pick_device(config.model.device))
    setup = BackendSetup(config, loaded, team, engine, logs, make_ranks)
    kind = config.backend.type
    try:
        backend = make_named("backend.type", kind, BACKENDS, setup, TrainerBackend, "a trainer's backend")
    except FunctionError as error:
        if isinstance(error.__cause__, BackendLost):
            raise error.__cause__ from None
        raise
    if kind not in BACKENDS:
        backend = CustomBackend(backend, kind)
    return Trainer(backend, config, team)
