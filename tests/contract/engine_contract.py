"""Checks that any Engine must pass. Run them on your own:

    from contract import engine_contract

    SUBJECT = engine_contract.Subject(make_engine=MyEngine, prompts=[(1, 2, 3), (4, 5)])

    @pytest.mark.parametrize("check", engine_contract.CHECKS, ids=lambda check: check.__name__)
    def test_my_engine(check):
        asyncio.run(check(SUBJECT))

They assume that a rollout of these prompts usually gets some tokens before it stops: give prompts and stop tokens for
which most rollouts are longer than a few tokens.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rollover.config.logits import LogitsProcessing
from rollover.engine.protocol import Engine, ExtendRequest, StopCriteria
from rollover.types import Prompt, SamplingParams, Segment, StopReason, rollout_seed

STATS = {
    "engine/decode_steps",
    "engine/prefill_tokens",
    "engine/reprefill_tokens",
    "engine/preemptions",
    "kv/stale_prefix_tokens",
    "kv/kept_tokens",
    "kv/shared_prompt_tokens",
    "kv/bytes",
}


@dataclass(frozen=True)
class Subject:
    """The engine under test.

    `make_engine` returns a fresh one, every time with the same weights. `prompts`: at least two, token ids.
    `tensors` gives weights for `load_weights` (the same ones again are fine).
    `max_new_tokens` bounds every rollout; `sampling` are the distributions to check.
    `decode_text`: what the engine turns token ids into text with; None if it knows no stop strings.
    `keeps_kv`: what it has of an ended turn is kept where the rollout may go on, and there is memory for it.
    `resumes_exactly`: under frozen weights, interrupted == uninterrupted with sampling (engines whose random state
    restarts per request claim it for greedy decoding only).
    `processes_logits`: it honours bias, repetition penalty and fewest tokens of `processing`.
    `under_way`: tokens that may still be of the older weights when new ones are there, in one call made before.
    """

    make_engine: Callable[[], Engine]
    prompts: list[tuple[int, ...]]
    tensors: Callable[[], Iterable[tuple[str, Any]]] = tuple
    stop_token_ids: frozenset[int] = frozenset()
    max_new_tokens: int = 24
    decode_text: Callable[[list[int]], str] | None = None
    resumes_exactly: bool = True
    keeps_kv: bool = False
    under_way: int = 0
    processes_logits: bool = False
    sampling: list[SamplingParams] = field(default_factory=lambda: [SamplingParams(), SamplingParams(temperature=0.0)])

    def request(self, i: int = 0, sampling: SamplingParams | None = None, **changes: Any) -> ExtendRequest:
        request = ExtendRequest(
            rollout_id=f"{i}-0",
            prompt=Prompt(self.prompts[i % len(self.prompts)]),
            generated_ids=(),
            max_new_tokens=self.max_new_tokens,
            seed=rollout_seed(0, f"task {i}", 0, 0),
            sampling=sampling or self.sampling[0],
            stop=StopCriteria(self.stop_token_ids),
        )
        return dataclasses.replace(request, **changes)


def tokens_of(segments: Iterable[Segment]) -> list[int]:
    return [int(t) for s in segments for t in s.token_ids]


def logprobs_of(segments: Iterable[Segment]) -> np.ndarray:
    return np.concatenate([s.logprobs for s in segments])


def check_segments(segments: list[Segment], request: ExtendRequest) -> None:
    """What holds for every answer of `extend`."""
    assert segments, "extend returns at least one segment"
    for segment in segments:
        assert segment.token_ids.dtype == np.int32 and segment.logprobs.dtype == np.float32
        assert segment.trainable and segment.sampling == request.sampling
        assert np.isfinite(segment.logprobs).all() and (segment.logprobs <= 0).all()
    assert all(s.stop_reason is StopReason.PAUSED and len(s) for s in segments[:-1])
    versions = [s.policy_version for s in segments]
    assert versions == sorted(set(versions)), "one segment per policy version, in order"
    start = len(request.generated_ids)
    for segment in segments:
        assert segment.start == start, "each segment says where it begins"
        start += len(segment)
    tokens = tokens_of(segments)
    assert len(tokens) <= request.max_new_tokens
    stopped_by = segments[-1].stop_reason
    if stopped_by is StopReason.LENGTH:
        assert len(tokens) == request.max_new_tokens
    if stopped_by is StopReason.EOS and request.stop.token_ids:
        assert tokens[-1] in request.stop.token_ids, "the stop token is part of the rollout"
    assert not set(tokens[:-1]) & request.stop.token_ids, "generation went on after a stop token"


async def wait_for_tokens(engine: Engine, rollout_id: str, num_tokens: int, extend: asyncio.Future[Any]) -> None:
    """Until `progress` shows that many tokens, or the extension is done."""
    while not extend.done():
        if len(tokens_of((await engine.progress([rollout_id])).get(rollout_id, []))) >= num_tokens:
            return
        await asyncio.sleep(0)


async def check_extend_to_the_end(subject: Subject) -> None:
    engine = subject.make_engine()
    version = engine.oldest_version
    for sampling in subject.sampling:
        requests = [subject.request(i, sampling) for i in range(4)]
        for request, segments in zip(requests, await _extend_all(engine, requests), strict=True):
            check_segments(segments, request)
            assert segments[-1].stop_reason is not StopReason.PAUSED, "nobody interrupted it"
            assert [s.policy_version for s in segments] == [version]
    await engine.close()


async def check_a_rollout_does_not_depend_on_its_batch(subject: Subject) -> None:
    engine = subject.make_engine()
    requests = [subject.request(i) for i in range(4)]
    alone = [await engine.extend(r) for r in requests]
    together = await _extend_all(engine, requests[::-1])
    for a, b in zip(alone, together[::-1], strict=True):
        assert tokens_of(a) == tokens_of(b)
    await engine.close()


async def check_the_seed_decides_the_draw(subject: Subject) -> None:
    engine = subject.make_engine()
    request = subject.request()
    same, again, *others = await _extend_all(
        engine,
        [dataclasses.replace(request, rollout_id=str(i), seed=request.seed + max(0, i - 1)) for i in range(6)],
    )
    assert tokens_of(same) == tokens_of(again)
    assert any(tokens_of(o) != tokens_of(same) for o in others)
    await engine.close()


async def check_interrupted_equals_uninterrupted(subject: Subject) -> None:
    """Frozen weights, interrupted and resumed after every few tokens: the same tokens, and the budget is cumulative."""
    engine = subject.make_engine()
    for sampling in subject.sampling:
        if sampling.temperature > 0 and not subject.resumes_exactly:
            continue
        whole_request = subject.request(0, sampling)
        whole = await engine.extend(whole_request)
        parts: list[Segment] = []
        num_interrupted = 0
        at_once = True  # every other time, so that some interruption comes in time however fast the engine is
        while not parts or parts[-1].stop_reason is StopReason.PAUSED:
            so_far = tuple(tokens_of(parts))
            request = dataclasses.replace(
                whole_request, generated_ids=so_far, max_new_tokens=subject.max_new_tokens - len(so_far)
            )
            extend = asyncio.ensure_future(engine.extend(request))
            await asyncio.sleep(0)
            await wait_for_tokens(engine, request.rollout_id, 0 if at_once else 2, extend)
            at_once = not at_once
            engine.interrupt([request.rollout_id])
            segments = await extend
            check_segments(segments, request)
            num_interrupted += segments[-1].stop_reason is StopReason.PAUSED
            parts += segments
        assert tokens_of(parts) == tokens_of(whole) and parts[-1].stop_reason is whole[-1].stop_reason
        np.testing.assert_allclose(logprobs_of(parts), logprobs_of(whole), atol=1e-2)
        if len(tokens_of(whole)) > 6:
            assert num_interrupted, "the engine ignores interrupt"
    await engine.close()


async def check_interrupt_before_the_first_token(subject: Subject) -> None:
    """An interruption reaches every extension that has begun, also one without a token."""
    engine = subject.make_engine()
    requests = [subject.request(i) for i in range(4)]
    extends = [asyncio.ensure_future(engine.extend(r)) for r in requests]
    await asyncio.sleep(0)
    engine.interrupt()
    for request, segments in zip(requests, await asyncio.gather(*extends), strict=True):
        check_segments(segments, request)
        if not tokens_of(segments):
            assert len(segments) == 1 and segments[0].stop_reason is StopReason.PAUSED
        assert len(tokens_of(segments)) < subject.max_new_tokens
    await engine.close()


async def check_interrupt_stops_only_those_named(subject: Subject) -> None:
    engine = subject.make_engine()
    requests = [subject.request(i) for i in range(2)]
    alone = await engine.extend(requests[1])
    extends = [asyncio.ensure_future(engine.extend(r)) for r in requests]
    await asyncio.sleep(0)
    engine.interrupt(["0-0", "no such rollout"])
    first, second = await asyncio.gather(*extends)
    assert first[-1].stop_reason is StopReason.PAUSED
    assert second[-1].stop_reason is not StopReason.PAUSED and tokens_of(second) == tokens_of(alone)
    # An interruption is an event, not a state: the rollout can be extended again.
    rest = await engine.extend(
        dataclasses.replace(
            requests[0],
            generated_ids=tuple(tokens_of(first)),
            max_new_tokens=subject.max_new_tokens - len(tokens_of(first)),
        )
    )
    assert rest[-1].stop_reason is not StopReason.PAUSED
    await engine.close()


async def check_a_token_budget_pauses(subject: Subject) -> None:
    """`pause_after` interrupts: the pieces together are the uninterrupted rollout."""
    engine = subject.make_engine()
    request = subject.request(0, subject.sampling[0] if subject.resumes_exactly else SamplingParams(temperature=0.0))
    whole = tokens_of(await engine.extend(request))
    so_far: list[int] = []
    for _ in range(len(whole)):
        left = request.max_new_tokens - len(so_far)
        part = dataclasses.replace(request, generated_ids=tuple(so_far), max_new_tokens=left, pause_after=5)
        segments = await engine.extend(part)
        check_segments(segments, part)
        so_far += tokens_of(segments)
        if segments[-1].stop_reason is not StopReason.PAUSED:
            break
        assert len(tokens_of(segments)) == 5
    assert so_far == whole
    await engine.close()


async def check_what_is_done_to_logits_holds_across_interruptions(subject: Subject) -> None:
    """A banned token does not come, a stop token not too early; in pieces it is the answer as a whole."""
    if not subject.processes_logits:
        return
    engine = subject.make_engine()
    plain = subject.request(0, SamplingParams(temperature=0.0), stop=StopCriteria())
    first, *others = tokens_of(await engine.extend(plain))
    stops = frozenset(others[:2]) - {first}
    processing = LogitsProcessing(logit_bias=((first, -math.inf),), repetition_penalty=1.5, min_new_tokens=7)
    request = dataclasses.replace(plain, stop=StopCriteria(stops), processing=processing)
    whole = tokens_of(await engine.extend(request))
    assert first not in whole and not stops & set(whole[:6])
    so_far: list[int] = []
    while len(so_far) < len(whole):
        left = request.max_new_tokens - len(so_far)
        part = dataclasses.replace(request, generated_ids=tuple(so_far), max_new_tokens=left, pause_after=3)
        so_far += tokens_of(await engine.extend(part))
    assert so_far == whole
    await engine.close()


async def check_progress_is_a_prefix(subject: Subject) -> None:
    engine = subject.make_engine()
    request = subject.request()
    extend = asyncio.ensure_future(engine.extend(request))
    await wait_for_tokens(engine, request.rollout_id, 3, extend)
    seen = await engine.progress([request.rollout_id, "no such rollout"])
    assert "no such rollout" not in seen
    final = tokens_of(await extend)
    if request.rollout_id in seen:
        so_far = tokens_of(seen[request.rollout_id])
        assert so_far == final[: len(so_far)]
    assert await engine.progress([request.rollout_id]) == {}
    await engine.close()


async def check_a_cancelled_extension_is_forgotten(subject: Subject) -> None:
    """The rollout is extended again at once: `progress` tells of that, though the engine may not have made a step."""
    engine = subject.make_engine()
    request = subject.request()
    extend = asyncio.ensure_future(engine.extend(request))
    await wait_for_tokens(engine, request.rollout_id, 2, extend)
    seen = tokens_of((await engine.progress([request.rollout_id])).get(request.rollout_id, []))
    extend.cancel()
    await asyncio.wait([extend])
    left = request.max_new_tokens - len(seen)
    rest = dataclasses.replace(request, generated_ids=tuple(seen), max_new_tokens=left)
    again = asyncio.ensure_future(engine.extend(rest))
    while not again.done():
        for segment in (await engine.progress([request.rollout_id])).get(request.rollout_id, []):
            assert segment.start is not None and segment.start >= len(seen), "that was of the cancelled one"
        await asyncio.sleep(0)
    check_segments(again.result(), rest)
    await engine.close()


async def check_queued_are_among_those_asked_for(subject: Subject) -> None:
    engine = subject.make_engine()
    requests = [subject.request(i) for i in range(4)]
    extends = asyncio.ensure_future(_extend_all(engine, requests))
    while not extends.done():
        queued = await engine.queued(["1-0", "no such rollout"])
        assert queued <= {"1-0"}
        await asyncio.sleep(0)
    assert await engine.queued([r.rollout_id for r in requests]) == set(), "nothing waits once all is done"
    await engine.close()


async def check_tokens_carry_the_version_that_sampled_them(subject: Subject) -> None:
    """Weights are replaced between two extensions, and under a running one."""
    engine = subject.make_engine()
    version = engine.oldest_version
    request = subject.request()
    extend = asyncio.ensure_future(engine.extend(request))
    await wait_for_tokens(engine, request.rollout_id, 2, extend)
    num_before = len(tokens_of((await engine.progress([request.rollout_id])).get(request.rollout_id, [])))
    cost = await engine.load_weights(version + 1, subject.tensors())
    assert cost.num_bytes >= 0 and cost.seconds >= 0
    assert engine.oldest_version == version + 1
    # The engine samples on while the weights are loaded: what it had sampled by the end of that may be of either.
    num_then = len(tokens_of((await engine.progress([request.rollout_id])).get(request.rollout_id, [])))
    segments = await extend
    check_segments(segments, request)
    if len(tokens_of(segments)) - subject.under_way > num_then >= num_before > 0:
        assert [s.policy_version for s in segments] == [version, version + 1]
        assert num_before <= len(segments[0]) <= num_then + subject.under_way
    after = await engine.extend(subject.request(1))
    assert [s.policy_version for s in after] == [version + 1]
    await engine.close()


async def check_stop_strings_are_looked_for_in_the_present_text_only(subject: Subject) -> None:
    """Across an interruption, but not in, nor reaching back into, what was there before the present turn began."""
    if subject.decode_text is None:
        return
    engine = subject.make_engine()
    request = subject.request(0, SamplingParams(temperature=0.0), stop=StopCriteria())
    tokens = tokens_of(await engine.extend(dataclasses.replace(request, max_new_tokens=8)))
    stop = subject.decode_text(tokens[:4])  # the first four tokens are text, then it is there
    request = dataclasses.replace(request, stop=StopCriteria(strings=(stop,)))
    (whole,) = await engine.extend(request)
    assert whole.stop_reason is StopReason.STOP_STRING and whole.token_ids.tolist() == tokens[:4]
    for num_before, text_start, stops in ((2, 0, True), (3, 0, True), (2, 2, False), (3, 1, False), (4, 4, False)):
        part = dataclasses.replace(
            request, generated_ids=tuple(tokens[:num_before]), max_new_tokens=1, text_start=text_start
        )
        if num_before == 2:
            part = dataclasses.replace(part, max_new_tokens=2)
        segments = await engine.extend(part)
        check_segments(segments, part)
        assert (segments[-1].stop_reason is StopReason.STOP_STRING) == stops, (num_before, text_start)
    await engine.close()


async def check_repetition_is_counted_from_the_turn(subject: Subject) -> None:
    """Tokens of earlier turns are no part of it, nor do they shift the tokens at which it is looked for."""
    engine, window = subject.make_engine(), 16
    greedy = subject.request(sampling=SamplingParams(temperature=0.0), stop=StopCriteria(), max_new_tokens=64)
    endless = tokens_of(await engine.extend(greedy))
    for before in (n for n in (0, 5, 21) if n < len(endless)):
        of_turn, ends = endless[before:], len(endless) - before
        for num in range(window, len(of_turn) + 1, 16):
            last = of_turn[num - window : num]
            if any(last[p:] == last[:-p] for p in range(1, window // 4 + 1)):
                ends = num
                break
        asked = dataclasses.replace(
            greedy, rollout_id=f"{before}-1", generated_ids=tuple(endless[:before]), text_start=before,
            stop=StopCriteria(repetition_tokens=window), max_new_tokens=len(of_turn),
        )  # fmt: skip
        segments = await engine.extend(asked)
        assert tokens_of(segments) == of_turn[:ends]
        if ends < len(of_turn):
            assert segments[-1].stop_reason is StopReason.REPETITION
    await engine.close()


async def check_a_turn_goes_on_from_what_was_appended(subject: Subject) -> None:
    """Two turns with other tokens between them: with what the engine kept of the first one, and without, alike."""
    engine = subject.make_engine()
    for i, sampling in enumerate(subject.sampling):
        if sampling.temperature > 0 and not subject.resumes_exactly:
            continue
        first = subject.request(0, sampling, rollout_id=f"{i}-0", stop=StopCriteria(), max_new_tokens=8)
        turn = tokens_of(await engine.extend(dataclasses.replace(first, may_continue=True)))
        stop = frozenset({turn[4]})  # the first turn ends there, or earlier
        engine.release([first.rollout_id])
        first = dataclasses.replace(first, stop=StopCriteria(stop), max_new_tokens=subject.max_new_tokens)
        answers, growth = [], []
        for may_continue in (True, False):
            turn = tokens_of(await engine.extend(dataclasses.replace(first, may_continue=may_continue)))
            so_far = (*turn, *subject.prompts[1])
            second = dataclasses.replace(first, generated_ids=so_far, max_new_tokens=4, text_start=len(so_far))
            before = engine.stats()
            answers.append(await engine.extend(second))
            check_segments(answers[-1], second)
            growth.append({key: after - before[key] for key, after in engine.stats().items()})
            engine.release([first.rollout_id])
        kept, again = answers
        assert tokens_of(kept) == tokens_of(again)
        np.testing.assert_allclose(logprobs_of(kept), logprobs_of(again), atol=1e-2)
        num_before = len(first.prompt) + len(so_far) - 1  # the last token is decoded
        if subject.keeps_kv:  # others may have a cache of prefixes
            assert growth[1]["kv/kept_tokens"] == 0, "nobody had said that it may go on"
            assert growth[0]["kv/kept_tokens"] == num_before - len(subject.prompts[1])
            assert growth[0]["engine/prefill_tokens"] == len(subject.prompts[1])
            assert growth[0]["engine/reprefill_tokens"] == growth[1]["engine/prefill_tokens"] == 0
    await engine.close()


async def check_what_a_run_asks_of_it(subject: Subject) -> None:
    """How long a rollout may be, which these are not; and another number of threads, while it generates."""
    engine = subject.make_engine()
    assert engine.max_tokens >= max(map(len, subject.prompts)) + subject.max_new_tokens
    request = subject.request()
    extend = asyncio.ensure_future(engine.extend(request))
    await wait_for_tokens(engine, request.rollout_id, 2, extend)
    for num in (1, 2):
        engine.use_threads(num)
    check_segments(await extend, request)
    await engine.close()


async def check_release_and_stats(subject: Subject) -> None:
    engine = subject.make_engine()
    before = engine.stats()
    assert before.keys() >= STATS
    tokens = tokens_of(await engine.extend(subject.request()))
    engine.release(["0-0", "no such rollout"])
    engine.release(["0-0"])
    after = engine.stats()
    # An engine may decode the last prompt token instead of prefilling it.
    assert after["engine/prefill_tokens"] >= before["engine/prefill_tokens"] + len(subject.prompts[0]) - 1
    assert after["engine/decode_steps"] > before["engine/decode_steps"]
    assert all(after[k] >= before[k] for k in STATS - {"kv/bytes"}), "counters never go down"
    await engine.extend(subject.request(rollout_id="9-0", generated_ids=tuple(tokens[:1]), max_new_tokens=1))
    again = engine.stats()
    assert again["engine/prefill_tokens"] == after["engine/prefill_tokens"], "prefilled again: not for the first time"
    assert again["engine/reprefill_tokens"] >= after["engine/reprefill_tokens"] + len(subject.prompts[0])
    await engine.close()


async def _extend_all(engine: Engine, requests: list[ExtendRequest]) -> list[list[Segment]]:
    return list(await asyncio.gather(*(engine.extend(r) for r in requests)))


CHECKS = [
    check_extend_to_the_end,
    check_a_rollout_does_not_depend_on_its_batch,
    check_the_seed_decides_the_draw,
    check_interrupted_equals_uninterrupted,
    check_interrupt_before_the_first_token,
    check_interrupt_stops_only_those_named,
    check_a_token_budget_pauses,
    check_what_is_done_to_logits_holds_across_interruptions,
    check_progress_is_a_prefix,
    check_a_cancelled_extension_is_forgotten,
    check_queued_are_among_those_asked_for,
    check_tokens_carry_the_version_that_sampled_them,
    check_stop_strings_are_looked_for_in_the_present_text_only,
    check_repetition_is_counted_from_the_turn,
    check_a_turn_goes_on_from_what_was_appended,
    check_what_a_run_asks_of_it,
    check_release_and_stats,
]
