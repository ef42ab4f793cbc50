"""One rank on a GPU, over NCCL: the process group, FSDP2 and the hand-over are those of many."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

from contract import ranks_model
from rollover.trainer.objective import Counts
from rollover.trainer.ranks.backend import RanksBackend, start_ranks
from samples import random_samples

pytestmark = pytest.mark.gpu

SAMPLES = random_samples(3, num_groups=3)


@pytest.mark.parametrize(("dtype", "atol"), [("float32", 1e-3), ("bfloat16", 0.1)])
def test_a_rank_on_a_gpu_trains_as_one_process_there(dtype: str, atol: float, tmp_path: Path) -> None:
    of = ranks_model.config(ranks_model.model_folder(tmp_path), num_ranks=1, dtype=dtype, model={"device": "cuda"})
    ranks = start_ranks(of)
    try:
        ours, local = ranks_model.pair(of, ranks)
        for _ in range(3):
            found, expected = ours.compute_logprobs(SAMPLES), local.compute_logprobs(SAMPLES)
            assert max(np.abs(found[key] - expected[key]).max() for key in expected) < atol
            for backend in (ours, local):
                backend.forward_backward(SAMPLES, Counts.from_samples(SAMPLES))
            assert ours.optim_step()["grad_norm"] == pytest.approx(local.optim_step()["grad_norm"], rel=0.05)
        published = dict(asyncio.run(ours.publish()))
        for name, weight in asyncio.run(local.publish()):
            torch.testing.assert_close(published[name].float(), weight.float().cpu(), atol=atol, rtol=0)
        tensors, meta = ours.save_state()
        again = RanksBackend(ranks_model.setup(of), ranks)
        again.load_state(tensors, meta)
        assert again.policy_version == 3
        now, before = again.compute_logprobs(SAMPLES), ours.compute_logprobs(SAMPLES)
        assert all(np.array_equal(now[key], before[key]) for key in before)
    finally:
        ranks.close()
