/* Requests of one run, and what was decided about each. */
function requestRows(detail) {
  const columns = detail.requests, names = Object.keys(columns);
  return columns.id.map((_, i) => Object.fromEntries(names.map((name) => [name, columns[name][i]])));
}
function explain(detail, request) {
  const wanted = new Set([request.instance].filter(Boolean));
  return detail.decisions.filter((d) => d.request_id === request.id || (d.instance_id && wanted.has(d.instance_id)))
    .sort((a, b) => a.at - b.at);
}
function decisionNode(detail, decision) {
  const inputs = Object.entries(decision.inputs ?? {}), rivals = [...(decision.rivals ?? [])].sort((a, b) => (b.name === decision.chosen) - (a.name === decision.chosen));
  const reading = (name, value) => typeof value !== "number" ? String(value) : name.endsWith("_bytes") ? bytes(value)
    : name.endsWith("_s") ? seconds(value) : name.endsWith("_ratio") || name.endsWith("_share") ? share(value) : Number.isInteger(value) ? count(value) : String(+value.toPrecision(5));
  const about = ["model_key", "instance_id", "node_id", "gpu_id", "request_id"].filter((name) => decision[name]).map((name) => decision[name]).join(" · ");
  return h("div.decision", {},
    h("header", {}, h("span.kind", {}, decision.kind), h("span.by", {}, `${decision.service}, by ${decision.policy}`), h("span.when", {}, clock(decision.at))),
    h("p", {}, decision.reason),
    h("p.id", {}, about + (decision.chosen ? `  →  ${decision.chosen}` : "")),
    h("div.cols", {},
      inputs.length ? h("div", {}, h("h4", {}, "Inputs"), h("dl.inputs", {}, inputs.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, reading(name, value)))))) : null,
      rivals.length ? h("div", {}, h("h4", {}, "Rivals"), rivals.slice(0, 12).map((rival) => h("div.rival" + (rival.name === decision.chosen ? ".won" : ""), {},
        h("b", {}, rival.name), h("i", {}, score(rival)), h("span", {}, rival.why))), null) : null));
}
/* A rival's score in its unit: a first word "bytes" or "s" is a size or a time, "at" a moment of the run; none is a number. */
function score(rival) {
  const [first, ...others] = (rival.unit ?? "").split(" "), rest = others.join(" ");
  if (first === "bytes") return `${bytes(rival.score)} ${rest}`;
  if (first === "s") return `${seconds(rival.score)} ${rest}`;
  if (first === "at") return `${rest} ${clock(rival.score, 1)}`;
  return `${+Number(rival.score).toPrecision(4)} ${rival.unit ?? ""}`;
}
function requestNode(detail, request) {
  const model = detail.models[request.model], total = Math.max(request.e2e, 1e-9);
  const part = (value, fill, title) => h("i", { style: `width:${Math.max(0, (value / total) * 100)}%;background:${fill}`, title });
  const found = explain(detail, request);
  return [
    h("h3", {}, h("span.dot", { style: `background:${colour(request.model)}` }), `Request ${request.id}`),
    request.error ? h("p", { style: "color:var(--bad)" }, `answered with ${request.error}`) : h("div.gantt", {},
      part(request.queue, "var(--cold)", `waited ${seconds(request.queue)}`), part(request.ttft - request.queue, "var(--weights)", `prefill ${seconds(request.ttft - request.queue)}`),
      part(request.e2e - request.ttft, "var(--good)", `decode ${seconds(request.e2e - request.ttft)}`)),
    request.error ? null : h("small", {}, `waited ${seconds(request.queue)} · first token after ${seconds(request.ttft)} · whole answer after ${seconds(request.e2e)}`),
    h("dl.facts", {}, [["model", model], ["arrived", clock(request.at)], ["prompt", `${count(request.prompt)} tokens`], ["response", `${count(request.response)} tokens`],
      ["instance", request.instance || NONE], ["start", request.cold ? "it waited for a start" : "an instance was there"]].map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])),
    ...(found.length ? found.map((d) => decisionNode(detail, d)) : [h("p.empty", {}, detail.decisions.length
      ? "No decision names this request or its instance among those kept here: an instance was there and had room."
      : "This report keeps no decisions.")]),
  ];
}
function holderNode(detail, holder) {
  const found = detail.decisions.filter((d) => d.instance_id === holder || d.chosen === holder).sort((a, b) => a.at - b.at);
  return [h("h3", {}, `Holder ${holder}`), ...(found.length ? found.map((d) => decisionNode(detail, d)) : [h("p.empty", {}, "No decision names it among those kept here.")])];
}
/* TTFT of every request over time, log scale; a dot is a request. */
function scatter(detail, rows, pick) {
  const H = 230, LEFT = 52, B = 26, T0 = 8;
  const canvas = h("canvas.main", { role: "img", "aria-label": "Time to first token of every request; click a dot" });
  const stage = h("div.stage", {}, canvas);
  const shown = rows.filter((row) => !row.error && row.ttft > 0);
  if (!shown.length) return h("p.empty", {}, "no request was answered");
  const low = Math.log10(shown.reduce((a, r) => Math.min(a, r.ttft), Infinity)) - 0.08, high = Math.log10(shown.reduce((a, r) => Math.max(a, r.ttft), 0)) + 0.08;
  let chosen = null, width = 0;
  const X = (t) => LEFT + (t / detail.end_s) * (width - LEFT - 8), Y = (v) => H - B - ((Math.log10(v) - low) / (high - low)) * (H - B - T0);
  function draw() {
    width = stage.clientWidth;
    const ratio = devicePixelRatio || 1, pen = canvas.getContext("2d");
    canvas.width = width * ratio; canvas.height = H * ratio; canvas.style.height = `${H}px`;
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.font = `11px ${css("--sans")}`; pen.textBaseline = "middle";
    for (const y of decades(10 ** low, 10 ** high)) { pen.fillStyle = css("--line-soft"); pen.fillRect(LEFT, Y(y), width - LEFT - 8, 1); pen.fillStyle = css("--soft"); pen.textAlign = "right"; pen.fillText(seconds(y), LEFT - 6, Y(y)); }
    pen.textAlign = "center";
    for (const t of ticks(0, detail.end_s, Math.max(3, Math.floor(width / 120)))) pen.fillText(clock(t), Math.min(width - 22, X(t)), H - 11);
    const hues = detail.models.map((_, i) => colour(i, shown.length > 4000 ? 0.5 : 0.8)), size = shown.length > 4000 ? 1.6 : 2.6;
    for (const row of shown) { pen.fillStyle = hues[row.model]; const r = row.cold ? size * 1.35 : size; pen.beginPath(); if (row.cold) pen.rect(X(row.at) - r, Y(row.ttft) - r, 2 * r, 2 * r); else pen.arc(X(row.at), Y(row.ttft), r, 0, 7); pen.fill(); }
    if (chosen) { pen.strokeStyle = css("--text"); pen.lineWidth = 2; pen.beginPath(); pen.arc(X(chosen.at), Y(chosen.ttft), 7, 0, 7); pen.stroke(); }
  }
  function near(event) {
    const box = canvas.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
    let best = null, least = 220;
    for (const row of shown) { const d = (X(row.at) - x) ** 2 + (Y(row.ttft) - y) ** 2; if (d < least) { least = d; best = row; } }
    return best;
  }
  canvas.addEventListener("pointermove", (event) => {
    const row = near(event);
    if (!row) return hideTip();
    showTip(event, h("div", {}, h("span.dot", { style: `background:${colour(row.model)}` }), h("b", {}, row.id), ` ${detail.models[row.model]}`), `first token after ${seconds(row.ttft)}${row.cold ? ", cold" : ""}`, h("div.soft", {}, `at ${clock(row.at)}, ${count(row.prompt)} + ${count(row.response)} tokens`));
  });
  canvas.addEventListener("pointerleave", hideTip);
  canvas.addEventListener("click", (event) => { const row = near(event); if (row) pick(row); });
  new ResizeObserver(draw).observe(stage);
  matchMedia("(prefers-color-scheme: light)").addEventListener("change", draw);
  stage.choose = (row) => { chosen = row; draw(); };
  return stage;
}
