"""What the planner says of a run's configuration, beside what happened.

The planner simulates with the lengths that the run had, and with its speeds where its metrics tell them: so far as the
two differ, it is what rollouts and trainer waited for that the simulation sees otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rollover.config import Config
from rollover.config.load import Resolved
from rollover.config.schema import renamed
from rollover.config.table import value_of
from rollover.config.trust import without_functions
from rollover.plugins.dashboard.indexed_run import IndexedRun
from rollover.plugins.dashboard.numbers import number
from rollover.sim.plan import plan_config
from rollover.track.metrics import aggregate

_HAPPENED = (
    "time/step_s", "time/generate_s", "time/train_s", "tokens/trained", "tokens/step_generated", "tokens/dropped",
    "tokens/generated", "speed/generated_tokens_per_s", "staleness/mean", "staleness/max", "rollouts/partial_share",
    "engine/reprefill_tokens", "engine/prefill_tokens",
)  # fmt: skip


def plan_of(files: IndexedRun) -> dict[str, Any]:
    """Return figures by the names of `Figures`: "predicted" and "happened"; "from": what the planner took of the run;
    "steps": how many it simulated; "left_out": functions of the run that were replaced by defaults, since a reader runs
    nothing that a directory names. Or "why" there is no plan. Reads the directory anew, and takes seconds."""
    said: list[str] = []
    try:
        config = Config.model_validate(renamed(files.config))
        rollout, left_out = without_functions(config.rollout, "rollout")
        resolved = Resolved(config.model_copy(update={"rollout": rollout}), [], {})
        plan, sources, *_ = plan_config(resolved, files.directory, said.append)
    except ValueError as error:
        return {"why": f"This run cannot be planned: {error}"}
    except KeyError as error:  # of an older version, or of an engine that does not tell it
        return {"why": f"This run cannot be planned: its metrics have no {error.args[0]}"}
    taken = sorted(key for key, source in sources.items() if source == "run")
    return {
        "predicted": {
            name: number(value) for name, value in asdict(plan.figures).items() if not isinstance(value, dict)
        },
        "happened": happened(list(IndexedRun(files.directory).columns().rows(_HAPPENED))),
        "from": f"{', '.join(taken)} of this run, the rest of its [plan]" if taken else "its [plan]",
        "steps": plan.assumed.steps,
        "left_out": [f"{of}, planned as {value_of(resolved.config, of.option)!r}" for of in left_out],
    }


def happened(rows: Sequence[Mapping[str, Any]]) -> dict[str, float | int | None]:
    """The same figures of a run's rows, where they tell them; {} without a row."""
    if not rows:
        return {}
    of, last = aggregate(rows), rows[-1]

    def share(part: str, *whole: str) -> float | None:
        total = sum(last.get(key) or 0.0 for key in whole)
        return (last.get(part) or 0.0) / total if total else None

    def mean(key: str) -> float | None:
        return None if of.get(key) is None else sum(row.get(key) or 0.0 for row in rows) / len(rows)

    step_s, trained = mean("time/step_s"), last.get("tokens/trained")
    found = {
        "step_s": step_s,
        "generate_s": mean("time/generate_s"),
        "train_s": mean("time/train_s"),
        "trained_tokens_per_s": trained / len(rows) / step_s if trained is not None and step_s else None,
        "generated_tokens_per_s": of.get("speed/generated_tokens_per_s"),
        "staleness_mean": of.get("staleness/mean"),
        "staleness_max": of.get("staleness/max"),
        "partial_share": of.get("rollouts/partial_share"),
        "dropped_share": share("tokens/dropped", "tokens/generated"),
        "reprefill_share": share(
            "engine/reprefill_tokens", "tokens/generated", "engine/prefill_tokens", "engine/reprefill_tokens"
        ),
    }
    return {name: number(value) for name, value in found.items()}
