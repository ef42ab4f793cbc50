"""How far engine and trainer are apart in bfloat16 with LoRA, beside all weights at the same policy. Writes nothing.

    .venv/bin/python scripts/lora_agreement.py        SmolLM2, 20 steps, about 10 minutes on two cores

Trains adapters with `rollover train` on the tasks of configs/quickstart.toml, then has an engine answer 48 prompts of
those tasks and prints the mean difference of its log-probs from the trainer's, in nats a token, three times:

    LoRA           adapters in the engine, as they are served
    merged         the engine has the merged weights in bfloat16, the trainer the adapters
    all weights    engine and trainer have the merged weights: what training of all weights has at this policy

A run of its own with all weights would be another policy: how far rounding keeps the two apart depends on it.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import safetensors.torch
import torch

from rollover.config.load import load_config
from rollover.engine.embedded.engine import EmbeddedEngine
from rollover.engine.protocol import ExtendRequest
from rollover.envs.single_turn import encode_prompt
from rollover.envs.tasks.stream import TaskStream
from rollover.models.load import LoadedModel, cast_parameters, load_model
from rollover.train.lora import merged_weights
from rollover.train.trainer import Trainer
from rollover.types import Sample, SamplingParams

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "configs" / "quickstart.toml"
SETTINGS = (
    "--rollout.interrupt", "never", "--rollout.max_staleness", "0", "--rollout.in_flight_groups", "4",
    "--rollout.groups_per_step", "4", "--rollout.max_new_tokens", "64", "--eval.num_tasks", "0",
    "--track.live", "plain",
)  # fmt: skip
PROMPTS, NEW_TOKENS = 48, 64
BFLOAT16 = torch.bfloat16


def answers(loaded: LoadedModel, tensors: Iterable[tuple[str, torch.Tensor]], prompts: list[list[int]]) -> list[Sample]:
    """What an engine with these weights answers, with its log-probs."""
    model = copy.deepcopy(loaded.model)
    cast_parameters(model, BFLOAT16)
    config = load_config([RECIPE]).config
    engine = EmbeddedEngine.over(model, loaded.tokenizer, config)
    engine.load_weights(1, tensors)
    stops = frozenset([loaded.tokenizer.eos_token_id])

    async def one(index: int, prompt: list[int]) -> Sample:
        request = ExtendRequest(str(index), tuple(prompt), (), NEW_TOKENS, index, SamplingParams(), stops)
        (segment,) = await engine.extend(request)
        zeros = np.zeros(len(segment), np.float32)
        ids = np.array(prompt, dtype=np.int32)
        return Sample(
            str(index), index, ids, segment.token_ids, zeros == 0, segment.logprobs, zeros.astype(int), zeros, 1.0
        )

    async def go() -> list[Sample]:
        return list(await asyncio.gather(*(one(i, prompt) for i, prompt in enumerate(prompts))))

    return asyncio.run(go())


def difference(trainer: Trainer, samples: list[Sample]) -> str:
    ours = trainer.compute_logprobs(samples)
    found = np.concatenate([np.abs(ours[s.rollout_id] - s.behavior_logprobs) for s in samples])
    return f"{found.mean():.4f} +- {found.std() / len(found) ** 0.5:.4f} ({len(found)} tokens)"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--learning_rate", type=float, default=2e-5)
    args = parser.parse_args()
    own = ["--model.lora.rank", args.rank, "--train.learning_rate", args.learning_rate, "--train.num_steps", args.steps]
    config = load_config([RECIPE], [("model.lora.rank", str(args.rank))]).config
    with tempfile.TemporaryDirectory() as work:
        run = [sys.executable, "-m", "rollover", "train", RECIPE, *SETTINGS, *own, "--run.dir", work]
        subprocess.run(list(map(str, run)), check=True, stdout=sys.stderr)
        (file,) = Path(work).glob(f"checkpoints/*{args.steps}/trainer-master.safetensors")
        masters = {k.removeprefix("master/"): v for k, v in safetensors.torch.load_file(file).items()}
    loaded = load_model(config.model)
    stream = TaskStream(config.tasks, seed=config.run.seed, split="train", rewards=config.rewards)
    prompts = [list(encode_prompt(task, loaded.tokenizer)) for task in stream.take(PROMPTS)]

    def trainer(model: torch.nn.Module, rank: int) -> Trainer:
        parts = LoadedModel(model, loaded.tokenizer, loaded.path)
        lora = config.model.lora.model_copy(update={"rank": rank})
        return Trainer(parts, config.train, config.algorithm, dtype=BFLOAT16, max_new_tokens=NEW_TOKENS, lora=lora)

    adapted = trainer(copy.deepcopy(loaded.model), args.rank)
    with torch.no_grad():
        parameters = dict(adapted.model.named_parameters())
        for name, master in masters.items():
            parameters[name].copy_(master)
    print("LoRA        ", difference(adapted, answers(loaded, adapted.publish(), prompts)), flush=True)
    merged = {name: tensor.clone() for name, tensor in merged_weights(adapted.model.get_base_model())}
    samples = answers(loaded, merged.items(), prompts)
    print("merged      ", difference(adapted, samples), flush=True)
    whole = copy.deepcopy(loaded.model)
    whole.load_state_dict({name: tensor.float() for name, tensor in merged.items()}, strict=False)
    print("all weights ", difference(trainer(whole, 0), samples))


if __name__ == "__main__":
    main()
