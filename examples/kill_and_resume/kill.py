"""Kills a run with SIGKILL in the middle of its steps, resumes it, and compares it with a run that was left alone.

python kill.py
"""

import contextlib
import subprocess
import sys
import time
from pathlib import Path

import rollover

KILLED_AFTER = (6, 13)  # steps; a moment later, when the next one is being generated or trained
TRAIN = [sys.executable, "-m", "rollover", "train"]


def num_steps(directory: Path) -> int:
    """Steps that the run has told of; half a line is none yet."""
    with contextlib.suppress(FileNotFoundError):
        return (directory / "metrics.jsonl").read_bytes().count(b"\n")
    return 0


def killed(words: list[str], directory: Path, after: int) -> None:
    """Starts the run, or goes on with it, and kills it a moment after its step `after`."""
    with subprocess.Popen([*TRAIN, *words], stdout=subprocess.DEVNULL) as process:
        while num_steps(directory) < after and process.poll() is None:
            time.sleep(0.02)
        time.sleep(0.3)
        process.kill()
        print(f"killed after step {num_steps(directory)}")


def trained(directory: Path) -> list[tuple[str, list[int], list[float]]]:
    """Every trained rollout with its tokens and their log-probs, in order."""
    records = rollover.open(directory).records()
    return sorted((r["rollout_id"], r["token_ids"], r["logprobs"]) for r in records if r["outcome"] == "trained")


def main(*more: str, folder: str = "runs") -> bool:
    """`more`: flags of `rollover train`. Whether both runs have the same metrics, tokens and log-probs."""
    alone, broken = Path(folder, "left_alone"), Path(folder, "killed")
    recipe = ["recipe.toml", *more]
    subprocess.run([*TRAIN, *recipe, "--run.dir", str(alone)], stdout=subprocess.DEVNULL, check=True)
    words = [*recipe, "--run.dir", str(broken)]
    for after in KILLED_AFTER:
        killed(words, broken, after)
        words = [*words, "--resume"]
    subprocess.run([*TRAIN, *words], stdout=subprocess.DEVNULL, check=True)
    keys = ("step", "reward/mean", "loss", "grad_norm", "tokens/generated", "tokens/trained", "tokens/dropped")
    rows = [[[row[key] for key in keys] for row in rollover.open(d).metrics] for d in (alone, broken)]
    print(*rows[1], sep="\n")
    return rows[0] == rows[1] and trained(alone) == trained(broken)


if __name__ == "__main__":
    print("the same, token by token" if main() else "NOT the same")
