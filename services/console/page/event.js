// One event of the bus: its payload, the chain of its causes, and its effects.

import { badge, empty, emulated, h, terms } from "/page/dom.js";
import { decisionAddress, eventAddress, modelAddress } from "/page/address.js";
import { commandLine } from "/page/copy.js";
import { clock, day } from "/page/format.js";
import { live } from "/page/live.js";

export const PLANES = { evt: "fact", cmd: "command", tel: "telemetry" };

/** A line about an event that leads to it. */
export function eventLine(row) {
  return h(
    "span",
    { class: "event-line" },
    h("span", { class: "num" }, clock(row.occurred_at, true)),
    badge(PLANES[row.seen.plane], `plane ${row.seen.plane}`),
    h("a", { href: eventAddress(row.event_id), "data-focus": row.event_id }, row.seen.kind),
    h("small", null, row.seen.issuer),
    emulated(row.emulated),
  );
}

export function eventView(id) {
  const element = h("div", { class: "event-view" });
  let closed = false;
  detail(id).then((parts) => {
    if (!closed) element.replaceChildren(h("p", { class: "crumbs" }, h("a", { href: "#/events" }, "Events")), ...parts);
  });
  return { element, title: "Event", close: () => (closed = true) };
}

/** The parts of one event's page; of one that is gone, why. */
export async function detail(id, level = "h1") {
  try {
    const answer = await fetch(`/api/v1/events/${encodeURIComponent(id)}`);
    const page = await answer.json();
    return answer.ok ? parts(page, level) : [h(level, null, "No such event"), empty(page.error?.message ?? `the console answered ${answer.status}`)];
  } catch (error) {
    console.info("the event could not be read", error);
    return [h(level, null, "The console does not answer"), empty("Try again when it does.")];
  }
}

function parts(page, level) {
  const { row, event } = page;
  const { seen } = row;
  const below = level === "h1" ? "h2" : "h3";
  const decision = seen.kind === "decision.made" ? event.data.decision.decision_id : event.data.decision_id;
  const facts = [
    ["When", h("time", { datetime: new Date(row.occurred_at * 1000).toISOString(), title: day(row.occurred_at) }, clock(row.occurred_at, true))],
    ["Written by", seen.issuer],
    seen.model_key && ["Model", h("a", { href: modelAddress(seen.model_key) }, live.nameOf(seen.model_key))],
    seen.node_id && ["Node", seen.node_id],
    decision && ["Decision", h("a", { href: decisionAddress(decision) }, h("code", null, decision))],
    row.trace_id && ["Trace", h("a", { href: `#/trace/${row.trace_id}` }, h("code", null, row.trace_id.slice(0, 12)))],
    ["Event", h("code", null, row.event_id)],
  ];
  return [
    h(level, null, seen.kind, badge(PLANES[seen.plane], `plane ${seen.plane}`), emulated(row.emulated)),
    terms("facts", facts),
    h(below, { class: "subhead" }, "Caused by"),
    causes(page),
    h(below, { class: "subhead" }, "Effects"),
    page.effects.length ? h("ol", { class: "causes" }, page.effects.map((effect) => h("li", null, eventLine(effect)))) : empty("Nothing that is kept here."),
    h(below, { class: "subhead" }, "Payload"),
    h("pre", { class: "payload", tabindex: "0", "aria-label": "Payload" }, JSON.stringify(event, null, 2)),
    commandLine(page.command).element,
  ];
}

function causes(page) {
  const first = (page.chain.at(-1) ?? page.row).seen;
  const lines = page.chain.map((row) => h("li", null, eventLine(row)));
  if (first.kind === "request.waiting") lines.push(h("li", null, h("a", { href: `#/request/${encodeURIComponent(first.entity_id)}` }, "a request that waits"), h("small", { class: "id" }, first.entity_id)));
  else if (!page.is_whole) lines.push(h("li", { class: "zero" }, "an event that is no longer kept"));
  return lines.length ? h("ol", { class: "causes" }, lines) : empty("Nothing else: time passed, a person asked, or it speaks for itself.");
}
