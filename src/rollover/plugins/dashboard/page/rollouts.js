// All rollouts: filters, search, order and pages. Everything chosen stands in the address.

import { el, replace, labelled, button, link, announce } from "./dom.js";
import { short, percent, plural, versions, visible, listed } from "./words.js";
import { versionBackground } from "./colours.js";
import { address, go } from "./route.js";

const SORTS = { "": "as they left the run", step: "step", score: "score", advantage: "advantage", tokens: "length", staleness: "staleness", versions: "versions spanned", segments: "segments" };
const RANGES = { step: "Step", score: "Score", tokens: "Length", staleness: "Staleness", versions: "Versions spanned", version: "Newest version" };
const WORDS = { outcome: "Outcome", source: "Source", stop: "Stopped by" };
const PAGE = 50;

export class Rollouts {
  constructor(page) {
    this.page = page;
    this.node = el("div", { class: "view" });
  }

  async open(route) {
    this.route = route;
    const choices = await this.page.source.ask(this.page.run, "choices");
    this.list = el("ol", { class: "rollouts" });
    this.count = el("p", { class: "count", role: "status" });
    this.foot = el("div", { class: "pages" });
    replace(this.node, this._filters(choices), this.count, this.list, this.foot);
    this.offsets = [0];
    await this._load();
  }

  async update(changed) {
    if (!changed.has("rollouts")) return;
    const { source, run } = this.page;
    if (this.partly && this.offsets.length === 1 && !this.route.query.text) { // of what the server had read
      if ("rollouts" in (this.page.state?.reading ?? {}) || this.node.contains(document.activeElement)) return this._load();
      return this.open(this.route);
    }
    // Rows that somebody reads do not move: only how many there are is said.
    const told = await source.ask(run, "rollouts", { ...this.route.query, text: "", limit: 0 });
    if (told.total !== this.total) replace(this.fresh, button(`${plural(told.total - this.total, "rollout")} more: show`, () => this.open(this.route)));
  }

  _filters(choices) {
    const given = this.route.query;
    const field = (name, label, properties = {}) => labelled(label, el("input", { name, type: "number", step: "any", value: given[name] ?? "", ...properties }));
    const ranges = Object.entries(RANGES).filter(([name]) => choices.numbers[name]).map(([name, title]) => {
      const [low, high] = choices.numbers[name];
      return el("fieldset", {}, el("legend", { text: title }),
        field(`${name}_from`, "from", { placeholder: short(low) }), field(`${name}_to`, "to", { placeholder: short(high) }));
    });
    const words = Object.entries(WORDS).filter(([name]) => Object.keys(choices.words[name]).length > 1).map(([name, title]) => labelled(title,
      el("select", { name }, el("option", { value: "" }, "any"), Object.entries(choices.words[name]).map(([word, count]) =>
        el("option", { value: listed([word]), selected: given[name] === listed([word]) }, `${word} (${short(count)})`)))));
    const form = el("form", { class: "filters", role: "search", on: { submit: (event) => { event.preventDefault(); this._apply(form); } } },
      labelled("Text in prompt, answer or names", el("input", { name: "text", type: "search", value: given.text ?? "" })),
      words,
      labelled("Score", el("select", { name: "scored" }, [["", "any"], ["yes", "there is one"], ["no", "missing"]].map(([value, text]) => el("option", { value, selected: (given.scored ?? "") === value }, text)))),
      labelled("Sorted by", el("select", { name: "sort" }, Object.entries(SORTS).map(([value, text]) => el("option", { value, selected: (given.sort ?? "") === value }, text)))),
      labelled("Order", el("select", { name: "order" }, [["up", "ascending"], ["down", "descending"]].map(([value, text]) => el("option", { value, selected: (given.order ?? "up") === value }, text)))),
      el("details", { open: Object.keys(RANGES).some((name) => given[`${name}_from`] || given[`${name}_to`]) }, el("summary", { text: "Ranges" }), el("div", { class: "ranges" }, ranges)),
      el("button", { type: "submit", class: "primary" }, "Show"),
      link("Clear", address("rollouts", this.page.run)),
    );
    form.addEventListener("change", (event) => { if (event.target.tagName === "SELECT") this._apply(form); });
    return form;
  }

  _apply(form) {
    const query = Object.fromEntries([...new FormData(form)].filter(([name, value]) => value !== "" && !(name === "order" && value === "up")));
    if (address("rollouts", this.page.run, query) === location.hash) this.open(this.route);
    else go("rollouts", this.page.run, query);
  }

  async _load() {
    const { source, run } = this.page;
    const offset = this.offsets[this.offsets.length - 1], wanted = (this.looking = {}); // a newer one ends the one before
    this.count.textContent = "Looking…";
    let rows = [], searched = 0, told = null;
    do {
      told = await source.ask(run, "rollouts", { ...this.route.query, offset: told?.next ?? offset, limit: PAGE - rows.length });
      if (this.looking !== wanted) return;
      rows = [...rows, ...told.rows];
      searched = told.searched === null ? null : searched + told.searched;
      this._shown(told, rows, offset, searched);
      // A text is looked for in parts: on and on, until the page is full.
    } while (told.searched !== null && told.next !== null && rows.length < PAGE && !this.stopped && this.node.isConnected);
    this.stopped = false;
    this._shown(told, rows, offset, searched, true);
    announce(this.count.textContent);
  }

  _shown(told, rows, offset, searched, ended = false) {
    this.total = told.total;
    this.partly = told.read < 1;
    this.fresh = el("span", {});
    const far = searched === null ? "" : `; searched ${short(offset + searched)} of them${told.next === null ? "" : " so far"}`;
    const written = told.withText !== undefined && told.withText < told.total ? ` This report has the texts of ${short(told.withText)}.` : "";
    const reading = this.partly ? ` Still reading the run: ${percent(told.read)} of its steps so far.` : "";
    replace(this.count, `${plural(told.passed, "rollout")} of ${short(told.total)}${far}.${written}${reading} `, ended ? null : button("Stop", () => { this.stopped = true; }), this.fresh);
    replace(this.list, rows.map((row) => this._row(row)));
    if (!rows.length) replace(this.list, el("li", { class: "none", text: told.next === null ? "None." : "None so far." }));
    const move = (offsets) => async () => { this.offsets = offsets; await this._load(); this.count.scrollIntoView(); };
    replace(this.foot,
      button("Earlier", move(this.offsets.slice(0, -1)), { disabled: this.offsets.length === 1 }),
      button(searched === null ? "Further" : "Look further", move([...this.offsets, told.next]), { disabled: told.next === null }));
  }

  _row(row) {
    const to = address("rollout", this.page.run, { step: row.step, id: row.id });
    return el("li", {}, el("a", { class: "row", href: to },
      el("span", { class: "facts" },
        el("b", { text: row.id }),
        el("span", { text: `step ${row.step}` }),
        el("span", { class: row.score === null ? "missing" : "score", text: row.score === null ? "no score" : `score ${short(row.score)}` }),
        el("span", { text: plural(row.tokens, "token") }),
        el("span", { class: "versions", style: row.newest !== null ? { background: versionBackground(row.newest) } : {}, text: `version ${versions(row.oldest, row.newest)}` }),
        row.staleness ? el("span", { text: `staleness ${row.staleness}` }) : null,
        el("span", { class: row.outcome === "trained" ? "" : "dropped", text: row.outcome }),
        el("span", { text: row.stop }),
        el("span", { class: "source", text: row.source })),
      el("bdi", { class: "asked", text: visible(row.asked ?? "") }),
      el("bdi", { class: "answered", text: visible(row.answered ?? "") })),
      row.contexts > 1 ? link(`One of ${row.contexts} rollouts of episode ${row.group}-${row.sibling}`, address("episode", this.page.run, { step: row.step, group: row.group, sibling: row.sibling }), { class: "of-episode" }) : null);
  }
}
