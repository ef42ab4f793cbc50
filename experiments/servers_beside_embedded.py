"""Servers beside the embedded engine: the same workload in turn, over HTTP by the client that a run has.

    .venv/bin/python experiments/servers_beside_embedded.py [--json]      after `make vllm`

Each sequence has 32 prompt tokens and gets exactly 128 new ones, sampled at temperature 1 with log-probs. Systems: the
embedded engine in this process, `rollover serve --engine embedded`, `rollover serve --engine vllm` (with the arguments
of the recipe vllm; others: --engine.vllm_args '["..."]'). Keys of the configuration may be set as for `rollover bench`.
Run it alone.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stdout
from functools import partial
from typing import Any, Self

import torch
from bench_arguments import bench_arguments

from benchmarks import machine, show, workload
from rollover.config import Config
from rollover.engine.build import EngineSetup, build_engine
from rollover.engine.protocol import Engine
from rollover.engine.server.vllm import find_vllm
from rollover.models.devices import dtype_of, engine_device
from rollover.models.load import LoadedModel, cast_parameters, load_model
from rollover.models.team import prepare_process

RUNS = 3
CASES = (1, 16, 64)
PROMPT_TOKENS, NEW_TOKENS = 32, 128
EAGER = ["--enforce-eager"]


class System:
    """An engine as a run makes it of `config`, on an event loop of its own. Leaving it closes the engine."""

    def __init__(self, name: str, config: Config, loaded: LoadedModel) -> None:
        self.name = name
        self._runner = asyncio.Runner()
        self._engine: Engine = build_engine(EngineSetup(config, lambda: loaded, threads=torch.get_num_threads()))

    def decode(self, prompts: Sequence[tuple[int, ...]]) -> None:
        """Continue all of them at once."""
        answers = self._runner.run(workload.extend_all(self._engine, prompts, [()] * len(prompts), NEW_TOKENS))
        assert all(sum(map(len, segments)) == NEW_TOKENS for segments in answers)
        self._engine.release(map(str, range(len(prompts))))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._runner.run(self._engine.close())
        self._runner.close()


def remote(config: Config, **engine: Any) -> Config:
    """The same with an engine over HTTP."""
    values = {"kind": "remote", "max_running": max(CASES), **engine}
    return config.model_copy(update={"engine": config.engine.model_copy(update=values)})


def systems(config: Config) -> dict[str, Config]:
    """The configuration of each system."""
    args = config.engine.vllm_args or EAGER
    return {
        "embedded": config.model_copy(update={"engine": config.engine.model_copy(update={"max_running": max(CASES)})}),
        "served": remote(config, num_servers=1, server="embedded"),
        "vllm": remote(config, num_servers=1, server="vllm", vllm_args=args),
    }


def run(configs: dict[str, Config], runs: int) -> dict[str, Any]:
    """All systems in turn, case by case. The first one is what the others are compared with."""
    first, *others = configs
    config = configs[first]
    device = engine_device(config)
    prepare_process(config)
    loaded = load_model(config.model)
    cast_parameters(loaded.model, dtype_of(config))
    results: list[dict[str, Any]] = []
    with ExitStack() as stack:
        made = [stack.enter_context(System(name, of, loaded)) for name, of in configs.items()]
        versions = machine.describe(device)
        for num in CASES:
            machine.progress(f"{num} sequences")
            prompts = [workload.prompt(loaded.vocab_size, PROMPT_TOKENS, i) for i in range(num)]
            works = {system.name: partial(system.decode, prompts) for system in made}
            for name, times in machine.alternate(works, runs).items():
                median, spread = machine.rate(num * NEW_TOKENS, times)
                setting = f"{num} sequences, {PROMPT_TOKENS} + {NEW_TOKENS} tokens, {config.model.dtype}"
                results.append(
                    {
                        "case": f"decode_{num}",
                        "system": name,
                        "version": versions["torch"],
                        "setting": setting,
                        "tokens_per_s": median,
                        "spread": spread,
                    }
                )
    rates = {(result["case"], result["system"]): result["tokens_per_s"] for result in results}
    ratios = {
        f"{name}_{num}_vs_{first}": rates[f"decode_{num}", name] / rates[f"decode_{num}", first]
        for num in CASES
        for name in others
    }
    return {"benchmark": "servers", "machine": versions, "results": results, "ratios": ratios}


def main() -> None:
    config, as_json = bench_arguments(__doc__ or "")
    configs = systems(config)
    try:
        find_vllm(configs["vllm"])
    except ValueError as error:
        raise SystemExit(str(error)) from error
    with redirect_stdout(sys.stderr):
        report = run(configs, RUNS)
    show(report, as_json=as_json)


if __name__ == "__main__":
    main()
