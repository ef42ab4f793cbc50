"""The vocabulary of Rollover: tasks, segments, rollouts, groups. No torch, no I/O.

Owns the meaning of every word used elsewhere (docs/architecture.md, Words). A rollout is a resumable object:
prompt tokens plus an append-only list of segments, each with one origin.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np


class RolloutState(enum.Enum):
    """State of a rollout: WAITING -> RUNNING <-> PARKED -> SCORING -> READY -> CONSUMED, or DROPPED.

    ACTING: a turn has ended, and the environment works: RUNNING -> ACTING -> PARKED, or SCORING.
    """

    WAITING = "waiting"
    RUNNING = "running"
    PARKED = "parked"
    ACTING = "acting"
    SCORING = "scoring"
    READY = "ready"
    CONSUMED = "consumed"
    DROPPED = "dropped"

    __hash__ = object.__hash__  # members are singletons; Enum's own hash is Python code, and states change often


class StopReason(enum.Enum):
    """Why a Segment ended. PAUSED belongs to a Segment, never to a stopped Rollout."""

    EOS = "eos"
    STOP_STRING = "stop_string"
    LENGTH = "length"
    PAUSED = "paused"
    REPETITION = "repetition"
    ENV_DONE = "env_done"
    TIMEOUT = "timeout"  # the environment exceeded workflow.timeout_s
    ABANDONED = "abandoned"  # the agent of a workflow cancelled a call of it
    ERROR = "error"  # the environment failed, also after workflow.retries

    @property
    def is_cut(self) -> bool:
        """Whether the answer ended before the policy's own end."""
        return self in (StopReason.LENGTH, StopReason.REPETITION)

    __hash__ = object.__hash__  # as above


class DropReason(enum.Enum):
    """Why a group left the system untrained. Every drop has a reason, and a counter."""

    STALE = "stale"
    TOO_FEW_REWARDS = "too_few_rewards"
    FILTERED = "filtered"  # by one of [filters]: no learning signal
    STALLED = "stalled"  # by the watchdog: a rollout without a token in time, also after retries
    FAILED = "failed"  # the engine failed at a rollout watchdog.max_failures times
    RESTARTED = "restarted"  # rollouts of an Episode that was restarted; never a whole group
    ROLLED_BACK = "rolled_back"  # steps were lost: exceeds the staleness bound, or its versions cannot be compared
    BASELINE = "baseline"  # tokens of greedy rollouts of trained groups: a baseline, never trained
    MASKED = "masked"  # tokens of trained groups that left the loss: rollout.on_stale = "mask"
    ABANDONED = "abandoned"  # tokens of rollouts of trained groups whose agent cancelled a call


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The distribution tokens are sampled from: softmax(logits / temperature), then truncated.

    `temperature` 0 is greedy. `top_p` 1, `top_k` 0 and `min_p` 0 mean no truncation.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    @property
    def truncated(self) -> bool:
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0


@dataclass(frozen=True, slots=True)
class Task:
    """One problem to solve.

    `task_id` is stable over runs; `attempt` counts earlier visits of the same task (its epoch).
    Exactly one of `messages` (chat) and `prompt` (plain text, no chat template) is set. The content of a message is a
    text, or a list of parts where it shows images: {"type": "text", "text": ...} and {"type": "image", "image": path of
    its file, "sha256": of the file's bytes}. `plain`: the data has a text, which `tasks.chat` put into the last of
    `messages`: rewards get texts.
    `columns` is what the reward needs (answer, ground_truth, data_source, ...): JSON values only.
    `reward` names the reward function (see rewards/registry.py); `source` labels per-source metrics.
    """

    task_id: str
    source: str
    reward: str
    messages: tuple[dict[str, Any], ...] | None = None
    prompt: str | None = None
    columns: dict[str, Any] = field(default_factory=dict)
    attempt: int = 0
    plain: bool = False

    @property
    def reward_prompt(self) -> str | list[dict[str, Any]]:
        """The prompt for a reward function, in the form of the data: a text, or a list of messages."""
        if self.prompt is not None:
            return self.prompt
        messages = [dict(m) for m in self.messages or ()]
        return content_text(messages[-1]["content"]) if self.plain else messages

    @property
    def content(self) -> str:
        """The whole problem in one text, with "[image: name]" for each image."""
        if self.prompt is not None:
            return self.prompt
        return "\n".join(f"{m['role']}: {content_text(m['content'])}" for m in self.messages or ())

    @property
    def images(self) -> list[str]:
        """The paths of the images that its messages show, in order."""
        return images_in(self.messages or ())

    def to_json(self) -> dict[str, Any]:
        """Return its JSON form for checkpoints and the journal."""
        return {**asdict(self), "messages": None if self.messages is None else [dict(m) for m in self.messages]}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Task:
        """Make a task from `to_json`."""
        messages = saved["messages"]
        return cls(**{**saved, "messages": None if messages is None else tuple(messages)})


def images_in(messages: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the paths of the images in messages, in order."""
    contents = [m["content"] for m in messages if isinstance(m.get("content"), list | tuple)]
    return [part["image"] for content in contents for part in content if part["type"] == "image"]


def content_text(content: Any, image: Callable[[Mapping[str, Any]], str] | None = None) -> str:
    """Return the content of a message as one text. `image`: text for an image part; default "[image: name]"."""
    if not isinstance(content, list | tuple):
        return content if isinstance(content, str) else str(content)
    image = image or (lambda part: f"[image: {str(part.get('image')).rpartition('/')[2]}]")
    return "".join(str(part.get("text")) if part.get("type") == "text" else image(part) for part in content)


def without_sources(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as chat templates take it, with {"type": "image"} for an image: some look for a part's keys."""
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return dict(message)
    return {**message, "content": [p if p["type"] == "text" else {"type": "image"} for p in content]}


def joined(*contents: Any) -> str | list[Mapping[str, Any]]:
    """Join contents of messages to one content: a text where all are texts."""
    if all(isinstance(content, str) for content in contents):
        return "".join(contents)
    texts = ([{"type": "text", "text": content}] if isinstance(content, str) else content for content in contents)
    return [part for parts in texts for part in parts]


@dataclass(frozen=True, slots=True)
class Media:
    """An image among token ids, without its pixels, which are read from `source` on demand.

    `digest`: SHA-256 of the decoded pixels (hexadecimal), to detect a changed file. `size`: width and height in pixels.
    Its placeholders are the tokens from `offset` to `offset + count` that have the model's placeholder id; `offset`
    counts from the first token of the prompt. `grid`: number of patches in time, height and width, where the model
    needs it.
    """

    source: str
    digest: str
    size: tuple[int, int]
    offset: int
    count: int
    grid: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Media:
        return cls(**{**saved, "size": tuple(saved["size"]), "grid": tuple(saved["grid"])})

    def moved(self, by: int) -> Media:
        """Return the image with `by` added to its offset."""
        return replace(self, offset=self.offset + by)


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, placeholders of images included, and the media that these stand for.

    Equal prompts may share keys and values: images of one size have equal ids, so the media tell them apart.
    """

    ids: tuple[int, ...] = ()
    media: tuple[Media, ...] = ()

    def __len__(self) -> int:
        return len(self.ids)

    @staticmethod
    def check(prompt: object) -> None:
        """Raise TypeError unless it is a Prompt: custom code may pass bare token ids."""
        if not isinstance(prompt, Prompt):
            raise TypeError(f"a prompt is a {type(prompt).__name__}: give rollover.Prompt.of(token_ids)")

    @classmethod
    def of(cls, ids: Iterable[int], media: Iterable[Mapping[str, Any]] = ()) -> Prompt:
        """Make a prompt from token ids, and media as `media_to_json` returns them."""
        return cls(tuple(ids), tuple(map(Media.from_json, media)))

    def media_to_json(self) -> dict[str, Any]:
        """Return {"media": [...]}, or {} for text alone, to save beside the ids."""
        return {"media": [media.to_json() for media in self.media]} if self.media else {}


# Gives the next task to be admitted, with its prompt; None at the end of all tasks.
NextTask = Callable[[], tuple[Task, Prompt] | None]


# Tolerance of a log-prob above 0, for rounding: float32 numbers of the size of 10^5 (logits over a low temperature) are
# 0.008 apart. Invalid log-probs (probabilities, logits, ones without sign) exceed it nearly everywhere.
LOGPROB_NOISE = 0.01


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """A contiguous run of tokens with one origin. Immutable.

    token_ids: int32 [n]. logprobs: float32 [n], behavior log-prob of each token under the distribution it was sampled
    from (0 where not `trainable`). All tokens were sampled under `policy_version`, or written by the environment
    (`trainable=False`), which may show images: `media`. start: index of the first token, counted from the end of the
    prompt. An engine sets it, so that duplicate tokens are detected; None: unknown.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    policy_version: int
    sampling: SamplingParams
    stop_reason: StopReason
    trainable: bool = True
    start: int | None = None
    media: tuple[Media, ...] = ()
    num_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_tokens", len(self.token_ids))
        assert self.token_ids.shape == self.logprobs.shape and self.token_ids.ndim == 1
        self.token_ids.setflags(write=False)
        self.logprobs.setflags(write=False)

    def __len__(self) -> int:
        return self.num_tokens

    def why_not_sampled(self) -> str | None:
        """Return why the log-probs are invalid: NaN, infinite, or above 0 by more than rounding. None if valid.

        Segments from outside are checked, since importance weights are computed from them.
        """
        if not self.trainable:
            return None
        possible = (self.logprobs <= LOGPROB_NOISE) & (self.logprobs > -np.inf)
        if possible.all():
            return None
        wrong = int(np.argmin(possible))
        value = self.logprobs[wrong]
        return f"its token {wrong} has the log-prob {value:g}, which is none: they are finite, and at most 0"

    @classmethod
    def nothing(cls, sampling: SamplingParams, start: int) -> Segment:
        """Make the empty PAUSED segment of an interrupted rollout of `start` tokens. Its version is meaningless."""
        empty = np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.float32)
        return cls(*empty, 0, sampling, StopReason.PAUSED, start=start)

    def to_json(self) -> dict[str, Any]:
        """Return its JSON form without the two arrays."""
        return {
            "policy_version": self.policy_version,
            "sampling": asdict(self.sampling),
            "stop_reason": self.stop_reason.value,
            "trainable": self.trainable,
            "start": self.start,
            **Prompt(media=self.media).media_to_json(),
        }

    @classmethod
    def from_json(cls, saved: Mapping[str, Any], token_ids: np.ndarray, logprobs: np.ndarray) -> Segment:
        """Make a segment from `to_json` and its arrays."""
        return cls(
            token_ids=token_ids,
            logprobs=logprobs,
            policy_version=saved["policy_version"],
            sampling=SamplingParams(**saved["sampling"]),
            stop_reason=StopReason(saved["stop_reason"]),
            trainable=saved["trainable"],
            start=saved.get("start"),  # absent in checkpoints of older versions
            media=tuple(map(Media.from_json, saved.get("media", ()))),
        )


@dataclass(frozen=True, slots=True)
class Reward:
    """Result of scoring: a finite `score`, or None with `error` (missing data, never a silent 0).

    Score and extras are those of the whole Trajectory, and equal in all of its Rollouts. Per-turn values are in the
    Rollout that has the turns, in order: `turns`, one reward each (workflow.credit = "turn_returns"; empty: 0), and
    `advantages`, if the trajectory has its own: a number for all tokens, or one per turn, or per token of it. Lists,
    arrays and tensors are stored as tuples. `shaping`: terms added to the trained score alone, by the names of
    rewards.functions. `texts`: texts that the function returned, for records.
    """

    score: float | None
    extras: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    turns: Sequence[float] = ()
    advantages: Any = None
    shaping: dict[str, float] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.turns) or self.advantages is not None:
            object.__setattr__(self, "turns", _plain(self.turns))
            object.__setattr__(self, "advantages", _plain(self.advantages))

    @property
    def missing(self) -> bool:
        return self.score is None

    def to_json(self) -> dict[str, Any]:
        """Return its JSON form for checkpoints and the journal; the inverse is `Reward(**saved)`."""
        rest = {name: getattr(self, name) for name in ("turns", "advantages", "shaping", "texts")}
        known = {name: value for name, value in rest.items() if value is not None and value not in ((), {})}
        return {"score": self.score, "extras": self.extras, "error": self.error} | known


@dataclass(slots=True, eq=False)
class Rollout:
    """One attempt at a Task. Only RolloutCache changes it.

    `add` appends segments and updates the counts: num_tokens, after the prompt, over all segments; num_sampled_tokens,
    the trainable ones, which the ledger counts; versions, the distinct policy versions of the sampled tokens, in order
    of appearance; min_version, the smallest of them. `greedy`: a baseline, which is never trained; set at admission, or
    by a token sampled at temperature 0. `stop_reason`: why it stopped; while ACTING, why its turn did.

    `prompt`: siblings with equal prompts share one object. `sibling`: its Episode within the group; `trajectory`: index
    of its Trajectory within that; `context`: its index in the trajectory; `role`: the agent that it is sampled for
    (trajectories.py has the views). A plain task has one of each. `turn_key`: key of the call that opened it
    (workflows/turns.py), which seeds its sampling; None: the sibling's seed.
    """

    group_id: int
    sibling: int
    task: Task
    segments: list[Segment] = field(default_factory=list)
    state: RolloutState = RolloutState.WAITING
    stop_reason: StopReason | None = None
    reward: Reward | None = None
    greedy: bool = False
    prompt: Prompt = Prompt()
    role: str = "policy"
    trajectory: int = 0
    context: int = 0
    turn_key: int | None = None
    rollout_id: str = field(init=False)
    num_tokens: int = field(init=False, default=0)
    num_sampled_tokens: int = field(init=False, default=0)
    versions: list[int] = field(init=False, default_factory=list)
    min_version: int | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        further = f".{self.trajectory}.{self.context}" if self.trajectory or self.context else ""
        self.rollout_id = f"{episode_name(self.group_id, self.sibling)}{further}"
        segments, self.segments = self.segments, []
        for segment in segments:
            self.add(segment)

    def add(self, segment: Segment) -> None:
        """Append a segment."""
        self.segments.append(segment)
        num = segment.num_tokens
        self.num_tokens += num
        if not segment.trainable:
            return
        if segment.sampling.temperature == 0:
            self.greedy = True
        version = segment.policy_version
        if num:
            self.num_sampled_tokens += num
            if version not in self.versions:
                self.versions.append(version)
                if self.min_version is None or version < self.min_version:
                    self.min_version = version

    def why_not_sampled(self) -> str | None:
        """Return why a segment has invalid log-probs; None if all are valid."""
        return next(filter(None, (segment.why_not_sampled() for segment in self.segments)), None)

    def token_ids(self) -> list[int]:
        """Token ids after the prompt, over all segments."""
        return [int(t) for s in self.segments for t in s.token_ids]

    @property
    def later_media(self) -> tuple[Media, ...]:
        """Images after the prompt, from an environment."""
        return tuple(media for segment in self.segments for media in segment.media)


@dataclass(slots=True, eq=False)
class Group:
    """The sibling rollouts of one Task. `group_id` is the index of its admission: 0, 1, 2, ...

    `prompt`: of the task, and default of its rollouts. `kept`: values of episodes that survive a kill, JSON by sibling
    and name.
    """

    group_id: int
    task: Task
    prompt: Prompt
    rollouts: list[Rollout]
    kept: dict[int, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        Prompt.check(self.prompt)
        for rollout in self.rollouts:
            rollout.prompt = rollout.prompt or self.prompt

    @property
    def ready(self) -> bool:
        return all(r.state is RolloutState.READY for r in self.rollouts)

    @property
    def min_version(self) -> int | None:
        """Smallest policy version among the sampled tokens of all siblings; None before the first token."""
        return min((r.min_version for r in self.rollouts if r.min_version is not None), default=None)


def _plain(value: Any) -> Any:
    """Turn lists, arrays and tensors into tuples of numbers."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    return tuple(map(_plain, value)) if isinstance(value, list | tuple) else value


def copied(group: Group) -> Group:
    """Return a copy with its own lists and rollouts, for code that may change it."""
    return replace(group, rollouts=[replace(rollout) for rollout in group.rollouts])


def why_not_in_vocabulary(token_ids: np.ndarray, vocab_size: int) -> str | None:
    """Return which token id is not below `vocab_size`; None if all are."""
    outside = (token_ids < 0) | (token_ids >= vocab_size)
    if not outside.any():
        return None
    wrong = int(np.argmax(outside))
    return f"its token {wrong} has the id {token_ids[wrong]}, and those of the model are 0 to {vocab_size - 1}"


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """A training row of a finished Rollout: its tokens after the prompt, and streams of one number per token.

    token_ids int32, mask bool (True: in the loss), `streams`: all [n]. Every sample has the streams "behavior_logprobs"
    and "advantages", float32, and "versions", int32; a training step adds others (trainer/streams.py), each with 0
    outside the loss. `media`: of prompt and answer. `temperature`: of the sampling. `teacher_prompt_ids`: the prompt of
    a teacher; None: the same. `sequence_id`: rows with equal ids are one sequence in aggregations; "": the row alone.
    `truncated`: cut at the token limit (StopReason.LENGTH).
    """

    rollout_id: str
    group_id: int
    prompt_ids: np.ndarray
    token_ids: np.ndarray
    mask: np.ndarray
    streams: Mapping[str, np.ndarray]
    temperature: float
    teacher_prompt_ids: np.ndarray | None = None
    sequence_id: str = ""
    role: str = "policy"
    truncated: bool = False
    media: tuple[Media, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "sequence_id", self.sequence_id or self.rollout_id)

    @property
    def behavior_logprobs(self) -> np.ndarray:
        return self.streams["behavior_logprobs"]

    @property
    def versions(self) -> np.ndarray:
        return self.streams["versions"]

    @property
    def advantages(self) -> np.ndarray:
        return self.streams["advantages"]

    @property
    def num_loss_tokens(self) -> int:
        return int(self.mask.sum())

    def in_loss(self, name: str) -> np.ndarray:
        """Return the stream `name` of the loss tokens [M]."""
        return self.streams[name][self.mask]

    def with_streams(self, **streams: np.ndarray) -> Sample:
        """Return a copy with these streams [n] added or replaced."""
        return replace(self, streams={**self.streams, **streams})

    def with_loss_stream(self, name: str, values_M: np.ndarray) -> Sample:
        """Return a copy with a stream of the loss tokens [M]; 0 elsewhere."""
        values = np.zeros(len(self.mask), values_M.dtype)
        values[self.mask] = values_M
        return self.with_streams(**{name: values})

    def only(self, names: Container[str]) -> Sample:
        """Return a copy with only these streams."""
        return replace(self, streams={name: values for name, values in self.streams.items() if name in names})


FIRST_EVAL_GROUP = -(1 << 31)
"""The id of an evaluation's first group. Groups with ids below 0 are never trained, nor counted with trained ones."""


def group_name(group_id: int) -> str:
    """Return the name of a Group in messages; eval-N for the group of task N of an evaluation."""
    return str(group_id) if group_id >= 0 else f"eval-{group_id - FIRST_EVAL_GROUP}"


def episode_name(group_id: int, sibling: int) -> str:
    """Return the name of an Episode, and of its first Rollout."""
    return f"{group_name(group_id)}-{sibling}"


def rollout_seed(run_seed: int, task_id: str, attempt: int, sibling: int | str) -> int:
    """Return the 64-bit key of a rollout's randomness. With the absolute token index it determines every draw."""
    text = f"{run_seed}/{task_id}/{attempt}/{sibling}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
