// One GPU: the worth of each holder of its memory, and which leaves next. The placer computes it; the page asks again
// while it is looked at.

import { modelAddress } from "/page/address.js";
import { badge, emptyRow, emulated, h, keyed, panel, say, table, terms } from "/page/dom.js";
import { KIND_WORDS } from "/page/fleet-nodes.js";
import { bytes, clock, day, seconds, short } from "/page/format.js";
import { live } from "/page/live.js";
import { polled } from "/page/polled.js";

const EVERY_MS = 5000;
const GIB = 2 ** 30;
const COLUMNS = ["Goes", "Instance", "Model", "Rung", "Holds", "Asked", "Saves each", "Seconds per GiB", "Why it is not asked to go"];
const GOES = { draining: "leaves", swapped_out: "–" }; // states in which a holder is not asked to leave
const figure = (value) => String(Number(value.toPrecision(3)));

export function gpuView(id) {
  const head = h("header", { class: "trace-head" });
  const problem = h("p", { class: "why-empty", role: "status", hidden: true });
  const holders = h("tbody");
  const said = "Asked: how many are expected to ask for it before it could be reloaded. Saves each: how much longer each of them would wait without it. Seconds per GiB: both multiplied, divided by the memory it holds. A start that finds too little free memory here takes the memory of the first to leave.";
  const element = h(
    "div",
    { class: "model-view gpu-view" },
    head,
    problem,
    panel("Worth of each holder", "prices-panel", table("Holders of its memory, who goes next first", COLUMNS, holders), h("p", { class: "said" }, said)),
  );
  let shown = null; // the last prices that were read

  const show = (page) => {
    if (!page.prices) {
      failed(`The placer cannot be read: ${page.problem}`);
      return;
    }
    shown = page;
    problem.hidden = true;
    say(problem, "");
    draw();
  };
  /** The last prices stay, with their time. */
  const failed = (why) => {
    problem.hidden = false;
    say(problem, shown ? `${why}. Stale: these are the prices of ${clock(shown.now)}.` : `${why}.`);
    draw();
  };
  const missing = (why) => {
    shown = null;
    keyed(head, [{ missing: true }], () => "", () => h("div", null, crumbs(), h("h1", null, "No such GPU")));
    keyed(holders, [{ nothing: why }], () => "", holderLine);
    problem.hidden = true;
  };
  const draw = () => {
    const prices = shown?.prices;
    keyed(head, [{ id, prices, at: shown?.now, kind: kindOf(id), next: prices?.holders.find((one) => one.order === 1)?.instance_id }], () => "", headline);
    const nothing = prices ? "Nothing is on this GPU: all of its memory is free." : "No prices while the placer does not answer.";
    const lines = prices?.holders.length ? prices.holders : [{ nothing }];
    keyed(holders, lines, (one) => one.instance_id ?? "", holderLine, (one) => String(live.instances.has(one.instance_id)));
  };
  const named = () => shown && draw(); // models and instances that the stream brings have addresses
  live.addEventListener("models", named);
  const reading = polled({
    address: () => `/api/v1/gpus/${id.split("/").map(encodeURIComponent).join("/")}/worth`,
    everyMs: () => EVERY_MS,
    show,
    failed: (why, status) => (status === 404 ? missing(why) : failed(status ? `The console answered ${status}` : why)),
  });
  draw();
  reading.load();
  return {
    element,
    title: `GPU ${id}`,
    close: () => {
      reading.close();
      live.removeEventListener("models", named);
    },
  };
}

function kindOf(id) {
  return live.node(id.slice(0, id.lastIndexOf("/")))?.gpus.find((gpu) => gpu.gpu_id === id)?.kind ?? "";
}

function crumbs() {
  return h("p", { class: "crumbs" }, h("a", { href: "#/fleet", "data-focus": "fleet" }, "Fleet"));
}

function headline({ id, prices, at, kind, next }) {
  const facts = prices
    ? [["Free", `${bytes(prices.free_bytes)} of ${bytes(prices.total_bytes)}`], ["Holders", String(prices.holders.length)], ["Goes next", next ? short(next) : "none"], ["Reckoned", h("time", { title: day(at) }, clock(at))]]
    : [];
  if (kind && kind !== "emulated") facts.unshift(["Kind", KIND_WORDS[kind] ?? kind]);
  const all = encodeURIComponent(id);
  return h(
    "div",
    null,
    crumbs(),
    h("h1", null, `GPU ${id}`, emulated(kind === "emulated")),
    terms("facts", facts),
    h("p", { class: "acts" }, h("a", { class: "act", href: `#/decisions/gpu=${all}`, "data-focus": "decisions" }, "Decisions")),
  );
}

function holderLine(one) {
  if (one.nothing) return emptyRow(COLUMNS, one.nothing);
  const row = live.instances.get(one.instance_id);
  const goes = one.order === 1 ? badge("next", "warn") : one.order || (GOES[one.state] ?? "stays");
  return h(
    "tr",
    { class: one.order === 1 ? "next" : null },
    h("td", null, goes),
    h("th", { scope: "row", class: "id", title: one.instance_id }, short(one.instance_id), " ", emulated(row?.emulated)),
    h("td", { class: "name" }, row ? h("a", { href: modelAddress(row.model_key), "data-focus": "model" }, one.model) : one.model),
    h("td", null, one.rung),
    h("td", { class: "num" }, bytes(one.num_bytes)),
    h("td", { class: "num" }, figure(one.asked)),
    h("td", { class: "num" }, seconds(one.climb_s)),
    h("td", { class: "num strong" }, figure(one.worth * GIB)),
    h("td", { class: "wrap" }, one.why || "–"),
  );
}
