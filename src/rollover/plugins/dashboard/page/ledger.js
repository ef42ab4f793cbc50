// Ledger: everything that was generated is trained, dropped for a reason, or held; in tokens, and in seconds of slots.

import { el, replace, table } from "./dom.js";
import { count, duration, percent, short } from "./words.js";
import { themed } from "./colours.js";

export class LedgerView {
  constructor(page) {
    this.page = page;
    this.node = el("div", { class: "view" });
  }

  async open() {
    const told = await this.page.source.ask(this.page.run, "ledger");
    this.told = told;
    const reading = told.read < 1 ? el("p", { text: `Still reading the run: what stands here is of ${percent(told.read)} of it so far.` }) : null;
    replace(this.node, el("h1", { text: "Ledger" }), reading, told.accounts ? [this._flow(told), this._table(told)] : el("p", { text: "No step has been made yet." }), this._waste(told), this._seconds(told), this._lengths(told));
  }

  async update(changed) {
    if (changed.has("metrics") || changed.has("rollouts") || (changed.has("trace") && this.told?.read < 1)) await this.open();
  }

  repaint() {
    if (this.told) this.open().catch((error) => this.page.failed(error));
  }

  _parts({ accounts }) {
    return [["trained", accounts.trained, "good"], ...Object.entries(accounts.dropped).map(([reason, of]) => [`dropped: ${reason}`, of, "warning"]), ["held", accounts.held, "quiet"]];
  }

  /** A flow from one bar at the left to one for each account at the right. */
  _flow(told) {
    const { accounts } = told, total = Math.max(1, accounts.generated.tokens);
    const parts = this._parts(told).filter(([, of]) => of.tokens > 0);
    const [width, height, gap] = [640, 220, 10];
    const scale = (height - gap * (parts.length - 1)) / total;
    const NS = "http://www.w3.org/2000/svg";
    const svg = (tag, properties, text = null) => {
      const node = document.createElementNS(NS, tag);
      for (const [name, value] of Object.entries(properties)) node.setAttribute(name, String(value));
      if (text !== null) node.textContent = text;
      return node;
    };
    const drawing = svg("svg", { viewBox: `0 0 ${width} ${height + 24}`, role: "img", class: "flow", "aria-label": `Of ${total} tokens generated: ${parts.map(([name, of]) => `${of.tokens} ${name}`).join(", ")}` });
    let left = (height - total * scale) / 2, right = 0;
    drawing.append(svg("rect", { x: 0, y: left, width: 14, height: total * scale, fill: themed("text") }));
    drawing.append(svg("text", { x: 0, y: height + 18, class: "flow-label" }, `generated ${count(accounts.generated.tokens)} tokens`));
    for (const [name, of, colour] of parts) {
      const thick = Math.max(1, of.tokens * scale), fill = themed(colour);
      const [x0, x1, middle] = [14, 420, 217];
      drawing.append(svg("path", { d: `M${x0},${left} C${middle},${left} ${middle},${right} ${x1},${right} L${x1},${right + thick} C${middle},${right + thick} ${middle},${left + of.tokens * scale} ${x0},${left + of.tokens * scale} Z`, fill, "fill-opacity": 0.35 }));
      drawing.append(svg("rect", { x: x1, y: right, width: 10, height: thick, fill }));
      drawing.append(svg("text", { x: x1 + 18, y: Math.max(10, right + thick / 2 + 4), class: "flow-label" }, `${name} ${percent(of.tokens / total)}`));
      left += of.tokens * scale;
      right += thick + gap;
    }
    return el("figure", {}, drawing);
  }

  _table(told) {
    const { accounts } = told, total = accounts.generated.tokens;
    const rows = [["generated", accounts.generated], ...this._parts(told)];
    const also = [];
    for (const [name, groups] of Object.entries(accounts.filtered)) if (groups) also.push(`The filter ${name} dropped ${count(groups)} groups.`);
    if (accounts.reprefilled) also.push(`${count(accounts.reprefilled)} tokens were computed again as rollouts went on: a cost beside the accounts.`);
    also.push(told.missing_tokens === 0 ? "Generated is trained and dropped and held: nothing is missing." : `${count(told.missing_tokens)} tokens are in no account.`);
    return el("section", {}, table("Accounts", [
      { title: "Account", of: ([name]) => name },
      { title: "Groups", number: true, of: ([, of]) => count(of.groups) },
      { title: "Tokens", number: true, of: ([, of]) => count(of.tokens) },
      { title: "Share", number: true, of: ([, of]) => percent(total ? of.tokens / total : null) },
    ], rows), el("p", { text: also.join(" ") }));
  }

  _waste({ waste, accounts }) {
    const kinds = Object.entries(waste ?? {});
    if (!kinds.length) return null;
    const names = { dropped: "Sampled, and never trained", reprefilled: "Computed again as rollouts went on" };
    return el("section", {}, table("Waste of all steps", [
      { title: "What", of: ([kind]) => names[kind] },
      { title: "Tokens", number: true, of: ([, of]) => count(of.tokens) },
      { title: "Of those generated", number: true, of: ([, of]) => percent(accounts?.generated.tokens ? of.tokens / accounts.generated.tokens : null) },
      { title: "Engine time, estimated", number: true, of: ([, of]) => duration(of.seconds ?? null, 0.1) },
    ], kinds));
  }

  _seconds({ slot_seconds: seconds }) {
    if (!seconds) return el("p", { text: "Seconds of slots are not known: the run wrote no trace (track.trace)." });
    const total = Object.values(seconds).reduce((sum, value) => sum + value, 0);
    return el("section", {}, table("Seconds of engine slots, by what became of the groups in them", [
      { title: "What became of them", of: ([name]) => name },
      { title: "Time", number: true, of: ([, value]) => duration(value, 0.1) },
      { title: "Share", number: true, of: ([, value]) => percent(total ? value / total : null) },
    ], Object.entries(seconds)));
  }

  _lengths({ lengths, bias }) {
    const outcomes = Object.keys(lengths.counts);
    if (!outcomes.length) return null;
    const most = Math.max(1, ...outcomes.flatMap((name) => lengths.counts[name]));
    const said = bias["bias/trained_vs_dispatched_length"];
    return el("section", {}, el("h2", { text: "Lengths: what was trained against what left otherwise" }),
      this._waits(bias),
      said !== undefined && said !== null ? el("p", { text: `Trained rollouts are ${short(said)} times as long as all that were begun, those still unfinished counted in (bias/trained_vs_dispatched_length). Far below 1, training sees too many short answers.` }) : null,
      outcomes.map((name) => el("div", { class: "histogram" }, el("h3", { text: `${name}: ${short(lengths.means[name])} tokens on average` }),
        el("div", { class: "columns", role: "img", "aria-label": `Lengths of ${name} rollouts` }, lengths.counts[name].map((number, place) =>
          el("span", { style: { height: `${(100 * number) / most}%` }, title: `${lengths.edges[place]} to ${lengths.edges[place + 1] - 1} tokens: ${count(number)}` }))),
        el("p", { class: "ends" }, el("span", { text: String(lengths.edges[0]) }), el("span", { text: `${lengths.edges[lengths.edges.length - 1] - 1} tokens` })))));
  }

  /** Do long answers wait for more versions than short ones? */
  _waits(bias) {
    const quarters = [1, 2, 3, 4].map((quarter) => bias[`bias/wait_steps_q${quarter}`]);
    if (quarters.some((value) => value === undefined || value === null)) return null;
    return el("p", { text: `From admission to its step a trained rollout waits ${quarters.map(short).join(", ")} policy versions on average, by quarter of lengths: the shortest first.` });
  }
}
