// How stale what was trained was: a map of steps and stalenesses, the darker the more rollouts.

import { el, replace, announce } from "./dom.js";
import { plural, percent } from "./words.js";
import { themed } from "./colours.js";

const SIDE = 34, LINE = 14, FOOT = 18;

/** `onPick(query)`: rollouts of a cell are wanted. */
export class StalenessMap {
  constructor(onPick) {
    this.onPick = onPick;
    this.told = null;
    this.cell = null;
    this.canvas = el("canvas", { tabindex: "0", role: "application", "aria-label": "Staleness of trained rollouts over steps: arrow keys go from cell to cell, Enter shows its rollouts", on: {
      pointermove: (event) => this._point(event), click: (event) => { this._point(event); this._pick(); }, keydown: (event) => this._key(event) } });
    this.said = el("p", { class: "legend", text: "The darker, the more of the rollouts that were trained at these steps." });
    this.node = el("figure", { class: "chart heat" }, el("figcaption", {}, el("h3", { text: "Staleness of trained rollouts", title: "Trainer version at the step less the oldest version that sampled of the rollout" })), el("div", { class: "plot" }, this.canvas), this.said);
    this.sized = new ResizeObserver(() => { if (this.canvas.parentElement.clientWidth !== this.painted) this.repaint(); }); // its height is our own doing
    this.sized.observe(this.canvas.parentElement);
  }

  set(told) {
    this.told = told;
    this.node.hidden = !told.first.length;
    this.repaint();
  }

  close() {
    this.sized.disconnect();
  }

  repaint() {
    const { told, canvas } = this, width = canvas.parentElement.clientWidth;
    if (!told?.first.length || !width) return;
    this.painted = width;
    const levels = told.low.length, columns = told.first.length, ratio = devicePixelRatio || 1;
    this.high = Math.max(LINE, Math.min(40, Math.floor(160 / levels)));
    this.wide = (width - SIDE) / columns;
    const height = levels * this.high + FOOT;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    const ctx = canvas.getContext("2d");
    ctx.scale(ratio, ratio);
    ctx.font = `11px ${themed("font")}`;
    ctx.textBaseline = "middle";
    const totals = told.first.map((_, column) => told.counts.reduce((sum, level) => sum + level[column], 0));
    for (let level = 0; level < levels; level++) {
      const y = (levels - 1 - level) * this.high;
      for (let column = 0; column < columns; column++) {
        if (!told.counts[level][column]) continue;
        ctx.globalAlpha = 0.12 + 0.88 * (told.counts[level][column] / totals[column]);
        ctx.fillStyle = themed("line1");
        ctx.fillRect(SIDE + column * this.wide, y, Math.max(1, this.wide + 0.3), this.high - 1);
      }
      ctx.globalAlpha = 1;
      ctx.fillStyle = themed("quiet");
      ctx.textAlign = "right";
      ctx.fillText(this._level(level), SIDE - 4, y + this.high / 2);
    }
    ctx.textAlign = "left";
    ctx.fillText(`step ${told.first[0]}`, SIDE, height - FOOT / 2);
    ctx.textAlign = "right";
    ctx.fillText(`step ${told.last[columns - 1]}`, width, height - FOOT / 2);
    if (this.cell) {
      const [level, column] = this.cell;
      ctx.strokeStyle = themed("text");
      ctx.strokeRect(SIDE + column * this.wide, (levels - 1 - level) * this.high, Math.max(2, this.wide), this.high - 1);
    }
  }

  _level(level) {
    const { low, high } = this.told;
    return low[level] === high[level] ? String(low[level]) : `${low[level]}-${high[level]}`;
  }

  _point(event) {
    if (!this.told?.first.length) return;
    const box = this.canvas.getBoundingClientRect(), { low, first } = this.told;
    const column = Math.floor((event.clientX - box.left - SIDE) / this.wide), level = low.length - 1 - Math.floor((event.clientY - box.top) / this.high);
    if (column >= 0 && column < first.length && level >= 0 && level < low.length) this._choose(level, column);
  }

  _choose(level, column) {
    if (this.cell?.[0] === level && this.cell[1] === column) return;
    this.cell = [level, column];
    const { told } = this, count = told.counts[level][column], total = told.counts.reduce((sum, of) => sum + of[column], 0);
    const steps = told.first[column] === told.last[column] ? `step ${told.first[column]}` : `steps ${told.first[column]} to ${told.last[column]}`;
    this.text = `${steps}: ${plural(count, "rollout")} of staleness ${this._level(level)}, ${percent(total ? count / total : null)} of the trained ones`;
    replace(this.said, this.text);
    this.repaint();
  }

  _pick() {
    if (!this.cell) return;
    const [level, column] = this.cell, { told } = this;
    this.onPick({ step_from: told.first[column], step_to: told.last[column], staleness_from: told.low[level], staleness_to: told.high[level], outcome: "trained" });
  }

  _key(event) {
    const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [1, 0], ArrowDown: [-1, 0] };
    if (event.key in moves && this.told?.first.length) {
      const [level, column] = this.cell ?? [0, -1], [up, right] = moves[event.key];
      this._choose(Math.max(0, Math.min(this.told.low.length - 1, level + up)), Math.max(0, Math.min(this.told.first.length - 1, column + right)));
      announce(this.text);
    } else if (event.key === "Enter") this._pick();
    else return;
    event.preventDefault();
  }
}
