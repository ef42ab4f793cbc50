"""Everyone whose state is in a checkpoint: one list, in the order in which they are restored.

A part that joins is one line here: its key in state.json (docs/checkpoint-format.md), how it gives its state, and how
it takes it back. What is done with the list is snapshot.py's business.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from rollover.checkpoint.store import FolderWriter
from rollover.run.parts import Parts
from rollover.run.producer import Producer
from rollover.trainer.backend import CheckpointedBackend
from rollover.trainer.stored_tensors import StoredTensors

Arrays = Mapping[str, Any]  # numpy arrays or torch tensors, by their names


@dataclass(frozen=True)
class StatefulPart:
    """A part whose state is in a checkpoint."""

    name: str
    """Its key in state.json; "": the keys of its state stand there beside those of the other parts."""
    save: Callable[[], tuple[Mapping[str, Any], Arrays | FolderWriter]]
    """Gives (its JSON-able state, its arrays or, with a "*" in `file`, what writes a folder for each kind of them)."""
    load: Callable[[Any, Arrays], None]
    """Goes on from what `save` gave, with a "*" in `file` the arrays as StoredTensors. The parts before it in the list
    are restored by then."""
    file: str = ""
    """The file of its arrays; "" if it has none. With a "*" there is one for each kind of them, the first word of
    `<kind>/<name>`: saving copies all arrays of a file in memory."""
    default: Mapping[str, Any] | None = None
    """What `load` gets from an older checkpoint, which does not have this part; None: it is not called then."""


def stateful_parts(parts: Parts, producer: Producer) -> list[StatefulPart]:
    """The stateful parts of a run that is made of `parts`."""
    trainer, lifecycle, prompts, reuse = parts.trainer, parts.lifecycle, parts.prompts, parts.reuse
    backend = cast(CheckpointedBackend, trainer.backend)  # build_trainer makes no other

    def save_trainer() -> tuple[Mapping[str, Any], Arrays | FolderWriter]:
        tensors, meta = backend.save_checkpoint()
        return meta, tensors

    def load_trainer(meta: dict[str, Any], stored: Arrays) -> None:
        assert isinstance(stored, StoredTensors)
        backend.load_checkpoint(stored, meta)

    def load_lifecycle(state: Any, arrays: Arrays) -> None:
        lifecycle.load_state_dict(state, arrays)
        for group in lifecycle.cache.groups.values():
            if any(rollout.reward is None for rollout in group.rollouts):
                group.task = prompts.rewarded(group.task)
                for rollout in group.rollouts:
                    rollout.task = group.task
        lifecycle.check()

    def load_reuse(state: Mapping[str, Any], arrays: Arrays) -> None:
        reuse.load_state_dict(state, arrays, trainer.policy_version, prompts.max_prompt_tokens)
        reuse.reroll.change_tasks(prompts.rewarded)

    def load_history(state: Mapping[str, Any]) -> None:
        parts.history.load_state_dict(state, lifecycle.cache.groups.values(), trainer.policy_version)

    reward_kl = trainer.reward_kl
    of_reward_kl = [] if reward_kl is None else [
        without_arrays("reward_kl", reward_kl.state_dict, reward_kl.load_state_dict, {})
    ]  # fmt: skip
    return [
        StatefulPart("trainer", save_trainer, load_trainer, "trainer-*"),
        StatefulPart("", lifecycle.state_dict, load_lifecycle, "rollouts"),
        without_arrays("prompts", prompts.state_dict, prompts.load_state_dict),
        StatefulPart("reuse", reuse.state_dict, load_reuse, "replay"),
        without_arrays("producer", producer.state_dict, producer.load_state_dict, {}),
        without_arrays("shaping", parts.batches.shaping.state_dict, parts.batches.shaping.load_state_dict, {}),
        without_arrays("chronicle", parts.history.state_dict, load_history, {}),
        *of_reward_kl,
    ]


def without_arrays(
    name: str,
    state_dict: Callable[[], Mapping[str, Any]],
    load_state_dict: Callable[[Any], None],
    default: Mapping[str, Any] | None = None,
) -> StatefulPart:
    """A part whose state is JSON-able as a whole."""
    return StatefulPart(name, lambda: (state_dict(), {}), lambda state, arrays: load_state_dict(state), default=default)
