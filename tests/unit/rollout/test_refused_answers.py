"""An engine's answer that cannot be what comes next for its rollout: refused, counted, said, and the run goes on."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from rollover.rollout.cache import RolloutCache
from rollover.types import DropReason, Prompt, Segment, StopReason
from unit.rollout.hanging import Hanging, assert_said, short, steps, watchdog
from unit.rollout.run import Run, ids, uninterrupted_tokens
from unit.rollout.world import make_segment, make_task


def segment(num: int, start: int | None, version: int = 0, stop: StopReason = StopReason.PAUSED) -> Segment:
    return dataclasses.replace(make_segment(num, version, stop), start=start)


def test_the_cache_holds_no_token_twice() -> None:
    cache = RolloutCache(10)
    cache.admit(make_task(0), Prompt.of([1]), 1)
    cache.start("0-0")
    cache.append("0-0", [segment(3, 0)])
    with pytest.raises(AssertionError, match="tokens come twice"):
        cache.append("0-0", [segment(3, 0)])


class Repeats(Hanging):
    """Returns what an earlier extension of the rollout returned, `times` times."""

    def __init__(self, rollout_id: str, times: int) -> None:
        super().__init__(rollout_id)
        self.of, self.left, self.first = rollout_id, times, []

    async def extend(self, request):
        segments = await super().extend(request)
        if request.rollout_id != self.of or not request.generated_ids:
            self.first = segments if request.rollout_id == self.of else self.first
            return segments
        if self.left:
            self.left -= 1
            return self.first
        return segments


def test_answer_of_an_earlier_extend_is_refused() -> None:
    run = Run(engine=Repeats("0-1", times=1), watchdog=watchdog())
    (batch,) = steps(run, 1)
    assert ids([batch]) == [[0, 1]]
    rollout = batch[0].rollouts[1]
    assert rollout.token_ids() == uninterrupted_tokens(rollout, 40, short)
    refused = "its answer is refused, as it begins with token 0, and token 3 comes next"
    failed = rf"the engine failed at rollout 0-1 \({refused}\): retry in 0.01 s"
    assert_said(run, r"watchdog: rollout 0-1 \(running, .*", failed)
    assert run.driver.retrying_engine.stats()["watchdog/refused_answers"] == 1


def test_repeatedly_refused_answers_drop_the_group() -> None:
    run = Run(engine=Repeats("0-1", times=99), watchdog=watchdog())
    assert ids(steps(run, 1)) == [[1, 2]]
    assert run.ledger.dropped[DropReason.FAILED].groups == 1
    assert run.said[-1].endswith("token 3 comes next): its group is dropped (failed)")
    assert run.driver.retrying_engine.stats()["watchdog/refused_answers"] == 2


def test_progress_of_an_earlier_extend_is_ignored() -> None:
    """Deaf while it hangs, and `progress` shows the tokens of the rollout's first extension."""

    class Stale(Hanging):
        async def progress(self, rollout_ids):
            rollout_ids = list(rollout_ids)
            known = await super().progress(rollout_ids)
            if "0-1" in known and len(self.extensions["0-1"]) == 2:
                self.seen = True
                return known | {"0-1": [segment(3, 0)], "9-9": [segment(3, 0)]}
            return known

    engine = Stale("0-1", times=2, deaf=True)
    run = Run(engine=engine, watchdog=watchdog(max_stalls=5))
    (batch,) = steps(run, 1)
    rollout = batch[0].rollouts[1]
    assert engine.seen and rollout.token_ids() == uninterrupted_tokens(rollout, 40, short)
    run.check()


def test_nan_logprobs_fail_the_answer_not_the_run() -> None:
    class Breaks(Hanging):
        async def extend(self, request):
            segments = await super().extend(request)
            if request.rollout_id == "0-1" and len(self.extensions["0-1"]) == 1:
                segments = [dataclasses.replace(s, logprobs=s.logprobs * np.float32("nan")) for s in segments]
            return segments

    run = Run(engine=Breaks("none"), watchdog=watchdog())
    (batch,) = steps(run, 1)
    assert ids([batch]) == [[0, 1]] and not any(r.why_not_sampled() for g in batch for r in g.rollouts)
    assert_said(
        run, r"the engine failed at rollout 0-1 \(its answer is refused, as its token 0 has the log-prob nan, .*"
    )
    assert run.driver.retrying_engine.stats()["watchdog/refused_answers"] == 1
    run.check()


def test_a_checkpoint_with_what_is_no_log_prob_is_refused() -> None:
    cache = RolloutCache(10)
    cache.admit(make_task(0), Prompt.of([1]), 1)
    cache.start("0-0")
    cache.append("0-0", [segment(3, 0)])
    meta, arrays = cache.state_dict()
    RolloutCache(10).load_state_dict(meta, arrays)
    arrays["logprobs"] = arrays["logprobs"] * np.float32("nan")
    with pytest.raises(ValueError, match="the checkpoint's rollout 0-0 cannot be trained, as its token 0 has .* nan"):
        RolloutCache(10).load_state_dict(meta, arrays)


def test_an_answer_beyond_the_budget_does_not_end_the_run() -> None:
    class Overruns(Hanging):
        async def extend(self, request):
            if request.rollout_id == "0-0" and len(self.extensions.get("0-0", ())) == 0:
                await super().extend(request)
                return [segment(41, 0, stop=StopReason.LENGTH)]
            return await super().extend(request)

    run = Run(engine=Overruns("none"), watchdog=watchdog())
    assert ids(steps(run, 1)) == [[0, 1]]
    assert_said(
        run, r"the engine failed at rollout 0-0 \(.* it has 41 tokens, and the rollout may get 40\): retry in .*"
    )
