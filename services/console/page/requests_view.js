// Requests as they happen: held, under way, ended. The address holds the filters, so that a view can be shared.

import { asked as given, remember } from "/page/address.js";
import { badge, continued, emptyRow, emulated, h, keyed, options, say, segments, table } from "/page/dom.js";
import { clock, day, seconds, short } from "/page/format.js";
import { live } from "/page/live.js";
import { polled } from "/page/polled.js";

const COLUMNS = ["Arrived", "Model", "Tenant", "State", "Queue", "First token", "Per token", "Total", "Tokens", "Instance", "Trace"];
const GROUPS = ["", "live", "held", "dispatched", "streaming", "finished", "failed", "refused", "left"];
const WORDS = { "": "all", live: "under way", dispatched: "sent", left: "client left" };
const EVERY_MS = 500;
const LIMIT = 200;

/** Filters follow `#/requests/` in the address: `model=smol-chat&state=held&q=503`. */
export function requestsView() {
  const wanted = Object.fromEntries(given("requests"));
  const asked = { model: wanted.model ?? "", state: GROUPS.includes(wanted.state) ? wanted.state : "", q: wanted.q ?? "" };
  const filter = h("input", { type: "search", id: "request-filter", value: asked.q, placeholder: "Id, tenant, key, code, status", autocomplete: "off" });
  const models = h("select", { id: "request-model" });
  const states = h("span", { class: "segments", role: "group", "aria-label": "State" });
  const pause = h("button", { type: "button", "aria-pressed": "false" }, "Pause");
  const tally = h("p", { class: "note", role: "status", "aria-live": "off" });
  const body = h("tbody");
  const element = h(
    "div",
    { class: "requests-view" },
    h("h1", { class: "hidden" }, "Requests"),
    h(
      "div",
      { class: "tools" },
      h("label", { class: "hidden", for: "request-filter" }, "Filter requests"),
      filter,
      h("label", { class: "hidden", for: "request-model" }, "Model"),
      models,
      states,
      pause,
    ),
    tally,
    h("div", { class: "panel requests-panel" }, table("Requests", COLUMNS, body)),
  );
  let paused = false;

  const show = (page) => {
    const rows = page.requests.length ? page.requests : [{ nothing: page.num_kept || page.num_live ? "No request matches." : "No request yet. Send one and it shows here." }];
    keyed(body, rows.map((row) => aged(row, page.now)), (row) => (row.nothing ? "" : `${row.router_id} ${row.request_id}`), requestLine, (row) => live.model(row.model_key)?.name ?? "");
    const unseen = page.num_matching - page.requests.length;
    say(tally, `${page.num_live} under way, ${page.num_kept} ended kept${unseen > 0 ? `; ${unseen} more match than are shown` : ""}`);
    drawStates(page.states);
  };
  const drawStates = (tallied) => {
    const sum = (names) => names.reduce((all, name) => all + (tallied[name] ?? 0), 0);
    const num = (key) => (key === "live" ? sum(["held", "dispatched", "streaming"]) : key ? sum([key]) : sum(Object.keys(tallied)));
    segments(states, GROUPS, asked.state, (state) => ask({ state }), (key) => WORDS[key] ?? key, num);
  };
  const ask = (change) => {
    Object.assign(asked, change);
    remember("requests", Object.entries(asked));
    reading.load();
  };
  const drawModels = () => {
    options(models, [["", "All models"], ...live.names], asked.model);
  };
  filter.addEventListener("input", () => ask({ q: filter.value.trim() }));
  models.addEventListener("change", () => ask({ model: models.value }));
  pause.addEventListener("click", () => {
    paused = !paused;
    pause.setAttribute("aria-pressed", String(paused));
    say(pause, paused ? "Go on" : "Pause");
    reading.load();
  });
  live.addEventListener("models", drawModels);
  drawModels();
  drawStates({});
  const reading = polled({
    address: () => `/api/v1/requests?${new URLSearchParams({ ...asked, limit: String(LIMIT) })}`,
    everyMs: () => (paused ? null : EVERY_MS),
    show,
    failed: (text) => say(tally, text),
  });
  reading.load();
  return {
    element,
    title: "Requests",
    close: () => {
      reading.close();
      live.removeEventListener("models", drawModels);
    },
  };
}

/** A live row shows its age, so it is another row each time; one that ended stays as it is. */
function aged(row, now) {
  return row.nothing || row.finished_at || row.state === "refused" ? row : { ...row, age_s: Math.max(0, now - row.arrived_at) };
}

function requestLine(row) {
  if (row.nothing) return emptyRow(COLUMNS, row.nothing);
  const isLive = row.age_s !== undefined;
  const address = row.trace_id ? `#/trace/${row.trace_id}` : `#/request/${encodeURIComponent(row.request_id)}`;
  const name = live.model(row.model_key)?.name ?? (row.model_key || "–");
  return h(
    "tr",
    { class: `${row.status >= 400 ? "failed" : ""} ${isLive ? "live" : ""}` },
    h("td", { class: "num" }, h("time", { title: day(row.arrived_at) }, clock(row.arrived_at))),
    h("td", { class: "name" }, row.model_key ? h("a", { href: `#/model/${encodeURIComponent(row.model_key)}`, "data-focus": "model" }, name) : name, emulated(row.emulated)),
    h("td", { title: row.key_id ? `with the key gp-${row.key_id}` : null }, row.tenant || "–"),
    h("td", null, standing(row), row.cold ? badge("cold start", "cold") : null, continued(row)),
    h("td", { class: "num" }, row.state === "held" ? seconds(row.age_s) : time(row.queue_s)),
    h("td", { class: "num strong", title: row.finished_at && !row.stream ? "The answer was not streamed" : null }, time(row.ttft_s)),
    h("td", { class: "num", title: "mean time between tokens after the first" }, time(row.tpot_s)),
    h("td", { class: "num" }, isLive ? h("span", { class: "zero" }, seconds(row.age_s)) : time(row.e2e_s)),
    h("td", { class: "num" }, tokens(row)),
    h("td", { class: "id", title: row.instance_id }, row.instance_id ? short(row.instance_id) : "–"),
    h("td", null, h("a", { href: address, class: "id", title: row.request_id, "data-focus": "trace" }, short(row.request_id))),
  );
}

function standing(row) {
  if (row.state === "held") {
    const eta = row.eta_s ? `, dispatched in about ${seconds(row.eta_s)}` : "";
    return h("span", { class: "state waiting" }, h("i", { class: "dot", "aria-hidden": "true" }), "held", h("small", null, `number ${row.position} in the queue${eta}`));
  }
  if (row.state === "refused" || row.state === "failed") {
    const again = row.retry_after_s ? `, try again in ${seconds(row.retry_after_s)}` : "";
    const more = row.num_unlisted ? `; ${row.num_unlisted} refused before it are not listed` : "";
    return badge(row.code || String(row.status), "bad", `${row.state}, ${row.status}${again}${more}`);
  }
  if (row.state === "left") return badge("client left", "warn", "The client left before the answer was complete");
  return badge(WORDS[row.state] ?? row.state, row.state === "finished" ? "quiet" : "good", row.status ? String(row.status) : null);
}

function time(value) {
  return value ? seconds(value) : h("span", { class: "zero" }, "–");
}

function tokens(row) {
  if (!row.response_tokens) return h("span", { class: "zero" }, "–");
  const about = row.tokens_exact ? "" : "~";
  const title = row.prompt_tokens ? `${row.prompt_tokens} in, ${about}${row.response_tokens} out` : `${about}${row.response_tokens} out`;
  return h("span", { title }, `${about}${row.response_tokens}`);
}
