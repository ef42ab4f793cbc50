"""engine.kind: the table of built-in engines, and what is said of an engine of one's own that lacks something."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import tiny
from rollover.config import Config
from rollover.config.load import load_config
from rollover.engine.build import EngineSetup, build_engine
from rollover.engine.embedded.engine import EmbeddedEngine

OWN = """
from fake_engine import FakeEngine

def fake(setup):
    return FakeEngine(lambda seed: 5, max_tokens=setup.threads)

def server(setup):
    return FakeEngine(lambda seed: 5, policy_version=57)

def lacking(setup):
    return object()

def failing(setup):
    raise RuntimeError("no server at port 1")
"""


def setup(kind: str) -> EngineSetup:
    config = Config.model_validate({"engine": {"kind": kind}, "run": {"threads": 1}, "model": {"dtype": "float32"}})
    return EngineSetup(config, lambda: LOADED, 3)


LOADED = tiny.loaded()


def test_beside_a_trainer_the_weights_are_a_copy() -> None:
    engine = build_engine(setup("embedded"))
    assert isinstance(engine, EmbeddedEngine) and engine.max_tokens > 0
    assert all(p.requires_grad for p in LOADED.model.parameters()), "the trainer's are left as they are"


@pytest.mark.parametrize("kind", ["embedded", "process"])
def test_without_a_trainer_the_model_is_the_engines(kind: str) -> None:
    loaded = tiny.loaded()
    alone = EngineSetup(setup(kind).config, lambda: loaded, 1, beside_trainer=False)
    assert isinstance(build_engine(alone), EmbeddedEngine)
    assert not any(p.requires_grad for p in loaded.model.parameters())


def test_an_engine_of_ones_own_is_made_by_its_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    assert build_engine(setup("own.py:fake")).max_tokens == 3
    with pytest.raises(ValueError, match=r"engine.kind = 'own.py:lacking'.* a object without close, extend, interrupt"):
        build_engine(setup("own.py:lacking"))
    with pytest.raises(ValueError, match=r"engine.kind = 'own.py:failing' failed: RuntimeError: no server at port 1"):
        build_engine(setup("own.py:failing"))


def test_what_a_run_hands_over_is_known_and_without_one_the_versions_are_the_engines(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    training = setup(f"{tmp_path}/own.py:server")
    with pytest.raises(ValueError, match="its oldest_version gave 57, and the newest that it got is 0"):
        _ = build_engine(training).oldest_version
    assert build_engine(replace(training, beside_trainer=False)).oldest_version == 57


def test_a_kind_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match='engine.kind = "proces" is none of embedded, process.*, and no .*process'):
        load_config([], [("engine.kind", "proces")], require_sources=False)
