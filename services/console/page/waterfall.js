// The waterfall of one trace: a time axis, the cold start's phases, a tree of spans, and the details of one of them.
// Keys: up and down walk, left and right close and open, Home and End jump.

import { badge, h, terms } from "/page/dom.js";
import { plainService, serviceHue } from "/page/colours.js";
import { decisionAddress } from "/page/address.js";
import { mark, seconds, ticks } from "/page/format.js";
import { gapWords, verdict } from "/page/predicted.js";

const LABEL_ROOM = 0.78; // a bar that ends past this share of the axis has its label on the left

export class Waterfall {
  constructor() {
    this.marks = h("div", { class: "marks" });
    this.axis = h("div", { class: "axis", "aria-hidden": "true" }, this.marks);
    this.phases = h("div", { class: "phase-lanes", role: "group", "aria-label": "Cold start, predicted and actual" });
    this.tree = h("div", { class: "rows", role: "treegrid", "aria-label": "Spans", onkeydown: (event) => this.onKey(event), onclick: (event) => this.onClick(event) });
    this.detail = h("aside", { class: "detail", "aria-label": "Span details", "aria-live": "polite" });
    this.element = h("div", { class: "waterfall", hidden: true }, h("div", { class: "chart" }, this.axis, this.phases, this.tree), this.detail);
    this.closed = new Set();
    this.selected = null;
    this.trace = null;
  }

  /** Draw, or draw again: selection, open branches and focus stay. */
  draw(trace) {
    const hadFocus = this.tree.contains(document.activeElement);
    this.trace = trace;
    this.span = Math.max(trace.duration_s, ...trace.rows.map((row) => row.offset_s + row.duration_s), 1e-6);
    this.byId = new Map(trace.rows.map((row) => [row.span_id, row]));
    if (!this.byId.has(this.selected)) this.selected = this.firstOfInterest();
    this.element.hidden = false;
    this.drawAxis();
    this.drawPhases();
    this.tree.replaceChildren(...trace.rows.map((row) => this.rowElement(row)));
    this.hideClosed();
    this.select(this.selected, hadFocus);
  }

  firstOfInterest() {
    const rows = this.trace.rows;
    return (rows.find((row) => row.error) ?? rows[0])?.span_id;
  }

  left(at) {
    return `${(100 * at) / this.span}%`;
  }

  drawAxis() {
    const { step, marks } = ticks(this.span);
    this.element.style.setProperty("--tick", this.left(step));
    this.marks.replaceChildren(...marks.map((at) => h("span", { style: { left: this.left(at) }, class: at / this.span > 0.95 ? "last" : null }, mark(at, this.span))));
  }

  /** A line per phase: the prediction outlined behind the measured time, and the gap in words beside the name. */
  drawPhases() {
    this.phases.replaceChildren(...this.trace.phases.map((phase) => this.phaseLine(phase)));
  }

  phaseLine(phase) {
    const known = phase.predicted_s > 0;
    const label = known ? verdict(phase) : "no prediction yet";
    const late = known && label !== "as predicted" && phase.duration_s > phase.predicted_s;
    const room = this.span - phase.offset_s;
    return h(
      "button",
      {
        type: "button",
        class: "phase-line",
        title: `${phase.name}: ${gapWords(phase)}`,
        "aria-label": `Cold start phase ${phase.name} ${gapWords(phase)}`,
        onclick: () => this.select(phase.span_id, true),
      },
      h(
        "span",
        { class: "phase-name-cell" },
        h("i", { class: `swatch stage p-${phase.name}`, "aria-hidden": "true" }),
        h("b", null, phase.name),
        h("span", null, seconds(phase.duration_s)),
        h("small", { class: late ? "late" : known ? null : "unknown" }, label),
      ),
      h(
        "span",
        { class: "when" },
        known ? h("i", { class: `predicted-bar p-${phase.name}${phase.predicted_s > room ? " cut" : ""}`, style: { left: this.left(phase.offset_s), width: this.left(Math.min(phase.predicted_s, room)) } }) : null,
        h("i", { class: `actual-bar p-${phase.name}`, style: { left: this.left(phase.offset_s), width: this.left(phase.duration_s) } }),
      ),
    );
  }

  rowElement(row) {
    const end = (row.offset_s + row.duration_s) / this.span;
    const toLeft = end > LABEL_ROOM && row.offset_s / this.span > 1 - LABEL_ROOM;
    const inside = end > LABEL_ROOM && !toLeft;
    const label = { style: toLeft ? { right: `calc(${100 * (1 - row.offset_s / this.span)}% + 6px)` } : { left: inside ? `calc(${this.left(row.offset_s)} + 6px)` : `calc(${100 * end}% + 6px)` } };
    const hue = { "--h": String(serviceHue(row.service)), "--depth": String(Math.min(row.depth, 16)) };
    const takes = row.duration_s ? seconds(row.duration_s) : `at ${seconds(row.offset_s)}`; // a decision is a moment
    const words = `${row.name}, ${plainService(row.service)}, ${row.duration_s ? `${takes}, starts at ${seconds(row.offset_s)}` : takes}${row.error ? ", error" : ""}`;
    return h(
      "div",
      {
        class: row.error ? "row error" : "row",
        role: "row",
        tabindex: "-1",
        id: `s-${row.span_id}`,
        "data-id": row.span_id,
        "aria-level": String(row.depth + 1),
        "aria-expanded": row.num_children ? String(!this.closed.has(row.span_id)) : null,
        "aria-label": words,
        title: `${row.name} · ${plainService(row.service)} · ${takes}`,
        style: hue,
      },
      h(
        "span",
        { class: "about", role: "gridcell" },
        row.num_children ? h("span", { class: "fold", "aria-hidden": "true" }) : h("span", { class: "fold none", "aria-hidden": "true" }),
        h("i", { class: "swatch", "aria-hidden": "true" }),
        h("b", null, ownName(row)),
        row.error ? h("span", { class: "mark", "aria-hidden": "true" }, "!") : null,
        row.phase ? badge(row.phase, `phase-name p-${row.phase}`) : null,
        row.attributes["glowplug.decision_id"] ? badge("decided", "decided", row.attributes["glowplug.reason"] ?? "A decision was made here") : null,
        h("small", null, plainService(row.service)),
      ),
      h(
        "span",
        { class: "when", role: "gridcell" },
        h("i", { class: "span-bar", style: { left: this.left(row.offset_s), width: this.left(row.duration_s) } }),
        row.events.slice(0, 32).map((point) => h("i", { class: "point", title: point.name, style: { left: this.left(Math.min(Math.max(point.offset_s, 0), this.span)) } })),
        h("span", { class: inside ? "label inside" : "label", ...label }, takes),
      ),
    );
  }

  hideClosed() {
    let below = Infinity;
    for (const element of this.tree.children) {
      const row = this.byId.get(element.dataset.id);
      if (row.depth <= below) below = Infinity;
      element.hidden = row.depth > below;
      if (!element.hidden && this.closed.has(row.span_id)) below = row.depth;
      if (row.num_children) element.setAttribute("aria-expanded", String(!this.closed.has(row.span_id)));
    }
  }

  fold(id, close) {
    if (close) this.closed.add(id);
    else this.closed.delete(id);
    this.hideClosed();
  }

  select(id, focus = false) {
    this.selected = id;
    for (const element of this.tree.children) {
      const is = element.dataset.id === id;
      element.setAttribute("aria-selected", String(is));
      element.tabIndex = is ? 0 : -1;
      if (is && focus) element.focus();
    }
    const row = this.byId.get(id);
    if (row) this.detail.replaceChildren(...details(row));
  }

  onClick(event) {
    const element = event.target.closest(".row");
    if (!element) return;
    const id = element.dataset.id;
    if (event.target.closest(".fold:not(.none)")) this.fold(id, !this.closed.has(id));
    this.select(id, true);
  }

  onKey(event) {
    const shown = [...this.tree.children].filter((element) => !element.hidden);
    const at = shown.findIndex((element) => element.dataset.id === this.selected);
    const row = this.byId.get(this.selected);
    if (at < 0 || !row || event.ctrlKey || event.metaKey || event.altKey) return;
    let to = at;
    if (event.key === "ArrowDown") to = Math.min(at + 1, shown.length - 1);
    else if (event.key === "ArrowUp") to = Math.max(at - 1, 0);
    else if (event.key === "Home") to = 0;
    else if (event.key === "End") to = shown.length - 1;
    else if (event.key === "ArrowRight") this.fold(row.span_id, false);
    else if (event.key === "ArrowLeft" && row.num_children && !this.closed.has(row.span_id)) this.fold(row.span_id, true);
    else if (event.key === "ArrowLeft" && row.parent_id) to = shown.findIndex((element) => element.dataset.id === row.parent_id);
    else return;
    event.preventDefault();
    this.select(shown[Math.max(to, 0)].dataset.id, true);
  }
}

/** A span's name without its service's, which is shown beside it. */
function ownName(row) {
  const prefix = `${plainService(row.service)}.`;
  return row.name.startsWith(prefix) ? row.name.slice(prefix.length) : row.name;
}

function details(row) {
  const predicted_s = row.attributes["glowplug.predicted_seconds"] ?? 0;
  const facts = [
    ["Service", plainService(row.service)],
    ["Starts at", seconds(row.offset_s)],
    row.duration_s ? ["Takes", seconds(row.duration_s)] : null,
    predicted_s > 0 ? ["Predicted", `${seconds(predicted_s)}: ${verdict({ ...row, predicted_s })}`] : null,
    ["Kind", row.kind],
    ["Process", row.process],
    ["Span", h("code", null, row.span_id)],
  ].filter(Boolean);
  const parts = [h("h2", null, row.name)];
  if (row.error) parts.push(h("p", { class: "error-note" }, row.error));
  parts.push(list(facts));
  const decision = row.attributes["glowplug.decision_id"];
  if (decision) parts.push(h("p", { class: "decided-note" }, row.attributes["glowplug.reason"] ?? "", " ", h("a", { href: decisionAddress(decision) }, "why")));
  const attributes = Object.entries(row.attributes);
  if (attributes.length) parts.push(h("h3", null, "Attributes"), list(attributes.map(([name, value]) => [parted(name), value])));
  if (row.events.length) {
    parts.push(h("h3", null, "Events"));
    for (const point of row.events) parts.push(list([[`+${seconds(point.offset_s)}`, h("b", null, point.name)], ...Object.entries(point.attributes)]));
  }
  return parts;
}

/** A long name may break after a dot or an underscore. */
function parted(name) {
  return h("span", null, name.split(/(?<=[._])/).flatMap((part) => [part, h("wbr")]));
}

function list(pairs) {
  return terms(null, pairs.map(([name, value]) => [name, value instanceof Node ? value : String(value)]));
}
