"""`rollover train ... --dry-run`: what it prints, what it refuses, and that it loads nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollover import cli, system

SRC = Path(__file__).parents[3] / "src"
RAY = ["--cluster.type", "ray", "--cluster.cpus_per_node", "16", "--cluster.gpus_per_node", "8"]
VLLM = ["train", "vllm", "--dry-run", "--engine.weights_dir", "/w"]


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "cores", lambda: 4)


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert cli.main(words) == 0
    return capsys.readouterr().out.splitlines()


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(words) == 2
    out = capsys.readouterr()
    assert out.out == "" and "Traceback" not in out.err
    return out.err


@pytest.mark.parametrize(
    ("words", "roles"),
    [
        (["quickstart"], "controller with trainer and engine"),
        (["fully_async"], "controller with trainer and engine in a process of its own"),
        (["vllm"], "controller with trainer, vllm server 0"),
        (["vllm", "--engine.num_servers", "3", "--engine.server", "embedded", "--engine.vllm_args", "[]"],
         "controller with trainer, embedded servers 0 to 2"),
        (["quickstart", "--backend.type", "ranks"], "controller with engine, ranks 0 to 1"),
        (["vllm", "--backend.type", "ranks", "--backend.num_ranks", "1"], "controller, rank 0, vllm server 0"),
        (["quickstart", "--engine.kind", "mine.py:engine", "--backend.type", "mine:backend"],
         "controller with trainer (mine:backend) and engine (mine.py:engine)"),
        (["quickstart", "--backend.type", "tinker", "--model.lora.rank", "8"],
         "controller (a service trains and samples)"),
    ],
)  # fmt: skip
def test_without_a_cluster_everything_is_on_this_machine(
    capsys: pytest.CaptureFixture[str], words: list[str], roles: str
) -> None:
    lines = printed(capsys, "train", *words, "--dry-run", "--rewards.num_workers", "3")
    assert lines[1:-1] == ["nodes       this machine alone", f"  this machine  {roles}, reward pool of 3 workers"]


def test_it_says_what_would_be_trained(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "train", "quickstart", "--dry-run", "--rollout.group_size", "4")[0] == (
        "training    smollm2-135m: 28 steps of 8 groups x 4 rollouts"
    )


def test_servers_of_others_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    urls = '["http://a:1", "http://b:1"]'
    lines = printed(capsys, *VLLM, "--engine.urls", urls, "--engine.num_servers", "0")
    assert [line.split()[0] for line in lines if "others run" in line] == ["http://a:1", "http://b:1"]


def test_nodes_say_what_they_have_left(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--cluster.num_nodes", "3", "--engine.num_servers", "4", "--cluster.gpus_per_server", "4"]
    words += ["--rewards.num_workers", "4"]
    assert printed(capsys, *VLLM, *RAY, *words, "--cluster.address", "a:1")[1:-1] == [
        "nodes       3 nodes of 8 GPUs and 16 CPUs (cluster.num_nodes)",
        "  node-1  controller with trainer, vllm server 0, reward pool of 4 workers; 5 of 8 GPUs, 4 of 16 CPUs",
        "  node-2  vllm servers 1 to 2; 8 of 8 GPUs",
        "  node-3  vllm server 3; 4 of 8 GPUs",
    ]


def test_the_recipe_of_two_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, "train", str(SRC.parent / "configs" / "apr_qwen3_4b_2node.toml"), "--dry-run")
    assert lines[:-2] == [
        "training    Qwen/Qwen3-4B: 110 steps of 128 groups x 8 rollouts",
        "nodes       2 nodes of 8 GPUs and 64 CPUs (cluster.num_nodes)",
        "  node-1  controller, ranks 0 to 7, vllm servers 0 to 7, reward pool of 16 workers;"
        " 8 of 8 GPUs, 16 of 64 CPUs",
        "  node-2  ranks 8 to 15, vllm servers 8 to 15; 8 of 8 GPUs",
    ]
    assert lines[-2].startswith("refused     without --dry-run: ") and "without cluster.address" in lines[-2]


def test_dry_run_colocate_counts_gpus_of_ranks_and_servers_once(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--cluster.num_nodes", "2", "--cluster.address", "h:1", "--engine.weights_dir", "w"]
    many = ["--engine.num_servers", "3", "--cluster.gpus_per_server", "4", "--cluster.colocate", "true"]
    many += ["--rollout.overlap", "false", "--rollout.interrupt", "when_enough"]
    ranks = ["--backend.type", "ranks", "--backend.num_ranks", "12"]
    lines = printed(capsys, *VLLM, *RAY, *words, *many, *ranks)
    assert [line.partition("; ")[2].partition(",")[0] for line in lines[2:4]] == ["8 of 8 GPUs", "8 of 8 GPUs"]
    lines = printed(capsys, *VLLM, *RAY, *words, *many)
    assert lines[2].startswith("  node-1  controller with trainer, vllm server") and "4 of 8 GPUs" in lines[2]
    assert "5 GPUs are missing" in refused(
        capsys, *VLLM, *RAY, *many, "--backend.type", "ranks", "--backend.num_ranks", "13", "--engine.num_servers", "2"
    )


def test_the_recipe_of_sixteen_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, "train", "dapo_qwen2.5_32b", "--dry-run")
    assert lines[:3] == [
        "training    Qwen/Qwen2.5-32B: 320 steps of 512 groups x 16 rollouts",
        "nodes       16 nodes of 8 GPUs and 32 CPUs (cluster.num_nodes)",
        "  node-1   controller, ranks 0 to 7, reward pool of 16 workers; 8 of 8 GPUs, 16 of 32 CPUs",
    ]
    trains = [f"  node-{i + 1:<3} ranks {8 * i} to {8 * i + 7}; 8 of 8 GPUs" for i in range(1, 8)]
    generates = [f"  node-{i + 9:<3} vllm servers {2 * i} to {2 * i + 1}; 8 of 8 GPUs" for i in range(8)]
    assert lines[3:-2] == trains + generates
    assert lines[-2].startswith("refused     without --dry-run: ") and "without cluster.address" in lines[-2]


def test_a_laptop_is_a_cluster_of_one_node(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, *VLLM, "--cluster.type", "ray")[1:-1] == [
        "nodes       1 node of 4 CPUs (cluster.num_nodes)",
        "  node-1  controller with trainer, vllm server 0, reward pool of up to 3 workers; 1 of 4 CPUs",
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model.device", "cuda", "--cluster.gpus_per_node", "0"], "needs 1 GPU on its node node-1, which has 0"),
        (["--rewards.num_workers", "17"], "the largest has 16: 1 node is missing. More such nodes do not help"),
        (["--engine.num_servers", "12"], "so 5 GPUs are missing. 2 such nodes are enough (cluster.num_nodes)"),
        (["--cluster.gpus_per_server", "9"], "room for 0, so 9 GPUs are missing. More such nodes do not help"),
        (["--backend.type", "ranks", "--backend.num_ranks", "20"],
         "20 ranks (backend.num_ranks) of 1 GPU each: there is room for 7 beside 1 server, so 13 GPUs are missing. 3"),
        (["--cluster.reward_nodes", "3"], "2 nodes are missing. 3 such nodes are enough"),
    ],
)  # fmt: skip
def test_what_does_not_fit_says_what_is_missing(
    capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    error = refused(capsys, *VLLM, *RAY, *words)
    assert said in error and "[cluster] has 1 node of " in error


def test_the_configuration_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert "rollout.grup_size" in refused(capsys, "train", "quickstart", "--dry-run", "--rollout.grup_size", "4")


@pytest.mark.parametrize("recipe", ["quickstart", "apr_qwen3_4b_2node", "dapo_qwen2.5_32b"])
def test_nothing_heavy_is_loaded_and_nothing_is_written(tmp_path: Path, recipe: str) -> None:
    code = (
        f"import sys; from rollover import cli; code = cli.main(['train', '{recipe}', '--dry-run'])\n"
        "heavy = {'torch', 'transformers', 'ray', 'vllm', 'aiohttp'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "sys.exit(code)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(SRC)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "  controller" in done.stdout and list(tmp_path.iterdir()) == []
