// Decisions, newest first: rule, subject and reason. The address holds the filters.

import { badge, emptyRow, emulated, h, keyed, listen, options, panel, say, table } from "/page/dom.js";
import { asked, decisionAddress, modelAddress, remember } from "/page/address.js";
import { clock, count, day } from "/page/format.js";
import { joined, live } from "/page/live.js";
import { newest, whyNot } from "/page/polled.js";

const COLUMNS = ["Time", "Decision", "About", "Why", "Rule", "Where", "Trace"];
const FIELDS = ["q", "kind", "policy", "model", "node", "service", "instance", "request", "trace", "gpu"];
const LIMIT = 200;

export function decisionsView() {
  const given = asked("decisions");
  const wanted = Object.fromEntries(FIELDS.map((name) => [name, given.get(name) ?? ""]));
  const body = h("tbody");
  const tally = h("p", { class: "note", role: "status" });
  const search = h("input", { type: "search", id: "decision-filter", value: wanted.q, placeholder: "reason, id, instance, GPU", autocomplete: "off", spellcheck: "false", "aria-keyshortcuts": "/" });
  const selects = Object.fromEntries(["kind", "policy", "model", "node"].map((name) => [name, h("select", { id: `decision-${name}` })]));
  const pinned = h("span", { class: "pinned-filters" });
  const tools = h(
    "form",
    { class: "tools", role: "search", onsubmit: (event) => event.preventDefault() },
    h("label", { class: "hidden", for: "decision-filter" }, "Search decisions"),
    search,
    Object.entries(selects).map(([name, select]) => h("label", { class: "field", for: `decision-${name}` }, h("span", null, name), select)),
    pinned,
    tally,
  );
  const element = h("div", { class: "decisions-view" }, h("h1", { class: "hidden" }, "Decisions"), tools, panel("Decisions", "decision-list", table("Decisions, newest first", COLUMNS, body)));
  const read = newest();
  let timer = 0;
  let closed = false;

  const load = async () => {
    timer = 0;
    try {
      const answer = await read(`/api/v1/decisions?${new URLSearchParams([...Object.entries(wanted).filter(([, value]) => value), ["limit", String(LIMIT)]])}`);
      if (closed || !answer) return;
      if (answer.ok) show(answer.page);
      else say(tally, whyNot(answer));
    } catch (error) {
      console.info("decisions could not be read", error);
      soon(2000);
    }
  };
  const show = (page) => {
    const nothing = page.num_kept ? "No decision matches." : "Nothing has been decided yet. A request for a sleeping model makes the first decision.";
    const rows = page.decisions.length ? page.decisions.map(joined) : [{ nothing }];
    keyed(body, rows, (row) => row.decision_id ?? "", decisionRow, (row) => live.nameOf(row.model_key));
    const more = page.num_matching - page.decisions.length;
    say(tally, `${count(page.num_matching, "decision")} of ${page.num_kept} kept${more > 0 ? `, ${more} older not shown` : ""}`);
    const choices = { model: live.names, ...Object.fromEntries(["kind", "policy", "node"].map((name) => [name, page.facets[name].map((value) => [value, value])])) };
    for (const [name, pairs] of Object.entries(choices)) options(selects[name], [["", "any"], ...pairs], wanted[name]);
  };
  const drawPinned = () => {
    const rest = ["service", "instance", "request", "trace", "gpu"].filter((name) => wanted[name]);
    pinned.replaceChildren(
      ...rest.map((name) => h("button", { type: "button", class: "act", "aria-label": `Show any ${name} again`, onclick: () => ask({ [name]: "" }) }, `${name} ${wanted[name]} ×`)),
    );
  };
  const ask = (change) => {
    Object.assign(wanted, change);
    remember("decisions", Object.entries(wanted));
    drawPinned();
    clearTimeout(timer);
    load();
  };
  const soon = (after = 250) => (timer ||= setTimeout(load, after));
  const changed = ({ detail }) => (!detail || detail.all || detail.decisions) && soon();
  search.addEventListener("input", () => ask({ q: search.value.trim() }));
  for (const [name, select] of Object.entries(selects)) select.addEventListener("change", () => ask({ [name]: select.value }));
  const deaf = listen(live, { change: changed, models: soon });
  drawPinned();
  load();
  return {
    element,
    title: "Decisions",
    close: () => {
      closed = true;
      clearTimeout(timer);
      deaf();
    },
  };
}

/** The subject of a decision, in a few words. */
export function subjectOf(row) {
  return row.model_key ? live.nameOf(row.model_key) : row.gpu_id || row.node_id || row.request_id;
}

/** Its kind, with the choice where that says more: "scale · unload". */
export function kindOf(row) {
  const verb = ["scale", "drain", "expire"].includes(row.kind) && row.chosen && row.chosen !== row.kind ? ` · ${row.chosen.replaceAll("_", " ")}` : "";
  return `${row.kind}${verb}`;
}

/** A list of decisions, with `more` at its end. */
export function decisionLines(rows, more = null) {
  const line = (row) => [h("span", { class: "num" }, clock(row.made_at, true)), h("a", { class: `kind ${row.kind}`, href: decisionAddress(row.decision_id) }, kindOf(row)), h("span", null, row.reason), h("small", null, `${row.policy} · ${row.service}`)];
  return h("ol", { class: "related" }, rows.map((row) => h("li", null, line(row))), more);
}

function decisionRow(row) {
  if (row.nothing) return emptyRow(COLUMNS, row.nothing);
  return h(
    "tr",
    { class: row.kind === "refuse" ? "failed" : null },
    h("td", { class: "num", title: day(row.made_at) }, clock(row.made_at)),
    h("td", null, h("a", { class: `kind ${row.kind}`, href: decisionAddress(row.decision_id), "data-focus": "decision", "aria-label": `${kindOf(row)} ${subjectOf(row)}, why` }, kindOf(row))),
    h(
      "td",
      { class: "name" },
      row.model_key ? h("a", { href: modelAddress(row.model_key), "data-focus": "model" }, live.nameOf(row.model_key)) : h("span", null, subjectOf(row)),
      emulated(row.emulated),
      row.instance_id ? h("small", { class: "id" }, row.instance_id) : null,
    ),
    h("td", { class: "wrap" }, row.reason),
    h("td", null, row.policy, h("small", null, ` ${row.service}`)),
    h("td", null, row.gpu_id || row.node_id || "–", row.rivals.length > 1 ? badge(`of ${row.rivals.length}`, "quiet", `${row.rivals.length} options were weighed`) : null),
    h("td", null, row.trace_id ? h("a", { class: "id", href: `#/trace/${row.trace_id}`, "data-focus": "trace" }, "trace") : h("span", { class: "zero" }, "–")),
  );
}
