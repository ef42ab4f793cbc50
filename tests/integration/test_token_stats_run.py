"""A run records what training made of each token: as computed from the weights of its checkpoints by transformers, in
both formats, and on the page; and a recorded rollout goes on from one of its tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import runs
import torch
from safetensors.torch import load_file

import tiny
from rollover.api.settings import settings_of_run
from rollover.cli import main
from rollover.config.load import load_config
from rollover.plugins.dashboard.run_data import RunData
from rollover.run.sample import BranchPoint
from rollover.track.records import read_records
from rollover.track.token_stats import KEYS, by_token

STEPS, CAP = 4, 1.01


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Partial rollouts, so that tokens are as old as two steps; a checkpoint after each."""
    folder = tmp_path_factory.mktemp("tokens")
    recipe = runs.write(
        folder,
        steps=STEPS,
        rollout={"max_new_tokens": 32},
        algorithm={"correction": "token_truncate", "correction_cap": CAP, "proximal": "step_start"},
        checkpoint={"every_steps": 1, "keep": STEPS + 1, "save_final_model": True},
        track={"format": ["jsonl", "parquet"]},
    )
    assert main(["train", str(recipe)]) == 0
    yield folder / "run"


def model_of(run: Path, version: int) -> Any:
    """The weights that a step at trainer `version` begins with."""
    model = tiny.model()
    model.set_attn_implementation("eager")
    if version:
        (path,) = (run / "checkpoints").glob(f"*{version:06d}/trainer-master*.safetensors")
        stored = {name.removeprefix("master/"): t for name, t in load_file(path).items()}
        missing, unexpected = model.load_state_dict(stored, strict=False)
        assert not unexpected and set(missing) <= {"lm_head.weight"}
    return model


def by_logits(record: dict[str, Any], model: Any) -> tuple[np.ndarray, np.ndarray]:
    """(log-probs, entropies) of all tokens of the answer."""
    ids = torch.tensor([*record["prompt_ids"], *record["token_ids"]])
    with torch.no_grad():
        logits = model(ids[None]).logits[0, len(record["prompt_ids"]) - 1 : -1].double()
    logs = torch.log_softmax(logits, -1)
    return logs.gather(1, torch.tensor(record["token_ids"])[:, None])[:, 0].numpy(), -(logs.exp() * logs).sum(
        -1
    ).numpy()


def test_the_numbers_of_each_token_are_those_of_the_closed_form(run: Path) -> None:
    models = {version: model_of(run, version) for version in range(STEPS)}
    stale = capped = 0
    trained = [r for r in read_records(run / "rollouts") if r["outcome"] == "trained" and r["loss_mask"]]
    assert len(trained) > STEPS
    for record in trained:
        tokens: Any = by_token(record)
        logprobs, entropies = by_logits(record, models[record["step"] - 1])
        mask, ratios = np.array(tokens["mask"]), np.exp(logprobs - np.array(record["logprobs"]))
        versions = np.repeat(
            [s["policy_version"] for s in record["segments"]], [s["num_tokens"] for s in record["segments"]]
        )
        assert mask.all(), "each is young enough, and sampled"
        assert tokens["advantages"] == pytest.approx([record["advantage"]] * record["num_tokens"], rel=1e-4)
        if record["advantage"] == 0:
            assert "importance_weights" not in tokens
            continue
        assert tokens["importance_weights"] == pytest.approx(ratios, rel=1e-3)
        assert tokens["loss_weights"] == pytest.approx(np.minimum(ratios, CAP), rel=1e-3)
        assert tokens["entropies"] == pytest.approx(entropies, rel=1e-3, abs=1e-4)
        stale += int((versions < record["step"] - 1).sum())
        capped += int((ratios > CAP).sum())
    assert stale and capped, "the run must have tokens of older weights, and ratios above the cap"


def test_the_tables_have_the_same(run: Path) -> None:
    lines = {(r["step"], r["rollout_id"]): r for r in runs.records(run)}
    tables = {(r["step"], r["rollout_id"]): r for r in read_records(run / "rollouts")}
    assert lines.keys() == tables.keys()
    for key, line in lines.items():
        assert line["credit"] == tables[key]["credit"]
        for name in KEYS:
            expected, found = line[name], tables[key][name]
            assert (expected is None) == (found is None), name
            assert expected is None or found == pytest.approx(expected, rel=1e-6, nan_ok=True), name


def test_the_page_tells_why_and_the_sum_is_the_advantage(run: Path) -> None:
    data = RunData(run)
    rows = data.answer("rollouts", {"outcome": "trained", "limit": "200"})["rows"]
    told = [data.answer("rollout", {"step": str(row["step"]), "id": row["id"]}) for row in rows if row["advantage"]]
    assert told
    for of in told:
        said = {s["about"]: s["text"] for s in of["why"]}
        *_, value = said["rule"].rstrip(".").split(" = ")
        assert float(value) == pytest.approx(of["advantage"], rel=2e-3, abs=1e-6), said
        assert said["tokens"] == f"{of['num_tokens']} of its {of['num_tokens']} tokens came to the loss."
        trained = of["tokens"]["trained"]
        assert len(trained["entropies"]) == len(trained["mask"]) == len(of["tokens"]["ids"])
        part = data.answer("rollout", {"step": str(of["step"]), "id": of["rollout_id"], "first": "3", "count": "2"})
        assert part["tokens"]["trained"]["entropies"] == trained["entropies"][3:5]


def test_the_texts_of_tokens_are_known_without_the_model(run: Path, tmp_path: Path) -> None:
    """On another machine, say, or before the run has saved any."""
    for name in ("config.resolved.json", "metrics.jsonl", "tokenizer.json", "rollouts"):
        (tmp_path / name).symlink_to(run / name)
    config = json.loads((run / "config.resolved.json").read_text())
    (tmp_path / "config.resolved.json").unlink()
    (tmp_path / "config.resolved.json").write_text(json.dumps(config | {"model": {"path": "nobody/has-this-model"}}))
    record = runs.records(run)[0]
    told = RunData(tmp_path).answer("rollout", {"step": str(record["step"]), "id": record["rollout_id"]})
    assert "".join(told["tokens"]["texts"]).removesuffix("<eos>") == record["completion"]


def sample(capsys: pytest.CaptureFixture[str], *words: str | Path) -> Any:
    capsys.readouterr()
    assert main(["sample", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_rollout_goes_on_from_a_token_as_it_did_or_with_newer_weights(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under the weights that sampled it the same tokens come, with their log-probs. Under the run's model others do."""
    record = next(
        r for r in runs.records(run) if r["num_tokens"] > 20 and {s["policy_version"] for s in r["segments"]} == {0}
    )
    place = f"{record['step']}/{record['rollout_id']}"
    (again,) = sample(capsys, "--from", run, f"{place}:7", "--model", run.parent / "model")
    assert again["token_ids"] == record["token_ids"][7:] and again["stop_reason"] == record["stop_reason"]
    assert again["logprobs"] == pytest.approx(record["logprobs"][7:], rel=1e-4, abs=1e-5)
    assert again["kept"] + again["text"] == record["completion"]
    newest = sample(capsys, "--from", run, place, "--num", "2", "--rollout.max_new_tokens", "9")
    assert [len(of["token_ids"]) <= 9 for of in newest] == [True, True] and newest[0] != newest[1]
    saved = sample(capsys, "--from", run, f"{place}:7", "--model", run / "model")
    (run / "model").rename(run / "away")
    try:
        assert sample(capsys, "--from", run, f"{place}:7") == saved, "the newest checkpoint has the same weights"
        assert main(["sample", "--from", str(run), f"{place}:7"]) == 0
        text, said = capsys.readouterr()
        assert text.startswith("kept: ") and f"checkpoint step-{STEPS:06d}" in said and "after 7 of" in said
    finally:
        (run / "away").rename(run / "model")
    (told,) = (RunData(run).answer("rollout", {"step": str(record["step"]), "id": record["rollout_id"]})["resume"],)
    assert told == f"rollover sample --from {run} {place}"


def test_a_finished_run_that_goes_on_has_newer_weights_than_it_ended_with(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """model/ is of the end before; --resume with more steps takes the mark of it away."""
    record = runs.records(run)[0]
    words = ["sample", "--from", str(run), f"{record['step']}/{record['rollout_id']}", "--rollout.max_new_tokens", "2"]
    capsys.readouterr()
    assert main(words) == 0 and "the model that the run ended with" in capsys.readouterr().err
    (run / "finished").rename(run / "not finished")
    try:
        assert main(words) == 0 and f"checkpoint step-{STEPS:06d}" in capsys.readouterr().err
    finally:
        (run / "not finished").rename(run / "finished")


def test_a_greedy_rollout_goes_on_greedily(run: Path) -> None:
    record = runs.records(run)[0]
    greedy = json.loads(json.dumps(record))
    for segment in greedy["segments"]:
        segment["sampling"]["temperature"] = 0.0
    config = load_config([settings_of_run(run, "--from")], [], require_sources=False).config
    warm, cold = (BranchPoint(of, 3).request(config, frozenset(), 0).sampling.temperature for of in (record, greedy))
    assert (warm, cold) == (config.rollout.temperature, 0.0)


def test_what_cannot_go_on_exits_2(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = runs.records(run)[0]
    place = f"{record['step']}/{record['rollout_id']}"

    def refused(*words: str | Path) -> str:
        assert main(["sample", *map(str, words)]) == 2
        return capsys.readouterr().err

    assert "names no rollout: write STEP/ID" in refused("--from", run, "somewhere")
    assert "no rollout 999-0 left the run" in refused("--from", run, "1/999-0")
    assert "give a token from 0 to" in refused("--from", run, f"{place}:100000")
    assert "leave --prompt and --columns out" in refused("--from", run, place, "--prompt", "x")
    assert "is not the directory of a run" in refused("--from", run / "nothing", place)
    assert "give FILE.toml, or a rollout of a run by --from" in refused("--prompt", "x")
    few = refused("--from", run, f"{place}:{record['num_tokens']}", "--rollout.max_new_tokens", "1")
    assert "tokens are kept: give an earlier token" in few


def test_without_token_stats_nothing_is_recorded_of_them(tmp_path: Path) -> None:
    recipe = runs.write(tmp_path, steps=1, track={"token_stats": False}, checkpoint={"save_final_model": False})
    assert main(["train", str(recipe)]) == 0
    trained = [r for r in runs.records(tmp_path / "run") if r["outcome"] == "trained"]
    assert trained and all(r[key] is None for r in trained for key in KEYS)
    assert all(r["credit"]["reward"] == r["score"] for r in trained)


def test_metrics_of_the_loss_leave_out_what_was_rejected(tmp_path: Path) -> None:
    """Counted by hand from the records: the loss mask, less what algorithm.rejection took out."""
    algorithm = {"rejection": {"token_k1": [-0.005, 0.003]}, "correction": "none", "allow_uncorrected": True}
    assert main(["train", str(runs.write(tmp_path, steps=5, algorithm=algorithm))]) == 0
    rejected = 0
    for row in runs.json_lines(tmp_path / "run" / "metrics.jsonl"):
        ages: list[int] = []
        built = 0
        for record in runs.records(tmp_path / "run"):
            if record["step"] == row["step"] and record["outcome"] == "trained" and (tokens := by_token(record)):
                versions = np.repeat(
                    [s["policy_version"] for s in record["segments"]], [s["num_tokens"] for s in record["segments"]]
                )
                kept = np.array(tokens["mask"]) & ~np.array(tokens["rejected"])
                ages += (row["step"] - 1 - versions[kept]).tolist()
                built += sum(tokens["mask"])
        rejected += built - len(ages)
        assert row["tokens/step_trained"] == len(ages)
        assert row["staleness/mean"] == pytest.approx(np.mean(ages)) and row["staleness/max"] == max(ages)
        assert row["off_policy/rejected_share"] == pytest.approx(1 - len(ages) / built)
        assert row["speed/trained_tokens_per_s"] == pytest.approx(len(ages) / row["time/train_s"])
    assert rejected > 50
