// A model's forecasts against its requests, window by window. Only real forecasts are drawn.

import { badge, empty, emulated, h, options, panel, say, segments, term } from "/page/dom.js";
import { asked, modelAddress, remember } from "/page/address.js";
import { LineChart } from "/page/chart.js";
import { clock, count, seconds } from "/page/format.js";
import { live } from "/page/live.js";
import { polled } from "/page/polled.js";

const EVERY_MS = 5000;
const SPANS = { "30m": 1800, "2h": 7200, "6h": 21600, "24h": 86400 };
const plain = (v) => String(Number(v.toPrecision(v >= 1000 ? 4 : 3)));
const tokens = (v) => (v >= 10000 ? `${plain(v / 1000)}k` : plain(v));
const VIEWS = {
  requests: { title: "Requests per window", format: plain, measured: [["requests", "came", "came"], ["cold", "of them cold starts", "cold-line"]], metrics: [["requests", "forecast", "expected"]] },
  concurrency: { title: "Concurrency", format: plain, measured: [["concurrency", "mean that came", "came"], ["concurrency_peak", "peak that came", "peak"]], metrics: [["concurrency", "forecast", "expected"]] },
  tokens: {
    title: "Tokens per window",
    format: tokens,
    measured: [["prompt_tokens", "prompt, came", "came"], ["response_tokens", "response, came", "peak"]],
    metrics: [["prompt_tokens", "prompt, forecast", "expected"], ["response_tokens", "response, forecast", "expected second"]],
  },
};

export function forecastsView() {
  const given = asked("forecasts");
  const wanted = { model: given.get("model") ?? "", show: given.get("show") in VIEWS ? given.get("show") : "requests", span: given.get("span") in SPANS ? given.get("span") : "30m", ahead: Math.max(1, Math.trunc(Number(given.get("ahead")) || 1)) };
  const models = h("select", { id: "forecast-model" });
  const shows = h("span", { class: "segments", role: "group", "aria-label": "What" });
  const spans = h("span", { class: "segments", role: "group", "aria-label": "How far back" });
  const horizons = h("span", { class: "segments", role: "group", "aria-label": "Expected how many windows before" });
  let known = [1]; // horizons that there are
  const note = h("p", { class: "note", role: "status" });
  const facts = h("dl", { class: "facts" });
  const why = h("p", { class: "why-empty", hidden: true });
  const box = h("div", { class: "forecast-chart" });
  const element = h(
    "div",
    { class: "forecasts-view" },
    h("h1", { class: "hidden" }, "Forecasts"),
    h("div", { class: "tools" }, h("label", { class: "field", for: "forecast-model" }, h("span", null, "model"), models), shows, spans, horizons, note),
    facts,
    why,
    panel("Expected and measured", "forecast", box),
  );
  let chart = null;
  const show = (page) => {
    const view = VIEWS[wanted.show];
    if (chart?.title !== view.title) {
      chart?.close();
      chart = new LineChart(view.title);
      box.replaceChildren(chart.element);
    }
    say(note, page.problem ? `the predictor cannot be read: ${page.problem}` : `windows of ${page.window_s} s`);
    why.hidden = !page.why_empty;
    say(why, page.why_empty ? `No forecast: ${page.why_empty}.` : "");
    drawFacts(page);
    known = horizonsOf(page, wanted.ahead);
    draw();
    const data = dataOf(page, view, SPANS[wanted.span], wanted.ahead);
    const nothing = !page.windows.length && !page.forecasts.length;
    chart.element.hidden = nothing;
    box.querySelector(".empty")?.remove();
    if (nothing) box.append(empty(page.problem ? "Nothing to draw while the predictor does not answer." : "No request of this model has been measured yet. Its windows show here from the first one on."));
    else chart.draw(data);
  };
  const drawFacts = (page) => {
    const last = page.windows.filter((w) => !w.is_open).at(-1);
    const newest = page.forecasts.at(-1);
    const rated = page.forecasts.filter((point) => point.error_ratio).at(-1);
    const model = live.model(page.model_key);
    const pairs = [
      ["Model", h("span", null, h("a", { href: modelAddress(page.model_key) }, model?.name ?? page.model_key), emulated(model?.emulated))],
      ["Policy", page.policy === "none" ? badge("none", "quiet", "No forecasting policy is chosen: GLOWPLUG_POLICY_PREDICTION") : page.policy || "–"],
      last && ["Last whole window", `${count(last.requests, "request")}, ${tokens(last.prompt_tokens)} + ${tokens(last.response_tokens)} tokens${last.is_exact ? "" : " (estimated)"}`],
      ["Forecast made", newest ? `${clock(newest.made_at)}, ${seconds(page.now - newest.made_at)} ago` : "never"],
      rated ? ["Error lately", `${(100 * rated.error_ratio).toFixed(0)} %`] : null,
    ];
    facts.replaceChildren(...pairs.filter(Boolean).map(term));
  };
  const ask = (change) => {
    Object.assign(wanted, change);
    remember("forecasts", Object.entries(wanted));
    draw();
    reading.load();
  };
  const draw = () => {
    segments(shows, Object.keys(VIEWS), wanted.show, (show) => ask({ show }));
    segments(spans, Object.keys(SPANS), wanted.span, (span) => ask({ span }));
    segments(horizons, known, wanted.ahead, (ahead) => ask({ ahead }), (ahead) => `${ahead} ahead`);
    options(models, live.names, wanted.model);
  };
  const named = () => {
    draw();
    if (wanted.model || !live.models.length) return;
    const busy = live.models.find((model) => model.num_in_flight || model.num_waiting);
    wanted.model = (busy ?? live.models[0]).key; // a busy model is the likely question
    draw();
    reading.load();
  };
  models.addEventListener("change", () => ask({ model: models.value }));
  live.addEventListener("models", named);
  const reading = polled({
    address: () => `/api/v1/forecasts?model=${encodeURIComponent(wanted.model)}`,
    everyMs: () => EVERY_MS,
    show,
    failed: (text) => say(note, text),
  });
  named();
  if (wanted.model) reading.load();
  return {
    element,
    title: "Forecasts",
    keys: [["← →", "read the chart moment by moment"]],
    close: () => {
      reading.close();
      chart?.close();
      live.removeEventListener("models", named);
    },
  };
}

/** Windows ahead that windows gone by were forecast from, and the one that is asked for. */
function horizonsOf(page, wanted) {
  return [...new Set([1, wanted, ...page.forecasts.filter((point) => isOver(page, point)).map((point) => point.ahead)])].sort((a, b) => a - b);
}

function isOver(page, point) {
  return point.target_at + point.window_s <= page.now;
}

function dataOf(page, view, back, horizon) {
  const points = page.forecasts.filter((point) => view.metrics.some(([metric]) => metric === point.metric));
  const end = Math.max(page.now, ...points.map((point) => point.target_at + point.window_s));
  const from = page.now - back;
  const seen = page.windows.filter((w) => w.started_at >= from);
  const step = page.window_s;
  const pointsOf = (windows, field) => windows.map((w) => ({ t: w.started_at, v: w[field] }));
  const series = view.measured.map(([field, name, className]) => ({ name, className, step, points: pointsOf(seen.filter((w) => !w.is_open), field) }));
  const open = seen.filter((w) => w.is_open); // its counts still grow, so it is drawn apart from whole windows
  if (open.length) for (const [field, name, className] of view.measured) series.push({ name: `${name} so far`, className, step, dashed: true, points: pointsOf(open, field) });
  const bands = [];
  for (const [metric, name, className] of view.metrics) {
    const mine = latestOf(points.filter((point) => point.metric === metric && point.target_at >= from && (point.ahead === horizon || !isOver(page, point))));
    const parts = horizon === 1 ? [[name, mine]] : [[`${name} ${horizon} windows before`, mine.filter((point) => isOver(page, point))], [name, mine.filter((point) => !isOver(page, point))]];
    for (const [title, part] of parts.filter(([, points]) => points.length)) {
      series.push({ name: title, className, step, dashed: true, points: part.map((point) => ({ t: point.target_at, v: point.value })) });
      const spread = part.map((point) => ({ t: point.target_at, ...bandOf(point) })).filter((one) => one.high !== undefined);
      if (spread.length) bands.push({ name: `${title}, ${spread[0].name}`, className, step, points: spread });
    }
  }
  return { series, bands, from, to: end, now: page.now, format: view.format };
}

/** Of forecasts of the same window the newest. */
function latestOf(points) {
  const byTarget = new Map();
  for (const point of points) if (!byTarget.has(point.target_at) || byTarget.get(point.target_at).made_at <= point.made_at) byTarget.set(point.target_at, point);
  return [...byTarget.values()].sort((a, b) => a.target_at - b.target_at);
}

/** The band of a forecast: between its quantiles, or, where it has its peak alone, up to that. */
function bandOf(point) {
  const percent = (q) => `${Math.round(100 * q)} %`;
  const inner = point.quantiles.filter(([share]) => share < 1); // a window's peak is its maximum: no end of a band
  if (inner.length > 1) return { low: inner[0][1], high: inner.at(-1)[1], name: `${percent(inner[0][0])} to ${percent(inner.at(-1)[0])}` };
  return point.quantiles.length ? { low: point.value, high: point.quantiles.at(-1)[1], name: "up to its peak" } : {};
}
