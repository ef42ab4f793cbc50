"""experiments/vllm_peer.py, vLLM as a peer of the engine benchmark: needs the environment that `make vllm` builds."""

from __future__ import annotations

from pathlib import Path

import pytest

import tiny
import vllm_peer


@pytest.mark.vllm
def test_decodes_what_it_is_asked_for_and_ends(tmp_path: Path) -> None:
    interpreter = vllm_peer.python()
    assert interpreter is not None, "run `make vllm`"
    model = tiny.save(tmp_path / "model", head_dim=32, num_attention_heads=2, num_key_value_heads=1)
    with vllm_peer.VllmPeer(interpreter, str(model), "float32", threads=2) as peer:
        assert peer.version
        peer.decode([[5, 6, 7], [8, 9, 10]], new_tokens=4)
    assert peer.process.returncode == 0


def test_an_environment_half_built_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".venv-vllm" / "bin").mkdir(parents=True)
    (tmp_path / ".venv-vllm" / "bin" / "python").touch()
    assert vllm_peer.python() is None
