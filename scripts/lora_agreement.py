"""How far engine and trainer are apart in bfloat16 with LoRA, beside all weights at the same policy. Writes nothing.

    .venv/bin/python scripts/lora_agreement.py                     SmolLM2, 20 steps, about 10 minutes on two cores
    .venv/bin/python scripts/lora_agreement.py --model PATH --steps 3

Measured is mismatch/logprob_abs_mean of synchronous runs of `rollover train` on the tasks of configs/quickstart.toml:
nats a token between what the engine sampled with and the log-probs of the trainer at the start of the step, at the same
weights. First with LoRA, at its first step and at the step after `--steps` updates. Then with all weights, at the first
step from the merged model that the first run saved: how far rounding keeps the two apart depends on the policy, mostly
on how sure it is, so that a run of its own with all weights, which learns faster, is another measure.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = (
    "--rollout.interrupt", "never", "--rollout.max_staleness", "0", "--rollout.in_flight_groups", "4",
    "--rollout.groups_per_step", "4", "--rollout.max_new_tokens", "64", "--eval.num_tasks", "0",
    "--checkpoint.every_steps", "0", "--track.live", "plain",
)  # fmt: skip


def differences(folder: Path, *settings: str) -> list[float]:
    """Of every step of one run in `folder`: mean difference of log-probs between engine and trainer, nats a token."""
    command = [sys.executable, "-m", "rollover", "train", str(ROOT / "configs" / "quickstart.toml"), *SETTINGS]
    subprocess.run([*command, *settings, "--run.dir", str(folder)], check=True, stdout=sys.stderr)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["mismatch/logprob_abs_mean"] for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--learning_rate", type=float, default=2e-5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        adapted, whole = Path(work) / "adapted", Path(work) / "whole"
        lora = ["--model.lora.rank", str(args.rank), "--train.learning_rate", str(args.learning_rate)]
        values = differences(adapted, "--model.path", args.model, "--train.num_steps", str(args.steps + 1), *lora)
        print(f"LoRA, step 1: {values[0]:.4f}", flush=True)
        print(f"LoRA, after {args.steps} updates: {values[-1]:.4f}", flush=True)
        (same,) = differences(whole, "--model.path", str(adapted / "model"), "--train.num_steps", "1")
        print(f"all weights, from the merged model: {same:.4f}")
    print(f"ratio: {values[-1] / same:.3f}")


if __name__ == "__main__":
    main()
