"""The recipe calculator's class in a run: the policy calls its tool over turns, and what is told is not trained.

The tokens come from a script, as no tiny model calls tools. The rest is the real program: trainer, driver, environment.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import runs

import tiny
from rollover.cli import main
from rollover.track.records import read_rollouts

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] + ':' + m.content + '<eos>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'a:' }}{% endif %}"
)
SCRIPT = """
import json
import numpy as np
import torch
from fake_engine import FakeEngine
from rollover.types import Segment, StopReason

def call(*expressions):
    asked = [{"name": "calculate", "arguments": {"expression": text}} for text in expressions]
    return "".join(f"<tool_call>{json.dumps(one)}</tool_call>" for one in asked)

TURNS = (
    (call("2*3"), "It is 6."),
    (call("9**9**9", "1+") + "<tool_call>{", call("6"), "6"),  # the second one ends by a stop string
    ("I guess 7.",),
)

class Scripted(FakeEngine):
    def __init__(self, setup):
        super().__init__(lambda seed: 1)
        self.tokenizer = setup.model().tokenizer

    async def extend(self, request):
        told = self.tokenizer.decode(request.generated_ids)
        turns = TURNS[int(request.rollout_id.split("-")[1])]
        num = told.count("a:")
        text = turns[num]
        by_string = num == 1 and text.endswith("</tool_call>")
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        ids = ids if by_string else [*ids, self.tokenizer.eos_token_id]
        arrays = np.array(ids, dtype=np.int32), np.full(len(ids), -1.0, dtype=np.float32)
        reason = StopReason.STOP_STRING if by_string else StopReason.EOS
        return [Segment(*arrays, self.oldest_version, request.sampling, reason, start=len(request.generated_ids))]

def loss(t):
    if t.mask_BT.shape[1] > 20:  # not the made-up tokens of the start
        with open("in_the_loss.txt", "a") as file:
            print(int(t.mask_BT.sum()), file=file)
    return -t.ratio_BT * t.advantages_BT, t.mask_BT & False
"""


def recipe(folder: Path) -> Path:
    tiny.save(folder / "model", max_position_embeddings=4096)
    tokenizer = copy.deepcopy(tiny.tokenizer())
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "model")
    (folder / "script.py").write_text(SCRIPT)
    return runs.write(
        folder,
        steps=2,
        engine={"kind": f"{folder}/script.py:Scripted"},
        workflow={"environment": "rollover.recipes.calculator:Calculator"},
        rollout={"max_new_tokens": 1000, "interrupt": "never", "max_staleness": 0,
                 "in_flight_groups": 3, "stop": ["</tool_call>"]},
        tasks={"max_prompt_tokens": 2000},
        rewards={"function": "exact_match"},
        algorithm={"loss": f"{folder}/script.py:loss", "correction": "none"},
        train={"micro_batch_tokens": 4096},
    )  # fmt: skip


def texts(record: dict[str, Any]) -> list[tuple[str, bool]]:
    """(text, whether the policy sampled it) of each segment."""
    out, start = [], 0
    for segment in record["segments"]:
        end = start + segment["num_tokens"]
        out.append((tiny.tokenizer().decode(record["token_ids"][start:end]), segment["trainable"]))
        start = end
    return out


def test_the_policy_calls_its_tool_over_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = recipe(tmp_path)
    source = tmp_path / "tasks.jsonl"
    source.write_text("".join(json.dumps({"prompt": f"2*3? {i}", "answer": "6"}) + "\n" for i in range(50)))
    assert main(["train", str(file)]) == 0
    rows, records = runs.rows(tmp_path), runs.records(tmp_path / "run")
    assert len(records) == 2 * 9 and {r["outcome"] for r in records} == {"trained"}
    one, two, three = records[:3]
    asked = '<tool_call>{"name": "calculate", "arguments": {"expression": "%s"}}</tool_call>'
    assert texts(one) == [(asked % "2*3" + "<eos>", True), ("\nt:6<eos>\na:", False), ("It is 6.<eos>", True)]
    assert texts(two) == [
        (asked % "9**9**9" + asked % "1+" + "<tool_call>{<eos>", True),
        (
            "\nt:error: the number is too large<eos>\nt:error: it is no arithmetic expression<eos>"
            "\nt:error: the call cannot be read: </tool_call> is missing<eos>\na:",
            False,
        ),
        (asked % "6", True),
        ("<eos>\nt:6<eos>\na:", False),
        ("6<eos>", True),
    ]
    assert texts(three) == [("I guess 7.<eos>", True)]
    assert [r["score"] for r in (one, two, three)] == [1.0, 1.0, 0.0]
    counted = {key: rows[-1][key] for key in rows[-1] if key.startswith(("tools/", "episodes/"))}
    assert counted.pop("tools/time_s") > 0
    assert counted == counted | {
        "tools/calls": 6 + 6 * 4, "tools/malformed": 6, "tools/errors": 12, "tools/timeouts": 0,
        "tools/left_behind": 0, "episodes/done": 18, "episodes/max_turns": 0, "episodes/length": 0,
    }  # fmt: skip

    groups = [group for step in read_rollouts(tmp_path / "run" / "rollouts") for group in step]
    segments = [segment for group in groups for rollout in group.rollouts for segment in rollout.segments]
    sampled = sum(len(segment) for segment in segments if segment.trainable)
    told = sum(len(segment) for segment in segments if not segment.trainable)
    assert told > 900 and rows[-1]["tokens/trained"] == rows[-1]["tokens/generated"] == sampled
    in_the_loss = list(map(int, Path("in_the_loss.txt").read_text().split()))
    assert sum(in_the_loss) == sampled, "no token that the environment wrote is in a loss"
