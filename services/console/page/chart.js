// A line chart over time: axes, legend, a cursor that keys and mouse move, the values at it in words, and a table of all.
// Series: { name, className, points: [{ t, v }], step, dashed }; `step` is the width of a window in seconds, 0 for a plain line. Bands: { name, className, step, points: [{ t, low, high }] }.

import { h, say, svg, table } from "/page/dom.js";
import { clock } from "/page/format.js";

const HEIGHT = 260;
const ROOM = { left: 58, right: 14, top: 12, bottom: 26 };
const TABLE_ROWS = 240;
const STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400];

export class LineChart {
  constructor(title) {
    this.title = title;
    this.at = -1; // index of the moment the cursor stands at
    this.following = true; // the cursor stays at the newest moment until it is moved
    this.picture = svg("svg", { class: "chart-picture", "aria-hidden": "true", height: String(HEIGHT) });
    this.cursor = h("div", {
      class: "chart-cursor",
      role: "slider",
      tabindex: "0",
      "aria-label": `${title}, moment`,
      onkeydown: (event) => this.onKey(event),
    }, this.picture);
    this.cursor.addEventListener("pointermove", (event) => this.onPointer(event));
    this.legend = h("ul", { class: "chart-legend", "aria-label": "Lines" });
    this.readout = h("p", { class: "chart-readout", "aria-hidden": "true" });
    this.body = h("tbody");
    this.tableBox = h("details", { class: "chart-table", ontoggle: () => this.drawTable() }, h("summary", null, "As a table"));
    this.element = h("figure", { class: "chart-figure", "aria-label": title }, this.legend, this.cursor, this.readout, this.tableBox);
    this.observer = new ResizeObserver(() => this.data && this.drawPicture());
    this.observer.observe(this.cursor);
  }

  close() {
    this.observer.disconnect();
  }

  /** `format` writes a value, `from` and `to` are epoch seconds, `now` marks the present when it lies between. */
  draw(data) {
    const old = this.moments?.[this.at];
    this.data = data;
    this.moments = [...new Set([...data.series.flatMap((s) => s.points), ...data.bands.flatMap((b) => b.points)].map((p) => p.t))].filter((t) => t >= data.from && t <= data.to).sort((a, b) => a - b);
    const measured = this.moments.filter((t) => t <= data.now).length - 1;
    const same = this.moments.indexOf(old);
    this.at = this.following || same < 0 ? Math.max(measured, 0) : same;
    const names = [...data.series, ...data.bands].map((line) => h("li", null, h("i", { class: `chart-key ${line.className}${line.dashed ? " dashed" : ""}${line.points[0]?.low === undefined ? "" : " band"}`, "aria-hidden": "true" }), line.name));
    this.legend.replaceChildren(...names);
    this.drawPicture();
    this.drawTable();
    this.point();
  }

  // ---- scales

  x(t) {
    const { from, to } = this.data;
    return ROOM.left + ((t - from) / (to - from)) * (this.width - ROOM.left - ROOM.right);
  }

  y(v) {
    return HEIGHT - ROOM.bottom - (v / this.top) * (HEIGHT - ROOM.top - ROOM.bottom);
  }

  // ---- picture

  drawPicture() {
    this.width = Math.max(this.cursor.clientWidth, 260);
    const values = [...this.data.series.flatMap((s) => s.points.map((p) => p.v)), ...this.data.bands.flatMap((b) => b.points.map((p) => p.high))].filter(Number.isFinite);
    const { step, top } = scale(Math.max(...values, 0), 4);
    this.top = top;
    this.picture.setAttribute("width", String(this.width));
    this.picture.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
    const parts = [];
    for (let v = 0; v <= top + step / 2; v += step) {
      parts.push(svg("line", { class: "chart-grid", x1: ROOM.left, x2: this.width - ROOM.right, y1: this.y(v), y2: this.y(v) }));
      parts.push(svg("text", { class: "chart-mark", x: ROOM.left - 8, y: this.y(v) + 4, "text-anchor": "end" }, this.data.format(v)));
    }
    for (const t of this.times()) {
      parts.push(svg("line", { class: "chart-grid faint", x1: this.x(t), x2: this.x(t), y1: ROOM.top, y2: HEIGHT - ROOM.bottom }));
      parts.push(svg("text", { class: "chart-mark", x: this.x(t), y: HEIGHT - 8, "text-anchor": "middle" }, clock(t).slice(0, this.data.to - this.data.from < 240 ? 8 : 5)));
    }
    if (this.data.now > this.data.from && this.data.now < this.data.to) parts.push(svg("line", { class: "chart-now", x1: this.x(this.data.now), x2: this.x(this.data.now), y1: ROOM.top, y2: HEIGHT - ROOM.bottom }));
    for (const band of this.data.bands) parts.push(svg("path", { class: `chart-band ${band.className}`, d: this.bandPath(band) }));
    for (const line of this.data.series) parts.push(svg("path", { class: `chart-line ${line.className}${line.dashed ? " dashed" : ""}`, d: this.linePath(line) }));
    this.hair = svg("line", { class: "chart-hair", y1: ROOM.top, y2: HEIGHT - ROOM.bottom });
    this.dots = svg("g");
    this.picture.replaceChildren(...parts, this.hair, this.dots);
    this.point();
  }

  times() {
    const span = this.data.to - this.data.from;
    const wanted = Math.max(2, Math.floor(this.width / 110));
    const step = STEPS.find((size) => span / size <= wanted) ?? 86400;
    const zone = new Date(this.data.from * 1000).getTimezoneOffset() * 60; // marks at whole hours of the reader's clock
    const first = Math.ceil((this.data.from - zone) / step) * step + zone;
    return Array.from({ length: Math.max(0, Math.floor((this.data.to - first) / step) + 1) }, (_, i) => first + i * step);
  }

  linePath(line) {
    const shown = line.points.filter((p) => p.t >= this.data.from && p.t <= this.data.to);
    return runs(shown, line.step, (p) => Number.isFinite(p.v)).map((run) => {
      const rest = run.slice(1).map(({ t, v }) => (line.step ? `H${this.x(t)}V${this.y(v)}` : `L${this.x(t)} ${this.y(v)}`));
      const end = line.step ? `H${this.x(Math.min(run.at(-1).t + line.step, this.data.to))}` : ""; // a window has a width
      return `M${this.x(run[0].t)} ${this.y(run[0].v)}${rest.join("")}${end}`;
    }).join("");
  }

  bandPath(band) {
    const shown = band.points.filter((p) => p.t >= this.data.from && p.t <= this.data.to);
    const ends = (p) => (band.step ? [p.t, Math.min(p.t + band.step, this.data.to)] : [p.t]); // a window has a width
    return runs(shown, band.step, (p) => Number.isFinite(p.high)).map((run) => {
      const up = run.flatMap((p) => ends(p).map((t) => `${this.x(t)} ${this.y(p.high)}`));
      const down = run.toReversed().flatMap((p) => ends(p).toReversed().map((t) => `${this.x(t)} ${this.y(p.low)}`));
      return `M${[...up, ...down].join("L")}Z`;
    }).join("");
  }

  // ---- cursor

  valuesAt(t) {
    const lines = this.data.series.map((line) => ({ line, v: line.points.find((p) => p.t === t)?.v })).filter(({ v }) => Number.isFinite(v));
    const bands = this.data.bands.map((band) => ({ band, p: band.points.find((p) => p.t === t) })).filter(({ p }) => p);
    return { lines, bands };
  }

  words(t) {
    const { lines, bands } = this.valuesAt(t);
    const told = [
      ...lines.map(({ line, v }) => `${line.name} ${this.data.format(v)}`),
      ...bands.map(({ band, p }) => `${band.name} ${this.data.format(p.low)} to ${this.data.format(p.high)}`),
    ];
    return `${clock(t)}: ${told.join(", ") || "nothing"}`;
  }

  point() {
    const t = this.moments?.[this.at];
    this.cursor.setAttribute("aria-valuemin", "0");
    this.cursor.setAttribute("aria-valuemax", String(Math.max(0, (this.moments?.length ?? 1) - 1)));
    this.cursor.setAttribute("aria-valuenow", String(Math.max(0, this.at)));
    const text = t === undefined ? "nothing to read yet" : this.words(t);
    this.cursor.setAttribute("aria-valuetext", text);
    say(this.readout, text);
    if (!this.hair || t === undefined) return;
    this.hair.setAttribute("x1", this.x(t));
    this.hair.setAttribute("x2", this.x(t));
    this.dots.replaceChildren(...this.valuesAt(t).lines.map(({ line, v }) => svg("circle", { class: `chart-dot ${line.className}`, cx: this.x(t), cy: this.y(v), r: 3.5 })));
  }

  move(to) {
    this.at = Math.max(0, Math.min(to, this.moments.length - 1));
    this.following = this.moments[this.at] === this.moments.filter((t) => t <= this.data.now).at(-1);
    this.point();
  }

  onKey(event) {
    const page = Math.max(1, Math.round((this.moments?.length ?? 0) / 10));
    const by = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageDown: -page, PageUp: page, Home: -Infinity, End: Infinity }[event.key];
    if (by === undefined || !this.moments?.length || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    this.move(this.at + by);
  }

  onPointer(event) {
    if (!this.moments?.length) return;
    const at = event.clientX - this.cursor.getBoundingClientRect().left;
    let nearest = 0;
    this.moments.forEach((t, i) => Math.abs(this.x(t) - at) < Math.abs(this.x(this.moments[nearest]) - at) && (nearest = i));
    if (nearest !== this.at) this.move(nearest);
  }

  drawTable() {
    if (!this.tableBox.open || !this.data) return;
    const columns = ["Time", ...this.data.series.map((line) => line.name), ...this.data.bands.map((band) => band.name)];
    const rows = this.moments.slice(-TABLE_ROWS).toReversed().map((t) => {
      const { lines, bands } = this.valuesAt(t);
      const cells = [...this.data.series.map((line) => lines.find((one) => one.line === line)?.v), ...this.data.bands.map((band) => bands.find((one) => one.band === band)?.p)];
      return h("tr", null, h("th", { scope: "row" }, clock(t)), cells.map((cell) => h("td", { class: "num" }, cell === undefined ? "–" : cell.low === undefined ? this.data.format(cell) : `${this.data.format(cell.low)} to ${this.data.format(cell.high)}`)));
    });
    this.body = h("tbody", null, rows);
    this.tableBox.querySelector(".scroll")?.remove();
    this.tableBox.append(table(this.title, columns, this.body));
  }
}

/** Points in stretches without a gap: a window that is not there, or whose value is not known, ends one. */
function runs(points, step, isKnown) {
  const found = [];
  let before = null;
  for (const point of points) {
    if (!isKnown(point)) before = null;
    else if (before === null || (step && point.t > before.t + 1.5 * step)) found.push([(before = point)]);
    else found.at(-1).push((before = point));
  }
  return found;
}

/** Round marks from 0 to at least `highest`: the step and the last of them. */
export function scale(highest, wanted) {
  if (!(highest > 0)) return { step: 1, top: 1 };
  const rough = highest / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((size) => size >= rough * 0.9999);
  return { step, top: Math.ceil((highest / step) * 0.9999) * step };
}
