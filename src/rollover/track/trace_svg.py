"""A trace as SVG: time to the right, engine slots downward, each segment a bar coloured by its policy version.

Several traces are drawn one above the other on one time scale. No script and no font, so the file opens anywhere; it
follows the reader's light or dark mode. docs/trace.md explains the picture.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from rollover.track.trace import PUBLISH, EngineVisit, TraceEvent, busy_share, engine_visits, spans

_WIDTH, _LEFT, _RIGHT = 1200, 56, 16
_TITLE, _AXIS, _LEGEND, _GAP = 30, 34, 40, 14
_LANES_HEIGHT, _MIN_LANE, _MAX_LANE = 320, 2.0, 14.0
# Neighbouring versions differ in hue and in brightness, on white and on black.
COLOURS = ("#4c78a8", "#f2a541", "#3f9b6c", "#d65f5f", "#63b7c4", "#a672b0", "#b3a125", "#8c6d5a")
_STYLE = f"""
text{{font:13px system-ui,sans-serif;fill:#1f2328}} .small{{font-size:11px;fill:#59636e}} .title{{font-weight:600}}
.paper{{fill:#fff}} .idle{{fill:#eef1f4}} .train{{fill:#1f2328;opacity:.16}} .grid{{stroke:#d1d9e0}}
.publish{{stroke:#1f2328;stroke-dasharray:2 3;opacity:.55}} .dropped{{opacity:.4}}
.cut{{stroke:#1f2328;stroke-width:1.5}} .over{{stroke:#1f2328;stroke-width:.7;opacity:.6}}
.acts{{stroke:#1f2328;stroke-width:.9;stroke-dasharray:3 2;opacity:.6}}
{" ".join(f".v{i}{{fill:{colour}}}" for i, colour in enumerate(COLOURS))}
@media (prefers-color-scheme:dark){{
text{{fill:#e6edf3}} .small{{fill:#9198a1}} .paper{{fill:#0d1117}} .idle{{fill:#1b2129}} .train{{fill:#e6edf3}}
.grid{{stroke:#3d444d}} .publish,.cut,.over,.acts{{stroke:#e6edf3}}}}
"""


def draw(traces: Sequence[tuple[str, Sequence[TraceEvent]]]) -> str:
    """Draw `traces`, (title, events) from top to bottom, as SVG text. Time 0 is the start of each first generation."""
    panels = [_Panel(title, events) for title, events in traces]
    seconds = max((p.seconds for p in panels), default=0.0) or 1.0
    parts, top = [], float(_GAP)
    for panel in panels:
        parts += panel.draw(top, seconds)
        top += panel.height
    versions = sorted({v for p in panels for s in p.visits for v, _, _, _ in s.bars()})
    parts += _legend(top, versions)
    height = math.ceil(top + _LEGEND)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}"'
        f' role="img"><title>{escape("; ".join(t for t, _ in traces))}</title><style>{_STYLE}</style>'
        f'<rect class="paper" width="{_WIDTH}" height="{height}"/>'
    )
    return "\n".join([head, *parts, "</svg>"]) + "\n"


class _Panel:
    """One trace. `seconds`: its length on the time axis."""

    def __init__(self, title: str, events: Sequence[TraceEvent]) -> None:
        self.visits, self.spans, self.events = engine_visits(events), spans(events), events
        self.begin = min([s.start for s in self.spans if s.name == "generate"], default=0.0)
        self.seconds = max([s.end for s in (*self.spans, *self.visits)], default=self.begin) - self.begin
        places = sorted({(s.engine, s.slot) for s in self.visits})
        self.lanes = {place: i for i, place in enumerate(places)}
        self.lane = min(_MAX_LANE, max(_MIN_LANE, _LANES_HEIGHT / max(1, len(self.lanes))))
        self.height = _TITLE + self.lane * len(self.lanes) + _AXIS
        steps = sum(s.name == "train" for s in self.spans)
        self.title = f"{title}: {steps} steps in {self.seconds:.3g} s"
        busy = busy_share(events)
        if math.isfinite(busy):
            self.title += f", slots busy {100 * busy:.0f}% of generation"

    def draw(self, top: float, seconds: float) -> list[str]:
        scale = (_WIDTH - _LEFT - _RIGHT) / seconds

        def x(time: float) -> float:
            return _LEFT + (time - self.begin) * scale

        first, bottom = top + _TITLE, top + _TITLE + self.lane * len(self.lanes)
        out = [
            f'<text class="title" x="{_LEFT}" y="{top + 18:.1f}">{escape(self.title)}</text>',
            f'<text class="small" x="{_LEFT - 8}" y="{first + 10:.1f}" text-anchor="end">slots</text>',
            f'<text class="small" x="{_LEFT - 8}" y="{bottom:.1f}" text-anchor="end">{len(self.lanes)}</text>',
            _rect("idle", _LEFT, first, x(self.begin + self.seconds), bottom),
        ]
        for span in self.spans:
            if span.name == "train":
                out.append(_rect("train", x(span.start), first - 4, x(span.end), bottom + 4))
        for event in self.events:
            if event.kind == PUBLISH:
                x_publish = x(event.seconds)
                out.append(_line("publish", x_publish, first - 8, x_publish, bottom + 4))
        # rollout -> style, x and y of the line to its next bar
        left_at: dict[tuple[int, int | str], tuple[str, float, float]] = {}
        for visit in self.visits:
            y = first + self.lane * self.lanes[visit.engine, visit.slot]
            rollout, middle = (visit.group, visit.sibling), y + self.lane * 0.43
            if rollout in left_at:
                out.append(_line(*left_at[rollout], x(visit.start), middle))
            left_at[rollout] = "over" if visit.parked else "acts", x(visit.end), middle
            out += _bars(visit, x, y, y + self.lane * 0.86)
        return out + _axis(bottom, seconds, scale)


def _bars(visit: EngineVisit, x, top: float, bottom: float) -> list[str]:
    out = []
    for version, tokens, start, end in visit.bars():
        dropped = " dropped" if visit.dropped else ""
        about = f"rollout {visit.group}-{visit.sibling}, version {version}, {tokens} tokens, {end - start:.3g} s"
        kind = f"bar v{version % len(COLOURS)}{dropped}"
        # A thin gap before the next bar; but each is at least half a pixel wide.
        out.append(_rect(kind, x(start), top, max(x(end) - 0.6, x(start) + 0.5), bottom, about))
    if visit.parked:
        out.append(_line("cut", x(visit.end), top, x(visit.end), bottom))
    return out


def _axis(bottom: float, seconds: float, scale: float) -> list[str]:
    step = 10 ** math.floor(math.log10(seconds))
    step = next(s for s in (step / 5, step / 2, step, 2 * step) if seconds / s <= 10)
    out = []
    for i in range(int(seconds / step) + 1):
        x, label = _LEFT + i * step * scale, f"{i * step:g}" + (" s" if i == 0 else "")
        out.append(_line("grid", x, bottom + 4, x, bottom + 9))
        out.append(f'<text class="small" x="{x:.1f}" y="{bottom + 21:.1f}" text-anchor="middle">{label}</text>')
    return out


def _legend(top: float, versions: list[int]) -> list[str]:
    shown, more = versions[: len(COLOURS)], len(versions) > len(COLOURS)
    x, y = float(_LEFT), top + 10
    out = [f'<text x="{x}" y="{y + 10:.1f}">policy version</text>']
    x += 100
    for version in shown:
        out.append(_rect(f"v{version % len(COLOURS)}", x, y, x + 14, y + 12))
        out.append(f'<text class="small" x="{x + 18}" y="{y + 10:.1f}">{version}</text>')
        x += 42
    if more:
        out.append(f'<text class="small" x="{x}" y="{y + 10:.1f}">and again</text>')
        x += 66
    marks = (
        (_line("cut", x + 30, y, x + 30, y + 12) + _line("over", x + 30, y + 6, x + 44, y + 10), x + 30, "rolls over"),
        (_rect("train", x + 130, y, x + 144, y + 12), x + 130, "training"),
        (_line("publish", x + 227, y, x + 227, y + 12), x + 220, "new weights"),
        (_rect("v0 dropped", x + 330, y, x + 344, y + 12), x + 330, "dropped later"),
        (_line("acts", x + 440, y + 6, x + 458, y + 6), x + 444, "environment at work"),
    )
    for mark, left, label in marks:
        out += [mark, f'<text class="small" x="{left + 18:.1f}" y="{y + 10:.1f}">{label}</text>']
    return out


def _rect(kind: str, x0: float, y0: float, x1: float, y1: float, about: str = "") -> str:
    shape = f'<rect class="{kind}" x="{x0:.2f}" y="{y0:.2f}" width="{x1 - x0:.2f}" height="{y1 - y0:.2f}"'
    return f"{shape}><title>{escape(about)}</title></rect>" if about else f"{shape}/>"


def _line(kind: str, x0: float, y0: float, x1: float, y1: float) -> str:
    return f'<line class="{kind}" x1="{x0:.2f}" y1="{y0:.2f}" x2="{x1:.2f}" y2="{y1:.2f}"/>'
