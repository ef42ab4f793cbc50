"""The training step over minibatches: samples with per-token streams in, one more policy version out.

    samples ──estimate, reject, distill, weigh, complete──▶ samples with all streams ──every minibatch, once an epoch──▶
    updates ──forward_backward, optim_step──▶ policy version + 1

It calls nothing but the verbs of a `TrainerBackend`, and knows no algorithm by name: what a step needs is asked of
[algorithm]. Owns which samples form a minibatch and an update (of the same samples, seed and policy version always the
same ones), which log-probs are computed under which weights and when, what is rejected, and the gradient that is
accumulated before the rest of its step is known.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from rollover.config import Config, TrainConfig
from rollover.models.threads import Team
from rollover.track.token_stats import TokenStats
from rollover.trainer.backend import TEACHER, Stream, TrainerBackend, Version
from rollover.trainer.batch import Batch
from rollover.trainer.critic import beyond, estimate
from rollover.trainer.distill import Divergence, distilled, teachers
from rollover.trainer.objective import Counts, rate_scale, start_kl, step_metrics
from rollover.trainer.packing import split_groups
from rollover.trainer.reward_kl import RewardKL
from rollover.trainer.streams import GIVEN, STATISTICS, STREAMS, Minibatches, declared_by_loss, with_stream
from rollover.trainer.tally import Tally, totals_of
from rollover.trainer.token_estimates import estimate_tokens
from rollover.trainer.token_stats import TokenWatch
from rollover.trainer.token_weights import compared_stream, weighed, why_none_is_left, without_rejected
from rollover.types import Sample


@dataclass(frozen=True)
class Update:
    """`samples`: those whose gradient is computed. `counts`: of the whole minibatch, with what is left out of them."""

    samples: list[Sample]
    counts: Counts


class Computed:
    """How many loss tokens of a step's updates a backend has computed, for who watches from another thread."""

    def __init__(self, backend: object) -> None:
        self.backend, self._before, self._total = backend, 0, 0

    def begin(self, updates: Sequence[Update]) -> None:
        """These are computed now."""
        self._before = self._count()
        self._total = sum(int(s.mask.sum()) for update in updates for s in update.samples)

    def tokens(self) -> tuple[int, int]:
        """(those that are computed, all of them); (0, 0) of a backend without `trained_tokens`."""
        return (self._count() - self._before, self._total) if hasattr(self.backend, "trained_tokens") else (0, 0)

    def _count(self) -> int:
        return getattr(self.backend, "trained_tokens", 0)


class Trainer:
    """Steps of one run on `backend`, which holds all that a checkpoint needs, but for the coefficient of `reward_kl`:
    between two steps nothing else is held here than what `accumulate` was given, `token_stats` and `trained`.

    `team`: the CPU threads that the backend computes with, shared with the engine (run/pipeline.py).
    """

    def __init__(self, backend: TrainerBackend, config: Config, team: Team) -> None:
        self.backend, self.team, self.whole_config = backend, team, config
        self.config, self.algorithm = config.train, config.algorithm
        self.distill, self.critic = config.distill, config.critic
        self.declared = declared_by_loss(config)
        self.streams = [name for name, of in STREAMS.items() if of.used(config) or name in self.declared]
        self.seed = config.run.seed  # by which the minibatches of further epochs are drawn
        self.reward_kl = RewardKL(backend, config.algorithm) if config.algorithm.kl_in_reward else None
        self.token_stats: Mapping[str, TokenStats] = {}  # rollout_id -> of its tokens, in the newest step
        self.computed = Computed(backend)
        self.trained: list[Sample] = []  # as the newest step's loss had them: final advantages, no rejected tokens
        self._watch = TokenWatch(config)
        self.in_update = False  # from a step's first change of the weights to its end: there is no state to go on from
        self._accumulated: dict[str, Sample] = {}  # rollout_id -> sample of the step to come whose gradient is there
        self._given: dict[str, np.ndarray] = {}  # rollout_id -> the advantages that those samples came with
        self._accumulated_sums = Tally()
        self._divergence = Divergence()  # from the teacher, over the tokens of the step to come that it has scored
        self._mean_weight = 1.0  # of the step to come, where its weights are divided by it
        self.seconds: dict[str, float] = {}  # that parts of the newest step took, by their metrics (time/update_s)
        self._seconds: dict[str, float] = {}  # of the step to come, so far

    @property
    def policy_version(self) -> int:
        """Training steps completed by the current weights."""
        return self.backend.policy_version

    def train_step(self, batch: Batch) -> dict[str, float]:
        """One training step: an update of every minibatch, once an epoch, unless train.max_kl ends them. Raises
        `policy_version` by one; returns its metrics.

        Samples whose advantages are all 0 (a group that agrees) add nothing to the gradient: they count in the
        denominators and are not computed, unless `train.skip_zero_advantage` is off or the algorithm needs them.
        ValueError, before anything changes, where algorithm.rejection leaves no token.
        """
        assert batch.samples, "a training step needs at least one sample"
        samples = self._estimate(batch)
        assert all(np.array_equal(self._given.get(s.rollout_id, s.advantages), s.advantages) for s in samples)
        samples = [self._accumulated.get(s.rollout_id, s) for s in samples]
        minibatches = split_groups(samples, self.config.minibatches_per_step)
        minibatches = self._changed(minibatches, self._prepare, lambda s: True)
        rejected = batch.num_loss_tokens - sum(s.num_loss_tokens for part in minibatches for s in part)
        if rejected and rejected == batch.num_loss_tokens:
            why = why_none_is_left(self.algorithm, rejected)
            raise ValueError(f"step {self.policy_version + 1} has no token in its loss: {why}")
        minibatches = self._changed(minibatches, self._complete, self._is_computed)
        draws = f"{self.seed}/minibatches/{self.policy_version}"
        updates = updates_of(minibatches, self.config, draws, self._is_computed)
        first_epoch = updates[: len(minibatches)]
        skipped_tokens = sum(u.counts.tokens - Counts.of(u.samples).tokens for u in first_epoch)
        if self._accumulated:
            (only,) = updates
            fresh = [s for s in only.samples if s.rollout_id not in self._accumulated]
            updates = [Update(fresh, replace(only.counts, divided=False))]
        metrics = self._update(updates)
        self.trained = [s for part in minibatches for s in part]
        self.token_stats = self._watch.stats(batch.samples, self.trained)
        metrics["train/zero_advantage_tokens"] = float(skipped_tokens)
        if self.reward_kl is not None and batch.penalties is not None:
            metrics |= self.reward_kl.after_step(batch.penalties)
            for part, seconds in batch.penalties.seconds.items():
                self._count(part, seconds)
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
        """Add the gradient of whole groups of the step to come, before the rest of it is known (`train_step`)."""
        assert self.config.updates_per_step == 1 and not self.algorithm.advantage_traits.over_tokens
        given = {s.rollout_id: s.advantages for s in samples}
        (samples,) = self._complete(self._prepare([samples]))
        counts = replace(Counts.of(samples), divided=False)
        with self.timed("update"):
            sums = self.backend.forward_backward(self._for_update(samples, 0), counts)
        self._accumulated_sums.absorb(sums)
        self._accumulated |= {s.rollout_id: s for s in samples}
        self._given |= given

    def forget_accumulated(self) -> None:
        """The step that `accumulate` was for is not trained now."""
        self.backend.forget_gradients()
        self._forget_what_was_accumulated()
        self._watch.forget()
        self._divergence, self._seconds = Divergence(), {}

    def close(self) -> None:
        """End what the backend runs, if it has a `close`."""
        getattr(self.backend, "close", lambda: None)()

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Count the seconds of a block as time/<part>_s."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._count(part, time.perf_counter() - started)

    def logprobs(self, minibatches: Minibatches, version: Version | None = None, timed_as: str = "logprobs") -> Stream:
        """Log-probs of the loss tokens under the weights of `version`. Minibatch by minibatch, to be packed as they
        will be in training."""
        with self.timed(timed_as):
            return {k: v for part in minibatches for k, v in self.backend.compute_logprobs(part, version).items()}

    # Private

    def _count(self, part: str, seconds: float) -> None:
        key = f"time/{part}_s"
        self._seconds[key] = self._seconds.get(key, 0.0) + seconds

    def _forget_what_was_accumulated(self) -> None:
        self._accumulated, self._given, self._accumulated_sums = {}, {}, Tally()

    def _is_computed(self, sample: Sample) -> bool:
        """Whether it adds to the gradient, or may."""
        skips = self.config.skip_zero_advantage and not self.algorithm.needs_every_token
        return not skips or bool(sample.advantages[sample.mask].any())

    def _update(self, planned: list[Update]) -> dict[str, float]:
        """Gradient and optimizer step of each planned update. Returns the metrics of the step."""
        tallies: list[Tally] = []
        updates: list[dict[str, float]] = []
        largest_kl = None
        self.computed.begin(planned)
        for index, update in enumerate(planned):
            part, count = update.samples, update.counts
            sums, divisor = Tally(), 1.0
            if not count.divided:
                # `accumulate` had some of it: only now is known what to divide by.
                divisor = max(1.0, replace(count, divided=True).divisor(self.algorithm.aggregation))
                sums = self._accumulated_sums
            if part or count.divided:
                with self.timed("update"):
                    of_part = self.backend.forward_backward(self._for_update(part, index), count)
                sums.absorb(of_part)
            if not count.divided:
                sums.divide("sum/loss", divisor)
                self._forget_what_was_accumulated()
            self.in_update = True
            if index and self.config.max_kl:
                kl = start_kl(sums.totals())
                largest_kl = max(kl, largest_kl or 0.0)
                if not kl <= self.config.max_kl:
                    self._end_step(len(planned) - index)
                    break
            rate = rate_scale(sums.totals()) if self.algorithm.ess_step_scaling else 1.0
            last = index == len(planned) - 1
            with self.timed("update"):
                updates.append(self.backend.optim_step(rate, divisor=divisor, ends_step=last))
            if (of_critic := updates[-1].pop("time/critic_s", None)) is not None:
                self._count("critic", of_critic)
            self._watch.passed(sums, first=index < len(planned) // self.config.epochs_per_step)
            tallies.append(sums)
        self.in_update = False
        of_kl = {} if largest_kl is None else {"kl/step_start": largest_kl}
        return step_metrics(totals_of(tallies), updates) | of_kl

    def _end_step(self, left: int) -> None:
        """`left` updates of the step are not made. In the schedule of the learning rate they count: without a gradient
        an optimizer step changes no weight."""
        self.backend.forget_gradients()
        for index in range(left):
            self.backend.optim_step(0.0, ends_step=index == left - 1)

    def _estimate(self, batch: Batch) -> list[Sample]:
        """The samples with STATISTICS where the step needs these, and with advantages of tokens where
        algorithm.advantage estimates them: by a critic, whose values and returns they then have, or without."""
        samples = batch.samples
        if self.algorithm.needs_statistics:
            with self.timed("logprobs"):
                found = self.backend.compute_statistics(samples)
            for column, name in enumerate(STATISTICS):
                samples = with_stream(samples, name, {k: values[:, column] for k, values in found.items()})
        if self.algorithm.needs_critic:
            with self.timed("values"):
                values = self.backend.compute_values(beyond(samples) if self.critic.bootstrap_truncated else samples)
            return estimate(self.algorithm, samples, values, batch.credited.roles)
        if self.algorithm.advantage_traits.over_tokens:
            return estimate_tokens(self.algorithm, samples, batch.credited.roles)
        return samples

    def _changed(
        self,
        minibatches: Minibatches,
        change: Callable[[Minibatches], Minibatches],
        concerns: Callable[[Sample], bool],
    ) -> list[list[Sample]]:
        """The minibatches with those samples changed that it `concerns`, but for those whose gradient is there."""
        fresh = [[s for s in part if s.rollout_id not in self._accumulated and concerns(s)] for part in minibatches]
        made = {s.rollout_id: s for part in change(fresh) for s in part}
        return [[made.get(s.rollout_id, s) for s in part] for part in minibatches]

    def _prepare(self, minibatches: Minibatches) -> Minibatches:
        """The minibatches as the loss counts them: without what is rejected, with final advantages and weights."""
        return self._weigh(self._distill(self._reject(minibatches)))

    def _reject(self, minibatches: Minibatches) -> Minibatches:
        """Without the tokens that algorithm.rejection leaves out. Needs the log-probs at the start of the step of all
        minibatches, the first one included."""
        if not self.algorithm.rejection:
            return minibatches
        looked_at = self._compared(minibatches)
        return [[without_rejected(self.algorithm, s, self.policy_version) for s in part] for part in looked_at]

    def _distill(self, minibatches: Minibatches) -> Minibatches:
        """With the advantages that a teacher gives, as [distill] says. After the rejection: what is rejected is no
        token that an earlier one answers for. The policy that it is compared with is that of the step's start."""
        if not self.distill.teacher:
            return minibatches
        policy = "proximal_logprobs" if self.algorithm.proximal_policy == "step_start" else "start_logprobs"
        minibatches = self._with(policy, minibatches)
        taught = [teachers(self.distill, part) for part in minibatches]
        found = self.logprobs(taught, TEACHER, "teacher")
        ids = {s.rollout_id for part in taught for s in part}
        scored = [
            [s if s.rollout_id not in ids else with_stream([s], "teacher_logprobs", found)[0] for s in part]
            for part in minibatches
        ]
        return [distilled(self.distill, part, policy, self._divergence) for part in scored]

    def _weigh(self, minibatches: Minibatches) -> Minibatches:
        """With the weights of tokens (token_weights.py)."""
        if self.algorithm.correction_normalize:
            minibatches = self._compared(minibatches)
        minibatches, self._mean_weight = weighed(self.algorithm, minibatches, self.policy_version)
        return minibatches

    def _complete(self, minibatches: Minibatches) -> Minibatches:
        """With the other streams that the loss reads, all at the weights of the step's start, or at kept ones."""
        epochs = self.config.epochs_per_step
        for name in self.streams:
            # What is current in the first update is computed for those alone that come in a later one.
            skip = 1 if self._is_current(name) and epochs == 1 else 0
            if not (self._is_current(name) and len(minibatches) * epochs == 1):
                minibatches = [*minibatches[:skip], *self._with(name, minibatches[skip:])]
        return minibatches

    def _with(self, name: str, minibatches: Minibatches) -> Minibatches:
        """With that stream, if they lack it and it is computed here."""
        compute = STREAMS[name].compute
        samples = [s for part in minibatches for s in part]
        if compute is None or (samples and all(name in s.streams for s in samples)):
            return minibatches
        found = compute(self, minibatches)
        return [with_stream(part, name, found) for part in minibatches]

    def _compared(self, minibatches: Minibatches) -> Minibatches:
        """With the log-probs that rejection and weights look at."""
        name, known = compared_stream(self.algorithm), STATISTICS[0]
        if self.algorithm.needs_statistics and self.algorithm.proximal_policy != "snapshot":
            return [[s.with_streams(**{name: s.streams.get(name, s.streams[known])}) for s in p] for p in minibatches]
        return self._with(name, minibatches)

    def _is_current(self, name: str) -> bool:
        """Whether the stream is what the first update computes anyway, and nobody asks for it there."""
        return STREAMS[name].is_current(self.whole_config) and name not in self.declared

    def _for_update(self, samples: Sequence[Sample], index: int) -> list[Sample]:
        """The samples with the streams that the loss of the update of that index reads. The first one meets the weights
        of the step's start."""
        names = {*GIVEN, *(name for name in self.streams if index or not self._is_current(name))}
        return [s.only(names) for s in samples]


def updates_of(
    minibatches: list[list[Sample]], config: TrainConfig, key: str, computed: Callable[[Sample], bool]
) -> list[Update]:
    """The updates of a step, whose first epoch is of `minibatches`. `key`: what the draws of the others depend on.
    `computed`: whether a sample has a gradient."""
    return [
        Update([s for s in part if computed(s)], Counts.of(part)) for part in _of_all_epochs(minibatches, config, key)
    ]


def _of_all_epochs(minibatches: list[list[Sample]], config: TrainConfig, key: str) -> Iterator[list[Sample]]:
    yield from minibatches
    samples = [s for part in minibatches for s in part]
    for epoch in range(1, config.epochs_per_step):
        if config.reshuffle and len(minibatches) > 1:
            yield from split_groups(samples, len(minibatches), random.Random(f"{key}/{epoch}"))
        else:
            yield from minibatches
