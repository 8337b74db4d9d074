// The fleet: nodes with their memory and links; beside them models in motion, arriving weights and decisions.

import { empty, h, keyed, listen, panel, say } from "/page/dom.js";
import { bytes, count, rate, stateWord } from "/page/format.js";
import { live } from "/page/live.js";
import { NodeMap } from "/page/fleet-map.js";
import { NodeGrid, stateOf } from "/page/fleet-nodes.js";
import { arriving, decisionLine, inMotion, motionLine, transferLine } from "/page/fleet-side.js";
import { bytesInFlight, slicesOf, usedBytes } from "/page/values.js";

const MOTION_LINES = 12;
const TRANSFER_LINES = 8;
const DECISION_LINES = 10;
const STATES = [
  ["", "all"],
  ["ready", "ready"],
  ["arriving", "weights arriving"],
  ["draining", "draining"],
  ["silent", "silent"],
];

export function fleetView(wanted) {
  const figures = h("dl", { class: "figures" });
  const grid = new NodeGrid();
  const map = new NodeMap();
  const motion = h("ol", { class: "lines" });
  const transfers = h("ol", { class: "lines" });
  const decisions = h("ol", { class: "decisions" });
  const note = h("p", { class: "note", role: "status" });
  const nothing = h("div");
  const filter = h("input", { type: "search", id: "node-filter", placeholder: "node, model or engine", spellcheck: "false", autocomplete: "off", "aria-keyshortcuts": "/", value: wanted || null });
  const states = h("select", { id: "node-state" }, STATES.map(([value, word]) => h("option", { value }, word)));
  const tools = h(
    "form",
    { class: "filters", role: "search", onsubmit: (event) => event.preventDefault() },
    h("label", { for: "node-filter", class: "hidden" }, "Filter nodes"),
    filter,
    h("kbd", { "aria-hidden": "true" }, "/"),
    h("label", { for: "node-state" }, "state"),
    states,
    note,
  );
  const element = h(
    "div",
    { class: "fleet" },
    h("h1", { class: "hidden" }, "Fleet"),
    figures,
    panel("Nodes", "nodes-panel", map.element, tools, grid.element, nothing),
    h("div", { class: "column" }, panel("In motion", "motion-panel", motion), panel("On the links", "links-panel", transfers), panel("Decisions", "decisions-panel", decisions)),
  );

  const drawNodes = (all) => {
    const chosen = live.nodes.filter((node) => fits(node, filter.value.trim().toLowerCase(), states.value));
    grid.show(chosen, all);
    say(note, chosen.length === live.nodes.length ? count(chosen.length, "node") : `${chosen.length} of ${count(live.nodes.length, "node")}`);
    const lacking = live.nodes.length ? "No node matches." : "No node has joined yet.";
    keyed(nothing, chosen.length || !live.ready ? [] : [lacking], (text) => text, empty);
  };
  const draw = (changed) => {
    const models = live.models;
    keyed(figures, figuresOf(models), (figure) => figure.name, figureElement);
    if (changed.all || changed.instances.size) grid.index();
    if (changed.all || changed.nodes.size || changed.instances.size) {
      drawNodes(changed.all);
      grid.touch(changed.instances);
      grid.tidy();
      map.show(live.nodes);
      keyed(transfers, orNothing(arriving().slice(0, TRANSFER_LINES), "No weights are on their way."), (t) => t.key ?? "", transferLine);
    }
    const moving = inMotion(models).slice(0, MOTION_LINES);
    keyed(motion, orNothing(moving, live.models.length ? "No model is starting, serving or waiting." : "No model is deployed yet."), (m) => m.key ?? "", motionLine);
    if (changed.all || changed.decisions) {
      keyed(decisions, orNothing(live.decisions.slice(0, DECISION_LINES), "Nothing decided yet."), (d) => d.decision_id ?? "", decisionLine);
    }
  };
  const onChange = ({ detail }) => draw(detail);
  const onModels = () => {
    grid.recolour();
    grid.index();
    drawNodes(true);
  };
  const deaf = listen(live, { change: onChange, models: onModels });
  filter.addEventListener("input", () => drawNodes(false));
  states.addEventListener("change", () => drawNodes(false));
  onModels();
  draw({ all: true, models: new Set(), instances: new Set(), nodes: new Set(), decisions: 0 });
  return {
    element,
    title: "Fleet",
    close: () => {
      grid.close();
      deaf();
    },
  };
}

function orNothing(rows, text) {
  return rows.length || !live.ready ? rows : [{ nothing: text }];
}

function fits(node, text, state) {
  if (state === "arriving" ? !(node.fetches.length || bytesInFlight(node)) : state && stateOf(node) !== state) return false;
  if (!text) return true;
  if (node.node_id.toLowerCase().includes(text) || node.engines.some((engine) => engine.includes(text))) return true;
  const holds = (key) => key && live.nameOf(key).toLowerCase().includes(text);
  return node.gpus.some((gpu) => slicesOf(gpu).some((slice) => holds(slice.model_key)));
}

function figuresOf(models) {
  const nodes = live.nodes;
  const by = { ready: 0, draining: 0, silent: 0 };
  let total = 0;
  let used = 0;
  let inFlight = 0;
  let bytesPerS = 0;
  for (const node of nodes) {
    by[stateOf(node)] += 1;
    inFlight += bytesInFlight(node);
    for (const fetch of node.fetches) bytesPerS += fetch.bytes_per_s;
    for (const gpu of node.gpus) {
      total += gpu.total_bytes;
      used += usedBytes(gpu);
    }
  }
  const instances = {};
  for (const instance of live.instances.values()) instances[instance.state] = (instances[instance.state] ?? 0) + 1;
  const others = Object.entries(instances).filter(([state]) => state !== "ready").map(([state, num]) => `${num} ${stateWord(state)}`);
  const sum = (field) => models.reduce((all, model) => all + model[field], 0);
  const away = [by.draining && `${by.draining} draining`, by.silent && `${by.silent} silent`].filter(Boolean).join(", ");
  return [
    { name: "Nodes", value: String(nodes.length - by.silent), of: ` of ${nodes.length}`, more: away, bad: by.silent > 0 },
    { name: "GPU memory", value: bytes(used), of: ` of ${bytes(total)}`, ratio: total ? Math.round((1000 * used) / total) / 1000 : 0 },
    { name: "Instances", value: String(instances.ready ?? 0), of: " ready", more: others.sort().join(", ") },
    { name: "Models ready", value: String(models.filter((m) => m.temperature === "hot").length), of: ` of ${models.length}` },
    { name: "Waiting", value: String(sum("num_waiting")), of: "" },
    { name: "Running", value: String(sum("num_in_flight")), of: "" },
    { name: "Arriving", value: bytes(inFlight), of: " in flight", more: bytesPerS ? rate(bytesPerS) : "" },
  ];
}

function figureElement(figure) {
  const value = h("dd", { class: figure.bad ? "bad" : null }, figure.value, h("small", null, figure.of));
  if (figure.ratio !== undefined) {
    value.append(h("span", { class: "meter", "aria-hidden": "true" }, h("i", { style: { width: `${100 * figure.ratio}%` } })));
  }
  if (figure.more) value.append(h("small", { class: "more" }, figure.more));
  return h("div", null, h("dt", null, figure.name), value);
}
