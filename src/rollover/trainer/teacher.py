"""What a teacher is made of: another model, with the policy's vocabulary, and the prompts that it reads instead.

Owns nothing afterwards: the backend computes with the model, and a sample carries its prompt. The weights of a teacher
that is the policy of an earlier version are kept_weights.py's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from rollover.config import Config, ModelConfig
from rollover.envs.protocol import RunEnvironment
from rollover.functions import described, own_function, shortened
from rollover.models.devices import dtype_of
from rollover.models.limits import Limits
from rollover.models.load import LoadedModel, load_model, load_outline
from rollover.models.norms import compile_norms
from rollover.types import Group, Prompt, Sample, Task

EncodeInstead = Callable[[Task, Any], Prompt]
_RETURNS = (
    "the teacher's messages, a list of {'role': ..., 'content': ...} (of a task without messages, its prompt as a text)"
)


def load_teacher(config: Config, policy: LoadedModel) -> LoadedModel:
    """The model of distill.teacher on the policy's device in compute dtype, ready for passes without a gradient.

    ValueError where it cannot be loaded, or where its token ids mean other tokens than the policy's.
    """
    device = next(policy.model.parameters()).device
    loaded = load_beside(config, "distill.teacher", config.distill.model_path, policy, device)
    loaded.model.requires_grad_(False)
    compile_norms(loaded.model, dtype_of(config))
    return loaded


def load_teacher_outline(config: Config, policy: LoadedModel) -> LoadedModel:
    """Tokenizer and shapes of the model of distill.teacher, whose weights are elsewhere. Errors as `load_teacher`."""
    return load_other("distill.teacher", config.distill.model_path, policy, config, load_outline)


def load_teacher_in_float32(config: Config, policy: LoadedModel, *, with_weights: bool) -> LoadedModel:
    """The model of distill.teacher as ranks spread it: without weights, its shapes. Errors as `load_teacher`."""
    load = load_model if with_weights else partial(load_outline, filled_later=True)
    return load_other("distill.teacher", config.distill.model_path, policy, config, load)


def load_beside(
    config: Config, key: str, path: str, policy: LoadedModel, device: torch.device | None = None
) -> LoadedModel:
    """The model that the option `key` names by `path`, in compute dtype, which scores the policy's tokens. ValueError
    where it cannot be loaded, or where its token ids mean other tokens than the policy's."""
    return load_other(key, path, policy, config, lambda cfg: load_model(cfg, dtype=dtype_of(config), device=device))


def load_other(
    key: str,
    path: str,
    policy: LoadedModel,
    config: Config,
    load: Callable[[ModelConfig], LoadedModel],
    use: str = "It scores",
) -> LoadedModel:
    """The model that the option `key` names by `path`, as `load` makes it. `use`: in messages, what it does with ids.
    ValueError where it cannot be loaded, or where its token ids mean other tokens than the policy's."""
    try:
        loaded = load(config.model.model_copy(update={"path": path, "revision": ""}))
    except ValueError as error:
        raise ValueError(str(error).replace("model.path", key)) from error
    if why := other_vocabulary(policy.tokenizer, loaded.tokenizer):
        raise ValueError(
            f"{key} = {path!r} has another vocabulary than the policy, {policy.path!r}: {why}. {use} the ids"
            " that the policy sampled: choose a model of the policy's family, with the same tokenizer"
        )
    return loaded


def other_vocabulary(policy: Any, teacher: Any) -> str:
    """Where two tokenizers give a token another id, in words; "" if their maps are the same. What pads an embedding
    beyond the tokenizer's ids has no token, and is not compared."""
    of_policy, of_teacher = policy.get_vocab(), teacher.get_vocab()
    if of_policy == of_teacher:
        return ""
    for token, number in sorted(of_policy.items(), key=lambda item: item[1]):
        if of_teacher.get(token) != number:
            other = of_teacher.get(token)
            there = "there is none of that name" if other is None else f"it is {other} there"
            return f"{shortened(token)} is token {number} of the policy, and {there}"
    return f"it has {len(of_teacher) - len(of_policy)} tokens that the policy has not"


class TeacherPrompts:
    """What a teacher reads in the place of prompts, as distill.privileged says.

    `encode`: makes the prompt of a task, and of what is read in the place of its messages or its text, as the policy's
    was made (RunEnvironment.prompt). `positions`: of the teacher, None if it does not say. ValueError where the
    configuration names no function.
    """

    def __init__(self, config: Config, encode: EncodeInstead, positions: int | None) -> None:
        self.encode, self.positions = encode, positions
        self._privileged = own_function("distill.privileged", config.distill.privileged, _RETURNS)

    def for_samples(self, groups: Iterable[Group], samples: Sequence[Sample]) -> list[Sample]:
        """The samples of these groups, each with its teacher's prompt: that of the task, and what the policy's prompt
        has after that of the task. FunctionError where the function raises, or returns no messages that the template
        can take, or so many that an answer does not fit behind them; ValueError for a prompt that is none of the task.
        """
        of_group = {group.group_id: group for group in groups}
        told: dict[int, Prompt] = {}
        out = []
        for s in samples:
            group = of_group[s.group_id]
            if s.media:
                raise ValueError(
                    f"distill.privileged: rollout {s.rollout_id} of task {group.task.task_id!r} shows images, and a"
                    " teacher's own prompt has none. Remove distill.privileged, or the images"
                )
            if s.group_id not in told:
                told[s.group_id] = self.of_task(group.task)
            own, of_task = s.prompt_ids.tolist(), list(group.prompt.ids)
            if own[: len(of_task)] != of_task:
                raise ValueError(
                    f"distill.privileged: the prompt of rollout {s.rollout_id} does not begin with that of its task"
                    f" {group.task.task_id!r}, so that nothing can be put in its place. Name the roles whose prompts"
                    " do (distill.roles), or remove distill.privileged"
                )
            prompt_ids = np.array([*told[s.group_id].ids, *own[len(of_task) :]], dtype=np.int32)
            if self.positions is not None and len(prompt_ids) + len(s.token_ids) > self.positions:
                raise self._privileged.refused(
                    f"{len(prompt_ids)} tokens for task {group.task.task_id!r}, and {len(s.token_ids)} follow: the"
                    f" model has {self.positions} positions"
                )
            out.append(replace(s, teacher_prompt_ids=prompt_ids))
        return out

    def of_task(self, task: Task) -> Prompt:
        """Its prompt for the teacher. FunctionErrors as above."""
        own = copy.deepcopy(task)  # which it may change: rewards and records read the task, too
        given: Any = own.prompt if own.messages is None else list(own.messages)
        made = self._privileged(own, given)
        if task.messages is None:
            if not isinstance(made, str) or not made:
                raise self._privileged.refused(f"{described(made)} for task {task.task_id!r}, whose prompt is a text")
            return self.encode(task, made)
        if not _are_messages(made):
            raise self._privileged.refused(f"{described(made)} for task {task.task_id!r}")
        try:
            return self.encode(task, [dict(m) for m in made])
        except ValueError as error:  # of the chat template, or of the environment
            raise self._privileged.failed(error) from error


def teacher_prompts(config: Config, loaded: LoadedModel, environment: RunEnvironment) -> TeacherPrompts | None:
    """As distill.privileged says; None: the teacher reads what the policy reads."""
    if not config.distill.privileged:
        return None
    return TeacherPrompts(config, environment.prompt, Limits.of(loaded.model).positions)


def _are_messages(made: object) -> bool:
    """Whether a template can take it: a list of roles and texts."""
    if not isinstance(made, list | tuple) or not made:
        return False
    texts = [m.get(key) for m in made if isinstance(m, dict) for key in ("role", "content")]
    return len(texts) == 2 * len(made) and all(isinstance(text, str) for text in texts)
