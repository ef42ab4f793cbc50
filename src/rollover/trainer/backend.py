"""What a training backend must do: the six verbs that a training step is made of, and what belongs to them.

    compute_logprobs, forward_backward, optim_step       the step over minibatches (trainer.py) calls these
    publish, save_state                                  the run hands weights over, and writes checkpoints
    sample                                               a program without a run of its own generates with it

Above the verbs, in trainer.py: which samples form a minibatch, which log-probs a step needs and under which weights,
what is rejected, and when gradients of a step are accumulated before its rest is known. Below them, in the backend:
weights, optimizer, critic, earlier weights, micro-batches, devices and the loss of a token (objective.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch

from rollover.checkpoint.storage import FolderWriter
from rollover.config import AlgorithmConfig, Config
from rollover.engine.protocol import Engine, ExtendRequest
from rollover.models.load import LoadedModel
from rollover.models.threads import Team
from rollover.trainer.objective import Counts
from rollover.trainer.stored_tensors import StoredTensors
from rollover.trainer.tally import Tally
from rollover.types import Sample, Segment

Stream = dict[str, np.ndarray]
"""rollout_id -> float32 [loss tokens of its sample]."""

TEACHER: Literal["teacher"] = "teacher"
REFERENCE: Literal["reference"] = "reference"
Version = int | Literal["teacher", "reference"]
"""Whose weights `compute_logprobs` is asked for: those of a policy version, the teacher's of [distill], or those of the
reference policy, where they are not those of version 0."""


def reference_of(algorithm: AlgorithmConfig) -> Version:
    """Whose weights the reference policy has."""
    return REFERENCE if algorithm.own_reference else 0


class BackendLost(RuntimeError):
    """The backend is gone, and its weights with it: a process of it has ended, say. The message says what happened.

    Any verb may raise it, and a function that makes a backend. The run then goes on from its newest checkpoint and its
    journal with a backend that is made anew, up to cluster.max_restarts times without a step in between.
    """


class TrainerBackend(Protocol):
    """Contract: run tests/contract/trainer_contract.py on your own backend.

    Calls come one after the other, from one thread at a time. A failure between the first `optim_step` of a training
    step and its last leaves weights that no checkpoint describes: the run then goes on from an earlier one.
    A backend that has something to end, processes of its own say, has a method `close()` beside these: it is called
    once, at the end of a run and where the backend is lost.
    """

    @property
    def policy_version(self) -> int:
        """Training steps completed by the current weights; 0 for those that the backend was built with."""
        ...

    @property
    def flops(self) -> float:
        """Model FLOPs of all passes so far. What is computed again to save memory counts once."""
        ...

    def compute_logprobs(self, samples: list[Sample], version: Version | None = None) -> Stream:
        """Log-probs of the loss tokens, each at the temperature of its sample and without dropout; no gradient.

        `version`: the policy version whose weights are asked for. None: the current weights. Kept are version 0 where
        algorithm.kl_coef > 0, and the last max_staleness + 1 versions where algorithm.proximal = "snapshot"; TEACHER
        is the teacher of [distill], whose weights the backend holds; REFERENCE takes the place of version 0 where
        `algorithm.own_reference`: weights of another model, or mixed anew of its own and the current ones after every
        algorithm.reference_refresh_steps. ValueError for what is not kept. At equal weights
        the numbers are those that `forward_backward` of the same samples computes.
        """
        ...

    def compute_values(self, samples: list[Sample]) -> Stream:
        """The critic's values before each loss token (algorithm.advantage = "gae"). ValueError without one.

        A sample may have one token more than the model has positions: nothing is computed at its last token.
        """
        ...

    def compute_statistics(self, samples: list[Sample]) -> Stream:
        """Of the distribution that each loss token was drawn from, under the current weights: float32 [loss tokens, 3],
        the log-prob of the token, the entropy (nats) and the sum of the squared probabilities of the vocabulary.

        Asked for with algorithm.top_entropy_share and the optimal token baselines alone. ValueError where it cannot be
        told.
        """
        ...

    def forward_backward(self, samples: list[Sample], counts: Counts) -> Tally:
        """Add the gradient of `samples` to the gradient so far; returns their sums, one addition per micro-batch.

        `counts`: what the whole minibatch holds, of which `samples` may be a part: losses are divided by it, unless
        `counts.divided` is False. The samples have the streams that the loss reads (STREAMS in streams.py), of which
        `pack` makes tensors. Without "proximal_logprobs" the current ones take their place: the ratio is then exactly
        1, and costs no forward pass. Without a loss token in `samples`, and with some in `counts`, the
        gradient is 0 rather than absent: the optimizer's momentum goes on. With track.token_stats a `Tally` holds
        besides what `Objective` tells of each token (TOKENS); of a backend that leaves that out these numbers are not
        recorded.
        ValueError for a sample that the model cannot be given.
        """
        ...

    def optim_step(self, rate_scale: float = 1.0, *, divisor: float = 1.0, ends_step: bool = True) -> dict[str, float]:
        """One optimizer step on the gradient so far divided by `divisor`, at `rate_scale` times the scheduled rate.

        Afterwards there is no gradient. A gradient that is not finite changes no weight. `ends_step`: this was the
        last minibatch of its training step: `policy_version` rises by one. Returns grad_norm, before clipping;
        learning_rate; train/skipped_steps, 1 where the update was skipped; of a critic, which is skipped by itself, the
        same as critic/grad_norm, critic/learning_rate and critic/skipped_steps, and time/critic_s, the seconds that it
        took since the last step. While critic.policy_waits_steps last, the critic alone steps.
        """
        ...

    def forget_gradients(self) -> None:
        """Forget the gradient that was accumulated since the last `optim_step`."""
        ...

    async def publish(self) -> Iterable[tuple[str, torch.Tensor]]:
        """The current weights for an engine, by the names of the model's state dict; tied ones once.

        The tensors may be views of weights that the next `optim_step` changes: copy them before. With LoRA all weights
        come the first time, and the adapters every time (models/adapters.py); for an engine that takes no adapters all
        weights every time, with the adapters merged.
        """
        ...

    async def sample(self, requests: Sequence[ExtendRequest]) -> list[list[Segment]]:
        """Answers under the current weights, in order, each as `Engine.extend` gives it, stamped with `policy_version`.

        Nothing in a run calls this: rollouts are resumed, parked and scheduled, so a run generates with its engine.
        ValueError where the backend has nothing to generate with.
        """
        ...

    def save_state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """(tensors, what JSON can hold) from which `load_state` of a backend of the same configuration goes on exactly.

        The first part of a tensor's name, up to "/", is the file that it is written to.
        """
        ...

    def load_state(self, tensors: dict[str, torch.Tensor], meta: dict[str, Any]) -> None:
        """Go on from what `save_state` gave. ValueError where it is of another model or lacks what is needed."""
        ...

    def save_model(self, folder: Path) -> None:
        """Write a folder that transformers' from_pretrained loads, tokenizer included."""
        ...


class CheckpointedBackend(Protocol):
    """What a `TrainerBackend` of ours is besides, and what the user's own is wrapped in: how a run writes its state
    into a checkpoint, and reads it again. The files of any may be read by the others."""

    def save_checkpoint(self) -> tuple[Mapping[str, torch.Tensor] | FolderWriter, dict[str, Any]]:
        """As `save_state`. Of several processes, none of which holds the state as a whole, in the place of the tensors
        what writes them by `save_shards` (shards.py): it is called before the next step, with a folder that all
        processes see, and raises OSError where a disk was at fault."""
        ...

    def load_checkpoint(self, stored: StoredTensors, meta: dict[str, Any]) -> None:
        """As `load_state`. All processes see the files of `stored`, of which each reads what it needs."""
        ...


@dataclass(frozen=True)
class BackendSetup:
    """What a backend is made from."""

    config: Config
    loaded: LoadedModel
    """The model, in float32. The backend trains it, and so changes it."""
    team: Team
    """The CPU threads to compute with: `team.piece` around each micro-batch."""
    max_staleness: int
    """How old the weights may be that `compute_logprobs` is asked for."""
    engine: Engine | None = None
    """What `sample` may generate with."""
    logs: Path | None = None
    """The folder of what its processes print; None: they print where this process does."""
    own_ranks: Callable[[], Any] | None = None
    """Starts `Ranks` (ranks/group.py), which have met, for backend.type = "ranks"; None: processes of this machine."""
