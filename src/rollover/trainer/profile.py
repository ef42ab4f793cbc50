"""Torch profiler traces of chosen training steps (train.profile_steps), for chrome://tracing or Perfetto."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from rollover.config import Config
from rollover.trainer.backend import TrainerBackend


@contextmanager
def profiled(config: Config, step: int, folder: Path, backend: TrainerBackend) -> Iterator[None]:
    """Write <folder>/profile/step-000012.json if `step` is in train.profile_steps.

    Ranks write a file each (step-000012-rank-0.json).
    """
    if step not in config.train.profile_steps:
        yield
        return
    path = folder / "profile" / f"step-{step:06d}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    start, stop = getattr(backend, "start_profile", None), getattr(backend, "stop_profile", None)
    if start is None or stop is None:
        with new_profile() as profile:
            yield
        profile.export_chrome_trace(str(path))
        return
    start()
    yield
    stop(path)


def new_profile() -> torch.profiler.profile:
    """Return a profiler of this process and its GPU, not started."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    return torch.profiler.profile(activities=activities)
