"""Does a sample teach as much as with TRL? Mean reward by step, two seeds.

    .venv/bin/python experiments/learning_beside_trl.py      all systems; TRL takes half an hour a seed on two cores
    .venv/bin/python experiments/learning_beside_trl.py --systems partial --rollout.in_flight_groups 24

The tasks, scorer, group size, lengths and learning rate of `rollover bench step`. Keys of the configuration change what
`partial` runs with. What it printed for docs/log.md is in results/learning_beside_trl.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from contextlib import redirect_stdout

from benchmarks.step import PARTIAL, run_ours
from rollover.cli import split_overrides
from rollover.config import Config
from rollover.config.load import ConfigError, load_config
from rollover.models.threads import prepare_process

LAST = 5  # steps at the end whose mean reward is compared


def main() -> None:
    """Print one JSON object a line: the mean reward of each step of a run; at last the means over the last steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--learning-rate", type=float, default=2e-5)
    parser.add_argument("--systems", nargs="+", default=["synchronous", "partial", "trl"])
    rest, overrides = split_overrides(sys.argv[1:], parser)
    args = parser.parse_args(rest)
    try:  # a wrong key ends it now, not after the other systems
        load_config([], [*PARTIAL, *overrides], require_sources=False)
    except ConfigError as error:
        parser.error(str(error))
    config = Config()
    prepare_process(config)
    curves: dict[str, dict[int, list[float]]] = {system: {} for system in args.systems}
    for seed in args.seeds:
        common = [("run.seed", str(seed)), ("train.learning_rate", str(args.learning_rate))]
        for system in args.systems:
            with redirect_stdout(sys.stderr):
                if system == "trl":
                    from trl_peer import run_trl

                    # In bfloat16 weights such small updates would be rounded away. 8 at a time: 6 GB instead of 11.
                    rate = args.learning_rate
                    steps = run_trl(config, args.steps, seed=seed, learning_rate=rate, autocast=True, micro_batch=8)
                else:
                    steps = run_ours(
                        config, [*common, *([*PARTIAL, *overrides] if system == "partial" else [])], args.steps
                    )
            curves[system][seed] = [step.reward for step in steps]
            print(json.dumps({"system": system, "seed": seed, "rewards": curves[system][seed]}), flush=True)
    ends = {s: [statistics.mean(c[-LAST:]) for c in of.values()] for s, of in curves.items()}
    print(json.dumps({"mean_reward_of_the_last_steps": ends}))


if __name__ == "__main__":
    main()
