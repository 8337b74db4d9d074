// The frame: which view the address names, keys that work everywhere, and the line that says whether the page is fresh.

import { h, term } from "/page/dom.js";
import { clock } from "/page/format.js";
import { live } from "/page/live.js";
import { knowWho, offerLogout } from "/page/session.js";
import { accessView } from "/page/access.js";
import { chartsView } from "/page/charts.js";
import { decisionView } from "/page/decision.js";
import { decisionsView } from "/page/decisions.js";
import { eventView } from "/page/event.js";
import { eventsView } from "/page/events.js";
import { fleetView } from "/page/fleet.js";
import { forecastsView } from "/page/forecasts.js";
import { gpuView } from "/page/gpu.js";
import { logsView } from "/page/logs.js";
import { modelView } from "/page/model.js";
import { modelFormView } from "/page/model_form.js";
import { modelsView } from "/page/models.js";
import { playgroundView } from "/page/playground.js";
import { requestsView } from "/page/requests_view.js";
import { tracesView } from "/page/traces.js";
import { traceView } from "/page/trace.js";
import { usageView } from "/page/usage.js";

// A view takes the rest of the address and returns { element, title, close, keys }: `close` ends its listeners,
// `keys` are [key, meaning] lines for the help. New views go in this table, their tab in index.html.
const VIEWS = {
  fleet: { open: fleetView, tab: "fleet" },
  gpu: { open: gpuView, tab: "fleet" },
  models: { open: modelsView, tab: "models" },
  model: { open: modelView, tab: "models" },
  deploy: { open: () => modelFormView(""), tab: "models" },
  edit: { open: modelFormView, tab: "models" },
  charts: { open: chartsView, tab: "charts" },
  usage: { open: usageView, tab: "usage" },
  requests: { open: requestsView, tab: "requests" },
  decisions: { open: decisionsView, tab: "decisions" },
  decision: { open: decisionView, tab: "decisions" },
  forecasts: { open: forecastsView, tab: "forecasts" },
  events: { open: eventsView, tab: "events" },
  event: { open: eventView, tab: "events" },
  logs: { open: logsView, tab: "logs" },
  playground: { open: playgroundView, tab: "playground" },
  access: { open: accessView, tab: "access" },
  traces: { open: tracesView, tab: "traces" },
  trace: { open: (id) => traceView({ traceId: id }), tab: "traces" },
  request: { open: (id) => traceView({ requestId: id }), tab: "traces" },
};
const TABS = {
  f: "fleet",
  m: "models",
  c: "charts",
  u: "usage",
  r: "requests",
  t: "traces",
  d: "decisions",
  o: "forecasts",
  e: "events",
  l: "logs",
  p: "playground",
  a: "access",
};
const SECOND_KEY_MS = 1200;

const main = document.getElementById("main");
const status = document.getElementById("status");
const announcer = document.getElementById("announcer");
const help = document.getElementById("help");
let current = null;
let goesAt = 0; // when "g" was pressed

function route(event) {
  const [name, ...rest] = location.hash.replace(/^#\/?/, "").split("/");
  const view = Object.hasOwn(VIEWS, name) ? VIEWS[name] : VIEWS.fleet;
  current?.close?.();
  let argument = rest.join("/");
  try {
    argument = decodeURIComponent(argument);
  } catch {
    argument = ""; // a broken escape in a pasted address names nothing
  }
  current = view.open(argument);
  main.replaceChildren(current.element);
  document.title = `${current.title} · Glowplug`;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.dataset.view === view.tab) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  reveal(document.querySelector("nav a[aria-current]"));
  if (!event) return; // the first view: the reader starts at the top of the page
  window.scrollTo(0, 0);
  main.focus({ preventScroll: true });
  announcer.textContent = current.title;
}

/** Scroll a tab into a bar that is too narrow for all. Not by scrollIntoView: Tab would go on from there, past the skip link. */
function reveal(tab) {
  if (!tab) return;
  const bar = tab.parentElement.getBoundingClientRect();
  const at = tab.getBoundingClientRect();
  if (at.left < bar.left) tab.parentElement.scrollLeft -= bar.left - at.left;
  else if (at.right > bar.right) tab.parentElement.scrollLeft += at.right - bar.right;
}

function showStatus() {
  const parts = [];
  if (!live.connected) {
    parts.push(["bad", live.lostAt ? `console unreachable, stale since ${clock(live.lostAt)}` : "connecting…"]);
  } else {
    for (const [name, source] of Object.entries(live.sources)) {
      if (!source.is_up) parts.push(["warn", `${name} down, stale since ${clock(source.stale_since)}`]);
    }
    if (!parts.length) parts.push(["good", "live"]);
  }
  status.replaceChildren(
    ...parts.map(([kind, text]) => h("span", { class: `pill ${kind}` }, h("i", { class: "dot", "aria-hidden": "true" }), text)),
  );
  if (live.numDropped) {
    const title = `${live.numDropped} messages were dropped because this page read too slowly; the fleet was read again`;
    status.append(h("span", { class: "pill warn", title }, `${live.numDropped} dropped`));
  }
  document.body.classList.toggle("stale", live.ready && parts[0][0] !== "good");
}

// ---- keys

function showHelp() {
  const letters = Object.entries(TABS).map(([key, tab]) => {
    const link = document.querySelector(`nav a[data-view="${tab}"]`);
    return link && [`g ${key}`, link.textContent.trim()];
  });
  const lines = [...letters.filter(Boolean), ["/", "filter the view"], ["?", "this help"], ["Esc", "close it"], ...(current.keys ?? [])];
  help.querySelector("dl").replaceChildren(...lines.map(([keys, meaning]) => term([keys.split(" ").map((key) => h("kbd", null, key)), meaning])));
  help.showModal();
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, textarea, select") || event.target.isContentEditable) return;
  const goes = Date.now() - goesAt < SECOND_KEY_MS;
  goesAt = event.key === "g" ? Date.now() : 0;
  if (help.open) return;
  if (goes && Object.hasOwn(TABS, event.key)) {
    event.preventDefault();
    location.hash = `#/${TABS[event.key]}`;
  } else if (event.key === "?") {
    event.preventDefault();
    showHelp();
  } else if (event.key === "/") {
    const filter = main.querySelector("input[type=search]");
    if (!filter) return;
    event.preventDefault();
    filter.focus();
  }
}

document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the hash belongs to the views
  main.focus();
});
document.getElementById("help-button").addEventListener("click", showHelp);
help.addEventListener("click", (event) => event.target === help && help.close());
document.addEventListener("keydown", onKey);
live.addEventListener("status", showStatus);
showStatus();
await knowWho();
route();
window.addEventListener("hashchange", route); // not sooner, or a view would be drawn twice
live.open();
offerLogout(document.getElementById("who"), document.getElementById("logout"));
