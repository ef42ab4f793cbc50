"""The mapping of GRPOConfig against the TRL that is installed: no field is missing, and the defaults are TRL's."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest

from rollover.compat.trl import GRPOConfig
from rollover.config.load import load_config
from rollover.plugins.convert.mapping import convert
from rollover.plugins.convert.trl.rows import ROWS, TRL

trl = pytest.importorskip("trl")
FIELDS = {
    field.name: field.default if field.default is not dataclasses.MISSING else field.default_factory()  # type: ignore[misc]
    for field in dataclasses.fields(trl.GRPOConfig)
}
ARGUMENTS = [name for name in inspect.signature(trl.GRPOTrainer.__init__).parameters if name not in ("self", "args")]


@pytest.mark.parametrize("name", [*FIELDS, *ARGUMENTS])
def test_every_field_and_argument_has_one_row(name: str) -> None:
    assert len([row.option for row in ROWS if row.matches(name)]) == 1


def test_the_defaults_that_are_written_out_are_trls() -> None:
    written: dict[str, Any] = {row.option: row.default for row in ROWS if row.default is not None}
    own = {"num_processes": 1, "max_prompt_length": 0}  # which are no fields
    assert written == {name: FIELDS.get(name, own.get(name)) for name in written}


def test_a_configuration_of_defaults_asks_about_nothing() -> None:
    done = [convert(TRL, dict(TRL.base) | given) for given in ({}, FIELDS | {"max_steps": 10})]
    assert [one.questions for one in done] == [{}, {}]
    first, second = (load_config([{key: value for key, (value, _) in one.values.items()}]).config for one in done)
    assert first == second


def test_the_names_of_losses_and_corrections_are_all_understood() -> None:
    text = inspect.getsource(trl.trainer.grpo_config)
    losses = [name for name in ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo") if name in text]
    for loss in losses:
        done = convert(TRL, dict(TRL.base) | {"loss_type": loss, "epsilon_high": 5.0})
        assert not done.questions, loss
    for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"):
        done = convert(TRL, dict(TRL.base) | {"use_vllm": True, "vllm_importance_sampling_mode": mode})
        assert done.values["algorithm.correction"][0] == mode


def test_the_configuration_of_the_same_name_has_the_same_fields_with_the_same_defaults() -> None:
    earlier = {"max_prompt_length": None, "warmup_ratio": None}
    assert GRPOConfig().to_dict() == earlier | FIELDS
    assert GRPOConfig(**{name: value for name, value in FIELDS.items()}).given() == {}


def test_a_script_that_reads_its_command_line_by_trls_parser_has_its_fields() -> None:
    parser = trl.TrlParser((trl.ScriptArguments, GRPOConfig, trl.ModelConfig))
    words = "--output_dir out --reward_weights 1 2 --scale_rewards none --bf16 False --report_to wandb --use_vllm"
    words = [*words.split(), "--dataset_name", "d", "--chat_template_kwargs", '{"enable_thinking": false}']
    _, args, _ = parser.parse_args_and_config(words)
    assert args.given() == {
        "output_dir": "out", "reward_weights": [1.0, 2.0], "scale_rewards": "none", "bf16": False,
        "report_to": ["wandb"], "use_vllm": True, "chat_template_kwargs": {"enable_thinking": False},
    }  # fmt: skip
