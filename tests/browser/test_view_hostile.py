"""Texts that nobody should run, at every place where a run may have a text: they are texts on the page, and no more."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from chromium import served
from watched import Watched

from recorded_run import HOSTILE, recorded, row
from rollover.plugins.dashboard.report import make_report
from rollover.plugins.dashboard.run_data import RunData
from rollover.track.answers import Answer, RoleScore, write_answers
from rollover.track.jsonl import EvalFile, MetricsFile
from rollover.track.records import RolloutRecorder
from rollover.track.trace import TRACE, TraceEvent, TraceFile
from rollover.types import (
    DropReason,
    Group,
    Prompt,
    Reward,
    Rollout,
    RolloutState,
    SamplingParams,
    Segment,
    StopReason,
    Task,
)

pytestmark = pytest.mark.browser
Opens = Callable[..., Watched]
MARKUP = "</script><script>alert(1)</script><img src=x onerror=alert(2)><!--"
ALL = MARKUP + "".join(HOSTILE[name] for name in sorted(HOSTILE) if name not in ("long", "surrogate"))
LINES = ALL + HOSTILE["surrogate"]
VIEWS = ("overview?add={key}", "timeline", "rollouts?limit=100", "rollout?step=2&id=2-0", "rollout?step=2&id=3-1")
VIEWS += ("ledger", "compare?keys={key}", "plan")
VIEWS += ("answers", "answers?step=2&place=0", "episode?step=1&group=0&sibling=0")


def hostile_run(path: Path, number: int = 0) -> Path:
    """Whose every text is hostile, its directory's name, too. `number`: its settings differ by it."""
    path.mkdir(parents=True)
    config = {
        "run": {"name": LINES},
        "model": {"path": LINES},
        "train": {"num_steps": 3},
        "rewards": {f"{LINES}": f"{LINES}{number}"},
    }
    (path / "config.resolved.json").write_text(json.dumps(config))
    (path / "lock").write_text("nobody")
    recorder = RolloutRecorder(path / "rollouts")
    trace = TraceFile(path / TRACE)
    with MetricsFile(path / "metrics.jsonl") as metrics, EvalFile(path / "eval.jsonl") as evaluations:
        for step in (1, 2):
            groups = [group_of(2 * step - 2), group_of(2 * step - 1)]
            left = [recorded(groups[0], text=LINES), recorded(groups[1], DropReason.STALE, text=LINES)]
            recorder.write(step, left)
            for of in groups:
                visit = [TraceEvent("start", step + 0.1, 0, of.group_id, MARKUP)]
                visit += [TraceEvent("finish", step + 0.4, 0, of.group_id, MARKUP, tokens=3, segments=((0, 3),))]
                trace.write(visit)
            trace.write([TraceEvent("drop", step + 0.5, 0, groups[1].group_id, None, tokens=6, reason=ALL)])
            metrics.write(row(step) | {f"own/{ALL}": 0.5 * step})
            scores = {"mean": 0.5, "ci": [0.4, 0.6], "tasks": 2, "missing": 0}
            evaluations.write({"step": step, **scores, "sources": {ALL: {"mean": 0.5}}})
            (path / "evaluations").mkdir(exist_ok=True)
            write_answers(path / "evaluations" / f"step-{step:06d}.jsonl", [answer_of(0, None), answer_of(1, 0.5)])
    return path


def answer_of(sibling: int, score: float | None) -> Answer:
    roles = (RoleScore(ALL, 0.5),)
    return Answer(LINES, sibling, LINES, ALL, LINES, ALL, 3, score, LINES, LINES, LINES, roles, ALL, LINES)


def group_of(group_id: int) -> Group:
    messages = ({"role": ALL, "content": LINES}, {"role": "user", "content": LINES})
    task = Task(LINES, LINES, LINES, messages, columns={LINES: LINES})
    ids = np.arange(3, dtype=np.int32)
    rollouts = []
    for sibling in range(2):
        segments = [Segment(ids, -ids.astype(np.float32), 0, SamplingParams(), StopReason.EOS)]
        reward = Reward(0.5, extras={LINES: 1.0}, shaping={LINES: 0.5}) if sibling else Reward(None, error=LINES)
        rollouts.append(Rollout(group_id, sibling, task, segments, RolloutState.CONSUMED, StopReason.EOS, reward))
    return Group(group_id, task, Prompt((7, 8)), rollouts)


def views() -> list[str]:
    from urllib.parse import quote

    return [view.format(key=quote(f"own/{ALL}", safe="")) for view in VIEWS]


def folder(tmp_path: Path) -> Path:
    """A slash is all that a folder's name cannot have, beside the character of number 0."""
    return tmp_path / MARKUP / ALL.replace("\x00", "").replace("/", "|")[:60]


def harmless(watched: Watched, url: str, *own: str) -> None:
    watched.page.add_init_script("window.alert = () => { throw new Error('a text was run') }")
    for view in views():
        watched.page.goto("about:blank")
        watched.page.goto(f"{url}#/{view}")
        watched.until("document.querySelector('main h1, main .cards, main .rollouts') !== null")
        watched.until("document.querySelector('.loading') === null")
        watched.page.wait_for_load_state("networkidle")
        assert watched.value("checks.harm()") == [], view
        assert watched.value("checks.tooWide()") == [], view
        assert "alert(1)" in watched.value("document.body.innerText"), view
        watched.check(*own)
    watched.close()


def test_on_the_page_of_a_server(tmp_path: Path, open_page: Opens) -> None:
    runs = [hostile_run(folder(tmp_path) / "a", 1), hostile_run(folder(tmp_path) / "b", 2)]
    with served(*runs) as url:
        harmless(open_page(), f"{url}/", url)
        harmless(open_page(viewport={"width": 390, "height": 844}), f"{url}/", url)


def test_in_a_report(tmp_path: Path, open_page: Opens) -> None:
    runs = [hostile_run(folder(tmp_path) / "a", 1), hostile_run(folder(tmp_path) / "b", 2)]
    file = tmp_path / "report.html"
    file.write_text(make_report([RunData(of) for of in runs]), encoding="utf-8")
    watched = open_page()
    watched.page.context.set_offline(True)
    harmless(watched, file.as_uri(), "file:")


def test_an_error_and_a_prompt_of_a_megabyte(tmp_path: Path, open_page: Opens) -> None:
    path = hostile_run(tmp_path / "run")
    long = group_of(8)
    task = Task("long", "long", "own", prompt=HOSTILE["long"])
    rollouts = [replace(of, task=task, reward=Reward(None, error=HOSTILE["long"])) for of in long.rollouts]
    RolloutRecorder(path / "rollouts").write(
        3, [recorded(Group(8, task, Prompt((7,)), rollouts), text=HOSTILE["long"])]
    )
    watched = open_page()
    with served(path) as url:
        watched.show(url, "rollout?step=3&id=8-0")
        assert watched.value("checks.tooWide()") == [] == watched.value("checks.harm()")
        height = watched.value("document.documentElement.scrollHeight")
        assert height < 12_000, "whoever scrolls comes to what is below it"
        watched.click("nav a")
        watched.drawn("overview")
        watched.close()
