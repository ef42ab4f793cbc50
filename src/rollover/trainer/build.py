"""The trainer of a run, as the configuration says: the step over minibatches, on the backend that it names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rollover.config import AlgorithmConfig, Config, TrainConfig
from rollover.config.backend import BACKENDS
from rollover.config.correction import several_updates
from rollover.engine.protocol import Engine
from rollover.functions import FunctionError, make_named
from rollover.models.devices import pick_device
from rollover.models.load import LoadedModel
from rollover.models.threads import Team
from rollover.trainer.backend import BackendLost, BackendSetup, TrainerBackend
from rollover.trainer.critic import load_critic
from rollover.trainer.local_backend import LocalBackend
from rollover.trainer.own_backend import OwnBackend
from rollover.trainer.ranks.group import Ranks
from rollover.trainer.reference import load_reference
from rollover.trainer.teacher import load_teacher
from rollover.trainer.trainer import Trainer


def build_trainer(
    config: Config,
    loaded: LoadedModel,
    engine: Engine | None = None,
    logs: Path | None = None,
    own_ranks: Callable[[], Ranks] | None = None,
) -> Trainer:
    """The trainer, on the backend that backend.type names, goes on with the model that is `loaded`, in float32.
    `engine`: what the backend may sample with. `logs`, `own_ranks`: see BackendSetup. ValueError if a function
    of one's own gives no backend; BackendLost where it is lost while it is made."""
    staleness = max(config.staleness_bound, config.replay.max_staleness if config.replay.size else 0)
    team = Team.of(config.run, pick_device(config.model.device))
    refuse_uncorrected(config.train, config.algorithm, staleness)
    setup = BackendSetup(config, loaded, team, staleness, engine, logs, own_ranks)
    kind = config.backend.type
    try:
        backend = make_named("backend.type", kind, BACKENDS, setup, TrainerBackend, "a trainer's backend")
    except FunctionError as error:
        if isinstance(error.__cause__, BackendLost):
            raise error.__cause__ from None
        raise
    if kind not in BACKENDS:
        backend = OwnBackend(backend, kind)
    return Trainer(backend, config, team)


def refuse_uncorrected(train: TrainConfig, algorithm: AlgorithmConfig, max_staleness: int) -> None:
    """ValueError where tokens may be trained off-policy and the loss does not correct for it."""
    if max_staleness > 0 and not (algorithm.corrects or algorithm.allow_uncorrected):
        raise ValueError(
            f"max_staleness = {max_staleness}: tokens may have been sampled with older weights, and the loss does not"
            " correct for that (for a loss of your own it is not known). Set algorithm.correction, with"
            ' algorithm.proximal = "step_start", or algorithm.allow_uncorrected = true'
        )
    if train.updates_per_step > 1 and not (algorithm.follows_updates or algorithm.allow_uncorrected):
        several, one = several_updates(train)
        raise ValueError(
            f"{several}: each update changes the weights that the next one begins with, and the loss does not correct"
            f" for that (for a loss of your own it is not known). Set {one}, algorithm.correction, or"
            " algorithm.allow_uncorrected = true"
        )


def make_local(setup: BackendSetup) -> TrainerBackend:
    """A backend in this process."""
    config = setup.config
    teacher = load_teacher(config, setup.loaded) if config.distill.model_path else None
    has_model = config.algorithm.needs_critic and config.critic.model
    critic_model = load_critic(config, setup.loaded) if has_model else None
    return LocalBackend(
        setup, teacher=teacher, reference=load_reference(config, setup.loaded), critic_model=critic_model
    )
