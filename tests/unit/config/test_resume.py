"""What a resumed run may change: the table, how configurations are compared, and every message's three parts."""

from __future__ import annotations

from typing import Any

import pytest

from rollover.config import Config
from rollover.config.resume import FIXED, Change, changes, refuse
from rollover.config.table import UNSETTLED

SOURCE = {"kind": "reasoning_gym", "name": "chain_sum", "params": {"max_digits": 1}}
BEFORE = Config.model_validate({"tasks": {"sources": [SOURCE]}, "model": {"lora": {"rank": 8}}})


def changed(**tables: Any) -> list:
    data = BEFORE.model_dump(mode="json")
    for table, fields in tables.items():
        data[table] |= fields
    return changes(BEFORE.model_dump(mode="json"), Config.model_validate(data, context=UNSETTLED))


def lora(**fields: Any) -> dict[str, Any]:
    return {"lora": BEFORE.model.lora.model_dump() | fields}


REFUSED = [
    ({"run": {"seed": 1}}, False, "--resume with run.seed = 1: it was 0, and ", "Set run.seed = 0"),
    ({"tasks": {"eval_fraction": 0.5}}, False, "tasks.eval_fraction = 0.5", "held out after being trained"),
    ({"tasks": {"shuffle": False}}, False, "tasks.shuffle = false: it was true", "Set tasks.shuffle = true"),
    ({"tasks": {"producer": "a:B"}}, False, 'tasks.producer = "a:B": it was ""', "of different runs"),
    ({"tasks": {"sources": [SOURCE | {"params": {"max_digits": 2}}]}}, False,
     "tasks.sources.0.params.max_digits = 2: it was 1", "repeated or skipped"),
    ({"tasks": {"sources": [SOURCE | {"name": "x"}]}}, False, 'tasks.sources.0.name = "x"', 'it was "chain_sum"'),
    ({"tasks": {"sources": [SOURCE, SOURCE]}}, False, 'tasks.sources.1.name = "chain_sum"', "it was (not set)"),
    ({"tasks": {"sources": []}}, False, "tasks.sources.0.name = (not set)", 'it was "chain_sum"'),
    ({"algorithm": {"reference_path": "other"}}, False, 'reference_path = "other": it was ""', "that reference"),
    ({"model": lora(rank=4)}, False, "model.lora.rank = 4: it was 8", "Set model.lora.rank = 8"),
    ({"model": lora(target_modules=["q_proj"])}, False, 'model.lora.target_modules = ["q_proj"]', "of those adapters"),
    ({"model": lora(dora=True)}, False, "model.lora.dora = true: it was false", "of those adapters"),
    ({"train": {"optimizer": "muon"}}, False, 'train.optimizer = "muon": it was "adamw"', "keeps for each weight"),
    ({"critic": {"model": "policy"}}, False, 'critic.model = "policy": it was ""', "a critic of that kind"),
    ({"sft": {"path": "other.jsonl"}}, False, 'sft.path = "other.jsonl": it was ""', "of different runs"),
    ({"sft": {"turns": "last"}}, False, 'sft.turns = "last": it was "all"', "held out after being trained"),
    ({"rollout": {"group_size": 4}}, True, "rollout.group_size = 4: it was 8", "Set rollout.group_size = 8"),
    ({"rollout": {"greedy_baseline": True}}, True, "rollout.greedy_baseline = true", "groups of that size"),
    ({"model": {"processor_kwargs": {"max_pixels": 9}}}, True, "model.processor_kwargs", "images in those sizes"),
    ({"rollout": {"temperature": 0.5}}, True, "rollout.temperature = 0.5: it was 1.0", "Set rollout.temperature = 1.0"),
    ({"rollout": {"logits": {"regex": "a+"}}}, True, 'rollout.logits.regex = "a+": it was ""', "begun with it"),
    ({"backend": {"type": "a:B"}}, False, 'backend.type = "a:B": it was "local"', "as that backend wrote them"),
    ({"workflow": {"environment": "a:B"}}, True, 'workflow.environment = "a:B": it was ""', "begun in it"),
    ({"rollout": {"environment": "a:B"}}, True, 'rollout.environment = "a:B": it was "single_turn"', "begun in it"),
]  # fmt: skip


@pytest.mark.parametrize(("tables", "while_held", "said", "why"), REFUSED, ids=lambda value: str(value)[:40])
def test_refused_with_key_old_and_new_value_and_the_fix(tables: dict, while_held: bool, said: str, why: str) -> None:
    found = changed(**tables)
    with pytest.raises(ValueError) as refused:
        refuse(found, held=True)
    assert said in str(refused.value) and why in str(refused.value)
    assert "--resume with" in str(refused.value) and "or start a new run in another run.dir" in str(refused.value)
    if while_held:
        refuse(found, held=False)
        refuse(found, held=None)


def backend_change(old: str, new: str) -> list[Change]:
    before, after = (Config.model_validate({"backend": {"type": name}}, context=UNSETTLED) for name in (old, new))
    return changes(before.model_dump(mode="json"), after)


@pytest.mark.parametrize(("old", "new"), [("local", "ranks"), ("ranks", "local")])
def test_one_process_and_ranks_go_on_from_each_others_checkpoints(old: str, new: str) -> None:
    (change,) = backend_change(old, new)
    assert change.key == "backend.type"
    refuse([change], held=True)


@pytest.mark.parametrize("others", ["ranks tinker", "tinker ranks", "tinker local", "ranks a:B"])
def test_no_other_backends_do(others: str) -> None:
    with pytest.raises(ValueError, match="as that backend wrote them"):
        refuse(backend_change(*others.split()), held=False)


def test_every_rule_of_the_table_is_held_by_one_of_these() -> None:
    from fnmatch import fnmatch

    keys = {change.key for tables, *_ in REFUSED for change in changed(**tables)}
    assert all(any(fnmatch(key, pattern) for key in keys for pattern in rule.keys) for rule in FIXED)


HANDED_OVER = "<python>:Env-d390a3dd"


@pytest.mark.parametrize("key", ["rollout.environment", "tasks.producer", "tasks.sources.0.kind"])
@pytest.mark.parametrize("new", ["<python>:Env-23d544c0", "<python>:Env-23d544c0.2", "mine.py:Env"])
def test_an_object_of_a_program_may_be_mended_or_moved_to_a_file(key: str, new: str) -> None:
    refuse([Change(key, HANDED_OVER, new)], held=True)


@pytest.mark.parametrize("new", ["<python>:Other-d390a3dd", "mine.py:Other"])
def test_another_object_is_refused_and_what_is_asked_for_is_possible(new: str) -> None:
    with pytest.raises(ValueError) as refused:
        refuse([Change("rollout.environment", HANDED_OVER, new)], held=True)
    assert f"Hand over {HANDED_OVER} again in Python, or start a new run in another run.dir" in str(refused.value)
    assert "Set rollout.environment" not in str(refused.value)


def test_a_file_is_not_the_one_before_for_its_functions_name() -> None:
    with pytest.raises(ValueError, match='Set rollout.environment = "mine.py:Env", or start'):
        refuse([Change("rollout.environment", "mine.py:Env", "other.py:Env")], held=True)


@pytest.mark.parametrize(
    "tables",
    [
        {"train": {"learning_rate": 0.5, "num_steps": 7}},
        {"rollout": {"groups_per_step": 3, "max_staleness": 2, "max_new_tokens": 9}},
        {"tasks": {"epochs": 3, "system_prompt": "be brief"}},
        {"tasks": {"sources": [SOURCE | {"weight": 3.0}]}},
        {"model": lora(dropout=0.1)},
    ],
)
def test_all_else_may_change_and_is_told(tables: dict) -> None:
    found = changed(**tables)
    refuse(found, held=True)
    assert found and all(" -> " in str(change) for change in found)


def test_where_a_run_lies_and_options_newer_than_the_file_are_no_change() -> None:
    assert changed(run={"dir": "/elsewhere"}, checkpoint={"resume_from": "step-000001"}) == []
    older = BEFORE.model_dump(mode="json")
    del older["train"]["publish_every"], older["watchdog"]
    del older["tasks"]["sources"][0]["weight"]
    assert changes(older, BEFORE) == []
    assert str(changed(train={"learning_rate": 0.5})[0]) == "train.learning_rate: 1e-06 -> 0.5"


# Keys that have another name now


def test_an_earlier_file_is_read_by_todays_names() -> None:
    older = BEFORE.model_dump(mode="json")
    older["run"]["replay_rollouts"] = older["run"].pop("train_on_recorded")
    assert changes(older, BEFORE) == []
    older["run"]["replay_rollouts"] = "runs/x/rollouts"
    with pytest.raises(ValueError, match='run.train_on_recorded = "": it was "runs/x/rollouts"'):
        refuse(changes(older, BEFORE))
