"""The expected figure of an example, and its numbers in words, from what its runs have written.

    python examples/figure.py FOLDER [LABEL=]RUN_DIR ... [--also METRIC] [--command TEXT] [--note TEXT] [--commit ID]
    python examples/figure.py FOLDER                       draws again from the folder's results.json

It writes results.json (what was measured), figure.svg (its curves) and, in README.md, the lines between the marks
`<!-- measured -->` and `<!-- end -->`. Nothing in these is written by hand, and a test compares all three.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import subprocess
from html import escape
from pathlib import Path
from typing import Any

import rollover

BEGIN, END = "<!-- measured -->", "<!-- end -->"
COLORS = ("#1f6feb", "#d1571d", "#2da44e")
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 330, 230, 46, 34, 34
Results = dict[str, Any]


def measured(directory: Path, also: str) -> dict[str, Any]:
    """Of one finished run: rewards by step, evaluations as [step, mean, low, high], the metric `also`, seconds."""
    run = rollover.open(directory)
    if not run.finished:
        raise SystemExit(f"{directory}: the run is not finished")
    names = ("finished", "config.resolved.json")
    end, start = ((directory / name).stat().st_mtime for name in names)
    return {
        "reward": [round(row["reward/mean"], 4) for row in run.metrics],
        "held_out": [[e["step"], *(round(x, 4) for x in (e["mean"], *e["ci"]))] for e in run.evaluations],
        "held_out_tasks": [
            max((e["tasks"] for e in run.evaluations), default=0),
            run.config["eval"]["samples_per_task"],
        ],
        "also": [round(row[also], 4) for row in run.metrics if also in row],
        "seed": run.config["run"]["seed"],
        "seconds": round(end - start),
    }


def sentences(results: Results) -> str:
    """What is measured, in words: one line a run, and how it was measured."""
    lines = []
    for label, run in results["runs"].items():
        parts = []
        if run["held_out"]:
            (first, *_), last = (run["held_out"][i] for i in (0, -1)), run["held_out"][-1]
            tasks, samples = run["held_out_tasks"]
            parts.append(f"held-out reward {interval(first)} -> **{interval(last)}** ({tasks} tasks, {samples} each)")
        parts.append(f"training reward {run['reward'][0]:.2f} -> {late(run['reward']):.2f}")
        if run["also"]:
            parts.append(f"`{results['also']}` {run['also'][0]:.3g} -> {late(run['also']):.3g}")
        time = f"{run['seconds'] // 60}:{run['seconds'] % 60:02}"
        steps = f"{len(run['reward'])} steps, seed {run['seed']}, {time} minutes"
        lines.append(f"- {label + ': ' if label else ''}{'; '.join(parts)}. {steps}.")
    how = f"`{results['command']}` at {results['commit']}, {results['date']}, 2 CPU cores without a GPU."
    last = "The last figure of a curve is the mean of its last three steps; intervals are of 95 %."
    return "\n".join([*lines, "", " ".join(filter(None, (how, results["note"], last)))])


def interval(evaluation: list[float]) -> str:
    _, mean, low, high = evaluation
    return f"{mean:.2f} [{low:.2f}, {high:.2f}]"


def late(values: list[float]) -> float:
    """The mean of the last three."""
    return sum(values[-3:]) / len(values[-3:])


def svg(results: Results) -> str:
    """The rewards of every run by step, evaluations as points with their interval; beside it the other metric."""
    runs = results["runs"]
    panels = [panel(0, "reward", {label: (run["reward"], run["held_out"]) for label, run in runs.items()})]
    if results["also"]:
        panels.append(panel(WIDTH, results["also"], {label: (run["also"], []) for label, run in runs.items()}))
    names = [label for label in runs if label]
    legend = [
        f'<text x="{LEFT + 130 * i}" y="{HEIGHT + 12}" fill="{COLORS[i]}">{escape(name)}</text>'
        for i, name in enumerate(names)
    ]
    width, height = WIDTH * len(panels), HEIGHT + (20 if names else 0)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    back = f'<rect width="{width}" height="{height}" fill="#ffffff"/>'
    return "\n".join([f'{head} font-family="sans-serif" font-size="11">', back, *panels, *legend, "</svg>"]) + "\n"


def panel(left: int, title: str, curves: dict[str, tuple[list[float], list[list[float]]]]) -> str:
    """One pair of axes with a line for each of `curves` (values of steps 1 on; evaluations), moved right by `left`."""
    steps = max(len(values) for values, _ in curves.values())
    seen = [y for values, points in curves.values() for y in (*values, *(y for point in points for y in point[1:]))]
    low, high = min(0.0, *seen), max(0.0, *seen)
    high, low = (1.0, 0.0) if low == 0 and 0.4 < high <= 1 else (high + (high == low), low)

    def x(step: float) -> float:
        return round(LEFT + (WIDTH - LEFT - 12) * step / steps, 1)

    def y(value: float) -> float:
        return round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value - low) / (high - low), 1)

    out = [f'<g transform="translate({left} 0)">', f'<text x="{LEFT}" y="20" font-weight="bold">{escape(title)}</text>']
    for i in range(5):
        value = low + (high - low) * i / 4
        out.append(f'<path d="M{x(0)} {y(value)}H{x(steps)}" stroke="#d8dee4"/>')
        out.append(f'<text x="{LEFT - 6}" y="{y(value) + 4}" text-anchor="end" fill="#57606a">{value:.3g}</text>')
    for step in sorted({0, steps // 2, steps}):
        out.append(f'<text x="{x(step)}" y="{HEIGHT - 16}" text-anchor="middle" fill="#57606a">{step}</text>')
    out.append(f'<text x="{x(steps / 2)}" y="{HEIGHT - 3}" text-anchor="middle" fill="#57606a">step</text>')
    for color, (values, points) in zip(COLORS, curves.values(), strict=False):
        path = " ".join(f"{x(step)},{y(value)}" for step, value in enumerate(values, start=1))
        if values:
            out.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.6"/>')
        for step, mean, least, most in points:
            out.append(f'<path d="M{x(step)} {y(least)}V{y(most)}" stroke="{color}" stroke-opacity="0.5"/>')
            out.append(f'<circle cx="{x(step)}" cy="{y(mean)}" r="3.5" fill="{color}"><title>held out</title></circle>')
    return "\n".join([*out, "</g>"])


def readme(text: str, results: Results) -> str:
    """A README.md with the present numbers between its marks."""
    pattern = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    if not pattern.search(text):
        raise SystemExit(f"README.md lacks the lines {BEGIN} and {END}")
    return pattern.sub(lambda _: f"{BEGIN}\n{sentences(results)}\n{END}", text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("runs", nargs="*", help="directories of finished runs, each with its label before it")
    parser.add_argument("--also", default="", help="a metric beside the reward")
    parser.add_argument("--command", default="rollover train recipe.toml")
    parser.add_argument("--note", default="Other programs were at work beside it.")
    parser.add_argument("--commit", default="")
    args = parser.parse_args()
    file, page = args.folder / "results.json", args.folder / "README.md"
    if args.runs:
        head = ["git", "rev-parse", "--short", "HEAD"]
        pairs = [word.rpartition("=") for word in args.runs]
        results = {
            "command": args.command,
            "commit": args.commit or subprocess.run(head, capture_output=True, text=True, check=True).stdout.strip(),
            "date": datetime.date.today().isoformat(),
            "note": args.note,
            "also": args.also,
            "runs": {label: measured(Path(directory), args.also) for label, _, directory in pairs},
        }
        file.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    results = json.loads(file.read_text(encoding="utf-8"))
    (args.folder / "figure.svg").write_text(svg(results), encoding="utf-8")
    page.write_text(readme(page.read_text(encoding="utf-8"), results), encoding="utf-8")


if __name__ == "__main__":
    main()
