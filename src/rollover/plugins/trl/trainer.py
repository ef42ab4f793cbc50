"""TRL's GRPOTrainer over `rollover.Session`. arguments.py converts the arguments; the Session trains."""

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
from rollover.plugins.trl.arguments import convert_arguments
from rollover.plugins.trl.callbacks import Callbacks, evaluation_entry
from rollover.plugins.trl.config import GRPOConfig
from rollover.plugins.trl.models import (
    copy_trained,
    load_trained,
    save_adapters,
    save_initial_model,
    save_reward_models,
)
from rollover.run.loop import Step


class GRPOTrainer:
    """TRL's trainer. `config`: our keys, which override TRL's arguments (`{"rollout.interrupt": "when_enough"}`).

    The run is in `args.output_dir` (docs/running.md); `trainer.run` reads it. ConfigError (a ValueError) names every
    field and argument without a counterpart; OSError an unfit system.
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
        rewards = save_reward_models(reward_funcs, reward_processing_classes, self.output_dir)
        self._model = model
        peft_config, adapter = save_adapters(model, peft_config, self.output_dir)
        self._arguments = convert_arguments(
            args,
            model=save_initial_model(model, processing_class, self.output_dir),
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
        self._callbacks = Callbacks(callbacks or [], args, self._arguments)
        self._has_begun = False
        self.accelerator = SimpleNamespace(
            print=print, is_main_process=True, is_local_main_process=True, num_processes=1, process_index=0
        )

    @property
    def state(self) -> Any:
        """Return the TrainerState of transformers, with `global_step` (updates, as in TRL) and `log_history`."""
        return self._callbacks.state

    @property
    def run(self) -> Run:
        """The run's directory as an object (docs/python.md). ValueError before it has begun."""
        return Run(self.output_dir)

    @property
    def model(self) -> Any:
        """The script's model, which `train` trains; for a name, the trained model, loaded at each access."""
        if not isinstance(self._model, str):
            return self._model
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(self.run.model_path)

    def train(self, resume_from_checkpoint: str | bool | None = None) -> Any:
        """Train all steps. resume_from_checkpoint: True or a run's folder resumes that run."""
        from transformers.trainer_utils import TrainOutput

        resume = resume_from_checkpoint or self.args.resume_from_checkpoint
        if isinstance(resume, str) and not Path(resume, "config.resolved.json").is_file():
            raise ConfigError(
                f"resume_from_checkpoint = {resume!r} is no run's folder (it is what output_dir was): give it"
            )
        if resume:
            self.output_dir, self._has_begun = (self.output_dir if resume is True else str(local_path(resume))), True
        began = time.monotonic()
        _run_async(self._train())
        if not self.run.finished and self._callbacks.wants_to_stop:
            _run_async(self._finish_early())
        if not isinstance(self._model, str) and self.run.finished:
            load_trained(self._model, self.run.model_path)
        rows = self.run.metrics
        loss = sum(row.get("loss", 0.0) for row in rows) / max(1, len(rows))
        metrics = {"train_runtime": time.monotonic() - began, "train_loss": loss}
        self._callbacks.log(metrics)
        self._callbacks.notify("on_train_end")
        return TrainOutput(self.state.global_step, loss, metrics)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, Any]:
        """Evaluate the current weights on the eval_dataset; the mean reward is `eval_reward`."""
        if eval_dataset is not None:
            raise ConfigError("evaluate(eval_dataset): it is GRPOTrainer's argument. Give it there")
        if self._arguments.eval_tasks is None:
            raise ConfigError("evaluate needs GRPOTrainer(eval_dataset=...)")
        row = _run_async(self._evaluate())
        entry = evaluation_entry(row or {}, metric_key_prefix)
        self._callbacks.log(entry)
        self._callbacks.notify("on_evaluate", metrics=entry)
        return entry

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the trained model, or only its adapters, for from_pretrained. ValueError before training."""
        copy_trained(self.run.model_path, Path(output_dir or self.output_dir))

    def add_callback(self, callback: Any) -> None:
        self._callbacks.add(callback)

    def push_to_hub(self, *args: Any, **options: Any) -> None:
        raise NotImplementedError(
            f"push_to_hub: nothing is uploaded here. Hand {self.run.model_path} to huggingface_hub.upload_folder"
        )

    # Private

    def _session(self, **overrides: Any) -> Session:
        values = {**self._arguments.values, **self._config, **overrides}
        resume = self.output_dir if self._has_begun else None
        values.pop("run.dir", None)
        if resume is None:
            values["run.dir"] = self.output_dir
        return Session(config=values, tasks=self._arguments.tasks, eval_tasks=self._arguments.eval_tasks, resume=resume)

    async def _train(self) -> None:
        self._callbacks.notify("on_train_begin")
        seen = len(self.run.evaluations) if self._has_begun else 0
        async with self._session() as session:
            self._has_begun = True
            async for step in session.steps():
                seen = self._notify_step(step, seen)
                if self._callbacks.wants_to_stop:
                    break
        self._notify_evaluations(seen)

    async def _finish_early(self) -> None:
        """Finish a run that a callback stopped: make its last step the final one, and save the model."""
        async with self._session(**{"train.num_steps": self.run.metrics[-1]["step"]}) as session:
            async for _ in session.steps():
                pass

    async def _evaluate(self) -> dict[str, Any] | None:
        where = {} if self._has_begun else {"run.dir": str(Path(self.output_dir, "before_training"))}
        values = {
            **self._arguments.values,
            **self._arguments.for_evaluation,
            **self._config,
            **where,
            "eval.at_start": False,
        }
        resume = self.output_dir if self._has_begun else None
        if resume:
            values.pop("run.dir")
        async with Session(
            config=values, tasks=self._arguments.tasks, eval_tasks=self._arguments.eval_tasks, resume=resume
        ) as s:
            return await s.evaluate()

    def _notify_step(self, step: Step, seen: int) -> int:
        """Notify callbacks of a step; return the number of reported evaluations."""
        self._callbacks.begin_step(step.number)
        self._callbacks.end_step(step.metrics)
        return self._notify_evaluations(seen)

    def _notify_evaluations(self, seen: int) -> int:
        rows = self.run.evaluations
        for row in rows[seen:]:
            entry = evaluation_entry(row)
            self._callbacks.log(entry)
            self._callbacks.notify("on_evaluate", metrics=entry)
        return len(rows)


def _run_async(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine; in a new thread if an event loop is running, as in a notebook."""
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
