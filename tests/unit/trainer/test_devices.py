"""engine.device and model.device: who is where, and what a user is told of one that is not there."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import tiny
from rollover.config import Config
from rollover.engine import build
from rollover.engine.build import embedded_engine
from rollover.engine.embedded import sampling
from rollover.engine.embedded.engine import EmbeddedEngine
from rollover.engine.embedded.sampling import sample, uniforms
from rollover.engine.process.engine import ProcessEngine
from rollover.engine.protocol import ExtendRequest
from rollover.models import devices
from rollover.models.devices import engine_device, pick_device
from rollover.models.packed import PackedWeight
from rollover.run import setup
from rollover.run.setup import Components, EvalComponents
from rollover.trainer import objective
from rollover.types import Prompt, SamplingParams
from virtual_time import at_once


def config(model: Path | None = None, *, trains_on: str = "cpu", generates_on: str = "", **engine: Any) -> Config:
    return Config.model_validate(
        {
            "model": {"device": trains_on, "dtype": "float32"} | ({"path": str(model)} if model else {}),
            "engine": {"device": generates_on, **engine},
            "tasks": {"sources": [{"kind": "reasoning_gym", "name": "chain_sum"}]},
            "run": {"threads": 1},
        }
    )


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which nothing but the number can be asked."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


def test_the_engine_is_where_the_trainer_is_unless_it_is_told(two_gpus: None) -> None:
    assert engine_device(config(trains_on="cpu")) == torch.device("cpu")
    assert engine_device(config(trains_on="cuda:1")) == torch.device("cuda:1")
    assert engine_device(config(trains_on="cpu", generates_on="cuda:1")) == torch.device("cuda:1")
    assert engine_device(config(trains_on="cpu", generates_on="auto")) == torch.device("cuda")
    assert engine_device(config(trains_on="cuda:0", generates_on="cpu")) == torch.device("cpu")
    with pytest.raises(ValueError, match=r'engine.device = "cuda:2", but torch sees only 2 CUDA devices'):
        engine_device(config(generates_on="cuda:2"))


@pytest.mark.parametrize("kind", ["embedded", "process"])
def test_a_device_that_is_not_there_ends_the_run_before_the_model_is_loaded(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(setup, "load_model", lambda *_, **__: pytest.fail("loaded"))
    monkeypatch.setattr(build, "ProcessEngine", lambda *_: pytest.fail("started"))
    for device, said in (("cuda", "torch sees no CUDA device"), ("gpu", "is not a device")):
        with pytest.raises(ValueError, match=f'engine.device = "{device}".*{said}'):
            asyncio.run(Components.build(config(generates_on=device, kind=kind)))
    with pytest.raises(ValueError, match='model.device = "cuda".*model.device = "cpu"'):
        pick_device("cuda")


def test_the_engines_copy_goes_to_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """ "meta" stands for another device: it holds no numbers, so the engine itself is left out."""
    taken: list[Any] = []
    monkeypatch.setattr(EmbeddedEngine, "over", lambda model, tokenizer, config: taken.append(model))
    loaded = tiny.loaded()
    embedded_engine(loaded, config(generates_on="meta"))
    assert {p.device.type for p in taken[0].parameters()} == {"meta"}
    assert {b.device.type for b in taken[0].buffers()} == {"meta"}
    assert {p.device.type for p in loaded.model.parameters()} == {"cpu"}


def test_who_only_generates_loads_to_the_engines_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`rollover eval`: it has no trainer."""

    class Asked(Exception):
        pass

    def asked(*_: Any, device: torch.device, **__: Any) -> Any:
        raise Asked(device.type)

    wanted = config(tiny.save(tmp_path), generates_on="meta")
    monkeypatch.setattr(setup, "load_with_adapter", asked)
    with pytest.raises(Asked, match="meta"):
        at_once(EvalComponents.build(wanted, None, with_rewards=False))


def test_the_engines_process_is_on_the_engines_device(tmp_path: Path) -> None:
    """It never looks at where the trainer is: at a GPU that no machine has."""
    engine = ProcessEngine(config(tiny.save(tmp_path), trains_on="cuda:99", generates_on="cpu"), threads=1)
    try:
        assert engine.max_tokens == 1024
    finally:
        asyncio.run(engine.close())


def test_weights_of_another_device_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers, whoever holds them: packed weights, parameters and adapters take them to where they are."""
    model = tiny.model(dtype=torch.bfloat16)
    engine = EmbeddedEngine(tiny.model(dtype=torch.bfloat16, seed=1), config().engine)
    moved: list[str] = []

    class Far(torch.Tensor):
        """Says that it is on a GPU, and can be brought from there."""

        @property
        def device(self) -> torch.device:
            return torch.device("cuda:0")

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            plain = [a.as_subclass(torch.Tensor) if isinstance(a, Far) else a for a in args]
            name = getattr(func, "__name__", "")
            if name == "__get__":
                return func(*plain, **(kwargs or {}))
            if name == "to":
                assert torch.device("cpu") in (*plain, *(kwargs or {}).values()), "left on the GPU"
                moved.append(name)
                return func(*plain, **(kwargs or {}))
            assert name in ("copy_", "detach", "numel", "size", "dim"), f"{name} of a tensor on another device"
            out = func(*plain, **(kwargs or {}))
            return out.as_subclass(Far) if name == "detach" else out

    at_once(engine.load_weights(1, [(n, p.detach().as_subclass(Far)) for n, p in model.named_parameters()]))
    packed = PackedWeight.supported(torch.device("cpu"), torch.bfloat16)  # not on every processor
    assert moved or not packed, "packed weights are on the CPU"
    prompt = tuple(range(5, 25))
    assert asyncio.run(_tokens(engine, prompt)) == asyncio.run(_tokens(EmbeddedEngine(model, config().engine), prompt))


async def _tokens(engine: EmbeddedEngine, prompt: tuple[int, ...]) -> list[int]:
    (segment,) = await engine.extend(ExtendRequest("0-0", Prompt(prompt), (), 12, 3, SamplingParams()))
    return segment.token_ids.tolist()


def test_an_apple_gpu_is_taken_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(ValueError, match='model.device = "mps", but torch sees no Apple GPU: set model.device = "cpu"'):
        pick_device("mps")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert pick_device("mps") == torch.device("mps")
    assert pick_device("auto") == torch.device("cuda" if torch.cuda.is_available() else "cpu"), "it must be named"


class _NoFloat64(TorchDispatchMode):
    """As an Apple GPU, on which nothing can be a float64. The draws are: they are made on the CPU, and moved."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        given, made = (
            {x.dtype for x in tree_leaves(tree) if isinstance(x, torch.Tensor)} for tree in ((args, kwargs), out)
        )
        if torch.float64 in made and {dtype for dtype in given if dtype.is_floating_point} != {torch.float64}:
            raise TypeError(f"{function} gives a float64")
        return out


def test_nothing_is_computed_in_float64_where_a_device_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.linspace(-3, 3, 700).repeat(6, 1)
    params = [SamplingParams(), SamplingParams(top_p=0.9), SamplingParams(temperature=0.0)] * 2
    draws = uniforms(range(6), range(6))
    tokens, logprobs = sample(logits, params, draws)
    with pytest.raises(TypeError, match="float64"), _NoFloat64():
        sample(logits, params, draws)
    for module in (sampling, objective):
        monkeypatch.setattr(module, "widest_float", lambda device: torch.float32)
    half, two = torch.tensor(0.5), torch.tensor(2)
    sums = objective.Tally()
    with _NoFloat64():
        narrow = sample(logits, params, draws)
        sums.add({"a": half, "b": two})
    assert narrow[0] == tokens and narrow[1] == pytest.approx(logprobs, abs=1e-5)
    assert sums.totals() == {"a": 0.5, "b": 2.0}


def test_random_numbers_of_a_gpu_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    set_to = []
    monkeypatch.setattr(torch.mps, "get_rng_state", lambda: torch.arange(3))
    monkeypatch.setattr(torch.mps, "set_rng_state", set_to.append)
    apple, cpu = torch.device("mps"), torch.device("cpu")
    state = devices.random_state(apple)
    assert list(state) == ["random/mps"] and devices.random_state(cpu) == {}
    devices.set_random_state(cpu, state)
    devices.set_random_state(apple, {"random/cuda": torch.arange(2)})
    assert set_to == []
    devices.set_random_state(apple, state)
    assert set_to == [state["random/mps"]]
