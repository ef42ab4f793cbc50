"""Credit: closed forms, a 3 x 3 example by hand, merged == apart, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_trainer import TOGETHER, gradient, trainer

from local_trainer import build_batch
from rollover import Played, TrajectoryGroup, ready_episodes
from rollover import live_objects as live
from rollover.config import AlgorithmConfig, WorkflowConfig
from rollover.config.traits import LOSSES, Aggregation
from rollover.trainer.batch import Batch
from rollover.trainer.objective import Counts
from rollover.types import Group, Reward, Sample, SamplingParams, Segment, StopReason, Task

TASK = Task("t0", "test", "mine", prompt="x")
EOS = StopReason.EOS


def sampled(*tokens: int, stop: StopReason = EOS, logprob: float = -4.0) -> Segment:
    ids = np.array(tokens, dtype=np.int32)
    return Segment(ids, np.full(len(ids), logprob, dtype=np.float32), 0, SamplingParams(), stop)


def written(*tokens: int) -> Segment:
    ids = np.array(tokens, dtype=np.int32)
    return Segment(ids, np.zeros(len(ids), np.float32), 0, SamplingParams(), StopReason.PAUSED, trainable=False)


def turns(*lengths: int) -> list[Segment]:
    """Segments of so many turns, with one token of the environment between two."""
    out: list[Segment] = []
    for i, n in enumerate(lengths):
        out += [*([written(7)] if i else []), sampled(*range(10, 10 + n))]
    return out


def played(role: str, score: float | None, *lengths: int, **reward: Any) -> Played:
    """One context of turns of these lengths."""
    return Played(
        [((5, 6), turns(*(lengths or (1,))))], Reward(score, error=None if score is not None else "e", **reward), role
    )


def built(groups: Group | list[Group], workflow: dict[str, Any] | None = None, **algorithm: Any) -> Batch:
    config = AlgorithmConfig.model_validate({"advantage": "dr_grpo", **algorithm})
    groups = groups if isinstance(groups, list) else [groups]
    return build_batch(groups, config, workflow=WorkflowConfig.model_validate(workflow or {}))


def advantages(batch: Batch) -> dict[str, list[float]]:
    """rollout_id -> advantages of its loss tokens, of those that have any."""
    return {s.rollout_id: [float(a) for a in s.advantages[s.mask]] for s in batch.samples if s.mask.any()}


# 3 episodes x 3 roles. By hand: mean of the solvers (3 + 0 + 0) / 3 = 1, of the judges (1 + 2 + 6) / 3 = 3; the third
# role is not trained.
def three_by_three() -> Group:
    scores = {"solver": (3.0, 0.0, 0.0), "judge": (1.0, 2.0, 6.0), "title": (9.0, 0.0, 0.0)}
    return ready_episodes(4, TASK, [[played(role, of[i], 2) for role, of in scores.items()] for i in range(3)])


def test_three_episodes_of_three_roles_by_hand() -> None:
    roles = {"solver": {}, "judge": {"weight": 0.5}, "title": {"trained": False}}
    batch = built(three_by_three(), {"roles": roles})
    assert advantages(batch) == {
        "4-0": [2.0, 2.0], "4-0.1.0": [-1.0, -1.0],
        "4-1": [-1.0, -1.0], "4-1.1.0": [-0.5, -0.5],
        "4-2": [-1.0, -1.0], "4-2.1.0": [1.5, 1.5],
    }  # fmt: skip
    assert {(m.rollout.role, m.reason) for m in batch.masked.rollouts} == {("title", "untrained_role")}
    # Of its own estimator: the judge's advantage is divided by the standard deviation sqrt((4 + 1 + 9) / 2).
    batch = built(three_by_three(), {"roles": roles | {"judge": {"advantage": "grpo"}}})
    std = 7**0.5 + 1e-4
    assert advantages(batch)["4-2.1.0"] == pytest.approx([3 / std] * 2, rel=1e-6)
    assert advantages(batch)["4-2"] == [-1.0, -1.0], "and the solver's is not"


def test_three_trajectories_of_up_to_three_turns_by_hand() -> None:
    """gamma 1/2. Returns: (1 + 2/2 + 4/4, 2 + 4/2, 4) = (3, 4, 4); (0 + 2/2, 2) = (1, 2); (1). Their mean is 15/6."""
    episodes = [
        [played("policy", 3.0, 1, 2, 1, turns=[1.0, 2.0, 1.0])],  # the score is added to the last: 1 + 3 = 4
        [played("policy", 2.0, 1, 1)],  # no rewards of turns: 0 each
        [played("policy", 0.0, 3, turns=[1.0])],
    ]
    batch = built(ready_episodes(0, TASK, episodes), {"credit": "turn_returns", "turn_gamma": 0.5})
    assert advantages(batch) == {"0-0": [0.5, 1.5, 1.5, 1.5], "0-1": [-1.5, -0.5], "0-2": [-1.5, -1.5, -1.5]}
    assert [a for s in batch.samples for a in s.advantages[~s.mask]] == [0.0] * 3, "an environment's token has none"


@given(
    st.lists(
        st.lists(st.tuples(st.integers(1, 3), st.integers(-4, 4)), min_size=1, max_size=4), min_size=2, max_size=4
    ),
    st.sampled_from([0.0, 0.5, 1.0]),
)
def test_turn_returns_are_their_closed_form(episodes: list[list[tuple[int, int]]], gamma: float) -> None:
    groups = ready_episodes(
        0, TASK, [[played("policy", 2.0, *(n for n, _ in of), turns=[float(r) for _, r in of])] for of in episodes]
    )
    returns = []
    for of in episodes:
        r = [float(x) for _, x in of]
        r[-1] += 2.0
        returns.append([sum(gamma ** (j - k) * r[j] for j in range(k, len(r))) for k in range(len(r))])
    mean = np.mean([g for of in returns for g in of])
    expected = {
        f"0-{i}": [g - mean for g, (n, _) in zip(returns[i], of, strict=True) for _ in range(n)]
        for i, of in enumerate(episodes)
    }
    found = advantages(built(groups, {"credit": "turn_returns", "turn_gamma": gamma}))
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name] == pytest.approx(values, abs=1e-5)


def test_role_without_comparison_leaves_the_loss() -> None:
    episodes = [[played("a", 1.0), played("b", 1.0)], [played("a", 0.0), played("b", None)]]
    batch = built(ready_episodes(0, TASK, episodes))
    assert advantages(batch) == {"0-0": [0.5], "0-1": [-0.5]}
    assert [(m.rollout.rollout_id, m.reason) for m in batch.masked.rollouts] == [
        ("0-0.1.0", "alone_in_role"), ("0-1.1.0", "alone_in_role"),
    ]  # fmt: skip
    # Where nothing is compared, one is enough.
    assert advantages(
        built(ready_episodes(0, TASK, episodes), {"roles": {"a": {}, "b": {"advantage": "reinforce_plus_plus"}}})
    )


def test_statistics_over_the_batch_are_those_of_one_role() -> None:
    """Rewards of a judge in the thousands do not flatten the solver's."""
    by_group = [(0.0, 1.0), (2.0, 3.0)]
    groups = [
        ready_episodes(g, TASK, [[played("a", a), played("b", 1000.0 * a)] for a in scores])
        for g, scores in enumerate(by_group)
    ]
    found = advantages(built(groups, advantage="reinforce_plus_plus"))
    solvers = [ready_episodes(g, TASK, [[played("a", a)] for a in scores]) for g, scores in enumerate(by_group)]
    alone = advantages(built(solvers, advantage="reinforce_plus_plus"))
    assert {i: a for i, a in found.items() if ".1." not in i} == alone


def test_rollouts_of_trajectory_share_advantage_and_sequence() -> None:
    contexts = Played([((5,), turns(2)), ((5, 10, 11), turns(1))], Reward(1.0), "a")
    batch = built(ready_episodes(0, TASK, [[contexts], [played("a", 0.0)]]))
    assert advantages(batch) == {"0-0": [0.5, 0.5], "0-0.0.1": [0.5], "0-1": [-0.5]}
    assert [s.sequence_id for s in batch.samples] == ["0-0", "0-0", "0-1"]
    assert len(Counts.from_samples(batch.samples).sequence_tokens) == 2


# Merged == apart


def split_in_two(merged: bool) -> list[Sample]:
    """Two trajectories of two turns, and one of one: each in one Rollout, or the second turn in one of its own."""

    def trajectory(prompt: tuple[int, ...], first: Segment, answer: Segment, second: Segment, score: float) -> Played:
        together = [(prompt, [first, answer, second])]
        context = (*prompt, *first.token_ids.tolist(), *answer.token_ids.tolist())
        return Played(together if merged else [(prompt, [first]), (context, [second])], Reward(score))

    one = trajectory((5, 6), sampled(20, 21, 22), written(30), sampled(23, 24), 1.0)
    two = trajectory((5, 6), sampled(25, logprob=-5), written(31, 32), sampled(26, 27, 28, logprob=-3.9), 0.0)
    short = Played([((5, 6), [sampled(29, 40)])], Reward(0.25))
    group = ready_episodes(0, TASK, [[one], [two], [short]])
    return built([group, ready_episodes(1, TASK, [[short], [two]])]).samples


# gspo, luspo, gmpo and vespo have one ratio a row, clip_cov and kl_cov choose among the tokens of a micro-batch: the
# row is what they are about.
TOKEN_LOSSES = sorted(LOSSES.keys() - {"gspo", "luspo", "gmpo", "vespo", "clip_cov", "kl_cov"})


def one_gradient(**algorithm: Any) -> torch.Tensor:
    of = trainer(algorithm, learning_rate=1e-3)
    together, apart = (gradient(of, split_in_two(merged), 16)[1] for merged in (True, False))
    assert together.norm() > 0
    assert float((together - apart).norm() / together.norm()) < 1e-5
    return together


@pytest.mark.parametrize("loss", TOKEN_LOSSES)
def test_merged_contexts_have_equal_gradient(loss: str) -> None:
    one_gradient(loss=loss)


@pytest.mark.parametrize(
    "options",
    [
        *({"aggregation": of} for of in get_args(Aggregation)),
        {"aggregation": "seq-mean-token-mean", "entropy_coef": 0.1},
        {"aggregation": "seq-mean-token-mean", "proximal": "behavior"},
        {"aggregation": "seq-mean-token-mean", "correction": "none"},
    ],
    ids=str,
)
def test_merged_contexts_have_equal_gradient_with(options: dict[str, Any]) -> None:
    one_gradient(**options)


@given(st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=4), min_size=2, max_size=4), st.integers(0, 9))
@settings(max_examples=25)
def test_merged_and_apart_have_the_same_counts_and_advantages(lengths: list[list[int]], seed: int) -> None:
    scores = np.random.default_rng(seed).integers(0, 3, len(lengths))

    def group(merged: bool) -> Group:
        episodes = []
        for of, score in zip(lengths, scores, strict=True):
            segments = [sampled(*range(n)) for n in of]
            contexts = [((5,), segments)] if merged else [((5,), [s]) for s in segments]
            episodes.append([Played(contexts, Reward(float(score)))])
        return ready_episodes(0, TASK, episodes)

    for workflow in ({}, {"credit": "turn_returns"}):
        together, apart = (built(group(merged), workflow, advantage="grpo") for merged in (True, False))
        streams = [
            [
                np.concatenate([s.advantages for s in b.samples if s.sequence_id == f"0-{i}"])
                for i in range(len(lengths))
            ]
            for b in (together, apart)
        ]
        assert all(np.array_equal(a, b) for a, b in zip(*streams, strict=True))
        one, other = Counts.from_samples(together.samples), Counts.from_samples(apart.samples)
        assert one == other


# Advantages that come with the trajectories


def test_precomputed_advantages_by_trajectory_turn_or_token() -> None:
    given = [0.25, [1.0, [0.5, -1.0]], np.array([3, 4])]
    episodes = [[played("a", 0.0, 1, 2, advantages=of)] for of in given]
    batch = built(ready_episodes(0, TASK, episodes), advantage="precomputed")
    assert advantages(batch) == {"0-0": [0.25] * 3, "0-1": [1.0, 0.5, -1.0], "0-2": [3.0, 4.0, 4.0]}
    assert batch.samples[1].advantages.tolist() == [1.0, 0.0, 0.5, -1.0], "an environment's token has none"
    # Over two contexts, with a role beside it that has an estimator, and a weight.
    contexts = Played([((5,), turns(1)), ((5, 6), turns(2))], Reward(0.0, advantages=[1.0, [2.0, 3.0]]), "teacher")
    roles = {"teacher": {"advantage": "precomputed", "weight": 2.0}, "a": {}}
    group = ready_episodes(0, TASK, [[contexts, played("a", 1.0)], [played("a", 0.0)]])
    assert advantages(built(group, {"roles": roles})) == {
        "0-0": [2.0], "0-0.0.1": [4.0, 6.0], "0-0.1.0": [0.5], "0-1": [-0.5],
    }  # fmt: skip


def test_unscored_trajectory_with_advantages_is_not_trained() -> None:
    episodes = [[played("a", None, advantages=1.0)], [played("a", 0.0, advantages=1.0)]]
    assert advantages(built(ready_episodes(0, TASK, episodes), advantage="precomputed")) == {"0-1": [1.0]}


def of_solver(**reward: Any) -> Callable[[], Group]:
    """A good episode, and one of two turns, of 2 and 1 tokens, with this reward."""
    good: dict[str, Any] = {"advantages": 1.0} if "advantages" in reward or reward.pop("none", False) else {}
    return lambda: ready_episodes(
        3, TASK, [[played("solver", 1.0, 1, **good)], [played("solver", 1.0, 2, 1, **reward)]]
    )


WHERE = r"trajectory 0 \(role 'solver'\) of episode 3-1"


@pytest.mark.parametrize(
    ("make", "advantage", "message"),
    [
        (of_solver(advantages=[1.0]), "precomputed", f"{WHERE}: 1 advantages for 2 turns. Give one"),
        (of_solver(advantages=[[1.0], 2.0]), "precomputed", f"turn 0 of {WHERE}.*1 advantages for 2 tokens. Give one"),
        (of_solver(advantages=[1.0, None]), "precomputed", f"turn 1 of {WHERE}.* has no advantage: give every turn"),
        (of_solver(advantages=[[1.0, None], 1.0]), "precomputed", f"token 1 of turn 0 of {WHERE}.* has no advantage"),
        (of_solver(advantages=float("nan")), "precomputed", f"{WHERE}.* has the advantage nan: it must be a finite"),
        (of_solver(advantages=[1.0, "2"]), "precomputed", f"turn 1 of {WHERE}.* has the advantage '2'"),
        (of_solver(advantages=[1.0, True]), "precomputed", f"turn 1 of {WHERE}.* has the advantage True"),
        (of_solver(none=True), "precomputed", f"{WHERE}.* it has no advantages.*Give Reward.advantages"),
        (of_solver(advantages=1.0), "grpo", r"episode 3-0 has precomputed advantages.*workflow.roles.solver"),
        (of_solver(turns=[1.0]), "grpo", f"{WHERE}: 1 rewards for 2 turns. Give one for each"),
        (of_solver(turns=[1.0, float("nan")]), "grpo", f"turn 1 of {WHERE}.* has the reward nan"),
    ],
)
def test_what_does_not_fit_is_refused_with_role_turn_and_fix(
    make: Callable[[], Group], advantage: str, message: str
) -> None:
    workflow = {"credit": "turn_returns"} if "reward" in message else {}
    with pytest.raises(ValueError, match=message):
        built(make(), workflow, advantage=advantage)


@pytest.mark.parametrize("num", [1, 3])
def test_wrong_number_of_advantages_counts_all_contexts(num: int) -> None:
    contexts = Played([((5,), turns(1)), ((5, 6), turns(1))], Reward(0.0, advantages=[1.0] * num), "solver")
    group = ready_episodes(3, TASK, [[contexts], [played("solver", 1.0, advantages=0.0)]])
    with pytest.raises(ValueError, match=rf"role 'solver'\) of episode 3-0: {num} advantages for 2 turns. Give one"):
        built(group, advantage="precomputed")
    group.rollouts[0].reward = Reward(0.0, advantages=[1.0, 1.0])
    group.rollouts[1].reward = Reward(0.0, advantages=[])
    with pytest.raises(ValueError, match=r"rollout 3-0: 2 advantages for 1 turns"):
        built(group, advantage="precomputed")


def test_greedy_baseline_is_mean_over_trajectories() -> None:
    """Not that of the one that comes last."""
    group = ready_episodes(0, TASK, [[played("a", 3.0), played("a", 1.0)], [played("a", 1.0), played("a", 0.0)]])
    for rollout in group.rollouts[2:]:
        rollout.greedy = True
    assert advantages(built(group, advantage="remax")) == {"0-0": [2.5], "0-0.1.0": [0.5]}


# Groupings of one's own


GROUPINGS = f"""{TOGETHER}
from dataclasses import replace

def all_of(episodes):
    return [t for e in episodes for t in e.trajectories]

def within(episodes):
    \"\"\"Solvers are compared with those of their own episode, judges with all others.\"\"\"
    solvers = [[t for t in e.trajectories if t.role == "solver"] for e in episodes]
    judges = [t for t in all_of(episodes) if t.role == "judge"]
    return [*map(TrajectoryGroup, map(tuple, solvers)), TrajectoryGroup(tuple(judges))]

def wrong(episodes):
    return "groups"

def some_together(episodes):
    return together(episodes) if episodes[0].group_id == 0 else within(episodes)

def foreign(episodes):
    from rollover.types import Rollout
    other = Rollout(9, 9, episodes[0].task)
    return [TrajectoryGroup((*all_of(episodes), replace(all_of(episodes)[0], rollouts=(other,))))]
"""


OF = " of episode 3-0"


@pytest.fixture
def groupings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(GROUPINGS)


def hierarchical(scores: Sequence[tuple[float, float, float]]) -> Group:
    roles = ("solver", "solver", "judge")
    return ready_episodes(3, TASK, [[played(r, s) for r, s in zip(roles, of, strict=True)] for of in scores])


@pytest.mark.usefixtures("groupings")
def test_a_grouping_of_ones_own() -> None:
    group = hierarchical([(3.0, 1.0, 5.0), (9.0, 9.0, 7.0)])
    assert advantages(built(group, {"group_by": "mine.py:within"})) == {
        "3-0": [1.0], "3-0.1.0": [-1.0], "3-0.2.0": [-1.0],
        "3-1": [0.0], "3-1.1.0": [0.0], "3-1.2.0": [1.0],
    }  # fmt: skip
    # By role, which is the default, it is another one.
    assert advantages(built(group))["3-0"] == [-2.5]


@pytest.mark.usefixtures("groupings")
def test_roles_compared_in_some_groups_share_the_batch() -> None:
    """Scores that a grouping compares have one scale: (r - mean) / std over the batch, whichever group they are in."""
    scores = [(3.0, 1.0, 5.0), (9.0, 8.0, 7.0)]
    roles = ("solver", "solver", "judge")
    groups = [
        ready_episodes(g, TASK, [[played(r, s) for r, s in zip(roles, of, strict=True)] for of in scores])
        for g in (0, 1)
    ]
    found = advantages(built(groups, {"group_by": "mine.py:some_together"}, advantage="reinforce_plus_plus"))
    assert [a for i, a in sorted(found.items()) if i.startswith("0-")] == [
        a for i, a in sorted(found.items()) if i.startswith("1-")
    ]
    assert sum(a for (a,) in found.values()) == pytest.approx(0.0, abs=1e-5)


@pytest.mark.usefixtures("groupings")
@pytest.mark.parametrize(
    ("function", "judge", "message"),
    [
        ("foreign", {}, "returned the rollout 9-9, which is not in these"),
        ("wrong", {}, r"returned 'groups' \(str\); it must"),
        ("together", {"trained": False}, rf"2 \(role 'judge'\){OF}, whose role is not trained .*: leave it out"),
        ("together", {"advantage": "rloo"}, r"compares .*role 'solver'.* with .*role 'judge'.*'dr_grpo' and 'rloo'"),
    ],
)  # fmt: skip
def test_a_grouping_that_is_no_partition_is_refused_by_name(function: str, judge: dict, message: str) -> None:
    roles = {"roles": {"solver": {}, "judge": judge}} if judge else {}
    with pytest.raises(ValueError, match=message):
        built(hierarchical([(3.0, 1.0, 5.0), (9.0, 9.0, 7.0)]), {"group_by": f"mine.py:{function}", **roles})


@given(st.data())
@settings(max_examples=30)
def test_any_partition_is_taken_and_nothing_else(data: st.DataObject) -> None:
    """Each trajectory in one of up to three groups; then one is dropped, or put in twice."""
    group = hierarchical([(1.0, 2.0, 3.0), (4.0, 5.0, 6.0)])
    places = data.draw(st.lists(st.integers(0, 2), min_size=6, max_size=6))
    spoil = data.draw(st.sampled_from(["no", "lose", "double"]))
    victim = data.draw(st.integers(0, 5))

    def grouping(episodes: Sequence[Any]) -> list[TrajectoryGroup]:
        of_all = [t for e in episodes for t in e.trajectories]
        parts: list[list[Any]] = [[], [], []]
        for i, (t, k) in enumerate(zip(of_all, places, strict=True)):
            parts[k] += [] if (i, spoil) == (victim, "lose") else [t]
        if spoil == "double":
            parts[0].append(of_all[victim])
        return [TrajectoryGroup(tuple(part)) for part in parts]

    spec = live.hold(grouping, "grouping")
    try:
        if spoil == "no":
            batch = built(group, {"group_by": spec}, advantage="reinforce_plus_plus")
            assert set(advantages(batch)) == {r.rollout_id for r in group.rollouts}
            return
        times = "2 times; it must" if spoil == "double" else "; it must return"
        where = rf"trajectory {victim % 3} .*episode 3-{victim // 3}"
        with pytest.raises(ValueError, match=rf"returned .*{where}.*{times}"):
            built(group, {"group_by": spec})
    finally:
        live.release(spec)


# Roles


def test_a_role_that_is_not_declared_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"role 'judge'.*workflow.roles has no 'judge', it has solver, judg.*Add \[workflow.roles.judge\]",
    ):
        built(hierarchical([(1.0, 1.0, 1.0)] * 2), {"roles": {"solver": {}, "judg": {}}})
