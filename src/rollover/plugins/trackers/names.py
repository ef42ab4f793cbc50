"""The tools of others that `track.trackers` may name, and what each needs."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass


@dataclass(frozen=True)
class Named:
    """`tracker`: module:Class of ours; `library`: what it imports, and the name of our extra is the tool's own."""

    tracker: str
    library: str


_HERE = "rollover.plugins.trackers"
TOOLS = {
    "wandb": Named(f"{_HERE}.wandb_tool:Wandb", "wandb"),
    "tensorboard": Named(f"{_HERE}.tensorboard_tool:TensorBoard", "tensorboard"),
    "trackio": Named(f"{_HERE}.trackio_tool:Trackio", "trackio"),
    "mlflow": Named(f"{_HERE}.mlflow_tool:MLflow", "mlflow"),
    "swanlab": Named(f"{_HERE}.swanlab_tool:SwanLab", "swanlab"),
}


def check_installed(name: str) -> None:
    """ValueError with the line for pip where the tool's library is missing."""
    if not is_installed(name):
        raise ValueError(f'track.trackers: {name} is not installed: pip install "rollover[{name}]"')


def is_installed(name: str) -> bool:
    """Whether the tool's library is there. It is not imported: that takes seconds."""
    found = importlib.util.find_spec(TOOLS[name].library)
    return found is not None and found.origin is not None  # no mere folder, as wandb makes one where it is used
