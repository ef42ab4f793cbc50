"""The calls of agents that know their trajectory by its key: what the gateway asks (calls.Caller)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rollover.images import Places, stored
from rollover.types import SamplingParams
from rollover.workflows.calls import MODEL, Call, Reply, UnknownKey, UnknownModel
from rollover.workflows.episode import EpisodeTrajectory
from rollover.workflows.large_calls import with_stored_images
from rollover.workflows.player import Player


class EpisodeCalls:
    """Of one run. `undelivered` takes the answers of a key that reached no client, where there is a gateway."""

    def __init__(self, tokenizer: Any, sampling: SamplingParams) -> None:
        self.sampling, self._tokenizer = sampling, tokenizer
        self.undelivered: Callable[[str], Sequence[Reply]] = lambda api_key: ()
        self._of_key: dict[str, tuple[Player, EpisodeTrajectory]] = {}

    def models(self) -> Sequence[str]:
        return [MODEL]

    def find(self, key: str, model: str) -> None:
        if key not in self._of_key:
            raise UnknownKey("no open trajectory has this API key: its episode may have ended")
        name, slash, role = model.partition("/")
        if name != MODEL or (slash and not role):
            raise UnknownModel(f"the model {model!r} is not the run's: ask for {MODEL}, or {MODEL}/ROLE", "model")

    async def call(self, key: str, model: str, call: Call) -> Reply:
        self.find(key, model)
        player, trajectory = self._of_key[key]
        role = model.partition("/")[2]
        call = await with_stored_images(call, partial(_stored, player))
        return await player.ask(player.of_model(trajectory, role) if role else trajectory, call)

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        return [self._tokenizer.decode([token_id]) for token_id in token_ids]

    def add(self, player: Player, trajectory: EpisodeTrajectory) -> None:
        """From now on calls with the key of the trajectory are this player's."""
        self._of_key[trajectory.api_key] = player, trajectory

    def close(self, player: Player) -> set[str]:
        """No more. Returns the ids of Rollouts with an answer that did not reach its client."""
        ids: set[str] = set()
        for trajectory in player.trajectories:
            if self._of_key.pop(trajectory.api_key, None) is not None:
                ids |= {reply.reply_id.partition("/")[0] for reply in self.undelivered(trajectory.api_key)}
        return ids


def _stored(player: Player, value: Any) -> tuple[str, str]:
    """Store an image of a call over HTTP. An agent may name images of its task by their paths, and no other file."""
    if isinstance(value, str) and value in player.task.images:
        return stored(value, Places(Path("/")))
    return stored(value, Places(None, player.around.limits.image_urls))
