"""What is done to logits before a draw: against transformers' processors and by hand, and at every cut of an answer."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from test_embedded import PROMPTS, engine, prompt_ids, request, run
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

import tiny
from rollover.config import EngineConfig
from rollover.config.logits import LogitsProcessing
from rollover.engine.embedded.engine import EmbeddedEngine
from rollover.engine.embedded.sampling import LogitsProcessor
from rollover.engine.process.engine import requests_from_json, requests_to_json
from rollover.engine.protocol import ExtendRequest, StopCriteria
from rollover.types import Prompt, SamplingParams, Segment, StopReason

VOCAB = 40
PROMPT, ANSWER = (3, 5, 5), (7, 9, 7, 7)
EVERYTHING = LogitsProcessing(
    logit_bias=((4, 2.5), (6, float("-inf"))),
    repetition_penalty=1.3,
    presence_penalty=0.4,
    frequency_penalty=0.2,
    min_new_tokens=6,
    forced_token_ids=(8, 9),
)
SCHEMA = json.dumps({"type": "object", "properties": {"n": {"type": "integer", "maximum": 99, "minimum": 0}},
                     "required": ["n"], "additionalProperties": False})  # fmt: skip


def processed(processing: LogitsProcessing, answer: tuple[int, ...] = ANSWER, **changes: Any) -> torch.Tensor:
    """Logits [V] after `answer`, of ones that are drawn at random."""
    asked = ExtendRequest(
        "0-0", Prompt(PROMPT), answer, 9, 0, SamplingParams(), StopCriteria(frozenset({1, 2})), processing=processing
    )
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(0))
    LogitsProcessor(replace(asked, **changes), VOCAB, None).apply(logits, [*PROMPT, *answer])
    return logits


UNTOUCHED = processed(LogitsProcessing())


def peer(processor: Any, answer: tuple[int, ...] = ANSWER) -> torch.Tensor:
    return processor(torch.tensor([[*PROMPT, *answer]]), UNTOUCHED[None].clone())[0]


def test_repetition_as_in_transformers() -> None:
    ours = processed(LogitsProcessing(repetition_penalty=1.7))
    assert torch.equal(ours, peer(RepetitionPenaltyLogitsProcessor(1.7)))
    assert not torch.equal(ours, UNTOUCHED)


@pytest.mark.parametrize("answer", [ANSWER, (*ANSWER, 7)])
def test_fewest_tokens_as_in_transformers(answer: tuple[int, ...]) -> None:
    theirs = MinNewTokensLengthLogitsProcessor(len(PROMPT), 5, [1, 2], device="cpu")
    assert torch.equal(processed(LogitsProcessing(min_new_tokens=5), answer), peer(theirs, answer))


def test_bias_as_in_transformers() -> None:
    theirs = SequenceBiasLogitsProcessor([[[4], 2.5], [[6], -3.0]])
    assert torch.equal(processed(LogitsProcessing(logit_bias=((4, 2.5), (6, -3.0)))), peer(theirs))


def test_presence_and_frequency_count_the_answer_alone() -> None:
    """As OpenAI's API defines them: mu - count * frequency - (count > 0) * presence."""
    ours = processed(LogitsProcessing(presence_penalty=0.5, frequency_penalty=0.25))
    expected = UNTOUCHED.clone()
    expected[7] -= 0.5 + 3 * 0.25
    expected[9] -= 0.5 + 0.25
    torch.testing.assert_close(ours, expected)
    of_this_turn = processed(LogitsProcessing(presence_penalty=0.5, frequency_penalty=0.25), text_start=3)
    expected = UNTOUCHED.clone()
    expected[7] -= 0.75
    torch.testing.assert_close(of_this_turn, expected)


def test_banned_and_forced_tokens() -> None:
    assert processed(LogitsProcessing(logit_bias=((6, float("-inf")),)))[6] == float("-inf")
    forced = LogitsProcessing(forced_token_ids=(11, 12))
    for num, token in enumerate((11, 12)):
        left = processed(forced, ANSWER[:num])
        assert (left > float("-inf")).nonzero().flatten().tolist() == [token]
    assert torch.equal(processed(forced, ANSWER[:2]), UNTOUCHED)
    assert (processed(forced, ANSWER, text_start=len(ANSWER)) > float("-inf")).nonzero().flatten().tolist() == [11]


def test_where_nothing_may_come_the_answer_ends() -> None:
    banned = LogitsProcessing(logit_bias=tuple((token, float("-inf")) for token in range(VOCAB)))
    assert (processed(banned) > float("-inf")).nonzero().flatten().tolist() == [1, 2]


@pytest.mark.parametrize(
    ("processing", "changes", "says"),
    [
        (LogitsProcessing(forced_token_ids=(VOCAB,)), {}, f"token {VOCAB}, and the model has {VOCAB}"),
        (LogitsProcessing(logit_bias=((99, 1.0),)), {}, "token 99"),
        (LogitsProcessing(regex="a"), {"stop": StopCriteria()}, "stop token"),
        (LogitsProcessing(regex="a"), {}, "tokenizer"),
    ],
)
def test_what_cannot_be_done_is_refused(processing: LogitsProcessing, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        processed(processing, **changes)


def test_requests_round_trip_through_json() -> None:
    asked = ExtendRequest("0-0", Prompt(PROMPT), ANSWER, 9, 0, SamplingParams(), processing=EVERYTHING)
    plain = replace(asked, processing=LogitsProcessing())
    sent = json.loads(json.dumps(requests_to_json({1: asked, 2: plain})))
    assert requests_from_json(sent) == {1: asked, 2: plain}


# In the engine


def with_structures(**config: Any) -> EmbeddedEngine:
    return EmbeddedEngine(tiny.model(), EngineConfig(**config), tokenizer=tiny.tokenizer())


def asked(
    name: str, text: str, new: int, processing: LogitsProcessing, generated: tuple[int, ...] = ()
) -> ExtendRequest:
    stop = 1  # the tokenizer's <eos>
    return replace(request(name, text, new, generated), processing=processing, stop=StopCriteria(frozenset({stop})))


def tokens_of(segments: list[Segment]) -> list[int]:
    return [int(t) for s in segments for t in s.token_ids]


def text_of(segments: list[Segment]) -> str:
    """Of an answer that ended with a stop token, without it."""
    return str(tiny.tokenizer().decode(tokens_of(segments)[:-1]))


def logprobs_of(segments: list[Segment]) -> np.ndarray:
    return np.concatenate([s.logprobs for s in segments])


REGEX = LogitsProcessing(regex="(ab|cd)+e[0-9]{3,9}")


@pytest.mark.parametrize("processing", [EVERYTHING, REGEX], ids=["everything", "regex"])
def test_interrupted_at_every_cut_it_is_the_uninterrupted_answer(processing: LogitsProcessing) -> None:
    new = 16
    whole = run(with_structures(), [asked("0-0", PROMPTS[0], new, processing)])[0]
    tokens = tokens_of(whole)
    assert len(tokens) > 4
    for cut in range(1, len(tokens)):
        rest = asked("0-0", PROMPTS[0], new - cut, processing, tuple(tokens[:cut]))
        again = run(with_structures(), [rest])[0]
        assert tokens[:cut] + tokens_of(again) == tokens
        np.testing.assert_allclose(logprobs_of(again), logprobs_of(whole)[cut:], atol=2e-5)


def test_the_behavior_logprob_is_that_of_what_is_sampled_from() -> None:
    """Against the model's own logits, processed and cooled here."""
    answered = run(engine(), [replace(asked("0-0", PROMPTS[0], 12, EVERYTHING), sampling=SamplingParams(0.7))])[0]
    ids, prompt = tokens_of(answered), prompt_ids(PROMPTS[0])
    model = tiny.model()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *ids]])).logits[0].float()
    expected = []
    for i, token in enumerate(ids):
        row = logits[len(prompt) + i - 1].clone()
        before = replace(asked("0-0", PROMPTS[0], 12, EVERYTHING), generated_ids=tuple(ids[:i]))
        LogitsProcessor(before, len(row), None).apply(row, [*prompt, *ids[:i]])
        expected.append(torch.log_softmax(row / 0.7, -1)[token].item())
    np.testing.assert_allclose(logprobs_of(answered), expected, atol=2e-4)
    assert ids[:2] == [8, 9] and expected[:2] == [0.0, 0.0] and 6 not in ids


def test_others_in_the_batch_are_as_without_it() -> None:
    plain = request("1-0", PROMPTS[1], 10)
    alone = run(engine(), [plain])[0]
    beside = run(engine(), [asked("0-0", PROMPTS[0], 10, EVERYTHING), plain])[1]
    assert tokens_of(beside) == tokens_of(alone)
    np.testing.assert_allclose(logprobs_of(beside), logprobs_of(alone), atol=2e-5)


def test_every_answer_has_the_structure() -> None:
    requests = [
        asked(f"{i}-{i}", PROMPTS[i % 3], 64, REGEX if i % 2 else LogitsProcessing(json_schema=SCHEMA))
        for i in range(12)
    ]
    for i, segments in enumerate(run(with_structures(), requests)):
        assert segments[-1].stop_reason in (StopReason.EOS, StopReason.LENGTH)
        if segments[-1].stop_reason is StopReason.EOS:
            text = text_of(segments)
            assert re.fullmatch(REGEX.regex, text) if i % 2 else json.loads(text)["n"] in range(100)


def test_structured_answer_stops_only_when_complete() -> None:
    (segments,) = run(with_structures(), [asked("0-0", PROMPTS[0], 30, LogitsProcessing(regex="ab{2}c"))])
    assert text_of(segments) == "abbc"
    assert segments[-1].stop_reason is StopReason.EOS


def test_an_answer_that_was_begun_otherwise_is_refused_alone() -> None:
    wrong = asked("0-0", PROMPTS[0], 8, REGEX, prompt_ids("zz"))

    async def both(target: EmbeddedEngine) -> list[Segment]:
        right = target.extend(asked("1-0", PROMPTS[1], 8, REGEX))
        with pytest.raises(ValueError, match="has not the required structure"):
            await target.extend(wrong)
        return await right

    assert tokens_of(asyncio.run(both(with_structures())))


@pytest.mark.parametrize(
    ("processing", "says"),
    [
        (LogitsProcessing(regex="(a"), "rollout.logits.regex"),
        (LogitsProcessing(json_schema='{"type": "nothing"}'), "rollout.logits.json_schema"),
    ],
)
def test_a_structure_that_is_none_is_refused_by_name(processing: LogitsProcessing, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        run(with_structures(), [asked("0-0", PROMPTS[0], 8, processing)])
