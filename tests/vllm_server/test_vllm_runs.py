"""Runs on vLLM lose and double nothing, whatever is killed: the run itself (architecture's test 5), or its servers."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import runs
from runs import check_whole

import tiny
from vllm_server.engines import ARGS
from vllm_server.serving import SHAPE, VllmServer, alive, command, descendants, memory_files, named, wait_until

pytestmark = pytest.mark.vllm

LOGGED = Path(__file__).with_name("logged_remote.py")
PATIENCE_S = 300.0
OWN: dict[str, Any] = {
    "num_servers": 1,
    "server": "vllm",
    "vllm_args": ARGS,
    "kv_memory_gb": 0.2,
    "server_timeout_s": 30.0,
}


class Killed:
    """A run on servers, and all that they gave to its processes."""

    def __init__(self, folder: Path, **engine: Any) -> None:
        tiny.save(folder / "model", **SHAPE)
        self.folder, self.run_dir = folder, folder / "run"
        self.recipe = self.write(**engine)
        self.logs: list[Path] = []
        self.process: runs.Run | None = None

    def write(self, **engine: Any) -> Path:
        return runs.write(
            self.folder,
            steps=10_000,
            rows=20_000,
            engine={"kind": "remote", "max_running": 6, "kv_memory_gb": None, **engine},
            rollout={
                "interrupt": "on_weight_update",
                "overlap": True,
                "max_new_tokens": 96,
                "on_stale": "finish_first",  # so that what is dropped was dropped for a server
            },
            checkpoint={"every_steps": 7, "journal_s": 0.1, "save_final_model": False},
            eval={"num_tasks": 0},
        )

    def start(self, *words: str) -> runs.Run:
        resume = ["--resume"] if self.logs else []
        self.logs.append(self.folder / f"tokens-{len(self.logs)}.jsonl")
        said = self.folder / f"said-{len(self.logs)}"
        self.process = runs.start(self.logs[-1], "train", self.recipe, *resume, *words, log=said, script=LOGGED)
        return self.process

    def said(self) -> str:
        return (self.folder / f"said-{len(self.logs)}").read_text()[-3000:]

    def rows(self) -> list[dict[str, Any]]:
        return runs.json_lines(self.run_dir / "metrics.jsonl")

    def until(self, true: Callable[[], Any]) -> Any:
        """What `true` says as soon as that is true, while the run goes on."""

        def lives() -> Any:
            assert self.process is not None and self.process.poll() is None, self.said()
            return true()

        return wait_until(lives, PATIENCE_S, self.said)

    def steps(self, more: int) -> None:
        """Wait for so many more steps."""
        before = len(self.rows())
        self.until(lambda: len(self.rows()) >= before + more)

    def kill_server(self, victim: str, num: int) -> None:
        """Kill -9 of one process of the server that it started, for the time number `num`: all of them end, and leave
        nothing in shared memory."""
        assert self.process is not None
        pids = served_below(self.process.pid)
        everyone = {*descendants(pids["serve"]), pids["serve"]}
        files = memory_files(everyone)
        assert files and pids.keys() == {"serve", "api", "core", "worker"}
        os.kill(pids[victim], signal.SIGKILL)
        self.until(lambda: not alive(everyone))
        self.until(lambda: not any(file.exists() for file in files))
        self.until(lambda: self.last("engine/ejections") >= num)

    def last(self, key: str) -> float:
        """This metric in the last row of the present process; 0 where there is none yet."""
        rows = self.rows()
        return rows[-1].get(key, 0.0) if rows else 0.0

    def finish(self, server: VllmServer) -> None:
        """Resume it on this server for two more steps. Nothing was lost or doubled, over all of its processes."""
        last = len(self.rows()) + 2
        self.write(urls=[server.url])
        process = self.start("--train.num_steps", str(last))
        assert process.wait(PATIENCE_S) == 0, self.said()
        check_whole(self.run_dir, last)
        rows = self.rows()
        assert all(row["engine/span_mismatches"] == 0 for row in rows)
        got = self.got()
        trained = [record for record in runs.records(self.run_dir) if record["outcome"] == "trained"]
        assert trained
        for record in trained:
            tokens, logprobs = got[record["rollout_id"]]
            assert record["token_ids"] == tokens, "what is trained is what came, in that order"
            np.testing.assert_allclose(record["logprobs"], logprobs, rtol=1e-6)

    def got(self) -> dict[str, tuple[list[int], list[float]]]:
        """Tokens and log-probs of each rollout, put together from what came.

        Within a process every request goes on from the last token that came: none is lost, none sampled again. A new
        process goes on from a token that the one before it had, and has all that was in the journal.
        """
        got: dict[str, tuple[list[int], list[float]]] = {}
        written: dict[str, int] = {}  # tokens of each rollout that are in the journal
        for log in self.logs:
            asked: dict[str, int] = {}  # those at the last beat, which may be under way to the journal
            begun: set[str] = set()
            for line in runs.json_lines(log):
                if line["kind"] == "beat":
                    written |= asked
                    asked = {rollout: len(got[rollout][0]) for rollout in begun}
                    continue
                rollout, start = line["rollout"], line["start"]
                tokens, logprobs = got.setdefault(rollout, ([], []))
                if rollout not in begun:
                    assert written.get(rollout, 0) <= start <= len(tokens), (log.name, rollout)
                    begun.add(rollout)
                    del tokens[start:], logprobs[start:]
                assert start == len(tokens), (log.name, rollout, line["kind"])
                if line["kind"] == "tokens":
                    tokens += line["tokens"]
                    logprobs += line["logprobs"]
        return got


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., Killed]]:
    made: list[Killed] = []

    def make(**engine: Any) -> Killed:
        made.append(Killed(tmp_path, **engine))
        return made[-1]

    yield make
    for each in made:
        if each.process is not None:
            each.process.kill()
            each.process.wait(PATIENCE_S)


def children_of(process: runs.Run) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def served_below(pid: int) -> dict[str, int]:
    """The processes of the one vLLM server that this run has started; none of those that are not there yet."""
    found = {"serve": [child for child in descendants(pid) if " serve " in command(child)]}
    return {"serve": min(found["serve"]), **named(pid)} if found["serve"] else {}


def test_the_run_is_killed_at_random_moments(
    server: VllmServer, run: Callable[..., Killed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on with the server that it had: its old requests are gone there, and its weights come before work.

    The moment may be within an update: that is so at the start.
    """
    monkeypatch.setenv("ROLLOVER_SERVER_TOKEN", server.token)
    server.json("POST", "/pause?mode=keep")
    server.json("POST", "/start_weight_update")
    rng = random.Random(5)
    killed = run(urls=[server.url])
    for _ in range(4):
        process = killed.start()
        killed.steps(1 + rng.randrange(3))
        time.sleep(rng.random() * 0.7)
        children = children_of(process)
        assert children
        process.kill()
        process.wait()
        assert not psutil.wait_procs(children, timeout=PATIENCE_S)[1], "a child outlived the run"
    killed.finish(server)


def test_a_server_is_killed_three_times_beside_another(
    server: VllmServer, run: Callable[..., Killed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any process of it, at random moments: its rollouts go on at the other one, or at itself when it is back."""
    monkeypatch.setenv("ROLLOVER_SERVER_TOKEN", server.token)
    rng = random.Random(6)
    killed = run(urls=[server.url], **OWN)
    process = killed.start()
    victims = ["serve", "core", "worker"]
    rng.shuffle(victims)
    for num, victim in enumerate(victims, 1):
        killed.until(lambda: killed.last("engine/servers") == 2)
        killed.steps(rng.randrange(3))
        killed.kill_server(victim, num)
    killed.steps(2)
    last = killed.rows()[-1]
    assert last["engine/lost_requests"] > 0 and last["tokens/dropped"] == 0
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_S) == 130, killed.said()
    killed.finish(server)


def test_training_goes_on_when_its_only_server_is_back(
    server: VllmServer, run: Callable[..., Killed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And when the run is killed, its server ends with it, and leaves nothing."""
    killed = run(**OWN)
    process = killed.start()
    killed.steps(2)
    killed.kill_server("api", 1)
    killed.steps(2)
    last = killed.rows()[-1]
    assert last["engine/servers"] == 1 and last["engine/lost_requests"] > 0 and last["tokens/dropped"] == 0
    everyone = descendants(process.pid)
    files = memory_files(everyone)
    assert files
    process.kill()
    process.wait()
    wait_until(lambda: not alive(everyone))
    wait_until(lambda: not any(file.exists() for file in files))
    monkeypatch.setenv("ROLLOVER_SERVER_TOKEN", server.token)
    killed.finish(server)
