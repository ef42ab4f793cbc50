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
from collections.abc import Iterator
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
        "tokens_of_surplus_discarded": discarded(run),
    }


def discarded(run: rollover.Run, of_a_step: int = 8, of_a_batch: int = 24) -> int:
    """Tokens of good groups that verl's rule would have thrown away, had it met the run's groups in their order.

    verl's recipe for DAPO generates `of_a_batch` groups at a time (data.gen_batch_size, three times
    data.train_batch_size) until `of_a_step` of them have rewards that differ, trains on the first ones and forgets the
    others, which our runs hold for the next step."""
    tokens: dict[int, int] = {}
    kept: dict[int, bool] = {}
    for record in run.records():
        group = record["group_id"]
        tokens[group] = tokens.get(group, 0) + record["num_tokens"]
        kept[group] = record["outcome"] == "trained"
    lost, ready = 0, 0
    for batch in _batches(sorted(tokens), of_a_batch):
        for group in batch:
            if kept[group]:
                ready += 1
                lost += tokens[group] if ready > of_a_step else 0
        if ready >= of_a_step:
            ready = 0
    return lost


def _batches(items: list[int], size: int) -> Iterator[list[int]]:
    for start in range(0, len(items) - size + 1, size):
        yield items[start : start + size]


def table(found: dict[str, dict[int, dict[str, Any]]]) -> str:
    """Markdown: a row a setting, the seeds beside each other."""

    def of(runs: dict[int, dict[str, Any]], key: str, digits: int = 3) -> str:
        return ", ".join(f"{runs[seed][key]:.{digits}f}" for seed in sorted(runs))

    lines = [
        "| by seed | held-out before | after | length | entropy | filtered groups | generated by trained | of verl |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, runs in found.items():
        for run in runs.values():
            trained = run["tokens_trained"]
            run["before"], run["after"] = run["held_out"][0][1], run["held_out"][-1][1]
            run["last_length"] = statistics.mean(run["length"][-4:])
            run["last_entropy"] = statistics.mean(run["entropy"][-4:])
            run["filtered"] = run["groups_filtered"] / (run["groups_filtered"] + run["groups_trained"])
            run["by_trained"] = (run["tokens_generated"] - run["tokens_held"]) / trained
            run["by_verl"] = (trained + run["tokens_filtered"]) / (trained - run["tokens_of_surplus_discarded"])
        keys = [("before", 3), ("after", 3), ("last_length", 0), ("last_entropy", 2), ("filtered", 2)]
        cells = [of(runs, key, digits) for key, digits in [*keys, ("by_trained", 2), ("by_verl", 2)]]
        lines.append(f"| {' | '.join([name, *cells])} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
