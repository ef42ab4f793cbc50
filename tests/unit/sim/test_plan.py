"""The verb `rollover plan`: its figures, its options, its JSON, and that it needs no torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from rollover import cli
from rollover.config.load import load_config
from rollover.sim.earlier_run import speeds_of_run
from rollover.sim.plan import make_plan, plan_config
from rollover.sim.report import planned_trace
from rollover.sim.simulate import Simulation
from rollover.sim.workload import Workload
from rollover.track.trace import TRACE, TraceEvent, TraceFile, engine_visits, spans
from unit.sim.earlier_run import write_run

ROOT = Path(__file__).parents[3]
QUICKSTART = str(ROOT / "configs" / "quickstart.toml")
LONG_TAIL = [("rollout.max_new_tokens", "1024"), ("rollout.kv_on_resume", "keep"), ("plan.steps", "20")]


def plan_of(*overrides: tuple[str, str]):
    return make_plan(load_config([Path(QUICKSTART)], [*LONG_TAIL, *overrides]).config)


def test_partial_is_faster_where_generation_has_a_long_tail() -> None:
    plan = plan_of(("plan.train_tokens_per_s", "5000"), ("rollout.max_staleness", "4"))
    assert plan.speedup > 1.2
    assert plan.figures.slots_idle < plan.synchronous.slots_idle
    assert plan.synchronous.staleness == {0: 1.0} and plan.synchronous.partial_share == 0
    assert 0 < plan.figures.staleness_mean < plan.figures.staleness_max <= 4
    assert sum(plan.figures.staleness.values()) == pytest.approx(1)


def test_nothing_is_gained_where_training_takes_all_the_time() -> None:
    plan = plan_of(("plan.train_tokens_per_s", "20"))
    assert plan.speedup == pytest.approx(1, abs=0.05)
    assert plan.figures.train_s > 10 * plan.figures.generate_s


def test_variants_are_ranked_and_best_keeps_max_staleness() -> None:
    plan = plan_of(("plan.train_tokens_per_s", "5000"))
    speedups = [v.speedup for v in plan.variants]
    assert speedups == sorted(speedups, reverse=True) and len(speedups) >= 9
    assert plan.best.max_staleness <= 2
    allowed = [v.speedup for v in plan.variants if v.max_staleness <= 2]
    assert plan.best.speedup == max(allowed)
    (sync,) = [v for v in plan.variants if v.max_staleness == 0]
    assert sync.speedup == 1


def test_separate_trainers_idle_and_splits_are_tried() -> None:
    plan = plan_of(("plan.engines", "6"), ("plan.trainers", "2"))
    f = plan.figures
    assert f.engines_idle == pytest.approx((f.train_s + 0.2) / f.step_s, rel=0.02)
    assert f.trainers_idle == pytest.approx(1 - f.train_s / f.step_s, rel=0.02)
    splits = {(v.engines, v.trainers) for v in plan.variants}
    assert (6, 2) in splits and (8, 0) in splits and (4, 4) in splits


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["plan", QUICKSTART, *arguments]) == 0
    return capsys.readouterr().out


def test_options_override_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    out = json.loads(
        run(capsys, "--json", "--engines", "4", "--trainers", "2", "--steps", "10", "--rollouts-per-engine", "4")
    )
    assert (out["assumed"]["engines"], out["assumed"]["trainers"], out["assumed"]["steps"]) == (4, 2, 10)
    rollout = load_config([Path(QUICKSTART)]).config.rollout
    groups = 4 * 4 // rollout.group_size  # four engines with four rollouts each
    assert out["rollout"]["groups_per_step"] == groups
    assert out["rollout"]["in_flight_groups"] == rollout.in_flight_groups * groups // rollout.groups_per_step


def test_devices_are_split(capsys: pytest.CaptureFixture[str]) -> None:
    out = json.loads(run(capsys, "--json", "--devices", "4", "--trainers", "1", "--steps", "5"))
    assert (out["assumed"]["engines"], out["assumed"]["trainers"]) == (3, 1)
    assert cli.main(["plan", QUICKSTART, "--devices", "4", "--engines", "2"]) == 2


SMALL = (
    "--steps",
    "5",
    "--rollout.groups_per_step",
    "2",
    "--rollout.in_flight_groups",
    "6",
    "--rollout.group_size",
    "2",
)


def test_devices_without_trainers_keep_those_of_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    out = json.loads(run(capsys, "--json", "--devices", "4", "--plan.trainers", "1", *SMALL))
    assert (out["assumed"]["engines"], out["assumed"]["trainers"]) == (3, 1)
    assert (out["sources"]["engines"], out["sources"]["steps"]) == ("command line", "command line")
    assert cli.main(["plan", QUICKSTART, "--devices", "1", "--plan.trainers", "1"]) == 2


RAY = ("--cluster.type", "ray", "--cluster.num_nodes", "2", "--cluster.gpus_per_node", "8", "--engine.kind", "remote",
       "--cluster.cpus_per_node", "2", "--engine.weights_dir", "/w", "--engine.num_servers")  # fmt: skip


def test_plan_uses_configured_engines_trainers_and_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    out = json.loads(run(capsys, "--json", *SMALL, *RAY, "3"))
    assert (out["assumed"]["engines"], out["assumed"]["trainers"]) == (3, 1)
    assert out["sources"]["engines"] == "derived from engine.num_servers"
    assert out["nodes"] == {
        "node-1": ["controller with trainer", "embedded server 0", "reward pool of up to 1 worker"],
        "node-2": ["embedded servers 1 to 2"],
    }
    text = run(capsys, *SMALL, *RAY, "3").splitlines()
    assert "3 engines x 64 slots (derived from engine.num_servers), 1 trainers (derived from cluster.type)" in text[1]
    assert text[2].endswith("(cluster.num_nodes): the controller on 1, 3 servers on 2, 1 reward pool on 1")


def test_plan_without_room_is_rejected(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["plan", QUICKSTART, "--steps", "5", *RAY, "17"]) == 2
    assert "so 2 GPUs are missing. 3 such nodes are enough" in capsys.readouterr().err
    out = json.loads(run(capsys, "--json", *SMALL, *RAY, "17", "--engines", "2"))
    assert out["nodes"] == {} and out["assumed"]["engines"] == 2


def test_the_json_is_what_the_document_says(capsys: pytest.CaptureFixture[str]) -> None:
    out = json.loads(run(capsys, "--json", "--steps", "5"))
    document = (ROOT / "docs" / "planning.md").read_text()
    for key in [*out, *out["figures"], *out["variants"][0]]:
        assert f"`{key}`" in document, f"docs/planning.md does not explain {key}"
    assert out["format"] == 1


def test_lengths_and_speeds_of_an_earlier_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, lengths=[[10, 20], [30, 40]], step_s=lambda batch: 0.02 + 0.001 * batch, train_rate=123.0)
    out = json.loads(run(capsys, "--json", "--steps", "5", "--from-run", str(tmp_path)))
    assumed = out["assumed"]
    one, most = assumed["decode_step_s"]
    assert one == pytest.approx(0.021) and most == pytest.approx(0.02 + 0.001 * assumed["decode_batches"][1])
    assert assumed["train_tokens_per_s"] == pytest.approx(123, rel=0.01)
    assert out["sources"]["lengths"] == "run" and assumed["prompt_tokens"] == 3
    mean = out["figures"]["trained_tokens_per_s"] * out["figures"]["step_s"] / 64
    assert 10 <= mean <= 40


def test_an_earlier_run_that_overlapped_tells_lengths_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, lengths=[[10, 20], [30, 40]], step_s=lambda batch: 0.02, train_rate=123.0)
    config = load_config([Path(QUICKSTART)]).config
    (tmp_path / "config.resolved.json").write_text(config.model_dump_json())
    out = json.loads(run(capsys, "--json", "--steps", "5", "--from-run", str(tmp_path)))
    assert out["sources"]["train_tokens_per_s"] == "run" and out["assumed"]["weight_sync_s"] == 0.5
    overlap = config.model_copy(update={"rollout": config.rollout.model_copy(update={"overlap": True})})
    (tmp_path / "config.resolved.json").write_text(overlap.model_dump_json())
    assert cli.main(["plan", QUICKSTART, "--json", "--steps", "5", "--from-run", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    out = json.loads(captured.out)
    assert out["sources"]["lengths"] == "run" and "train_tokens_per_s" not in out["sources"]
    assert "only its lengths" in captured.err


def test_weights_that_were_not_handed_over_cost_no_time() -> None:
    rows = [
        {"engine/decode_steps": 10 * (i + 1), "tokens/step_generated": 100 + i, "time/generate_s": 1.0,
         "tokens/trained": 100 * (i + 1), "groups/consumed": 8, "time/train_s": 1.0, "time/weights_s": 3.0 * (i % 2)}
        for i in range(4)
    ]  # fmt: skip
    assert speeds_of_run(rows, 3)["weight_sync_s"] == 3


def test_what_environments_took_is_no_time_of_decode_steps() -> None:
    """Each of 10 steps took 0.1 s, and for 3 s nothing ran: plan.tool_s has those."""
    rows = [
        {"engine/decode_steps": 10 * (i + 1), "tokens/step_generated": 100, "time/generate_s": 4.0,
         "wait/environment_s": 3.0, "tokens/trained": 100 * (i + 1), "groups/consumed": 8, "time/train_s": 1.0,
         "time/weights_s": 0.0}
        for i in range(4)
    ]  # fmt: skip
    assert speeds_of_run(rows, 3)["decode_step_s"] == pytest.approx([0.1, 0.1])


def test_prefill_and_evaluations_are_no_time_of_decode_steps() -> None:
    """Each of 10 steps took 0.1 s, and prefill of 40 tokens 0.5 s; an evaluation before the first step and one before
    the third made 90 steps more, which are in the counter alone."""
    evaluated = [90, 90, 180, 180]
    rows = [
        {"engine/decode_steps": 10 * (i + 1) + evaluated[i], "engine/prefill_s": 0.5 * (i + 1),
         "engine/prefill_tokens": 30 * (i + 1), "engine/reprefill_tokens": 10 * (i + 1), "tokens/step_generated": 100,
         "time/generate_s": 1.5, "time/eval_s": 2.0 * (i == 2), "tokens/trained": 100 * (i + 1), "groups/consumed": 8,
         "time/train_s": 1.0, "time/weights_s": 0.0}
        for i in range(4)
    ]  # fmt: skip
    speeds = speeds_of_run(rows, 3)
    assert speeds["decode_step_s"] == pytest.approx([0.1, 0.1]) and speeds["decode_batches"] == [1, 10]
    assert speeds["prefill_tokens_per_s"] == pytest.approx(80) and speeds["prefill_min_s"] == 0


@pytest.mark.parametrize(
    ("files", "message"), [({}, "is not the directory of a run"), ({"metrics.jsonl": ""}, "has no step-")]
)
def test_a_run_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str], files, message) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert cli.main(["plan", QUICKSTART, "--from-run", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


def test_speeds_need_two_steps() -> None:
    with pytest.raises(ValueError, match="fewer than two steps"):
        speeds_of_run([], 1)


def test_servers_tell_no_decode_steps() -> None:
    """What their metrics call so are tokens: every batch would be of one rollout."""
    rows = [
        {"engine/decode_steps": 100 * (i + 1), "engine/servers": 2, "tokens/step_generated": 100,
         "time/generate_s": 1.0, "tokens/trained": 100 * (i + 1), "groups/consumed": 8, "time/train_s": 1.0,
         "time/weights_s": 2.0}
        for i in range(4)
    ]  # fmt: skip
    speeds = speeds_of_run(rows, 3)
    assert speeds.keys() == {"train_tokens_per_s", "weight_sync_s"} and speeds["weight_sync_s"] == 2.0


def test_plans_without_torch(tmp_path: Path) -> None:
    """A machine that only plans has numpy and pydantic, nothing heavier."""
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')\n")
    (tmp_path / "transformers.py").write_text("raise ImportError('no transformers here')\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT / 'src'}"}
    command = [sys.executable, "-m", "rollover", "plan", QUICKSTART, "--steps", "5", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["figures"]["step_s"] > 0


def test_the_picture_shows_both_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.svg"
    run(capsys, "--steps", "3", "--svg", str(path))
    texts = [e.text for e in ElementTree.parse(path).iter() if e.tag.endswith("text")]
    assert any(t and t.startswith("synchronous (planned): 3 steps") for t in texts)
    assert any(t and t.startswith("this configuration (planned): 3 steps") for t in texts)
    assert cli.main(["plan", QUICKSTART, "--steps", "3", "--engines", "100", "--svg", str(path)]) == 2


def test_a_planned_trace_has_the_tokens_of_the_plan() -> None:
    config = load_config([Path(QUICKSTART)], LONG_TAIL).config
    plan = config.plan.model_copy(update={"steps": 4})
    workload = Workload(plan, 8, 1024)
    events = planned_trace(config.rollout, plan, 64, workload)
    outcome = Simulation(config.rollout, plan, 64, workload).run()
    assert sum(n for s in engine_visits(events) for _, n in s.segments) == outcome.ledger["tokens/generated"]
    trained = [s for s in spans(events) if s.name == "train"]
    assert sum(s.end - s.start for s in trained) == pytest.approx(sum(s.train_s for s in outcome.steps))
    assert {v for s in engine_visits(events) for v, _ in s.segments} == {0, 1, 2, 3}


def test_turns_are_planned_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", QUICKSTART, *SMALL, "--plan.turns", "3", "--plan.tool_s", "2", "--json"]
    assert cli.main(words) == 0
    slow = json.loads(capsys.readouterr().out)
    assert slow["assumed"]["turns"] == 3 and slow["sources"]["tool_s"] == "command line"
    assert cli.main([*words[:-3], "--plan.tool_s", "0.01", "--plan.tool_tokens", "9"]) == 0
    said = capsys.readouterr().out
    assert "Episodes     3 turns (command line); 9 tokens are appended after 0.01 s (command line)" in said
    few = [
        ("plan.turns", "3"),
        ("plan.steps", "5"),
        ("rollout.groups_per_step", "2"),
        ("rollout.in_flight_groups", "6"),
    ]
    quick = plan_of(*few, ("plan.tool_s", "0.01")).synchronous
    assert plan_of(*few, ("plan.tool_s", "20")).synchronous.step_s > quick.step_s + 25
    assert cli.main(["plan", QUICKSTART, "--plan.tool_s", "2"]) == 2
    assert "plan.tool_s has no effect as an episode has one turn" in capsys.readouterr().err
    assert cli.main(["plan", "calculator", "--plan.steps", "2"]) == 0
    assert "workflow.environment makes episodes of several turns" in capsys.readouterr().err


def test_turns_of_an_earlier_run(tmp_path: Path) -> None:
    write_run(tmp_path, [[4, 6], [2, 8]], lambda batch: 0.1, 100.0, turns=2)
    told = [
        ("act", 1.0, 0),
        ("act", 1.5, 1),
        ("answer", 3.0, 1),
        ("answer", 4.0, 0),
        ("act", 5.0, 0),
        ("finish", 5.0, 0),
    ]
    TraceFile(tmp_path / TRACE).write([TraceEvent(kind, at, 0, 0, sibling) for kind, at, sibling in told])
    plan, sources, *_ = plan_config(load_config([Path(QUICKSTART)], [("plan.steps", "2")]), tmp_path)
    assert (plan.assumed.turns, plan.assumed.tool_tokens, plan.assumed.tool_s) == (2, 5, 2.25)
    assert sources["turns"] == sources["tool_s"] == sources["lengths"] == "run"
