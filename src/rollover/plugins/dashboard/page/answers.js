// The answers of evaluations: which held-out task got which score for what, over the evaluations of the run.

import { el, replace, labelled, button, link, announce } from "./dom.js";
import { short, plural, visible } from "./words.js";
import { address, go } from "./route.js";

const OF_PAGE = 50, OWN = "[eval]"; // the setting without a name
const ORDERS = { "": "as they were asked", "score up": "lowest score", "score down": "highest score", "tokens down": "longest", "tokens up": "shortest" };

export class AnswersView {
  constructor(page) {
    this.page = page;
    this.node = el("div", { class: "view" });
  }

  async open(route) {
    this.route = route;
    await (route.query.place === undefined ? this._list() : this._one());
  }

  async update(changed) {
    // A page that somebody reads stays; only a run that had no evaluation yet is asked again.
    if (changed.has("evaluations") && !this.told?.steps.length && this.route.query.place === undefined) await this._list();
  }

  async _list() {
    const { source, run } = this.page, { query } = this.route;
    const told = (this.told = await source.ask(run, "answers", { ...query, limit: OF_PAGE }));
    if (!told.steps.length) {
      replace(this.node, el("h1", { text: "Evaluations" }), el("p", { text: "No answers of an evaluation were recorded (eval.num_tasks, track.answers)." }));
      return;
    }
    const said = `${plural(told.passed, "answer")} of ${short(told.of)} after step ${told.step}.`;
    const move = (offset) => () => go("answers", run, { ...query, offset: offset || null });
    replace(this.node, el("h1", { text: "Evaluations" }), this._filters(told), el("p", { class: "count", role: "status", text: told.withText === undefined ? said : `${said} This report has ${short(told.withText)} of them.` }),
      el("ol", { class: "rollouts" }, told.rows.length ? told.rows.map((row) => this._row(row, told.step)) : el("li", { class: "none", text: "None." })),
      el("div", { class: "pages" }, button("Earlier", move(Math.max(0, told.offset - OF_PAGE)), { disabled: !told.offset }), button("Further", move(told.next), { disabled: told.next === null })));
    announce(said);
  }

  _filters(told) {
    const { query } = this.route;
    const select = (name, label, choices, value) => labelled(label, el("select", { name }, choices.map(([of, text]) => el("option", { value: of, selected: of === value }, text))));
    const form = el("form", { class: "filters", role: "search", on: { submit: (event) => { event.preventDefault(); this._apply(form); } } },
      select("step", "After step", told.steps.map((step) => [String(step), String(step)]), String(told.step)),
      told.settings.length > 1 ? select("setting", "Setting", [["", "any"], ...told.settings.map((name) => [name || OWN, name || OWN])], query.setting ?? "") : null,
      labelled("Text in question, answer or names", el("input", { name: "text", type: "search", value: query.text ?? "" })),
      labelled("Score from", el("input", { name: "score_from", type: "number", step: "any", value: query.score_from ?? "" })),
      labelled("to", el("input", { name: "score_to", type: "number", step: "any", value: query.score_to ?? "" })),
      select("scored", "Score", [["", "any"], ["yes", "there is one"], ["no", "missing"]], query.scored ?? ""),
      select("by", "First", Object.entries(ORDERS), query.sort ? `${query.sort} ${query.order ?? "up"}` : ""),
      el("button", { type: "submit", class: "primary" }, "Show"), link("Clear", address("answers", this.page.run)));
    form.addEventListener("change", (event) => { if (event.target.tagName === "SELECT") this._apply(form); });
    return form;
  }

  _apply(form) {
    const { by, ...given } = Object.fromEntries(new FormData(form));
    const [sort, order] = (by ?? "").split(" ");
    const query = { ...given, sort, order: order ?? null };
    if (address("answers", this.page.run, query) === location.hash) this._list().catch((error) => this.page.failed(error));
    else go("answers", this.page.run, query);
  }

  _row(row, step) {
    return el("li", {}, el("a", { class: "row", href: address("answers", this.page.run, { step, place: row.place }) },
      el("span", { class: "facts" }, el("b", { text: `${visible(row.task)}${row.sibling === null ? "" : `, answer ${row.sibling}`}` }),
        el("span", { class: row.score === null ? "missing" : "score", text: row.score === null ? "no score" : `score ${short(row.score)}` }),
        row.tokens === null ? null : el("span", { text: plural(row.tokens, "token") }), el("span", { text: row.stop }), row.setting ? el("span", { text: visible(row.setting) }) : null,
        row.expected === null ? null : el("span", { text: `expected ${visible(row.expected)}` }), el("span", { class: "source", text: visible(row.source) })),
      el("bdi", { class: "asked", text: visible(row.asked) }),
      el("bdi", { class: "answered", text: visible(row.answered) })));
  }

  async _one() {
    const { source, run } = this.page, { step, place } = this.route.query;
    const told = await source.ask(run, "answer", { step, place });
    const facts = [
      ["Score", told.score === null ? `none: ${told.error ?? "not scored"}` : short(told.score)], ["Expected", told.expected], ["Votes for", told.vote],
      ["Length", told.num_tokens === undefined ? null : plural(told.num_tokens, "token")], ["Stopped by", told.stop_reason], ["Setting", told.setting], ["Source", told.data_source ?? told.source],
      ...(told.roles ?? []).map(({ role, score }) => [`Role ${role}`, short(score)]),
    ].filter(([, value]) => value !== null && value !== undefined && value !== "");
    const to = (other) => address("answers", run, { step: told.step, place: other });
    replace(this.node,
      el("h1", {}, visible(`Task ${told.task_id} `), el("small", { text: `after step ${told.step}` })),
      el("p", { class: "actions" }, link("All answers of this evaluation", address("answers", run, { step: told.step })),
        told.same_task.length > 1 ? ["Answers to it: ", told.same_task.map((other, number) => link(String(number), to(other), { "aria-current": other === told.place ? "true" : null }))] : null),
      el("dl", { class: "facts" }, facts.map(([name, value]) => el("div", {}, el("dt", { text: visible(name) }), el("dd", {}, el("bdi", { text: visible(String(value)) }))))),
      told.over.length > 1 ? el("p", { text: `The same task over evaluations, mean score: ${told.over.map((of) => `${short(of.mean)} after step ${of.step}`).join(", ")}.` }) : null,
      el("section", {}, el("h2", { text: "Asked" }), el("pre", { class: "said" }, el("bdi", { text: visible(told.prompt) }))),
      el("section", {}, el("h2", { text: "Answered" }), el("pre", { class: "said" }, el("bdi", { text: visible(told.answer ?? "") }))));
  }
}
