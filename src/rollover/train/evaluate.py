"""Evaluation on held-out tasks, and `rollover eval` / `rollover sample`. Same engine, same scoring, no training."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from rollover.config import Config
from rollover.config.load import Resolved
from rollover.engine.protocol import Engine, ExtendRequest
from rollover.envs.single_turn import encode_prompt
from rollover.envs.tasks.stream import decorated
from rollover.rewards.protocol import Rewarder, ScoreRequest
from rollover.rollout.watchdog import Watchdog
from rollover.track.statistics import summarise_eval
from rollover.types import Reward, SamplingParams, Task, rollout_seed

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class EvalTasks:
    """Held-out tasks with their prompts, the same at every evaluation of a run."""

    tasks: list[Task]
    prompts: list[tuple[int, ...]]


def encode_tasks(tasks: list[Task], tokenizer: Any, max_prompt_tokens: int) -> EvalTasks:
    """Leaves out tasks whose prompt is longer than that, as training does."""
    prompts = [encode_prompt(t, tokenizer) for t in tasks]
    kept = [i for i, p in enumerate(prompts) if len(p) <= max_prompt_tokens]
    if not kept:
        raise ValueError("every held-out task has a prompt above tasks.max_prompt_tokens: raise it")
    return EvalTasks([tasks[i] for i in kept], [prompts[i] for i in kept])


async def evaluate(
    held_out: EvalTasks,
    engine: Engine,
    rewarder: Rewarder,
    tokenizer: Any,
    config: Config,
    stop_token_ids: frozenset[int],
) -> dict[str, Any]:
    """{"mean", "ci", "pass@1", ..., "sources", "missing", "samples"}; a missing reward leaves the statistics.

    `samples` holds the first answers of the first tasks, for the summary.
    ValueError if every reward failed, or if a rollout or a task's scoring stalls ([watchdog]).
    """
    cfg = config.eval
    watchdog = Watchdog(config.watchdog, config.rewards.allowed_s(cfg.samples_per_task))
    clock = asyncio.get_running_loop().time
    sampling = SamplingParams(temperature=cfg.temperature, top_p=cfg.top_p)

    async def one_task(index: int) -> tuple[list[str], list[Reward]]:
        task, prompt = held_out.tasks[index], held_out.prompts[index]

        async def one(sibling: int) -> tuple[int, ...]:
            rollout_id = f"eval-{index}-{sibling}"
            watchdog.on_start(rollout_id, index, 0, clock())
            segments = await engine.extend(
                ExtendRequest(
                    rollout_id=rollout_id,
                    prompt_ids=prompt,
                    generated_ids=(),
                    max_new_tokens=config.rollout.max_new_tokens,
                    seed=rollout_seed(cfg.seed, task.task_id, task.attempt, sibling),
                    sampling=sampling,
                    stop_token_ids=stop_token_ids | frozenset(config.rollout.stop_token_ids),
                    stop_strings=tuple(config.rollout.stop),
                )
            )
            watchdog.on_end(rollout_id, sum(map(len, segments)), clock())
            return tuple(int(t) for s in segments for t in s.token_ids)

        ids = await asyncio.gather(*[one(s) for s in range(cfg.samples_per_task)])
        texts = [tokenizer.decode(i, skip_special_tokens=True) for i in ids]
        watchdog.on_score(index, clock())
        rewards = await rewarder.score([ScoreRequest(task, text, i) for text, i in zip(texts, ids, strict=True)])
        watchdog.on_scored(index, clock())
        return texts, rewards

    async def all_tasks() -> list[tuple[list[str], list[Reward]]]:
        return await asyncio.gather(*[one_task(i) for i in range(len(held_out.tasks))])

    results = await _unless_it_stalls(all_tasks(), engine, watchdog)
    scored = [
        (task.source, task.task_id, valid)
        for task, (_, rewards) in zip(held_out.tasks, results, strict=True)
        if (valid := [r.score for r in rewards if r.score is not None])
    ]
    missing = sum(r.missing for _, rewards in results for r in rewards)
    if not scored:
        error = next((r.error for _, rewards in results for r in rewards if r.missing), None)
        raise ValueError(f"rewards: every reward of the evaluation failed; the last error is: {error}")
    samples = [
        {"prompt": held_out.tasks[i].content, "completion": results[i][0][0], "score": results[i][1][0].score}
        for i in range(min(config.track.show_samples, len(results)))
    ]
    ks = [k for k in (1, 2, 4, 8, 16, 32, 64) if k < cfg.samples_per_task] + [cfg.samples_per_task]
    summary = summarise_eval(scored, cfg.pass_threshold, ks)
    return {**summary, "missing": missing, "samples": samples}


async def _unless_it_stalls(evaluation: Coroutine[Any, Any, _Result], engine: Engine, watchdog: Watchdog) -> _Result:
    """Its result. An evaluation is not worth a second try: the first stall ends it with a ValueError."""
    if not watchdog.is_on:
        return await evaluation
    work = asyncio.ensure_future(evaluation)
    clock = asyncio.get_running_loop().time
    try:
        while not work.done():
            await asyncio.wait([work], timeout=watchdog.pause(clock()))
            rollout_ids = watchdog.extending
            progress = {i: [] for i in rollout_ids} | engine.progress(rollout_ids)
            stalls = watchdog.look(clock(), progress, engine.queued(rollout_ids), watchdog.scoring)
            if stalls and not work.done():
                work.cancel()
                await asyncio.wait([work], timeout=watchdog.config.grace_s)
                raise ValueError(f"watchdog: {'; '.join(stall.what for stall in stalls)}: the evaluation is given up")
    finally:
        work.cancel()
    return work.result()


def run_eval(resolved: Resolved, model: str | None, as_json: bool) -> int:
    """`rollover eval`: exit code."""
    from rollover.train.setup import EvalParts, prompt_limit

    config = resolved.config
    if config.eval.num_tasks == 0:
        raise ValueError("eval.num_tasks = 0 means no evaluation: set it, for instance --eval.num_tasks 100")

    async def go() -> dict[str, Any]:
        parts = EvalParts.build(config, model)
        try:
            assert parts.rewarder is not None
            held_out = encode_tasks(parts.held_out_tasks(), parts.tokenizer, prompt_limit(config, parts.engine))
            return await evaluate(held_out, parts.engine, parts.rewarder, parts.tokenizer, config, parts.stop_token_ids)
        finally:
            await parts.close()

    result = asyncio.run(go())
    if as_json:
        print(json.dumps(result))
        return 0
    print_eval(result)
    return 0


def print_eval(result: dict[str, Any]) -> None:
    """A table of mean reward and pass@k with 95 % intervals, per source."""
    from rich.console import Console
    from rich.table import Table

    names = [k for k in result if k.startswith("pass@") and not k.endswith("_ci")]
    table = Table("source", "tasks", "mean reward", *names)
    for source, row in [*result["sources"].items(), ("all", result)]:
        interval = f" [{row['ci'][0]:.3f}, {row['ci'][1]:.3f}]" if row["ci"] else ""
        cells = []
        for name in names:
            ci = row.get(f"{name}_ci")
            cells.append(f"{row[name]:.3f}" + (f" [{ci[0]:.3f}, {ci[1]:.3f}]" if ci else ""))
        table.add_row(source, str(row["tasks"]), f"{row['mean']:.3f}{interval}", *cells)
    Console().print(table)


def run_sample(resolved: Resolved, prompt: str, num: int) -> int:
    """`rollover sample`: print `num` completions of a prompt."""
    from rollover.train.setup import EvalParts

    config = resolved.config

    async def go() -> list[str]:
        parts = EvalParts.build(config, None, with_rewards=False)
        tasks = config.tasks
        if not getattr(parts.tokenizer, "chat_template", None):
            tasks = tasks.model_copy(update={"chat": False})
        task = decorated(Task(task_id="sample", source="sample", reward="", prompt=prompt), tasks)
        ids = encode_prompt(task, parts.tokenizer)
        rollout = config.rollout
        sampling = SamplingParams(rollout.temperature, rollout.top_p, rollout.top_k, rollout.min_p)
        requests = [
            ExtendRequest(
                rollout_id=f"sample-{i}",
                prompt_ids=ids,
                generated_ids=(),
                max_new_tokens=rollout.max_new_tokens,
                seed=rollout_seed(config.run.seed, prompt, 0, i),
                sampling=sampling,
                stop_token_ids=parts.stop_token_ids | frozenset(rollout.stop_token_ids),
                stop_strings=tuple(rollout.stop),
            )
            for i in range(num)
        ]
        outs = await asyncio.gather(*[parts.engine.extend(r) for r in requests])
        await parts.close()
        return [
            parts.tokenizer.decode([int(t) for s in segments for t in s.token_ids], skip_special_tokens=True)
            for segments in outs
        ]

    for i, text in enumerate(asyncio.run(go())):
        print(f"--- {i + 1} of {num}" if num > 1 else "", text, sep="\n" if num > 1 else "")
    return 0
