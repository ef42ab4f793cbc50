"""`rollover bench engine`: decode rate of the engine that engine.kind names, beside peers and its linear layers alone.

Peers: transformers' generate and continuous batching, and what a caller brings (experiments/engine_beside_vllm.py).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

import rollover
from benchmarks import machine, workload
from rollover.config import Config
from rollover.models.devices import dtype_of, engine_device
from rollover.models.flops import peak_flops
from rollover.models.load import load_model
from rollover.models.packed import PackedWeight
from rollover.models.threads import prepare_process

PROMPT_TOKENS = 32
NEW_TOKENS = 128
CASES = (1, 32, 64, 256)
GENERATE_CASES = (1, 32)
CONTINUOUS_CASE = 32
LINEAR, PACKED = "linear layers alone", "packed linear layers"
LINEAR_STEPS = 16  # of which the rate of NEW_TOKENS is extrapolated: they are all alike


def _prompts(vocab: int, num: int) -> list[tuple[int, ...]]:
    return [workload.prompt(vocab, PROMPT_TOKENS, i) for i in range(num)]


@torch.no_grad()
def _generate(model: Any, vocab: int, num: int) -> None:
    ids = torch.tensor(_prompts(vocab, num), device=model.device)
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        top_k=0,
        top_p=1.0,
        temperature=1.0,
        min_new_tokens=NEW_TOKENS,
        max_new_tokens=NEW_TOKENS,
        pad_token_id=0,
    )


def continuous_batching(model: Any, vocab: int, num: int) -> None:
    """transformers' own continuous batching (paged cache)."""
    from transformers import GenerationConfig

    generation = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=NEW_TOKENS, eos_token_id=-1, pad_token_id=0
    )
    out = model.generate_batch([list(ids) for ids in _prompts(vocab, num)], generation_config=generation)
    assert sum(len(o.generated_tokens) for o in out.values()) == num * NEW_TOKENS


class Peer(Protocol):
    """Another system that decodes. `cases`: the numbers of sequences that it takes part with."""

    @property
    def name(self) -> str: ...
    @property
    def setting(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def cases(self) -> Collection[int]: ...

    def decode(self, prompts: Sequence[tuple[int, ...]], new_tokens: int) -> object:
        """Generate exactly new_tokens after each prompt."""
        ...


@dataclass(frozen=True)
class _System:
    """One contestant of a case. `share`: how much of the case one call of `work` does."""

    name: str
    setting: str
    work: Callable[[], Any]
    share: float = 1.0


class _Contest:
    """The models that take part, loaded once."""

    def __init__(self, config: Config, device: torch.device, peers: Sequence[Peer]) -> None:
        self.dtype, self.device, self.peers = dtype_of(config), device, peers
        loaded = load_model(config.model, dtype=self.dtype, device=device)
        self.peer, self.vocab, self.kind = loaded.model, loaded.vocab_size, config.engine.kind
        engine = config.engine.model_copy(update={"max_running": max(CASES)})
        self.ours = workload.RunEngine(config.model_copy(update={"engine": engine}), loaded)
        self.peer.set_attn_implementation("sdpa")

    def flops(self) -> float:
        """Of our engine so far; 0 where it does not count them."""
        return self.ours.engine.stats().get("engine/flops", 0.0)

    def systems(self, num: int) -> Iterator[_System]:
        """Who decodes `num` sequences."""
        prompts = _prompts(self.vocab, num)
        yield _System("rollover", f"{self.kind} engine", partial(self.ours.decode, prompts, NEW_TOKENS))
        share = LINEAR_STEPS / NEW_TOKENS
        for packed in (False, True):
            if packed and not PackedWeight.supported(self.device, self.dtype):
                continue
            layers = machine.linear_layers(self.peer, num, self.dtype, packed=packed)
            setting = "in oneDNN's blocked layout" if packed else "as they are"
            name = PACKED if packed else LINEAR
            yield _System(name, f"in sequence, cold weights, {setting}", partial(layers, LINEAR_STEPS), share)
        if num in GENERATE_CASES:
            setting = "transformers generate, sdpa, dynamic cache"
            yield _System("generate", setting, partial(_generate, self.peer, self.vocab, num))
        for peer in self.peers:
            if num in peer.cases:
                yield _System(peer.name, peer.setting, partial(peer.decode, prompts, NEW_TOKENS))


def run(config: Config, runs: int, peers: Sequence[Peer] = ()) -> dict[str, Any]:
    """The systems in turn, case by case; every sequence generates exactly NEW_TOKENS tokens."""
    prepare_process(config)
    device = engine_device(config)
    versions = machine.describe(device) | {peer.name: peer.version for peer in peers}
    contest = _Contest(config, device, peers)
    results: list[dict[str, Any]] = []
    peak = peak_flops(device, contest.dtype, config.track.peak_tflops)
    versions["peak_tflops"] = peak / 1e12
    with contest.ours:
        for num in CASES:
            systems = {s.name: s for s in contest.systems(num)}
            machine.progress(f"{contest.kind} engine, {num} sequences")
            works = {name: s.work for name, s in systems.items()}
            turns = runs if num < max(CASES) else 1
            flops = contest.flops()
            for name, times in machine.alternate(works, turns).items():
                times = [t / systems[name].share for t in times]
                results.append(_result(num, name, systems[name].setting, times, versions, config))
                if name == "rollover" and (counted := contest.flops() - flops):  # of `turns`, and one to warm up
                    results[-1]["mfu"] = counted / (turns + 1) / statistics.median(times) / peak
    continuous = partial(continuous_batching, contest.peer, contest.vocab, CONTINUOUS_CASE)
    times = machine.alternate({"continuous": continuous}, 1)["continuous"]
    setting = "transformers generate_batch, paged sdpa, one run"
    results.append(_result(CONTINUOUS_CASE, "continuous", setting, times, versions, config))
    versions["matmul_gflops"] = machine.matmul_gflops(contest.dtype, device)
    return {"benchmark": "engine", "machine": versions, "results": results, "ratios": _ratios(results)}


def _ratios(results: list[dict[str, Any]]) -> dict[str, float]:
    rates = {(r["case"], r["system"]): r["tokens_per_s"] for r in results}
    names = {LINEAR: "linear_bound", PACKED: "packed_linear_bound", "continuous": "continuous_batching"}
    return {
        f"engine_{case.removeprefix('decode_')}_vs_{names.get(system, system)}": rates[case, "rollover"] / rate
        for (case, system), rate in rates.items()
        if system != "rollover"
    }


def _result(
    num: int, system: str, setting: str, times: list[float], versions: dict[str, Any], config: Config
) -> dict[str, Any]:
    median, spread = machine.rate(num * NEW_TOKENS, times)
    version = versions | {"rollover": rollover.__version__, LINEAR: versions["torch"], PACKED: versions["torch"]}
    return {
        "case": f"decode_{num}",
        "system": system,
        "version": version.get(system, versions["transformers"]),
        "setting": f"{setting}; {num} sequences, {PROMPT_TOKENS} + {NEW_TOKENS} tokens, {config.model.dtype}",
        "tokens_per_s": median,
        "spread": spread,
    }
