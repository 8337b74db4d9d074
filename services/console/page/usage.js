// Usage: requests, tokens and costs by tenant, model or key over time, as the ledger has them.

import { empty, h, panel, say, segments, table } from "/page/dom.js";
import { asked, remember } from "/page/address.js";
import { LineChart } from "/page/chart.js";
import { hues } from "/page/colours.js";
import { count } from "/page/format.js";
import { polled } from "/page/polled.js";

const EVERY_MS = 30000;
const SPANS = { "24h": "hour", "7d": "hour", "30d": "day", "90d": "day" }; // and the slots it is shown in
const WIDTHS = { hour: 3600, day: 86400 };
const GROUPS = { tenant: ["tenant"], model: ["model"], key: ["key"], "tenant and model": ["tenant", "model"] };
const SHOWS = { requests: (row) => row.num_requests, tokens: (row) => row.prompt_tokens + row.response_tokens, "GPU seconds": (row) => row.gpu_s ?? 0, cost: (row) => row.cost ?? 0 };
const SUMS = ["num_requests", "num_failed", "prompt_tokens", "cached_tokens", "response_tokens", "held_s"];
const LINES = 7; // groups with a line of their own
const OTHERS = "all others";
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 2 });
const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 2 });

export function usageView() {
  const given = asked("usage");
  const choice = (name, choices, usual) => (Object.hasOwn(choices, given.get(name) ?? "") ? given.get(name) : usual);
  const wanted = { span: choice("span", SPANS, "7d"), by: choice("by", GROUPS, "tenant"), show: choice("show", SHOWS, "tokens") };
  const [shows, groups, spans] = ["Figure", "By", "How far back"].map((label) => h("span", { class: "segments", role: "group", "aria-label": label }));
  const note = h("p", { class: "note", role: "status" });
  const csv = h("a", { class: "button", download: "usage.csv" }, "Download CSV");
  const chart = new LineChart("Usage over time");
  const nothing = empty("");
  const sums = h("div");
  const element = h(
    "div",
    { class: "charts-view usage-view" },
    h("h1", { class: "hidden" }, "Usage"),
    h("div", { class: "tools" }, spans, groups, shows, csv, note),
    panel("Over time", "usage-chart", h("div", { class: "chart-box" }, nothing, chart.element)),
    panel("Sums", "usage-sums", sums),
  );
  const show = (page) => {
    const names = GROUPS[wanted.by];
    const rows = page.data.map((row) => ({ ...row, group: names.map((name) => row[name] || `no ${name}`).join(" · ") }));
    const totals = totalsOf(rows);
    const priced = totals.some((row) => row.cost !== null);
    say(note, totals.length ? `${count(totals.length, "group")}, by the ${SPANS[wanted.span]}${priced ? "" : "; no prices are set (GLOWPLUG_USAGE_PRICES), so nothing has a cost"}` : "");
    nothing.hidden = totals.length > 0;
    chart.element.hidden = !totals.length;
    say(nothing, totals.length ? "" : "No request has ended in this time.");
    sums.replaceChildren(totals.length ? sumsTable(totals, page.currency) : empty("No usage yet."));
    if (totals.length) chart.draw(dataOf(page, rows, totals, wanted));
  };
  const address = (more) => `/v1/usage?${new URLSearchParams({ by: [SPANS[wanted.span], ...GROUPS[wanted.by]].join(","), since: wanted.span, ...more })}`;
  const reading = polled({ address, everyMs: () => EVERY_MS, show, failed: (text) => say(note, text) });
  const ask = (change) => {
    Object.assign(wanted, change);
    remember("usage", Object.entries(wanted));
    draw();
    reading.load();
  };
  const draw = () => {
    segments(shows, Object.keys(SHOWS), wanted.show, (show) => ask({ show }));
    segments(groups, Object.keys(GROUPS), wanted.by, (by) => ask({ by }));
    segments(spans, Object.keys(SPANS), wanted.span, (span) => ask({ span }));
    csv.href = address({ format: "csv" });
  };
  draw();
  reading.load();
  return {
    element,
    title: "Usage",
    keys: [["← →", "read the chart moment by moment"]],
    close: () => {
      reading.close();
      chart.close();
    },
  };
}

/** One row a group, those with the most tokens first. A group without a priced model has no cost, one without a priced GPU
 *  seconds are known has none. */
function totalsOf(rows) {
  const byGroup = new Map();
  for (const row of rows) {
    const total = byGroup.get(row.group) ?? { group: row.group, gpu_s: null, cost: null, ...Object.fromEntries(SUMS.map((name) => [name, 0])) };
    for (const name of SUMS) total[name] += row[name];
    for (const name of ["gpu_s", "cost"]) if (row[name] !== null) total[name] = (total[name] ?? 0) + row[name];
    byGroup.set(row.group, total);
  }
  return [...byGroup.values()].sort((a, b) => SHOWS.tokens(b) - SHOWS.tokens(a) || b.num_requests - a.num_requests || (a.group < b.group ? -1 : 1));
}

function sumsTable(totals, currency) {
  const cells = (row) => [...SUMS, "gpu_s", "cost"].map((name) => (row[name] === null ? "–" : whole.format(row[name])));
  const rows = totals.map((row) => h("tr", null, h("th", { scope: "row", class: "name" }, row.group), cells(row).map((cell) => h("td", { class: "num" }, cell))));
  return table("Usage by group", ["Group", "Requests", "Failed", "Prompt tokens", "Cached", "Response tokens", "Seconds held", "GPU seconds", `Cost (${currency})`], h("tbody", null, rows));
}

function dataOf(page, rows, totals, { show, span }) {
  const step = WIDTHS[SPANS[span]];
  const worth = SHOWS[show];
  const largest = totals.toSorted((a, b) => worth(b) - worth(a)).slice(0, LINES).map(({ group }) => group);
  const names = totals.length > LINES ? [...largest, OTHERS] : largest;
  const sums = new Map(names.map((name) => [name, new Map()]));
  for (const row of rows) {
    const line = sums.get(row.group) ?? sums.get(OTHERS);
    const t = Date.parse(row.hour ?? row.day) / 1000;
    line.set(t, (line.get(t) ?? 0) + worth(row));
  }
  const hue = hues(names);
  const times = Array.from({ length: Math.round((page.until - page.since) / step) }, (_, i) => page.since + i * step);
  const series = names.map((name, i) => ({ name, hue: hue.get(name), step, dashed: i % 2 > 0, points: times.map((t) => ({ t, v: sums.get(name).get(t) ?? 0 })) }));
  return { series, bands: [], from: page.since, to: page.until, now: page.until, format: (v) => short.format(v) };
}
