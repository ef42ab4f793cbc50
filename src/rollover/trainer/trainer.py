"""The training step over minibatches: samples with per-token streams in, one more policy version out.

It calls nothing but the verbs of a `TrainerBackend`, and knows no algorithm by name: what a step needs is asked of
[algorithm]. Owns which samples form a minibatch, which log-probs are computed under which weights and when, what is
rejected, and the gradient that is accumulated before the rest of its step is known.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from rollover.config import AlgorithmConfig, Config
from rollover.models.team import Team
from rollover.track.token_stats import TokenStats
from rollover.trainer.backend import TEACHER, Stream, TrainerBackend, Version, reference_of
from rollover.trainer.batch import Batch
from rollover.trainer.critic import beyond, estimate
from rollover.trainer.distill import Divergence, distilled, teachers
from rollover.trainer.objective import Counts, rate_scale, start_kl, step_metrics
from rollover.trainer.packing import split_groups
from rollover.trainer.reward_kl import RewardKL
from rollover.trainer.tally import Tally, totals_of
from rollover.trainer.token_estimates import LOGPROB, STATISTICS, estimate_tokens, sampling_logprobs
from rollover.trainer.token_stats import TokenWatch
from rollover.trainer.token_weights import rejections, restricted, rewritten, weights_of_step, why_none_is_left
from rollover.trainer.updates import Computed, Update, updates_of
from rollover.types import Sample


class Trainer:
    """Steps of one run on `backend`, which holds all that a checkpoint needs, but for the coefficient of `reward_kl`:
    between two steps nothing else is held here than what `accumulate` was given, `token_stats` and `trained`.

    `team`: the CPU threads that the backend computes with, shared with the engine (run/overlap.py).
    """

    def __init__(self, backend: TrainerBackend, config: Config, team: Team) -> None:
        self.backend, self.team, self.config, self.algorithm = backend, team, config.train, config.algorithm
        self.distill, self.critic = config.distill, config.critic
        self.seed = config.run.seed  # by which the minibatches of further epochs are drawn
        self.reward_kl = RewardKL(backend, config.algorithm) if config.algorithm.kl_in_reward else None
        self.token_stats: Mapping[str, TokenStats] = {}  # rollout_id -> of its tokens, in the newest step
        self.computed = Computed(backend)
        self.trained: list[Sample] = []  # as the newest step's loss had them: final advantages, no rejected tokens
        self._watch = TokenWatch(config.tells_tokens)
        self.in_update = False  # from a step's first change of the weights to its end: there is no state to go on from
        self._accumulated: dict[str, Sample] = {}  # rollout_id -> sample of the step to come whose gradient is there
        self._given: dict[str, np.ndarray] = {}  # rollout_id -> the advantages that those samples came with
        self._accumulated_sums = Tally()
        self._divergence = Divergence()  # from the teacher, over the tokens of the step to come that it has scored
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
        samples, known = self._estimate(batch)
        assert all(np.array_equal(self._given.get(s.rollout_id, s.advantages), s.advantages) for s in samples)
        minibatches = split_groups(samples, self.config.minibatches_per_step)
        minibatches, known = self._reject(minibatches, known)
        minibatches, known = self._distill(minibatches, known)
        known, mean_of_weights = self._weigh(minibatches, known)
        rejected = batch.num_loss_tokens - sum(Counts.of(part).tokens for part in minibatches)
        if rejected and rejected == batch.num_loss_tokens:
            why = why_none_is_left(self.algorithm, rejected)
            raise ValueError(f"step {self.policy_version + 1} has no token in its loss: {why}")
        draws = f"{self.seed}/minibatches/{self.policy_version}"
        updates = updates_of(minibatches, self.config, draws, self._is_computed)
        first_epoch = updates[: len(minibatches)]
        skipped_tokens = sum(u.counts.tokens - Counts.of(u.samples).tokens for u in first_epoch)
        if self._accumulated:
            (only,) = updates
            fresh = [s for s in only.samples if s.rollout_id not in self._accumulated]
            updates = first_epoch = [Update(fresh, replace(only.counts, divided=False))]
        known |= self._known([u.samples for u in first_epoch], known)
        metrics = self._update(updates, known)
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
            metrics["importance/normalizer"] = mean_of_weights
        if self.distill.teacher:
            metrics |= self._divergence.metrics()
            self._divergence = Divergence()
        self.seconds, self._seconds = self._seconds, {}
        return metrics

    def accumulate(self, samples: list[Sample]) -> None:
        """Add the gradient of whole groups of the step to come, before the rest of it is known (`train_step`)."""
        assert self.config.updates_per_step == 1 and not self.algorithm.advantage_traits.over_tokens
        given = {s.rollout_id: s.advantages for s in samples}
        ((samples,), known) = self._reject([samples], {})
        ((samples,), known) = self._distill([samples], known)
        counts = replace(Counts.of(samples), divided=False)
        known |= self._known([samples], known)
        with self._timed("update"):
            sums = self.backend.forward_backward(samples, counts, _for_update(self.algorithm, 0, known))
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

    # Private

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        """Count the seconds of a block as time/<part>_s."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._count(part, time.perf_counter() - started)

    def _count(self, part: str, seconds: float) -> None:
        key = f"time/{part}_s"
        self._seconds[key] = self._seconds.get(key, 0.0) + seconds

    def _forget_what_was_accumulated(self) -> None:
        self._accumulated, self._given, self._accumulated_sums = {}, {}, Tally()

    def _is_computed(self, sample: Sample) -> bool:
        """Whether it adds to the gradient, or may."""
        skips = self.config.skip_zero_advantage and not self.algorithm.needs_every_token
        return not skips or bool(sample.advantages[sample.mask].any())

    def _update(self, planned: list[Update], known: Mapping[str, Stream]) -> dict[str, float]:
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
                with self._timed("update"):
                    of_part = self.backend.forward_backward(part, count, _for_update(self.algorithm, index, known))
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
            with self._timed("update"):
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

    def _estimate(self, batch: Batch) -> tuple[list[Sample], dict[str, Stream]]:
        """With a critic: the samples with its advantages, its values and the returns. Else the samples, with advantages
        of tokens where algorithm.advantage estimates them, and the statistics of these that the step needs."""
        samples = batch.samples
        known: dict[str, Stream] = {}
        if self.algorithm.needs_statistics:
            with self._timed("logprobs"):
                known[STATISTICS] = self.backend.compute_statistics(samples)
        if not self.algorithm.needs_critic:
            if self.algorithm.advantage_traits.over_tokens:
                samples = estimate_tokens(self.algorithm, samples, known.get(STATISTICS, {}), batch.roles)
            return samples, known
        with self._timed("values"):
            values = self.backend.compute_values(beyond(samples) if self.critic.bootstrap_truncated else samples)
        samples, of_critic = estimate(self.algorithm, samples, values, batch.roles)
        return samples, known | of_critic

    def _reject(
        self, minibatches: list[list[Sample]], known: dict[str, Stream]
    ) -> tuple[list[list[Sample]], dict[str, Stream]]:
        """Minibatches and streams without what algorithm.rejection leaves out, and the proximal stream it looked at.

        Needs the log-probs at the start of the step of all minibatches, the first one included.
        """
        if not self.algorithm.rejection:
            return minibatches, known
        fresh = [[s for s in part if s.rollout_id not in self._accumulated] for part in minibatches]
        start, known = self._start(fresh, known)
        self._watch.looked_at(start)
        kept = rejections(self.algorithm, [s for part in fresh for s in part], start, self.policy_version)
        left = [[self._accumulated.get(s.rollout_id) or rewritten(s, kept) for s in part] for part in minibatches]
        return left, {name: restricted(stream, kept) for name, stream in known.items()}

    def _start(self, minibatches: list[list[Sample]], known: dict[str, Stream]) -> tuple[Stream, dict[str, Stream]]:
        """Log-probs at the start of the step (with proximal = "snapshot" under the weights that sampled), and the
        streams with these, where they are the proximal ones."""
        policy = self.algorithm.proximal_policy
        if "proximal" in known:
            return known["proximal"], known
        if policy == "snapshot":
            with self._timed("logprobs"):
                start = sampling_logprobs(self.backend, minibatches)
        elif STATISTICS in known:
            start = {rollout_id: values[:, LOGPROB].copy() for rollout_id, values in known[STATISTICS].items()}
        else:
            start = self._logprobs(minibatches)
        return start, known | ({"proximal": start} if policy in ("snapshot", "step_start") else {})

    def _weigh(self, minibatches: list[list[Sample]], known: dict[str, Stream]) -> tuple[dict[str, Stream], float]:
        """The streams with the weights of tokens (token_weights.py) and without statistics; the mean that these had."""
        start, known = self._start(minibatches, known) if self.algorithm.correction_normalize else (None, known)
        found = weights_of_step(self.algorithm, minibatches, start, known.get(STATISTICS), self.policy_version)
        return {name: stream for name, stream in known.items() if name != STATISTICS} | found.streams, found.mean

    def _distill(
        self, minibatches: list[list[Sample]], known: dict[str, Stream]
    ) -> tuple[list[list[Sample]], dict[str, Stream]]:
        """Minibatches with the advantages that a teacher gives, as [distill] says, and the proximal stream if that is
        what it was compared with: the policy at the start of the step.

        After the rejection: what is rejected is no token that an earlier one answers for.
        """
        if not self.distill.teacher:
            return minibatches, known
        fresh = [[s for s in part if s.rollout_id not in self._accumulated] for part in minibatches]
        proximal_is_start = self.algorithm.proximal_policy == "step_start"
        policy = known["proximal"] if proximal_is_start and "proximal" in known else self._logprobs(fresh)
        teacher = self._logprobs([teachers(self.distill, part) for part in fresh], TEACHER, "teacher")
        made = distilled(self.distill, [s for part in fresh for s in part], teacher, policy, self._divergence)
        now = {s.rollout_id: s for s in made} | self._accumulated
        if proximal_is_start:
            known = known | {"proximal": policy}
        return [[now[s.rollout_id] for s in part] for part in minibatches], known

    def _known(self, minibatches: list[list[Sample]], known: Mapping[str, Stream]) -> dict[str, Stream]:
        """The streams of the whole step that are taken at the weights of its start, or at kept ones; not `known` ones.

        Computed minibatch by minibatch, to be packed as they will be in training.
        """
        found: dict[str, Stream] = {}
        updates = len(minibatches) * self.config.epochs_per_step
        if "proximal" not in known and self.algorithm.proximal_policy == "snapshot":
            with self._timed("logprobs"):
                found["proximal"] = sampling_logprobs(self.backend, minibatches)
        elif "proximal" not in known and self.algorithm.proximal_policy == "step_start" and updates > 1:
            found["proximal"] = self._logprobs(minibatches if self.config.epochs_per_step > 1 else minibatches[1:])
        if self.config.max_kl and updates > 1:
            start = {**known, **found}.get("proximal") if self.algorithm.proximal_policy == "step_start" else None
            found["start"] = self._logprobs(minibatches) if start is None else start
        if self.algorithm.kl_in_loss:
            found["reference"] = self._logprobs(minibatches, reference_of(self.algorithm), "reference")
        return found

    def _logprobs(
        self, minibatches: list[list[Sample]], version: Version | None = None, timed_as: str = "logprobs"
    ) -> Stream:
        with self._timed(timed_as):
            return {k: v for part in minibatches for k, v in self.backend.compute_logprobs(part, version).items()}


def _for_update(algorithm: AlgorithmConfig, index: int, known: Mapping[str, Stream]) -> Mapping[str, Stream]:
    """The streams for the update of that index. The first meets the weights of the step's start: its current log-probs
    are those, and the proximal ones where those are."""
    left_out = {"start"} if index == 0 else set()
    if index == 0 and algorithm.proximal_policy == "step_start":
        left_out.add("proximal")
    return {name: stream for name, stream in known.items() if name not in left_out}
