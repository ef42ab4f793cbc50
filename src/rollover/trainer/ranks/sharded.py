"""A model spread over ranks: FSDP2 around every layer, and around the whole way from a row to its log-probs.

    rank 0: the weights ──one parameter at a time──▶ every rank ──fully_shard──▶ the part that it keeps, in float32
    a pass: gather a layer in compute dtype ──▶ compute ──▶ give it back; backward: the same, gradients summed to parts

Zhao et al. 2023, "PyTorch FSDP" (arXiv 2304.11277). Knows nothing of samples, losses or the optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from rollover.models.flops import ModelFlops
from rollover.models.logprobs import Head
from rollover.models.vision import Pixels, Vision
from rollover.trainer.passes import Policy, Sharded


def shard(
    model: Any, flops: ModelFlops, dtype: torch.dtype, device: torch.device, processor: Pixels | None = None
) -> Sharded:
    """Spread `model` over all ranks of the process group, in place. All call this together.

    Rank 0 has it in float32, with its weights; that of the others may be without (meta), and gets them from there.
    Passes compute in `dtype`. No rank but 0 ever has more than one layer whole. `flops`: counted over the whole model.
    `processor`: of a model that takes images, whose tower is frozen.
    """
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    # Our compiled kernels read float32 where they were given float32 (cast_forward_inputs would cast it, within
    # dataclasses, too); and parts of a sum are added unrounded.
    narrow = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    options: Any = {"mesh": mesh, "reshard_after_forward": True}
    if dtype != torch.float32:
        options["mp_policy"] = narrow
    _share_buffers(model, device)
    policy = Policy(model, partial(Head.of, model), Vision.of(model, processor))
    for module in [*layers_of(model), policy]:
        _share_parameters(module, device)
        fully_shard(module, **options)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            # Losses are divided by what all ranks hold together: gradients are summed as they are.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return Sharded(policy, flops, partial(_most, device))


def layers_of(model: Any) -> list[torch.nn.Module]:
    """The decoder layers; none where they are not in one list, and then the whole model is gathered at once."""
    num = model.config.get_text_config().num_hidden_layers
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model  # a vision tower may be as deep
    lists = (m for m in decoder.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == num)
    return list(next(lists, ()))


def whole_weights(model: Any, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, the whole weight in `dtype`) of each trained parameter, gathered one after the other; on the CPU.

    All ranks go through it together.
    """
    for name, parameter in model.named_parameters():
        yield name, parameter.detach().to(dtype).full_tensor().cpu()


def spread_like(model: Any, weights: Mapping[str, torch.Tensor] | None, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Rank 0's `weights`, by the names of the parameters of `model`, each spread as that parameter is, in `dtype`.

    All ranks call this together; what the others give is not looked at.
    """
    out: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        whole = torch.empty(parameter.shape)
        if weights is not None and dist.get_rank() == 0:
            whole = weights[name].float()
        out[name] = distribute_tensor(whole.to(parameter.device), parameter.device_mesh, parameter.placements).to(dtype)
    return out


def _most(device: torch.device, own: int) -> int:
    number = torch.tensor(own, device=device)
    dist.all_reduce(number, dist.ReduceOp.MAX)
    return int(number)


def _share_parameters(module: torch.nn.Module, device: torch.device) -> None:
    """Every rank has rank 0's parameters of `module`, but for those that are spread already. Tied ones stay tied."""
    made: dict[torch.Tensor, torch.nn.Parameter] = {}  # by identity
    for owner in module.modules():
        for name, parameter in list(owner.named_parameters(recurse=False, remove_duplicate=False)):
            if isinstance(parameter, DTensor):
                continue
            if parameter not in made:
                made[parameter] = torch.nn.Parameter(_from_first(parameter, device), parameter.requires_grad)
            setattr(owner, name, made[parameter])


def _share_buffers(model: torch.nn.Module, device: torch.device) -> None:
    for owner in model.modules():
        for name, buffer in list(owner.named_buffers(recurse=False)):
            owner._buffers[name] = _from_first(buffer, device)


def _from_first(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The numbers that rank 0 has in the same place."""
    tensor = tensor.detach()
    here = torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device).contiguous()
    dist.broadcast(here, 0)
    return here
