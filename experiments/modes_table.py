"""Runs every rollout mode for a few steps on a tiny random model and writes what happened into docs/modes.md.

    .venv/bin/python experiments/modes_table.py            all modes, about a minute on two CPU cores
    .venv/bin/python experiments/modes_table.py drop mask  these only; the other rows stay

The runs go through the real loop (rollover.api.session): embedded engine, reward worker, trainer, ledger. The table
is between two markers in docs/modes.md; the text around it is written by hand. Importing this file loads no torch.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / part) for part in ("src", "tests", "tests/integration")]

from rollover.config.load import Resolved, load_config  # noqa: E402

DOC = ROOT / "docs" / "modes.md"
BEGIN, END = "<!-- table: experiments/modes_table.py -->", "<!-- end of table -->"
HEADER = (
    "mode", "steps", "groups trained", "generated", "trained", "dropped", "held", "resumed", "decode steps",
    "staleness max", "bound", "ledger",
)  # fmt: skip
STEPS = 12
SIZES: dict[str, Any] = {"groups_per_step": 8, "group_size": 8, "max_new_tokens": 128}
# Ends an answer besides EOS, which a random model hardly ever samples: lengths get a median of 15 and a long tail.
STOP = "qxzj"
OWN_ORDER = '''
def fewest_tokens_first(view):
    """A RolloutView (rollover.rollout.order) to a tuple of integers, smallest first."""
    return (view.num_tokens,)
'''


@dataclass(frozen=True)
class Mode:
    """`settings` of [rollout], or a recipe in configs/ that has them. `name`: its section in docs/modes.md."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    recipe: str = ""


_PARTIAL = {"interrupt": "when_enough", "in_flight_groups": 24, "max_staleness": 2}
MODES = (
    Mode("sync", {"interrupt": "never", "in_flight_groups": 8}),
    Mode("prefetch", {"interrupt": "never", "in_flight_groups": 24, "max_staleness": 2}),
    Mode("finish_first", _PARTIAL | {"on_stale": "finish_first"}),
    Mode("drop", _PARTIAL | {"max_staleness": 1, "on_stale": "drop"}),
    Mode("mask", _PARTIAL | {"in_flight_groups": 12, "max_staleness": 0, "on_stale": "mask"}),
    Mode("token_budget", _PARTIAL | {"interrupt": "token_budget", "token_budget": 32}),
    Mode("complete_fraction", _PARTIAL | {"in_flight_groups": 8, "complete_fraction": 0.5}),
    Mode("complete_by", _PARTIAL | {"in_flight_groups": 16, "complete_by": "rollout"}),
    Mode("supplement", _PARTIAL | {"in_flight_groups": 8, "supplement": True}),
    Mode("max_continuations", _PARTIAL | {"max_continuations": 1}),
    Mode("auto", _PARTIAL | {"in_flight_groups": "auto"}),
    Mode("order", _PARTIAL | {"order": "my_order.py:fewest_tokens_first"}),
    Mode("lightrft_partial", recipe="lightrft_partial.toml"),
    Mode("apr", recipe="apr.toml"),
    Mode("april", recipe="april.toml"),
    Mode("kimi_k15", recipe="kimi_k15.toml"),
    Mode("one_step_off", recipe="one_step_off.toml"),
    Mode("fully_async", recipe="fully_async.toml"),
    Mode("axolotl_async", recipe="axolotl_async.toml"),
)


def resolve(mode: Mode, mine: Path, overrides: dict[str, str] | None = None) -> Resolved:
    """The mode's configuration. `mine`: model, tasks and all else; it is above a recipe, so that its tasks are used."""
    if mode.recipe:
        files, values = [ROOT / "configs" / mode.recipe, mine], {}
    else:
        files, values = [mine], {f"rollout.{key}": json.dumps(value) for key, value in (SIZES | mode.settings).items()}
    return load_config(files, list((values | (overrides or {})).items()))


def prepare(folder: Path, steps: int, **rollout: Any) -> Path:
    """Tiny model, dataset, reward and own order in `folder`; returns the configuration of all but [rollout]'s mode.

    rollout: values that replace those of recipes."""
    import runs

    import tiny

    (folder / "my_order.py").write_text(OWN_ORDER)
    unset = ("groups_per_step", "group_size", "max_new_tokens", "in_flight_groups", "interrupt", "max_staleness")
    ids = [tiny.tokenizer()(character).input_ids[0] for character in STOP]
    return runs.write(
        folder,
        steps=steps,
        rollout=dict.fromkeys(unset) | {"stop_token_ids": ids} | rollout,
        engine={"max_running": 64, "kv_memory_gb": 0.2},
        train={"learning_rate": 1e-4, "micro_batch_tokens": 2048},
        checkpoint={"every_steps": 0, "save_final_model": False},
        track={"live": "off"},
    )


def run_mode(mode: Mode, mine: Path, name: str) -> dict[str, Any]:
    """One run in `mine`'s folder; its row of the table."""
    import runs

    from rollover.api.session import run_training

    folder = mine.parent / f"run-{name}"
    overrides = {"run.dir": str(folder)}
    if "order" in mode.settings:
        overrides["rollout.order"] = f"{mine.parent / mode.settings['order']}"
    resolved = resolve(mode, mine, overrides)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        code = run_training(resolved, False)
    assert code == 0, f"{mode.name} ended with {code}"
    rows = runs.json_lines(folder / "metrics.jsonl")
    last = rows[-1]
    trained = [r for r in runs.records(folder) if r["outcome"] == "trained"]
    resumed = sum(len(r["segments"]) > 1 for r in trained)
    dropped = {k.split("/")[1]: v for k, v in last.items() if re.fullmatch(r"dropped/.+/tokens", k) and v}
    return {
        "mode": f"[{mode.name}](#{mode.name})",
        "steps": last["step"],
        "groups trained": last["groups/consumed"],
        "generated": last["tokens/generated"],
        "trained": last["tokens/trained"],
        "dropped": " + ".join(f"{tokens:,} {reason}" for reason, tokens in dropped.items()) or 0,
        "held": last["tokens/held"],
        "resumed": f"{resumed / len(trained):.0%}",
        "decode steps": int(last["engine/decode_steps"]),
        "staleness max": int(max(row["staleness/max"] for row in rows)),
        "bound": resolved.config.staleness_bound,
        "ledger": "balanced" if all(map(balanced, rows)) else "NOT balanced",
    }


def balanced(row: dict[str, Any]) -> bool:
    """generated = trained + dropped + held, and the same of groups, at one step."""
    tokens = row["tokens/trained"] + row["tokens/dropped"] + row["tokens/held"]
    groups = row["groups/consumed"] + row["groups/dropped"] + row["groups/held"]
    return row["tokens/generated"] == tokens and row["groups/admitted"] == groups


def read_table(text: str) -> list[dict[str, str]]:
    """The rows between the markers, as written. ValueError if a row has another number of cells than the header."""
    lines = text.partition(BEGIN)[2].partition(END)[0].strip().splitlines()
    cells = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines]
    if not cells:
        return []
    header, _, *rows = cells
    return [dict(zip(header, row, strict=True)) for row in rows]


def render(rows: list[dict[str, Any]]) -> str:
    lines = [list(HEADER), ["---"] + ["---:"] * (len(HEADER) - 2) + ["---"]]
    lines += [[f"{row[c]:,}" if isinstance(row[c], int) else str(row[c]) for c in HEADER] for row in rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modes", nargs="*", metavar="MODE", help="modes to run (default: all)")
    args = parser.parse_args()
    known = [mode.name for mode in MODES]
    if unknown := [name for name in args.modes if name not in known]:
        parser.error(f"no mode {', '.join(unknown)}; there are {', '.join(known)}")
    text = DOC.read_text()
    assert BEGIN in text and END in text, f"{DOC} has lost its markers"
    rows: dict[str, dict[str, Any]] = {row["mode"]: dict(row) for row in read_table(text)}
    with tempfile.TemporaryDirectory() as folder:
        mine = prepare(Path(folder), STEPS)
        for mode in MODES:
            if not args.modes or mode.name in args.modes:
                row = run_mode(mode, mine, mode.name)
                rows[row["mode"]] = row
                print(", ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    table = render([row for mode in MODES if (row := rows.get(f"[{mode.name}](#{mode.name})"))])
    head, _, rest = text.partition(BEGIN)
    DOC.write_text(f"{head}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
