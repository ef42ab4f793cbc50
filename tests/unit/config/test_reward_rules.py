"""Rules over the options of [rewards]."""

import sys

import pytest

from rollover.config.load import ConfigError
from unit.config.written import load


@pytest.mark.parametrize("option", ["num_workers = 2", "memory_gb = 2.0", "retries = 1", "quarantine_after = 1"])
def test_the_pool_has_nothing_to_do_for_recorded_rollouts(tmp_path, option):
    name = f"rewards.{option.split()[0]}"
    with pytest.raises(ConfigError, match=f"{name} has no effect with run.train_on_recorded"):
        load(tmp_path, f'[run]\ntrain_on_recorded = "x"\n[rewards]\n{option}')
    load(tmp_path, f"[rewards]\n{option}")


@pytest.mark.parametrize(("platform", "memory_gb", "part"), [("darwin", 2.0, "only Linux"), ("linux", 0.01, "0.1 or")])
def test_a_memory_limit_that_cannot_work_is_refused(tmp_path, monkeypatch, platform, memory_gb, part):
    monkeypatch.setattr(sys, "platform", platform)
    with pytest.raises(ConfigError, match=f"rewards.memory_gb = {memory_gb:g}: .*{part}"):
        load(tmp_path, f"[rewards]\nmemory_gb = {memory_gb}")
    monkeypatch.setattr(sys, "platform", "linux")
    for allowed in (0.0, 0.1):
        assert load(tmp_path, f"[rewards]\nmemory_gb = {allowed}").config.rewards.memory_gb == allowed


ROW = '[[rewards.functions]]\nfunction = "json"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[rewards]\nfunction = "json"\n' + ROW, 'rewards.function = "json" with rewards.functions'),
        ("[[rewards.functions]]\nweight = 2.0", "rewards.functions.0.function is missing"),
        (ROW + 'name = "score"', 'rewards.functions.0.name = "score": that is the name of something else'),
        (ROW + 'name = "overlong"', "that is the name of something else"),
        (ROW + 'name = "a"\n' + ROW + 'name = "a"', '2 have the name "a"'),
        (ROW + "shaping = true", "all are shaping"),
        (ROW + '[rewards.by_data_source]\n"*" = "json"', "rewards.by_data_source has no effect as"),
        ('[rewards.by_data_source]\n"*" = 5', "every value must be a reward by name"),
        ("[rewards]\noverlong_penalty = 0.5", "overlong_penalty has no effect with rewards.overlong_buffer_tokens"),
        ("[rewards]\noverlong_buffer_tokens = 300", "is above rollout.max_new_tokens = 256"),
        ("[rewards]\nclip_range = [1.0]", "give \\[lowest, highest\\]"),
        ("[rewards]\nclip_range = [1.0, 1.0]", "give \\[lowest, highest\\]"),
        ('[rewards]\nrunning_norm = "scale"\n[train]\nstreaming_min_groups = 1', "those of the whole step"),
        (
            '[rewards]\noverlong_buffer_tokens = 9\n[algorithm]\nadvantage = "gdpo"\nreward_weights = { acc = 1.0 }',
            "leaves out the shaping 'overlong'",
        ),
        (
            '[rewards]\nclip_range = [0.0, 1.0]\n[algorithm]\nadvantage = "gdpo"\nreward_weights = { acc = 1.0 }',
            "leaves out rewards.clip_range",
        ),
        (
            '[rewards]\nrunning_norm = "scale"\n[distill]\nteacher = "self"\nprivileged = "a.py:f"\nmix = "replace"',
            "rewards.running_norm has no effect with distill.mix",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, text)


def test_several_functions_and_their_shaping_are_read(tmp_path):
    shaping = 'overlong_buffer_tokens = 64\noverlong_penalty = 0.5\nrunning_norm = "whiten"\nclip_range = [-1.0, 1.0]'
    weights = '[algorithm]\nadvantage = "gdpo"\nreward_weights = { score = 1.0 }'
    rows = ROW + 'weight = 0.5\n[[rewards.functions]]\nfunction = "a.py:f"\nparams = { k = 2 }\nshaping = true'
    rewards = load(tmp_path, f"{weights}\n[rewards]\n{shaping}\n{rows}").config.rewards
    assert [(r.function, r.weight, r.params, r.shaping) for r in rewards.functions] == [
        ("json", 0.5, {}, False),
        ("a.py:f", 1.0, {"k": 2}, True),
    ]
    assert rewards.clip_range == [-1.0, 1.0] and rewards.running_norm == "whiten"


@pytest.mark.parametrize("backend", ["ranks", "tinker"])
def test_shaping_is_the_controllers_whatever_trains(tmp_path, backend):
    """Advantages are computed before a backend is given a batch (trainer/batch.py)."""
    lora = "[model.lora]\nrank = 4\n" if backend == "tinker" else ""
    shaping = 'overlong_buffer_tokens = 64\nrunning_norm = "scale"\nclip_range = [-1.0, 1.0]'
    rewards = load(tmp_path, f'{lora}[backend]\ntype = "{backend}"\n[rewards]\n{shaping}').config.rewards
    assert rewards.overlong_buffer_tokens == 64


@pytest.mark.parametrize(
    ("text", "key", "enough"),
    [
        ("[rewards]\nfunction = 'code/{\"timeout_s\": 29}'", "rewards.function", ("29", "28")),
        ('[rewards]\nfunction = "code"\ntimeout_s = 11.0', "rewards.function", ("11.0", "12.0")),
        (
            ROW + '[[rewards.functions]]\nfunction = "code"\nparams = { timeout_s = 28.5 }',
            "rewards.functions.1",
            ("28.5", "28"),
        ),
        (
            "[rewards.by_data_source]\napps = 'code/{\"timeout_s\": 40}'",
            'rewards.by_data_source."apps"',
            ("40", "4"),
        ),
        (
            '[[tasks.sources]]\nkind = "dataset"\npath = "x.jsonl"\nreward = \'code/{"timeout_s": 30}\'',
            "tasks.sources.0.reward",
            ("30", "3"),
        ),
    ],
)
def test_a_program_may_not_run_as_long_as_its_worker_has(tmp_path, text, key, enough):
    """The worker would be ended, and the reward missing, where the program is worth 0."""
    with pytest.raises(ConfigError, match=f"{key}: the reward code may run a program for timeout_s = "):
        load(tmp_path, text)
    load(tmp_path, text.replace(*enough))
