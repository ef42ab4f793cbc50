"""What reading a stream of tokens costs the controller: processor time of the client (engine/remote) for each token.

    .venv/bin/python experiments/client_cost.py [TOKENS]      64 rollouts of so many tokens (1024), some 20 s

The server (tests/fault_server.py, without a model) is another process on loopback. Processor time is that of this
process alone, so the figure hardly depends on what else runs. Stop strings, journal and scheduler are not in it.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from fault_server import FaultServer
from rollover.config import Config
from rollover.engine.protocol import ExtendRequest
from rollover.engine.remote.engine import RemoteEngine, RemoteSetup
from rollover.types import Prompt, SamplingParams

ROLLOUTS, PROMPT = 64, 200
WEIGHTS = [("weight", torch.ones(3))]


class FastServer(FaultServer):
    """Tokens that cost it nothing."""

    def token(self, context: Sequence[int], seed: int, index: int, temperature: float) -> int:
        return len(context) % 997

    def logprob(self, context: Sequence[int], label: str) -> float:
        return -0.7312345


def serve(pipe: Connection, chunk: int) -> None:
    server = FastServer(delay_s=0.0, chunk=chunk)
    pipe.send(server.url)
    pipe.recv()
    server.close()


async def measure(url: str, tokens: int) -> float:
    """Seconds of this process for each token."""
    values = {"engine": {"kind": "remote", "urls": [url], "max_running": 256}}
    engine = RemoteEngine(RemoteSetup(Config.model_validate(values), lambda: WEIGHTS, lambda ids: ""))
    await engine.load_weights(0, WEIGHTS)
    prompt = tuple(range(1, PROMPT))
    requests = [ExtendRequest(f"r{i}", Prompt(prompt), (), tokens, i, SamplingParams()) for i in range(ROLLOUTS)]
    begun = time.process_time()
    segments = await asyncio.gather(*(engine.extend(request) for request in requests))
    seconds = time.process_time() - begun
    await engine.close()
    return seconds / sum(len(segment.token_ids) for of_one in segments for segment in of_one)


def main() -> None:
    tokens = int(sys.argv[1]) if len(sys.argv) > 1 else 1024
    context = multiprocessing.get_context("spawn")
    for chunk in (1, 8):
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, chunk))
        process.start()
        cost = asyncio.run(measure(ours.recv(), tokens))
        ours.send(None)
        process.join()
        print(
            f"{chunk} tokens an event: {1e6 * cost:.1f} us of processor time a token, {1 / cost:,.0f} tokens/s a core"
        )


if __name__ == "__main__":
    main()
