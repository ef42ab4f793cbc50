"""Evaluation: a model answers held-out tasks in each setting of [eval]; the answers are scored and summarized.

    Evaluator (of a run, at a step)  ──┐
    rollover eval                    ──┴─▶ answer_tasks ──▶ play_groups (a Driver) ──▶ summarize ──▶ row of eval.jsonl

The run's cache, ledger and records do not contain these rollouts. An Evaluator owns the encoded tasks, and evaluates
each policy version once; the loop decides when.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rollover.algorithms.shaping import ShapedScore
from rollover.config import Config, EvalSettingConfig
from rollover.config.rollout import SAMPLING, RolloutConfig
from rollover.config.tasks import Truncation
from rollover.engine.protocol import Engine
from rollover.envs.chat import Decode, answer_decoder
from rollover.envs.protocol import RunEnvironment
from rollover.rewards.answers import answer_key, answer_of, extract_answer, reference_answer
from rollover.rollout.driver import Driver
from rollover.rollout.lifecycle import Event, EventKind, Lifecycle
from rollover.rollout.requests import Requests
from rollover.rollout.watchdog import EvaluationStalled, Watchdog
from rollover.run.pipeline import Pipeline
from rollover.run.setup import RunContext
from rollover.suggest import did_you_mean
from rollover.tasks.prompts import Encode, prompt_limit, truncated
from rollover.tasks.source import held_out_names, labels_of
from rollover.tasks.stream import TaskStream
from rollover.track.answers import Answer, RoleScore, summarise_answers, write_answers
from rollover.track.jsonl import best_of, check_metric, early_stop_reason
from rollover.trajectories import Episode, episodes_of
from rollover.types import FIRST_EVAL_GROUP, Group, Prompt, Reward, StopReason, Task
from rollover.workflows.conversations import MODEL

logger = logging.getLogger(__name__)

# The options of [rollout] for sampling; the other options concern training steps.
_OF_SAMPLING = (*SAMPLING, "max_new_tokens", "stop", "stop_token_ids", "logits")


async def play_groups(
    tasks: Sequence[tuple[Task, Prompt]],
    engine: Engine,
    environment: RunEnvironment,
    config: Config,
    stop_token_ids: frozenset[int],
    seed: int,
    num_siblings: int,
) -> list[Group]:
    """Play `num_siblings` episodes of each task, and return one group per task, in their order, with rewards.

    Sampling follows config.rollout and `seed`; `stop_token_ids` (EOS) add to those of the config. Where the environment
    fails, or takes too long, the reward has the error. Nothing is interrupted or filtered. ValueError at the first
    stall ([watchdog]), or where the engine fails at a rollout watchdog.max_failures times in a row: a missing answer
    would change the mean.
    """
    sampling = {name: getattr(config.rollout, name) for name in _OF_SAMPLING}
    rollout = RolloutConfig(groups_per_step=len(tasks), group_size=num_siblings, **sampling)
    admitted: list[Group] = []

    def on_event(event: Event) -> None:
        if event.kind is EventKind.ADMIT:
            admitted.append(event.group)
        elif event.kind is EventKind.DROP:
            raise EvaluationStalled(event.why)

    lifecycle = Lifecycle(rollout, min_valid_rewards=0, listeners=[on_event], first_group_id=FIRST_EVAL_GROUP)
    watchdog = Watchdog(config.watchdog, config.rewards.allowed_s(num_siblings), patient=False)
    waiting = iter(tasks)
    driver = Driver(
        lifecycle,
        engine,
        lambda: next(waiting, None),
        environment,
        Requests(rollout, seed, stop_token_ids, may_continue=environment.has_turns),
        watchdog,
        config.workflow,
    )
    try:
        groups = await driver.collect(engine.oldest_version)
    except BaseException as error:
        driver.player.release(admitted)
        if isinstance(error, EvaluationStalled):
            raise ValueError(f"{error}: the evaluation is given up") from error
        raise
    assert groups is not None
    return groups


_ENDS = ("done", "length", "timeout", "error", "restarted")  # of agents' episodes


@dataclass(frozen=True)
class EvalTasks:
    """Held-out tasks with their prompts, the same at every evaluation. `left_out`: number of tasks whose prompts are
    too long."""

    tasks: list[Task]
    prompts: list[Prompt]
    left_out: int = 0


@dataclass(frozen=True)
class EvalAnswers:
    """The answers of an evaluation, by setting, in the order of the tasks. `ends`: counts of how agents' episodes
    end, and of restarts; {} without agents. `left_out`: see EvalTasks."""

    answers: list[Answer]
    ends: dict[str, int] = field(default_factory=dict)
    left_out: int = 0


def held_out_tasks(config: Config, encode: Encode, max_tokens: int) -> EvalTasks:
    """Return the held-out tasks that fit an engine of `max_tokens`; log the number of others.

    ValueError: see `longest_prompt` and `encode_tasks`.
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
    """Return the limit for prompts of held-out tasks in all settings.

    It is the engine's `max_tokens` less the longest answers of training and evaluation. ValueError if that is below 1.
    """
    limit = prompt_limit(config, max_tokens)
    most = max(config.eval.tokens_of(setting, config.rollout.max_new_tokens) for setting in config.eval.every_setting)
    if max_tokens - most < 1:
        raise ValueError(
            f"eval.max_new_tokens: {most} tokens leave no room for a prompt: the model's positions and"
            f" engine.kv_memory_gb allow rollouts of {max_tokens} tokens. Lower it, also in [[eval.settings]]"
        )
    return min(limit, max_tokens - most)


def encode_tasks(tasks: list[Task], encode: Encode, max_prompt_tokens: int, truncation: Truncation) -> EvalTasks:
    """Return the tasks with their prompts, truncated as in training, and the number of those that are too long.

    ValueError if no task is left.
    """
    prompts = [truncated(encode(task), max_prompt_tokens, truncation) for task in tasks]
    kept = [(task, prompt) for task, prompt in zip(tasks, prompts, strict=True) if prompt is not None]
    if not kept:
        raise ValueError("every held-out task has a prompt above tasks.max_prompt_tokens: raise it")
    return EvalTasks([task for task, _ in kept], [prompt for _, prompt in kept], len(tasks) - len(kept))


def summarize(found: EvalAnswers, config: Config) -> dict[str, Any]:
    """Return {"mean", "ci", "pass@1", ..., "sources", "missing", "left_out", "samples"}.

    A missing reward is left out of the statistics. "settings" has the same for each of [[eval.settings]], "roles" for
    each role where there are several, "episodes" the ends of agents' episodes. "samples" has the first answers of the
    first tasks. ValueError if every reward failed.
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


async def answer_tasks(
    held_out: EvalTasks,
    engine: Engine,
    environment: RunEnvironment,
    tokenizer: Any,
    config: Config,
    stop_token_ids: frozenset[int],
) -> EvalAnswers:
    """Return scored answers to every task in every setting of [eval] and [[eval.settings]], one setting at a time.

    An answer at which the environment or the reward fails has no score. ValueError: see `play_groups`.
    """
    decode = answer_decoder(tokenizer, config.rollout.keep_special_tokens)
    found: list[Answer] = []
    ends: Counter[str] = Counter()
    for setting in config.eval.every_setting:
        limit = config.eval.tokens_of(setting, config.rollout.max_new_tokens)
        sampling = {"max_new_tokens": limit, "temperature": setting.temperature, "top_p": setting.top_p}
        rollout = config.rollout.model_copy(update={**sampling, "top_k": 0, "min_p": 0.0})
        # Agents of training may be at work: the evaluation has its own Episodes and counts.
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
    return EvalAnswers(_without_default_roles(found), dict(ends), held_out.left_out)


def check_roles(found: EvalAnswers, named: Collection[str]) -> None:
    """Raise ValueError where [workflow.roles] names roles (`named`) other than those of the trajectories."""
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
    """Return the text of policy and environment; of several rollouts, each with its role."""
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
    """Return the rule that extracts the final answer from a completion, by the label of its source."""
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
    """Make an Answer. `names`: of the sources' held-out parts."""
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
    """Return role and score of each trajectory that has tokens."""
    called = [t for t in episode.trajectories if any(rollout.num_tokens for rollout in t.rollouts)]
    return tuple(RoleScore(t.role, None if t.reward is None else t.reward.score) for t in called)


def _without_default_roles(answers: list[Answer]) -> list[Answer]:
    """Return the answers, without roles where all have the default one. Siblings may have different roles."""
    named = any(of.role != MODEL for answer in answers for of in answer.roles)
    return answers if named else [replace(answer, roles=()) for answer in answers]


class Evaluator:
    """The evaluations of a run, with its engine. `is_possible`: whether the engine has the trainer's weights (not with
    recorded rollouts)."""

    def __init__(self, context: RunContext, pipeline: Pipeline) -> None:
        self.config, self.components, self.directory = context.config, context.components, context.directory
        self.hooks, self.stop, self.trackers = context.hooks, context.stop, context.directory.trackers
        self.pipeline, self.is_possible = pipeline, pipeline.syncs or context.config.algorithm.supervised
        self._tasks: EvalTasks | None = None

    async def evaluate(self) -> dict[str, Any] | None:
        """Evaluate the current weights, once. Returns their row of eval.jsonl; None if a stop cut the evaluation off.

        ValueError where nothing is held out, no task can be evaluated, or every reward fails.
        """
        if not self._is_wanted:
            raise ValueError("nothing is held out: set eval.num_tasks (it has no effect on recorded rollouts)")
        if (row := self.newest()) is not None:
            return row
        return await self._after(await self._evaluate())

    async def evaluate_if_wanted(self) -> None:
        """Evaluate if anything is held out and the run is not being stopped, once per policy version.

        A failure ends the run only before the first step: later it must not cost trained steps.
        """
        if self.stop.requested or not self._is_wanted or self.newest():
            return
        version = self.components.trainer.policy_version
        await self.pipeline.interrupt_all()  # outside of `try`: an error there is not one of the evaluation
        try:
            row = await self._evaluate()
        except ValueError as error:
            if version == 0 and not self.stop.requested:
                raise
            logger.warning(f"the evaluation after {version} steps failed: {error}")
        else:
            await self._after(row)

    def check_tasks(self) -> None:
        """Report the tasks that are left out. ValueError as for an evaluation before the first step."""
        if self._is_wanted:
            self._held_out()

    @property
    def best_step(self) -> int | None:
        """The step of the best evaluation; None before the first."""
        best = best_of(self.directory.evals.rows(), self.config.eval.metric)
        return None if best is None else best["step"]

    @property
    def early_stop_reason(self) -> str:
        """The reason to end training by eval.patience; "" to continue."""
        return early_stop_reason(self.directory.evals.rows(), self.config.eval) if self.is_possible else ""

    def newest(self) -> dict[str, Any] | None:
        """Return the evaluation of the current policy version, if it has one."""
        rows = self.directory.evals.rows()
        return rows[-1] if rows and rows[-1]["step"] == self.components.trainer.policy_version else None

    def save_best_model(self) -> None:
        """Write the current model if its evaluation is the best one (checkpoint.save_best_model).

        Not before the first step, and once per policy version.
        """
        version, files = self.components.trainer.policy_version, self.directory.evaluation_files
        if not self.config.checkpoint.save_best_model or not version or self.best_step != version:
            return
        if files.best_model_step != version:
            self.trackers.on_phase("saving the best model")
            files.delete_best_model()
            self.components.trainer.backend.save_model(files.best_model)
            self.directory.write_model_card(files.best_model, version, self.newest())
            files.on_best_model(version)

    def _held_out(self) -> EvalTasks:
        if self._tasks is None:
            components = self.components
            self._tasks = held_out_tasks(self.config, components.prompts.encode, components.engine.max_tokens)
        return self._tasks

    @property
    def _is_wanted(self) -> bool:
        return self.is_possible and self.config.eval.num_tasks > 0

    def _check_metric(self, result: dict[str, Any], version: int) -> None:
        """Check eval.metric. Before the first step a missing one ends the run; later it must not cost trained steps."""
        try:
            check_metric(result, self.config.eval.metric)
        except ValueError as error:
            if not version:
                raise
            logger.warning(f"{error}. Until then no evaluation is the best one")

    @property
    def _needs_metric(self) -> bool:
        config = self.config
        return bool(config.eval.patience or config.checkpoint.keep_best or config.checkpoint.save_best_model)

    async def _evaluate(self) -> dict[str, Any] | None:
        """Return the new row of eval.jsonl; None where a stop cut the evaluation off."""
        await self.pipeline.interrupt_all()
        self.trackers.on_phase("evaluating")
        with self.pipeline.step_log.timed("eval"), self.pipeline.event_loop_watched(lambda: "evaluating"):
            await self.pipeline.sync_for_evaluation()
            return await self._evaluated()

    async def _after(self, row: dict[str, Any] | None) -> dict[str, Any] | None:
        """Call the user's hook with a copy of the row, and return the row."""
        if row is not None:
            await self.hooks.call("on_evaluate", dict(row))
        return row

    async def _evaluated(self) -> dict[str, Any] | None:
        config, components = self.config, self.components
        version, started = components.trainer.policy_version, time.perf_counter()
        tokenizer = components.loaded.tokenizer
        held_out = self._held_out()
        found = await self.stop.unless_requested(
            answer_tasks(
                held_out, components.engine, components.environment, tokenizer, config, components.stop_token_ids
            ),
            config.watchdog.grace_s,
        )
        if found is None:
            return None
        if config.track.answers:
            write_answers(self.directory.evaluation_files.answers_file(version), found.answers)
        result = summarize(found, config)
        if not version:
            check_roles(found, config.workflow.roles)
        if self._needs_metric and not self.directory.evals.rows():
            self._check_metric(result, version)
        seconds = time.perf_counter() - started
        self.trackers.on_eval({"step": version, "policy_version": version, "seconds": seconds, **result})
        logger.info(f"held-out mean reward after {version} steps: {result['mean']:.3f}")
        return self.newest()
