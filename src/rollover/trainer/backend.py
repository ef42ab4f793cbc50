"""Contract of a training backend: the six verbs of a training step, and their types.

    compute_logprobs, forward_backward, optim_step       called by the step over minibatches (trainer.py)
    publish, save_state                                  called by the run to sync weights and write checkpoints
    sample                                               called by programs without a run

Above the verbs, in trainer.py: which samples form a minibatch, which log-probs a step needs and under which weights,
what is rejected, and when gradients are accumulated before the rest of a step is known. Below them, in the backend:
weights, optimizer, critic, earlier weights, micro-batches, devices and the loss of a token (objective.py).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from safetensors import safe_open

from rollover.checkpoint.storage import FolderWriter
from rollover.config import AlgorithmConfig, Config
from rollover.engine.protocol import Engine, ExtendRequest
from rollover.models.load import LoadedModel
from rollover.models.threads import Team
from rollover.trainer.objective import Counts, Tally
from rollover.types import Sample, Segment

Stream = dict[str, np.ndarray]
"""rollout_id -> float32 [loss tokens of its sample]."""

TEACHER: Literal["teacher"] = "teacher"
REFERENCE: Literal["reference"] = "reference"
Version = int | Literal["teacher", "reference"]
"""Weights of `compute_logprobs`: a policy version, the teacher of [distill], or the reference policy, unless that is
version 0."""


def reference_version(algorithm: AlgorithmConfig) -> Version:
    """Return the version that names the weights of the reference policy."""
    return REFERENCE if algorithm.own_reference else 0


class BackendLost(RuntimeError):
    """The backend failed, and its weights are lost: one of its processes has ended, for instance.

    Any verb may raise it, and a function that makes a backend. The run then resumes from its newest checkpoint and its
    event log with a new backend, up to cluster.max_restarts times without a step in between.
    """


class TrainerBackend(Protocol):
    """The contract of a backend: run tests/contract/trainer_contract.py on a custom one.

    Calls come one after the other, from one thread at a time. A failure between the first `optim_step` of a training
    step and its last leaves weights that no checkpoint describes: the run then resumes from an earlier checkpoint. A
    backend with resources, such as processes, also has a method `close()`: it is called once, at the end of a run or
    after the backend failed.
    """

    @property
    def policy_version(self) -> int:
        """Training steps completed by the current weights; 0 for the initial ones."""
        ...

    @property
    def flops(self) -> float:
        """Model FLOPs of all passes so far. Recomputation to save memory counts once."""
        ...

    def compute_logprobs(self, samples: list[Sample], version: Version | None = None) -> Stream:
        """Return the log-probs of the loss tokens, each at its sample's temperature, without dropout or gradient.

        `version`: the policy version of the weights; None: the current ones. Kept are version 0 if algorithm.kl_coef >
        0, and the last Config.staleness_bound_with_replay + 1 versions if algorithm.proximal = "snapshot". TEACHER is
        the teacher of [distill], whose weights the backend holds. REFERENCE replaces version 0 if
        `algorithm.own_reference`: weights of another model, or a mix with the current ones every
        algorithm.reference_refresh_steps. ValueError for weights that are not kept. At equal weights the numbers are
        those that `forward_backward` computes for the same samples.
        """
        ...

    def compute_values(self, samples: list[Sample]) -> Stream:
        """Return the critic's values before each loss token (algorithm.advantage = "gae"). ValueError without a critic.

        A sample may have one token more than the model has positions: nothing is computed at its last token.
        """
        ...

    def compute_statistics(self, samples: list[Sample]) -> Stream:
        """Return log-prob, entropy (nats) and sum of squared probabilities per token, float32 [loss tokens, 3].

        They are of the distribution of each loss token under the current weights. Used only by
        algorithm.top_entropy_share and the optimal token baselines. ValueError if the backend cannot compute them.
        """
        ...

    def forward_backward(self, samples: list[Sample], counts: Counts) -> Tally:
        """Add the gradient of `samples` to the accumulated one; return their sums, one addition per micro-batch.

        `counts`: of the whole minibatch, of which `samples` may be a part: losses are divided by it, unless
        `counts.divided` is False. The samples have the streams that the loss reads (STREAMS in streams.py), of which
        `pack` makes tensors. Without "proximal_logprobs" the current ones take their place: the ratio is then exactly
        1, without another forward pass. Without a loss token in `samples`, and with some in `counts`, the gradient is 0
        rather than absent, so that the optimizer's momentum continues. With track.token_stats the `Tally` also holds
        the TOKEN_STATS of `Objective`; a backend may leave them out, and they are not recorded then. ValueError for a
        sample that the model cannot take.
        """
        ...

    def optim_step(self, rate_scale: float = 1.0, *, divisor: float = 1.0, ends_step: bool = True) -> dict[str, float]:
        """Make one optimizer step on the accumulated gradient / `divisor`, at `rate_scale` times the scheduled rate.

        Afterwards there is no gradient. A gradient that is not finite changes no weight. `ends_step`: this was the last
        minibatch of its training step: `policy_version` rises by one. Returns grad_norm, before clipping;
        learning_rate; train/skipped_steps, 1 if the update was skipped; for a critic, which is skipped by itself, the
        same as critic/grad_norm, critic/learning_rate and critic/skipped_steps, and time/critic_s, its seconds since
        the last step. During critic.policy_waits_steps only the critic steps.
        """
        ...

    def forget_gradients(self) -> None:
        """Discard the gradient accumulated since the last `optim_step`."""
        ...

    async def publish(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Return the current weights for an engine, by the names of the model's state dict; tied ones once.

        The tensors may be views of weights that the next `optim_step` changes: copy them before. With LoRA all weights
        come the first time, and the adapters every time (models/adapters.py); for an engine that takes no adapters all
        weights every time, with the adapters merged.
        """
        ...

    async def sample(self, requests: Sequence[ExtendRequest]) -> list[list[Segment]]:
        """Return answers under the current weights, in order, each as from `Engine.extend`.

        They are stamped with `policy_version`. A run never calls this: it generates with its engine, which can resume
        and park rollouts. ValueError if the backend cannot generate.
        """
        ...

    def save_state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Return (tensors, JSON values) from which `load_state` of an equally configured backend continues exactly.

        The first part of a tensor's name, up to "/", is the file that it is written to.
        """
        ...

    def load_state(self, tensors: dict[str, torch.Tensor], meta: dict[str, Any]) -> None:
        """Restore a `save_state`. ValueError if it is of another model or lacks something."""
        ...

    def save_model(self, folder: Path) -> None:
        """Write a folder that transformers' from_pretrained loads, tokenizer included."""
        ...


class RunBackend(TrainerBackend, Protocol):
    """The backend of a run: further members, with defaults for one process. CustomBackend adds them to custom ones.

    Each can read the checkpoints of the others.
    """

    @property
    def trained_tokens(self) -> int | None:
        """Loss tokens whose gradient was computed so far; None where they are not counted."""
        return None

    def save_checkpoint(self) -> tuple[Mapping[str, torch.Tensor] | FolderWriter, dict[str, Any]]:
        """Return the state like `save_state`.

        Backends of several processes, none of which holds the whole state, return instead of the tensors a function
        that writes them by `save_shards` (ranks/sharded.py). It is called before the next step with a folder that all
        processes see, and raises OSError for a disk error.
        """
        return self.save_state()

    def load_checkpoint(self, stored: StoredTensors, meta: dict[str, Any]) -> None:
        """Restore like `load_state`. Each process reads what it needs of the files of `stored`."""
        self.load_state(dict(stored), meta)

    @contextmanager
    def profiled(self, path: Path) -> Iterator[None]:
        """Write a trace of the block, for chrome://tracing or Perfetto."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with new_profile() as profile:
            yield
        profile.export_chrome_trace(str(path))

    def close(self) -> None:
        """Release what it holds beside memory: at the end of a run, or after the backend failed."""


def new_profile() -> torch.profiler.profile:
    """Return a profiler of this process and its GPU, not started."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    return torch.profiler.profile(activities=activities)


@dataclass(frozen=True)
class BackendSetup:
    """Arguments of a backend."""

    config: Config
    loaded: LoadedModel
    """The model, in float32. The backend trains it, and so changes it."""
    team: Team
    """The CPU threads to compute with: use `team.piece` around each micro-batch."""
    engine: Engine | None = None
    """The engine that `sample` may generate with."""
    logs: Path | None = None
    """Folder for the output of its processes; None: they inherit this process's output."""
    make_ranks: Callable[[], Any] | None = None
    """Starts connected `Ranks` (ranks/group.py) for backend.type = "ranks"; None: processes of this machine."""


# Tensors of a checkpoint


class _Slice(NamedTuple):
    path: str
    starts: list[int]
    sizes: list[int]

    def read(self, name: str) -> torch.Tensor:
        with safe_open(self.path, "pt") as file:
            return file.get_tensor(name)


class StoredTensors(Mapping[str, torch.Tensor]):
    """Lazy mapping from name to tensor.

    `paths`: local safetensors files with whole tensors, or with slices (ranks/sharded.py). ValueError if the slices of
    a tensor do not make a whole.
    """

    def __init__(self, paths: Collection[str]) -> None:
        self.paths = sorted(paths)
        self._slices: dict[str, list[_Slice]] = {}
        for path in self.paths:
            with safe_open(path, "pt") as file:
                # torch's distributed checkpoint stores in the header where each slice starts.
                starts = json.loads((file.metadata() or {}).get("DCP_SHARDING_INFO", "{}"))
                for name in file.keys():  # noqa: SIM118 - it is no dict
                    sizes = file.get_slice(name).get_shape()
                    start = starts[name]["saved_offsets"] if name in starts else [0] * len(sizes)
                    self._slices.setdefault(name, []).append(_Slice(path, start, sizes))
        for name, slices in self._slices.items():
            if sum(math.prod(part.sizes) for part in slices) != math.prod(self.shape(name)):
                raise ValueError(f"the stored slices of {name} do not make a tensor of shape {list(self.shape(name))}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._slices)

    def __len__(self) -> int:
        return len(self._slices)

    def shape(self, name: str) -> torch.Size:
        """Return the shape of the whole tensor, without reading it."""
        ends = ([a + b for a, b in zip(part.starts, part.sizes, strict=True)] for part in self._slices[name])
        return torch.Size(map(max, zip(*ends, strict=True)))

    def __getitem__(self, name: str) -> torch.Tensor:
        slices = self._slices[name]
        first = slices[0].read(name)
        if len(slices) == 1:
            return first
        whole = torch.empty(self.shape(name), dtype=first.dtype)
        for part in slices:
            where = tuple(slice(a, a + b) for a, b in zip(part.starts, part.sizes, strict=True))
            whole[where] = part.read(name)
        return whole


def shape_of(tensors: Mapping[str, torch.Tensor], name: str) -> torch.Size:
    """Return the shape of a tensor, without reading a stored one."""
    return tensors.shape(name) if isinstance(tensors, StoredTensors) else tensors[name].shape
