// The bus as it goes by: filtered by the server, newest first, a bounded number of lines. The rest is counted.
// Keys: up and down walk, Enter opens, p pauses.

import { badge, emulated, empty, h, panel, say } from "/page/dom.js";
import { asked, eventAddress, remember } from "/page/address.js";
import { commandLine } from "/page/copy.js";
import { detail, PLANES } from "/page/event.js";
import { clock, count } from "/page/format.js";
import { live } from "/page/live.js";

const SHOWN = 300;
const HELD = 300; // kept for the moment one goes on
const SETTLE_MS = 300;
const TEXTS = ["type", "model", "node", "service", "id", "q"];

export function eventsView() {
  const given = asked("events");
  const wanted = Object.fromEntries(TEXTS.map((name) => [name, given.get(name) ?? ""]));
  const given_planes = given.getAll("plane").filter((plane) => plane in PLANES);
  const planes = new Set(given_planes.length ? given_planes : ["evt", "cmd"]);
  const view = new EventsView(wanted, planes);
  view.connect();
  return { element: view.element, title: "Events", close: () => view.close(), keys: [["p", "pause and resume the events"], ["↑ ↓", "walk through the events"], ["Enter", "open the event"]] };
}

class EventsView {
  constructor(wanted, planes) {
    this.wanted = wanted;
    this.planes = planes;
    this.rows = new Map(); // event_id -> element, newest first
    this.held = [];
    this.paused = false;
    this.numHeldBack = 0; // passed while paused
    this.numSkipped = 0;
    this.selected = "";
    this.build();
    this.onModels = () => this.drawLists();
    live.addEventListener("models", this.onModels);
    this.onPress = (event) => this.onDocumentKey(event);
    document.addEventListener("keydown", this.onPress);
  }

  build() {
    const input = (name, label, placeholder, attrs = {}) => {
      const box = h("input", { id: `event-${name}`, value: this.wanted[name], placeholder, autocomplete: "off", spellcheck: "false", ...attrs });
      box.addEventListener("input", () => this.ask({ [name]: box.value.trim() }));
      return h("label", { class: "field", for: `event-${name}` }, h("span", null, label), box);
    };
    this.lists = Object.fromEntries(["type", "model", "node", "service"].map((name) => [name, h("datalist", { id: `event-${name}s` })]));
    const search = input("q", "text", "anywhere in the event", { type: "search", "aria-keyshortcuts": "/" });
    const fields = [
      input("type", "fact or command", "instance.ready", { list: "event-types" }),
      input("model", "model", "key", { list: "event-models" }),
      input("node", "node", "node-1", { list: "event-nodes" }),
      input("service", "written by", "placer", { list: "event-services" }),
    ];
    this.boxes = Object.keys(PLANES).map((plane) => {
      const box = h("input", { type: "checkbox", checked: this.planes.has(plane), onchange: () => this.toggle(plane, box.checked) });
      return h("label", null, box, `${PLANES[plane]}s`.replace("telemetrys", "telemetry"));
    });
    this.button = h("button", { type: "button", "aria-pressed": "false", "aria-keyshortcuts": "p", onclick: () => this.pause() }, "Pause");
    this.tally = h("p", { class: "note", role: "status", "aria-live": "off" });
    this.command = commandLine("glowplug tap");
    this.list = h("ol", { class: "event-rows", "aria-label": "Events, newest first", onkeydown: (event) => this.onKey(event), onclick: (event) => this.onClick(event) });
    this.nothing = empty("Waiting for events…");
    this.aside = h("aside", { class: "detail event-detail", "aria-label": "Event" }, empty("Choose an event to see its payload and causes."));
    this.element = h(
      "div",
      { class: "events-view" },
      h("h1", { class: "hidden" }, "Events"),
      h("form", { class: "tools", role: "search", onsubmit: (event) => event.preventDefault() }, search, fields, h("span", { class: "planes", role: "group", "aria-label": "Classes" }, this.boxes), this.button, Object.values(this.lists)),
      h("div", { class: "events-bar" }, this.tally, this.command.element),
      h("div", { class: "events-grid" }, panel("Events", "event-list", this.nothing, this.list), this.aside),
    );
    this.drawLists();
  }

  query() {
    const pairs = [...this.planes].sort().map((plane) => ["plane", plane]);
    return [...pairs, ...TEXTS.map((name) => [name, this.wanted[name]])].filter(([, value]) => value);
  }

  connect() {
    this.source?.close();
    clearTimeout(this.retry);
    const usual = this.planes.size === 2 && !this.planes.has("tel");
    remember("events", this.query().filter(([name]) => name !== "plane" || !usual));
    const source = (this.source = new EventSource(`/api/v1/events?${new URLSearchParams(this.query())}`));
    source.addEventListener("events", (event) => this.opening(JSON.parse(event.data)));
    source.addEventListener("more", (event) => this.more(JSON.parse(event.data)));
    source.onerror = () => {
      this.lost = true;
      this.drawTally();
      if (source.readyState === EventSource.CLOSED) this.retry = setTimeout(() => this.connect(), 2000);
    };
  }

  opening(page) {
    this.lost = false;
    this.command.set(page.command);
    if (page.types) this.drawTypes(page.types);
    this.numPassed = page.num_passed;
    if (!this.paused) {
      this.list.replaceChildren();
      this.rows.clear();
      this.numSkipped = 0;
      this.add(page.rows);
    }
    this.drawTally();
  }

  more(batch) {
    this.lost = false;
    this.numPassed = batch.num_passed;
    if (this.paused) {
      this.numHeldBack += batch.rows.length + batch.num_skipped;
      this.held.push(...batch.rows);
      if (this.held.length > HELD) this.held.splice(0, this.held.length - HELD);
    } else {
      this.numSkipped += batch.num_skipped;
      this.add(batch.rows);
    }
    this.drawTally();
  }

  add(rows) {
    for (const row of rows) {
      if (this.rows.has(row.event_id)) continue;
      const element = eventRow(row);
      element.tabIndex = this.rows.size ? -1 : 0;
      this.rows.set(row.event_id, element);
      this.list.prepend(element);
    }
    for (const [id, element] of this.rows) {
      if (this.rows.size <= SHOWN) break;
      if (element.tabIndex === 0 && this.list.firstElementChild) this.list.firstElementChild.tabIndex = 0;
      element.remove();
      this.rows.delete(id);
    }
    this.nothing.hidden = this.rows.size > 0;
    say(this.nothing, "No event matches yet. They show here as they pass.");
  }

  pause(on = !this.paused) {
    this.paused = on;
    this.button.setAttribute("aria-pressed", String(on));
    say(this.button, on ? "Go on" : "Pause");
    if (!on) {
      this.numSkipped += this.numHeldBack - this.held.length;
      this.add(this.held);
      this.held = [];
      this.numHeldBack = 0;
    }
    this.drawTally();
  }

  ask(change) {
    Object.assign(this.wanted, change);
    clearTimeout(this.settling);
    this.settling = setTimeout(() => this.connect(), SETTLE_MS);
  }

  toggle(plane, on) {
    if (on) this.planes.add(plane);
    else this.planes.delete(plane);
    if (!this.planes.size) {
      this.planes.add(plane); // nothing at all is no view
      this.boxes[Object.keys(PLANES).indexOf(plane)].querySelector("input").checked = true;
    }
    this.ask({});
  }

  drawTally() {
    const parts = [];
    if (this.lost) parts.push("the stream was interrupted; reconnecting");
    if (this.paused) parts.push(`paused: ${count(this.numHeldBack, "event")} passed meanwhile`);
    parts.push(`${this.rows.size} shown`);
    if (this.numSkipped) parts.push(`${this.numSkipped} not shown (they came faster than a page can be read)`);
    parts.push(`${this.numPassed ?? 0} passed since the console started`);
    say(this.tally, parts.join(" · "));
  }

  drawTypes(types) {
    this.lists.type.replaceChildren(...types.map((name) => h("option", { value: name })));
  }

  drawLists() {
    const fill = (list, values) => list.replaceChildren(...values.map((value) => h("option", { value })));
    fill(this.lists.model, live.models.map((model) => model.key));
    fill(this.lists.node, live.nodes.map((node) => node.node_id));
    fill(this.lists.service, ["router", "autoscaler", "placer", "prefetcher", "agent", "predictor", "console"]);
  }

  onDocumentKey(event) {
    if (event.key !== "p" || event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, textarea, select")) return;
    event.preventDefault();
    this.pause();
  }

  onClick(event) {
    const element = event.target.closest(".event-row");
    if (!element || event.target.closest("a[href^='#/trace']")) return;
    event.preventDefault();
    this.select(element);
  }

  onKey(event) {
    const element = event.target.closest(".event-row");
    if (!element || event.ctrlKey || event.metaKey || event.altKey) return;
    let to = null;
    if (event.key === "ArrowDown") to = element.nextElementSibling;
    else if (event.key === "ArrowUp") to = element.previousElementSibling;
    else if (event.key === "Home") to = this.list.firstElementChild;
    else if (event.key === "End") to = this.list.lastElementChild;
    else if (event.key === "Enter") to = element;
    else return;
    event.preventDefault();
    if (event.key === "Enter") this.select(element);
    else if (to) focusOn(this.list, to);
  }

  async select(element) {
    this.selected = element.dataset.id;
    for (const other of this.list.querySelectorAll("[aria-current]")) other.removeAttribute("aria-current");
    element.setAttribute("aria-current", "true");
    focusOn(this.list, element);
    const parts = await detail(this.selected, "h2");
    if (this.selected === element.dataset.id) this.aside.replaceChildren(...parts, h("p", null, h("a", { href: eventAddress(this.selected) }, "open alone")));
  }

  close() {
    this.source.close();
    clearTimeout(this.retry);
    clearTimeout(this.settling);
    live.removeEventListener("models", this.onModels);
    document.removeEventListener("keydown", this.onPress);
  }
}

function focusOn(list, element) {
  for (const other of list.querySelectorAll('[tabindex="0"]')) other.tabIndex = -1;
  element.tabIndex = 0;
  element.focus();
}

function eventRow(row) {
  const { plane, kind, issuer, model_key } = row.seen;
  const isEmulated = row.emulated || live.model(model_key)?.emulated;
  return h(
    "li",
    { class: `event-row ${plane}`, "data-id": row.event_id, tabindex: "-1", "aria-label": `${clock(row.occurred_at, true)} ${kind} by ${issuer} ${row.words}${isEmulated ? ", emulated" : ""}` },
    h("span", { class: "num" }, clock(row.occurred_at, true)),
    badge(PLANES[plane], `plane ${plane}`),
    h("b", null, kind),
    h("span", { class: "by" }, issuer),
    h("span", { class: "words" }, row.words),
    emulated(isEmulated),
    row.trace_id ? h("a", { href: `#/trace/${row.trace_id}`, tabindex: "-1" }, "trace") : null,
  );
}
