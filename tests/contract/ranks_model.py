"""Ranks over a tiny model, for tests: started once, as each takes seconds to load torch; backends are made on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiny
from rollover.config import Config
from rollover.models.devices import pick_device
from rollover.models.load import load_model
from rollover.models.threads import Team
from rollover.trainer.backend import BackendSetup
from rollover.trainer.local_backend import LocalBackend, make_local
from rollover.trainer.ranks.backend import RanksBackend
from rollover.trainer.ranks.group import Ranks


def config(folder: Path, *, dtype: str = "float32", num_ranks: int = 2, **tables: dict[str, Any]) -> Config:
    """Of a run on ranks over the model in that folder."""
    values: dict[str, dict[str, Any]] = {
        "model": {"path": str(folder), "dtype": dtype},
        "run": {"threads": num_ranks},
        "rollout": {"max_new_tokens": 16, "groups_per_step": 3},
        "train": {"learning_rate": 1e-2, "num_steps": 10, "micro_batch_tokens": 60},
        "engine": {"kv_memory_gb": 0.05},
        "backend": {"type": "ranks", "num_ranks": num_ranks},
    }
    for name, table in tables.items():
        values[name] = {**values.get(name, {}), **table}
    return Config.model_validate(values)


def setup(of: Config, *, engine: Any = None) -> BackendSetup:
    return BackendSetup(of, load_model(of.model, device=pick_device(of.model.device)), Team(), engine)


def pair(of: Config, ranks: Ranks) -> tuple[RanksBackend, LocalBackend]:
    """A backend on the ranks, and one in this process, with equal weights."""
    local = make_local(setup(of))
    assert isinstance(local, LocalBackend)
    return RanksBackend(setup(of), ranks), local


def model_folder(folder: Path) -> Path:
    return tiny.save(folder / "model")
