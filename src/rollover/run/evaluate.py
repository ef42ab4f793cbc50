"""Held-out tasks: answered by a model in each setting of [eval], scored and summarised. Never trains."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from rollover.algorithms.shaping import ShapedScore
from rollover.config import Config, EvalSettingConfig
from rollover.config.rollout import SAMPLING, RolloutConfig
from rollover.config.tasks import Truncation
from rollover.engine.protocol import Engine
from rollover.envs.answer_text import Decode, answer_decoder
from rollover.envs.protocol import RunEnvironment
from rollover.rewards.answers import answer_key, answer_of, extract_answer, reference_answer
from rollover.rollout.driver import Driver
from rollover.rollout.lifecycle import Event, EventKind, Lifecycle
from rollover.rollout.requests import Requests
from rollover.rollout.watchdog import GivenUp, Watchdog
from rollover.run.best import best_of, check_metric, why_enough
from rollover.run.model_card import write_model_card
from rollover.run.overlap import Overlap
from rollover.run.setup import RunContext
from rollover.run.weight_sync import WeightSync
from rollover.suggest import did_you_mean
from rollover.tasks.build import held_out_names, labels_of
from rollover.tasks.prompts import Encode, prompt_limit, shortened_to
from rollover.tasks.stream import TaskStream
from rollover.track.answers import Answer, RoleScore, summary_of, write_answers
from rollover.trajectories import Episode, episodes_of
from rollover.types import FIRST_EVAL_GROUP, Group, Prompt, Reward, StopReason, Task
from rollover.workflows.calls import MODEL

_Result = TypeVar("_Result")

# The options of [rollout] for sampling; the others are about training steps.
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
    """Play `num_siblings` episodes of each task. Returns one group per task, in their order, with rewards.

    Sampling follows config.rollout and `seed`; `stop_token_ids` (EOS) add to those of the config. Where the environment
    fails, or takes too long, the reward has the error. Raises ValueError at the first stall ([watchdog]), or where the
    engine fails at a rollout watchdog.max_failures times in a row: a missing answer would change the mean.
    """
    sampling = {name: getattr(config.rollout, name) for name in _OF_SAMPLING}
    rollout = RolloutConfig(groups_per_step=len(tasks), group_size=num_siblings, **sampling)
    admitted: list[Group] = []

    def on_event(event: Event) -> None:
        if event.kind is EventKind.ADMIT:
            admitted.append(event.group)
        elif event.kind is EventKind.DROP:
            raise GivenUp(event.why)

    lifecycle = Lifecycle(rollout, min_valid_rewards=0, listeners=[on_event], first_group_id=FIRST_EVAL_GROUP)
    watchdog = Watchdog(config.watchdog, config.rewards.allowed_s(num_siblings), patient=False)
    waiting = iter(tasks)
    driver = Driver(
        lifecycle,
        engine,
        lambda: next(waiting, None),
        environment,
        Requests(rollout, seed, stop_token_ids, may_go_on=environment.has_turns),
        watchdog,
        config.workflow,
    )
    try:
        groups = await driver.collect(engine.oldest_version)
    except BaseException as error:
        driver.player.release(admitted)
        if isinstance(error, GivenUp):
            raise ValueError(f"{error}: the evaluation is given up") from error
        raise
    assert groups is not None
    return groups


async def together(work: Sequence[Coroutine[Any, Any, _Result]]) -> list[_Result]:
    """Return the results of all. If one fails the others are cancelled."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


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
    prompts = [shortened_to(encode(task), max_prompt_tokens, truncation) for task in tasks]
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
        return summary_of(answers, cfg.pass_threshold, setting.pass_ks, majority_ks)

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
        apart = environment.apart()
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


class Evaluator:
    """Evaluates with the run's engine. `is_possible`: whether that has the trainer's weights; of recorded rollouts it
    does not."""

    def __init__(self, context: RunContext, overlap: Overlap, weight_sync: WeightSync, *, is_possible: bool) -> None:
        self.config, self.parts, self.directory = context.config, context.parts, context.directory
        self.hooks, self.stop, self.trackers = context.hooks, context.stop, context.directory.trackers
        self.overlap, self.weight_sync, self.is_possible = overlap, weight_sync, is_possible
        self._tasks: EvalTasks | None = None

    async def evaluate(self) -> dict[str, Any] | None:
        """Evaluate the present weights, once: their row of eval.jsonl; None where a stop cut the evaluation off.

        ValueError where nothing is held out, no task can be evaluated, or every reward fails.
        """
        if not self._is_wanted:
            raise ValueError("nothing is held out: set eval.num_tasks (it has no effect on recorded rollouts)")
        if (row := self.newest()) is not None:
            return row
        return await self._told(await self._evaluate())

    async def evaluate_if_wanted(self) -> None:
        """Evaluate if anything is held out and the run is not being stopped, once per policy version.

        A failure ends the run only before the first step: later it must not cost what was trained.
        """
        if self.stop.requested or not self._is_wanted or self.newest():
            return
        version = self.parts.trainer.policy_version
        await self.overlap.interrupt_all()  # what fails there is no evaluation
        try:
            row = await self._evaluate()
        except ValueError as error:
            if version == 0 and not self.stop.requested:
                raise
            logger.warning(f"the evaluation after {version} steps failed: {error}")
        else:
            await self._told(row)

    def check_tasks(self) -> None:
        """Report the tasks that are left out. ValueError as for an evaluation before the first step."""
        if self._is_wanted:
            self._held_out()

    @property
    def best_step(self) -> int | None:
        """After which step the best evaluation was made; None before the first."""
        best = best_of(self.directory.evals.rows(), self.config.eval.metric)
        return None if best is None else best["step"]

    @property
    def why_enough(self) -> str:
        """Why training ends by eval.patience; "" where it goes on."""
        return why_enough(self.directory.evals.rows(), self.config.eval) if self.is_possible else ""

    def newest(self) -> dict[str, Any] | None:
        """The evaluation of the present policy version; None if it has none."""
        rows = self.directory.evals.rows()
        return rows[-1] if rows and rows[-1]["step"] == self.parts.trainer.policy_version else None

    def save_best_model(self) -> None:
        """Write the model of the present weights, if their evaluation is the best one (checkpoint.save_best_model), and
        that was not done. The weights before the first step are the model that the run began with."""
        version, files = self.parts.trainer.policy_version, self.directory.of_evaluations
        if not self.config.checkpoint.save_best_model or not version or self.best_step != version:
            return
        if files.best_model_step != version:
            self.trackers.on_phase("saving the best model")
            files.forget_best_model()
            self.parts.trainer.backend.save_model(files.best_model)
            write_model_card(files.best_model, self.config, version, self.newest())
            files.on_best_model(version)

    def _held_out(self) -> EvalTasks:
        if self._tasks is None:
            parts = self.parts
            self._tasks = held_out_tasks(self.config, parts.prompts.encode, parts.engine.max_tokens)
        return self._tasks

    @property
    def _is_wanted(self) -> bool:
        return self.is_possible and self.config.eval.num_tasks > 0

    def _check_metric(self, result: dict[str, Any], version: int) -> None:
        """Before the first step a metric that is not there ends the run; later it must not cost what was trained."""
        try:
            check_metric(result, self.config.eval.metric)
        except ValueError as error:
            if not version:
                raise
            logger.warning(f"{error}. Until then no evaluation is the best one")

    @property
    def _looks_at_metric(self) -> bool:
        config = self.config
        return bool(config.eval.patience or config.checkpoint.keep_best or config.checkpoint.save_best_model)

    async def _evaluate(self) -> dict[str, Any] | None:
        """The new row of eval.jsonl; None where a stop cut it off, which waits for no answer and no score."""
        await self.overlap.interrupt_all()
        self.trackers.on_phase("evaluating")
        with self.overlap.rows.timed("eval"), self.overlap.event_loop_watched(lambda: "evaluating"):
            await self.weight_sync.before_evaluation()
            return await self._evaluated()

    async def _told(self, row: dict[str, Any] | None) -> dict[str, Any] | None:
        """The row, after the user's hook has had a copy of it."""
        if row is not None:
            await self.hooks.call("on_evaluate", dict(row))
        return row

    async def _evaluated(self) -> dict[str, Any] | None:
        config, parts = self.config, self.parts
        version, started = parts.trainer.policy_version, time.perf_counter()
        tokenizer = parts.loaded.tokenizer
        held_out = self._held_out()
        found = await self.stop.unless_requested(
            answers_of(held_out, parts.engine, parts.environment, tokenizer, config, parts.stop_token_ids),
            config.watchdog.grace_s,
        )
        if found is None:
            return None
        if config.track.answers:
            write_answers(self.directory.of_evaluations.answers_of(version), found.answers)
        result = summarised(found, config)
        if not version:
            check_roles(found, config.workflow.roles)
        if self._looks_at_metric and not self.directory.evals.rows():
            self._check_metric(result, version)
        seconds = time.perf_counter() - started
        self.trackers.on_eval({"step": version, "policy_version": version, "seconds": seconds, **result})
        logger.info(f"held-out mean reward after {version} steps: {result['mean']:.3f}")
        return self.newest()
