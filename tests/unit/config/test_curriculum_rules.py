"""[tasks.curriculum]: combinations that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollover.config import ConfigError
from rollover.config.load import load_config

DATA = '[[tasks.sources]]\nkind = "dataset"\npath = "rows.jsonl"\n'
GENERATOR = '[[tasks.sources]]\nkind = "reasoning_gym"\nname = "chain_sum"\n'


def load(folder: Path, curriculum: str, sources: str = DATA, head: str = "") -> None:
    (folder / "a.toml").write_text(f"{head}\n[tasks.curriculum]\n{curriculum}\n{sources}")
    load_config([folder / "a.toml"])


@pytest.mark.parametrize(
    ("text", "sources", "head", "what"),
    [
        ('kind = "bucket"', DATA, "", "is none of buckets, variance, and no function .*Did you mean"),
        ('kind = "variance"', GENERATOR * 2, "", "where no task comes twice"),
        ('kind = "variance"', DATA, "[tasks]\nepochs = 1", "where no task comes twice"),
        ('kind = "variance"\nby = "source"', DATA, "", "with one source that is trained: there is nothing to choose"),
        ('kind = "variance"\nby = "source"\nprior_column = "x"', DATA * 2, "", "a source has no columns"),
        ('kind = "buckets"\nhard_to = 0.5\neasy_from = 0.5', DATA, "", "a task would be both"),
        ('kind = "buckets"\neasy_weight = 1.0\nhard_weight = 1.0', DATA, "", "every task is given alike"),
        ('kind = "variance"\nmin_weight = 1.0', DATA, "", "every task is given alike"),
        ('kind = "variance"', DATA, '[run]\ntrain_on_recorded = "x"', "no task is chosen there"),
        ('kind = "variance"', DATA, '[tasks]\nproducer = "mine.py:P"', "no task is chosen there"),
    ],
)
def test_refused(tmp_path: Path, text: str, sources: str, head: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        load(tmp_path, text, sources, head)


@pytest.mark.parametrize(
    ("text", "sources", "head"),
    [
        ('kind = "variance"\ndecay = 0.5', DATA, ""),
        ('kind = "buckets"\nvisits_in_row = 2\neasy_weight = 0.0', DATA + GENERATOR, ""),
        ('kind = "variance"\nby = "source"', GENERATOR * 2, ""),
        ('kind = "variance"\nprior_column = "rate"', DATA, "[tasks]\nepochs = 1"),
        ('kind = "variance"\nby = "level"', DATA, "[tasks]\nepochs = 1"),
        ('kind = "mine.py:Curriculum"\ndecay = 0.5', GENERATOR, ""),
        ('kind = "variance"', DATA, "[filters]\npass_threshold = 0.5"),
        ('kind = "variance"', DATA, '[filters]\nmetric = "acc"'),
    ],
)
def test_allowed(tmp_path: Path, text: str, sources: str, head: str) -> None:
    load(tmp_path, text, sources, head)
