// The list of traces, latest first, filtered as one types.

import { badge, emptyRow, emulated, h, keyed, listen, panel, table } from "/page/dom.js";
import { plainService, serviceHue } from "/page/colours.js";
import { clock, count, seconds, short } from "/page/format.js";
import { live } from "/page/live.js";
import { newest } from "/page/polled.js";

const COLUMNS = ["Time", "Trace", "Model", "Services", "Spans", "Duration"];
const LIMIT = 200;

export function tracesView() {
  const body = h("tbody");
  const note = h("p", { class: "note", role: "status" });
  const filter = h("input", { type: "search", id: "filter", placeholder: "model, service, request or trace id", spellcheck: "false", autocomplete: "off", "aria-keyshortcuts": "/" });
  const onlyErrors = h("input", { type: "checkbox", id: "errors" });
  const onlyCold = h("input", { type: "checkbox", id: "cold" });
  const bar = h(
    "form",
    { class: "filters", role: "search", onsubmit: (event) => event.preventDefault() },
    h("label", { for: "filter", class: "hidden" }, "Filter traces"),
    filter,
    h("kbd", { "aria-hidden": "true" }, "/"),
    h("label", null, onlyErrors, "errors"),
    h("label", null, onlyCold, "cold starts"),
    note,
  );
  const element = h("div", { class: "traces" }, h("h1", { class: "hidden" }, "Traces"), panel("Traces", "trace-list", bar, table("Latest traces", COLUMNS, body)));

  let page = { traces: [], num_kept: 0, num_evicted: 0 };
  const read = newest();
  let timer = 0;
  let closed = false;
  let loaded = false;

  const draw = () => {
    const rows = page.traces.filter((t) => (!onlyErrors.checked || t.num_errors) && (!onlyCold.checked || t.is_cold));
    const longest = Math.max(...rows.map((t) => t.duration_s), 1e-6);
    const nothing = page.num_kept ? "No trace matches." : "No request has ended and no instance has started yet.";
    const shown = rows.length || !loaded ? rows : [{ nothing }];
    keyed(body, shown, (t) => t.trace_id ?? "", (t) => traceRow(t, longest), (t) => longest + live.nameOf(t.model));
    const gone = page.num_evicted ? `, ${page.num_evicted} older ones gone` : "";
    note.textContent = `${count(rows.length, "trace")} shown, ${page.num_kept} kept${gone}`;
  };
  const load = async () => {
    timer = 0;
    try {
      const answer = await read(`/api/v1/traces?limit=${LIMIT}&q=${encodeURIComponent(filter.value.slice(0, 200))}`);
      if (!answer?.ok || closed) return;
      page = answer.page;
      loaded = true;
      draw();
    } catch (error) {
      console.warn("traces could not be read", error);
    }
  };
  const soon = () => (timer ||= setTimeout(load, 250));
  const named = () => loaded && draw();
  const deaf = listen(live, { traces: soon, models: named });
  filter.addEventListener("input", soon);
  for (const box of [onlyErrors, onlyCold]) box.addEventListener("change", draw);
  load();
  return {
    element,
    title: "Traces",
    close: () => {
      closed = true;
      clearTimeout(timer);
      deaf();
    },
  };
}

function traceRow(trace, longest) {
  if (trace.nothing) return emptyRow(COLUMNS, trace.nothing);
  const width = `${Math.max((100 * trace.duration_s) / longest, 0.5)}%`;
  const hue = String(serviceHue(trace.service));
  return h(
    "tr",
    { class: trace.num_errors ? "failed" : null },
    h("td", { class: "num" }, clock(trace.start_at)),
    h(
      "td",
      { class: "name" },
      h("a", { href: `#/trace/${trace.trace_id}`, "data-focus": "trace" }, trace.name || "unnamed"),
      trace.num_errors ? badge(count(trace.num_errors, "error"), "bad") : null,
      trace.is_cold ? badge("cold start", "cold") : null,
      h("small", { class: "id", title: trace.trace_id }, trace.request_ids[0] ? short(trace.request_ids[0]) : short(trace.trace_id)),
    ),
    h("td", { class: "name" }, h("span", null, live.nameOf(trace.model)), emulated(trace.is_emulated)),
    h("td", null, h("span", { class: "services" }, trace.services.slice(0, 10).map(serviceTag))),
    h("td", { class: "num" }, String(trace.num_spans)),
    h("td", { class: "took" }, h("span", { class: "num" }, seconds(trace.duration_s)), h("span", { class: "lane", "aria-hidden": "true" }, h("i", { style: { width, "--h": hue } }))),
  );
}

export function serviceTag(name) {
  return h("span", { class: "service" }, h("i", { class: "swatch", style: { "--h": String(serviceHue(name)) }, "aria-hidden": "true" }), plainService(name));
}
