"""[workflow.roles], credit and group_by: what is refused, with the fix, and what stays in force."""

from pathlib import Path

import pytest

from rollover.config.load import ConfigError
from unit.config.written import load


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[workflow.roles.solver]\nadvantage = "grop"', r'workflow.roles.solver.advantage = "grop" is none of .*grpo'),
        (
            "[workflow.roles.solver]",
            r"roles.solver: no trajectory can have this role, .* Set workflow.function, or remove",
        ),
        ("[workflow.roles.solver]\ntrained = false", "no role is trained. Set trained = true for one"),
        ("[workflow.roles.solver]\nweigth = 2.0", "a table for each name, with trained, advantage, weight"),
        ("[workflow.roles.solver]\nweight = 0.0", "a table for each name, with trained, advantage, weight"),
        ("[workflow]\nroles = 3", "a table for each name, with trained, advantage, weight"),
        ("[workflow]\nturn_gamma = 0.5", "workflow.turn_gamma has no effect unless workflow.credit"),
        ('[workflow]\ncredit = "turns"', "expected one of"),
        (
            '[workflow]\ncredit = "turn_returns"\n[algorithm]\nafter_scoring = "a.py:f"',
            "with algorithm.after_scoring: it changes one advantage a rollout",
        ),
        (
            '[workflow]\ncredit = "turn_returns"\n[algorithm]\nadvantage = "gdpo"\nreward_weights = { a = 1.0 }',
            "with algorithm.reward_weights: a turn has one reward",
        ),
        (
            '[workflow]\ncredit = "turn_returns"\n[algorithm]\npreset = "ppo"',
            "gae and others over tokens begin",
        ),
        (
            '[workflow.roles.a]\nadvantage = "grpo"\n[workflow.roles.b]\n[algorithm]\npreset = "ppo"',
            "advantages over tokens cannot be mixed",
        ),
        (  # though no role has the critic's: the trainer has one
            '[workflow]\nfunction = "a.py:f"\n[workflow.roles.a]\nadvantage = "grpo"\n[algorithm]\npreset = "ppo"',
            "advantages over tokens cannot be mixed",
        ),
        (
            '[workflow]\nfunction = "a.py:f"\n[workflow.roles.a]\n[workflow.roles.b]\ntrained = false\nweight = 2.0',
            "workflow.roles.b.weight has no effect as the role is not trained. Remove",
        ),
        (
            '[workflow.roles.a]\nadvantage = "precomputed"\n[algorithm]\nafter_scoring = "a.py:f"',
            "precomputed ones may be one a token. Remove it",
        ),
        ('[workflow.roles.a]\nadvantage = "remax"\n[workflow.roles.b]', "Set rollout.greedy_baseline = true"),
        (
            '[workflow.roles.a]\nadvantage = "reinforce_plus_plus"\n[train]\nstreaming_min_groups = 2',
            "the advantages depend on all groups of the step",
        ),
    ],
)
def test_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load(tmp_path, text)


def test_roles_are_read_and_shown(tmp_path: Path) -> None:
    roles = '[workflow]\nfunction = "a.py:f"\n[workflow.roles.solver]\n[workflow.roles.judge]\n'
    config = load(tmp_path, roles + 'weight = 0.5\nadvantage = "rloo"').config
    assert config.workflow.roles["judge"].weight == 0.5 and config.workflow.roles["solver"].trained
    assert config.workflow.advantages("grpo") == ("grpo", "rloo")
