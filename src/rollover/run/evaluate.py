"""Answers of a model: to held-out tasks, scored and summarised, and to a prompt. Never trains."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from rollover.config import Config
from rollover.engine.protocol import Engine, ExtendRequest
from rollover.envs.protocol import Environment
from rollover.envs.single_turn import has_turns
from rollover.rewards.answers import reference_answer
from rollover.rewards.registry import answer_of
from rollover.rollout.acting import Acting, EnvironmentFailed
from rollover.rollout.asker import Asker
from rollover.rollout.requests import Requests
from rollover.rollout.scorings import reward_of_time_out
from rollover.rollout.turn import is_asked, to_append
from rollover.rollout.watchdog import Watchdog
from rollover.run.eval_parts import EvalParts
from rollover.tasks.build import held_out_names
from rollover.tasks.prompts import Encode, encode_prompt
from rollover.tasks.stream import TaskStream, decorated
from rollover.track.answers import Answer, summary_of
from rollover.types import Reward, Rollout, RolloutState, SamplingParams, Segment, StopReason, Task, rollout_seed

_Result = TypeVar("_Result")
_numbers = itertools.count()  # of the rollouts of prompts, over all calls: an engine knows each by its id


@dataclass(frozen=True)
class EvalTasks:
    """Held-out tasks with their prompts, the same at every evaluation of a run."""

    tasks: list[Task]
    prompts: list[tuple[int, ...]]


def held_out_tasks(config: Config, say: Callable[[str], None]) -> list[Task]:
    """The held-out tasks: the same ones at every evaluation. `say` is told what is left out."""
    stream = TaskStream(config.tasks, seed=config.eval.seed, split="eval", rewards=config.rewards)
    stream.say = say
    return stream.take(config.eval.num_tasks)


def encode_tasks(tasks: list[Task], encode: Encode, max_prompt_tokens: int) -> EvalTasks:
    """The tasks with their prompts, without those whose prompt is too long. ValueError if none is left."""
    prompts = [encode(t) for t in tasks]
    kept = [i for i, p in enumerate(prompts) if len(p) <= max_prompt_tokens]
    if not kept:
        raise ValueError("every held-out task has a prompt above tasks.max_prompt_tokens: raise it")
    return EvalTasks([tasks[i] for i in kept], [prompts[i] for i in kept])


async def evaluate(
    held_out: EvalTasks,
    engine: Engine,
    environment: Environment,
    tokenizer: Any,
    config: Config,
    stop_token_ids: frozenset[int],
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Answer, score and summarise: see `summarised`. ValueErrors as `answers_of`."""
    return summarised(await answers_of(held_out, engine, environment, tokenizer, config, stop_token_ids, say), config)


def summarised(answers: Sequence[Answer], config: Config) -> dict[str, Any]:
    """{"mean", "ci", "pass@1", ..., "sources", "missing", "samples"}; a missing reward leaves the statistics.

    `samples` holds the first answers of the first tasks, for the summary. ValueError if every reward failed.
    """
    if all(a.score is None for a in answers):
        error = next((a.error for a in answers), None)
        raise ValueError(f"rewards: every reward of the evaluation failed; the last error is: {error}")
    cfg = config.eval
    ks = [k for k in (1, 2, 4, 8, 16, 32, 64) if k < cfg.samples_per_task] + [cfg.samples_per_task]
    first = [a for a in answers if a.sibling == 0][: config.track.show_samples]
    samples = [{"prompt": a.prompt, "completion": a.answer, "score": a.score} for a in first]
    return {**summary_of(answers, cfg.pass_threshold, ks), "samples": samples}


async def answers_of(
    held_out: EvalTasks,
    engine: Engine,
    environment: Environment,
    tokenizer: Any,
    config: Config,
    stop_token_ids: frozenset[int],
    say: Callable[[str], None],
) -> list[Answer]:
    """eval.samples_per_task answers to every task, played with the environment and scored by it; in the order of the
    tasks. `say` prints a line.

    An answer at which the environment fails has no score. ValueError if a rollout or a task's scoring stalls, or the
    engine fails at a rollout again and again ([watchdog]).
    """
    cfg = config.eval
    watchdog = Watchdog(config.watchdog, config.rewards.allowed_s(cfg.samples_per_task))
    asker = Asker(engine, config.watchdog, say)
    clock = asyncio.get_running_loop().time
    sampling = SamplingParams(temperature=cfg.temperature, top_p=cfg.top_p)
    requests = Requests(config.rollout, cfg.seed, stop_token_ids, may_go_on=has_turns(environment))
    most = config.rollout.max_new_tokens
    names = held_out_names(config.tasks.sources)

    async def one(index: int, sibling: int) -> tuple[Rollout, Reward | None]:
        """The rollout when it is done, and its reward if the environment, which failed at it, is not asked for that."""
        prompt_ids = tuple(held_out.prompts[index])
        # No group that is trained has this id.
        rollout = Rollout(-1 - index, sibling, held_out.tasks[index], prompt_ids=prompt_ids)
        rollout.rollout_id = f"eval-{index}-{sibling}"
        acting, reward = Acting(environment.next, config.workflow, say), None
        while reward is None and rollout.stop_reason in (None, StopReason.PAUSED):
            request = requests.to_go_on(rollout)
            request = replace(request, sampling=sampling, pause_after=0, stop_repetition_tokens=0)
            watchdog.on_start(rollout.rollout_id, index, rollout.num_tokens, clock())
            segments = await asker.extend(request)
            acts = requests.may_go_on and is_asked(rollout, segments, most)
            _add(rollout, segments)
            watchdog.on_end(rollout.rollout_id, rollout.num_tokens, clock())
            if acts:
                try:
                    _add(rollout, to_append(rollout, await _answer_to(acting, rollout), most))
                except EnvironmentFailed as failed:
                    reward = Reward(None, error=str(failed))
        if rollout.stop_reason is StopReason.TIMEOUT:
            reward = reward_of_time_out(config.workflow)
        rollout.state = RolloutState.SCORING
        asker.release([rollout.rollout_id])
        return rollout, reward

    async def one_task(index: int) -> list[Answer]:
        played = await _together([one(index, s) for s in range(cfg.samples_per_task)])
        watchdog.on_score(index, clock())
        done = [rollout for rollout, reward in played if reward is None]
        rewards = iter(await environment.score(done) if done else [])
        watchdog.on_scored(index, clock())
        answers = []
        for rollout, reward in played:
            text = tokenizer.decode(tuple(rollout.token_ids()), skip_special_tokens=True)
            answers.append(_answer(rollout, reward or next(rewards), text, names))
        return answers

    async def all_tasks() -> list[Answer]:
        tasks = await _together([one_task(i) for i in range(len(held_out.tasks))])
        return [answer for of_task in tasks for answer in of_task]

    return await _unless_it_stalls(all_tasks(), asker, watchdog)


def _add(rollout: Rollout, segments: Sequence[Segment]) -> None:
    """Append them; what stops with the last of them has stopped."""
    for segment in segments:
        rollout.add(segment)
        rollout.stop_reason = segment.stop_reason


async def _answer_to(acting: Acting, rollout: Rollout) -> Segment | None:
    """What the environment writes after its turn. Raises as Acting.end."""
    acting.begin(rollout)
    try:
        while not (done := acting.done()):
            await asyncio.wait(acting.waited_for, return_when=asyncio.FIRST_COMPLETED)
        return acting.end(done[0][1])
    finally:
        acting.clear()


def _answer(rollout: Rollout, reward: Reward, text: str, names: Mapping[str, str]) -> Answer:
    """`text`: what policy and environment wrote. `names`: of the sources' held-out parts."""
    task, reason = rollout.task, rollout.stop_reason
    assert reason is not None
    data_source, expected = task.columns.get("data_source"), answer_of(task.columns)
    return Answer(
        task_id=task.task_id,
        sibling=rollout.sibling,
        source=names.get(task.source, task.source),
        data_source=data_source if isinstance(data_source, str) else None,
        expected=None if expected is None else reference_answer(expected),
        stop_reason=reason.value,
        num_tokens=rollout.num_sampled_tokens,
        score=reward.score,
        error=reward.error,
        prompt=task.content,
        answer=text,
    )


async def _together(work: Sequence[Coroutine[Any, Any, _Result]]) -> list[_Result]:
    """The results of all. Where one fails the others are cancelled."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def _unless_it_stalls(evaluation: Coroutine[Any, Any, _Result], asker: Asker, watchdog: Watchdog) -> _Result:
    """The result of `evaluation`. It is not worth a second try: the first stall ends it with a ValueError."""
    if not watchdog.is_on:
        return await evaluation
    work = asyncio.ensure_future(evaluation)
    clock = asyncio.get_running_loop().time
    try:
        while not work.done():
            await asyncio.wait([work], timeout=watchdog.pause(clock()))
            rollout_ids = watchdog.extending
            progress = {i: [] for i in rollout_ids} | await asker.progress(rollout_ids)
            stalls = watchdog.look(clock(), progress, await asker.queued(rollout_ids), watchdog.scoring)
            if stalls and not work.done():
                work.cancel()
                await asyncio.wait([work], timeout=watchdog.config.grace_s)
                raise ValueError(f"watchdog: {'; '.join(stall.what for stall in stalls)}: the evaluation is given up")
    finally:
        work.cancel()
    return work.result()


@dataclass(frozen=True)
class Answered:
    """What the model said to a prompt. token_ids and logprobs: of each sampled token; stop_reason: why it ended."""

    text: str
    token_ids: list[int]
    logprobs: list[float]
    stop_reason: StopReason


async def answer_prompt(
    prompt: str | Sequence[Mapping[str, str]], num: int, parts: EvalParts, config: Config
) -> list[Answered]:
    """`num` answers to a text, or to a list of chat messages, sampled as [rollout] says.

    A text is put into a user message where the model has a chat template and tasks.chat is on. ValueError for a prompt
    that leaves no room for an answer. The answers depend on run.seed, the prompt and their number alone.
    """
    tasks, tokenizer, rollout = config.tasks, parts.tokenizer, config.rollout
    if not getattr(tokenizer, "chat_template", None):
        tasks = tasks.model_copy(update={"chat": False})
    text = prompt if isinstance(prompt, str) else None
    messages = None if text is not None else tuple(dict(message) for message in prompt)  # type: ignore[arg-type]
    task = decorated(Task(task_id="sample", source="sample", reward="", prompt=text, messages=messages), tasks)
    ids = encode_prompt(task, tokenizer)
    seeded = text if text is not None else task.content
    requests = [
        ExtendRequest(
            rollout_id=f"sample-{next(_numbers)}",
            prompt_ids=ids,
            generated_ids=(),
            max_new_tokens=rollout.max_new_tokens,
            seed=rollout_seed(config.run.seed, seeded, 0, i),
            sampling=SamplingParams(rollout.temperature, rollout.top_p, rollout.top_k, rollout.min_p),
            stop_token_ids=parts.stop_token_ids | frozenset(rollout.stop_token_ids),
            stop_strings=tuple(rollout.stop),
        )
        for i in range(num)
    ]
    answers = await _together([parts.engine.extend(request) for request in requests])
    parts.engine.release([request.rollout_id for request in requests])
    return [_answered(segments, tokenizer) for segments in answers]


def _answered(segments: Sequence[Segment], tokenizer: Any) -> Answered:
    ids = [int(t) for s in segments for t in s.token_ids]
    logprobs = [float(x) for s in segments for x in s.logprobs]
    return Answered(tokenizer.decode(ids, skip_special_tokens=True), ids, logprobs, segments[-1].stop_reason)
