"""A torch profiler trace of chosen training steps (train.profile_steps), for chrome://tracing or Perfetto."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from rollover.config import Config


@contextmanager
def profiled(config: Config, step: int, folder: Path) -> Iterator[None]:
    """Writes <folder>/profile/step-000012.json if `step` is in train.profile_steps."""
    if step not in config.train.profile_steps:
        yield
        return
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        yield
    target = folder / "profile"
    target.mkdir(parents=True, exist_ok=True)
    profile.export_chrome_trace(str(target / f"step-{step:06d}.json"))
