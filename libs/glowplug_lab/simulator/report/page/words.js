/* Elements, words for numbers, tables: what every part of the page speaks in. */
const $ = (selector, root = document) => root.querySelector(selector);
const data = JSON.parse($("#data").textContent);

/* An element: h("td.best", {title: "x"}, "text", child, ...). */
function h(spec, attributes = {}, ...children) {
  const [tag, ...classes] = spec.split(".");
  const node = document.createElement(tag || "div");
  if (classes.length) node.className = classes.join(" ");
  return fill(node, attributes, children);
}
function s(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}
function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") node.style.cssText = value;
    else if (value !== undefined && value !== null && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return node;
}
function css(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }

/* Hues that stay apart, those that come near each other again in another lightness; a model always has the same. */
function hue(index) { return (index * 137.508 + 38) % 360; }
function lightness(index) { return +css("--l") + [0, -0.13, 0.08][Math.floor(index / 8) % 3]; }
function colour(index, alpha = 1) { return `oklch(${lightness(index).toFixed(2)} ${css("--c")} ${hue(index).toFixed(1)} / ${alpha})`; }
function onColour(index) { return lightness(index) > 0.62 ? "#0d1014" : "#fff"; }

const NONE = "–";
function seconds(value) {
  if (value === null || value === undefined) return NONE;
  if (value === 0) return "0 s";
  const size = Math.abs(value);
  if (size < 0.001) return `${(value * 1e6).toFixed(0)} µs`;
  if (size < 1) return `${(value * 1e3).toPrecision(3).replace(/\.0+$/, "")} ms`;
  if (size < 120) return `${value.toPrecision(3)} s`;
  if (size < 7200) return `${(value / 60).toFixed(1)} min`;
  return `${(value / 3600).toFixed(1)} h`;
}
function bytes(value) {
  if (value === null || value === undefined) return NONE;
  for (const [unit, step] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]])
    if (Math.abs(value) >= step) return `${(value / step).toFixed(value >= 100 * step ? 0 : 1)} ${unit}`;
  return `${Math.round(value)} B`;
}
function share(value) {
  if (value === null || value === undefined) return NONE;
  const percent = value * 100;
  return `${percent > 99.95 || percent === 0 ? percent.toFixed(0) : percent > 99 ? percent.toFixed(2) : percent.toFixed(1)} %`;
}
function count(value) { return value === null || value === undefined ? NONE : Math.round(value).toLocaleString("en"); }
function hours(value) { return value === null || value === undefined ? NONE : value < 7200 ? `${count(value)} s` : `${(value / 3600).toFixed(1)} h`; }
function clock(value, decimals) {
  const whole = Math.max(0, value), hour = Math.floor(whole / 3600), minute = Math.floor(whole / 60) % 60, rest = whole % 60;
  const pad = (n, d = 0) => n.toFixed(d).padStart(d ? 3 + d : 2, "0");
  return (hour ? `${hour}:${pad(minute)}` : `${minute}`) + `:${pad(rest, decimals ?? (rest % 1 ? 1 : 0))}`;
}

const tip = $("#tip");
function showTip(event, ...children) {
  tip.replaceChildren(...children.map((child) => (typeof child === "string" ? h("div", {}, child) : child)));
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const x = event.clientX + 16 + box.width > innerWidth ? event.clientX - box.width - 14 : event.clientX + 16;
  const y = Math.min(event.clientY + 14, innerHeight - box.height - 8);
  tip.style.left = `${Math.max(4, x)}px`;
  tip.style.top = `${Math.max(4, y)}px`;
}
function hideTip() { tip.hidden = true; }

function card(id, title, text, ...children) {
  const header = h("header", {}, h("h2", {}, title), text ? h("p", {}, text) : null);
  const node = h("section.card", { id, "aria-label": title }, header, ...children);
  node.tools = (...tools) => header.append(h("div.tools", {}, ...tools));
  return node;
}
/* What scrolls can be reached by keyboard. */
function scrolled(spec, label, ...children) { return h(spec, { tabindex: 0, role: "region", "aria-label": label }, ...children); }
function choice(options, chosen, act, label) {
  const group = h("div.seg", { role: "group", "aria-label": label });
  options.forEach(([value, text]) => group.append(h("button", {
    type: "button", "aria-pressed": String(value === chosen),
    onclick: (event) => {
      for (const other of group.children) other.setAttribute("aria-pressed", String(other === event.currentTarget));
      act(value);
    },
  }, text)));
  return group;
}

/* A sortable table. columns: {name, text, show(row), value(row), best: "low"|"high", tip} */
function table(columns, rows, options = {}) {
  const body = h("tbody");
  let order = options.order ?? -1, down = options.down ?? false;
  const heads = columns.map((column, index) => h("th", { scope: "col", title: column.tip }, h("button", {
    type: "button",
    onclick: () => { down = order === index ? !down : index > 0; order = index; draw(); },
  }, column.name)));
  const best = columns.map((column) => {
    const values = rows.filter((row) => !row.isTotal).map(column.value).filter((value) => typeof value === "number");
    if (!column.best || values.length < 2) return null;
    const found = column.best === "low" ? Math.min(...values) : Math.max(...values);
    return values.every((value) => value === found) ? null : found;
  });
  function draw() {
    heads.forEach((head, index) => head.setAttribute("aria-sort", index === order ? (down ? "descending" : "ascending") : "none"));
    const sorted = [...rows];
    if (order >= 0) sorted.sort((a, b) => {
      const x = columns[order].value(a), y = columns[order].value(b);
      if (a.isTotal !== b.isTotal) return a.isTotal ? 1 : -1;
      if (x === null || x === undefined) return 1;
      if (y === null || y === undefined) return -1;
      return (typeof x === "string" ? x.localeCompare(y, "en", { numeric: true }) : x - y) * (down ? -1 : 1);
    });
    body.replaceChildren(...sorted.slice(0, options.limit ?? Infinity).map((row) => h("tr" + (row.isTotal ? ".total" : ""),
      options.act ? { "data-go": true, tabindex: 0, onclick: () => options.act(row), onkeydown: (e) => { if (e.key === "Enter") options.act(row); } } : {},
      columns.map((column, index) => h("td" + (best[index] !== null && column.value(row) === best[index] ? ".best" : ""), {}, column.show(row))))));
  }
  draw();
  const node = h("table", {}, h("thead", {}, h("tr", {}, heads)), body);
  node.refill = (fresh) => { rows = fresh; draw(); };
  return node;
}
