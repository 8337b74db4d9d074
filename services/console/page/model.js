// One model: its state, its instances, its starts beside their predictions, and its declaration.

import { modelActions } from "/page/actions.js";
import { decisionAddress } from "/page/address.js";
import { badge, empty, emptyRow, emulated, h, keyed, panel, say, table, term, terms } from "/page/dom.js";
import { bytes, clock, count, day, seconds, short, stateWord } from "/page/format.js";
import { joined, live } from "/page/live.js";
import { stateOf } from "/page/models.js";
import { PHASES, PHASE_WORDS, phaseBars, phaseList } from "/page/phases.js";
import { whyNot } from "/page/session.js";
import { bytesOf, failureOf, memoryBytes, nodeOf, phasesOf, placeOf, secondsOf } from "/page/values.js";

const SETTLE_MS = 250;
const INSTANCE_COLUMNS = ["Instance", "State", "Place", "Memory", "Running", "Since", "Why it is there"];
const START_COLUMNS = ["When", "Took", "Place", "Phases, actual over predicted", "Phase by phase"];

export function modelView(key) {
  const head = h("header", { class: "trace-head" });
  const why = h("div", { class: "model-why" });
  const coming = h("div", { class: "coming" });
  const spoken = h("p", { class: "hidden", role: "status", "aria-live": "polite" });
  const instances = h("tbody");
  const starts = h("tbody");
  const facts = h("dl", { class: "declared" });
  const element = h(
    "div",
    { class: "model-view" },
    head,
    spoken,
    why,
    coming,
    panel("Instances", "instances-panel", table("Instances and where they run", INSTANCE_COLUMNS, instances)),
    panel("Latest starts", "starts-panel", table("Starts, newest first", START_COLUMNS, starts)),
    panel("Declared", "declared-panel", facts),
  );
  const view = { element, title: "Model", close };
  let timer = 0;
  let closed = false;
  let busy = false;
  let again = false;

  async function load() {
    timer = 0;
    busy = true;
    try {
      const answer = await fetch(`/api/v1/models/${encodeURIComponent(key)}`);
      const body = await answer.json();
      if (!closed && answer.ok) show(body);
      else if (!closed) missing(body.error?.message ?? `the console answered ${answer.status}`);
    } catch (error) {
      console.info("model could not be read", error);
      again = true; // the line at the top says that the console is away
    }
    busy = false;
    if (again && !closed) soon();
  }
  const show = (detail) => {
    const model = joined(detail.model);
    document.title = `${model.name} · Glowplug`;
    say(spoken, `${model.name} is ${stateWord(model.state)}`);
    keyed(head, [model], () => "", headline);
    keyed(why, [{ why: detail.why, decision: detail.decision }], () => "", whyLine);
    keyed(coming, detail.coming, (start) => start.instance.instance_id, (start) => startUnderWay(start, detail), () => String(detail.now));
    keyed(instances, detail.instances.length ? detail.instances.map(joined) : [{ nothing: "No instance." }], (row) => row.instance_id ?? "", instanceLine);
    const longest = Math.max(...detail.starts.map(secondsOf), 0);
    const lines = detail.starts.length ? detail.starts : [{ nothing: "No start of this model has been seen yet." }];
    keyed(starts, lines, (start) => start.instance?.instance_id ?? "", (start) => startLine(start, longest), () => String(longest));
    keyed(facts, [...declared(model), ...residence(detail.digest)], ([name]) => name, term);
  };
  const missing = (text) => {
    head.replaceChildren(crumbs(), h("h1", null, "No such model"), empty(text));
    for (const part of [why, coming, instances, starts, facts]) part.replaceChildren();
  };
  const soon = () => {
    again = busy;
    if (!busy) timer ||= setTimeout(load, SETTLE_MS);
  };
  function close() {
    closed = true;
    clearTimeout(timer);
    live.removeEventListener("change", soon);
  }
  live.addEventListener("change", soon);
  load();
  return view;
}

function crumbs() {
  return h("p", { class: "crumbs" }, h("a", { href: "#/models" }, "Models"));
}

function headline(model) {
  const address = encodeURIComponent(model.key);
  return h(
    "div",
    null,
    crumbs(),
    h(
      "h1",
      null,
      model.name,
      emulated(model.emulated),
      model.pinned ? badge("pinned", "quiet", "Never evicted, always at least one instance") : null,
      model.suspended ? badge("drained", "warn", "Drained by its operator: no start until it is loaded again") : null,
    ),
    terms("facts", [
      ["State", stateOf(model)],
      ["Waiting", String(model.num_waiting)],
      ["Running", String(model.num_in_flight)],
      ["Instances", `${model.num_ready} ready of at most ${model.max_instances}`],
      ["Memory", bytes(memoryBytes(model))],
    ]),
    h(
      "p",
      { class: "acts" },
      modelActions(model),
      whyNot("operator") ? null : h("a", { class: "act", href: `#/edit/${address}`, "data-focus": "edit" }, "Edit"),
      h("a", { class: "act", href: `#/playground/${address}`, "data-focus": "chat" }, "Chat"),
      h("a", { class: "act", href: `#/charts/model=${address}`, "data-focus": "charts" }, "Charts"),
      h("a", { class: "act", href: `#/requests/model=${address}`, "data-focus": "requests" }, "Requests"),
      h("a", { class: "act", href: `#/decisions/model=${address}`, "data-focus": "decisions" }, "Decisions"),
      h("a", { class: "act", href: `#/logs/model=${address}`, "data-focus": "logs" }, "Logs"),
    ),
  );
}

/** Why it is where it is, or why it is cold. */
function whyLine({ why, decision }) {
  const when = decision ? h("time", { title: day(decision.made_at) }, clock(decision.made_at)) : null;
  const more = decision ? h("a", { href: decisionAddress(decision.decision_id), "data-focus": "why-now" }, "the decision") : null;
  return h("p", { class: "because" }, `${why} `, when ? h("small", null, "since ", when, " ") : null, more);
}

function instanceLine(row) {
  if (row.nothing) return emptyRow(INSTANCE_COLUMNS, row.nothing);
  return h(
    "tr",
    null,
    h("th", { scope: "row", class: "id", title: row.instance_id }, short(row.instance_id), " ", emulated(row.emulated)),
    h("td", null, stateWord(row.state), " ", row.outdated ? badge("outdated", "warn", "Its model has been declared anew since its start: it will be replaced") : null),
    h("td", null, placeOf(row)),
    h("td", { class: "num" }, bytes(bytesOf(row))),
    h("td", { class: "num" }, `${row.num_in_flight} of ${row.max_concurrency}`),
    h("td", null, h("time", { title: day(row.ready_at || row.created_at) }, clock(row.ready_at || row.created_at))),
    h("td", { class: "wrap" }, row.decision_id ? h("a", { href: decisionAddress(row.decision_id), title: "the decision that placed it", "data-focus": "why" }, row.reason || "decided") : row.reason || "–"),
  );
}

function startLine(start, longest) {
  if (start.nothing) return emptyRow(START_COLUMNS, start.nothing);
  const failure = failureOf(start);
  const phases = phasesOf(start);
  return h(
    "tr",
    { class: failure ? "failed" : null },
    h("td", null, h("time", { title: day(start.ended_at) }, clock(start.ended_at)), " ", emulated(start.instance.emulated)),
    h("td", { class: "num strong" }, seconds(secondsOf(start))),
    h("td", null, placeOf(start.instance)),
    h("td", { class: "phases-cell" }, failure ? badge("failed", "bad") : phaseBars(phases, longest)),
    h("td", { class: "wrap" }, failure ? h("span", { class: "bad" }, failure) : phaseList(phases)),
  );
}

/** A start under way: finished phases with their seconds, running ones, and the seconds of the last start. */
export function startUnderWay(start, detail) {
  const last = detail.starts.find((other) => !failureOf(other));
  const elapsed_s = Math.max(0, detail.now - start.began_at);
  const node = nodeOf(start.instance);
  const named = (name, of) => (of ? phasesOf(of) : []).find((phase) => phase.name === name && phase.duration_s >= 0);
  return h(
    "section",
    { class: "start", "aria-label": `Start on ${node}` },
    h("p", { class: "strong" }, `Starting on ${node}, ${seconds(elapsed_s)} so far `, emulated(start.instance.emulated)),
    h("ol", { class: "stages" }, PHASES.filter((name) => name !== "room" || named(name, start)).map((name) => stage(name, start, elapsed_s, named(name, start), named(name, last)))),
  );
}

function stage(name, start, elapsed_s, over, before) {
  const going = !over && isGoing(name, start, elapsed_s, before);
  const fetch = name === "fetch" && !over ? start.fetch?.report : null;
  const words = over ? seconds(over.duration_s) : fetch ? fetched(fetch) : going ? (before || start.instance.state === "starting" ? "now" : "now or next") : "";
  const done = fetch?.num_bytes ? fetch.num_bytes_done / fetch.num_bytes : 0;
  const guessed = going && !fetch && before?.duration_s ? Math.min(1, Math.max(0, elapsed_s - before.offset_s) / before.duration_s) : 0;
  return h(
    "li",
    { class: over ? "over" : going ? "now" : "" },
    h("i", { class: `swatch phase ${name}`, "aria-hidden": "true" }),
    h("span", { title: PHASE_WORDS[name] }, name),
    words ? h("b", null, words) : null,
    done || guessed ? h("progress", { max: "1", value: String(done || guessed), "aria-label": done ? `${name}: bytes` : `${name}: against the last start` }) : null,
    before && !over ? h("small", null, `last time ${seconds(before.duration_s)}`) : null,
  );
}

/** Fetch and launch go side by side. Which of launch, load and warmup goes on after that is told at their end only:
 * the last start says about when each began; without one they all may. */
function isGoing(name, start, elapsed_s, before) {
  if (start.instance.state === "starting") return name === "fetch" || name === "launch";
  return before ? elapsed_s >= before.offset_s : !["decide", "room", "fetch"].includes(name);
}

function fetched(fetch) {
  return fetch.num_bytes ? `${bytes(fetch.num_bytes_done)} of ${bytes(fetch.num_bytes)}` : bytes(fetch.num_bytes_done);
}

// ---- the declaration

function declared(model) {
  const slo = [model.slo.ttft_s && `first token in ${seconds(model.slo.ttft_s)}`, model.slo.tpot_s && `${seconds(model.slo.tpot_s)} per token`].filter(Boolean);
  const rows = [
    ["Engine", model.engine],
    ["Weights", model.weights.uri || "none"],
    model.weights.uri && ["Weights, bytes", model.weights.num_bytes ? bytes(model.weights.num_bytes) : "known once fetched"],
    model.weights.uri && ["Checksum", model.weights.sha256 ? `sha256 ${model.weights.sha256}` : "none: the files are compared with their source"],
    ["GPU memory", `${bytes(model.weights_bytes)} weights and ${bytes(model.kv_bytes)} KV cache`],
    ["Context", count(model.context_tokens, "token")],
    ["At once, per instance", count(model.max_concurrency, "request")],
    ["Instances", `${model.min_instances} to ${model.max_instances}`],
    ["Keep alive", model.keep_alive_s < 0 ? "for ever" : seconds(model.keep_alive_s)],
    ["When cold", model.on_cold === "hold" ? `requests wait up to ${seconds(model.max_wait_s)}, ${model.max_queue} at most` : "requests are refused"],
    ["Priority", String(model.priority)],
    ["Loaded when deployed", model.preload ? "yes" : "no"],
    ["Service levels", slo.join(", ") || "none set"],
    ["System prompt", model.system_prompt || "none"],
    ["Also called", model.aliases.join(", ") || "nothing else"],
    ["Engine arguments", Object.keys(model.engine_args).length ? JSON.stringify(model.engine_args) : "none"],
    ["Comes from", model.source || "–"],
  ];
  return rows.filter(Boolean);
}

/** The nodes that have its weights, where a start need not fetch them. */
function residence(digest) {
  const where = (blobsOf) => {
    const holding = live.nodes.flatMap((node) => blobsOf(node).filter((blob) => blob.digest === digest).map((blob) => [node.node_id, blob.num_bytes]));
    const nodes = holding.map(([id]) => id);
    const some = nodes.length > 6 ? `${nodes.slice(0, 6).join(", ")} and ${nodes.length - 6} more` : nodes.join(", ");
    return holding.length ? `${bytes(holding[0][1])} on ${some}` : "of no node";
  };
  const onDisk = where((node) => node.on_disk);
  return [["In host memory", where((node) => node.cached)], onDisk === "of no node" ? null : ["On disk", onDisk]].filter(Boolean);
}
