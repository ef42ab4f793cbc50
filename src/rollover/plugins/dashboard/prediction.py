"""The planner's prediction for a run's configuration, beside the measured figures.

The simulation uses the lengths of the run, and its speeds if its metrics have them. Remaining differences come from
waiting times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rollover.config import Config
from rollover.config.load import Resolved
from rollover.config.renames import upgraded
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


def predict(files: IndexedRun) -> dict[str, Any]:
    """Return "predicted" and "happened" figures by the names of `Figures`, or the reason without a plan in "why".

    "from": the values that come from the run; "steps": simulated steps; "left_out": functions that were replaced by
    defaults, because a reader runs no code that a directory names. Reads the directory again, and takes seconds.
    """
    try:
        config = Config.model_validate(upgraded(files.config))
        rollout, left_out = without_functions(config.rollout, "rollout")
        resolved = Resolved(config.model_copy(update={"rollout": rollout}), [], {})
        plan, sources, *_ = plan_config(resolved, files.directory)
    except ValueError as error:
        return {"why": f"This run cannot be planned: {error}"}
    except KeyError as error:  # an older version, or an engine without this metric
        return {"why": f"This run cannot be planned: its metrics have no {error.args[0]}"}
    taken = sorted(key for key, source in sources.items() if source == "run")
    return {
        "predicted": {
            name: number(value) for name, value in asdict(plan.figures).items() if not isinstance(value, dict)
        },
        "happened": measured_figures(list(IndexedRun(files.directory).columns().rows(_HAPPENED))),
        "from": f"{', '.join(taken)} of this run, the rest of its [plan]" if taken else "its [plan]",
        "steps": plan.assumed.steps,
        "left_out": [f"{of}, planned as {value_of(resolved.config, of.option)!r}" for of in left_out],
    }


def measured_figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, float | int | None]:
    """Return the same figures from a run's rows, as far as they have them; {} without rows."""
    if not rows:
        return {}
    total, last = aggregate(rows), rows[-1]

    def share(part: str, *whole: str) -> float | None:
        all_of_it = sum(last.get(key) or 0.0 for key in whole)
        return (last.get(part) or 0.0) / all_of_it if all_of_it else None

    def mean(key: str) -> float | None:
        return None if total.get(key) is None else sum(row.get(key) or 0.0 for row in rows) / len(rows)

    step_s, trained = mean("time/step_s"), last.get("tokens/trained")
    found = {
        "step_s": step_s,
        "generate_s": mean("time/generate_s"),
        "train_s": mean("time/train_s"),
        "trained_tokens_per_s": trained / len(rows) / step_s if trained is not None and step_s else None,
        "generated_tokens_per_s": total.get("speed/generated_tokens_per_s"),
        "staleness_mean": total.get("staleness/mean"),
        "staleness_max": total.get("staleness/max"),
        "partial_share": total.get("rollouts/partial_share"),
        "dropped_share": share("tokens/dropped", "tokens/generated"),
        "reprefill_share": share(
            "engine/reprefill_tokens", "tokens/generated", "engine/prefill_tokens", "engine/reprefill_tokens"
        ),
    }
    return {name: number(value) for name, value in found.items()}
