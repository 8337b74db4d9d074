const main = $("#main");
const sections = [];
function add(node) { main.append(node); if (node.id) sections.push(node); return node; }
const METRICS = [
  ["requests", (t) => t.num_arrived, count],
  ["TTFT p50", (t) => t.ttft_s_p50, seconds, "low"],
  ["p95", (t) => t.ttft_s_p95, seconds, "low"],
  ["p99", (t) => t.ttft_s_p99, seconds, "low"],
  ["TPOT p50", (t) => t.tpot_s_p50, seconds, "low"],
  ["p99", (t) => t.tpot_s_p99, seconds, "low"],
  ["TTFT in time", (t) => t.ttft_attainment, share, "high"],
  ["TPOT in time", (t) => t.tpot_attainment, share, "high"],
  ["warm", (t) => t.warm_ratio, share, "high"],
  ["unanswered", (t) => t.num_refused + t.num_unfinished, count, "low"], // refused, or not finished when the run ended
];
const FLEET = [
  ["starts", (f) => f.num_starts, count],
  ["hit ratio", (f) => f.hit_ratio, share, "high"],
  ["GPU time", (f) => f.gpu_seconds, hours, "low"],
  ["fetched", (f) => f.bytes_fetched, bytes, "low"],
  ["loaded", (f) => f.bytes_loaded, bytes, "low"],
];
const middle = (spread) => (spread && typeof spread === "object" ? spread.mean : spread);
const centred = (numbers) => Object.fromEntries(Object.entries(numbers).map(([name, value]) => [name, middle(value)]));

function head() {
  const policies = Object.entries(data.policies ?? {}).map(([room, name]) => h("span.chip", {}, `${room} `, h("b", {}, name)));
  return h("div.head", {}, h("h1", {}, data.title || data.name),
    h("p", {}, [`${data.gpus} GPU${data.gpus === 1 ? "" : "s"}`, `${data.num_models} model${data.num_models === 1 ? "" : "s"}`, `${clock(data.seconds)} of traffic`,
      `seed${data.seeds.length > 1 ? "s" : ""} ${data.seeds.length > 6 ? `${data.seeds[0]} to ${data.seeds.at(-1)}` : data.seeds.join(", ")}`, `glowplug ${data.version}`].join(" · ")),
    h("div.chips", {}, policies), ...data.notes.map((note) => h("p.note", {}, note)));
}
function tiles(total, fleet) {
  const tile = (name, value, text) => { const [, number, unit] = String(value).match(/^([\d.,–]+)\s*(.*)$/) ?? [null, value, ""]; return h("div.tile", {}, h("dt", {}, name), h("dd", {}, number, unit ? h("small", {}, unit) : null), h("p", {}, text)); };
  return h("dl.tiles", {},
    tile("First token, half of all", seconds(total.ttft_s_p50), "TTFT p50"), tile("… 99 of 100", seconds(total.ttft_s_p99), "TTFT p99"),
    tile("A token after the first", seconds(total.tpot_s_p50), `TPOT p50; p99 ${seconds(total.tpot_s_p99)}`),
    tile("In time", share(total.ttft_attainment), total.ttft_attainment === null ? "no model has an objective" : "of all requests, first token"),
    tile("Warm", share(total.warm_ratio), "found a running instance"),
    tile("GPU time held", hours(fleet.gpu_seconds), fleet.gpu_seconds && fleet.seconds ? `${(fleet.gpu_seconds / fleet.seconds).toFixed(1)} of ${data.gpus} GPUs on average` : ""),
    tile("Requests", count(total.num_arrived), `${count(total.num_refused)} refused, ${count(total.num_unfinished)} unfinished`));
}
function variantTable() {
  const spread = (value, show) => (value && typeof value === "object" && value.max !== value.min ? [show(value.mean), h("small.range", {}, `${show(value.min)} to ${show(value.max)}`)] : show(middle(value)));
  const columns = [{ name: "variant", value: (v) => v.label, show: (v) => [h("span.dot", { style: `background:${colour(v.index)}` }), v.label] },
    ...METRICS.map(([name, get, show, best]) => ({ name, best, value: (v) => get(centred(v.total)), show: (v) => spread(name === "unanswered" ? get(centred(v.total)) : get(v.total), show) })),
    ...FLEET.map(([name, get, show, best]) => ({ name, best, value: (v) => middle(get(v.fleet)), show: (v) => spread(get(v.fleet), show) }))];
  return card("variants", "Side by side", data.seeds.length > 1 ? `means over ${data.seeds.length} seeds, with the range; the best in green` : "the best in green", scrolled("div.scroll", "Variants", table(columns, data.variants)));
}
function curveCard() {
  const holder = h("div");
  let what = "ttft_s";
  const names = { ttft_s: "time to first token", tpot_s: "time per token after the first", e2e_s: "time to the whole answer" };
  function draw() {
    holder.replaceChildren(lines(data.variants.map((v) => ({ name: v.label, index: v.index, points: v.curves[what] })),
      { log: true, y1: 1, label: `${names[what]}, log scale`, showX: (x) => seconds(+x.toPrecision(3)), showY: share, rule: what === "ttft_s" ? data.slo_ttft_s : 0, ruleText: data.slo_ttft_s ? `objective ${seconds(data.slo_ttft_s)}` : "" }));
  }
  draw();
  const node = card("latency", "How long requests take", "share of the requests that were no slower", holder);
  node.tools(choice([["ttft_s", "TTFT"], ["tpot_s", "TPOT"], ["e2e_s", "whole"]], what, (value) => { what = value; draw(); }, "Which time"));
  return node;
}
function modelCard() {
  const first = Math.max(0, data.variants.findIndex((v) => v.label === data.detail?.label));
  let variant = data.variants[first];
  const slo = (value) => value === null || value === undefined ? NONE : [share(value), h("span.bar", {}, h("i", { style: `width:${value * 100}%` }))];
  const rows = () => [...variant.models.map((row) => ({ ...row, index: data.models.indexOf(row.model) })), { ...centred(variant.total), model: "all models", isTotal: true }];
  const columns = [{ name: "model", value: (r) => r.model, show: (r) => r.isTotal ? r.model : [h("span.dot", { style: `background:${colour(r.index)}` }), r.model] },
    ...METRICS.map(([name, get, show]) => ({ name, value: get, show: (r) => name.endsWith("in time") ? slo(get(r)) : show(get(r)) }))];
  const body = table(columns, rows(), { order: 1, down: true });
  const node = card("models", "Each model", "click a column to sort", scrolled("div.scroll.tall", "Figures of each model", body));
  if (data.variants.length > 1) node.tools(h("select", { "aria-label": "Variant", onchange: (e) => { variant = data.variants[e.target.value]; body.refill(rows()); } }, data.variants.map((v, i) => h("option", { value: i, selected: i === first }, v.label))));
  return node;
}
function planCard() {
  const plan = data.plan, sound = plan.points.filter((p) => p.value !== null);
  const answer = plan.answer === null ? h("p.answer", {}, "No number of GPUs in this range meets ", h("b", {}, plan.goal)) : h("p.answer", {}, h("b", {}, `${plan.answer} GPU${plan.answer > 1 ? "s" : ""}`), ` meet${plan.answer > 1 ? "" : "s"} ${plan.goal}`);
  const columns = [{ name: "GPUs", value: (p) => p.gpus, show: (p) => count(p.gpus) }, { name: plan.metric, value: (p) => p.value, show: (p) => plan.kind === "share" ? share(p.value) : seconds(p.value) },
    { name: "meets it", value: (p) => (p.met ? 1 : 0), show: (p) => (p.met ? "yes" : "no") }, { name: "in time", value: (p) => p.ttft_attainment, show: (p) => share(p.ttft_attainment) }, { name: "GPU time", value: (p) => p.gpu_seconds, show: (p) => hours(p.gpu_seconds) }];
  return card("plan", "How many GPUs", `every number that was tried; ${plan.seeds > 1 ? `the worst of ${plan.seeds} seeds` : "one seed"}`, answer, h("div.split", {},
    lines([{ name: plan.metric, index: 0, points: sound.map((p) => [p.gpus, p.value]) }], { dots: true, label: "GPUs", showX: (x) => count(x), showY: plan.kind === "share" ? share : seconds, level: plan.limit, levelText: `objective ${plan.kind === "share" ? share(plan.limit) : seconds(plan.limit)}`, y1: plan.kind === "share" ? 1.02 : undefined, height: 300, width: 560, logY: plan.kind !== "share" && Math.max(...sound.map((p) => p.value)) > 20 * Math.min(...sound.map((p) => p.value)) }),
    scrolled("div.scroll", "Numbers that were tried", table(columns, plan.points))));
}
function detailCards(detail) {
  const panel = h("div.detail", { "aria-live": "polite", tabindex: 0, role: "region", "aria-label": "What was decided" }, h("p.empty", {}, "Click a request, or bytes on a GPU, to read what was decided about it, on which inputs, against which rivals."));
  const all = requestRows(detail);
  const num = detail.gpus.length, tallness = num > 64 ? 8 : num > 24 ? 14 : num > 8 ? 24 : 36;
  let mark = [null, null], dots = null;
  const line = timeline(detail, { rows: tallness, mark: () => mark, pick: (holder) => { panel.replaceChildren(...holderNode(detail, holder)); panel.scrollIntoView({ block: "nearest" }); } });
  const legend = h("div.legend");
  const asked_of = new Map();
  for (const row of all) asked_of.set(detail.models[row.model], (asked_of.get(detail.models[row.model]) ?? 0) + 1);
  const busiest = (entries) => entries.length <= 40 ? entries : [...entries].sort((a, b) => (asked_of.get(b[0]) ?? 0) - (asked_of.get(a[0]) ?? 0));
  const relegend = () => legend.replaceChildren(...busiest(line.legend()).slice(0, 40).map(([name, fill]) => h("span", {}, h("span.dot", { style: `background:${fill}` }), name)), line.legend().length > 40 ? h("span", {}, `and ${line.legend().length - 40} more`) : "");
  relegend();
  const gpuCard = card("gpus", "Every GPU", `who held which bytes, and when${data.variants.length > 1 || data.seeds.length > 1 ? ` (${detail.label}, seed ${detail.seed})` : ""}`, line.node, legend,
    h("p.hint", {}, "Drag to move, ", h("kbd", {}, "Ctrl"), " and the wheel or double click to zoom, drag over the strip above to pick a part, ", h("kbd", {}, "0"), " for all. Light tints are KV cache.", detail.spans_left_out ? ` The ${count(detail.spans_left_out)} shortest stays are left out.` : ""));
  gpuCard.tools(choice([["model", "by model"], ["owner", "by owner"]], "model", (value) => { line.colours(value); relegend(); }, "Colours"),
    choice([[8, "low"], [14, "middle"], [24, "tall"], [36, "full"]], tallness, (value) => line.rowsOf(value), "Rows"),
    h("button.btn", { type: "button", "aria-label": "Zoom in", onclick: () => line.zoom(0.5) }, "+"), h("button.btn", { type: "button", "aria-label": "Zoom out", onclick: () => line.zoom(2) }, "−"), h("button.btn", { type: "button", onclick: () => line.all() }, "all"));

  function pick(row) {
    panel.replaceChildren(...requestNode(detail, row).filter(Boolean));
    mark = [row.at, row.at + (row.e2e || 0)];
    line.draw(); if (dots && dots.choose) dots.choose(row);
  }
  dots = scatter(detail, all, pick);
  const columns = [{ name: "request", value: (r) => r.id, show: (r) => [h("span.dot", { style: `background:${colour(r.model)}` }), h("span.id", {}, r.id)] }, { name: "model", value: (r) => detail.models[r.model], show: (r) => detail.models[r.model] },
    { name: "arrived", value: (r) => r.at, show: (r) => clock(r.at, 1) }, { name: "TTFT", value: (r) => (r.error ? null : r.ttft), show: (r) => (r.error ? h("span", { style: "color:var(--bad)" }, r.error) : seconds(r.ttft)) },
    { name: "whole", value: (r) => (r.error ? null : r.e2e), show: (r) => (r.error ? NONE : seconds(r.e2e)) }, { name: "start", value: (r) => (r.cold ? 1 : 0), show: (r) => (r.cold ? "cold" : "warm") }];
  const body = table(columns, all, { order: 3, down: true, limit: 200, act: pick });
  let sieve = "", only = "all";
  const refill = () => body.refill(all.filter((r) => (!sieve || r.id.includes(sieve) || detail.models[r.model].includes(sieve) || (r.instance ?? "").includes(sieve)) && (only === "all" || (only === "cold" ? r.cold : !!r.error))));
  const asked = card("requests", "Each request", detail.requests_left_out ? `${count(all.length)} of ${count(all.length + detail.requests_left_out)}: cold, failed and slow ones first, and an even sample of the rest` : `squares waited for a start`, dots,
    h("div.split", { style: "margin-top:16px" }, scrolled("div.scroll.tall", "List of requests", body), panel));
  asked.tools(h("input", { type: "search", placeholder: "request, model or instance", "aria-label": "Search requests", oninput: (e) => { sieve = e.target.value.trim(); refill(); } }),
    choice([["all", "all"], ["cold", "cold"], ["failed", "failed"]], "all", (value) => { only = value; refill(); }, "Which requests"));
  return [gpuCard, asked];
}
function setupCard() {
  return card("setup", "What was simulated", "the scenario as it was run", h("details.setup", {}, h("summary", {}, "Show it"), h("pre", {}, data.setup)));
}
document.title = `${data.title || data.name} · simulated · Glowplug`;
data.variants.forEach((v, i) => { v.index = i; });
add(head());
if (data.plan) add(planCard());
if (data.variants.length === 1) add(tiles(centred(data.variants[0].total), centred(data.variants[0].fleet)));
else add(variantTable());
add(curveCard());
add(modelCard());
if (data.detail) detailCards(data.detail).forEach(add);
add(setupCard());
$("#nav").append(...sections.map((node) => h("a", { href: `#${node.id}` }, node.getAttribute("aria-label"))));
