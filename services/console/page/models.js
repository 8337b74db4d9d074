// The models: state, queue, last start and actions of each.

import { modelActions } from "/page/actions.js";
import { hues } from "/page/colours.js";
import { badge, empty, emulated, h, kept, keyed, listen, say, segments } from "/page/dom.js";
import { bytes, count, seconds, stateWord } from "/page/format.js";
import { live } from "/page/live.js";
import { phaseBars } from "/page/phases.js";
import { whyNot } from "/page/session.js";
import { memoryBytes, nodeOf, phasesOf, placeOf, secondsOf } from "/page/values.js";

const WARMTH = { hot: 0, warm: 1, cold: 2 };
const ORDERS = {
  name: { word: "Model", by: () => 0 },
  state: { word: "State", by: (a, b) => WARMTH[a.temperature] - WARMTH[b.temperature] || (a.state < b.state ? -1 : a.state > b.state ? 1 : 0) },
  queue: { word: "Queue", by: (a, b) => b.num_waiting - a.num_waiting },
  running: { word: "Running", by: (a, b) => b.num_in_flight - a.num_in_flight },
  start: { word: "Last cold start", by: (a, b) => startSeconds(b) - startSeconds(a) },
  memory: { word: "Memory", by: (a, b) => memoryBytes(b) - memoryBytes(a) },
};
const startSeconds = (model) => (model.last_cold_start ? secondsOf(model.last_cold_start) : -1);
const UNSEEN_EVERY_MS = 1000;
const UNSEEN_BUDGET_MS = 12;
const GROUPS = { "": "all", hot: "ready", warm: "prewarmed or asleep", cold: "not loaded" }; // by temperature
// Choices stay while the page is open, also while another view is.
const chosen = { text: "", temperature: "", order: "name" };

let hue = new Map();

export function modelsView() {
  const filter = h("input", { type: "search", id: "model-filter", placeholder: "Filter by name, engine, state", value: chosen.text, autocomplete: "off" });
  const kinds = h("span", { class: "segments", role: "group", "aria-label": "State" });
  const tally = h("span", { class: "note", role: "status", "aria-live": "polite" });
  const head = h("div", { role: "row", class: "model-line head" });
  const body = h("div", { role: "rowgroup", class: "model-lines" });
  const nothing = h("div", { role: "rowgroup" });
  const grid = h("div", { role: "table", "aria-label": "Models", class: "models-grid" }, h("div", { role: "rowgroup" }, head), body, nothing);
  const element = h(
    "div",
    { class: "models-view" },
    h("h1", { class: "hidden" }, "Models"),
    h("div", { class: "tools" }, h("label", { class: "hidden", for: "model-filter" }, "Filter models"), filter, kinds, whyNot("operator") ? null : h("a", { class: "button", href: "#/deploy" }, "Deploy a model"), tally),
    h("section", { class: "panel", "aria-label": "Models" }, grid),
  );
  const lines = new Lines();
  const draw = () => {
    const models = live.models;
    const found = inOrder(models.filter(isWanted));
    say(tally, found.length === models.length ? count(models.length, "model") : `${found.length} of ${count(models.length, "model")}`);
    drawKinds(kinds, models, draw);
    drawHead(head, draw);
    kept(body, found, (model) => model.key, (model) => lines.make(model));
    const why = models.length ? "No model matches." : "No model is deployed yet.";
    keyed(nothing, found.length || !live.ready ? [] : [{ why }], () => "", () => h("div", { role: "row" }, h("div", { role: "cell" }, empty(why))));
  };
  const changed = ({ detail }) => {
    draw();
    for (const id of detail.instances) lines.touch(live.instances.get(id)?.model_key);
    for (const key of detail.models) if (!live.model(key)) lines.drop(key);
    if (detail.all) lines.touchAll();
  };
  const named = () => {
    hue = hues(live.models.map((model) => model.key));
    lines.touchAll();
  };
  filter.addEventListener("input", () => {
    chosen.text = filter.value;
    draw();
  });
  const deaf = listen(live, { change: changed, models: named });
  named();
  draw();
  return {
    element,
    title: "Models",
    close: () => {
      lines.close();
      deaf();
    },
  };
}

/** The lines of the table. One in sight is drawn when its model changes; the others when they come into sight, and now
 * and then, so that a search or a screen reader finds no old text. */
class Lines {
  constructor() {
    this.byKey = new Map();
    this.stale = new Set();
    this.seen = new IntersectionObserver((entries) => this.sight(entries), { rootMargin: "300px" });
    this.timer = setInterval(() => this.redraw(), UNSEEN_EVERY_MS);
  }

  make(model) {
    const line = { model, inSight: false, element: h("div", { role: "row", class: "model-line", "data-key": model.key }, h("span", { role: "rowheader" }, model.name)) };
    line.element.line = line;
    line.update = (fresh) => {
      line.model = fresh;
      this.touch(fresh.key);
    };
    this.byKey.set(model.key, line);
    this.seen.observe(line.element);
    return line;
  }

  touch(key) {
    const line = this.byKey.get(key);
    if (!line) return;
    if (line.inSight) fill(line);
    else this.stale.add(key);
  }

  touchAll() {
    for (const key of this.byKey.keys()) this.touch(key);
  }

  sight(entries) {
    for (const { target, isIntersecting } of entries) {
      const { line } = target;
      line.inSight = isIntersecting;
      if (!target.isConnected) this.forget(line);
      else if (isIntersecting && this.stale.delete(line.model.key)) fill(line);
    }
  }

  /** Those out of sight, some at a time. */
  redraw() {
    const until = performance.now() + UNSEEN_BUDGET_MS;
    for (const key of this.stale) {
      const line = this.byKey.get(key);
      this.stale.delete(key);
      if (!line.element.isConnected) this.forget(line);
      else fill(line);
      if (performance.now() > until) return;
    }
  }

  drop(key) {
    const line = this.byKey.get(key);
    if (line) this.forget(line);
  }

  forget(line) {
    this.seen.unobserve(line.element);
    if (this.byKey.get(line.model.key) !== line) return; // filtered out, and in again as another line
    this.byKey.delete(line.model.key);
    this.stale.delete(line.model.key);
  }

  close() {
    clearInterval(this.timer);
    this.seen.disconnect();
  }
}

function isWanted(model) {
  if (chosen.temperature && model.temperature !== chosen.temperature) return false;
  const text = `${model.name} ${model.key} ${model.engine} ${stateWord(model.state)}${model.pinned ? " pinned" : ""}${model.suspended ? " drained" : ""}`.toLowerCase();
  return chosen.text.toLowerCase().split(/\s+/).every((word) => text.includes(word));
}

function inOrder(models) {
  return models.sort(ORDERS[chosen.order].by); // they come by name, and sorting is stable
}

function drawKinds(kinds, models, draw) {
  const tally = { "": models.length };
  for (const model of models) tally[model.temperature] = (tally[model.temperature] ?? 0) + 1;
  const choose = (key) => {
    chosen.temperature = key;
    draw();
  };
  segments(kinds, Object.keys(GROUPS), chosen.temperature, choose, (key) => GROUPS[key], (key) => tally[key] ?? 0);
}

function drawHead(head, draw) {
  const columns = ["name", "state", "queue", "running", "instances", "start", "memory", "actions"].map((key) => ({ key, on: chosen.order === key }));
  keyed(head, columns, (column) => column.key, ({ key, on }) => {
    if (!ORDERS[key]) return h("span", { role: "columnheader" }, key === "instances" ? "Instances" : h("span", { class: "hidden" }, "Actions"));
    const order = () => {
      chosen.order = key;
      draw();
    };
    const sorted = key === "name" ? "ascending" : "descending";
    return h("span", { role: "columnheader", "aria-sort": on ? sorted : null }, h("button", { type: "button", class: "plain", "data-focus": key, onclick: order }, ORDERS[key].word));
  });
}

/** Draw a line again in its element, and restore the focus. */
function fill(line) {
  const { element, model } = line;
  const focused = element.contains(document.activeElement) ? document.activeElement.dataset.focus : undefined;
  element.className = `model-line temp-${model.temperature}`;
  element.replaceChildren(...cells(model));
  if (focused) (element.querySelector(`[data-focus="${CSS.escape(focused)}"]`) ?? element.querySelector("a")).focus();
}

function cells(model) {
  const address = encodeURIComponent(model.key);
  return [
    h(
      "span",
      { role: "rowheader", class: "name" },
      h("i", { class: "swatch", style: { "--h": String(hue.get(model.key) ?? 0) }, "aria-hidden": "true" }),
      h("a", { href: `#/model/${address}`, "data-focus": "name" }, model.name),
      emulated(model.emulated),
      model.pinned ? badge("pinned", "quiet", "Never evicted, always at least one instance") : null,
      model.suspended ? badge("drained", "warn", "Drained by its operator: no start until it is loaded again") : null,
      h("small", null, model.engine),
    ),
    h("span", { role: "cell" }, stateOf(model)),
    h("span", { role: "cell", class: "num" }, number(model.num_waiting, "queue")),
    h("span", { role: "cell", class: "num" }, number(model.num_in_flight)),
    h("span", { role: "cell", class: "chips" }, model.instances.map(chip)),
    h("span", { role: "cell" }, lastStart(model.last_cold_start)),
    h("span", { role: "cell", class: "num" }, bytes(memoryBytes(model))),
    h(
      "span",
      { role: "cell", class: "acts" },
      modelActions(model),
      h("a", { class: "act", href: `#/playground/${address}`, "data-focus": "chat", "aria-label": `Chat with ${model.name}` }, "Chat"),
    ),
  ];
}

function number(num, kind = "") {
  return h("span", { class: num ? kind : "zero" }, String(num));
}

/** The time until it is ready, in an element of this tag; null if it is or has failed. */
export function etaOf(model, tag, className = null) {
  if (model.eta_s <= 0 || model.state === "failed") return null;
  const isComing = model.state === "loading" || model.state === "starting";
  const title = model.eta_measured ? "from the starts measured so far" : "no start has been measured yet";
  return h(tag, { class: className, title }, `${isComing ? "ready in" : "starts in"} ${model.eta_measured ? "" : "~"}${model.eta_s} s`);
}

export function stateOf(model) {
  return h(
    "span",
    { class: `state ${model.state}`, title: model.failure?.reason ?? null },
    h("i", { class: "dot", "aria-hidden": "true" }),
    stateWord(model.state),
    etaOf(model, "small"),
    model.failure ? h("small", { class: "why" }, model.failure.reason || "no reason given") : null,
  );
}

function chip(id) {
  const instance = live.instances.get(id);
  if (!instance) return null;
  return h(
    "span",
    { class: `chip ${instance.state}`, title: `${id} on ${placeOf(instance)}, ${stateWord(instance.state)}` },
    nodeOf(instance),
    h("small", null, instance.state === "ready" ? `${instance.num_in_flight}/${instance.max_concurrency}` : stateWord(instance.state)),
  );
}

function lastStart(start) {
  if (!start) return h("span", { class: "zero" }, "–");
  return h("span", { class: "cold-start" }, h("b", null, seconds(secondsOf(start))), phaseBars(phasesOf(start), secondsOf(start)));
}
