"""TRL's GRPOTrainer over `rollover.Session`: the same arguments, one loop (run/loop.py).

Owns no training: arguments.py says what each argument is, the run is a Session's, and what is read of it is its own.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rollover.api.run import Run
from rollover.api.session import Session
from rollover.config import ConfigError
from rollover.files import local_path
from rollover.plugins.trl.arguments import run_of
from rollover.plugins.trl.callbacks import Callbacks
from rollover.plugins.trl.config import GRPOConfig
from rollover.plugins.trl.history import of_evaluation
from rollover.plugins.trl.models import adapters_of, copy_trained, folder_of_model, folders_of_rewards, take_trained
from rollover.run.loop import Step


class GRPOTrainer:
    """TRL's arguments, and `config`: keys of ours above all that they say (`{"rollout.interrupt": "when_enough"}`).

    The run is in `args.output_dir`, as docs/running.md describes it; `trainer.run` reads it. ConfigError (a ValueError)
    names every field and argument that has no counterpart; OSError an unfit system.
    """

    def __init__(  # noqa: PLR0913 - TRL's signature
        self,
        model: Any,
        reward_funcs: Any = None,
        args: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: Sequence[Any] | None = None,
        optimizers: Any = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: Any = None,
        rollout_func: Any = None,
        environment_factory: Any = None,
        *,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        if args is None:
            name = model if isinstance(model, str) else str(model.config._name_or_path)
            args = GRPOConfig(f"{name.rpartition('/')[2]}-GRPO")
        if not isinstance(args, GRPOConfig):
            raise ConfigError("args is no rollover.compat.trl.GRPOConfig: import it from where GRPOTrainer is imported")
        if reward_funcs is None:
            raise ConfigError("reward_funcs is missing: give a function, or a list of them")
        self.args, self.processing_class = args, processing_class
        self.output_dir = args.output_dir = str(local_path(args.output_dir or "trainer_output"))
        rewards = folders_of_rewards(reward_funcs, reward_processing_classes, self.output_dir)
        self._model = model
        peft_config, adapter = adapters_of(model, peft_config, self.output_dir)
        self._what = run_of(
            args,
            model=folder_of_model(model, processing_class, self.output_dir),
            reward_funcs=rewards,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            peft_config=peft_config,
            refused={
                "quantization_config": quantization_config, "tools": tools, "rollout_func": rollout_func,
                "environment_factory": environment_factory,
                "optimizers": None if optimizers is None or not any(optimizers) else optimizers,
            },
        )  # fmt: skip
        self._config = ({"model.lora.path": adapter} if adapter else {}) | dict(config or {})
        self._callbacks = Callbacks(callbacks or [], args, self._what)
        self._has_begun = False
        self.accelerator = SimpleNamespace(
            print=print, is_main_process=True, is_local_main_process=True, num_processes=1, process_index=0
        )

    @property
    def state(self) -> Any:
        """transformers' TrainerState: `global_step` (updates, as in TRL), `log_history` and what else is known."""
        return self._callbacks.state

    @property
    def run(self) -> Run:
        """What the run has written (docs/python.md). ValueError before it has begun."""
        return Run(self.output_dir)

    @property
    def model(self) -> Any:
        """The model that was handed over, trained by `train`; of a name, what was trained, loaded now."""
        if not isinstance(self._model, str):
            return self._model
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(self.run.model_path)

    def train(self, resume_from_checkpoint: str | bool | None = None) -> Any:
        """Make all steps; returns transformers' TrainOutput. True, or the run's folder, goes on with an earlier run."""
        from transformers.trainer_utils import TrainOutput

        resume = resume_from_checkpoint or self.args.resume_from_checkpoint
        if isinstance(resume, str) and not Path(resume, "config.resolved.json").is_file():
            raise ConfigError(
                f"resume_from_checkpoint = {resume!r} is no run's folder (it is what output_dir was): give it"
            )
        if resume:
            self.output_dir, self._has_begun = (self.output_dir if resume is True else str(local_path(resume))), True
        began = time.monotonic()
        _wait_for(self._train())
        if not self.run.finished and self._callbacks.wants_to_stop:
            _wait_for(self._end_here())
        if not isinstance(self._model, str) and self.run.finished:
            take_trained(self._model, self.run.model_path)
        rows = self.run.metrics
        loss = sum(row.get("loss", 0.0) for row in rows) / max(1, len(rows))
        metrics = {"train_runtime": time.monotonic() - began, "train_loss": loss}
        self._callbacks.log(metrics)
        self._callbacks.tell("on_train_end")
        return TrainOutput(self.state.global_step, loss, metrics)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, Any]:
        """Score answers to the whole eval_dataset, by the present weights; the mean reward is `eval_reward`."""
        if eval_dataset is not None:
            raise ConfigError("evaluate(eval_dataset): it is GRPOTrainer's argument. Give it there")
        if self._what.eval_tasks is None:
            raise ConfigError("evaluate needs GRPOTrainer(eval_dataset=...)")
        row = _wait_for(self._evaluate())
        entry = of_evaluation(row or {}, metric_key_prefix)
        self._callbacks.log(entry)
        self._callbacks.tell("on_evaluate", metrics=entry)
        return entry

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the trained model for from_pretrained; of an adapter, it alone. ValueError before it is trained."""
        copy_trained(self.run.model_path, Path(output_dir or self.output_dir))

    def add_callback(self, callback: Any) -> None:
        self._callbacks.add(callback)

    def push_to_hub(self, *args: Any, **options: Any) -> None:
        raise NotImplementedError(
            f"push_to_hub: nothing is uploaded here. Hand {self.run.model_path} to huggingface_hub.upload_folder"
        )

    # Private

    def _session(self, **overrides: Any) -> Session:
        values = {**self._what.values, **self._config, **overrides}
        resume = self.output_dir if self._has_begun else None
        values.pop("run.dir", None)
        if resume is None:
            values["run.dir"] = self.output_dir
        return Session(config=values, tasks=self._what.tasks, eval_tasks=self._what.eval_tasks, resume=resume)

    async def _train(self) -> None:
        self._callbacks.tell("on_train_begin")
        seen = len(self.run.evaluations) if self._has_begun else 0
        async with self._session() as session:
            self._has_begun = True
            async for step in session.steps():
                seen = self._after(step, seen)
                if self._callbacks.wants_to_stop:
                    break
        self._tell_evaluations(seen)

    async def _end_here(self) -> None:
        """Of a run that a callback ended: its last step is the last one, whose model is saved."""
        async with self._session(**{"train.num_steps": self.run.metrics[-1]["step"]}) as session:
            async for _ in session.steps():
                pass

    async def _evaluate(self) -> dict[str, Any] | None:
        where = {} if self._has_begun else {"run.dir": str(Path(self.output_dir, "before_training"))}
        values = {**self._what.values, **self._what.for_evaluation, **self._config, **where, "eval.at_start": False}
        resume = self.output_dir if self._has_begun else None
        if resume:
            values.pop("run.dir")
        async with Session(config=values, tasks=self._what.tasks, eval_tasks=self._what.eval_tasks, resume=resume) as s:
            return await s.evaluate()

    def _after(self, step: Step, seen: int) -> int:
        """Tell of a step; the number of evaluations that were told of."""
        self._callbacks.begin_step(step.number)
        self._callbacks.end_step(step.metrics)
        return self._tell_evaluations(seen)

    def _tell_evaluations(self, seen: int) -> int:
        rows = self.run.evaluations
        for row in rows[seen:]:
            entry = of_evaluation(row)
            self._callbacks.log(entry)
            self._callbacks.tell("on_evaluate", metrics=entry)
        return len(rows)


def _wait_for(work: Coroutine[Any, Any, Any]) -> Any:
    """What it returns. In a thread of its own where an event loop is running, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    outcome: list[Callable[[], Any]] = []

    def thread() -> None:
        try:
            value = asyncio.run(work)
            outcome.append(lambda: value)
        except BaseException as error:
            failed = error

            def fail() -> Any:
                raise failed

            outcome.append(fail)

    runner = threading.Thread(target=thread, name="rollover.compat.trl")
    runner.start()
    runner.join()
    return outcome[0]()
