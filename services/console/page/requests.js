// Rows of requests that ended: on the fleet's page, and wherever a list of requests is wanted.

import { h, keyed, badge, continued, emulated, empty } from "/page/dom.js";
import { clock, seconds, short } from "/page/format.js";
import { live } from "/page/live.js";

export const REQUEST_COLUMNS = ["Time", "Model", "Result", "Queue", "First token", "Total", "Tokens", "Trace"];

export function requestRows(body, requests) {
  const rows = requests.length || !live.ready ? requests : [{ nothing: "No request has ended yet. Send one and it shows here." }];
  keyed(body, rows, (row) => row.request_id ?? "", requestRow);
}

function result(row) {
  if (row.status === 499) return badge("499", "warn", "The client left before the answer was whole");
  return badge(row.code || String(row.status), row.status >= 400 ? "bad" : "quiet", row.code ? String(row.status) : null);
}

function requestRow(row) {
  if (row.nothing) return h("tr", null, h("td", { colspan: String(REQUEST_COLUMNS.length) }, empty(row.nothing)));
  const failed = row.status >= 400;
  const address = row.trace_id ? `#/trace/${row.trace_id}` : `#/request/${encodeURIComponent(row.request_id)}`;
  const time = (value) => (failed && !value ? h("span", { class: "zero" }, "–") : seconds(value));
  return h(
    "tr",
    { class: failed ? "failed" : null },
    h("td", { class: "num" }, clock(row.finished_at)),
    h("td", { class: "name" }, h("span", null, live.model(row.model_key)?.name ?? row.model_key), emulated(row.emulated)),
    h("td", null, result(row), row.cold ? badge("cold start", "cold") : null, continued(row)),
    h("td", { class: "num" }, time(row.queue_s)),
    h("td", { class: "num strong" }, time(row.ttft_s)),
    h("td", { class: "num" }, time(row.e2e_s)),
    h("td", { class: "num" }, row.response_tokens ? `${row.tokens_exact ? "" : "~"}${row.response_tokens}` : h("span", { class: "zero" }, "–")),
    h("td", null, h("a", { href: address, class: "id", title: row.request_id, "data-focus": "trace" }, short(row.request_id))),
  );
}
