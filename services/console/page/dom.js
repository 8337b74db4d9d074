// Elements without a framework. Data reaches the page as text nodes and properties only, never as markup.

const SVG = "http://www.w3.org/2000/svg";
const shown = new WeakMap(); // parent -> key -> { text, element }

/** One element. `attrs`: class, style (an object of CSS properties), on* listeners, everything else an attribute. */
export function h(tag, attrs, ...children) {
  return fill(document.createElement(tag), attrs, children);
}

export function svg(tag, attrs, ...children) {
  return fill(document.createElementNS(SVG, tag), attrs, children);
}

function fill(element, attrs, children) {
  for (const [name, value] of Object.entries(attrs ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "style") for (const [key, part] of Object.entries(value)) element.style.setProperty(key, part);
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/**
 * Make `parent` show `items` in order. An item whose JSON is the same as last time keeps its element, so that
 * focus, selection and scroll survive and an unchanged row costs nothing. `extra` is whatever else a row shows.
 */
export function keyed(parent, items, keyOf, build, extra = () => "") {
  const had = shown.get(parent) ?? new Map();
  const has = new Map();
  for (const item of items) {
    const key = keyOf(item);
    const text = JSON.stringify(item) + extra(item);
    const old = had.get(key);
    has.set(key, old && old.text === text ? old : { text, element: replaced(old, build(item)) });
  }
  for (const [key, row] of had) if (!has.has(key)) row.element.remove();
  let at = parent.firstElementChild;
  for (const { element } of has.values()) {
    if (element === at) at = at.nextElementSibling;
    else parent.insertBefore(element, at);
  }
  shown.set(parent, has);
}

function replaced(old, fresh) {
  if (!old) return fresh;
  const focused = old.element.contains(document.activeElement) ? document.activeElement.dataset.focus : undefined;
  old.element.replaceWith(fresh);
  if (focused !== undefined) fresh.querySelector(`[data-focus="${CSS.escape(focused)}"]`)?.focus();
  return fresh;
}

/** Set text only when it differs, so that a live region is not read out again. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function badge(text, kind, title) {
  return h("span", { class: `badge ${kind}`, title }, text);
}

/** The mark that everything emulated carries. */
export function emulated(is) {
  return is ? badge("emulated", "emulated", "This comes from an emulated engine: no model was run") : null;
}

export function empty(text) {
  return h("p", { class: "empty" }, text);
}
