"""Prompts: tasks of a stream -> prompt token ids.

Also counts tasks that are skipped for their length, or by tasks.before_produce. This is the only place that tokenises
the text of a prompt; a rollout continues by token ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from rollover.config import Config
from rollover.config.tasks import Truncation
from rollover.functions import CustomFunction, custom_function, described
from rollover.images import BadImage
from rollover.models.chat_template import prompt_arguments
from rollover.tasks.curriculum import Curriculum, build_curriculum
from rollover.tasks.image_parts import task_with_images
from rollover.tasks.source import rewarded_by
from rollover.tasks.stream import TaskStream
from rollover.types import Prompt, Task

if TYPE_CHECKING:
    from rollover.models.processor import Processor

TASK_OR_NONE = "the Task to use, or None to leave it out"
_MAX_SKIPS = 1000

Encode = Callable[[Task], Prompt]


def encoder(tokenizer: Any, processor: Processor | None = None) -> Encode:
    """Return the encoder of prompts to which the environment adds nothing."""
    return partial(encode_prompt, tokenizer=tokenizer, processor=processor)


def encode_prompt(task: Task, tokenizer: Any, processor: Processor | None = None) -> Prompt:
    """Encode the task's prompt; chat messages by the tokenizer's chat template. `processor`: the model's, for images;
    None: the model takes text only."""
    if task.messages is None:
        assert task.prompt is not None
        try:
            return Prompt.of(tokenizer(task.prompt)["input_ids"])
        except (TypeError, ValueError) as error:  # half a surrogate pair is no text
            raise ValueError(f"task {task.task_id!r} of {task.source}: its prompt is no text: {error}") from error
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "the model's tokenizer has no chat template: set tasks.chat = false to send prompts as plain text"
        )
    messages, options = prompt_arguments(task.messages)
    try:
        if task.images:
            if processor is None:
                raise ValueError(
                    "it shows images, and the model (model.path) takes text alone: choose a vision-language model, or"
                    " leave the column of images out"
                )
            return processor.prompt(messages, **options)
        ids = tokenizer.apply_chat_template(messages, **options, tokenize=True, return_dict=False)
    except (TemplateError, TypeError, ValueError) as error:  # a template may omit a message that is continued
        why = str(error) if task.images else f"the model's chat template refuses its messages: {error}"
        raise ValueError(f"task {task.task_id!r} of {task.source}: {why}") from error
    return Prompt.of(ids)


def truncated(prompt: Prompt, max_tokens: int, truncation: Truncation) -> Prompt | None:
    """Truncate a prompt to `max_tokens`; None if the task is skipped instead, as one with media always is."""
    over = len(prompt) - max_tokens
    if over <= 0:
        return prompt
    if truncation == "skip" or prompt.media:
        return None
    kept = {"left": 0, "right": max_tokens, "middle": max_tokens // 2}[truncation]  # at the beginning
    return Prompt(prompt.ids[:kept] + prompt.ids[kept + over :])


class PromptSource:
    """Yields the next (task, prompt) of a stream when called, None at the end; too long prompts are skipped or
    truncated.

    `replace`: tasks.before_produce. `curriculum`: that of the stream. `whole_steps`: number of tasks of a step with
    tasks.drop_last, 0 = off; they are read together, and dropped (`num_dropped_last`) if the pass ends before that.
    """

    def __init__(
        self,
        stream: TaskStream,
        encode: Encode,
        max_prompt_tokens: int,
        replace: Callable[[Task, int], Task | None] | None = None,
        truncation: Truncation = "skip",
        curriculum: Curriculum | None = None,
        whole_steps: int = 0,
    ) -> None:
        self.stream, self.encode, self.max_prompt_tokens = stream, encode, max_prompt_tokens
        self.replace = replace and CustomFunction.over(replace, "tasks.before_produce", TASK_OR_NONE)
        self.version = 0  # of the trainer, for `replace` alone
        self.truncation: Truncation = truncation
        self.curriculum = curriculum
        self.num_skipped = 0
        self.num_truncated = 0
        self.num_left_out = 0
        self.num_dropped_last = 0
        self.whole_steps = whole_steps
        self._step: list[tuple[Task, Prompt]] = []  # the tasks of the next step
        self._given = 0  # number of these that were given
        self._before_step: dict[str, Any] = {}

    def __call__(self) -> tuple[Task, Prompt] | None:
        before, mark = self.state_dict(), self.curriculum and self.curriculum.mark()
        try:
            return self._next_of_step() if self.whole_steps else self._next()
        except BaseException:  # do not skip the task that failed: a resumed run reads it again
            self.load_state_dict(before)
            if self.curriculum and mark:
                self.curriculum.back_to(mark)
            raise

    def on_step(self, version: int) -> None:
        """Set the trainer's version, for tasks.before_produce."""
        self.version = version

    def rewarded(self, task: Task) -> Task:
        """Return a checkpoint's task with the reward of this configuration, since a file must not name code to run.

        With tasks.before_produce, which may set any reward, it is unchanged. ValueError as of `rewarded_by`.
        """
        return task if self.replace is not None else rewarded_by(task, self.stream.setups)

    def _next_of_step(self) -> tuple[Task, Prompt] | None:
        if self._given == len(self._step):
            self._before_step = self._own_state()
            self._step, self._given = self._read_step(), 0
            if not self._step:
                return None
        self._given += 1
        return self._step[self._given - 1]

    def _read_step(self) -> list[tuple[Task, Prompt]]:
        """Read the tasks of a step, all of one pass; [] at the end. ValueError if a whole pass has too few."""
        step: list[tuple[Task, Prompt]] = []
        before = self._own_state()
        begins = before["stream"]["draws"] == 0  # whether the step begins with the first task of a pass
        while len(step) < self.whole_steps:
            found, now = self._next(), self._own_state()
            is_new_pass = self._passes(now) != self._passes(before)
            if step and (found is None or is_new_pass):
                if begins:
                    raise ValueError(
                        f"tasks.drop_last: a pass over the data has {len(step)} tasks, too few for a step of"
                        f" {self.whole_steps} (rollout.groups_per_step). Lower rollout.groups_per_step, or set"
                        " tasks.drop_last = false"
                    )
                self.num_dropped_last += len(step)
                self._before_step = before | {"num_dropped_last": self.num_dropped_last}
                step = []
            begins = begins or (is_new_pass and not step)
            if found is None:
                return []
            step.append(found)
            before = now
        return step

    def _passes(self, state: Mapping[str, Any]) -> int:
        """Return the completed passes over the only trained source; 0 with several, whose passes end separately."""
        several = sum(setup.config.weight > 0 for setup in self.stream.setups) > 1
        return 0 if several else sum(source["epoch"] for source in state["stream"]["sources"])

    def _next(self) -> tuple[Task, Prompt] | None:
        for _ in range(_MAX_SKIPS):
            task = self.stream.next()
            if task is None:
                return None
            if self.replace is not None:
                task = _replaced(task, self.replace, self.version)
                if task is None:
                    self.num_left_out += 1
                    continue
            whole = self.encode(task)
            prompt = truncated(whole, self.max_prompt_tokens, self.truncation)
            if prompt is not None:
                self.num_truncated += len(prompt) < len(whole)
                return task, prompt
            self.num_skipped += 1
        raise ValueError(
            f"{_MAX_SKIPS} tasks in a row have prompts above {self.max_prompt_tokens} tokens, or were left out by"
            " tasks.before_produce: raise tasks.max_prompt_tokens, or lower rollout.max_new_tokens if the model's"
            " positions are the limit; or let prompts be cut (tasks.truncation)"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return JSON: the stream's state and the counts; with tasks.drop_last, those before the next step."""
        if self._given == len(self._step):
            return self._own_state()
        return self._before_step | {"given": self._given}

    def _own_state(self) -> dict[str, Any]:
        return {
            "stream": self.stream.state_dict(),
            "num_skipped": self.num_skipped,
            "num_left_out": self.num_left_out,
            "num_truncated": self.num_truncated,
            "num_dropped_last": self.num_dropped_last,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.stream.load_state_dict(state["stream"])
        self.num_skipped = state["num_skipped"]
        self.num_left_out = state.get("num_left_out", 0)
        self.num_truncated = state.get("num_truncated", 0)
        self.num_dropped_last = state.get("num_dropped_last", 0)
        self._step, self._given = [], 0
        for _ in range(state.get("given", 0)):
            self._next_of_step()


def build_prompts(config: Config) -> Callable[[Encode, int], PromptSource]:
    """Open the training tasks, and return (encode, max prompt tokens) -> PromptSource.

    ValueError for an invalid [tasks], before a model is loaded for its tokenizer.
    """
    trained = [source for source in config.tasks.sources if source.weight or config.algorithm.supervised]
    if config.tasks.sources and not trained:
        raise ValueError("tasks.sources: every source has weight = 0, and is never trained. Raise the weight of one")
    curriculum = build_curriculum(config)
    stream = TaskStream(
        config.tasks,
        seed=config.run.seed,
        split="train",
        rewards=config.rewards,
        curriculum=curriculum,
        may_be_empty=config.algorithm.supervised,
    )
    name = config.tasks.before_produce
    before_produce = custom_function("tasks.before_produce", name, TASK_OR_NONE) if name else None
    whole_steps = config.rollout.groups_per_step if config.tasks.drop_last else 0
    return lambda encode, max_prompt_tokens: PromptSource(
        stream, encode, max_prompt_tokens, before_produce, config.tasks.truncation, curriculum, whole_steps
    )


def prompt_limit(config: Config, max_tokens: int) -> int:
    """Return the longest prompt: tasks.max_prompt_tokens, or what rollout.max_new_tokens leaves of the engine's
    `max_tokens`. ValueError if that is nothing."""
    left = max_tokens - config.rollout.max_new_tokens
    if left < 1:
        raise ValueError(
            f"rollout.max_new_tokens = {config.rollout.max_new_tokens} leaves no room for a prompt: the model's"
            f" positions and engine.kv_memory_gb allow rollouts of {max_tokens} tokens. Lower it"
        )
    return min(config.tasks.max_prompt_tokens, left)


def _replaced(task: Task, replace: CustomFunction, version: int) -> Task | None:
    other = replace(task, version)
    if other is not None and not isinstance(other, Task):
        raise replace.refused(f"{described(other)} for {task.task_id}")
    try:
        return other and task_with_images(other)
    except BadImage as error:
        raise replace.refused(f"a Task for {task.task_id} with an image that cannot be used: {error}") from error
