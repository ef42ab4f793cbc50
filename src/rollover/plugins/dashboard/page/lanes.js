// The picture of rollouts over time: lanes on a canvas, and what lies at a place of it.

import { duration, plural } from "./words.js";
import { themed, versionColour } from "./colours.js";

export const LANES_LEFT = 76;
const RESUMED = 1, PARKED = 2, DROPPED = 4, RUNS = 8; // of a bar's "how"
const SPANS = ["generate", "train", "weights", "sleep", "checkpoint", "eval"];
const ROW = 14, AXIS = 22, CLOSE_BY = 6, BETWEEN = 18, MOST_JOINS = 300;

function shadeOf(busy) {
  return 0.15 + 0.85 * (busy / 20);
}

/** [number of a bar, number of the one with which its rollout goes on] of all that are in the window. */
function joinsOf(bars) {
  const lives = new Map(), found = [];
  for (let i = 0; i < bars.lane.length; i++) {
    const key = `${bars.group[i]}-${bars.sibling[i]}`;
    if (!lives.has(key)) lives.set(key, []);
    lives.get(key).push(i);
  }
  for (const life of lives.values()) {
    life.sort((a, b) => bars.start[a] - bars.start[b]);
    for (let place = 1; place < life.length; place++) {
      if (bars.how[life[place]] & RESUMED) found.push([life[place - 1], life[place]]);
    }
  }
  return found;
}

/**
 * `told`: the answer to "lanes". `shown`: [from, to] in seconds. What is marked: a `group`, and by their numbers the bar
 * that the keyboard is at (`current`) and the one that is pointed at (`hovered`).
 */
export class LanesPicture {
  constructor(canvas) {
    Object.assign(this, { canvas, told: null, shown: [0, 1], group: null, current: undefined, hovered: undefined, joins: [] });
  }

  set(told, shown) {
    Object.assign(this, { told, shown, hovered: undefined, joins: told.bars ? joinsOf(told.bars) : [] });
    this.draw();
  }

  get perSecond() {
    return (this.canvas.parentElement.clientWidth - LANES_LEFT) / (this.shown[1] - this.shown[0]);
  }

  _rows() {
    return SPANS.filter((name) => this.told.spans[name]);
  }

  _layout() {
    const rows = this._rows(), lanes = Math.max(1, this.told.lanes.length);
    const height = Math.max(2, Math.min(18, Math.floor(560 / lanes)));
    const top = AXIS + rows.length * ROW + BETWEEN, bottom = top + lanes * height, acts = this.told.acts?.lanes ?? 0;
    const actTop = bottom + (acts ? BETWEEN : 0), actHeight = acts ? Math.max(2, Math.min(10, Math.floor(240 / acts))) : 0;
    return { rows, top, height, bottom, acts, actTop, actHeight, total: actTop + acts * actHeight + 8 };
  }

  draw() {
    const { told, canvas } = this;
    if (!told) return;
    const layout = (this.layout = this._layout());
    const width = canvas.parentElement.clientWidth, ratio = devicePixelRatio || 1;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(layout.total * ratio);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${layout.total}px`;
    const ctx = (this.ctx = canvas.getContext("2d"));
    ctx.scale(ratio, ratio);
    ctx.font = `11px ${themed("font")}`;
    ctx.textBaseline = "middle";
    const [from, to] = this.shown;
    this.scale = this.perSecond;
    this._drawAxis(ctx, width);
    ctx.save();
    ctx.beginPath();
    ctx.rect(LANES_LEFT, 0, width - LANES_LEFT, layout.total);
    ctx.clip();
    this._drawLoop(ctx, layout);
    if (told.bars) this._drawBars(ctx, layout);
    else this._drawCells(ctx, layout);
    if (layout.acts) this._drawActs(ctx, layout);
    this._drawJoins(ctx, layout);
    this._drawMoments(ctx, layout);
    ctx.restore();
    this._drawNames(ctx, layout);
  }

  _x(seconds) {
    return LANES_LEFT + (seconds - this.shown[0]) * this.scale;
  }

  _drawAxis(ctx, width) {
    const [from, to] = this.shown;
    const wanted = (to - from) / Math.max(2, (width - LANES_LEFT) / 110);
    const power = 10 ** Math.floor(Math.log10(wanted));
    const step = [1, 2, 5, 10].map((by) => by * power).find((by) => by >= wanted);
    ctx.fillStyle = themed("quiet");
    ctx.strokeStyle = themed("grid");
    ctx.textAlign = "center";
    for (let at = Math.ceil(from / step) * step; at <= to; at += step) {
      const x = this._x(at);
      ctx.beginPath();
      ctx.moveTo(x, AXIS - 5);
      ctx.lineTo(x, this.layout.total);
      ctx.stroke();
      const said = duration(at, step);
      if (x + ctx.measureText(said).width / 2 <= width) ctx.fillText(said, x, AXIS / 2); // half a time tells another one
    }
  }

  _drawNames(ctx, layout) {
    ctx.fillStyle = themed("quiet");
    ctx.textAlign = "left";
    layout.rows.forEach((name, row) => ctx.fillText(name, 2, AXIS + row * ROW + ROW / 2));
    ctx.fillText("dropped", 2, layout.top - 9);
    const every = Math.max(1, Math.ceil(14 / layout.height));
    if (layout.acts) ctx.fillText(`${plural(layout.acts, "environment")} or agent${layout.acts === 1 ? "" : "s"} at work at once, at most`, 2, layout.bottom + BETWEEN / 2);
    this.told.lanes.forEach(([engine, slot], lane) => {
      if (lane % every === 0) ctx.fillText(engine ? `${engine}: ${slot}` : `slot ${slot}`, 2, layout.top + lane * layout.height + layout.height / 2);
    });
  }

  _drawLoop(ctx, layout) {
    for (const [row, name] of layout.rows.entries()) {
      const spans = this.told.spans[name], y = AXIS + row * ROW + 2;
      ctx.fillStyle = themed(`span-${name}`);
      for (let i = 0; i < spans.start.length; i++) {
        const x = this._x(spans.start[i]);
        ctx.fillRect(x, y, Math.max(1, this._x(spans.end[i]) - x), ROW - 4);
      }
      if (name !== "train") continue;
      ctx.globalAlpha = 0.12;
      for (let i = 0; i < spans.start.length; i++) {
        const x = this._x(spans.start[i]);
        ctx.fillRect(x, layout.top, this._x(spans.end[i]) - x, layout.bottom - layout.top);
      }
      ctx.globalAlpha = 1;
    }
  }

  _drawBars(ctx, layout) {
    const { bars } = this.told;
    for (let i = 0; i < bars.lane.length; i++) {
      const x = this._x(bars.start[i]), width = Math.max(1, this._x(bars.end[i]) - x), how = bars.how[i];
      const y = layout.top + bars.lane[i] * layout.height, height = Math.max(1, layout.height - 1);
      ctx.fillStyle = versionColour(bars.version[i], how & DROPPED ? 0.35 : 1);
      ctx.fillRect(x, y, width, height);
      if (height < 3) continue;
      ctx.fillStyle = themed("text");
      if (how & PARKED) ctx.fillRect(x + width - 2, y, 2, height);
      if (how & RESUMED) ctx.fillRect(x, y + height / 2 - 0.5, Math.min(5, width), 1);
      if (this._isMarked(i)) {
        ctx.strokeStyle = themed("text");
        ctx.lineWidth = 1.5;
        ctx.strokeRect(x - 0.5, y - 0.5, width + 1, height + 1);
      }
      if (width > 60 && height > 11) {
        ctx.fillStyle = "#111";
        ctx.textAlign = "left";
        ctx.fillText(`${bars.group[i]}-${bars.siblings[bars.sibling[i]]}`, x + 4, y + height / 2);
      }
    }
  }

  _drawCells(ctx, layout) {
    this._paintCells(ctx, this.told.cells, layout.top, layout.height, (cells, i) => versionColour(cells.version[i], shadeOf(cells.busy[i])));
  }

  _paintCells(ctx, cells, top, height, colour) {
    const { from, to } = this.told, width = (to - from) / cells.columns;
    for (let i = 0; i < cells.lane.length; i++) {
      const x = this._x(from + cells.column[i] * width);
      ctx.fillStyle = colour(cells, i);
      ctx.fillRect(x, top + cells.lane[i] * height, this._x(from + (cells.column[i] + cells.length[i]) * width) - x + 0.3, Math.max(1, height - (height > 3 ? 1 : 0)));
    }
  }

  _drawActs(ctx, layout) {
    const { bars, cells } = this.told.acts, { actTop: top, actHeight: height } = layout;
    const fill = themed("line4");
    if (cells) {
      ctx.fillStyle = fill;
      this._paintCells(ctx, cells, top, height, (of, i) => { ctx.globalAlpha = shadeOf(of.busy[i]); return fill; });
    } else {
      for (let i = 0; i < bars.lane.length; i++) {
        const x = this._x(bars.start[i]);
        ctx.fillStyle = fill;
        ctx.globalAlpha = this.group === null || this.group === bars.group[i] ? 0.85 : 0.35;
        ctx.fillRect(x, top + bars.lane[i] * height, Math.max(1, this._x(bars.end[i]) - x), Math.max(1, height - 1));
      }
    }
    ctx.globalAlpha = 1;
  }

  /** Lines from where a rollout was interrupted (dashed: its turn ended) to where it goes on. */
  _drawJoins(ctx, layout) {
    const { bars } = this.told;
    if (!bars) return;
    const all = this.joins.length <= MOST_JOINS;
    for (const [from, to] of this.joins) {
      const marked = this._isMarked(from) || this._isMarked(to);
      if (!all && !marked) continue;
      const middle = (i) => layout.top + (bars.lane[i] + 0.5) * layout.height;
      ctx.strokeStyle = themed(marked ? "text" : "quiet");
      ctx.lineWidth = marked ? 1.5 : 0.6;
      ctx.globalAlpha = marked ? 1 : 0.5;
      ctx.setLineDash(bars.how[from] & PARKED ? [] : [3, 3]);
      ctx.beginPath();
      ctx.moveTo(this._x(bars.end[from]), middle(from));
      ctx.lineTo(this._x(bars.start[to]), middle(to));
      ctx.stroke();
    }
    ctx.globalAlpha = 1;
    ctx.setLineDash([]);
  }

  _isMarked(i) {
    const { bars } = this.told;
    if (this.group === bars.group[i]) return true;
    return [this.current, this.hovered].some((of) => of !== undefined && bars.group[of] === bars.group[i] && bars.sibling[of] === bars.sibling[i]);
  }

  _drawMoments(ctx, layout) {
    const { published, drops } = this.told;
    ctx.strokeStyle = themed("quiet");
    ctx.lineWidth = 1;
    ctx.setLineDash([2, 3]);
    if (published.seconds.length < 400) {
      for (const seconds of published.seconds) {
        ctx.beginPath();
        ctx.moveTo(this._x(seconds), AXIS);
        ctx.lineTo(this._x(seconds), layout.total);
        ctx.stroke();
      }
    }
    ctx.setLineDash([]);
    ctx.fillStyle = themed("warning");
    for (const seconds of drops.seconds) {
      const x = this._x(seconds);
      ctx.beginPath();
      ctx.moveTo(x - 4, layout.top - 14);
      ctx.lineTo(x + 4, layout.top - 14);
      ctx.lineTo(x, layout.top - 6);
      ctx.fill();
    }
  }

  at(x, y) {
    const { told, layout } = this;
    if (!told || !layout) return null;
    const seconds = this.shown[0] + (x - LANES_LEFT) / this.scale, near = CLOSE_BY / this.scale;
    if (y > AXIS && y < layout.top - 18) {
      const name = layout.rows[Math.floor((y - AXIS) / ROW)], spans = told.spans[name];
      const i = spans ? spans.start.findIndex((start, place) => start <= seconds && seconds <= spans.end[place]) : -1;
      return i < 0 ? null : { text: `${name} at version ${spans.version[i]}: ${duration(spans.end[i] - spans.start[i], 0.01)} from ${duration(spans.start[i], 0.01)}` };
    }
    if (y >= layout.top - 18 && y < layout.top) {
      const i = told.drops.seconds.findIndex((at) => Math.abs(at - seconds) < near);
      return i < 0 ? null : { group: told.drops.group[i], text: `group ${told.drops.group[i]} dropped: ${told.reasons[told.drops.reason[i]]}, ${plural(told.drops.tokens[i], "token")} at ${duration(told.drops.seconds[i], 0.01)}` };
    }
    if (layout.acts && y >= layout.actTop) return this._actAt(seconds, Math.floor((y - layout.actTop) / layout.actHeight), near);
    const lane = Math.floor((y - layout.top) / layout.height);
    if (lane < 0 || lane >= told.lanes.length) return null;
    if (told.cells) return { zoom: true, text: `${duration(seconds, 1 / this.scale)}: click to look closer` };
    const { bars } = told;
    for (let i = bars.lane.length - 1; i >= 0; i--) {
      if (bars.lane[i] === lane && bars.start[i] - near / 3 <= seconds && seconds <= bars.end[i] + near / 3) return { bar: i, text: this.barText(i) };
    }
    return null;
  }

  _actAt(seconds, lane, near) {
    const { bars } = this.told.acts;
    if (!bars) return { zoom: true, text: `${duration(seconds, 1 / this.scale)}: click to look closer` };
    for (let i = 0; i < bars.lane.length; i++) {
      if (bars.lane[i] !== lane || seconds < bars.start[i] - near / 3 || seconds > bars.end[i] + near / 3) continue;
      const id = `${bars.group[i]}-${bars.siblings[bars.sibling[i]]}`;
      return { group: bars.group[i], id, text: `environment or agent of rollout ${id} at work: ${duration(bars.end[i] - bars.start[i], 0.001)} from ${duration(bars.start[i], 0.001)}` };
    }
    return null;
  }

  barText(i) {
    const { bars } = this.told, how = bars.how[i];
    return [`rollout ${bars.group[i]}-${bars.siblings[bars.sibling[i]]}`, `version ${bars.version[i]}`, how & RUNS ? "running at the last event" : plural(bars.tokens[i], "token"),
      `${duration(bars.end[i] - bars.start[i], 0.001)} from ${duration(bars.start[i], 0.001)}`, how & RESUMED ? "resumed" : "", how & PARKED ? "then interrupted: it rolls over" : "", how & DROPPED ? "its group was dropped" : ""].filter(Boolean).join(" · ");
  }
}
