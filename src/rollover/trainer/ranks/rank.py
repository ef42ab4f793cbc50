"""One rank: its part of each verb, over the same modules as the backend of a single process.

All ranks get each call at once, each with its own samples. A refusal must come from all ranks before they
communicate; the loop's process checks in advance whatever only one rank could refuse (backend.py).
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rollover.config import Config
from rollover.config.table import UNSETTLED
from rollover.models.devices import dtype_of
from rollover.models.flops import ModelFlops
from rollover.models.load import LoadedModel, load_model, load_outline, stored_buffers
from rollover.models.norms import compile_norms
from rollover.models.threads import Team
from rollover.trainer.auxiliary_models import load_reference, load_teacher_in_float32
from rollover.trainer.backend import BackendSetup, new_profile
from rollover.trainer.local_backend import LocalBackend
from rollover.trainer.objective import Tally
from rollover.trainer.ranks import wire
from rollover.trainer.ranks.sharded import RankTensors, distribute_like, save_shards, shard, whole_weights
from rollover.weights.safetensors_stream import write_safetensors

_PROCESS_VERBS = ("listen", "join", "load", "build")  # the others are methods of a RankBackend


@dataclass(frozen=True)
class Loaded:
    """Initial models of a rank: with weights at rank 0, and their shapes at the others.

    `reference`: the weights of algorithm.reference_path, at rank 0. `teacher`: the model of distill.model_path.
    """

    setup: BackendSetup
    reference: Mapping[str, torch.Tensor] | None
    teacher: LoadedModel | None


class RankBackend(LocalBackend):
    """The backend of one rank. `flops`: of the whole model, then of the teacher's. All ranks make it together."""

    def __init__(self, loaded: Loaded, flops: list[ModelFlops], device: torch.device) -> None:
        config, policy, reference, teacher = loaded.setup.config, loaded.setup.loaded, loaded.reference, loaded.teacher
        self.dtype = dtype_of(config)
        sharded, sharded_teacher = shard(policy.model, flops[0], self.dtype, device, policy.processor), None
        if teacher is not None:
            frozen = teacher.model.requires_grad_(False)
            sharded_teacher = shard(frozen, flops[1], self.dtype, device, teacher.processor)
            compile_norms(teacher.model, self.dtype)
        if config.algorithm.needs_reference and config.algorithm.reference_path:
            reference = distribute_like(policy.model, reference, self.dtype)
        super().__init__(
            loaded.setup, teacher=teacher, reference=reference, sharded=sharded, sharded_teacher=sharded_teacher
        )
        self._profile: torch.profiler.profile | None = None

    def start_profile(self) -> None:
        """Profile this rank, in the thread that answers all verbs."""
        self._profile = new_profile()
        self._profile.start()

    def stop_profile(self, path: str) -> None:
        """Write the profile. On another machine the folder may be missing."""
        if (profile := self._profile) is not None:
            self._profile = None
            profile.stop()
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            profile.export_chrome_trace(path)

    def write_weights(self, path: str, buffers: bool) -> str:
        """Write all weights at rank 0, in compute dtype, into a safetensors file. Return the error message, or "".

        `buffers`: also the buffers that the model's files hold.
        """
        beside = {name: b.cpu() for name, b in stored_buffers(self.model).items()} if buffers else {}
        shapes = {name: (self.dtype, p.shape) for name, p in self.model.named_parameters()}
        shapes |= {name: (b.dtype, b.shape) for name, b in beside.items()}
        weights = chain(whole_weights(self.model, self.dtype), beside.items())
        failed = ""
        if dist.get_rank() == 0:
            try:
                write_safetensors(Path(path), shapes, weights)
            except OSError as error:
                failed = str(error)
        for _ in weights:  # all ranks must gather every weight
            pass
        return failed

    def state_meta(self) -> dict[str, Any]:
        """Return the JSON values of `save_state`."""
        return self.save_state()[1]

    def write_state(self, folder: str) -> None:
        """Write `save_state`, each rank its own slices. OSError, on all ranks, for a disk error."""
        save_shards(self.save_state()[0], folder)

    def read_state(self, paths: list[str], meta: dict[str, Any]) -> None:
        """Restore a state from files of which this rank reads its slices."""
        self.load_state(RankTensors(paths, dict(self.model.named_parameters())), meta)


class Rank:
    """Answers the calls of one rank's process. Owns its backends, by number: a program may compare several."""

    def __init__(self) -> None:
        self._backends: dict[int, RankBackend] = {}
        self._loaded: dict[int, Loaded] = {}
        self._listening: socket.socket | None = None

    def answer(self, verb: str, values: dict[str, Any]) -> dict[str, Any]:
        """Return the result of the verb, encoded by `wire.to_plain`. Raises the verb's errors."""
        if verb in _PROCESS_VERBS:
            return wire.call(self, verb, values) or {}
        backend = self._backends[values.pop("backend")]
        found = wire.call(backend, verb, values)
        if isinstance(found, Tally):
            found = {"sums": found.vectors(), "tokens": found.pop_token_stats()}
        return {"found": found, "flops": backend.flops, "policy_version": backend.policy_version}

    # Calls of the process

    def listen(self, host: str) -> dict[str, Any]:
        """Listen for the other ranks, at rank 0."""
        self._listening = socket.create_server((host, 0))
        return {"port": self._listening.getsockname()[1]}

    def join(
        self, rank: int, num_ranks: int, host: str, port: int, device: str, threads: int, timeout_s: float
    ) -> None:
        """Join the process group."""
        torch.set_num_threads(threads)
        self._device = torch.device(device)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        timeout = timedelta(seconds=timeout_s)
        # Our own socket: the store's would listen on every interface.
        listening = None if self._listening is None else self._listening.detach()
        store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
            host,
            port,
            num_ranks,
            is_master=rank == 0,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listening,
        )
        kind = "nccl" if self._device.type == "cuda" else "gloo"
        bound = self._device if kind == "nccl" else None
        dist.init_process_group(kind, store=store, rank=rank, world_size=num_ranks, timeout=timeout, device_id=bound)
        dist.barrier()

    def load(self, backend: int, config: Mapping[str, Any], places: list[str]) -> dict[str, Any]:
        """Load this rank's models. Rank 0 loads the weights, and counts the FLOPs of passes.

        `places`: further folders of modules.
        """
        sys.path += [place for place in places if place not in sys.path]
        checked = Config.model_validate(config, context=UNSETTLED)  # in the parent
        is_first, has_teacher = not dist.get_rank(), bool(checked.distill.model_path)
        policy = load_model(checked.model) if is_first else load_outline(checked.model, filled_later=True)
        reference = load_reference(checked, policy) if is_first else None
        teacher = load_teacher_in_float32(checked, policy, with_weights=is_first) if has_teacher else None
        self._loaded[backend] = Loaded(BackendSetup(checked, policy, Team()), reference, teacher)
        models = [policy, *filter(None, [teacher])]
        return {"flops": [ModelFlops.from_model(each.model) for each in models]} if is_first else {}

    def build(self, backend: int, flops: list[ModelFlops]) -> None:
        """Build the backend from the loaded models; `flops` is rank 0's."""
        self._backends[backend] = RankBackend(self._loaded.pop(backend), flops, self._device)
