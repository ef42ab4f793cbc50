"""Sources mixed by weight and by size: the shares, through the configuration."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from rollover.config import ConfigError
from rollover.config.load import load_config
from rollover.tasks.stream import TaskStream

SIZES = {"small": 20, "middle": 80, "large": 320}


def stream(folder: Path, tasks: str = "", weights: tuple[float, ...] = (1, 1, 1), more: str = "") -> TaskStream:
    sources = ""
    for (name, size), weight in zip(SIZES.items(), weights, strict=True):
        rows = [json.dumps({"prompt": f"{name} {i}", "answer": "1"}) + "\n" for i in range(size)]
        (folder / f"{name}.jsonl").write_text("".join(rows))
        path = json.dumps(str(folder / f"{name}.jsonl"))
        sources += f'[[tasks.sources]]\nkind = "dataset"\npath = {path}\nweight = {weight}\n'
    (folder / "a.toml").write_text(f"[tasks]\n{tasks}\n{sources}{more}")
    config = load_config([folder / "a.toml"]).config
    return TaskStream(config.tasks, config.run.seed, "train", rewards=config.rewards)


@pytest.mark.parametrize(
    ("temperature", "weights", "expected"),
    [
        (0.0, (1, 1, 1), (1, 1, 1)),
        (1.0, (1, 1, 1), (1, 4, 16)),
        (2.0, (1, 1, 1), (1, 2, 4)),
        (2.0, (4, 1, 1), (4, 2, 4)),
        (1000.0, (1, 1, 1), (1, 1, 1)),
        (1.0, (1, 0, 1), (1, 0, 16)),
    ],
)
def test_shares(tmp_path: Path, temperature: float, weights: tuple[float, ...], expected: tuple[float, ...]) -> None:
    counts = Counter(t.source for t in stream(tmp_path, f"mixing_temperature = {temperature}", weights).take(1500))
    for name, share in zip(SIZES, expected, strict=True):
        assert counts[name] / 1500 == pytest.approx(share / sum(expected), abs=0.04), name


GENERATOR = '[[tasks.sources]]\nkind = "reasoning_gym"\nname = "chain_sum"\n'


@pytest.mark.parametrize(
    ("weights", "more", "what"),
    [
        ((1, 1, 1), GENERATOR, r"tasks\.sources\.3: how many problems a generator or a stream has is not known"),
        ((1, 0, 0), "", "has no effect with one source that is trained"),
    ],
)
def test_refused(tmp_path: Path, weights: tuple[float, ...], more: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        stream(tmp_path, "mixing_temperature = 2.0", weights, more)


def test_a_source_that_is_evaluated_alone_needs_no_size(tmp_path: Path) -> None:
    assert stream(tmp_path, "mixing_temperature = 2.0", more=f"{GENERATOR}weight = 0\n").take(5)


def test_a_source_of_ones_own_without_a_length_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from rollover.types import Task\n"
        "class Endless:\n"
        "    def __init__(self, setup): self.label = setup.label\n"
        "    def problem(self, index): return Task(f'e/{index}', self.label, 'exact_match', prompt=str(index))\n"
    )
    own = f"[[tasks.sources]]\nkind = {json.dumps(str(tmp_path / 'mine.py') + ':Endless')}\n"
    with pytest.raises(ValueError, match="how many problems 'Endless' has is not known"):
        stream(tmp_path, "mixing_temperature = 2.0", more=own)
