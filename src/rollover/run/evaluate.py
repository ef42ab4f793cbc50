"""Held-out tasks: answered by a model in each setting of [eval], scored and summarised. Never trains."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rollover.algorithms.shaping import ShapedScore
from rollover.config import Config, EvalSettingConfig
from rollover.config.tasks import Truncation
from rollover.engine.protocol import Engine
from rollover.envs.chat import Decode, answer_decoder
from rollover.envs.protocol import RunEnvironment
from rollover.rewards.answers import answer_key, answer_of, extract_answer, reference_answer
from rollover.run.playing import play_groups
from rollover.suggest import did_you_mean
from rollover.tasks.prompts import Encode, prompt_limit, truncated
from rollover.tasks.source import held_out_names, labels_of
from rollover.tasks.stream import TaskStream
from rollover.track.answers import Answer, RoleScore, summarise_answers
from rollover.trajectories import Episode, episodes_of
from rollover.types import Group, Prompt, Reward, StopReason, Task
from rollover.workflows.calls import MODEL

logger = logging.getLogger(__name__)

_ENDS = ("done", "length", "timeout", "error", "restarted")  # of episodes that agents play


@dataclass(frozen=True)
class EvalTasks:
    """Held-out tasks with their prompts, the same at every evaluation of a run. `left_out`: how many more there are,
    whose prompts are too long."""

    tasks: list[Task]
    prompts: list[Prompt]
    left_out: int = 0


@dataclass(frozen=True)
class Answers:
    """Of an evaluation, by setting, in the order of the tasks. `ends`: how the episodes that agents played ended, and
    how many began again; {} where no agent plays. `left_out`: of EvalTasks."""

    answers: list[Answer]
    ends: dict[str, int] = field(default_factory=dict)
    left_out: int = 0


def held_out_tasks(config: Config, encode: Encode, max_tokens: int) -> EvalTasks:
    """Return the held-out tasks that fit an engine of `max_tokens`; log how many do not.

    ValueError as of `longest_prompt` and `encode_tasks`.
    """
    stream = TaskStream(config.tasks, seed=config.eval.seed, split="eval", rewards=config.rewards)
    longest = longest_prompt(config, max_tokens)
    held_out = encode_tasks(stream.take(config.eval.num_tasks), encode, longest, config.tasks.truncation)
    if held_out.left_out:
        logger.warning(
            f"{held_out.left_out} of {held_out.left_out + len(held_out.tasks)} held-out tasks are not evaluated: their"
            f" prompts exceed {longest} tokens. Raise tasks.max_prompt_tokens or lower eval.max_new_tokens, or cut"
            " prompts (tasks.truncation)"
        )
    return held_out


def longest_prompt(config: Config, max_tokens: int) -> int:
    """The longest prompt of a held-out task, the same for all settings: what the longest answers of training and
    evaluation leave of the engine's `max_tokens`. ValueError where they leave nothing."""
    limit = prompt_limit(config, max_tokens)
    most = max(config.eval.tokens_of(setting, config.rollout.max_new_tokens) for setting in config.eval.every_setting)
    if max_tokens - most < 1:
        raise ValueError(
            f"eval.max_new_tokens: {most} tokens leave no room for a prompt: the model's positions and"
            f" engine.kv_memory_gb allow rollouts of {max_tokens} tokens. Lower it, also in [[eval.settings]]"
        )
    return min(limit, max_tokens - most)


def encode_tasks(tasks: list[Task], encode: Encode, max_prompt_tokens: int, truncation: Truncation) -> EvalTasks:
    """The tasks with their prompts, cut as those of training; those that are passed over for their length are counted.
    ValueError if none is left."""
    prompts = [truncated(encode(task), max_prompt_tokens, truncation) for task in tasks]
    kept = [(task, prompt) for task, prompt in zip(tasks, prompts, strict=True) if prompt is not None]
    if not kept:
        raise ValueError("every held-out task has a prompt above tasks.max_prompt_tokens: raise it")
    return EvalTasks([task for task, _ in kept], [prompt for _, prompt in kept], len(tasks) - len(kept))


def summarised(found: Answers, config: Config) -> dict[str, Any]:
    """{"mean", "ci", "pass@1", ..., "sources", "missing", "left_out", "samples"}; a missing reward leaves the
    statistics, "left_out" tasks were not asked.

    "settings" has the same for each of [[eval.settings]], "roles" by role where there are several, "episodes" how those
    of agents ended. `samples` holds the first answers of the first tasks, for the summary. ValueError if every reward
    failed.
    """
    if all(a.score is None for a in found.answers):
        error = next((a.error for a in found.answers), None)
        raise ValueError(f"rewards: every reward of the evaluation failed; the last error is: {error}")
    cfg = config.eval

    def of(setting: EvalSettingConfig) -> dict[str, Any]:
        answers = [answer for answer in found.answers if answer.setting == setting.name]
        majority_ks = setting.majority_ks if cfg.majority else ()
        return summarise_answers(answers, cfg.pass_threshold, setting.pass_ks, majority_ks)

    main, *others = cfg.every_setting
    first = [a for a in found.answers if a.sibling == 0 and not a.setting][: config.track.show_samples]
    samples = [{"prompt": a.prompt, "completion": a.answer, "score": a.score} for a in first]
    settings = {"settings": {setting.name: of(setting) for setting in others}} if others else {}
    ends = {"episodes": found.ends} if found.ends else {}
    return {**of(main), "left_out": found.left_out, **settings, **ends, "samples": samples}


async def answers_of(
    held_out: EvalTasks,
    engine: Engine,
    environment: RunEnvironment,
    tokenizer: Any,
    config: Config,
    stop_token_ids: frozenset[int],
) -> Answers:
    """The answers to every task in every setting of [eval] and [[eval.settings]], one setting after the other, played
    with the environment, or by agents, and scored.

    An answer at which the environment or the reward fails has no score. ValueError as of `play_groups`.
    """
    decode = answer_decoder(tokenizer, config.rollout.keep_special_tokens)
    found: list[Answer] = []
    ends: Counter[str] = Counter()
    for setting in config.eval.every_setting:
        limit = config.eval.tokens_of(setting, config.rollout.max_new_tokens)
        sampling = {"max_new_tokens": limit, "temperature": setting.temperature, "top_p": setting.top_p}
        rollout = config.rollout.model_copy(update={**sampling, "top_k": 0, "min_p": 0.0})
        # Agents of training may be at work: the evaluation has Episodes, and counts, of its own.
        apart = environment.for_evaluation()
        groups = await play_groups(
            list(zip(held_out.tasks, held_out.prompts, strict=True)),
            engine,
            apart,
            config.model_copy(update={"rollout": rollout}),
            stop_token_ids,
            config.eval.seed,
            setting.samples_per_task,
        )
        found += _answers_in(setting, groups, decode, config)
        if (agents := apart.agents) is not None:
            ends.update({how: agents.counts[f"episodes/{how}"] for how in _ENDS})
    if why := ", ".join(f"{ends[how]} ended with {how}" for how in ("timeout", "error") if ends[how]):
        logger.warning(f"of {len(found)} held-out episodes {why}: docs/agents.md says what becomes of them")
    return Answers(_named(found), dict(ends), held_out.left_out)


def check_roles(found: Answers, named: Collection[str]) -> None:
    """ValueError where [workflow.roles] names roles (`named`), and not those that the trajectories have."""
    roles = {of.role for answer in found.answers for of in answer.roles} or {MODEL}
    if named and (unknown := sorted(roles - set(named))):
        raise ValueError(
            f"workflow.roles has no {unknown[0]!r}, which a trajectory of a held-out episode has; it has"
            f" {', '.join(named)}{did_you_mean(unknown[0], named)}. Add [workflow.roles.{unknown[0]}] (trained = false"
            " leaves a role out of the loss)"
        )
    if missing := sorted(set(named) - roles):
        raise ValueError(
            f"workflow.roles.{missing[0]}: no trajectory of the held-out episodes has this role, they have"
            f" {', '.join(sorted(roles))}. Give one trajectory the role, or remove [workflow.roles.{missing[0]}]"
        )


def reward_of(episode: Episode, untrained: frozenset[str] = frozenset(), shaped: ShapedScore | None = None) -> Reward:
    """Return the mean score of an Episode's trajectories, as in the metrics of training.

    Roles in `untrained` and missing scores are left out; the reward is missing where nothing is left. `shaped`:
    replaces each score by the score plus its shaping terms.
    """
    trajectories = [t for t in episode.trajectories if t.role not in untrained and t.reward is not None]
    scored = [(t, t.reward.score) for t in trajectories if t.reward is not None and t.reward.score is not None]
    if scored:
        return Reward(math.fsum(shaped(t) if shaped else score for t, score in scored) / len(scored))
    missing = trajectories[0].reward if trajectories else None
    return missing or Reward(None, error="none of its trajectories is of a role that is trained")


def text_of(episode: Episode, decode: Decode) -> str:
    """What policy and environment wrote; where there are several rollouts, each under its role."""
    texts = [(r.role, decode(r.token_ids())) for t in episode.trajectories for r in t.rollouts]
    return texts[0][1] if len(texts) == 1 else "\n".join(f"[{role}] {text.strip()}" for role, text in texts)


# Private


def _answers_in(setting: EvalSettingConfig, groups: list[Group], decode: Decode, config: Config) -> list[Answer]:
    names, rule_of = held_out_names(config.tasks.sources), _answer_rules(config)
    shaped = ShapedScore(config.rewards, config.rollout.max_new_tokens) if config.eval.shaped else None
    answers = []
    for group in groups:
        found = [_answer(episode, decode, names, config.workflow.untrained, shaped) for episode in episodes_of(group)]
        if config.eval.majority:
            rule = rule_of.get(group.task.source, config.tasks.answer_rule)
            found = [replace(answer, vote=_vote(answer.answer, rule)) for answer in found]
        answers += [replace(answer, setting=setting.name) for answer in found]
    return answers


def _answer_rules(config: Config) -> dict[str, str]:
    """How the final answer is read from a completion, by the label of its source."""
    sources = config.tasks.sources
    return {
        label: source.answer_rule or config.tasks.answer_rule
        for label, source in zip(labels_of(sources), sources, strict=True)
    }


def _vote(text: str, rule: str) -> str | None:
    answer = extract_answer(text, rule)
    return None if answer is None else answer_key(answer)


def _answer(
    episode: Episode,
    decode: Decode,
    names: Mapping[str, str],
    untrained: frozenset[str],
    shaped: ShapedScore | None,
) -> Answer:
    """`names`: of the sources' held-out parts."""
    rollouts = [rollout for trajectory in episode.trajectories for rollout in trajectory.rollouts]
    task, reward, reason = episode.task, reward_of(episode, untrained), rollouts[-1].stop_reason or StopReason.ERROR
    data_source, expected = task.columns.get("data_source"), answer_of(task.columns)
    return Answer(
        task_id=task.task_id,
        sibling=episode.sibling,
        source=names.get(task.source, task.source),
        data_source=data_source if isinstance(data_source, str) else None,
        expected=None if expected is None else reference_answer(expected),
        stop_reason=reason.value,
        num_tokens=sum(rollout.num_sampled_tokens for rollout in rollouts),
        score=reward.score if shaped is None else reward_of(episode, untrained, shaped).score,
        error=reward.error,
        prompt=task.content,
        answer=text_of(episode, decode),
        roles=_roles(episode),
        task_score=None if shaped is None else reward.score,
    )


def _roles(episode: Episode) -> tuple[RoleScore, ...]:
    """Of each of its trajectories that asked for something."""
    asked = [t for t in episode.trajectories if any(rollout.num_tokens for rollout in t.rollouts)]
    return tuple(RoleScore(t.role, None if t.reward is None else t.reward.score) for t in asked)


def _named(answers: list[Answer]) -> list[Answer]:
    """The answers, without roles where nobody names one: an episode that has the usual one alone may have siblings with
    others."""
    named = any(of.role != MODEL for answer in answers for of in answer.roles)
    return answers if named else [replace(answer, roles=()) for answer in answers]
