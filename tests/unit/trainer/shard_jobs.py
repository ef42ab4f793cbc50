"""What the ranks of test_shards.py do, and the model that they do it with."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from rollover.config import TrainConfig
from rollover.trainer.kept_weights import KeptWeights
from rollover.trainer.optimizer import Optimizer
from rollover.trainer.ranks.sharded import RankTensors, save_shards

torch.set_num_threads(1)


class Model(torch.nn.Module):
    """A tied head, rows that no number of ranks divides, and fewer of them than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(7, 4)
        self.inner = torch.nn.Linear(4, 5)
        self.scale = torch.nn.Parameter(torch.randn(1))
        self.norm = torch.nn.Parameter(torch.randn(2))
        self.head = torch.nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight


class State:
    """Model, optimizer and kept weights; sharded over all ranks where there is a process group."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        model = Model()
        if dist.is_initialized():
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            fully_shard(model.inner, mesh=mesh)
            fully_shard(model, mesh=mesh)
        self.optimizer = Optimizer(model, TrainConfig(), 10, torch.float32)
        self.parameters: dict[str, torch.Tensor] = dict(model.named_parameters())
        self.kept = KeptWeights(self.parameters)

    def train(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters.values():
            gradient = torch.randn(parameter.shape, generator=generator)
            if isinstance(parameter, DTensor):
                gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
            parameter.grad = gradient
        self.optimizer.step()

    def tensors(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        tensors, meta = self.optimizer.state()
        return tensors | self.kept.state() | {"random/cpu": torch.get_rng_state()}, meta

    def load(self, tensors: Mapping[str, torch.Tensor], meta: dict[str, Any]) -> None:
        self.optimizer.load_state(tensors, meta)
        self.kept.load_state(tensors)
        torch.set_rng_state(tensors["random/cpu"])

    def digests(self) -> dict[str, str]:
        return digests(self.tensors()[0])


def digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """name -> dtype, shape and bits of the whole tensor."""
    return {name: _digest(tensors[name]) for name in tensors}


def _digest(tensor: torch.Tensor) -> str:
    whole = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().contiguous()
    bits = hashlib.sha256(whole.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
    return f"{whole.dtype} {list(whole.shape)} {bits}"


def trained() -> State:
    state = State(seed=1)
    state.kept.keep("reference")
    for seed in (2, 3):
        state.train(seed)
    return state


# What ranks are asked to do.


def save(folder: str) -> tuple[dict[str, str], dict[str, Any]]:
    """(the digests, what JSON holds) of a trained state, which is saved in `folder`."""
    state = trained()
    tensors, meta = state.tensors()
    save_shards(tensors, folder)
    return digests(tensors), meta


def load(paths: list[str], meta: dict[str, Any]) -> list[Any]:
    """The digests of what is read, and again of one more step."""
    state = State(seed=5)
    stored = RankTensors(paths, state.parameters)
    assert all(isinstance(stored[f"master/{name}"], DTensor) for name in state.parameters)
    state.load(stored, meta)
    read = state.digests()
    state.train(seed=4)
    return [read, state.digests()]


def save_and_be_killed(folder: str) -> None:
    """Rank 1 is killed while it writes the second kind of its slices."""
    state, write = trained(), safetensors.torch.save

    def killed(*args: Any, **kwargs: Any) -> bytes:
        if list(Path(folder).rglob("shard-00002-*")):
            os.kill(os.getpid(), signal.SIGKILL)
        return write(*args, **kwargs)

    if dist.get_rank() == 1:
        safetensors.torch.save = killed
    save_shards(state.tensors()[0], folder)
