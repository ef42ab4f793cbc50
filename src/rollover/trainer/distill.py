"""[distill]: advantages per token from a teacher's log-probs, and the prompts of a teacher. M loss tokens of a sample.

    d_t = clip(log teacher(a_t | c', a_<t) - log policy(a_t | c, a_<t), +-clip)
    D_t = d_t + discount * D_next        over the loss tokens, the last one first
    A_t = coef * D_t, plus the advantage of algorithm.advantage with mix = "add"

The policy is the one at the start of the step, whatever algorithm.proximal is: E[-d_t] over its tokens is
KL(policy || teacher), and with discount = 0 the gradient of the loss is that KL's at each prefix (Agarwal et al. 2023,
arXiv 2306.13649, with their reverse KL). Tokens of older versions have the importance weight that they have in every
loss. c' is the policy's prompt c, or a privileged one (OPSD: arXiv 2601.18734, SDFT: 2601.19897).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rollover.config import Config, DistillConfig
from rollover.envs.protocol import RunEnvironment
from rollover.functions import custom_function, described
from rollover.models.load import LoadedModel, ModelLimits
from rollover.trainer.reward_kl import bounded_ratio
from rollover.types import Group, Prompt, Sample, Task


@dataclass
class Divergence:
    """Sums over the loss tokens that a teacher scored: log policy/teacher and the number of clipped tokens.

    Each log-ratio is weighted by policy/behavior up to 2, so that the mean is the policy's for stale tokens, too.
    """

    kl: float = 0.0
    clipped: int = 0
    tokens: int = 0

    def metrics(self) -> dict[str, float]:
        """Return the metrics under their names in docs/metrics.md."""
        tokens = max(1, self.tokens)
        return {"distill/kl": self.kl / tokens, "distill/clipped_share": self.clipped / tokens}


def teacher_inputs(config: DistillConfig, samples: Collection[Sample]) -> list[Sample]:
    """Return the samples of taught roles, with the teacher's prompt if it has one."""
    taught = [s for s in samples if config.teaches(s.role)]
    return [s if s.teacher_prompt_ids is None else replace(s, prompt_ids=s.teacher_prompt_ids) for s in taught]


def discounted_sums(values_M: np.ndarray, discount: float) -> np.ndarray:
    """Return sum over s >= t of discount^(s - t) * values_s, float64 [M].

    Steps are loss tokens: what an environment wrote between two of them is no step.
    """
    values_M = values_M.astype(np.float64)
    if discount == 0:
        return values_M
    if discount == 1:
        return np.cumsum(values_M[::-1])[::-1]
    out, following = np.empty_like(values_M), 0.0
    for t in reversed(range(len(values_M))):
        out[t] = following = values_M[t] + discount * following
    return out


def with_teacher_advantages(
    config: DistillConfig, samples: Collection[Sample], policy: str, sums: Divergence
) -> list[Sample]:
    """Return the samples with the advantages above at their loss tokens; untaught roles stay as they are.

    They have the streams "teacher_logprobs" and `policy`. `sums` is added to. ValueError for a log-prob that is not
    finite: it would be in every weight afterwards.
    """
    out = []
    for s in samples:
        if not s.mask.any() or not config.teaches(s.role):
            out.append(s)
            continue
        ratio_M = s.in_loss("teacher_logprobs").astype(np.float64) - s.in_loss(policy)
        if not np.isfinite(ratio_M).all():
            raise ValueError(
                f"rollout {s.rollout_id}: a log-prob of the teacher or of the policy is not finite. Try model.dtype ="
                ' "float32"'
            )
        clipped_M = np.clip(ratio_M, -config.clip, config.clip) if config.clip else ratio_M
        sums.kl -= float((bounded_ratio(s.in_loss(policy), s) * ratio_M).sum())
        sums.clipped += int((clipped_M != ratio_M).sum())
        sums.tokens += len(ratio_M)
        advantages = s.advantages.copy() if config.mix == "add" else np.zeros_like(s.advantages)
        advantages[s.mask] += (config.coef * discounted_sums(clipped_M, config.discount)).astype(np.float32)
        out.append(s.with_streams(advantages=advantages))
    return out


EncodePrompt = Callable[[Task, Any], Prompt]


_RETURNS = (
    "the teacher's messages, a list of {'role': ..., 'content': ...} (of a task without messages, its prompt as a text)"
)


class TeacherPrompts:
    """Makes the prompts that a teacher reads (distill.privileged).

    `encode`: encodes what replaces the messages or the text of a task, as the policy's prompt was made
    (RunEnvironment.prompt). `positions`: of the teacher, None if unknown. ValueError if the configuration names no
    function.
    """

    def __init__(self, config: Config, encode: EncodePrompt, positions: int | None) -> None:
        self.encode, self.positions = encode, positions
        self._privileged = custom_function("distill.privileged", config.distill.privileged, _RETURNS)

    def for_samples(self, groups: Iterable[Group], samples: Sequence[Sample]) -> list[Sample]:
        """Return the samples with their teacher's prompt: the task's, then the rest of the policy's prompt.

        FunctionError if the function raises, returns no messages that the template takes, or too many for an answer to
        fit; ValueError for a prompt that does not begin with its task's.
        """
        of_group = {group.group_id: group for group in groups}
        prompts: dict[int, Prompt] = {}
        out = []
        for s in samples:
            group = of_group[s.group_id]
            if s.media:
                raise ValueError(
                    f"distill.privileged: rollout {s.rollout_id} of task {group.task.task_id!r} shows images, and a"
                    " teacher's own prompt has none. Remove distill.privileged, or the images"
                )
            if s.group_id not in prompts:
                prompts[s.group_id] = self.encode_task(group.task)
            own, of_task = s.prompt_ids.tolist(), list(group.prompt.ids)
            if own[: len(of_task)] != of_task:
                raise ValueError(
                    f"distill.privileged: the prompt of rollout {s.rollout_id} does not begin with that of its task"
                    f" {group.task.task_id!r}, so that nothing can be put in its place. Name the roles whose prompts"
                    " do (distill.roles), or remove distill.privileged"
                )
            prompt_ids = np.array([*prompts[s.group_id].ids, *own[len(of_task) :]], dtype=np.int32)
            if self.positions is not None and len(prompt_ids) + len(s.token_ids) > self.positions:
                raise self._privileged.refused(
                    f"{len(prompt_ids)} tokens for task {group.task.task_id!r}, and {len(s.token_ids)} follow: the"
                    f" model has {self.positions} positions"
                )
            out.append(replace(s, teacher_prompt_ids=prompt_ids))
        return out

    def encode_task(self, task: Task) -> Prompt:
        """Return the teacher's prompt of a task. FunctionErrors as in `for_samples`."""
        own = copy.deepcopy(task)  # the function may change it; rewards and records read the task
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
    """Return the TeacherPrompts of distill.privileged; None: the teacher reads the policy's prompts."""
    if not config.distill.privileged:
        return None
    return TeacherPrompts(config, environment.prompt, ModelLimits.from_model(loaded.model).positions)


def _are_messages(made: object) -> bool:
    """Return whether a template can take it: a list of roles and texts."""
    if not isinstance(made, list | tuple) or not made:
        return False
    texts = [m.get(key) for m in made if isinstance(m, dict) for key in ("role", "content")]
    return len(texts) == 2 * len(made) and all(isinstance(text, str) for text in texts)
