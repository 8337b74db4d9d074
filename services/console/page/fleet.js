// The fleet: models with their temperature, nodes with their memory, and what happened last.

import { h, keyed, badge, emulated, empty, panel, table } from "/page/dom.js";
export { panel, table };
import { hues } from "/page/colours.js";
import { bytes, clock, inLanes, seconds } from "/page/format.js";
import { live } from "/page/live.js";
import { requestRows, REQUEST_COLUMNS } from "/page/requests.js";

const STATE_WORDS = {
  ready: "ready",
  loading: "loading",
  starting: "starting",
  draining: "draining",
  asleep: "asleep",
  waiting: "waiting for room",
  failed: "failed",
  cold: "cold",
};
const OWNER_WORDS = { weights: "weights", kv: "KV cache", prewarm: "prewarmed", reservation: "reserved" };
const LINES = 14;

let hue = new Map();

export function fleetView() {
  const figures = h("dl", { class: "figures" });
  const models = h("tbody");
  const nodes = h("div", { class: "nodes" });
  const requests = h("tbody");
  const decisions = h("ol", { class: "decisions" });
  const parts = { figures, models, nodes, requests, decisions };
  const element = h(
    "div",
    { class: "fleet" },
    h("h1", { class: "hidden" }, "Fleet"),
    figures,
    h(
      "div",
      { class: "column" },
      panel("Models", "models", table("Models", ["Model", "State", "Queue", "Running", "Instances", "Last cold start"], models)),
      panel("Requests", "requests-panel", table("Latest requests", REQUEST_COLUMNS, requests)),
    ),
    h("div", { class: "column" }, panel("Nodes", "nodes-panel", nodes), panel("Decisions", "decisions-panel", decisions)),
  );
  let wanted = false;
  const draw = () => {
    wanted = false;
    show(parts);
  };
  const onChange = () => {
    if (!wanted) requestAnimationFrame(draw);
    wanted = true;
  };
  live.addEventListener("change", onChange);
  show(parts);
  return { element, title: "Fleet", close: () => live.removeEventListener("change", onChange) };
}

function show(parts) {
  const models = live.models;
  hue = hues(models.map((model) => model.key));
  keyed(parts.figures, figures(models), (figure) => figure.name, figureElement);
  keyed(parts.models, orNothing(models, "No model is deployed yet."), (m) => m.key ?? "", modelRow, instancesOf);
  keyed(parts.nodes, orNothing(live.nodes, "No node has joined yet."), (n) => n.node_id ?? "", nodeCard, () => [...hue].join());
  requestRows(parts.requests, live.requests.slice(0, LINES));
  keyed(parts.decisions, orNothing(live.decisions.slice(0, LINES), "Nothing decided yet."), (d) => d.decision_id ?? "", decisionLine);
}

function orNothing(rows, text) {
  return rows.length || !live.ready ? rows : [{ nothing: text }];
}

function figures(models) {
  const nodes = live.nodes;
  const alive = nodes.filter((node) => node.is_alive).length;
  const gpus = nodes.flatMap((node) => node.gpus);
  const total = gpus.reduce((sum, gpu) => sum + gpu.total_bytes, 0);
  const used = gpus.reduce((sum, gpu) => sum + gpu.total_bytes - gpu.free_bytes, 0);
  const sum = (field) => models.reduce((all, model) => all + model[field], 0);
  return [
    { name: "Nodes", value: String(alive), of: ` of ${nodes.length}`, bad: alive < nodes.length },
    { name: "GPU memory", value: bytes(used), of: ` of ${bytes(total)}`, ratio: total ? used / total : 0 },
    { name: "Hot models", value: String(models.filter((m) => m.temperature === "hot").length), of: ` of ${models.length}` },
    { name: "Waiting", value: String(sum("num_waiting")), of: "" },
    { name: "Running", value: String(sum("num_in_flight")), of: "" },
  ];
}

function figureElement(figure) {
  const value = h("dd", { class: figure.bad ? "bad" : null }, figure.value, h("small", null, figure.of));
  if (figure.ratio !== undefined) {
    value.append(h("span", { class: "meter", "aria-hidden": "true" }, h("i", { style: { width: `${100 * figure.ratio}%` } })));
  }
  return h("div", null, h("dt", null, figure.name), value);
}

// ---- models

function instancesOf(model) {
  return (model.instances ?? []).map((id) => JSON.stringify(live.instances.get(id) ?? null)).join() + (hue.get(model.key) ?? "");
}

function modelRow(model) {
  if (model.nothing) return h("tr", null, h("td", { colspan: "6" }, empty(model.nothing)));
  return h(
    "tr",
    { class: `temp-${model.temperature}` },
    h(
      "th",
      { scope: "row", class: "name" },
      h("i", { class: "swatch", style: { "--h": String(hue.get(model.key)) }, "aria-hidden": "true" }),
      h("span", null, model.name),
      emulated(model.emulated),
      model.pinned ? badge("pinned", "quiet", "Never evicted") : null,
      h("small", null, `${model.engine} · ${bytes(model.memory_bytes)}`),
    ),
    h("td", null, state(model)),
    h("td", { class: "num" }, queue(model.num_waiting)),
    h("td", { class: "num" }, model.num_in_flight ? String(model.num_in_flight) : h("span", { class: "zero" }, "0")),
    h("td", null, h("div", { class: "chips" }, model.instances.map(instanceChip))),
    h("td", { class: "cold-cell" }, coldStart(model.last_cold_start)),
  );
}

function state(model) {
  const word = STATE_WORDS[model.state] ?? model.state;
  const isComing = model.state === "loading" || model.state === "starting";
  const eta = model.eta_s > 0 ? `${isComing ? "ready in" : "starts in"} ${model.eta_measured ? "" : "~"}${model.eta_s} s` : "";
  const title = model.eta_measured ? "from the starts measured so far" : "no start has been measured yet";
  return h(
    "span",
    { class: `state ${model.state}`, title: model.failure?.reason ?? null },
    h("i", { class: "dot", "aria-hidden": "true" }),
    word,
    model.temperature === "hot" || model.state === model.temperature ? null : h("span", { class: "hidden" }, `, ${model.temperature}`),
    eta && model.state !== "failed" ? h("small", { title }, eta) : null,
    model.failure ? h("small", { class: "why" }, model.failure.reason || "no reason given") : null,
  );
}

function queue(num) {
  if (!num) return h("span", { class: "zero" }, "0");
  return h("span", { class: "queue" }, String(num), h("i", { style: { width: `${Math.min(num, 40)}px` }, "aria-hidden": "true" }));
}

function instanceChip(id) {
  const instance = live.instances.get(id);
  if (!instance) return null;
  const title = `${id} on ${instance.gpu_id}, ${instance.state}${instance.reason ? `: ${instance.reason}` : ""}`;
  return h(
    "span",
    { class: `chip ${instance.state}`, title },
    instance.node_id,
    h("small", null, instance.state === "ready" ? `${instance.num_in_flight}/${instance.max_concurrency}` : instance.state),
    instance.emulated ? badge("emulated", "emulated") : null,
  );
}

function coldStart(start) {
  if (!start) return h("span", { class: "zero" }, "–");
  const whole = Math.max(start.seconds, ...start.phases.map((phase) => phase.offset_s + phase.duration_s), 1e-9);
  const stages = start.phases.map((phase) => `${phase.name} ${seconds(phase.duration_s)}`);
  const title = [`ready at ${clock(start.ready_at)}`, ...stages].join(" · ");
  const lanes = inLanes(start.phases);
  const bars = lanes.flatMap((lane, i) =>
    lane.map((phase) => {
      const width = `${Math.max((100 * phase.duration_s) / whole, 0.8)}%`;
      const place = { left: `${(100 * phase.offset_s) / whole}%`, width, top: `${(100 * i) / lanes.length}%`, height: `${100 / lanes.length}%` };
      return h("i", { class: `phase ${phase.name}`, style: place });
    }),
  );
  return h(
    "span",
    { class: "cold-start", title, "aria-label": `${seconds(start.seconds)}: ${title}`, role: "img" },
    h("b", null, seconds(start.seconds)),
    h("span", { class: "phases" }, bars),
  );
}

// ---- nodes

function nodeCard(node) {
  if (node.nothing) return empty(node.nothing);
  const cached = node.cached.reduce((sum, blob) => sum + blob.num_bytes, 0);
  return h(
    "article",
    { class: node.is_alive ? "node" : "node lost" },
    h(
      "h3",
      null,
      node.node_id,
      node.is_alive ? null : badge(`silent since ${clock(node.lost_since)}`, "bad"),
      node.draining ? badge("draining", "warn") : null,
      h("small", null, node.engines.join(", ")),
    ),
    node.gpus.map(gpuBar),
    h(
      "p",
      { class: "cache" },
      h("span", null, "host cache"),
      h("span", { class: "thin", "aria-hidden": "true" }, node.cached.map((blob) => cacheSlice(blob, node.host_cache_bytes || cached))),
      h("small", null, node.host_cache_bytes ? `${bytes(cached)} of ${bytes(node.host_cache_bytes)}` : bytes(cached)),
    ),
    node.bytes_in_flight ? h("p", { class: "cache" }, h("span", null, "arriving"), h("small", null, bytes(node.bytes_in_flight))) : null,
  );
}

function cacheSlice(blob, total) {
  const key = blob.model_keys[0];
  const own = key !== undefined && hue.has(key);
  return h("i", {
    class: own ? "owned" : "",
    style: { width: `${(100 * blob.num_bytes) / Math.max(total, 1)}%`, "--h": String(hue.get(key) ?? 0) },
  });
}

function gpuBar(gpu) {
  const used = gpu.total_bytes - gpu.free_bytes;
  const name = gpu.gpu_id.includes("/") ? gpu.gpu_id.slice(gpu.gpu_id.lastIndexOf("/") + 1) : gpu.gpu_id;
  const words = gpu.grants.map((grant) => `${grantName(grant)}: ${OWNER_WORDS[grant.owner] ?? grant.owner} ${bytes(grant.num_bytes)}`);
  const label = `GPU ${gpu.gpu_id}, ${bytes(used)} of ${bytes(gpu.total_bytes)} used. ${words.join("; ")}`;
  return h(
    "div",
    { class: "gpu" },
    h(
      "div",
      { class: "gpu-head" },
      h("span", null, `GPU ${name}`, h("small", null, gpu.kind === "host" ? "host memory" : gpu.kind), gpu.role === "idle" ? null : h("small", null, gpu.role)),
      h("span", { class: "num" }, bytes(used), h("small", null, ` of ${bytes(gpu.total_bytes)}`)),
    ),
    h("div", { class: "bar", role: "img", "aria-label": label }, gpu.grants.map((grant) => grantSlice(grant, gpu.total_bytes))),
    gpu.grants.length ? h("ul", { class: "legend" }, byHolder(gpu.grants).map(legendLine)) : null,
  );
}

function grantName(grant) {
  return live.model(grant.model_key)?.name ?? grant.holder;
}

function grantSlice(grant, total) {
  return h("i", {
    class: `grant ${grant.owner} ${hue.has(grant.model_key) ? "owned" : ""}`,
    title: `${grantName(grant)} · ${OWNER_WORDS[grant.owner] ?? grant.owner} · ${bytes(grant.num_bytes)} · ${grant.holder}${grant.emulated ? " · emulated" : ""}`,
    style: { width: `${(100 * grant.num_bytes) / Math.max(total, 1)}%`, "--h": String(hue.get(grant.model_key) ?? 0) },
  });
}

function byHolder(grants) {
  const found = new Map();
  for (const grant of grants) {
    const line = found.get(grant.holder) ?? { ...grant, num_bytes: 0 };
    line.num_bytes += grant.num_bytes;
    found.set(grant.holder, line);
  }
  return [...found.values()];
}

function legendLine(line) {
  return h(
    "li",
    null,
    h("i", { class: `swatch ${hue.has(line.model_key) ? "" : "nobody"}`, style: { "--h": String(hue.get(line.model_key) ?? 0) }, "aria-hidden": "true" }),
    h("span", { title: line.holder }, grantName(line)),
    emulated(line.emulated),
    h("small", null, bytes(line.num_bytes)),
  );
}

// ---- decisions

function decisionLine(decision) {
  if (decision.nothing) return h("li", null, empty(decision.nothing));
  const subject = live.model(decision.model_key)?.name ?? (decision.model_key || decision.node_id || decision.instance_id);
  const words = [
    h("time", { datetime: new Date(decision.made_at * 1000).toISOString() }, clock(decision.made_at)),
    h("span", { class: `kind ${decision.kind}` }, decision.kind),
    h("span", { class: "reason" }, h("b", null, subject), " ", decision.reason, h("small", null, decision.policy)),
  ];
  return h("li", { title: decision.decision_id }, decision.trace_id ? h("a", { href: `#/trace/${decision.trace_id}` }, words) : words);
}

