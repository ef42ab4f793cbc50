"""The embedded engine beside vLLM for the CPU: `rollover bench engine` with one more peer.

    .venv/bin/python experiments/engine_beside_vllm.py [--json]      after `make vllm`

Keys of the configuration may be set as for `rollover bench`. Run it alone.
"""

from __future__ import annotations

import sys
from contextlib import redirect_stdout

import torch

from bench_arguments import bench_arguments
from benchmarks import engine, show
from rollover.models.load import resolve_path
from rollover.models.threads import prepare_process
from vllm_peer import VllmPeer, python

RUNS = 3


def main() -> None:
    config, as_json = bench_arguments(__doc__ or "")
    if (interpreter := python()) is None:
        raise SystemExit("vLLM's environment is not there: run `make vllm` in this folder")
    prepare_process(config)
    with (
        redirect_stdout(sys.stderr),
        VllmPeer(interpreter, resolve_path(config.model), config.model.dtype, torch.get_num_threads()) as peer,
    ):
        report = engine.run(config, RUNS, [peer])
    show(report, as_json=as_json)


if __name__ == "__main__":
    main()
