"""Naive PPO against decoupled PPO where every token is exactly s policy versions old: AReaL's table, in small.

    .venv/bin/python experiments/staleness_experiment.py --rates 1e-3 2e-3  learning rates, at staleness 0
    .venv/bin/python experiments/staleness_experiment.py                    all runs: the table,
                                                                             docs/staleness_experiment.svg

AReaL (arXiv 2505.24298) bounds how many versions old the tokens of a batch are, and takes the ratio to the policy that
sampled (naive), or clips it against recent weights and corrects by an importance weight (decoupled).

The staleness is forced: the engine gets the weights that the trainer had s versions ago, and samples a whole batch with
them. Trainer and engine are those of `rollover train`; scheduler, cache and reward worker are not here. The model is a
random Llama of 83,000 parameters without a tokenizer: token d is the digit d. The task is to count on from the digit of
the prompt, 7 being followed by 0. The reward is the share of the answer's places that hold the right digit.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import random
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src")]

from local_trainer import build_batch, local_trainer  # noqa: E402
from rollover.config import AlgorithmConfig, EngineConfig, TrainConfig  # noqa: E402
from rollover.engine.embedded.engine import EmbeddedEngine  # noqa: E402
from rollover.engine.protocol import ExtendRequest  # noqa: E402
from rollover.models.attention import IMPLEMENTATION  # noqa: E402
from rollover.models.load import LoadedModel  # noqa: E402
from rollover.staleness import staleness  # noqa: E402
from rollover.types import Group, Prompt, Reward, Rollout, RolloutState, SamplingParams, Task, rollout_seed  # noqa: E402

FIGURE = ROOT / "docs" / "staleness_experiment.svg"
BASE, DIGITS = 8, 6
GROUPS, SIZE, MINIBATCHES, STEPS, SWEPT_STEPS = 8, 8, 4, 300, 200
# Without the bonus groups soon agree on wrong answers, and runs that differ by rounding end at 0.24 and 0.81.
ENTROPY = 0.02
STALENESS, SEEDS, RATE = (0, 1, 2, 4, 8), (0, 1, 2), 1e-3
METHODS: dict[str, dict[str, Any]] = {
    "naive": {"proximal": "behavior", "correction": "none"},
    "decoupled": {"proximal": "step_start", "correction": "token_truncate", "correction_cap": 5.0},
    "uncorrected": {"proximal": "step_start", "correction": "none", "allow_uncorrected": True},
}


@dataclass(frozen=True)
class Setting:
    method: str
    staleness: int
    seed: int
    rate: float = RATE
    steps: int = STEPS


@dataclass(frozen=True)
class Result:
    """`rewards[v]`: mean reward of a batch sampled by version v. `metrics`: means over the steps of the trainer's."""

    setting: Setting
    rewards: list[float]
    metrics: dict[str, float]
    seconds: float

    @property
    def final(self) -> float:
        """Mean over the last tenth of the versions."""
        return statistics.fmean(self.rewards[-max(1, len(self.rewards) // 10) :])

    @property
    def best(self) -> float:
        """The best mean of as many versions in a row: the best single batch would be luck."""
        width = max(1, len(self.rewards) // 10)
        return max(statistics.fmean(self.rewards[i : i + width]) for i in range(len(self.rewards) - width + 1))

    @property
    def reached(self) -> int | None:
        """The first version from which on ten have a mean reward of a half."""
        places = range(len(self.rewards) - 9)
        return next((i for i in places if statistics.fmean(self.rewards[i : i + 10]) >= 0.5), None)


def make_model(seed: int) -> LoadedModel:
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        "llama",
        vocab_size=BASE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        tie_word_embeddings=False,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation=IMPLEMENTATION, dtype=torch.float32)
    return LoadedModel(model.eval(), None, "random")


def make_group(seed: int, group_id: int) -> Group:
    start = random.Random(f"{seed}/{group_id}").randrange(BASE)
    task = Task(f"t{group_id}", "count", "count", prompt=str(start))
    return Group(group_id, task, Prompt((start,)), [Rollout(group_id, s, task) for s in range(SIZE)])


def score(group: Group, rollout: Rollout) -> float:
    """The share of places with the right digit, whatever stands before it."""
    right = [(group.prompt.ids[0] + place) % BASE for place in range(1, DIGITS + 1)]
    return sum(a == b for a, b in zip(rollout.token_ids(), right, strict=True)) / DIGITS


class Experiment:
    """One run. The engine is `staleness` versions behind the trainer, or at version 0 while there are not so many."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.algorithm = AlgorithmConfig(**METHODS[setting.method], entropy_coef=ENTROPY)
        loaded = make_model(setting.seed)
        self.engine = EmbeddedEngine(
            copy.deepcopy(loaded.model).requires_grad_(False), EngineConfig(max_running=GROUPS * SIZE, kv_memory_gb=0.1)
        )
        train = TrainConfig(
            num_steps=setting.steps,
            learning_rate=setting.rate,
            minibatches_per_step=MINIBATCHES,
            micro_batch_tokens=4096,
        )
        self.trainer = local_trainer(loaded, train, self.algorithm, dtype=torch.float32, max_new_tokens=DIGITS)
        self.kept: deque[tuple[int, dict[str, torch.Tensor]]] = deque(maxlen=setting.staleness + 1)

    async def publish(self) -> None:
        """Keep the trainer's weights; hand the engine the oldest that are kept."""
        weights = {name: tensor.clone() for name, tensor in await self.trainer.backend.publish()}
        self.kept.append((self.trainer.policy_version, weights))
        version, oldest = self.kept[0]
        await self.engine.load_weights(version, oldest.items())

    async def sample(self, batch: int) -> list[Group]:
        seed = self.setting.seed
        groups = [make_group(seed, batch * GROUPS + g) for g in range(GROUPS)]
        rollouts = [(group, r) for group in groups for r in group.rollouts]
        requests = [
            ExtendRequest(
                rollout_id=r.rollout_id,
                prompt=group.prompt,
                generated_ids=(),
                max_new_tokens=DIGITS,
                seed=rollout_seed(seed, r.task.task_id, 0, r.sibling),
                sampling=SamplingParams(),
            )
            for group, r in rollouts
        ]
        answers = await asyncio.gather(*map(self.engine.extend, requests))
        for (group, rollout), segments in zip(rollouts, answers, strict=True):
            for segment in segments:
                rollout.add(segment)
            rollout.state, rollout.reward = RolloutState.READY, Reward(score(group, rollout))
        return groups

    async def run(self) -> Result:
        """Train `steps` times, then only sample, until the last trained version but one has been seen, too."""
        started, steps, lag = time.perf_counter(), self.setting.steps, self.setting.staleness
        rewards = [0.0] * steps
        rows: list[dict[str, float]] = []
        await self.publish()
        for step in range(steps + lag):
            groups = await self.sample(step)
            rewards[self.engine.oldest_version] = statistics.fmean(score(g, r) for g in groups for r in g.rollouts)
            if step < steps:
                batch = build_batch(groups, self.algorithm)
                found = {staleness(int(v), step) for s in batch.samples for v in s.versions}
                assert found == {min(step, lag)}, found
                rows.append(self.trainer.train_step(batch))
                await self.publish()
            elif len(self.kept) > 1:
                self.kept.popleft()
                await self.engine.load_weights(self.kept[0][0], self.kept[0][1].items())
        await self.engine.close()
        # A step whose groups all agree has no tokens to measure.
        metrics = {key: statistics.fmean(row[key] for row in rows if key in row) for key in rows[0]}
        return Result(self.setting, rewards, metrics, time.perf_counter() - started)


def run(setting: Setting) -> Result:
    return asyncio.run(Experiment(setting).run())


def settings(methods: list[str]) -> list[Setting]:
    """The two methods that are compared come first."""
    every = [Setting(m, s, seed) for seed in SEEDS for s in STALENESS for m in METHODS if m in methods]
    return sorted(every, key=lambda setting: setting.method == "uncorrected")


def run_all(wanted: list[Setting], kept: Path | None) -> list[Result]:
    """Runs found in the file `kept` are not run again; new ones are appended."""
    done: dict[Setting, Result] = {}
    if kept is not None and kept.exists():
        for line in kept.read_text().splitlines():
            row = json.loads(line)
            found = Result(**{**row, "setting": Setting(**row["setting"])})
            done[found.setting] = found
    for setting in wanted:
        if setting in done:
            continue
        result = done[setting] = run(setting)
        print(f"{setting}: {result.final:.3f} in {result.seconds:.0f} s", file=sys.stderr, flush=True)
        if kept is not None:
            with kept.open("a") as file:
                file.write(json.dumps(asdict(result)) + "\n")
    return [done[setting] for setting in wanted]


def of(results: Iterable[Result], method: str, lag: int) -> list[Result]:
    return [r for r in results if (r.setting.method, r.setting.staleness) == (method, lag)]


def table(results: list[Result]) -> str:
    """Means over seeds; drift: mean |log proximal - log behavior| of the trained tokens, by definition 0 for naive."""
    header = ("staleness", "method", "final", "of each seed", "best", "whole run", "reaches 0.5", "clipped", "drift")
    lines: list[tuple[str, ...]] = [header, ("---",) * len(header)]
    for lag in STALENESS:
        for method in METHODS:
            runs = of(results, method, lag)
            if not runs:
                continue
            drift = statistics.fmean(r.metrics["mismatch/logprob_abs_mean"] for r in runs)
            lines.append(
                (
                    str(lag),
                    method,
                    f"**{statistics.fmean(r.final for r in runs):.3f}**",
                    ", ".join(f"{r.final:.3f}" for r in runs),
                    f"{statistics.fmean(r.best for r in runs):.3f}",
                    f"{statistics.fmean(v for r in runs for v in r.rewards):.3f}",
                    ", ".join("never" if r.reached is None else str(r.reached) for r in runs),
                    f"{100 * statistics.fmean(r.metrics['clip_fraction'] for r in runs):.1f} %",
                    "" if method == "naive" else f"{drift:.2f}",
                )
            )
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def draw_figure(results: list[Result], path: Path) -> None:
    try:
        import matplotlib
    except ImportError as error:
        raise SystemExit("the figure needs matplotlib: pip install matplotlib, or use --table") from error
    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "rollover", "font.size": 9})
    from matplotlib import pyplot

    figure, (left, *curves) = pyplot.subplots(1, 4, figsize=(12, 3.4), layout="constrained", sharey=True)
    places = range(len(STALENESS))
    shown = [method for method in METHODS if any(r.setting.method == method for r in results)]
    for color, method in enumerate(shown):
        runs = [of(results, method, lag) for lag in STALENESS]
        left.plot(places, [statistics.fmean(r.final for r in part) for part in runs], f"C{color}-", label=method)
        dots = [(place, r.final) for place, part in zip(places, runs, strict=True) for r in part]
        left.plot(*zip(*dots, strict=True), f"C{color}o", markersize=3, alpha=0.5)
        for axes, lag in zip(curves, (STALENESS[0], STALENESS[2], STALENESS[-1]), strict=True):
            for result in of(results, method, lag):
                width = max(1, len(result.rewards) // 25)
                starts = range(0, len(result.rewards) - width + 1, width)
                smooth = [statistics.fmean(result.rewards[i : i + width]) for i in starts]
                axes.plot([i + width / 2 for i in starts], smooth, f"C{color}-", linewidth=1, alpha=0.8)
            axes.set(xlabel="policy version", title=f"staleness {lag}")
    left.set(xlabel="staleness", ylabel="reward", ylim=(0, 1), title="last tenth of the versions")
    left.set_xticks(list(places), [str(lag) for lag in STALENESS])
    left.legend(fontsize=8)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rates", type=float, nargs="+", help="only compare learning rates, at staleness 0")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--results", type=Path, help="file of finished runs: they are not run again")
    parser.add_argument("--table", action="store_true", help="print the table, write no figure")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.rates:
        for rate in arguments.rates:
            finals = [run(Setting("decoupled", 0, seed, rate, SWEPT_STEPS)).final for seed in SEEDS]
            print(f"{rate:g}: {', '.join(f'{final:.3f}' for final in finals)}", flush=True)
        return
    results = run_all(settings(arguments.methods), arguments.results)
    print(table(results))
    if not arguments.table:
        draw_figure(results, FIGURE)


if __name__ == "__main__":
    main()
