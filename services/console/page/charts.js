// The fleet or one model over the last hour, day or week: six charts, from the console's own history or from Prometheus.

import { empty, emulated, h, options, panel, say, segments } from "/page/dom.js";
import { asked, remember } from "/page/address.js";
import { LineChart } from "/page/chart.js";
import { apart } from "/page/colours.js";
import { bytes, seconds } from "/page/format.js";
import { live } from "/page/live.js";
import { polled } from "/page/polled.js";

const EVERY_MS = { "1h": 10000, "24h": 30000, "7d": 60000 };
const plain = (v) => String(Number(v.toPrecision(v >= 1000 ? 4 : 3)));
const CHARTS = {
  tokens: { title: "Tokens a second", format: (v) => (v >= 10000 ? `${plain(v / 1000)}k` : plain(v)), about: "Tokens count when their request ends." },
  ttft: { title: "Time to first token", format: seconds, about: "Of streamed answers: half of them, 95 % and 99 % came within this time." },
  queue: { title: "Requests waiting and running", format: plain, about: "Means of a sample every two seconds, and the highest number waiting." },
  hits: { title: "Warm hits", format: (v) => `${plain(100 * v)} %`, about: "Share of the requests that found an instance and waited for no start." },
  starts: { title: "Starts by kind", format: plain, whole: true, about: "In each slot; prewarmed ones grew from a replica." },
  gpu: { title: "GPU memory", format: bytes, binary: true, about: "Of all GPUs of living nodes; reserved is held for starts." },
};
const DASHED = new Set(["prompt", "p99", "peak", "capacity"]);

export function chartsView() {
  const given = asked("charts");
  const wanted = { span: Object.hasOwn(EVERY_MS, given.get("span") ?? "") ? given.get("span") : "1h", model: given.get("model") ?? "" };
  const models = h("select", { id: "charts-model" });
  const spans = h("span", { class: "segments", role: "group", "aria-label": "How far back" });
  const note = h("p", { class: "note", role: "status" });
  const mark = h("span");
  const charts = Object.entries(CHARTS).map(([name, { title, about }]) => {
    const chart = new LineChart(title);
    const nothing = empty("");
    const box = panel(title, `charts-${name}`, h("div", { class: "chart-box" }, h("p", { class: "note" }, about), nothing, chart.element));
    return { name, chart, box, nothing };
  });
  const element = h(
    "div",
    { class: "charts-view" },
    h("h1", { class: "hidden" }, "Charts"),
    h("div", { class: "tools" }, h("label", { class: "field", for: "charts-model" }, h("span", null, "of"), models), spans, mark, note),
    h("div", { class: "charts-grid" }, charts.map(({ box }) => box)),
  );
  const show = (page) => {
    const width = page.step_s < 60 ? `${page.step_s} s` : `${page.step_s / 60} min`;
    say(note, page.problem || `slots of ${width}, ${page.source === "prometheus" ? "from Prometheus" : "kept by this console"}`);
    mark.replaceChildren(...[emulated(page.emulated)].filter(Boolean));
    for (const { name, chart, box, nothing } of charts) {
      const lines = page.metrics[name];
      box.hidden = !lines;
      if (!lines) continue;
      const is = lines.some(({ values }) => values.some((v) => v !== null));
      nothing.hidden = chart.element.hidden = false;
      (is ? nothing : chart.element).hidden = true;
      say(nothing, is ? "" : "Nothing was measured in this time.");
      if (is) chart.draw(dataOf(page, lines, CHARTS[name]));
    }
  };
  const reading = polled({
    address: () => `/v1/history?${new URLSearchParams(wanted)}`,
    everyMs: () => EVERY_MS[wanted.span],
    show,
    failed: (text) => say(note, text),
  });
  const ask = (change) => {
    Object.assign(wanted, change);
    remember("charts", Object.entries(wanted));
    draw();
    reading.load();
  };
  const draw = () => {
    segments(spans, Object.keys(EVERY_MS), wanted.span, (span) => ask({ span }));
    options(models, [["", "the whole fleet"], ...live.names], wanted.model);
  };
  models.addEventListener("change", () => ask({ model: models.value }));
  live.addEventListener("models", draw);
  draw();
  reading.load();
  return {
    element,
    title: "Charts",
    keys: [["← →", "read a chart moment by moment"]],
    close: () => {
      reading.close();
      for (const { chart } of charts) chart.close();
      live.removeEventListener("models", draw);
    },
  };
}

/** The lines of one chart. A slot that has just begun says little, and is left out where there is one before it. */
function dataOf(page, lines, { format, binary, whole }) {
  const hue = apart(lines.map(({ name }) => name));
  const isNew = page.now - page.times.at(-1) < page.step_s / 4 && lines.some(({ values }) => values.at(-2) !== null);
  const times = isNew ? page.times.slice(0, -1) : page.times;
  const series = lines.map(({ name, values }) => ({ name, hue: hue.get(name), step: page.step_s, dashed: DASHED.has(name), points: times.map((t, i) => ({ t, v: values[i] ?? NaN })) }));
  const to = Math.max(page.now, page.times.at(-1) + 1);
  return { series, bands: [], from: page.times[0], to, now: to, format, binary, whole };
}
