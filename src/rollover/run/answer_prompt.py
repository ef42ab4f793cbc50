"""Answers of a model to a prompt: a text, or chat messages. Nothing is scored."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollover.config import Config
from rollover.engine.protocol import ExtendRequest, StopCriteria
from rollover.envs.chat import Decode, answer_decoder
from rollover.run.eval_parts import EvalParts
from rollover.run.playing import together
from rollover.tasks.image_parts import with_images_of_program
from rollover.tasks.prompts import encode_prompt
from rollover.tasks.stream import decorated
from rollover.types import Segment, StopReason, Task, rollout_seed

_numbers = itertools.count()  # of the rollouts of prompts, over all calls: an engine knows each by its id


@dataclass(frozen=True)
class Answered:
    """What the model said to a prompt. token_ids and logprobs: of each sampled token; stop_reason: why it ended."""

    text: str
    token_ids: list[int]
    logprobs: list[float]
    stop_reason: StopReason


async def answer_prompt(
    prompt: str | Sequence[Mapping[str, Any]], num: int, parts: EvalParts, config: Config
) -> list[Answered]:
    """`num` answers to a text, or to a list of chat messages, sampled as [rollout] says.

    A text is put into a user message where the model has a chat template and tasks.chat is on. ValueError for a prompt
    that leaves no room for an answer. The answers depend on run.seed, the prompt and their number alone.
    """
    tasks, tokenizer, rollout = config.tasks, parts.tokenizer, config.rollout
    if not getattr(tokenizer, "chat_template", None):
        tasks = tasks.model_copy(update={"chat": False})
    text = prompt if isinstance(prompt, str) else None
    messages = None if text is not None else with_images_of_program(prompt)  # type: ignore[arg-type]
    task = decorated(Task(task_id="sample", source="sample", reward="", prompt=text, messages=messages), tasks)
    encoded = encode_prompt(task, tokenizer, parts.processor)
    seeded = text if text is not None else task.content
    requests = [
        ExtendRequest(
            rollout_id=f"sample-{next(_numbers)}",
            prompt=encoded,
            generated_ids=(),
            max_new_tokens=rollout.max_new_tokens,
            seed=rollout_seed(config.run.seed, seeded, 0, i),
            sampling=rollout.sampling,
            stop=StopCriteria.of(rollout, parts.stop_token_ids, training=False),
            processing=rollout.logits.processing(),
        )
        for i in range(num)
    ]
    answers = await together([parts.engine.extend(request) for request in requests])
    parts.engine.release([request.rollout_id for request in requests])
    decode = answer_decoder(tokenizer, rollout.keep_special_tokens)
    return [_answered(segments, decode) for segments in answers]


def _answered(segments: Sequence[Segment], decode: Decode) -> Answered:
    ids = [int(t) for s in segments for t in s.token_ids]
    logprobs = [float(x) for s in segments for x in s.logprobs]
    return Answered(decode(ids), ids, logprobs, segments[-1].stop_reason)
