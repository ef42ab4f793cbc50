"""Trainers of a tiny model, samples for them, and the log-probs of a plain one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

import tiny
from local_trainer import local_trainer
from rollover.config import AlgorithmConfig, TrainConfig
from rollover.models.load import LoadedModel
from rollover.trainer.objective import Counts, Tally
from rollover.trainer.passes import micro_batches
from rollover.trainer.trainer import Trainer
from rollover.types import Sample

# adam_eps: keeps Adam's first steps from amplifying rounding of near-zero gradients.
_TRAIN = {"learning_rate": 1e-2, "num_steps": 10, "micro_batch_tokens": 40, "adam_eps": 1e-3}
# A file with this function compares all trajectories of a group with each other.
TOGETHER = """
from rollover import TrajectoryGroup

def together(episodes):
    return [TrajectoryGroup(tuple(t for e in episodes for t in e.trajectories))]
"""


def trainer(
    algorithm: Mapping[str, Any] | None = None, *, loaded: LoadedModel | None = None, **options: Any
) -> Trainer:
    """`options`: of [train], or arguments of `local_trainer`."""
    train = {name: value for name, value in options.items() if name in TrainConfig.model_fields}
    others = {name: value for name, value in options.items() if name not in train}
    return local_trainer(
        loaded or tiny.loaded(),
        TrainConfig.model_validate(_TRAIN | train),
        AlgorithmConfig.model_validate(algorithm or {}),
        **{"dtype": torch.float32, "max_new_tokens": 16} | others,
    )


def weights(t: Trainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in tiny.local(t).model.parameters()])


def restored(t: Trainer, again: Trainer) -> Trainer:
    """`again` with the state of `t`."""
    tensors, meta = t.backend.save_state()
    again.backend.load_state({name: tensor.clone() for name, tensor in tensors.items()}, meta)
    return again


def gradient(t: Trainer, samples: list[Sample], micro_batch_tokens: int = 40) -> tuple[float, torch.Tensor]:
    """(loss, gradient of all parameters) of one minibatch, before any optimizer step."""
    counts = Counts.from_samples(samples)
    parts = micro_batches(samples, micro_batch_tokens)
    loss = sum(t.backend.forward_backward(part, counts).totals()["sum/loss"] for part in parts)
    found = torch.cat([g.flatten() for g in tiny.local(t).optimizer.gradients()])
    t.backend.forget_gradients()
    return loss, found


def recorded(t: Trainer) -> list[list[Sample]]:
    """The samples of each backward pass from now on."""
    found: list[list[Sample]] = []
    original = t.backend.forward_backward

    def spy(samples: list[Sample], counts: Counts) -> Tally:
        found.append(samples)
        return original(samples, counts)

    t.backend.forward_backward = spy  # type: ignore[method-assign]
    return found


@contextmanager
def nan_in_second_pass(module: torch.nn.Module) -> Iterator[None]:
    """The second output of `module` in a backward pass is NaN."""
    calls = 0

    def spoil(_module: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += torch.is_grad_enabled()  # not in the passes for values or log-probs
        return output * math.nan if torch.is_grad_enabled() and calls == 2 else output

    hook = module.register_forward_hook(spoil)
    yield
    hook.remove()
    assert calls > 2


def plain_model(model: Any = None) -> Any:
    """The tiny model, or a copy of `model`, with transformers' own attention."""
    made = tiny.model()
    if model is not None:
        made.load_state_dict(model.state_dict())
    made.set_attn_implementation("eager")
    return made


def plain_log_softmax(model: Any, s: Sample) -> torch.Tensor:
    """[loss tokens, vocabulary], by transformers' own forward pass of one sequence."""
    ids = torch.tensor(np.concatenate([s.prompt_ids, s.token_ids]), dtype=torch.long)
    logits = model(ids[None]).logits[0, len(s.prompt_ids) - 1 : -1] / s.temperature
    return torch.log_softmax(logits, -1)[torch.from_numpy(s.mask)]


def plain_logprobs(model: Any, s: Sample) -> torch.Tensor:
    """[loss tokens]"""
    tokens = torch.tensor(s.token_ids[s.mask], dtype=torch.long)
    return plain_log_softmax(model, s).gather(1, tokens[:, None])[:, 0]


def sample(
    rollout_id: str, prompt: Sequence[int], tokens: Sequence[int], mask: Sequence[int] | None = None, **streams: Any
) -> Sample:
    """One of group 0, temperature 1 and policy version 0; streams are 0 unless given."""
    n = len(tokens)
    values = dict.fromkeys(("behavior_logprobs", "advantages"), 0.0) | streams
    arrays = {name: np.broadcast_to(np.asarray(of, np.float32), (n,)).copy() for name, of in values.items()}
    return Sample(
        rollout_id,
        0,
        np.array(prompt, np.int32),
        np.array(tokens, np.int32),
        np.ones(n, bool) if mask is None else np.array(mask, bool),
        arrays | {"versions": np.zeros(n, np.int32)},
        1.0,
    )


def rewarded(samples: list[Sample], rewards: Sequence[float] = (0.0, 1.0, 2.0)) -> list[Sample]:
    """A reward at the last loss token of each, in turn, as the batch of an estimator over tokens has it."""
    out = []
    for i, s in enumerate(samples):
        values = np.zeros_like(s.advantages)
        values[np.flatnonzero(s.mask)[-1]] = rewards[i % len(rewards)]
        out.append(s.with_streams(advantages=values))
    return out
