"""Sampling outside of training: answers to a prompt, continuations of recorded rollouts, transcripts of episodes.

    prompt ──────────────────────────────────────────────────┐
    prompt + first tokens of a recorded rollout (BranchPoint) ┴──Engine.extend──▶ text, token ids, log-probs

A continuation depends on its seed and the branch point alone: with the weights that sampled the rollout it repeats it.
It is not scored, meets no environment, and ends with the current turn.
"""

from __future__ import annotations

import asyncio
import itertools
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from rollover.checkpoint.storage import checkpoint_step
from rollover.checkpoint.store import CheckpointStore
from rollover.config import Config
from rollover.engine.protocol import Engine, ExtendRequest, StopCriteria
from rollover.envs.chat import Decode, answer_decoder
from rollover.models.devices import dtype_of
from rollover.run.run_files import FINISHED
from rollover.run.setup import EvalComponents
from rollover.tasks.image_parts import with_images_of_program
from rollover.tasks.prompts import encode_prompt
from rollover.tasks.stream import decorated
from rollover.track.records import media_of, prompt_of
from rollover.trainer.backend import StoredTensors
from rollover.trajectories import Episode, Trajectory
from rollover.types import Media, Rollout, Segment, StopReason, Task, rollout_seed

_LABEL_WIDTH = 12
_numbers = itertools.count()  # of rollout ids, over all calls: an engine needs unique ones


@dataclass(frozen=True)
class SampledAnswer:
    """An answer to a prompt. token_ids and logprobs: of each sampled token."""

    text: str
    token_ids: list[int]
    logprobs: list[float]
    stop_reason: StopReason


async def answer_prompt(
    prompt: str | Sequence[Mapping[str, Any]], num: int, components: EvalComponents, config: Config
) -> list[SampledAnswer]:
    """Return `num` answers to a text, or to a list of chat messages, with the sampling of [rollout].

    A text is put into a user message where the model has a chat template and tasks.chat is on. ValueError for a prompt
    that leaves no room for an answer. The answers depend on run.seed, the prompt and their index alone.
    """
    tasks, tokenizer, rollout = config.tasks, components.tokenizer, config.rollout
    if not getattr(tokenizer, "chat_template", None):
        tasks = tasks.model_copy(update={"chat": False})
    text = prompt if isinstance(prompt, str) else None
    messages = None if text is not None else with_images_of_program(prompt)  # type: ignore[arg-type]
    task = decorated(Task(task_id="sample", source="sample", reward="", prompt=text, messages=messages), tasks)
    encoded = encode_prompt(task, tokenizer, components.processor)
    seeded = text if text is not None else task.content
    requests = [
        ExtendRequest(
            rollout_id=f"sample-{next(_numbers)}",
            prompt=encoded,
            generated_ids=(),
            max_new_tokens=rollout.max_new_tokens,
            seed=rollout_seed(config.run.seed, seeded, 0, i),
            sampling=rollout.sampling,
            stop=StopCriteria.of(rollout, components.stop_token_ids, training=False),
            processing=rollout.logits.processing(),
        )
        for i in range(num)
    ]
    answers = await _extend_all(components.engine, requests)
    decode = answer_decoder(tokenizer, rollout.keep_special_tokens)
    found = []
    for segments in answers:
        ids, logprobs = _sampled(segments)
        found.append(SampledAnswer(decode(ids), ids, logprobs, segments[-1].stop_reason))
    return found


@dataclass(frozen=True)
class BranchPoint:
    """A recorded rollout (`Run.records`) whose first `kept` tokens stay. ValueError within text of an environment."""

    record: Mapping[str, Any]
    kept: int

    def __post_init__(self) -> None:
        num, name = self.record["num_tokens"], self.record["rollout_id"]
        if self.kept > num:
            raise ValueError(f"rollout {name} has {num} tokens: give a token from 0 to {num}")
        end = 0
        for segment in self.record["segments"]:
            first, end = end, end + segment["num_tokens"]
            if first < self.kept < end and not segment["trainable"]:
                raise ValueError(
                    f"token {self.kept} of rollout {name} is of its environment, which wrote {first} to {end - 1}. Give"
                    f" {first}, or {end}"
                )

    @property
    def token_ids(self) -> list[int]:
        """The kept tokens."""
        return list(self.record["token_ids"][: self.kept])

    def request(self, config: Config, stop_token_ids: frozenset[int], number: int) -> ExtendRequest:
        """Return the request for continuation `number`; number 0 has the seed (or greediness) of the recorded rollout.

        ValueError where rollout.max_new_tokens leaves no room.
        """
        record, rollout = self.record, config.rollout
        budget = rollout.max_new_tokens - self.kept
        if budget < 1:
            raise ValueError(
                f"rollout.max_new_tokens = {rollout.max_new_tokens}, and {self.kept} tokens are kept: give an earlier"
                f" token, or --rollout.max_new_tokens {self.kept + 256}"
            )
        start = end = 0
        for segment in record["segments"]:
            end += segment["num_tokens"]
            if not segment["trainable"] and end <= self.kept:
                start = end
        greedy = any(of["trainable"] and of["sampling"]["temperature"] == 0 for of in record["segments"])
        temperature = 0.0 if greedy and not number else rollout.temperature
        sibling = record["sibling"] if not number else f"{record['sibling']}+{number}"
        prompt = prompt_of(record)
        return ExtendRequest(
            rollout_id=f"{record['rollout_id']}+{number}",
            prompt=prompt,
            generated_ids=tuple(self.token_ids),
            max_new_tokens=budget,
            seed=rollout_seed(config.run.seed, record["task_id"], record["attempt"], sibling),
            sampling=replace(rollout.sampling, temperature=temperature),
            stop=StopCriteria.of(rollout, stop_token_ids, training=False),
            text_start=start,
            processing=rollout.logits.processing(),
            later_media=tuple(m for m in media_of(record, "later_media") if m.offset < len(prompt) + self.kept),
        )


@dataclass(frozen=True)
class Continuation:
    """A continuation. `kept`: text of the kept tokens; `text`: of the new ones; `pieces`: of each new one."""

    kept: str
    text: str
    pieces: list[str]
    token_ids: list[int]
    logprobs: list[float]
    stop_reason: str


@dataclass(frozen=True)
class Weights:
    """Weights to sample with: a saved `model`, or a `checkpoint` of the run. `description`: for a message."""

    description: str
    model: str | None = None
    checkpoint: str = ""
    version: int = 0


def newest_weights(config: Config, directory: Path) -> Weights:
    """Return the newest weights of the run in `directory`. ValueError where it has none that an engine can load.

    A run that was continued after its end has a model/ that is older than its checkpoints.
    """
    saved = (directory / "model" / "config.json").is_file()
    if saved and (directory / FINISHED).is_file():
        return Weights("the model that the run ended with", str(directory / "model"))
    names = CheckpointStore(checkpoints_of(config, directory), 1).list()
    if names and not config.model.lora.rank and config.backend.type in ("local", "ranks"):
        return Weights(f"checkpoint {names[-1]}", checkpoint=names[-1], version=checkpoint_step(names[-1]))
    if saved:
        return Weights("the model that the run had saved", str(directory / "model"))
    if (directory / "best_model" / "config.json").is_file():
        return Weights("the run's best model", str(directory / "best_model"))
    if names:
        raise ValueError(
            f"{directory} has no saved model yet, and of its checkpoint {names[-1]} (adapters, or another backend's) no"
            " engine is given the weights here: give a model by --model DIR"
        )
    raise ValueError(f"{directory} has no weights yet: no model/, and no checkpoint. Give a model by --model DIR")


def checkpoints_of(config: Config, directory: Path) -> str:
    """Return the folder or URL of the checkpoints of the run in `directory`."""
    return config.checkpoint.dir or str(directory / "checkpoints")


async def continue_from(
    point: BranchPoint, num: int, weights: Weights, config: Config, directory: Path
) -> list[Continuation]:
    """Return `num` continuations from `point`, with an engine built for them."""
    async with await EvalComponents.build(config, weights.model, with_rewards=False) as components:
        requests = [point.request(config, components.stop_token_ids, number) for number in range(num)]
        if weights.checkpoint:
            files = CheckpointStore(checkpoints_of(config, directory), 1).open(weights.checkpoint)
            stored = StoredTensors([path for file, path in files.items() if file.startswith("trainer-")])
            masters = (name for name in stored if name.startswith("master/"))
            named = ((name.removeprefix("master/"), stored[name].to(dtype_of(config))) for name in masters)
            await components.engine.load_weights(weights.version, named)
        answers = await _extend_all(components.engine, requests)
        keep = config.rollout.keep_special_tokens
        return [_continuation(point, segments, components.tokenizer, keep) for segments in answers]


def transcript(episode: Episode, decode: Decode) -> str:
    """Return the text of an episode: each trajectory with its role, score, prompts and turns."""
    return "\n".join(line for trajectory in episode.trajectories for line in _trajectory(trajectory, decode))


# Private


async def _extend_all(engine: Engine, requests: Sequence[ExtendRequest]) -> list[list[Segment]]:
    """Return the answers to all requests. If one fails, the others are cancelled."""
    tasks = [asyncio.ensure_future(engine.extend(request)) for request in requests]
    try:
        answers = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    engine.release([request.rollout_id for request in requests])
    return answers


def _sampled(segments: Sequence[Segment]) -> tuple[list[int], list[float]]:
    """Return (token ids, log-probs) of consecutive segments."""
    return [int(t) for s in segments for t in s.token_ids], [float(x) for s in segments for x in s.logprobs]


def _continuation(point: BranchPoint, segments: list[Segment], tokenizer: Any, keep_special: bool) -> Continuation:
    decode = answer_decoder(tokenizer, keep_special)
    ids, logprobs = _sampled(segments)
    return Continuation(
        kept=decode(point.token_ids),
        text=decode(ids),
        pieces=[tokenizer.decode([token]) for token in ids],
        token_ids=ids,
        logprobs=logprobs,
        stop_reason=segments[-1].stop_reason.value,
    )


def _trajectory(trajectory: Trajectory, decode: Decode) -> Iterator[str]:
    reward = trajectory.reward
    assert reward is not None
    yield f"{trajectory.role}: " + (f"no score: {reward.error}" if reward.score is None else f"score {reward.score:g}")
    for rollout in trajectory.rollouts:
        yield _labelled("prompt", _with_images(rollout.prompt.ids, rollout.prompt.media, decode))
        yield from _turns(rollout, decode)


def _with_images(ids: Sequence[int], media: Sequence[Media], decode: Decode, start: int = 0) -> str:
    """Decode ids that begin with token `start`, with "[image: name]" for the placeholders of each image."""
    parts, end = [], 0
    for image in media:
        first = image.offset - start
        parts += [decode(ids[end:first]), f"[image: {image.source.rpartition('/')[2]}]"]
        end = first + image.count
    return "".join([*parts, decode(ids[end:])])


def _turns(rollout: Rollout, decode: Decode) -> Iterator[str]:
    number, start = 0, len(rollout.prompt)
    for is_policy, of in groupby(rollout.segments, lambda segment: segment.trainable):
        segments = list(of)
        ids = [int(token) for segment in segments for token in segment.token_ids]
        number += is_policy
        if ids or is_policy:
            text = _with_images(ids, [m for segment in segments for m in segment.media], decode, start)
            yield _labelled(f"turn {number}" if is_policy else "answer", text)
        start += len(ids)


def _labelled(label: str, text: str) -> str:
    return f"  {label:<{_LABEL_WIDTH - 2}}" + textwrap.indent(text.strip(), " " * _LABEL_WIDTH).lstrip()
