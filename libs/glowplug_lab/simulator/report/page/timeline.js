/* Every GPU over time: who held which bytes. One row a GPU; inside it the holders lie on each other as their bytes do. */
function timeline(detail, options) {
  const spans = detail.spans, num = spans.gpu.length, gpus = detail.gpus;
  const byGpu = gpus.map(() => []);
  for (let i = 0; i < num; i++) byGpu[spans.gpu[i]].push(i);
  const heldModels = new Set(spans.model), heldOwners = new Set(spans.owner);
  const end = detail.end_s, LEFT = 92, HEAD = 22;
  let from = 0, upto = end, by = options.by ?? "model", rowHeight = options.rows, picked = -1;

  const axis = h("canvas.over", { "aria-label": "The whole run; drag to look at a part of it" });
  const body = h("canvas.main", { tabindex: 0, role: "img", "aria-label": `${gpus.length} GPUs over time. Arrow keys move, plus and minus zoom, 0 shows all.` });
  const rows = h("div.rows", {}, body);
  const stage = h("div.stage", {}, axis, rows);
  const owners = ["weights", "kv", "prewarm", "reservation", "sleeper"];
  let palette = {};
  function paint() {
    palette = { models: detail.models.map((_, i) => colour(i)), faint: detail.models.map((_, i) => colour(i, 0.42)), on: detail.models.map((_, i) => onColour(i)),
      owners: owners.map((name) => css(`--${name}`)), line: css("--line"), soft: css("--line-soft"), text: css("--soft"), accent: css("--accent"), ground: css("--ground"), bright: css("--text") };
  }
  function fillOf(i) {
    if (by === "owner") return palette.owners[spans.owner[i]];
    const model = spans.model[i];
    if (model < 0) return palette.text;
    return owners[spans.owner[i]] === "kv" ? palette.faint[model] : palette.models[model];
  }
  function fit(canvas, height) {
    const width = stage.clientWidth, ratio = devicePixelRatio || 1;
    canvas.width = Math.round(width * ratio); canvas.height = Math.round(height * ratio);
    canvas.style.height = `${height}px`;
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    return [pen, width];
  }
  const X = (t, width) => LEFT + ((t - from) / (upto - from)) * (width - LEFT - 8);
  const T = (x, width) => from + ((x - LEFT) / (width - LEFT - 8)) * (upto - from);

  function drawRows() {
    const gap = rowHeight > 10 ? 4 : 1, height = gpus.length * (rowHeight + gap) + 6;
    const [pen, width] = fit(body, height);
    pen.font = `${Math.min(11, rowHeight + 2)}px ${css("--sans")}`;
    pen.textBaseline = "middle";
    let node = "";
    gpus.forEach((gpu, g) => {
      const y = 3 + g * (rowHeight + gap);
      pen.fillStyle = palette.soft;
      pen.fillRect(LEFT, y, width - LEFT - 8, rowHeight);
      pen.fillStyle = palette.text;
      if (rowHeight > 10) pen.fillText(gpu.id, 8, y + rowHeight / 2);
      else if (gpu.node !== node) pen.fillText(gpu.node, 8, y + rowHeight / 2 + 2);
      node = gpu.node;
      for (const i of byGpu[g]) {
        if (spans.to[i] < from || spans.from[i] > upto) continue;
        const x0 = Math.max(LEFT, X(spans.from[i], width)), x1 = Math.min(width - 8, X(spans.to[i], width));
        const low = spans.base[i] / gpu.bytes, part = spans.bytes[i] / gpu.bytes;
        const top = y + rowHeight * (1 - low - part), tall = Math.max(0.6, rowHeight * part);
        pen.fillStyle = fillOf(i);
        pen.fillRect(x0, top, Math.max(0.7, x1 - x0 - (x1 - x0 > 6 ? 0.6 : 0)), tall);
        if (i === picked) { pen.strokeStyle = palette.bright; pen.lineWidth = 1.5; pen.strokeRect(x0 + 0.5, top + 0.5, Math.max(1, x1 - x0 - 1), Math.max(1, tall - 1)); }
        if (x1 - x0 > 60 && tall > 11 && spans.model[i] >= 0 && owners[spans.owner[i]] !== "kv") {
          pen.save(); pen.beginPath(); pen.rect(x0, top, x1 - x0 - 4, tall); pen.clip();
          pen.fillStyle = by === "owner" ? css("--on-fill") : palette.on[spans.model[i]]; pen.fillText(detail.models[spans.model[i]], x0 + 6, top + tall / 2 + 0.5); pen.restore();
        }
      }
    });
    if (options.mark) {
      const [a, b] = options.mark();
      if (a !== null) { pen.fillStyle = palette.accent; pen.globalAlpha = 0.9; pen.fillRect(X(a, width) - 0.75, 0, 1.5, height); if (b > a) { pen.globalAlpha = 0.12; pen.fillRect(X(a, width), 0, X(b, width) - X(a, width), height); } pen.globalAlpha = 1; }
    }
  }
  function drawAxis() {
    const [pen, width] = fit(axis, 54 + HEAD);
    pen.font = `11px ${css("--sans")}`;
    const wide = width - LEFT - 8, use = detail.use;
    pen.fillStyle = palette.text; pen.textBaseline = "middle"; pen.fillText("GPUs used", 8, 27);
    pen.fillStyle = css("--kv"); pen.globalAlpha = 0.55;
    use.forEach(([t, held], i) => {
      const next = i + 1 < use.length ? use[i + 1][0] : end;
      const tall = (held / gpus.length) * 44;
      pen.fillRect(LEFT + (t / end) * wide, 50 - tall, Math.max(0.5, ((next - t) / end) * wide), tall);
    });
    pen.globalAlpha = 1;
    pen.strokeStyle = palette.accent; pen.lineWidth = 1.5;
    pen.strokeRect(LEFT + (from / end) * wide, 2, Math.max(3, ((upto - from) / end) * wide), 49);
    pen.fillStyle = palette.text; pen.textAlign = "center";
    for (const t of ticks(from, upto, Math.max(3, Math.floor(wide / 110)))) {
      pen.fillText(clock(t), Math.min(width - 24, X(t, width)), 54 + HEAD / 2 + 1);
      pen.fillRect(X(t, width), 54 + HEAD - 4, 1, 4);
    }
    pen.textAlign = "left";
  }
  function draw() { drawAxis(); drawRows(); }
  function look(a, b) {
    const least = Math.max(0.05, end / 20000), span = Math.min(end, Math.max(least, b - a));
    from = Math.max(0, Math.min(a, end - span)); upto = from + span;
    draw();
  }
  function at(event) {
    const box = body.getBoundingClientRect(), gap = rowHeight > 10 ? 4 : 1;
    const g = Math.floor((event.clientY - box.top - 3) / (rowHeight + gap)), t = T(event.clientX - box.left, box.width);
    if (g < 0 || g >= gpus.length || event.clientX - box.left < LEFT) return null;
    const here = byGpu[g].filter((i) => spans.from[i] <= t && spans.to[i] > t);
    const level = (1 - (event.clientY - box.top - 3 - g * (rowHeight + gap)) / rowHeight) * gpus[g].bytes;
    return { g, t, here, on: here.find((i) => spans.base[i] <= level && spans.base[i] + spans.bytes[i] >= level) ?? here[0] ?? -1 };
  }
  body.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey && !event.shiftKey && Math.abs(event.deltaX) < Math.abs(event.deltaY)) {
      if (!event.altKey) return; // a plain wheel scrolls the page
    }
    event.preventDefault();
    const box = body.getBoundingClientRect(), t = T(event.clientX - box.left, box.width);
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      const move = ((event.deltaX || event.deltaY) / box.width) * (upto - from);
      look(from + move, upto + move);
    } else {
      const ratio = Math.exp(event.deltaY * 0.002);
      look(t - (t - from) * ratio, t + (upto - t) * ratio);
    }
  }, { passive: false });
  let held = null, moved = 0;
  body.addEventListener("pointerdown", (event) => { held = [event.clientX, from, upto]; moved = 0; body.setPointerCapture(event.pointerId); });
  body.addEventListener("pointermove", (event) => {
    if (held) {
      moved = Math.max(moved, Math.abs(event.clientX - held[0]));
      const t = ((held[0] - event.clientX) / (body.clientWidth - LEFT - 8)) * (held[2] - held[1]);
      if (moved > 3) { body.classList.add("drag"); hideTip(); look(held[1] + t, held[2] + t); }
      return;
    }
    const found = at(event);
    if (!found) return hideTip();
    const gpu = gpus[found.g], used = found.here.reduce((sum, i) => sum + spans.bytes[i], 0);
    showTip(event, h("div", {}, h("b", {}, gpu.id), h("span.soft", {}, `  at ${clock(found.t)} · ${bytes(used)} of ${bytes(gpu.bytes)}`)),
      ...found.here.slice(0, 10).map((i) => h("div", {}, h("span.dot", { style: `background:${fillOf(i)}` }),
        i === found.on ? h("b", {}, detail.holders[spans.holder[i]]) : detail.holders[spans.holder[i]],
        h("span.soft", {}, ` ${owners[spans.owner[i]]} ${bytes(spans.bytes[i])} · ${clock(spans.from[i])} to ${clock(spans.to[i])}`))));
  });
  body.addEventListener("pointerup", (event) => {
    const was = held; held = null; body.classList.remove("drag");
    if (was && moved <= 3) { const found = at(event); if (found && found.on >= 0) { picked = found.on; draw(); options.pick(detail.holders[spans.holder[found.on]]); } }
  });
  body.addEventListener("pointerleave", hideTip);
  body.addEventListener("dblclick", (event) => { const box = body.getBoundingClientRect(), t = T(event.clientX - box.left, box.width), span = (upto - from) / 8; look(t - span, t + span); });
  body.addEventListener("keydown", (event) => {
    const span = upto - from, step = { ArrowLeft: -0.2, ArrowRight: 0.2 }[event.key];
    if (step) look(from + span * step, upto + span * step);
    else if (event.key === "+" || event.key === "=") look(from + span * 0.2, upto - span * 0.2);
    else if (event.key === "-") look(from - span * 0.3, upto + span * 0.3);
    else if (event.key === "0") look(0, end);
    else return;
    event.preventDefault();
  });
  let brushed = null;
  const axisTime = (event) => { const box = axis.getBoundingClientRect(); return Math.min(end, Math.max(0, ((event.clientX - box.left - LEFT) / (box.width - LEFT - 8)) * end)); };
  axis.addEventListener("pointerdown", (event) => { brushed = axisTime(event); axis.setPointerCapture(event.pointerId); });
  axis.addEventListener("pointermove", (event) => { if (brushed !== null) { const t = axisTime(event); if (Math.abs(t - brushed) > end / 400) look(Math.min(t, brushed), Math.max(t, brushed)); } });
  axis.addEventListener("pointerup", (event) => { const t = axisTime(event); if (Math.abs(t - brushed) <= end / 400) { const span = upto - from; look(t - span / 2, t + span / 2); } brushed = null; });

  new ResizeObserver(() => draw()).observe(stage);
  matchMedia("(prefers-color-scheme: light)").addEventListener("change", () => { paint(); draw(); });
  paint();
  return { node: stage, draw, look, all: () => look(0, end), zoom: (ratio) => { const mid = (from + upto) / 2, span = ((upto - from) * ratio) / 2; look(mid - span, mid + span); },
    colours: (value) => { by = value; draw(); }, rowsOf: (value) => { rowHeight = value; draw(); },
    legend: () => by === "owner" ? owners.map((name, i) => [name, palette.owners[i]]).filter((_, i) => heldOwners.has(i))
      : detail.models.map((name, i) => [name, palette.models[i]]).filter((_, i) => heldModels.has(i)).sort((a, b) => a[0].localeCompare(b[0], "en", { numeric: true })) };
}
