"""How often each source is asked for a task: in proportion to its weight, and to its size. Pure: no files, no state."""

from __future__ import annotations

from collections.abc import Sequence

from rollover.tasks.source import SourceSetup, TaskSource


def shares_of(sources: Sequence[tuple[SourceSetup, TaskSource]], temperature: float) -> list[float]:
    """What the probability of each source is proportional to: its weight, times n^(1/T) of its n problems.

    T is `temperature` (tasks.mixing_temperature); 0: weights alone. With T = 1 every problem comes as often as any
    other, with large T every source: the temperature-based mixing of multilingual pretraining (Arivazhagan et al. 2019,
    arXiv 1907.05019, section 4.2; mT5's alpha, arXiv 2010.11934, is 1/T). ValueError for a source that is trained and
    whose problems nobody can count.
    """
    return [setup.config.weight * _size(setup, source, temperature) for setup, source in sources]


def _size(setup: SourceSetup, source: TaskSource, temperature: float) -> float:
    if not temperature or not setup.config.weight:
        return 1.0
    if source.num_problems is None:
        raise ValueError(
            f"tasks.mixing_temperature = {temperature:g}: how many problems {setup.label!r} has is not known, as they"
            " have no end or are streamed. Remove it, and mix by tasks.sources.weight"
        )
    return source.num_problems ** (1 / temperature)
