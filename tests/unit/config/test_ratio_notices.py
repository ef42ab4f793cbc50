"""Options that act on a ratio which is always 1: one notice at start, whoever set them, and never a refusal."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollover.cli import main
from rollover.config.load import load_config

ONE = "[train]\nnum_steps = 1\n"
TWO = "[train]\nepochs_per_step = 2\n"


def told(folder: Path, text: str, overrides: list[tuple[str, str]] | None = None) -> list[str]:
    path = folder / "a.toml"
    path.write_text(text)
    notices = load_config([path], overrides or [], require_sources=False).notices
    return [notice for notice in notices if notice.startswith("no effect: ")]


@pytest.mark.parametrize(
    ("algorithm", "named"),
    [
        ("clip_low = 0.1\nclip_high = 0.1", "algorithm.clip_low = 0.1 ({file}), algorithm.clip_high = 0.1 ({file})"),
        ("clip_high = 0.2", "algorithm.clip_high = 0.2 ({file})"),
        ("dual_clip = 3.0", "algorithm.dual_clip = 3.0 ({file})"),
        ('loss = "gmpo"\ncorrection = "none"', 'algorithm.loss = "gmpo" ({file})'),
        ('loss = "importance_sampling"', 'algorithm.loss = "importance_sampling" ({file})'),
        ('preset = "dapo"', "algorithm.clip_high = 0.28 (preset dapo)"),
        (
            'preset = "gspo"',
            'algorithm.loss = "gspo" (preset gspo), algorithm.clip_low = 0.0003 (preset gspo), algorithm.clip_high ='
            " 0.0004 (preset gspo)",
        ),
        ('proximal = "snapshot"\nclip_high = 0.3', "algorithm.clip_high = 0.3 ({file})"),
    ],
)
def test_options_of_the_ratio_are_named_with_who_set_them(algorithm: str, named: str, tmp_path: Path) -> None:
    (notice,) = told(tmp_path, f"{ONE}[algorithm]\n{algorithm}")
    assert notice.startswith(f"no effect: {named.format(file=tmp_path / 'a.toml')}. A step has one update ")
    assert 'set algorithm.proximal = "behavior"' in notice
    assert told(tmp_path, f"{TWO}[algorithm]\n{algorithm}") == []


@pytest.mark.parametrize(
    "algorithm",
    [
        'preset = "grpo"',
        'preset = "rloo"',
        'clip_high = 0.3\nproximal = "behavior"',
        'loss = "vespo"',
        'loss = "clip_cov"',
        'loss = "mine.py:loss"',
        'loss = "gmpo"\ncorrection = "token_truncate"',  # it weighs a row as a whole
    ],
)
def test_nothing_is_said_where_they_act_or_are_defaults(algorithm: str, tmp_path: Path) -> None:
    assert told(tmp_path, f"{ONE}[algorithm]\n{algorithm}") == []


def test_a_snapshot_of_older_weights_gives_them_an_effect(tmp_path: Path) -> None:
    rollout = '[rollout]\nin_flight_groups = 16\nmax_staleness = 2\ninterrupt = "when_enough"\n'
    text = f"{rollout}[algorithm]\nclip_high = 0.3\n"
    assert told(tmp_path, text + 'proximal = "snapshot"') == []
    assert len(told(tmp_path, text)) == 1


def test_an_override_is_named(tmp_path: Path) -> None:
    (notice,) = told(tmp_path, ONE, [("algorithm.clip_high", "0.3")])
    assert "algorithm.clip_high = 0.3 (command line)" in notice


def test_the_program_says_it_at_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = '[[tasks.sources]]\nkind = "reasoning_gym"\nname = "chain_sum"\n'
    (tmp_path / "a.toml").write_text(f"[algorithm]\nclip_high = 0.3\n{source}")
    assert main(["train", str(tmp_path / "a.toml"), "--dry-run"]) == 0
    out = capsys.readouterr()
    assert (out.out + out.err).count("no effect: algorithm.clip_high = 0.3") == 1
