"""How far engine and trainer are apart in bfloat16 with LoRA, beside training of all weights.

    .venv/bin/python experiments/lora_agreement.py --work DIR --train lora    SmolLM2, 20 steps on two cores
    .venv/bin/python experiments/lora_agreement.py --work DIR --train all     the same with all weights
    .venv/bin/python experiments/lora_agreement.py --work DIR                 compares them (trains what is not there)

Both train with `rollover train` on the tasks of configs/quickstart.toml, adapters at ten times the learning rate: at
the same one they hardly learn so fast. What either learned is printed. Then an engine answers 48 prompts of those tasks
with each policy. Printed is the mean difference of its log-probs from the trainer's, in nats a token:

    LoRA           adapters in the engine, as they are served
    merged         the engine has the merged weights in bfloat16, the trainer the adapters
    same policy    engine and trainer have the merged weights: what training of all weights has at this policy
    all weights    the other run, at the policy that it learned

How far rounding keeps the two apart depends on the policy: hardly at all at a token that is nearly certain. Two runs do
not learn the same policy, so the quotient of LoRA and "all weights" is printed twice: as it is, and with LoRA's tokens
weighed so that as many are as likely as in the other run.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors.torch
import torch

from local_trainer import local_trainer
from rollover.config import Config, LoraConfig
from rollover.config.load import load_config
from rollover.engine.build import embedded_engine
from rollover.engine.protocol import ExtendRequest, StopCriteria
from rollover.models.load import LoadedModel, load_model
from rollover.tasks.prompts import encode_prompt
from rollover.tasks.stream import TaskStream
from rollover.trainer.local_backend import LocalBackend
from rollover.trainer.lora import merged_weights
from rollover.types import Prompt, Sample, SamplingParams

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "configs" / "quickstart.toml"
SETTINGS = (
    "--rollout.interrupt", "never", "--rollout.max_staleness", "0", "--rollout.in_flight_groups", "4",
    "--rollout.groups_per_step", "4", "--rollout.max_new_tokens", "64", "--eval.num_tasks", "0",
    "--checkpoint.save_final_model", "false", "--track.live", "plain",
)  # fmt: skip
PROMPTS, NEW_TOKENS = 48, 64
LIKELY = (-np.inf, -4.0, -2.0, -1.0, -0.5, -0.2, -0.05, -0.01, np.inf)  # log-probs: tokens that are about as likely
BFLOAT16 = torch.bfloat16


@dataclass(frozen=True)
class Found:
    """Of the tokens of some answers: how far engine and trainer are apart, and the trainer's log-prob."""

    apart_N: np.ndarray
    logprobs_N: np.ndarray

    @property
    def mean(self) -> float:
        return float(self.apart_N.mean())

    def __str__(self) -> str:
        error = self.apart_N.std() / len(self.apart_N) ** 0.5
        return (
            f"{self.mean:.4f} +- {error:.4f} ({len(self.apart_N)} tokens of mean log-prob {self.logprobs_N.mean():.2f})"
        )

    def mean_at_tokens_of(self, other: Found) -> float:
        """The mean, had these answers as many tokens of each likelihood as `other` has."""
        total = weight = 0.0
        for low, high in zip(LIKELY[:-1], LIKELY[1:], strict=True):
            here_N, there_N = ((f.logprobs_N >= low) & (f.logprobs_N < high) for f in (self, other))
            if here_N.any():
                total += there_N.mean() * self.apart_N[here_N].mean()
                weight += there_N.mean()
        return float(total / weight)


def train(folder: Path, args: argparse.Namespace, rank: int) -> dict[str, torch.Tensor]:
    """The float32 weights that were trained, by name, of the run in `folder`; begins it if it is not there."""
    rate = args.lora_learning_rate if rank else args.learning_rate
    if not (folder / "metrics.jsonl").is_file():
        own = ["--model.lora.rank", rank, "--train.learning_rate", rate, "--train.num_steps", args.steps]
        run = [sys.executable, "-m", "rollover", "train", RECIPE, *SETTINGS, *own, "--run.dir", folder]
        subprocess.run(list(map(str, run)), check=True, stdout=sys.stderr)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    first, last = ([row["reward/mean"] for row in part] for part in (rows[:5], rows[-5:]))
    entropy = np.mean([row["entropy"] for row in rows[-5:]])
    print(
        f"{'adapters' if rank else 'all weights'}, learning rate {rate:g}: reward {np.mean(first):.3f} in the first 5"
        f" steps, {np.mean(last):.3f} in the last 5 of {len(rows)}, entropy {entropy:.2f}",
        flush=True,
    )
    (file,) = folder.glob(f"checkpoints/*{args.steps}/trainer-master.safetensors")
    return {k.removeprefix("master/"): v for k, v in safetensors.torch.load_file(file).items()}


def answers(
    config: Config, loaded: LoadedModel, tensors: Iterable[tuple[str, torch.Tensor]], prompts: list[list[int]]
) -> list[Sample]:
    """What an engine with these weights answers, with its log-probs."""
    engine = embedded_engine(loaded, config)
    stops = frozenset([loaded.tokenizer.eos_token_id])

    async def one(index: int, prompt: list[int]) -> Sample:
        request = ExtendRequest(
            str(index), Prompt.of(prompt), (), NEW_TOKENS, index, SamplingParams(), StopCriteria(stops)
        )
        (segment,) = await engine.extend(request)
        zeros = np.zeros(len(segment), np.float32)
        ids = np.array(prompt, dtype=np.int32)
        return Sample(
            str(index),
            index,
            ids,
            segment.token_ids,
            zeros == 0,
            {"behavior_logprobs": segment.logprobs, "versions": zeros.astype(int), "advantages": zeros},
            1.0,
        )

    async def go() -> list[Sample]:
        await engine.load_weights(1, tensors)
        return list(await asyncio.gather(*(one(i, prompt) for i, prompt in enumerate(prompts))))

    return asyncio.run(go())


def difference(trainer: LocalBackend, samples: list[Sample]) -> Found:
    ours = trainer.compute_logprobs(samples)
    behavior_N = np.concatenate([s.behavior_logprobs for s in samples])
    ours_N = np.concatenate([ours[s.rollout_id] for s in samples])
    return Found(np.abs(ours_N - behavior_N), ours_N)


def compare(adapters: dict[str, torch.Tensor], weights: dict[str, torch.Tensor], rank: int) -> None:
    config = load_config([RECIPE]).config
    loaded = load_model(config.model)
    stream = TaskStream(config.tasks, seed=config.run.seed, split="train", rewards=config.rewards)
    prompts = [list(encode_prompt(task, loaded.tokenizer).ids) for task in stream.take(PROMPTS)]

    def trainer(new: dict[str, torch.Tensor], rank: int = 0) -> LocalBackend:
        """Of these weights; with a rank they are those of adapters."""
        model = copy.deepcopy(loaded.model)
        if not rank:
            model.load_state_dict({name: tensor.float() for name, tensor in new.items()}, strict=False)
        parts, lora = LoadedModel(model, loaded.tokenizer, loaded.path), LoraConfig(rank=rank)
        made = local_trainer(
            parts, config.train, config.algorithm, dtype=BFLOAT16, max_new_tokens=NEW_TOKENS, lora=lora
        ).backend
        assert isinstance(made, LocalBackend)
        if rank:
            with torch.no_grad():
                parameters = dict(made.model.named_parameters())
                for name, master in new.items():
                    parameters[name].copy_(master)
        return made

    adapted = trainer(adapters, rank)
    lora = difference(adapted, answers(config, loaded, asyncio.run(adapted.publish()), prompts))
    print("LoRA        ", lora, flush=True)
    merged = {name: tensor.clone() for name, tensor in merged_weights(adapted.model.get_base_model())}
    samples = answers(config, loaded, merged.items(), prompts)
    print("merged      ", difference(adapted, samples), flush=True)
    same = difference(trainer(merged), samples)
    print("same policy ", same, flush=True)
    whole = trainer(weights)
    every = difference(whole, answers(config, loaded, asyncio.run(whole.publish()), prompts))
    print("all weights ", every)
    print(
        f"LoRA is {lora.mean / every.mean:.2f} times all weights, {lora.mean_at_tokens_of(every) / every.mean:.2f}"
        f" times at tokens that are as likely, and {lora.mean / same.mean:.2f} times all weights at the same policy"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--learning_rate", type=float, default=2e-5, help="of all weights")
    parser.add_argument("--lora_learning_rate", type=float, default=2e-4)
    parser.add_argument("--work", type=Path, help="folder of the two runs, which are kept and used again")
    parser.add_argument("--train", choices=["lora", "all"], help="train this one and end")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = args.work or Path(temporary)
        ranks = {"lora": args.rank, "all": 0}
        trained = {n: train(work / n, args, rank) for n, rank in ranks.items() if args.train in (None, n)}
        if args.train is None:
            compare(trained["lora"], trained["all"], args.rank)


if __name__ == "__main__":
    main()
