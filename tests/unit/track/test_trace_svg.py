"""The picture, the Perfetto file and the summary of a trace: well-formed, complete, on one time scale."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from rollover.plugins.dashboard.verbs.trace import show_traces, summary
from rollover.track.perfetto import perfetto
from rollover.track.trace import TRACE, TraceEvent, TraceFile, engine_visits
from rollover.track.trace_svg import COLOURS, draw
from unit.track.traced import MODES, traced

SVG = "{http://www.w3.org/2000/svg}"


def bars(svg: str) -> list[ET.Element]:
    return [r for r in ET.fromstring(svg).iter(f"{SVG}rect") if r.get("class", "").startswith("bar ")]


def left_and_right(bar: ET.Element) -> tuple[float, float]:
    x = float(bar.attrib["x"])
    return x, x + float(bar.attrib["width"])


def num_segments(trace: list[TraceEvent]) -> int:
    return sum(len(e.segments) for e in trace)


@pytest.mark.parametrize("mode", MODES)
def test_one_bar_a_segment_coloured_by_version(mode: str) -> None:
    run = traced(mode, 6)
    svg = draw([("a run", run.trace)])
    empty = sum(not s.segments for s in engine_visits(run.trace))
    found = bars(svg)
    assert len(found) == num_segments(run.trace) + empty > 20
    versions = sorted(v for s in engine_visits(run.trace) for v, _, _, _ in s.bars())
    colours = sorted(int(re.search(r"v(\d+)", b.attrib["class"])[1]) for b in found)  # type: ignore[index]
    assert colours == sorted(v % len(COLOURS) for v in versions)
    classes = [e.get("class") for e in ET.fromstring(svg).iter()]
    assert classes.count("train") == 6 + 1 and classes.count("publish") == 6 + 1, "one of each is in the legend"
    assert classes.count("over") == run.lifecycle.metrics()["rollouts/resumed"] + 1
    num_dropped = sum(len(s.bars()) for s in engine_visits(run.trace) if s.dropped)
    assert sum("dropped" in b.attrib["class"] for b in found) == num_dropped
    assert num_dropped or mode != "drop"


def test_two_traces_have_one_time_scale_and_their_own_titles() -> None:
    sync, partial = traced("sync", 3).trace, traced("partial", 6).trace
    partial = [e._replace(seconds=e.seconds + 1000) for e in partial]  # it had an evaluation first, say
    svg = draw([("above <sync>", sync), ("below & partial", partial)])
    titles = [t.text or "" for t in ET.fromstring(svg).iter(f"{SVG}text") if t.get("class") == "title"]
    assert titles[0].startswith("above <sync>: 3 steps") and titles[1].startswith("below & partial: 6 steps")
    found = bars(svg)
    assert len(found) == num_segments(sync) + num_segments(partial)
    lowest_of_first = max(float(b.attrib["y"]) for b in found[: num_segments(sync)])
    assert all(float(b.attrib["y"]) > lowest_of_first for b in found[num_segments(sync) :])
    # A bar's pixels by its seconds are the same above and below: 0.6 pixels are left free between bars.
    expected = [
        (end - start) for trace in (sync, partial) for s in engine_visits(trace) for _, _, start, end in s.bars()
    ]
    scales = {
        round((right - left + 0.6) / t, 2)
        for (left, right), t in zip(map(left_and_right, found), expected, strict=True)
        if t > 3
    }
    assert max(scales) - min(scales) < 0.05
    assert 1000 < max(left_and_right(b)[1] for b in found) <= 1200
    assert min(left_and_right(b)[0] for b in found[num_segments(sync) :]) < 200, "it begins at the left, too"


def test_nothing_happened() -> None:
    assert not bars(draw([("empty", [])])) and ET.fromstring(draw([]))
    assert perfetto([])["traceEvents"] and "0 steps" in summary("empty", [])


@pytest.mark.parametrize("mode", MODES)
def test_perfetto_slices_are_valid_and_do_not_overlap(mode: str) -> None:
    run = traced(mode, 6)
    events = json.loads(json.dumps(perfetto(run.trace)))["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]
    tracks: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for e in slices:
        assert e["ts"] >= 0 and e["dur"] >= 0 and e["name"] and isinstance(e["ts"], int)
        tracks.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
    for times in tracks.values():
        times.sort()
        assert all(end <= start for (_, end), (start, _) in zip(times, times[1:], strict=False))
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert tracks.keys() <= named.keys()
    by_track = {name: [e for e in slices if (e["pid"], e["tid"]) == key] for key, name in named.items()}
    assert [e["name"] for e in by_track["train"]] == [f"train v{v}" for v in range(6)]
    instants = [e for e in events if e["ph"] == "i"]
    assert [e["name"] for e in instants] == [f"v{v}" for v in range(1, 7)]
    assert {named[e["pid"], e["tid"]] for e in instants} == {"publish"}
    segments = [e for e in slices if e["cat"] == "segment"]
    assert sum(e["args"]["tokens"] for e in segments) == run.ledger.generated_tokens
    assert sum(1 for e in segments if e["args"]["tokens"]) == num_segments(run.trace)
    resumed = {(e["pid"], e["tid"], e["ts"]) for e in segments if e["args"]["resumed"]}
    assert len(resumed) == run.lifecycle.metrics()["rollouts/resumed"]
    visit = engine_visits(run.trace)[0]
    (first,) = [e for e in segments if e["name"] == f"{visit.group}-{visit.sibling} v{visit.segments[0][0]}"]
    assert first["ts"] == round(visit.start * 1e6) and named[first["pid"], first["tid"]] == f"slot {visit.slot}"


def test_what_the_verb_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for mode in ("sync", "partial"):
        (tmp_path / mode).mkdir()
        TraceFile(tmp_path / mode / TRACE).write(traced(mode, 3).trace)
    both = [tmp_path / "sync", tmp_path / "partial"]
    assert show_traces(both, None, tmp_path / "out.svg") == 0
    assert len(bars((tmp_path / "out.svg").read_text())) > 20
    assert show_traces(both[1:], tmp_path / "out.json", None) == 0
    assert json.loads((tmp_path / "out.json").read_text())["traceEvents"]
    capsys.readouterr()
    assert show_traces(both, None, None) == 0
    printed = capsys.readouterr().out
    generated = sum(e.tokens for e in traced("partial", 3).trace if e.kind in ("park", "finish"))
    assert printed.count("3 steps") == 2 and f"{generated:,} generated" in printed and "rolled over" in printed


def test_what_the_verb_refuses(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not the directory of a run"):
        show_traces([tmp_path], None, None)
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(ValueError, match="track.trace"):
        show_traces([tmp_path], None, None)
    TraceFile(tmp_path / TRACE).write(traced("sync", 1).trace)
    with pytest.raises(ValueError, match="one RUN_DIR"):
        show_traces([tmp_path, tmp_path], tmp_path / "x.json", None)
    for wrong in (tmp_path / "no" / "x.svg", tmp_path):
        with pytest.raises(ValueError, match="there is no folder|is a folder"):
            show_traces([tmp_path], None, wrong)
