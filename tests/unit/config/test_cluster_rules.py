"""[cluster]: what is refused, what has no effect, and what `rollover plan` takes from the rest of the configuration."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import rollover
from rollover.config import Config, ConfigError
from rollover.config.load import load_config
from rollover.config.recipes import recipe
from rollover.run.setup import EvalComponents

SERVERS = {"kind": "remote", "num_servers": 2, "server": "vllm", "weights_dir": "/w"}


def refused(**tables: Any) -> str:
    with pytest.raises(ValueError) as error:
        Config.model_validate(tables)
    return str(error.value)


@pytest.mark.parametrize(
    "key", ["num_nodes", "gpus_per_node", "cpus_per_node", "gpus_per_server", "cpus_per_process", "reward_nodes"]
)
def test_what_is_about_nodes_needs_them(key: str) -> None:
    assert f"cluster.{key} has no effect" in refused(cluster={key: 2}, engine=SERVERS)
    assert Config.model_validate({"cluster": {"type": "ray", key: 2}, "engine": SERVERS})


def test_only_vllm_splits_a_model_over_gpus() -> None:
    said = refused(cluster={"type": "ray", "gpus_per_server": 2}, engine=SERVERS | {"server": "embedded"})
    assert "cluster.gpus_per_server has no effect" in said


@pytest.mark.parametrize("arg", ["--tensor-parallel-size=2", "-tp", "--pipeline-parallel-size"])
def test_the_gpus_of_a_server_are_told_in_one_place(arg: str) -> None:
    engine = SERVERS | {"vllm_args": [arg]}
    assert "cluster.gpus_per_server" in refused(cluster={"type": "ray"}, engine=engine)
    assert Config.model_validate({"engine": engine})


def test_servers_on_several_nodes_need_a_folder_for_weights() -> None:
    engine = {name: value for name, value in SERVERS.items() if name != "weights_dir"}
    assert "engine.weights_dir" in refused(cluster={"type": "ray", "num_nodes": 2}, engine=engine)
    assert Config.model_validate({"cluster": {"type": "ray"}, "engine": engine})


@pytest.mark.parametrize(
    "address", ["auto", "local", "head", "head:", ":6379", "head:0", "head:70000", "ray://head:10001"]
)
def test_the_address_of_a_cluster_is_a_host_and_a_port(address: str) -> None:
    said = refused(cluster={"type": "ray", "address": address})
    assert f"cluster.address = '{address}' is not host:port" in said
    for right in ("head:6379", "10.0.0.1:6379", "[::1]:6379"):
        assert Config.model_validate({"cluster": {"type": "ray", "address": right}})


# What is planned only


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"cluster.num_nodes": 2}, "without cluster.address"),
    ],
)
def test_what_is_planned_only_is_refused_and_leaves_nothing_behind(
    settings: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said):
        rollover.Session(config=["quickstart", {"cluster.type": "ray", **settings}], dir=str(tmp_path / "run"))
    assert list(tmp_path.iterdir()) == []


def test_an_evaluation_is_on_this_machine() -> None:
    config = Config.model_validate({"cluster": {"type": "ray"}})
    with pytest.raises(ConfigError, match="evaluate and sample on this machine"):
        asyncio.run(EvalComponents.build(config, None))


# [plan] where it does not say


def planned(*overrides: tuple[str, str]) -> tuple[int, int, str, str]:
    resolved = load_config([recipe("quickstart")], overrides)
    plan, origin = resolved.config.plan, resolved.origin
    return plan.engines, plan.trainers, origin.get("plan.engines", ""), origin.get("plan.trainers", "")


REMOTE = ("engine.kind", "remote")
URLS = ("engine.urls", '["http://a:1", "http://b:1"]')


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        ([], (1, 0, "", "")),
        ([REMOTE, ("engine.num_servers", "3")], (3, 0, "derived from engine.num_servers", "")),
        ([REMOTE, URLS], (2, 1, "derived from engine.urls", "derived from engine.urls")),
        (
            [REMOTE, URLS, ("engine.num_servers", "3")],
            (5, 1, "derived from engine.num_servers", "derived from engine.urls"),
        ),
        (
            [REMOTE, ("engine.num_servers", "3"), ("cluster.type", "ray")],
            (3, 1, "derived from engine.num_servers", "derived from cluster.type"),
        ),
        (
            [REMOTE, URLS, ("backend.type", "ranks"), ("backend.num_ranks", "6")],
            (2, 6, "derived from engine.urls", "derived from backend.num_ranks"),
        ),
        ([("engine.device", "cuda:1")], (1, 1, "", "derived from engine.device")),
        (
            [REMOTE, URLS, ("plan.engines", "7"), ("plan.trainers", "0")],
            (7, 0, "command line", "command line"),
        ),
    ],
)
def test_engines_and_trainers_are_those_of_the_configuration(overrides: Any, wanted: Any) -> None:
    assert planned(*overrides) == wanted
