"""What a backend cannot do is refused, and docs/backends.md says of every option what each backend does with it."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rollover.config import Config
from rollover.config.backend import RANKS_REFUSES, TINKER_IGNORES, TINKER_REFUSES
from rollover.config.schema import default_of, leaves

PAGE = Path(__file__).parents[3] / "docs" / "backends.md"
WRONG: dict[str, Any] = {
    "algorithm.entropy_coef": 0.1,
    "algorithm.top_entropy_share": 0.2,
    "algorithm.proximal": "snapshot",
    "algorithm.reference_path": "/another/model",
    "algorithm.reference_refresh_steps": 2,
    "model.lora.alpha": 16.0,
    "model.lora.dropout": 0.1,
    "model.lora.target_modules": ["q_proj"],
    "model.lora.exclude_modules": ["q_proj"],
    "model.lora.rslora": True,
    "model.lora.dora": True,
    "model.lora.path": "model/adapter",
    "train.optimizer": "muon",
    "rollout.temperature": 0.7,
    "rollout.top_p": 0.9,
    "rollout.top_k": 5,
    "rollout.min_p": 0.1,
    "rollout.logits.repetition_penalty": 1.2,
    "rollout.logits.presence_penalty": 0.5,
    "rollout.logits.frequency_penalty": 0.5,
    "rollout.logits.min_new_tokens": 3,
    "rollout.logits.banned_token_ids": [3],
    "rollout.logits.forced_token_ids": [4],
    "rollout.logits.logit_bias": {"3": 1.0},
    "rollout.logits.regex": "a+",
    "rollout.logits.json_schema": "{}",
    "engine.kind": "process",
}
NO_EFFECT: dict[str, Any] = {
    "model.dtype": "float32",
    "model.device": "cpu",
    "model.vision": "trained",
    "engine.kv_memory_gb": 1.0,
    "engine.threads": 1,
    "engine.prefill_chunk_tokens": 64,
    "engine.device": "cpu",
    "engine.vllm_python": "python3",
    "engine.vllm_args": ["--enforce-eager"],
    "train.micro_batch_tokens": 64,
    "train.gradient_checkpointing": True,
    "train.profile_steps": [1],
    "track.peak_tflops": 1.0,
}

OF_RANKS = {"backend.num_ranks", "backend.rank_timeout_s"}
WRONG_FOR_RANKS: dict[str, Any] = {
    "model.lora.rank": 4,
    "model.vision": "trained",
    "algorithm.advantage": "gae",
    "train.optimizer": "adamw_8bit",
    "model.device": "mps",
    "algorithm.loss": "<python>:loss-3f2a9c1d",
}


def config(**values: Any) -> Config:
    data: dict[str, Any] = {}
    for key, value in values.items():
        *path, name = key.split(".")
        table = data
        for part in path:
            table = table.setdefault(part, {})
        table[name] = value
    return Config.model_validate(data)


def tinker(**values: Any) -> Config:
    return config(**{"backend.type": "tinker", "model.lora.rank": 4, **values})


def test_every_option_that_it_cannot_have_is_refused() -> None:
    assert tinker().backend.chunk_tokens == 256
    assert WRONG.keys() == TINKER_REFUSES.keys() and NO_EFFECT.keys() == set(TINKER_IGNORES)
    local = {"backend.type": "local", "model.lora.rank": 4}
    for key, value in WRONG.items():
        more = {"rollout.max_staleness": 1, "train.publish_every": 2} if "proximal" in key else {}
        if "reference" in key:
            more = {"algorithm.kl_coef": 0.1, **({"model.path": value} if "path" in key else {})}
        assert default_of(key) in TINKER_REFUSES[key][0], key
        with pytest.raises(ValidationError, match=re.escape(f"{key} = ") + '.* with backend.type = "tinker": '):
            tinker(**{key: value, **more})
        config(**{**local, key: value, **more})
    for key, value in NO_EFFECT.items():
        with pytest.raises(ValidationError, match=re.escape(f"{key} has no effect with backend.type = ")):
            tinker(**{key: value})
    with pytest.raises(ValidationError, match="trains adapters: set model.lora.rank"):
        config(**{"backend.type": "tinker"})
    with pytest.raises(ValidationError, match="the service has no value head"):
        tinker(**{"algorithm.advantage": "gae"})
    with pytest.raises(ValidationError, match="backend.chunk_tokens has no effect"):
        config(**{"backend.chunk_tokens": 8})


def test_what_ranks_cannot_have_is_refused_with_what_to_set_instead() -> None:
    ranks = {"backend.type": "ranks"}
    assert config(**ranks).backend.num_ranks == 2 and config(**ranks, **{"backend.num_ranks": 1})
    assert WRONG_FOR_RANKS.keys() == RANKS_REFUSES.keys()
    said = '.* with backend.type = "ranks": .*(Set|Use|Name)'
    for key, value in WRONG_FOR_RANKS.items():
        with pytest.raises(ValidationError, match=re.escape(f"{key} = ") + said):
            config(**ranks, **{key: value})
        config(**{key: value})
    for key in OF_RANKS:
        with pytest.raises(ValidationError, match=f'{key} has no effect unless backend.type = "ranks"'):
            config(**{key: 3})
    with pytest.raises(ValidationError, match="num_ranks"):
        config(**ranks, **{"backend.num_ranks": 0})


def test_the_page_says_of_every_option_what_each_backend_does_with_it() -> None:
    table = PAGE.read_text(encoding="utf-8").partition("| option | local | tinker | ranks |")[2].partition("\n\n")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| `")]
    said = [(re.findall(r"`([^`]+)`", keys), *rest) for keys, *rest in rows]
    names = [name for name, _ in leaves()]
    for patterns, *_ in said:
        for pattern in patterns:
            assert any(fnmatch(name, pattern) for name in names), f"{pattern} is no option"
    limited = {"algorithm.advantage", "model.lora.rank"}
    for name in names:
        found = [row for row in said if any(fnmatch(name, pattern) for pattern in row[0])]
        assert found, f"{name} has no row in the table of docs/backends.md"
        _, local, service, ranks = found[0]
        assert local == ("no effect" if name.startswith("backend.") and name != "backend.type" else "yes"), name
        if name.startswith("critic."):
            assert ranks.startswith("no effect") and service.startswith("no effect"), name
            continue
        if name in RANKS_REFUSES:
            assert "refused" in ranks, name
        elif name.startswith("model.lora."):
            assert ranks.startswith("no effect"), name
        elif name.startswith("backend.") and name != "backend.type":
            assert (ranks == "yes") == (name in OF_RANKS), name
        else:
            assert ranks == "yes", name
        if name in TINKER_REFUSES:
            assert "refused" in service, name
        elif name in TINKER_IGNORES or name in OF_RANKS:
            assert service.startswith("no effect"), name
        else:
            assert (service == "yes") != (name in limited), name
