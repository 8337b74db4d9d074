/* Lines over one axis, with a rule that follows the pointer. series: [{name, index, points: [[x, y]], dash}] */
function lines(series, options) {
  const W = Math.min(options.width ?? 1000, Math.max(280, innerWidth - 90)), H = W < 420 ? 240 : options.height ?? 320, L = 52, R = 14, T = 12, B = 40;
  const holder = h("div");
  const hidden = new Set();
  const log = options.log ?? false;
  const all = series.flatMap((one) => one.points);
  if (!all.length) return h("p.empty", {}, "no figures");
  const xs = all.map((p) => p[0]).filter((x) => !log || x > 0), ys = all.map((p) => p[1]);
  let x0 = Math.min(...xs), x1 = Math.max(...xs);
  if (options.rule) { x0 = Math.min(x0, options.rule); x1 = Math.max(x1, options.rule); }
  if (x1 <= x0) { x1 = x0 * 1.1 + 1e-9; x0 *= 0.9; }
  const y0 = options.y0 ?? 0, y1 = options.y1 ?? (Math.max(...ys) * 1.08 || 1);
  const f = log ? Math.log10 : (x) => x;
  const X = (x) => L + ((f(Math.max(x, log ? x0 : -Infinity)) - f(x0)) / (f(x1) - f(x0))) * (W - L - R);
  const g = options.logY ? Math.log10 : (y) => y, low = options.logY ? Math.min(...ys.filter((y) => y > 0)) * 0.8 : y0;
  const Y = (y) => H - B - ((g(Math.max(y, low)) - g(low)) / (g(y1) - g(low))) * (H - T - B);
  const back = (px) => { const at = f(x0) + ((px - L) / (W - L - R)) * (f(x1) - f(x0)); return log ? 10 ** at : at; };

  const svg = s("svg", { class: "plot", viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": options.label });
  for (const y of options.logY ? decades(low, y1) : ticks(y0, y1, 5)) {
    svg.append(s("line", { class: "grid", x1: L, x2: W - R, y1: Y(y), y2: Y(y) }));
    svg.append(s("text", { x: L - 8, y: Y(y) + 4, "text-anchor": "end" }, options.showY(y)));
  }
  const apart = W < 420 ? 52 : 40;
  let last = -Infinity;
  for (const x of log ? decades(x0, x1) : ticks(x0, x1, Math.min(8, W / 70))) {
    svg.append(s("line", { class: "grid", x1: X(x), x2: X(x), y1: T, y2: H - B }));
    if (X(x) - last < apart) continue;
    last = X(x);
    svg.append(s("text", { x: Math.min(X(x), W - 16), y: H - B + 17, "text-anchor": "middle" }, options.showX(x)));
  }
  svg.append(s("line", { class: "axis", x1: L, x2: W - R, y1: H - B, y2: H - B }));
  svg.append(s("text", { x: (W + L - R) / 2, y: H - 4, "text-anchor": "middle" }, options.label));
  if (options.rule) {
    svg.append(s("line", { class: "rule", x1: X(options.rule), x2: X(options.rule), y1: T, y2: H - B }));
    const right = X(options.rule) > W - 150;
    svg.append(s("text", { x: X(options.rule) + (right ? -6 : 6), y: H - B - 8, "text-anchor": right ? "end" : "start" }, options.ruleText));
  }
  if (options.level !== undefined && options.level !== null && options.level <= y1 && options.level >= low) {
    svg.append(s("line", { class: "rule", x1: L, x2: W - R, y1: Y(options.level), y2: Y(options.level) }));
    svg.append(s("text", { x: W - R - 4, y: Y(options.level) - 6, "text-anchor": "end" }, options.levelText));
  }
  const paths = series.map((one) => {
    const step = options.steps ? stairs(one.points) : one.points;
    const d = step.map(([x, y], i) => `${i ? "L" : "M"}${X(x).toFixed(1)},${Y(y).toFixed(1)}`).join("");
    const group = s("g", {}, s("path", { class: "line", d, stroke: colour(one.index), "stroke-dasharray": one.dash ?? null }));
    if (options.dots) for (const [x, y] of one.points) group.append(s("circle", { cx: X(x), cy: Y(y), r: 4, fill: colour(one.index) }));
    svg.append(group);
    return group;
  });
  const rule = s("line", { class: "axis", y1: T, y2: H - B, visibility: "hidden" });
  svg.append(rule);
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const px = Math.min(W - R, Math.max(L, ((event.clientX - box.left) / box.width) * W));
    const x = options.dots ? nearest(xs, back(px)) : back(px);
    rule.setAttribute("x1", X(x)); rule.setAttribute("x2", X(x)); rule.setAttribute("visibility", "visible");
    const shown = series.filter((one) => !hidden.has(one));
    showTip(event, h("div", {}, h("b", {}, options.showX(x, true))), ...shown.map((one) => h("div", {},
      h("span.dot", { style: `background:${colour(one.index)}` }), one.name + " ", h("b", {}, options.showY(valueAt(one.points, x, options.dots), true)))));
  });
  svg.addEventListener("pointerleave", () => { rule.setAttribute("visibility", "hidden"); hideTip(); });
  holder.append(svg);
  if (series.length > 1) holder.append(h("div.legend", {}, series.map((one, i) => h("button", {
    type: "button", "aria-pressed": "true",
    onclick: (event) => {
      if (hidden.delete(one)) { paths[i].removeAttribute("visibility"); event.currentTarget.setAttribute("aria-pressed", "true"); }
      else { hidden.add(one); paths[i].setAttribute("visibility", "hidden"); event.currentTarget.setAttribute("aria-pressed", "false"); }
    },
  }, h("span.dot", { style: `background:${colour(one.index)}` }), one.name))));
  return holder;
}
function stairs(points) {
  const out = [];
  points.forEach(([x, y], i) => { if (i) out.push([x, points[i - 1][1]]); out.push([x, y]); });
  return out;
}
function valueAt(points, x, exact) {
  if (exact) { const found = points.find((p) => p[0] === x); return found ? found[1] : null; }
  let at = 0;
  for (const [px, y] of points) { if (px > x) break; at = y; }
  return at;
}
function nearest(values, x) { return values.reduce((a, b) => (Math.abs(b - x) < Math.abs(a - x) ? b : a)); }
function ticks(low, high, wanted) {
  const raw = (high - low) / wanted, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((size) => size >= raw);
  const out = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-6; at += step) out.push(+at.toPrecision(10));
  return out;
}
function decades(low, high) {
  const wide = Math.log10(high / low) > 3.2, out = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++)
    for (const m of wide ? [1] : [1, 2, 5]) { const at = m * 10 ** power; if (at >= low * 0.999 && at <= high * 1.001) out.push(at); }
  return out;
}
