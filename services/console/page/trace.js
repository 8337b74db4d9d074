// One trace: fetched, drawn, and fetched again whenever more of it is told.

import { badge, empty, emulated, h, panel, terms } from "/page/dom.js";
import { modelAddress } from "/page/address.js";
import { copy } from "/page/copy.js";
import { decisionLines } from "/page/decisions.js";
import { logsAddress } from "/page/logs.js";

import { clock, count, day, seconds } from "/page/format.js";
import { joined, live } from "/page/live.js";
import { newest, whyNot } from "/page/polled.js";
import { serviceTag } from "/page/traces.js";
import { Waterfall } from "/page/waterfall.js";
import { drawStages } from "/page/stages.js";

const PATIENCE = 15; // seconds a trace may take to arrive before the page says that it is not there
const SETTLE_MS = 300;

export function traceView({ traceId, requestId }) {
  const address = traceId ? `/api/v1/traces/${encodeURIComponent(traceId)}` : `/api/v1/requests/${encodeURIComponent(requestId)}/trace`;
  const head = h("header", { class: "trace-head" });
  const drawing = new Waterfall();
  const stages = h("div");
  const decided = h("div");
  const element = h("div", { class: "trace" }, head, stages, decided, drawing.element);
  const openedAt = Date.now();
  const read = newest();
  let timer = 0;
  let closed = false;
  let revision = -1;
  let id = traceId ?? "";

  const load = async () => {
    timer = 0;
    try {
      const answer = await read(address);
      if (closed || !answer) return;
      if (answer.ok) show(answer.page);
      else missing(whyNot(answer));
    } catch (error) {
      console.warn("trace could not be read", error);
      soon(2000);
    }
  };
  const show = (trace) => {
    if (closed || trace.revision === revision) return;
    revision = trace.revision;
    id = trace.trace_id;
    head.replaceChildren(...headline(trace));
    stages.replaceChildren(...drawStages(trace.stages, trace.is_emulated));
    drawing.draw(trace);
    readDecisions();
  };
  const readDecisions = async () => {
    try {
      const answer = await fetch(`/api/v1/decisions?limit=50&trace=${encodeURIComponent(id)}`);
      if (answer.ok && !closed) decided.replaceChildren(...decisionsOf((await answer.json()).decisions.map(joined)));
    } catch (error) {
      console.info("the trace's decisions could not be read", error);
    }
  };
  const missing = (message) => {
    if (revision >= 0) return; // an old drawing is better than none
    const waiting = Date.now() - openedAt < PATIENCE * 1000;
    head.replaceChildren(h("h1", null, waiting ? "Waiting for its events…" : "No such trace"), empty(message), h("p", { class: "acts" }, h("a", { class: "act", href: logsAddress(traceId, requestId) }, "Log lines about it"), h("a", { class: "act", href: "#/traces" }, "All traces")));
    if (waiting) soon(1000);
  };
  const soon = (after = SETTLE_MS) => (timer ||= setTimeout(load, after));
  const onTraces = ({ detail }) => {
    const mine = detail.find((line) => line.trace_id === id || (requestId && line.request_ids.includes(requestId)));
    if (mine ? mine.revision !== revision : detail.length === 0) soon();
  };
  live.addEventListener("traces", onTraces);
  load();
  return {
    element,
    title: "Trace",
    close: () => {
      closed = true;
      clearTimeout(timer);
      live.removeEventListener("traces", onTraces);
    },
  };
}

function headline(trace) {
  const model = live.nameOf(trace.model);
  const facts = [
    ["Duration", seconds(trace.duration_s)],
    ["Started", h("time", { title: day(trace.start_at), datetime: new Date(trace.start_at * 1000).toISOString() }, clock(trace.start_at, true))],
    model && ["Model", h("a", { href: modelAddress(trace.model) }, model)],
    ["Spans", String(trace.rows.length)],
    ...trace.request_ids.slice(0, 2).map((id) => ["Request", h("code", null, id)]),
    ["Trace", h("code", null, trace.trace_id)],
  ];
  const notes = [
    trace.num_errors ? badge(count(trace.num_errors, "error"), "bad") : null,
    trace.phases.length ? badge("cold start", "cold") : null,
    emulated(trace.is_emulated),
  ];
  return [
    h("p", { class: "crumbs" }, h("a", { href: "#/traces" }, "Traces"), takeAway(trace)),
    h("h1", null, trace.name || "Trace", ...notes.filter(Boolean)),
    terms("facts", facts),
    h("p", { class: "services", "aria-label": "Services" }, trace.services.map(serviceTag)),
  ];
}

/** The trace for other tools. */
function takeAway({ trace_id: id, request_ids }) {
  const address = `/api/v1/traces/${id}`;
  const button = h("button", { type: "button", class: "act", onclick: () => copyJson(address, button) }, "Copy as JSON");
  return h("span", { class: "take-away" }, h("a", { class: "act", href: logsAddress(id, ...request_ids.slice(0, 4)) }, "Log lines"), button, h("a", { class: "act", href: address, download: `trace-${id}.json` }, "Download"));
}

async function copyJson(address, button) {
  try {
    const answer = await fetch(address);
    if (answer.ok) await copy(JSON.stringify(await answer.json(), null, 2), button);
    else button.textContent = `the console answered ${answer.status}`;
  } catch (error) {
    console.info("the trace could not be copied", error);
  }
}

function decisionsOf(lines) {
  return lines.length ? [panel("Decisions in it", "trace-decisions", decisionLines(lines.toReversed()))] : [];
}
