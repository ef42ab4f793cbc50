"""What a run left in its directory: read, checked alone, and compared with another run's, bit for bit.

Each function returns its findings, one line each, which name the file, step, key and both values. No finding, no fault.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from .modes import SIBLINGS, Mode

Row = dict[str, Any]

# Metrics that measure time, memory or load: two runs of one tree differ in them.
UNSTEADY = ("time/", "seconds", "state/", "speed/", "perf/", "memory/", "rewards/", "journal/", "waste/")
LOGPROB_LIMIT = 1e-4  # |engine - trainer| and |engine - transformers| of a token, fp32


def json_lines(path: Path) -> list[Row]:
    """The complete lines of a file: a killed writer may have left a part of one."""
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]] if path.exists() else []


def metrics_of(run_dir: Path) -> list[Row]:
    return json_lines(run_dir / "metrics.jsonl")


def records_of(run_dir: Path) -> list[Row]:
    """All rollout records; paths in them, of images, are relative to the folder of the recipe."""
    files = sorted((run_dir / "rollouts").glob("step-*.jsonl"))
    lines = [line for path in files for line in path.read_bytes().split(b"\n")[:-1]]
    return [json.loads(line.replace(f"{run_dir.parent}/".encode(), b"")) for line in lines]


def tensors_of(run_dir: Path) -> dict[str, torch.Tensor]:
    """Tensors of the saved model and of the newest checkpoint, as "file:name"."""
    newest = sorted((run_dir / "checkpoints").glob("step-*"))[-1:]
    files = [
        *(run_dir / "model").glob("*.safetensors"),
        *(f for folder in newest for f in folder.glob("*.safetensors")),
    ]
    return {f"{f.relative_to(run_dir)}:{name}": t for f in files for name, t in load_file(f).items()}


def held_tokens(run_dir: Path) -> dict[str, list[int]]:
    """Token ids of each rollout in the newest checkpoint that is unfinished or waits for its step, by its id."""
    newest = sorted(path.parent for path in (run_dir / "checkpoints").glob("step-*/COMMITTED"))[-1:]
    out: dict[str, list[int]] = {}
    for folder in newest:
        tensors = load_file(folder / "rollouts.safetensors")
        ids, offsets = tensors["token_ids"].tolist(), iter(tensors["segment_offsets"].tolist())
        start = next(offsets)
        for group in json.loads((folder / "state.json").read_text())["cache"]["groups"]:
            for sibling, rollout in enumerate(group["rollouts"]):
                begin = start
                for _ in rollout["segments"]:
                    start = next(offsets)
                place = rollout.get("trajectory", 0), rollout.get("context", 0)
                further = f".{place[0]}.{place[1]}" if any(place) else ""
                out[f"{group['group_id']}-{rollout.get('sibling', sibling)}{further}"] = ids[begin:start]
    return out


def steady(row: Row) -> Row:
    """A metrics row without what depends on the machine's speed."""
    return {k: v for k, v in row.items() if not (k == "time" or k.startswith(UNSTEADY) or k.endswith("_s"))}


def between(before: Mapping[str, str], current: Mapping[str, str]) -> dict[str, str]:
    """The renames from one tree's names to a later one's; both tables begin at the names of the first commit."""
    return {before.get(name, name): new for name, new in current.items() if before.get(name, name)}


def renamed(value: Any, names: Mapping[str, str]) -> Any:
    """A JSON value with its keys renamed, at every depth; a key whose new name is "" is left out."""
    if isinstance(value, dict):
        return {names.get(k, k): renamed(v, names) for k, v in value.items() if names.get(k, k)}
    return [renamed(v, names) for v in value] if isinstance(value, list) else value


def renamed_tensors(tensors: Mapping[str, torch.Tensor], names: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """Tensors under their new names; "file:" renames a whole file, "" leaves out."""
    out = {}
    for name, tensor in tensors.items():
        file, _, rest = name.rpartition(":")
        whole = names.get(f"{file}:")
        new = names.get(name, name if whole is None else whole and f"{whole}{rest}")
        if new:
            out[new] = tensor
    return out


def compare_rows(
    expected: Iterable[Row],
    found: Iterable[Row],
    *,
    key: tuple[str, ...],
    where: str,
    new: Iterable[str] = (),
    tolerance: float = 0.0,
) -> list[str]:
    """Compare rows that `key` identifies: a missing, additional or doubled row, and every value that differs.

    `tolerance`: of numbers, relative to the larger one or to 1; 0: bit for bit.
    """
    out: list[str] = []
    sides: list[dict[tuple[Any, ...], Row]] = []
    for name, rows in (("before", expected), ("current", found)):
        side: dict[tuple[Any, ...], Row] = {}
        for row in rows:
            label = tuple(row.get(k) for k in key)
            if label in side:
                out.append(f"{where} {_label(key, label)}: twice in {name}")
            side[label] = row
        sides.append(side)
    before, current = sides
    out += [f"{where} {_label(key, label)}: only in before" for label in before if label not in current]
    out += [f"{where} {_label(key, label)}: only in current" for label in current if label not in before]
    for label in (label for label in before if label in current):
        one, other = before[label], {k: v for k, v in current[label].items() if k not in new}
        for name in dict.fromkeys([*one, *other]):
            a, b = one.get(name, "(missing)"), other.get(name, "(missing)")
            if not (same(a, b) or (tolerance and _close(a, b, tolerance))):
                out.append(f"{where} {_label(key, label)} {name}: {_short(a, b)}")
    return out


def same(a: Any, b: Any) -> bool:
    """Equality of JSON values, bit for bit; NaN equals NaN."""
    if isinstance(a, float) and isinstance(b, float):
        return a == b or (math.isnan(a) and math.isnan(b))
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return a == b


def _close(a: Any, b: Any, tolerance: float) -> bool:
    numbers = isinstance(a, int | float) and isinstance(b, int | float)
    return numbers and math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance)


def compare_tensors(
    expected: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor], tolerance: float = 0.0
) -> list[str]:
    """Compare tensors by name. `tolerance`: the largest difference of an element; 0: bit for bit."""
    out = [f"{name}: only in before" for name in expected if name not in found]
    out += [f"{name}: only in current" for name in found if name not in expected]
    for name in (name for name in expected if name in found):
        a, b = expected[name], found[name]
        if a.shape != b.shape or a.dtype != b.dtype:
            out.append(f"{name}: {tuple(a.shape)} {a.dtype} before, {tuple(b.shape)} {b.dtype} now")
        elif not torch.equal(a, b):
            most = (a.double() - b.double()).abs().max().item()
            if not most <= tolerance:
                out.append(f"{name}: differs by at most {most:.3g} (limit {tolerance:g})")
    return out


def check_run(run_dir: Path, mode: Mode, steps: int) -> list[str]:
    """Check a finished run alone: rows, ledger, staleness, groups, finite losses, log-probs of engine and trainer."""
    rows, records = metrics_of(run_dir), records_of(run_dir)
    out = []
    if (found := [row["step"] for row in rows]) != list(range(1, steps + 1)):
        out.append(f"metrics.jsonl: steps {found}, expected 1 to {steps} once each")
    for row in rows:
        at = f"metrics.jsonl step {row['step']}"
        for total, parts in (("tokens/generated", ("trained",)), ("groups/admitted", ("consumed",))):
            unit = total.partition("/")[0]
            accounts = {name: row[f"{unit}/{name}"] for name in (*parts, "dropped", "held")}
            if row[total] != sum(accounts.values()):
                out.append(f"{at}: {total} {row[total]} is not the sum of {accounts}")
        if not row["staleness/max"] <= row["staleness/bound"]:
            out.append(f"{at}: staleness/max {row['staleness/max']} exceeds staleness/bound {row['staleness/bound']}")
        out += [f"{at} {k}: {row[k]} is not finite" for k in ("loss", "grad_norm") if not math.isfinite(row[k])]
        most = row.get("mismatch/logprob_abs_max", 0.0)  # missing where no token has an advantage
        if row["staleness/max"] == row.get("staleness/replayed_max", 0) == 0 and not most < LOGPROB_LIMIT:
            out.append(f"{at} mismatch/logprob_abs_max: {most} exceeds {LOGPROB_LIMIT}")
    out += _check_groups(records, rows[-1] if rows else {}, mode)
    return out + _check_trace(json_lines(run_dir / "trace.jsonl"), rows[-1] if rows else {})


def _check_groups(records: list[Row], last: Row, mode: Mode) -> list[str]:
    """No rollout is recorded twice, no group is skipped or trained in two steps, no token exceeds the bound."""
    out, steps, tasks = [], defaultdict(set), defaultdict(set)
    seen: set[str] = set()
    for r in records:
        at = f"rollouts/step-{r['step']:06}.jsonl {r['rollout_id']}"
        if r["rollout_id"] in seen:
            out.append(f"{at}: recorded twice")
        seen.add(r["rollout_id"])
        steps[r["group_id"]].add((r["step"], r["outcome"] == "trained"))
        tasks[r["task_id"], r["attempt"]].add(r["group_id"])
        versions = [s["policy_version"] for s in r["segments"] if s["trainable"]]
        if versions != sorted(versions):
            out.append(f"{at}: versions {versions} decrease")
        if r["outcome"] == "trained" and versions and not 0 <= r["step"] - 1 - versions[0] <= last["staleness/bound"]:
            out.append(f"{at}: version {versions[0]} in step {r['step']} exceeds the bound {last['staleness/bound']}")
        if r["num_tokens"] != len(r["token_ids"]) or r["num_tokens"] != sum(s["num_tokens"] for s in r["segments"]):
            out.append(f"{at}: {r['num_tokens']} tokens, {len(r['token_ids'])} ids")
    out += [f"group {group}: in steps {sorted(s)}" for group, s in steps.items() if len(s) > 1]
    out += [f"task {task}: given to groups {sorted(g)}" for task, g in tasks.items() if len(g) > 1]
    if last:
        trained = sum(any(t for _, t in s) for s in steps.values())
        if trained != last["groups/consumed"]:
            out.append(f"records have {trained} trained groups, groups/consumed is {last['groups/consumed']}")
        missing = set(range(last["groups/admitted"])) - steps.keys()
        if len(missing) != last["groups/held"]:
            out.append(f"groups without a record: {sorted(missing)}, groups/held is {last['groups/held']}")
        sampled = sum(
            s["num_tokens"] for r in records if r["outcome"] == "trained" for s in r["segments"] if s["trainable"]
        )
        if sampled != last["tokens/trained"]:
            out.append(
                f"records have {sampled} sampled tokens of trained groups, tokens/trained is {last['tokens/trained']}"
            )
        if mode.name != "agents" and sum(r["outcome"] == "trained" for r in records) != SIBLINGS * trained:
            out.append(f"{trained} groups were trained, not {SIBLINGS} rollouts of each")
    return out


def _check_trace(events: list[Any], last: Row) -> list[str]:
    """The trace has every admission, training and version once, and the tokens of the ledger."""
    out, once = [], defaultdict(int)
    for kind, _, version, *rest in events:
        if kind in ("admit", "ready", "consume"):
            once[kind, rest[0]] += 1
        if kind == "publish":
            once[kind, version] += 1
    out += [f"trace.jsonl: {kind} {which} {num} times" for (kind, which), num in once.items() if num > 1]
    if last:
        consumed = sum(kind == "consume" for kind, _ in once)
        if consumed != last["groups/consumed"]:
            out.append(f"trace.jsonl: {consumed} groups consumed, groups/consumed is {last['groups/consumed']}")
        versions = sorted(version for kind, version in once if kind == "publish")
        if versions != list(range(1, last["step"] + 1)):
            out.append(f"trace.jsonl: published versions {versions}")
    return out


def recomputed(folder: Path) -> list[str]:
    """Recompute by transformers the log-probs of the tokens of policy version 0: they are those of the model folder."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    prompts: dict[Any, list[int]] = {}
    out, num = [], 0
    for r in records_of(folder / "run"):
        if r["prompt_ids"] is not None:
            prompts[r["group_id"], r["role"]] = r["prompt_ids"]
        prompt = r["prompt_ids"] or (prompts.get((r["group_id"], r["role"])) if r["plain"] else None)
        if prompt is None or any(s.get("sampling") and s["sampling"]["temperature"] != 1.0 for s in r["segments"]):
            continue
        ids = torch.tensor([[*prompt, *r["token_ids"]]])
        with torch.no_grad():
            logprobs = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        start = 0
        for s in r["segments"]:
            part = range(start, start := start + s["num_tokens"])
            if s["trainable"] and s["policy_version"] == 0:
                for i in part:
                    num += 1
                    here, there = logprobs[i, r["token_ids"][i]].item(), r["logprobs"][i]
                    if there is None or not abs(here - there) < LOGPROB_LIMIT:
                        out.append(f"rollouts {r['rollout_id']} token {i}: log-prob {there}, recomputed {here:.6f}")
    return out if num else ["no log-prob could be recomputed: no token of policy version 0"]


def _label(key: tuple[str, ...], label: tuple[Any, ...]) -> str:
    return " ".join(f"{k} {v}" for k, v in zip(key, label, strict=True))


def _short(a: Any, b: Any) -> str:
    """Both values; of two lists the first element that differs."""
    if isinstance(a, list) and isinstance(b, list):
        if len(a) != len(b):
            return f"{len(a)} elements before, {len(b)} now"
        i = next(i for i, (x, y) in enumerate(zip(a, b, strict=True)) if not same(x, y))
        return f"[{i}] {_short(a[i], b[i])}"
    if isinstance(a, dict) and isinstance(b, dict):
        name = next(k for k in dict.fromkeys([*a, *b]) if k not in a or k not in b or not same(a[k], b[k]))
        return f"{name} {_short(a.get(name, '(missing)'), b.get(name, '(missing)'))}"
    return f"{a!r:.80} before, {b!r:.80} now"
