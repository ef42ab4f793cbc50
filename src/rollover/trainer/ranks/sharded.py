"""A model spread over ranks (FSDP2), and the checkpoint of its state, of which each rank writes and reads slices.

    rank 0: the weights ──one parameter at a time──▶ every rank ──fully_shard──▶ the part that it keeps, in float32
    a pass: gather a layer in compute dtype ──▶ compute ──▶ free it; backward: the same, gradients summed to parts
    save_shards (all ranks) ──▶ <folder>/<kind>/shard-....safetensors ──▶ RankTensors, or StoredTensors of one process

FSDP: Zhao et al. 2023, "PyTorch FSDP" (arXiv 2304.11277); around every layer, and around the whole way from a row to
its log-probs. Checkpoints: torch's distributed checkpoint (DCP) with safetensors, as its own format is a pickle; any
number of ranks reads what another number wrote. Knows nothing of samples, losses or the optimizer.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from rollover.models.flops import ModelFlops
from rollover.models.logprobs import Head
from rollover.models.vision import Pixels, Vision
from rollover.trainer.backend import StoredTensors
from rollover.trainer.passes import Policy, Sharded


def shard(
    model: Any, flops: ModelFlops, dtype: torch.dtype, device: torch.device, processor: Pixels | None = None
) -> Sharded:
    """Spread `model` over all ranks of the process group, in place. All ranks call this together.

    Rank 0 has it in float32, with its weights; the others may have it on the meta device, and receive them. Passes
    compute in `dtype`. Only rank 0 ever has more than one layer whole. `flops`: counted over the whole model.
    `processor`: of a model that takes images, whose tower is frozen.
    """
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    # Our compiled kernels read float32 where they were given float32 (cast_forward_inputs would cast it, within
    # dataclasses, too); and parts of a sum are added unrounded.
    narrow = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    options: Any = {"mesh": mesh, "reshard_after_forward": True}
    if dtype != torch.float32:
        options["mp_policy"] = narrow
    _broadcast_buffers(model, device)
    policy = Policy(model, partial(Head.from_model, model), Vision.from_model(model, processor))
    for module in [*layers_of(model), policy]:
        _broadcast_parameters(module, device)
        fully_shard(module, **options)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            # Losses are divided by what all ranks hold together: gradients are summed as they are.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return Sharded(policy, flops, partial(_max_over_ranks, device))


def layers_of(model: Any) -> list[torch.nn.Module]:
    """Return the decoder layers; none if they are not in one list: then the whole model is gathered at once."""
    num = model.config.get_text_config().num_hidden_layers
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model  # a vision tower may be as deep
    lists = (m for m in decoder.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == num)
    return list(next(lists, ()))


def whole_weights(model: Any, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, whole weight in `dtype`) of each trained parameter, gathered one by one, on the CPU.

    All ranks iterate together.
    """
    for name, parameter in model.named_parameters():
        yield name, parameter.detach().to(dtype).full_tensor().cpu()


def distribute_like(
    model: Any, weights: Mapping[str, torch.Tensor] | None, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Distribute rank 0's `weights` like the parameters of `model`, by their names, in `dtype`.

    All ranks call this together; the `weights` of the others are ignored.
    """
    out: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        whole = torch.empty(parameter.shape)
        if weights is not None and dist.get_rank() == 0:
            whole = weights[name].float()
        out[name] = distribute_tensor(whole.to(parameter.device), parameter.device_mesh, parameter.placements).to(dtype)
    return out


def _max_over_ranks(device: torch.device, own: int) -> int:
    number = torch.tensor(own, device=device)
    dist.all_reduce(number, dist.ReduceOp.MAX)
    return int(number)


def _broadcast_parameters(module: torch.nn.Module, device: torch.device) -> None:
    """Broadcast rank 0's parameters of `module` that are not distributed yet. Tied ones stay tied."""
    made: dict[torch.Tensor, torch.nn.Parameter] = {}  # by identity
    for owner in module.modules():
        for name, parameter in list(owner.named_parameters(recurse=False, remove_duplicate=False)):
            if isinstance(parameter, DTensor):
                continue
            if parameter not in made:
                made[parameter] = torch.nn.Parameter(_broadcast(parameter, device), parameter.requires_grad)
            setattr(owner, name, made[parameter])


def _broadcast_buffers(model: torch.nn.Module, device: torch.device) -> None:
    for owner in model.modules():
        for name, buffer in list(owner.named_buffers(recurse=False)):
            owner._buffers[name] = _broadcast(buffer, device)


def _broadcast(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return rank 0's tensor."""
    tensor = tensor.detach()
    here = torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device).contiguous()
    dist.broadcast(here, 0)
    return here


def save_shards(tensors: Mapping[str, torch.Tensor], folder: str | Path) -> None:
    """Write `tensors` (`<kind>/<name>` -> DTensor) below `folder`, each rank the slices that it holds.

    Every rank calls this with the same names at the same time. Each kind has a folder: only the slices of one are
    copied in memory at a time. Of a tensor that is not a DTensor, any rank's is written. An error of one rank is raised
    on all: OSError if its disk failed.
    """
    for kind in sorted({name.partition("/")[0] for name in tensors}):
        of_kind = {name: tensor for name, tensor in tensors.items() if name.startswith(f"{kind}/")}
        try:
            writer = HuggingFaceStorageWriter(os.path.join(folder, kind), save_distributed=True)
            save(of_kind, storage_writer=writer)
        except CheckpointException as failed:  # a BaseException; its text has a traceback per rank
            raise _cause(failed) from None


def _cause(failed: CheckpointException) -> Exception:
    """Return the first error and its rank; an error of the disk, if there is one."""
    causes = [(rank, cause) for rank, (cause, _) in sorted(failed.failures.items())]
    for rank, cause in causes:
        if isinstance(cause, OSError) and cause.errno:
            return OSError(cause.errno, f"{os.strerror(cause.errno)} (rank {rank})")
    rank, cause = causes[0]
    return RuntimeError(f"rank {rank}: {type(cause).__name__}: {cause}")


class RankTensors(StoredTensors):
    """StoredTensors of which this rank reads only its own slices.

    `parameters`: name -> DTensor. A stored `<kind>/.../<name>` is returned as a DTensor of the same layout; others are
    returned whole. No communication is needed: a rank may read at any time.
    """

    def __init__(self, paths: Collection[str], parameters: Mapping[str, torch.Tensor]) -> None:
        super().__init__(paths)
        self._parameters = parameters
        self._reader = _Reader(self.paths)

    def __getitem__(self, name: str) -> torch.Tensor:
        like = self._parameters.get(name.rpartition("/")[2])
        if not isinstance(like, DTensor):
            return super().__getitem__(name)
        if like.shape != self.shape(name):
            raise ValueError(f"the stored {name} has shape {list(self.shape(name))}, and not {list(like.shape)}")
        entry = self._reader.read_metadata().state_dict_metadata[name]
        assert isinstance(entry, TensorStorageMetadata)
        tensor = torch.empty_like(like, dtype=entry.properties.dtype, requires_grad=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that each process reads alone, as intended
            load({name: tensor}, storage_reader=self._reader, no_dist=True)
        return tensor


class _Reader(HuggingFaceStorageReader):
    """Reads only these files, not a whole folder, and their metadata only once."""

    def __init__(self, paths: list[str]) -> None:
        super().__init__(os.path.dirname(paths[0]) if paths else os.curdir)
        self.fs = _Files(paths)
        self._metadata: Metadata | None = None

    def read_metadata(self) -> Metadata:
        if self._metadata is None:
            self._metadata = super().read_metadata()
        return self._metadata


class _Files(FileSystem):
    def __init__(self, paths: list[str]) -> None:
        super().__init__()
        self._paths = paths

    def ls(self, path: str | os.PathLike[str]) -> list[str]:
        return self._paths
