"""Servers beside the embedded engine: the same workload in turn, over HTTP by the client that a run has.

    .venv/bin/python experiments/servers_beside_embedded.py [--json]      after `make vllm`

Each sequence has 32 prompt tokens and gets exactly 128 new ones, sampled at temperature 1 with log-probs. Systems: the
embedded engine in this process, `rollover serve --engine embedded`, `rollover serve --engine vllm` (with the arguments
of the recipe vllm; others: --engine.vllm_args '["..."]'). Keys of the configuration may be set as for `rollover bench`.
Run it alone.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack, redirect_stdout
from functools import partial
from typing import Any

from bench_arguments import bench_arguments
from benchmarks import machine, show, workload
from rollover.config import Config
from rollover.engine.server.vllm import find_vllm
from rollover.models.devices import dtype_of, engine_device
from rollover.models.load import cast_parameters, load_model
from rollover.models.threads import prepare_process

RUNS = 3
CASES = (1, 16, 64)
PROMPT_TOKENS, NEW_TOKENS = 32, 128
EAGER = ["--enforce-eager"]


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
        made = {name: stack.enter_context(workload.RunEngine(of, loaded)) for name, of in configs.items()}
        versions = machine.describe(device)
        for num in CASES:
            machine.progress(f"{num} sequences")
            prompts = [workload.prompt(loaded.vocab_size, PROMPT_TOKENS, i) for i in range(num)]
            works = {name: partial(engine.decode, prompts, NEW_TOKENS) for name, engine in made.items()}
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
