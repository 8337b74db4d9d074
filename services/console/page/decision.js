// One decision: its rule, inputs, rivals, causes and outcome.

import { badge, empty, emulated, h, panel, table, terms } from "/page/dom.js";
import { modelAddress } from "/page/address.js";
import { commandLine } from "/page/copy.js";
import { decisionLines, kindOf, subjectOf } from "/page/decisions.js";
import { eventLine } from "/page/event.js";
import { bytes, clock, count, day, rate, seconds, stateWord } from "/page/format.js";
import { logsAddress } from "/page/logs.js";
import { joined, live } from "/page/live.js";
import { phaseBars } from "/page/phases.js";
import { newest, whyNot } from "/page/polled.js";
import { gapWords } from "/page/predicted.js";
import { phasesOf, secondsOf } from "/page/values.js";

export function decisionView(id) {
  const element = h("div", { class: "decision-view" }, h("p", { class: "note" }, "Reading…"));
  const read = newest();
  let closed = false;
  let timer = 0;
  let shown = "";

  const load = async () => {
    timer = 0;
    try {
      const answer = await read(`/api/v1/decisions/${encodeURIComponent(id)}`);
      if (closed || !answer) return;
      const { page } = answer;
      if (!answer.ok) return element.replaceChildren(h("h1", null, "No such decision"), empty(whyNot(answer)), h("a", { href: "#/decisions" }, "All decisions"));
      const text = JSON.stringify(page);
      if (text === shown) return;
      shown = text;
      const focused = element.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
      element.replaceChildren(...parts(page));
      if (focused) element.querySelector(`[href="${CSS.escape(focused)}"]`)?.focus();
    } catch (error) {
      console.info("the decision could not be read", error);
      soon(2000);
    }
  };
  const soon = (after = 400) => (timer ||= setTimeout(load, after));
  const changed = ({ detail }) => (!detail || detail.all || detail.decisions || detail.instances?.size) && shown && soon(); // its outcome may have changed
  live.addEventListener("change", changed);
  load();
  return {
    element,
    title: "Decision",
    close: () => {
      closed = true;
      clearTimeout(timer);
      live.removeEventListener("change", changed);
    },
  };
}

function parts(page) {
  const record = joined(page.decision);
  const facts = [
    ["When", h("time", { datetime: new Date(record.made_at * 1000).toISOString(), title: day(record.made_at) }, clock(record.made_at, true))],
    ["Rule", record.policy],
    ["Decided by", record.service],
    record.model_key && ["Model", h("a", { href: modelAddress(record.model_key) }, live.nameOf(record.model_key))],
    record.instance_id && ["Instance", h("code", null, record.instance_id)],
    (record.gpu_id || record.node_id) && ["Where", record.gpu_id || record.node_id],
    record.chosen && ["Chosen", h("code", null, record.chosen)],
    record.request_id && ["For request", h("a", { href: `#/request/${encodeURIComponent(record.request_id)}` }, h("code", null, record.request_id))],
    record.trace_id && ["Trace", h("a", { href: `#/trace/${record.trace_id}` }, h("code", null, record.trace_id.slice(0, 12)))],
    ["Decision", h("code", null, record.decision_id)],
    ["Log", h("a", { href: logsAddress(record.decision_id, record.instance_id, record.request_id) }, "lines about it")],
  ];
  return [
    h("p", { class: "crumbs" }, h("a", { href: "#/decisions" }, "Decisions")),
    h("h1", null, h("span", { class: `kind ${record.kind}` }, kindOf(record)), ` ${subjectOf(record)}`, emulated(record.emulated)),
    h("p", { class: "because" }, record.reason),
    terms("facts", facts),
    h(
      "div",
      { class: "decision-grid" },
      panel("Inputs", "decision-inputs", inputs(record.inputs)),
      panel("Options weighed", "decision-rivals", rivals(record)),
      panel("Causes", "decision-causes", causes(page, record)),
      panel("Outcome", "decision-outcome", ...outcome(page)),
    ),
    panel("Related decisions", "decision-related", related(page.related.map(joined))),
    commandLine(page.command).element,
  ];
}

function inputs(figures) {
  const pairs = Object.entries(figures);
  if (!pairs.length) return empty("The rule needed no figures.");
  return terms("inputs", pairs.map(([name, value]) => [words(name), readable(name, value)]));
}

function words(name) {
  return name.replace(/_(bytes_per_s|bytes|s)$/, "").replaceAll("_", " ");
}

function readable(name, value) {
  if (typeof value !== "number") return String(value);
  if (name.endsWith("_bytes")) return bytes(value);
  if (name.endsWith("_bytes_per_s")) return rate(value);
  if (name.endsWith("_s")) return value < 0 ? "never" : seconds(value);
  return String(value);
}

function rivals(record) {
  if (!record.rivals.length) return empty("There was only one option.");
  const chosen = new Set([record.chosen, ...record.chosen.split(", ")]);
  const rows = record.rivals.map((rival) =>
    h(
      "tr",
      { class: chosen.has(rival.name) ? "chosen" : null },
      h("td", null, h("code", null, rival.name), chosen.has(rival.name) ? badge("chosen", "good") : null),
      h("td", { class: "num" }, score(rival)),
      h("td", { class: "wrap" }, rival.why || "–"),
    ),
  );
  return table("Options weighed", ["Option", "Score", "Why"], h("tbody", null, rows));
}

/** A score in its unit: a first word "bytes" or "s" is a size or a time, "at" a moment; none is a plain number. */
function score(rival) {
  const [first, ...others] = (rival.unit ?? "").split(" ");
  const rest = others.join(" ");
  if (first === "bytes") return `${bytes(rival.score)} ${rest}`;
  if (first === "s") return `${seconds(rival.score)} ${rest}`;
  if (first === "at") return rival.score > 0 ? `${rest} ${clock(rival.score)}` : `${rest}: never`;
  return `${Number(rival.score.toPrecision(4))} ${rival.unit ?? ""}`;
}

function causes(page, record) {
  const first = page.chain.at(-1)?.seen;
  const request = first?.kind === "request.waiting" ? first.entity_id : record.request_id;
  const lines = page.chain.map((row) => h("li", null, eventLine(row)));
  if (request) lines.push(h("li", null, h("a", { href: `#/request/${encodeURIComponent(request)}` }, "a request that waits"), h("small", { class: "id" }, request)));
  else if (!page.is_whole) lines.push(h("li", { class: "zero" }, "an event that is no longer kept"));
  if (!lines.length) return empty(record.policy === "operator" ? "A person asked for it." : "Time: the rule looks at the fleet again and again.");
  return h("ol", { class: "causes" }, lines);
}

function outcome(page) {
  const found = [];
  if (page.outcome) found.push(...outcomeOf(page.outcome));
  for (const victim of page.victims) {
    found.push(h("p", { class: "victim" }, badge("victim", "warn"), " ", h("code", null, victim.instance_id), ` is ${stateWord(victim.state)}`, victim.reason ? h("small", null, ` ${victim.reason}`) : null));
  }
  return found.length ? found : [empty("Nothing is known about it yet.")];
}

function outcomeOf(start) {
  const known = start.instance;
  const phases = phasesOf(start);
  const took_s = known.ready_at ? secondsOf(start) : 0;
  const whole = Math.max(took_s, ...phases.map((phase) => phase.offset_s + Math.max(phase.duration_s, 0)), 0);
  const over = phases.filter((phase) => phase.duration_s >= 0);
  return [
    h(
      "p",
      { class: `state ${known.state}` },
      h("i", { class: "dot", "aria-hidden": "true" }),
      h("b", null, stateWord(known.state)),
      took_s ? (known.state === "ready" ? ` after ${seconds(took_s)}` : `, was ready after ${seconds(took_s)}`) : "",
      known.reason ? h("small", null, ` ${known.reason}`) : null,
      emulated(known.emulated),
    ),
    over.length ? phaseBars(over, whole) : null,
    over.length ? h("ul", { class: "gaps" }, over.map((phase) => h("li", null, h("i", { class: `swatch phase ${phase.name}`, "aria-hidden": "true" }), h("b", null, phase.name), ` ${gapWords(phase)}`))) : null,
  ].filter(Boolean);
}

function related(rows) {
  if (!rows.length) return empty("Nothing else was decided about it.");
  return decisionLines(rows, h("li", { class: "hidden" }, count(rows.length, "decision")));
}
