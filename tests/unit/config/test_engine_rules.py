"""[engine] with kind = "remote": what is refused, and how it is mended."""

from __future__ import annotations

from typing import Any

import pytest

from rollover.config import Config

ONE = {"kind": "remote", "num_servers": 1}


def refused(engine: dict[str, Any], **tables: Any) -> str:
    with pytest.raises(ValueError) as error:
        Config.model_validate({"engine": engine, **tables})
    return str(error.value)


def test_what_names_a_server_is_taken() -> None:
    assert Config.model_validate({"engine": ONE}).engine.server == "embedded"
    urls = ["http://127.0.0.1:8000", "https://node-2:8001/"]
    assert Config.model_validate({"engine": {"kind": "remote", "urls": urls}}).engine.urls == urls


def test_a_remote_engine_needs_a_server() -> None:
    assert "set engine.num_servers" in refused({"kind": "remote"})


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "http://", "ftp://host:1", "http://host:1/v1"])
def test_an_address_is_one(url: str) -> None:
    assert f"engine.urls: {url!r} is no address" in refused({"kind": "remote", "urls": [url]})


def test_a_server_is_named_once() -> None:
    assert "is there twice" in refused({"kind": "remote", "urls": ["http://host:1"] * 2})


def test_adapters_that_are_merged_in_bfloat16_are_refused_unless_the_loss_corrects() -> None:
    """Rounded, they are another policy: what is sampled with it is off-policy."""
    lora: Any = {"lora": {"rank": 4}, "dtype": "bfloat16"}
    uncorrected = {"correction": "none"}
    assert 'model.dtype = "float32"' in refused(ONE, model=lora, algorithm=uncorrected)
    stale = {"interrupt": "when_enough", "in_flight_groups": 16, "max_staleness": 1}
    for allowed in (
        {"model": lora},
        {"model": lora, "algorithm": uncorrected | {"allow_uncorrected": True}, "rollout": stale},
        {"model": lora | {"dtype": "float32"}, "algorithm": uncorrected},
    ):
        Config.model_validate({"engine": ONE} | allowed)


@pytest.mark.parametrize(
    "engine, key",
    [
        ({"urls": ["http://host:1"]}, "engine.urls"),
        ({"num_servers": 2}, "engine.num_servers"),
        ({"server_timeout_s": 5.0}, "engine.server_timeout_s"),
        ({"give_up_s": 5.0}, "engine.give_up_s"),
        ({"weights_dir": "/w"}, "engine.weights_dir"),
        ({"kind": "remote", "urls": ["http://host:1"], "server": "vllm"}, "engine.server"),
        ({"kind": "remote", "urls": ["http://host:1"], "kv_memory_gb": 1.0}, "engine.kv_memory_gb"),
        (ONE | {"threads": 3}, "engine.threads"),
        (ONE | {"server": "vllm", "prefill_chunk_tokens": 64}, "engine.prefill_chunk_tokens"),
        (ONE | {"server": "vllm", "device": "cuda"}, "engine.device"),
    ],
)
def test_options_without_an_effect_are_refused(engine: dict[str, Any], key: str) -> None:
    assert f"{key} has no effect" in refused(engine)
