// The frame: which view the address names, and the line that says whether what is shown is fresh.

import { h } from "/page/dom.js";
import { clock } from "/page/format.js";
import { live } from "/page/live.js";
import { fleetView } from "/page/fleet.js";
import { tracesView } from "/page/traces.js";
import { traceView } from "/page/trace.js";

// A view takes the rest of the address and returns { element, title, close }. New views go in this table.
const VIEWS = {
  fleet: { open: fleetView, tab: "fleet" },
  traces: { open: tracesView, tab: "traces" },
  trace: { open: (id) => traceView({ traceId: id }), tab: "traces" },
  request: { open: (id) => traceView({ requestId: id }), tab: "traces" },
};

const main = document.getElementById("main");
const status = document.getElementById("status");
let current = null;

function route() {
  const [name, ...rest] = location.hash.replace(/^#\/?/, "").split("/");
  const view = VIEWS[name] ?? VIEWS.fleet;
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
  window.scrollTo(0, 0);
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

document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the hash belongs to the views
  main.focus();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "/" || event.ctrlKey || event.metaKey || event.target.matches("input, textarea")) return;
  const filter = main.querySelector("input[type=search]");
  if (filter) {
    event.preventDefault();
    filter.focus();
  }
});
window.addEventListener("hashchange", route);
live.addEventListener("status", showStatus);
showStatus();
route();
live.open();
