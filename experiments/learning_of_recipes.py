"""Does each recipe learn on the real model, and what does each part of DAPO add? Held-out rewards over seeds.

    .venv/bin/python experiments/learning_of_recipes.py dapo        GRPO, then DAPO's four parts, one after the other
    .venv/bin/python experiments/learning_of_recipes.py methods     PPO with a critic, ReMax, KL in reward or loss
    .venv/bin/python experiments/learning_of_recipes.py dapo --seeds 0 --only grpo --dir /tmp/runs

SmolLM2-135M on the tasks of the quickstart, which all runs share, as they do sizes and steps. A run takes two to four
minutes on two cores. Each is a `rollover train` of its own in a folder under --dir: what was interrupted goes on, and
what was finished is only read. The curves go to results/learning_of_recipes_SET.json; a table is printed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import rollover

RESULTS = Path(__file__).parent / "results"
# A hard limit of length: at the beginning two of five answers are cut off there.
SHARED = """
run.threads=1 rollout.max_new_tokens=64 rollout.group_size=8 rollout.groups_per_step=8 rollout.in_flight_groups=24
engine.max_running=64 eval.num_tasks=64 eval.samples_per_task=2 eval.every_steps=6 train.num_steps=12
train.warmup_steps=2 train.micro_batch_tokens=512 checkpoint.every_steps=0 checkpoint.save_final_model=false
"""
GROUPS_OF_A_STEP = 8
GENERATED_AT_A_TIME = (8, 24)  # as many as a step trains; three times as many, as in verl's recipe
CLIP_HIGHER = "algorithm.clip_high=0.28"
SAMPLING = "filters.zero_variance=true"
TOKEN_MEAN = "algorithm.aggregation=token-mean"
OVERLONG = "rewards.overlong_buffer_tokens=32"
# Minibatches, as with one update a step no ratio leaves 1 and no clip acts. GRPO's loss is averaged by answer first, as
# in its paper.
GRPO = """
algorithm.preset=grpo algorithm.aggregation=seq-mean-token-mean train.minibatches_per_step=4 train.learning_rate=1e-5
"""
SETS: dict[str, dict[str, tuple[list[str], str]]] = {
    "dapo": {
        "grpo": (["quickstart"], GRPO),
        "+ clip-higher": (["quickstart"], f"{GRPO} {CLIP_HIGHER}"),
        "+ dynamic sampling": (["quickstart"], f"{GRPO} {CLIP_HIGHER} {SAMPLING}"),
        "+ token-level loss": (["quickstart"], f"{GRPO} {CLIP_HIGHER} {SAMPLING} {TOKEN_MEAN}"),
        "+ overlong punishment": (["quickstart"], f"{GRPO} {CLIP_HIGHER} {SAMPLING} {TOKEN_MEAN} {OVERLONG}"),
    },
    "methods": {
        "ppo, its own critic": (["quickstart", "ppo_gae"], "train.learning_rate=2e-5"),
        "remax": (["quickstart", "remax"], "train.learning_rate=2e-5 train.minibatches_per_step=4"),
        "grpo, KL in the loss": (["grpo_kl"], ""),
        "grpo, KL in the reward": (["grpo_kl"], "algorithm.kl_in=reward"),
        "dapo, two epochs a step": (["quickstart"], "train.epochs_per_step=2"),
    },
}


def main() -> None:
    """Make the runs which are not there yet, one at a time; write the curves; print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("set", choices=SETS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", default=None, help="names of settings of the set")
    parser.add_argument("--dir", type=Path, default=Path("runs/learning_of_recipes"), help="where the runs lie")
    args = parser.parse_args()
    settings = {name: of for name, of in SETS[args.set].items() if args.only is None or name in args.only}
    found: dict[str, dict[int, dict[str, Any]]] = {name: {} for name in settings}
    for seed in args.seeds:
        for name, (recipes, keys) in settings.items():
            directory = args.dir / args.set / f"{name.replace(' ', '_').replace(',', '')}-{seed}"
            train(directory, recipes, f"{SHARED} {keys}".split(), seed)
            found[name][seed] = measured(rollover.open(directory))
            print(json.dumps({"setting": name, "seed": seed, "held_out": found[name][seed]["held_out"]}), flush=True)
            if args.only is None:
                out = RESULTS / f"learning_of_recipes_{args.set}.json"
                out.write_text(json.dumps({n: of for n, of in found.items() if of}, indent=1) + "\n")
    print(table(found))


def train(directory: Path, recipes: list[str], keys: list[str], seed: int) -> None:
    """One run in a process of its own, begun or gone on with. subprocess.CalledProcessError where it fails."""
    command = [sys.executable, "-m", "rollover", "train"]
    if not (directory / "metrics.jsonl").exists():
        pairs = [key.split("=") for key in [*keys, f"run.seed={seed}"]]
        overrides = [part for key, value in pairs for part in (f"--{key}", value)]
        subprocess.run([*command, *recipes, *overrides, "--run.dir", str(directory)], check=True, stdout=sys.stderr)
    elif not rollover.open(directory).finished:
        subprocess.run([*command, "--resume", str(directory)], check=True, stdout=sys.stderr)


def measured(run: rollover.Run) -> dict[str, Any]:
    """Of a finished run: held-out rewards and, by step, rewards, lengths, entropies; tokens in all; filtered groups."""
    rows, last = run.metrics, run.metrics[-1]
    return {
        "held_out": [[e["step"], round(e["mean"], 4)] for e in run.evaluations],
        "interval": [round(e, 3) for e in run.evaluations[-1]["ci"]],
        "reward": [round(row["reward/mean"], 4) for row in rows],
        "length": [round(row["length/mean"], 1) for row in rows],
        "cut_off": [round(row["length/truncated"], 3) for row in rows],
        "entropy": [round(row["entropy"], 3) for row in rows],
        "clip_fraction": [round(row["clip_fraction"], 4) for row in rows],
        "groups_filtered": last["dropped/filtered/groups"],
        "groups_trained": last["groups/consumed"],
        "tokens_generated": last["tokens/generated"],
        "tokens_trained": last["tokens/trained"],
        "tokens_held": last["tokens/held"],
        "tokens_filtered": last["dropped/filtered/tokens"],
        "generated_by_trained": round((last["tokens/generated"] - last["tokens/held"]) / last["tokens/trained"], 3),
        "generated_by_trained_of_verl": {size: of_verl(run, size) for size in GENERATED_AT_A_TIME},
    }


def of_verl(run: rollover.Run, at_a_time: int) -> float | None:
    """Generated tokens by trained ones, had verl's rule met the run's groups in their order. None without a filter.

    verl's recipe for DAPO generates `at_a_time` groups (data.gen_batch_size), and again as many, until those of a step
    (data.train_batch_size) have rewards that differ. It trains on the first ones and forgets the others, which our runs
    hold for the next step. Steps that the run's groups do not suffice for are not counted."""
    if not run.metrics[-1]["dropped/filtered/groups"]:
        return None
    tokens: dict[int, int] = {}
    good: dict[int, bool] = {}
    for record in run.records():
        group = record["group_id"]
        tokens[group] = tokens.get(group, 0) + record["num_tokens"]
        good[group] = record["outcome"] == "trained"
    groups = sorted(tokens)
    generated = trained = 0
    met: list[int] = []
    for start in range(0, len(groups) - at_a_time + 1, at_a_time):
        met += groups[start : start + at_a_time]
        ready = [group for group in met if good[group]]
        if len(ready) >= GROUPS_OF_A_STEP:
            generated += sum(tokens[group] for group in met)
            trained += sum(tokens[group] for group in ready[:GROUPS_OF_A_STEP])
            met = []
    return round(generated / trained, 3)


def table(found: dict[str, dict[int, dict[str, Any]]]) -> str:
    """Markdown: a row a setting, the seeds beside each other."""

    lines = [
        "| by seed | held-out before | after | length | entropy | filtered groups | generated by trained"
        " | by verl's rule, 8 at a time | 24 at a time |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, runs in found.items():
        rows = [runs[seed] for seed in sorted(runs)]
        columns: list[list[str]] = [
            [f"{row['held_out'][0][1]:.3f}" for row in rows[:1]],
            [f"{row['held_out'][-1][1]:.3f}" for row in rows],
            [f"{statistics.mean(row['length'][-4:]):.0f}" for row in rows],
            [f"{statistics.mean(row['entropy'][-4:]):.2f}" for row in rows],
            [f"{row['groups_filtered'] / (row['groups_filtered'] + row['groups_trained']):.2f}" for row in rows],
            [f"{row['generated_by_trained']:.2f}" for row in rows],
        ]
        for size in GENERATED_AT_A_TIME:
            ratios = [row["generated_by_trained_of_verl"][size] for row in rows]
            columns.append(["-" if ratio is None else f"{ratio:.2f}" for ratio in ratios])
        lines.append(f"| {' | '.join([name, *(', '.join(column) for column in columns)])} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
