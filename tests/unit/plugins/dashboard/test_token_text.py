"""What each token says."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models

from recorded_run import write_run
from rollover.plugins.dashboard.indexed_run import IndexedRun
from rollover.plugins.dashboard.rollout_detail import RunTokenTexts, split_text

TEXT = "naïve 😀 日本語\n\ttab <|end|> \u202eabc"


def by_bytes(ids: Sequence[int]) -> str:
    """A tokenizer of 256 tokens, one a byte."""
    return bytes(ids).decode("utf-8", "replace")


def test_tokens_together_are_the_text() -> None:
    told = split_text(by_bytes, list(TEXT.encode()))
    assert "".join(told) == TEXT and len(told) == len(TEXT.encode())
    assert "😀" in told and told[told.index("😀") - 3 : told.index("😀")] == ["", "", ""]


def test_bytes_that_never_become_a_character_are_told_as_such() -> None:
    assert "".join(split_text(by_bytes, [65, 0xF0, 0x9F])) == by_bytes([65, 0xF0, 0x9F])
    assert "".join(split_text(by_bytes, [])) == ""


@pytest.mark.parametrize("seed", range(3))
def test_whatever_the_bytes_are_nothing_after_them_is_lost(seed: int) -> None:
    rng = random.Random(seed)
    ids = [rng.randrange(256) for _ in range(60)] + list(b" the end")
    assert "".join(split_text(by_bytes, ids)).endswith("the end") and len(split_text(by_bytes, ids)) == len(ids)


@pytest.mark.parametrize("ids", [[0x9F] * 400, [300] * 400, [0xF0] * 400], ids=["inside", "unknown", "begins"])
def test_what_is_no_character_takes_a_time_of_its_length(ids: list[int]) -> None:
    """As a collapsed policy may write it."""
    decoded = 0

    def decode(some: Sequence[int]) -> str:
        nonlocal decoded
        decoded += len(some)
        return by_bytes([of for of in some if of < 256])

    whole = [*ids, *"a😀b".encode()]
    told = split_text(decode, whole)
    assert "".join(told) == by_bytes([of for of in whole if of < 256]) and len(told) == len(whole)
    assert told[-1] == "b" and "😀" in told[-2]
    assert decoded < 60 * len(whole)


@pytest.mark.parametrize("folder", ["", "model"])
def test_spaces_before_words_are_told_with_them(tmp_path: Path, folder: str) -> None:
    vocabulary = {"\u2581one": 0, "\u2581two": 1, "x": 2}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="x"))
    tokenizer.decoder = decoders.Metaspace()
    run = write_run(tmp_path)
    (run / "model").mkdir()
    tokenizer.save(str(run / folder / "tokenizer.json"))
    assert RunTokenTexts(IndexedRun(run))([0, 1, 2]) == ["one", " two", "x"]


def test_a_run_whose_tokenizer_is_not_here_or_is_none(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    assert RunTokenTexts(IndexedRun(run))([0, 1]) is None
    (run / "model").mkdir()
    (run / "model" / "tokenizer.json").write_text("no tokenizer")
    assert RunTokenTexts(IndexedRun(run))([0, 1]) is None
    (run / "config.resolved.json").write_text(json.dumps({"model": {"path": "nobody/has-this-model-here"}}))
    assert RunTokenTexts(IndexedRun(run))([0, 1]) is None


def test_another_run_in_the_same_place_has_its_own_tokenizer(tmp_path: Path) -> None:
    tokens = RunTokenTexts(IndexedRun(write_run(tmp_path)))
    assert tokens([0]) is None
    for word in ("one", "another"):
        Tokenizer(models.WordLevel({word: 0}, unk_token=word)).save(str(tmp_path / "tokenizer.json"))
        assert tokens([0]) == [word]
    (tmp_path / "tokenizer.json").unlink()
    assert tokens([0]) is None
