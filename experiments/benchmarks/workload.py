"""What the benchmarks work on: random prompts, generation of a fixed length, random training samples."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

import numpy as np
import torch

from rollover.config import Config
from rollover.engine.build import EngineSetup, build_engine
from rollover.engine.embedded.engine import EmbeddedEngine
from rollover.engine.protocol import Engine, ExtendRequest
from rollover.models.load import LoadedModel
from rollover.types import Prompt, Sample, SamplingParams, Segment, rollout_seed


def prompt(vocab: int, num_tokens: int, seed: int) -> tuple[int, ...]:
    """Random token ids, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(10, vocab - 10, (num_tokens,), generator=generator).tolist())


def generate(engine: EmbeddedEngine, prompts: Sequence[tuple[int, ...]], new_tokens: int) -> None:
    """Continue all prompts at once, each by exactly new_tokens."""
    asyncio.run(extend_all(engine, prompts, [()] * len(prompts), new_tokens))


class RunEngine:
    """The engine that a run would make of `config` and `loaded`, on an event loop of its own. Leaving it closes it."""

    def __init__(self, config: Config, loaded: LoadedModel) -> None:
        self.engine = build_engine(EngineSetup(config, lambda: loaded, threads=torch.get_num_threads()))
        self._runner = asyncio.Runner()

    def decode(self, prompts: Sequence[tuple[int, ...]], new_tokens: int) -> None:
        """Continue all prompts at once, each by exactly new_tokens."""
        answers = self._runner.run(extend_all(self.engine, prompts, [()] * len(prompts), new_tokens))
        assert all(sum(map(len, segments)) == new_tokens for segments in answers)
        self.engine.release(map(str, range(len(prompts))))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._runner.run(self.engine.close())
        self._runner.close()


# The second step caches the first token beyond the prompt: a prompt that fills its KV row moves to a longer one for it.
TOKENS_BEFORE = 2


def decode_seconds(
    engine: EmbeddedEngine,
    prompts: Sequence[tuple[int, ...]],
    steps: int,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> float:
    """Wall seconds of so many decode steps of all at once: prefill and TOKENS_BEFORE tokens come before.

    `around`: a context for the decode steps alone, a profiler for instance.
    """

    async def go() -> float:
        first = await extend_all(engine, prompts, [()] * len(prompts), TOKENS_BEFORE + steps, pause_after=TOKENS_BEFORE)
        generated = [tuple(of[-1].token_ids.tolist()) for of in first]
        with around():
            started = time.perf_counter()
            await extend_all(engine, prompts, generated, steps)
            seconds = time.perf_counter() - started
        engine.release(map(str, range(len(prompts))))
        return seconds

    return asyncio.run(go())


async def extend_all(
    engine: Engine,
    prompts: Sequence[tuple[int, ...]],
    generated: Sequence[tuple[int, ...]],
    new_tokens: int,
    pause_after: int = 0,
) -> list[list[Segment]]:
    """Continue all of them at once, as rollouts "0", "1", ..., without stop tokens: each gets all of its new ones."""
    requests = [
        ExtendRequest(
            str(i),
            Prompt(prompt_ids),
            generated_ids,
            new_tokens,
            rollout_seed(0, "bench", 0, i),
            SamplingParams(),
            pause_after=pause_after,
        )
        for i, (prompt_ids, generated_ids) in enumerate(zip(prompts, generated, strict=True))
    ]
    return await asyncio.gather(*[engine.extend(request) for request in requests])


def samples(vocab: int, prompt_tokens: int, lengths: list[int], siblings: int, *, shared: bool = True) -> list[Sample]:
    """Groups of `siblings` with one prompt each; answers of these lengths.

    `shared` False: every sample is a group of its own, with that prompt.
    """
    rng = np.random.default_rng(1)
    out = []
    for i, n in enumerate(lengths):
        group, sibling = divmod(i, siblings)
        prompt_ids = np.random.default_rng(group).integers(10, vocab - 10, prompt_tokens)
        out.append(
            Sample(
                rollout_id=f"{group}-{sibling}",
                group_id=group if shared else i,
                prompt_ids=prompt_ids.astype(np.int32),
                token_ids=rng.integers(10, vocab - 10, n).astype(np.int32),
                mask=np.ones(n, dtype=bool),
                streams={
                    "behavior_logprobs": np.full(n, -10.0, dtype=np.float32),
                    "versions": np.zeros(n, dtype=np.int32),
                    "advantages": np.full(n, (-1.0) ** i, dtype=np.float32),
                },
                temperature=1.0,
            )
        )
    return out
