"""Replay and re-roll on a task with sparse rewards: steps to reach a reward, with and without each, over seeds.

    .venv/bin/python experiments/replay_effect.py             the table of docs/replay.md, about 15 minutes on one core
    .venv/bin/python experiments/replay_effect.py --seeds 1   one seed

The task: every prompt is one of KINDS words, and the answer to a word is a letter that belongs to it. A rollout is one
token, of 102, and its reward is 1 for the letter and 0 for anything else: most groups of a random model fail entirely.
What is learned about one word does not help with another. Common words have COMMON tasks each, rare ones a single task.
The runs go through the real loop: embedded engine, reward worker, trainer, checkpoint. Held-out reward is greedy, and
over all words alike.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import statistics
import string
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / part) for part in ("src", "tests", "tests/integration")]

KINDS, RARE, COMMON = 16, 8, 15  # words, those of them that are rare, tasks of a common word
STEPS, EVERY = 400, 4
THRESHOLDS = (0.4, 0.6)
_REPLAY = {"size": 64, "max_staleness": 8}
_REROLL = {"max_groups": 2, "start_fraction": 0.25}
SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "off": {},
    "replay": {"replay": _REPLAY},
    "re-roll": {"reroll": _REROLL},
    "both": {"replay": _REPLAY, "reroll": _REROLL},
    "replay, at most 4 versions": {"replay": _REPLAY | {"max_staleness": 4}},
    "replay, at most 2 versions": {"replay": _REPLAY | {"max_staleness": 2}},
}
REWARD = """
def reward(prompts, completions, answer, **columns):
    return [float(text[:1] == a) for text, a in zip(completions, answer)]
"""


def write_tasks(folder: Path, seed: int) -> None:
    """tasks.jsonl, with copies of the common words that differ in a number, and held-out.jsonl with every word once."""
    rng = random.Random(seed)
    words = rng.sample(string.ascii_uppercase, KINDS)
    letters = [rng.choice(string.ascii_lowercase) for _ in words]
    train, held_out = [], []
    for i, (word, letter) in enumerate(zip(words, letters, strict=True)):
        for copy in range(1 if i < RARE else COMMON):
            train.append({"prompt": f"{copy:02d}{word}", "answer": letter})
        held_out.append({"prompt": f"99{word}", "answer": letter})
    for name, rows in (("tasks", train), ("held-out", held_out)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def run(folder: Path, seed: int, tables: dict[str, dict[str, Any]], steps: int) -> tuple[list[dict], list[dict]]:
    """(metrics rows, evaluations) of one run."""
    import runs

    from rollover.api.session import run_training
    from rollover.config.load import load_config

    fixed: dict[str, dict[str, Any]] = {
        "run": {"seed": seed},
        "rollout": {
            "groups_per_step": 8, "group_size": 4, "max_new_tokens": 1, "in_flight_groups": None, "interrupt": None,
            "max_staleness": None,
        },
        "train": {"learning_rate": 1e-3, "micro_batch_tokens": 4096},
        "algorithm": {"entropy_coef": 0.02},
        "tasks": {"epochs": 1000, "chat": False},
        "eval": {"num_tasks": KINDS, "every_steps": EVERY, "temperature": 0},
        "checkpoint": {"every_steps": 0, "save_final_model": False},
        "track": {"live": "off", "rollouts": False, "trace": False},
    }  # fmt: skip
    recipe = runs.write(folder, steps=steps, **(fixed | tables))  # pyright: ignore[reportArgumentType]
    write_tasks(folder, seed)
    (folder / "reward.py").write_text(REWARD)
    with recipe.open("a") as file:
        file.write(f"eval_path = {json.dumps(str(folder / 'held-out.jsonl'))}\n")
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        code = run_training(load_config([recipe]), False)
    assert code == 0
    return runs.json_lines(folder / "run" / "metrics.jsonl"), runs.json_lines(folder / "run" / "eval.jsonl")


def steps_to(evals: list[dict], threshold: float) -> int | None:
    """The first evaluated step from which on two evaluations in a row reach the threshold."""
    for first, second in zip(evals, evals[1:], strict=False):
        if min(first["mean"], second["mean"]) >= threshold:
            return first["step"]
    return None


def measure(seeds: int, steps: int, names: list[str]) -> None:
    for name in names:
        reached: dict[float, list[int | None]] = {t: [] for t in THRESHOLDS}
        last, zero, counts = [], [], []
        for seed in range(seeds):
            started = time.perf_counter()
            with tempfile.TemporaryDirectory() as folder:
                rows, evals = run(Path(folder), seed, SETTINGS[name], steps)
            for threshold in THRESHOLDS:
                reached[threshold].append(steps_to(evals, threshold))
            last.append(statistics.mean(e["mean"] for e in evals[-3:]))
            zero.append(statistics.mean(r["groups/zero_variance"] for r in rows))
            counts.append((rows[-1].get("replay/replaced", 0), rows[-1].get("reroll/given", 0)))
            print(f"  {name} seed {seed}: {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
            print("   ", [round(e["mean"], 2) for e in evals][::3], counts[-1], file=sys.stderr, flush=True)
        cells = [", ".join("-" if s is None else str(s) for s in reached[t]) for t in THRESHOLDS]
        end, share = ", ".join(f"{x:.2f}" for x in last), statistics.mean(zero)
        used = [", ".join(f"{pair[i]:g}" for pair in counts) for i in (0, 1)]
        print(f"| {name} | {' | '.join(cells)} | {end} | {share:.2f} | {' | '.join(used)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("settings", nargs="*", default=list(SETTINGS), help=", ".join(SETTINGS))
    args = parser.parse_args()
    heads = [f"steps to {t}" for t in THRESHOLDS]
    print(f"| | {' | '.join(heads)} | reward at the end | groups without signal | replayed | given again |")
    print(f"|{'---|' * 7}")
    measure(args.seeds, args.steps, args.settings)


if __name__ == "__main__":
    main()
