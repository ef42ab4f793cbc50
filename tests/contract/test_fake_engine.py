"""The fake engine keeps the Engine contract."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from contract import engine_contract
from fake_engine import FakeEngine
from rollover.types import StopReason

PROMPTS = [(1, 2, 3), (4, 5)]


def decode_text(ids: list[int]) -> str:
    return " ".join(map(str, ids))


SUBJECTS = {
    "stops by itself": engine_contract.Subject(
        make_engine=lambda: FakeEngine(lambda seed: 8 + seed % 12), prompts=PROMPTS, stop_token_ids=frozenset({7, 11})
    ),
    "out of budget": engine_contract.Subject(
        make_engine=lambda: FakeEngine(lambda seed: 1000, decode_text=decode_text),
        prompts=PROMPTS,
        decode_text=decode_text,
    ),
}


@pytest.mark.parametrize("check", engine_contract.CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("subject", SUBJECTS.values(), ids=SUBJECTS.keys())
def test_contract(check, subject) -> None:
    asyncio.run(check(subject))


# The checks themselves can fail: engines that break one rule each.


class IgnoresInterrupt(FakeEngine):
    def interrupt(self, rollout_ids=None) -> None:
        pass


class ForgetsTheGeneratedPart(FakeEngine):
    async def extend(self, request):
        return await super().extend(dataclasses.replace(request, generated_ids=()))


class SharesItsRandomness(FakeEngine):
    calls = 0

    async def extend(self, request):
        self.calls += 1
        return await super().extend(dataclasses.replace(request, seed=request.seed + self.calls))


class StampsTheWrongVersion(FakeEngine):
    async def extend(self, request):
        return [dataclasses.replace(s, policy_version=0) for s in await super().extend(request)]


class ReportsNoStop(FakeEngine):
    async def extend(self, request):
        *first, last = await super().extend(request)
        return [*first, dataclasses.replace(last, stop_reason=StopReason.PAUSED)]


class OverrunsTheBudget(FakeEngine):
    async def extend(self, request):
        return await super().extend(dataclasses.replace(request, max_new_tokens=request.max_new_tokens + 1))


class LooksBackForStopStrings(FakeEngine):
    async def extend(self, request):
        return await super().extend(dataclasses.replace(request, text_start=0))


class LosesWhatIsHalfAStopString(FakeEngine):
    async def extend(self, request):
        return await super().extend(dataclasses.replace(request, text_start=len(request.generated_ids)))


class DoesNotSayWhatItContinues(FakeEngine):
    async def extend(self, request):
        return [dataclasses.replace(s, start=0) for s in await super().extend(request)]


class HoldsHardlyAnything(FakeEngine):
    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs, max_tokens=8)


@pytest.mark.parametrize(
    ("engine_class", "check"),
    [
        (IgnoresInterrupt, engine_contract.check_interrupt_before_the_first_token),
        (ForgetsTheGeneratedPart, engine_contract.check_interrupted_equals_uninterrupted),
        (SharesItsRandomness, engine_contract.check_a_rollout_does_not_depend_on_its_batch),
        (StampsTheWrongVersion, engine_contract.check_tokens_carry_the_version_that_sampled_them),
        (ReportsNoStop, engine_contract.check_extend_to_the_end),
        (OverrunsTheBudget, engine_contract.check_extend_to_the_end),
        (LooksBackForStopStrings, engine_contract.check_stop_strings_are_looked_for_in_the_present_text_only),
        (LosesWhatIsHalfAStopString, engine_contract.check_stop_strings_are_looked_for_in_the_present_text_only),
        (DoesNotSayWhatItContinues, engine_contract.check_interrupted_equals_uninterrupted),
        (HoldsHardlyAnything, engine_contract.check_what_a_run_asks_of_it),
    ],
)
def test_a_broken_engine_is_found_out(engine_class, check) -> None:
    subject = engine_contract.Subject(
        make_engine=lambda: engine_class(lambda seed: 1000, decode_text=decode_text),
        prompts=PROMPTS,
        decode_text=decode_text,
    )
    with pytest.raises(AssertionError):
        asyncio.run(check(subject))
