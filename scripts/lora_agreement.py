"""How far engine and trainer are apart in bfloat16 with LoRA, beside training of all weights. Writes nothing.

    .venv/bin/python scripts/lora_agreement.py                     SmolLM2, 20 steps each, about 10 minutes on two cores
    .venv/bin/python scripts/lora_agreement.py --model PATH --steps 3

Two synchronous runs of `rollover train`, alike but for model.lora.rank, on the tasks of configs/quickstart.toml. Each
prints mismatch/logprob_abs_mean of its first step and of the step after `--steps` updates (nats a token: what the
engine sampled with against the log-probs of the trainer at the start of the step, same weights), and the ratio.
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


def differences(rank: int, model: str, steps: int, folder: Path) -> list[float]:
    """Of every step of one run: mean difference of log-probs between engine and trainer, in nats a token."""
    own = ["--model.path", model, "--model.lora.rank", str(rank), "--train.num_steps", str(steps + 1)]
    command = [sys.executable, "-m", "rollover", "train", str(ROOT / "configs" / "quickstart.toml"), *SETTINGS, *own]
    subprocess.run([*command, "--run.dir", str(folder)], check=True, stdout=sys.stderr)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["mismatch/logprob_abs_mean"] for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rank", type=int, default=16)
    args = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory() as work:
        for name, rank in (("all weights", 0), ("LoRA", args.rank)):
            values = found[name] = differences(rank, args.model, args.steps, Path(work) / str(rank))
            print(f"{name:12} step 1: {values[0]:.4f}   after {args.steps} updates: {values[-1]:.4f}", flush=True)
    print(f"ratio after {args.steps} updates: {found['LoRA'][-1] / found['all weights'][-1]:.3f}")


if __name__ == "__main__":
    main()
