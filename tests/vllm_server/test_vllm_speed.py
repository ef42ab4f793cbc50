"""experiments/servers_beside_embedded.py runs and reports what it promises; its figures are not judged here."""

from __future__ import annotations

from pathlib import Path

import pytest

import servers_beside_embedded
from rollover.config.load import load_config
from vllm_server.serving import VllmServer

pytestmark = pytest.mark.vllm


def test_every_system_decodes_what_it_is_asked_for(
    server: VllmServer, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLOVER_SERVER_TOKEN", server.token)
    monkeypatch.setattr(servers_beside_embedded, "CASES", (1, 3))
    monkeypatch.setattr(servers_beside_embedded, "NEW_TOKENS", 5)
    overrides = [("model.path", str(model_folder)), ("model.dtype", "float32"), ("engine.kv_memory_gb", "0.1")]
    config = load_config([], overrides, require_sources=False).config
    assert list(servers_beside_embedded.systems(config)) == ["embedded", "served", "vllm"]
    configs = {
        "embedded": servers_beside_embedded.systems(config)["embedded"],
        "vllm": servers_beside_embedded.remote(config, urls=[server.url]),
    }
    report = servers_beside_embedded.run(configs, 2)
    assert report["ratios"].keys() == {"vllm_1_vs_embedded", "vllm_3_vs_embedded"}
    found = {(result["case"], result["system"]) for result in report["results"]}
    assert found == {(f"decode_{num}", name) for num in (1, 3) for name in configs}
    assert all(0 < result["spread"][0] <= result["tokens_per_s"] <= result["spread"][1] for result in report["results"])
