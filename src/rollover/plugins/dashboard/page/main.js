// The frame of the page: which view of which run is shown, the theme, and the look every second at what has changed.

import { el, replace, link, labelled, announce } from "./dom.js";
import { openSource } from "./source.js";
import { percent } from "./words.js";
import { readRoute, address, go } from "./route.js";
import { chooseTheme, rememberedTheme } from "./colours.js";
import { visible } from "./words.js";
import { Overview } from "./overview.js";
import { Timeline } from "./timeline.js";
import { Rollouts } from "./rollouts.js";
import { RolloutView } from "./rollout.js";
import { LedgerView } from "./ledger.js";
import { Compare } from "./compare.js";
import { PlanView } from "./plan.js";
import { AnswersView } from "./answers.js";
import { EpisodeView } from "./episode.js";

const VIEWS = { overview: Overview, timeline: Timeline, rollouts: Rollouts, rollout: RolloutView, episode: EpisodeView, answers: AnswersView, ledger: LedgerView, compare: Compare, plan: PlanView };
const TITLES = { overview: "Overview", timeline: "Over time", rollouts: "Rollouts", answers: "Evaluations", ledger: "Ledger", compare: "Compare", plan: "Plan" };
const OF_LIST = { rollout: "rollouts", episode: "rollouts" }; // views of one thing, by the view that lists these
const THEMES = { "": "as the system", light: "light", dark: "dark" };
const LOOK_MS = 1000, BUSY_MS = 400; // while the server still reads what it is asked of

class Page {
  constructor() {
    this.source = null;
    this.runs = [];
    this.run = 0;
    this.state = null;
    this.view = null;
    this.changed = new Set();
    this.busy = false;
  }

  async start() {
    const opening = openSource(); // a report's is in the body, which is another from here on
    chooseTheme(rememberedTheme());
    this.trouble = el("p", { class: "trouble", role: "alert", hidden: true });
    this.place = el("main", { id: "main", tabindex: "-1" });
    this.navigation = el("nav", { "aria-label": "Views" });
    this.header = el("header", {});
    replace(document.body, el("a", { class: "skip", href: "#main", text: "To the content", on: { click: (event) => { event.preventDefault(); this.place.focus(); } } }),
      this.header, this.trouble, this.place, el("p", { id: "announcements", class: "unseen", "aria-live": "polite" }));
    window.addEventListener("hashchange", () => this.show());
    for (const media of ["(prefers-color-scheme: dark)", "print"]) matchMedia(media).addEventListener("change", () => this.view?.repaint?.());
    try {
      this.source = await opening;
      this.runs = await this.source.runs();
    } catch (error) {
      this.failed(error);
      if (!this.source) return;
    }
    this._header();
    await this.show();
    if (this.source.live) this._look();
  }

  failed(error) {
    console.error(error);
    replace(this.trouble, error.message);
    this.trouble.hidden = false;
  }

  async show() {
    const route = readRoute();
    const View = Object.hasOwn(VIEWS, route.view) ? VIEWS[route.view] : Overview;
    this.run = Math.min(route.run, Math.max(0, this.runs.length - 1));
    this.state = this.runs[this.run] ?? null;
    this.view?.close?.();
    const view = (this.view = new View(this));
    this._navigation(route.view);
    document.title = visible(`${TITLES[route.view] ?? "Rollout"} – ${this.state?.name ?? "Rollover"}`);
    replace(this.place, el("p", { class: "loading", text: "Loading…" }));
    this.trouble.hidden = true;
    try {
      replace(this.place, view.node);
      await view.open(route);
      announce(document.title);
    } catch (error) {
      if (this.view === view) this.failed(error);
    }
  }

  _header() {
    const theme = el("select", { on: { change: () => { chooseTheme(theme.value); this.view?.repaint?.(); } } }, Object.entries(THEMES).map(([value, text]) => el("option", { value, selected: rememberedTheme() === value }, text)));
    const run = el("select", { on: { change: () => go(OF_LIST[readRoute().view] ?? readRoute().view, Number(run.value)) } }, this.runs.map((of, number) => el("option", { value: String(number), selected: number === readRoute().run }, `${of.name} (${of.directory})`)));
    this.live = el("span", { class: "live", role: "status" });
    replace(this.header, el("p", { class: "brand" }, "Rollover"), this.navigation,
      this.runs.length > 1 ? labelled("Run", run) : el("span", { class: "run", text: this.runs[0]?.name ?? "" }), this.live, labelled("Colours", theme));
    this._live();
  }

  _navigation(current) {
    const active = current in OF_LIST ? OF_LIST[current] : current;
    replace(this.navigation, el("ul", {}, Object.entries(TITLES).map(([name, title]) => el("li", {}, link(title, address(name, this.run), { "aria-current": name === active ? "page" : null })))));
  }

  _live() {
    const { state } = this;
    const reading = Object.entries(state?.reading ?? {}).map(([part, share]) => ` · still reading the ${part}: ${percent(share)}`).join("");
    this.live.textContent = !this.source.live ? "a report" : !state ? "" : `${state.state === "running" ? `live, step ${state.step}` : state.state}${reading}`;
    this.live.dataset.state = this.source.live ? (state?.state ?? "") : "report";
  }

  /** Every second: whose files have changed? A page that nobody sees does not ask. */
  _look() {
    const busy = Object.keys(this.state?.reading ?? {}).length > 0;
    setTimeout(async () => {
      if (!document.hidden) await this._update();
      this._look();
    }, busy ? BUSY_MS : LOOK_MS);
  }

  async _update() {
    const { run, view, state: before } = this;
    try {
      const states = view?.followsAll ? await this.source.runs() : [await this.source.ask(run, "state")];
      if (run !== this.run || view !== this.view) return;
      const known = view?.followsAll ? this.runs : [before];
      const changed = new Set(states.flatMap(({ revisions }, number) => Object.keys(revisions).filter((name) => revisions[name] !== known[number]?.revisions[name])));
      const state = view?.followsAll ? states[run] : states[0];
      if (view?.followsAll) this.runs = states;
      this.state = this.runs[run] = state;
      this._live();
      this.trouble.hidden = true;
      if (changed.size || state.state !== before?.state) await view?.update?.(changed);
    } catch (error) {
      this.failed(error);
    }
  }
}

new Page().start();
