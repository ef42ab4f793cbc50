"""A branch: a recorded rollout continues from one of its tokens, with weights of its run, or of another model.

    prompt + its first tokens, as they were sampled ──extend──▶ what comes instead

What comes depends on its own seed and the place alone: with the weights that sampled it, it is what came. Nothing is
scored, and no environment answers: it goes on to the end of the present turn.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rollover.checkpoint.store import CheckpointStore, checkpoint_step
from rollover.config import Config
from rollover.engine.protocol import ExtendRequest, StopCriteria
from rollover.envs.chat import answer_decoder
from rollover.models.devices import dtype_of
from rollover.run.eval_parts import EvalParts
from rollover.run.playing import together
from rollover.run.run_files import FINISHED
from rollover.track.records import media_of, prompt_of
from rollover.trainer.stored_tensors import StoredTensors
from rollover.types import Segment, rollout_seed


@dataclass(frozen=True)
class BranchPoint:
    """A recorded rollout (`Run.records`), of which the first `kept` tokens stay. ValueError where it cannot be."""

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
        """Those that stay."""
        return list(self.record["token_ids"][: self.kept])

    def request(self, config: Config, stop_token_ids: frozenset[int], number: int) -> ExtendRequest:
        """`number`: 0 has the draws of the rollout itself (none of a greedy one), others have their own. ValueError
        where there is no room."""
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
    """What came. `kept`: the text of the tokens that stay. `text`: of those that came; `pieces`: of each of them."""

    kept: str
    text: str
    pieces: list[str]
    token_ids: list[int]
    logprobs: list[float]
    stop_reason: str


@dataclass(frozen=True)
class Weights:
    """Which weights go on: a saved model (`model`), or those of a `checkpoint` in the store of the run. `said`: what
    they are."""

    said: str
    model: str | None = None
    checkpoint: str = ""
    version: int = 0


def newest_weights(config: Config, directory: Path) -> Weights:
    """The newest that the run in `directory` has. ValueError where it has none, or none that can be sampled with.

    A run that goes on after its end has a model/ that is older than its checkpoints."""
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
    """Where the checkpoints of the run in `directory` are."""
    return config.checkpoint.dir or str(directory / "checkpoints")


async def continue_from(
    place: BranchPoint, num: int, weights: Weights, config: Config, directory: Path
) -> list[Continuation]:
    """What comes after `place`, `num` times, of an engine that is built for it alone."""
    async with await EvalParts.build(config, weights.model, with_rewards=False) as parts:
        requests = [place.request(config, parts.stop_token_ids, number) for number in range(num)]
        if weights.checkpoint:
            files = CheckpointStore(checkpoints_of(config, directory), 1).open(weights.checkpoint)
            stored = StoredTensors([path for file, path in files.items() if file.startswith("trainer-")])
            masters = (name for name in stored if name.startswith("master/"))
            named = ((name.removeprefix("master/"), stored[name].to(dtype_of(config))) for name in masters)
            await parts.engine.load_weights(weights.version, named)
        answers = await together([parts.engine.extend(request) for request in requests])
        parts.engine.release([request.rollout_id for request in requests])
        keep = config.rollout.keep_special_tokens
        return [_gone_on(place, segments, parts.tokenizer, keep) for segments in answers]


def _gone_on(place: BranchPoint, segments: list[Segment], tokenizer: Any, keep_special_tokens: bool) -> Continuation:
    decode = answer_decoder(tokenizer, keep_special_tokens)
    kept, ids = place.token_ids, [int(t) for s in segments for t in s.token_ids]
    return Continuation(
        kept=decode(kept),
        text=decode(ids),
        pieces=[tokenizer.decode([of]) for of in ids],
        token_ids=ids,
        logprobs=[float(x) for s in segments for x in s.logprobs],
        stop_reason=segments[-1].stop_reason.value,
    )
