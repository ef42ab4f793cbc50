// One episode of an agent: the contexts of its trajectories, each a rollout with a page of its own.

import { el, replace, link } from "./dom.js";
import { count, plural, short, versions, visible } from "./words.js";
import { versionBackground } from "./colours.js";
import { address } from "./route.js";

export class EpisodeView {
  constructor(page) {
    this.page = page;
    this.node = el("div", { class: "view" });
  }

  async open(route) {
    const { step, group, sibling } = route.query;
    const { run, source } = this.page;
    const told = await source.ask(run, "episode", { step, group, sibling });
    const trajectories = new Map();
    for (const of of told.contexts) {
      if (!trajectories.has(of.trajectory)) trajectories.set(of.trajectory, []);
      trajectories.get(of.trajectory).push(of);
    }
    replace(this.node,
      el("h1", {}, `Episode ${told.group}-${told.sibling} `, el("small", { text: `of step ${told.step}` })),
      el("p", { text: `${trajectories.size === 1 ? "1 trajectory" : `${count(trajectories.size)} trajectories`} of ${plural(told.of, "rollout")}${told.of > told.contexts.length ? `, of which the first ${told.contexts.length} are shown` : ""}. A context is a rollout of its own: where a history was rewritten, another one begins.` }),
      el("p", { class: "actions" },
        link("Its group", address("rollouts", run, { group_from: told.group, group_to: told.group })),
        link("When it ran", address("timeline", run, { group: told.group }))),
      [...trajectories].map(([number, contexts]) => this._trajectory(number, contexts)));
  }

  _trajectory(number, contexts) {
    const role = contexts[0].role && contexts[0].role !== "policy" ? `, ${contexts[0].role}` : "";
    return el("section", {}, el("h2", { text: visible(`Trajectory ${number}${role}`) }), el("ol", { class: "rollouts" }, contexts.map((of) => this._context(of))));
  }

  _context(of) {
    return el("li", {}, el("a", { class: "row", href: address("rollout", this.page.run, { step: of.step, id: of.id }) },
      el("span", { class: "facts" },
        el("b", { text: `context ${of.context}` }), el("span", { text: of.id }),
        el("span", { class: of.score === null ? "missing" : "score", text: of.score === null ? `no score${of.error ? `: ${visible(of.error)}` : ""}` : `score ${short(of.score)}` }),
        el("span", { text: plural(of.tokens, "token") }), el("span", { text: plural(of.segments, "segment") }),
        el("span", { class: "versions", style: of.newest !== null ? { background: versionBackground(of.newest) } : {}, text: `version ${versions(of.oldest, of.newest)}` }),
        of.turns ? el("span", { text: `rewards of turns ${of.turns.map((value) => short(value)).join(", ")}` }) : null,
        el("span", { text: of.stop })),
      el("bdi", { class: "asked", text: visible(of.asked) }),
      el("bdi", { class: "answered", text: visible(of.answered) })));
  }
}
