// A chart over time, drawn by uPlot: legend, a cursor that keys and mouse move, the values at it in words, and a table of all.
// Series: { name, className or hue, points: [{ t, v }], step, dashed }, `step` the width of a window in seconds. Bands: { name, className, step, points: [{ t, low, high }] }.

import { h, say, table } from "/page/dom.js";
import { clock } from "/page/format.js";

const HEIGHT = 240;
const AXIS = 66;
const TABLE_ROWS = 750;
const SEAM_S = 0.001; // between the end of a window and the start of the next one
const MISSING = "This chart needs the Python package uplot-python, which is not installed beside the console (pip install 'glowplug[console]'). The table has the same values.";
const dark = matchMedia("(prefers-color-scheme: dark)");
let library = null; // a promise of uPlot, null once it is known to be missing

/** uPlot, loaded by the first chart: the server names its files in the document where it has them. */
function uplot() {
  library ??= new Promise((resolve) => {
    const [script, style] = document.querySelector("meta[name=uplot]")?.content.split(" ") ?? [];
    if (!script) return resolve(null);
    document.head.append(h("link", { rel: "stylesheet", href: style }), h("script", { src: script, onload: () => resolve(window.uPlot), onerror: () => resolve(null) }));
  });
  return library;
}

export class LineChart {
  constructor(title) {
    this.title = title;
    this.at = -1; // index of the moment under the cursor
    this.following = true; // the cursor stays at the newest moment until it is moved
    this.mount = h("div", { class: "chart-plot" });
    this.hair = h("i", { class: "chart-hair", hidden: true, "aria-hidden": "true" });
    this.present = h("i", { class: "chart-now", hidden: true, "aria-hidden": "true" });
    this.cursor = h("div", {
      class: "chart-cursor",
      role: "slider",
      tabindex: "0",
      "aria-label": `${title}, moment`,
      onkeydown: (event) => this.onKey(event),
    }, this.mount, this.present, this.hair);
    this.cursor.addEventListener("pointermove", (event) => this.onPointer(event));
    this.legend = h("ul", { class: "chart-legend", "aria-label": "Lines" });
    this.readout = h("p", { class: "chart-readout", "aria-hidden": "true" });
    this.missing = h("p", { class: "chart-missing", hidden: true }, MISSING);
    this.body = h("tbody");
    this.tableBox = h("details", { class: "chart-table", ontoggle: () => this.drawTable() }, h("summary", null, "As a table"));
    this.element = h("figure", { class: "chart-figure", "aria-label": title }, this.legend, this.cursor, this.missing, this.readout, this.tableBox);
    this.observer = new ResizeObserver(() => this.drawPicture());
    this.observer.observe(this.cursor);
    this.onTheme = () => this.drawPicture(true);
    dark.addEventListener("change", this.onTheme);
    uplot().then((found) => this.found(found));
  }

  close() {
    this.observer.disconnect();
    dark.removeEventListener("change", this.onTheme);
    this.plot?.destroy();
    this.plot = this.library = null;
  }

  found(found) {
    this.library = found;
    if (found) return this.drawPicture();
    this.missing.hidden = false;
    this.tableBox.open = true;
  }

  /** `format` writes a value, `from` and `to` are epoch seconds, `now` marks the present if it is between them; `binary`: values are bytes, `whole`: counts. */
  draw(data) {
    const old = this.moments?.[this.at];
    this.data = data;
    this.lines = data.series.map((line) => ({ ...line, at: new Map(line.points.filter((p) => Number.isFinite(p.v)).map((p) => [p.t, p.v])) }));
    this.bands = data.bands.map((band) => ({ ...band, at: new Map(band.points.map((p) => [p.t, p])) }));
    const all = new Set([...data.series, ...data.bands].flatMap((line) => line.points.map((p) => p.t)));
    this.moments = [...all].filter((t) => t >= data.from && t <= data.to).sort((a, b) => a - b);
    const measured = this.moments.filter((t) => t <= data.now).length - 1;
    const same = this.moments.indexOf(old);
    this.at = this.following || same < 0 ? Math.max(measured, 0) : same;
    this.drawLegend();
    this.drawPicture();
    this.drawTable();
    this.point();
  }

  drawLegend() {
    const names = JSON.stringify([...this.lines, ...this.bands].map(({ name, className, hue, dashed }) => [name, className, hue, dashed]));
    if (names === this.names) return;
    this.names = names;
    const keyOf = (line, kind) => h("i", { class: `chart-key ${line.className ?? "hue"} ${kind}`, style: line.hue === undefined ? null : { "--h": line.hue }, "aria-hidden": "true" });
    this.keys = [...this.lines.map((line) => keyOf(line, line.dashed ? "dashed" : "")), ...this.bands.map((band) => keyOf(band, "band"))];
    this.legend.replaceChildren(...[...this.lines, ...this.bands].map((line, i) => h("li", null, this.keys[i], line.name)));
    this.plot?.destroy();
    this.plot = null;
  }

  // ---- picture

  /** Draw new values. Colours and the shape of the lines make a plot of their own: `anew`, or after another legend. */
  drawPicture(anew = false) {
    if (!this.library || !this.data || !this.cursor.clientWidth) return;
    const width = this.cursor.clientWidth;
    if (anew) this.plot?.destroy();
    const { xs, columns, runs } = this.columns();
    this.runs = runs;
    const values = columns.flat().filter(Number.isFinite);
    this.scale = scale(Math.max(...values, 0), 4, this.data);
    if (anew || !this.plot) {
      this.mount.replaceChildren();
      this.plot = new this.library(this.options(width), [xs, ...columns], this.mount);
      const canvas = this.mount.querySelector("canvas");
      canvas.setAttribute("role", "img");
      canvas.setAttribute("aria-label", this.title);
    } else {
      if (this.plot.width !== width) this.plot.setSize({ width, height: HEIGHT });
      this.plot.setData([xs, ...columns]);
    }
  }

  /** Set the marks that stand over the picture; it has its places once it is drawn. */
  place() {
    const { now, from, to } = this.data;
    this.stand(this.present, now > from && now < to ? now : undefined);
    this.stand(this.hair, this.moments[this.at]);
  }

  options(width) {
    const colour = (name) => getComputedStyle(this.cursor).getPropertyValue(name).trim();
    const axis = { stroke: colour("--soft"), font: `11px ${colour("--sans")}`, ticks: { show: false }, grid: { stroke: colour("--line"), width: 1 } };
    const key = (i) => getComputedStyle(this.keys[i]);
    const line = { spanGaps: false, points: { show: false }, gaps: (plot, i) => this.gaps(plot, i) };
    const edge = { ...line, stroke: "transparent", width: 1 };
    const first = 1 + this.lines.length; // of the edges of bands
    return {
      width,
      height: HEIGHT,
      legend: { show: false },
      cursor: { show: false },
      hooks: { draw: [(plot) => plot === this.plot && this.place()] },
      scales: { x: { time: true, range: () => [this.data.from, this.data.to] }, y: { range: () => [0, this.scale.top] } },
      axes: [
        { ...axis, space: 70, size: 30, values: (_, marks) => marks.map((t) => moment(t, this.data.to - this.data.from)) },
        { ...axis, size: AXIS, splits: () => this.scale.marks, values: (_, marks) => marks.map((v) => this.data.format(v)) },
      ],
      series: [{}, ...this.lines.map(({ dashed }, i) => ({ ...line, stroke: key(i).borderTopColor, width: 2, dash: dashed ? [6, 4] : undefined })), ...this.bands.flatMap(() => [edge, edge])],
      bands: this.bands.map((_, i) => ({ series: [first + 2 * i, first + 2 * i + 1], fill: key(this.lines.length + i).backgroundColor })),
    };
  }

  /** Columns for uPlot: a window has one value from its start to its end. `runs`: from when to when a column has values without a gap. */
  columns() {
    const { to } = this.data;
    const parts = [
      ...this.lines.map(({ at, step }) => ({ step, values: at })),
      ...this.bands.flatMap(({ points, step }) => ["high", "low"].map((side) => ({ step, values: new Map(points.filter((p) => Number.isFinite(p[side])).map((p) => [p.t, p[side]])) }))),
    ];
    const filled = parts.map(({ step, values }) => new Map([...values].flatMap(([t, v]) => [[t, v], [Math.max(t, Math.min(t + step - SEAM_S, to)), v]])));
    const xs = [...new Set(filled.flatMap((column) => [...column.keys()]))].sort((a, b) => a - b);
    const columns = filled.map((column) => xs.map((x) => column.get(x) ?? null));
    return { xs, columns, runs: parts.map(runsOf) };
  }

  /** The gaps of a column, as [from, to] in pixels of uPlot's canvas, which would look for them pixel by pixel. */
  gaps(plot, index) {
    const edge = plot.bbox.left;
    const found = [];
    let from = edge;
    for (const run of this.runs[index - 1]) {
      const [start, end] = run.map((t) => plot.valToPos(t, "x", true));
      if (start > from) found.push([from, start]);
      from = end;
    }
    if (from < edge + plot.bbox.width) found.push([from, edge + plot.bbox.width]);
    return found;
  }

  /** Where the lines begin, in pixels from the left edge. */
  get left() {
    return this.plot.bbox.left / devicePixelRatio;
  }

  stand(mark, t) {
    mark.hidden = t === undefined || !this.plot;
    if (!mark.hidden) mark.style.left = `${this.left + this.plot.valToPos(t, "x")}px`;
  }

  // ---- cursor

  valuesAt(t) {
    const lines = this.lines.map((line) => ({ line, v: line.at.get(t) })).filter(({ v }) => v !== undefined);
    const bands = this.bands.map((band) => ({ band, p: band.at.get(t) })).filter(({ p }) => p);
    return { lines, bands };
  }

  words(t) {
    const { lines, bands } = this.valuesAt(t);
    const told = [
      ...lines.map(({ line, v }) => `${line.name} ${this.data.format(v)}`),
      ...bands.map(({ band, p }) => `${band.name} ${this.data.format(p.low)} to ${this.data.format(p.high)}`),
    ];
    return `${this.when(t)}: ${told.join(", ") || "nothing measured"}`;
  }

  when(t) {
    return this.data.to - this.data.from > 86400 ? `${dayOf(t)} ${clock(t).slice(0, 5)}` : clock(t);
  }

  point() {
    const t = this.moments?.[this.at];
    this.cursor.setAttribute("aria-valuemin", "0");
    this.cursor.setAttribute("aria-valuemax", String(Math.max(0, (this.moments?.length ?? 1) - 1)));
    this.cursor.setAttribute("aria-valuenow", String(Math.max(0, this.at)));
    const text = t === undefined ? "nothing to read yet" : this.words(t);
    this.cursor.setAttribute("aria-valuetext", text);
    say(this.readout, text);
    if (this.plot && this.data) this.place();
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
    if (!this.moments?.length || !this.plot) return;
    const at = this.plot.posToVal(event.clientX - this.cursor.getBoundingClientRect().left - this.left, "x");
    let nearest = this.moments.findLastIndex((t) => t <= at);
    if (nearest < 0) nearest = 0;
    if (nearest !== this.at) this.move(nearest);
  }

  drawTable() {
    if (!this.tableBox.open || !this.data) return;
    const columns = ["Time", ...this.data.series.map((line) => line.name), ...this.data.bands.map((band) => band.name)];
    const rows = this.moments.slice(-TABLE_ROWS).toReversed().map((t) => {
      const { lines, bands } = this.valuesAt(t);
      const cells = [...this.lines.map((line) => lines.find((one) => one.line === line)?.v), ...this.bands.map((band) => bands.find((one) => one.band === band)?.p)];
      return h("tr", null, h("th", { scope: "row" }, this.when(t)), cells.map((cell) => h("td", { class: "num" }, cell === undefined ? "–" : cell.low === undefined ? this.data.format(cell) : `${this.data.format(cell.low)} to ${this.data.format(cell.high)}`)));
    });
    this.body.replaceChildren(...rows);
    if (this.tableNames === this.names) return; // keep scroll position and focus
    this.tableNames = this.names;
    this.tableBox.querySelector(".scroll")?.remove();
    this.tableBox.append(table(this.title, columns, this.body));
  }
}

/** Stretches of windows that follow each other. */
function runsOf({ values, step }) {
  const found = [];
  for (const t of [...values.keys()].sort((a, b) => a - b)) {
    if (found.length && t < found.at(-1)[1] + step / 2) found.at(-1)[1] = t + step;
    else found.push([t, t + step]);
  }
  return found;
}

/** A mark of the time axis: seconds, minutes or days, as far as the span is long. */
function moment(t, span) {
  if (span < 240) return clock(t);
  const time = clock(t).slice(0, 5);
  return span > 26 * 3600 && time === "00:00" ? dayOf(t) : time;
}

function dayOf(t) {
  return new Date(t * 1000).toLocaleDateString(undefined, { day: "numeric", month: "short" });
}

/** Round marks from 0 to at least `highest`. */
function scale(highest, wanted, { binary, whole }) {
  const unit = binary && highest > 0 ? 1024 ** Math.floor(Math.log(highest) / Math.log(1024)) : 1;
  const rough = Math.max((highest > 0 ? highest : 1) / unit / wanted, whole ? 1 : 0);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = (whole ? [1, 2, 5, 10] : [1, 2, 2.5, 5, 10]).map((factor) => factor * power).find((size) => size >= rough * 0.9999) * unit;
  const num = Math.max(1, Math.ceil((highest / step) * 0.9999));
  return { top: num * step, marks: Array.from({ length: num + 1 }, (_, i) => i * step) };
}
