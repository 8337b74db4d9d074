// Beside the nodes: models that come, wait, go or fail; weights on the links; the latest decisions.

import { h, badge, emulated, empty } from "/page/dom.js";
import { bytes, clock, rate, stateWord } from "/page/format.js";
import { live } from "/page/live.js";
import { modelAddress } from "/page/address.js";
import { etaOf } from "/page/models.js";

const ORDER = ["waiting", "loading", "starting", "draining", "failed", "ready", "prewarmed", "asleep", "cold"];
const RESTING = ["prewarmed", "asleep", "cold"];

/** Models worth a look, most urgent first; ready ones by their load, resting ones left out. */
export function inMotion(models) {
  const rank = (model) => (model.num_waiting && model.state !== "failed" ? -1 : ORDER.indexOf(model.state));
  return models
    .filter((model) => model.num_waiting || !RESTING.includes(model.state))
    .sort((a, b) => rank(a) - rank(b) || b.num_waiting - a.num_waiting || b.num_in_flight - a.num_in_flight || (a.key < b.key ? -1 : 1));
}

export function motionLine(model) {
  if (model.nothing) return h("li", null, empty(model.nothing));
  const load = [model.num_waiting && `${model.num_waiting} waiting`, model.num_in_flight && `${model.num_in_flight} running`].filter(Boolean).join(", ");
  const isReady = model.state === "ready";
  return h(
    "li",
    { class: "motion" },
    h(
      "p",
      { class: `state ${model.state}` },
      h("i", { class: "dot", "aria-hidden": "true" }),
      h("a", { href: modelAddress(model.key), "data-focus": model.key }, model.name),
      isReady ? h("span", { class: "hidden" }, "ready") : stateWord(model.state),
      emulated(model.emulated),
      model.pinned ? badge("pinned", "quiet") : null,
      load ? h("small", { class: model.num_waiting ? "queue" : null }, load) : null,
    ),
    etaOf(model, "p", "more"),
    model.failure ? h("p", { class: "more bad" }, model.failure.reason || "no reason given") : null,
  );
}

/** Every fetch under way in the fleet, fastest first. */
export function arriving() {
  const found = [];
  for (const node of live.nodes) {
    for (const { report, bytes_per_s } of node.fetches) found.push({ ...report, bytes_per_s, key: `${node.node_id} ${report.digest}` });
  }
  return found.sort((a, b) => b.bytes_per_s - a.bytes_per_s || (a.key < b.key ? -1 : 1));
}

export function transferLine(fetch) {
  if (fetch.nothing) return h("li", null, empty(fetch.nothing));
  const done = (100 * fetch.num_bytes_done) / Math.max(fetch.num_bytes, 1);
  return h(
    "li",
    { class: "transfer" },
    h("p", null, h("a", { href: modelAddress(fetch.model_key), "data-focus": fetch.key }, live.nameOf(fetch.model_key)), h("small", null, `→ ${fetch.node_id}`)),
    h("span", { class: "thin", "aria-hidden": "true" }, h("i", { class: "plain", style: { width: `${done}%` } })),
    h("small", null, `${bytes(fetch.num_bytes_done)} of ${bytes(fetch.num_bytes)}${fetch.bytes_per_s ? ` · ${rate(fetch.bytes_per_s)}` : ""}`),
  );
}

export function decisionLine(decision) {
  if (decision.nothing) return h("li", null, empty(decision.nothing));
  const subject = live.nameOf(decision.model_key) || decision.node_id || decision.instance_id;
  return h(
    "li",
    { title: decision.decision_id },
    h("time", { datetime: new Date(decision.made_at * 1000).toISOString() }, clock(decision.made_at)),
    h("a", { class: `kind ${decision.kind}`, href: `#/decision/${encodeURIComponent(decision.decision_id)}`, "data-focus": "decision", "aria-label": `${decision.kind} ${subject}, why` }, decision.kind),
    h(
      "span",
      { class: "reason" },
      decision.reason.includes(subject) ? null : [h("b", null, subject), " "],
      decision.reason,
      h("small", null, decision.policy),
      decision.trace_id ? h("a", { class: "to-trace", href: `#/trace/${decision.trace_id}`, "data-focus": "trace", "aria-label": `Trace of ${decision.kind} ${subject}` }, "trace") : null,
    ),
  );
}
