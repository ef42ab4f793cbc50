"""`rollover show`: state and results of a run, live or ended, and its most interesting rollouts."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollover.commands import Overrides, Verb, positive

if TYPE_CHECKING:
    import numpy as np
    from rich.console import Console

    from rollover.plugins.dashboard.indexed_run import IndexedRun

_LATEST = 10  # steps


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run_dir", metavar="RUN_DIR", type=Path, help="a run's directory")
    add("--rollouts", action="store_true", help="print its best, worst, longest and stalest rollouts")
    add("--num", metavar="N", type=positive, default=3, help="how many of each (default: 3)")
    add("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace, overrides: Overrides) -> int:
    from rollover.plugins.dashboard.indexed_run import IndexedRun

    files = IndexedRun(args.run_dir)
    if args.json:
        print(json.dumps(as_json(files, args.num if args.rollouts else 0)))
        return 0
    from rollover.track.console import new_console
    from rollover.track.summary import print_summary

    console = new_console()
    print_summary(summary_of(files), console)
    print_warnings(files, console)
    if args.rollouts:
        print_rollouts(files, args.num, console)
    return 0


def summary_of(files: IndexedRun) -> Any:
    """Return the summary of the current state, as printed at the end of a run (track/summary.py)."""
    from dataclasses import replace

    from rollover.track.summary import run_summary

    paths = {"run": str(files.directory)}
    paths |= {
        name.replace("_", " "): str(at) for name in ("model", "best_model") if (at := files.directory / name).is_dir()
    }
    summary = run_summary(files.name, files.metrics(), files.evaluations(), paths, enough=files.ended_early)
    return replace(summary, now=now(files))


def now(files: IndexedRun) -> dict[str, str]:
    """Return the current state by label."""
    from rollover.plugins.dashboard.metrics import seconds_a_step
    from rollover.track.figures import count, decimal, duration

    rows, num_steps = files.metrics(), files.value("train.num_steps")
    state, holder = files.state, files.holder
    found = {"state": f"{state}: {holder}" if state == "running" and holder else state}
    if state == "stopped":
        command, folder = files.resume
        found["state"] += f"; to continue{', in ' + folder if folder else ''}: {command}"
    found["step"] = f"{rows[-1]['step'] if rows else 0} of {'?' if num_steps is None else num_steps}"
    if not rows:
        return found
    row = rows[-1]
    rewards = [r["reward/mean"] for r in rows if r.get("reward/mean") is not None]
    if rewards:
        first, last = rewards[:_LATEST], rewards[-_LATEST:]
        found["reward"] = f"{decimal(sum(first) / len(first))} -> {decimal(sum(last) / len(last))}"
        found["reward"] += f" (means of the first and the last {len(last)} steps)"
    if "sft/loss" in row:
        losses = [r["sft/loss"] for r in rows]
        found["loss"] = f"{decimal(losses[0])} -> {decimal(losses[-1])} nats a token of the examples"
    else:
        found["staleness"] = f"{count(row.get('staleness/max'))} at most in the last step"
        found["staleness"] += f", bound {count(row.get('staleness/bound'))}"
    if (pace := seconds_a_step(rows)) is not None:
        found["pace"] = f"{decimal(pace, 1)} s a step"
        found["pace"] += f", {count(row.get('speed/generated_tokens_per_s'))} tok/s generating"
        if state == "running" and num_steps is not None:
            found["pace"] += f", ETA {duration(max(0, num_steps - row['step']) * pace)}"
    return found


def print_warnings(files: IndexedRun, console: Console) -> None:
    from rich.text import Text

    from rollover.track.console import shown

    if warnings := files.warnings():
        console.print(Text("\nHealth"))
        for step, _, text in warnings:
            console.print(Text(shown(f"  step {step}: {text}", console)), soft_wrap=True)


def chosen(files: IndexedRun, num: int) -> dict[str, np.ndarray]:
    """Return at most `num` index entries each: best and worst by score, longest, stalest."""
    import numpy as np

    from rollover.plugins.dashboard.rollout_index import staleness

    entries = files.rollouts.entries()
    scored = entries[~np.isnan(entries["score"])]

    def first(of: np.ndarray, by: np.ndarray) -> np.ndarray:
        return of[np.argsort(by, kind="stable")[:num]]

    stale = staleness(entries)
    return {
        "best": first(scored, -scored["score"]),
        "worst": first(scored, scored["score"]),
        "longest": first(entries, -entries["num_tokens"].astype("i8")),
        "stalest": first(entries[stale > 0], -stale[stale > 0]),
    }


def print_rollouts(files: IndexedRun, num: int, console: Console) -> None:
    """Print rollouts with id, step, score, length, versions and outcome, and excerpts of prompt and answer."""
    from rich.text import Text

    from rollover.track.console import excerpt

    for title, entries in chosen(files, num).items():
        console.print(Text(f"\n{title.capitalize()} rollouts{'' if len(entries) else ': none'}"))
        for entry, record in zip(entries, files.rollouts.records_of(entries), strict=True):
            lines = [f"  {excerpt(_description(files, entry, record), console)}"]
            lines.append(f"    {excerpt(_prompt_text(record), console)}")
            lines.append(f"    -> {excerpt(record['completion'], console)}")
            lines += [
                f"    {excerpt(f'{name}: {text}', console)}" for name, text in (record.get("texts") or {}).items()
            ]
            for text in lines:
                console.print(Text(text), soft_wrap=True)


def _description(files: IndexedRun, entry: Any, record: dict[str, Any]) -> str:
    from rollover.plugins.dashboard.rollout_index import NO_VERSION, UNFINISHED, staleness
    from rollover.track.figures import decimal

    score = decimal(record["score"]) if record["error"] is None else f"none ({record['error']})"
    versions = "no tokens"
    if entry["newest"] != NO_VERSION:
        span = str(entry["oldest"]) if entry["oldest"] == entry["newest"] else f"{entry['oldest']} to {entry['newest']}"
        versions = f"policy version {span}, staleness {int(staleness(entry))}"
    parts = f"{entry['segments']} segment{'' if entry['segments'] == 1 else 's'}"
    return (
        f"{record['rollout_id']} ({record['source']}, task {record['task_id']}): score {score},"
        f" {record['outcome']} in step {record['step']}, {record['num_tokens']} tokens in {parts},"
        f" {versions}, {record['stop_reason'] or UNFINISHED}"
    )


def _prompt_text(record: dict[str, Any]) -> str:
    from rollover.types import content_text

    if record["messages"] is None:
        return record["prompt"] or ""
    return " ".join(content_text(message.get("content")) for message in record["messages"])


def as_json(files: IndexedRun, num: int) -> dict[str, Any]:
    """Return everything as JSON-able data; with `num`, also that many whole records of each kind."""
    rows, evaluations, summary = files.metrics(), files.evaluations(), summary_of(files)
    entries = files.rollouts.entries()
    outcomes = [files.rollouts.word(of) for of in entries["outcome"]]
    accounts = files.accounts()
    found: dict[str, Any] = {
        "directory": str(files.directory),
        "name": files.name,
        "state": files.state,
        "holder": files.holder,
        "ended_early": files.ended_early,
        "step": rows[-1]["step"] if rows else 0,
        "num_steps": files.value("train.num_steps"),
        "last_row": rows[-1] if rows else {},
        "evaluations": [{key: value for key, value in row.items() if key != "samples"} for row in evaluations],
        "ledger": accounts.as_json() if accounts else None,
        "time_s": summary.time_s,
        "waits": summary.waits.text if summary.waits else None,
        "warnings": [warning._asdict() for warning in files.warnings()],
        "recorded": {name: outcomes.count(name) for name in dict.fromkeys(outcomes)},
    }
    if num:
        found["rollouts"] = {kind: files.rollouts.records_of(of) for kind, of in chosen(files, num).items()}
    return found


VERB = Verb("Show what a run has come to, live or ended.", run, arguments, files="", keys=False)
