// Where the page is: "#/rollouts?run=0&step_from=12". Everything that somebody might send to a colleague is in it.

export function readRoute(hash = location.hash) {
  const [path, query = ""] = hash.replace(/^#\/?/, "").split("?");
  const parameters = new URLSearchParams(query);
  const run = Number.parseInt(parameters.get("run") ?? "0", 10);
  parameters.delete("run");
  return { view: path || "overview", run: Number.isNaN(run) ? 0 : run, query: Object.fromEntries(parameters) };
}

export function address(view, run, query = {}) {
  const parameters = new URLSearchParams();
  if (run) parameters.set("run", String(run));
  for (const [key, value] of Object.entries(query)) {
    if (value !== null && value !== undefined && value !== "") parameters.set(key, String(value));
  }
  const text = parameters.toString();
  return `#/${view}${text ? `?${text}` : ""}`;
}

export function go(view, run, query) {
  location.hash = address(view, run, query);
}

/** The same place with another query, without a step back in the history for every key typed. */
export function refine(route, query) {
  history.replaceState(null, "", address(route.view, route.run, query));
}
