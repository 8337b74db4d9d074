// Elements without a framework. Data reaches the page as text nodes and properties only, never as markup.

const shown = new WeakMap(); // parent -> key -> the element shown there

/** One element. `attrs`: class, style (an object of CSS properties), on* listeners, everything else an attribute. */
export function h(tag, attrs, ...children) {
  const element = document.createElement(tag);
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
 * Make `parent` show `items` in order. An item that is the same object as last time, or says the same, keeps its
 * element, so that focus, selection and scroll survive and an unchanged row costs nothing. `extra` is whatever else a
 * row shows, as text.
 */
export function keyed(parent, items, keyOf, build, extra = () => "") {
  const had = shown.get(parent) ?? new Map();
  const has = new Map();
  for (const item of items) {
    const key = keyOf(item);
    const more = extra(item);
    const old = had.get(key);
    const same = old && old.more === more && (old.item === item || JSON.stringify(old.item) === JSON.stringify(item));
    has.set(key, same ? old : { item, more, element: replaced(old, build(item)) });
  }
  arrange(parent, had, has);
}

/**
 * The same for rows that change often: `make(item)` gives `{ element, update }` once per key, and `update(item)` is
 * called for each item that is another object than last time, or for all when `all` is set.
 */
export function kept(parent, items, keyOf, make, all = false) {
  const had = shown.get(parent) ?? new Map();
  const has = new Map();
  for (const item of items) {
    const key = keyOf(item);
    let row = had.get(key);
    if (!row) row = { item: null, ...make(item) };
    if (all || row.item !== item) {
      row.item = item;
      row.update(item);
    }
    has.set(key, row);
  }
  arrange(parent, had, has);
}

function arrange(parent, had, has) {
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

/** A titled box. Its heading names it for those who jump by landmarks. */
export function panel(title, className, ...children) {
  const id = `h-${className}`;
  return h("section", { class: `panel ${className}`, "aria-labelledby": id }, h("h2", { id }, title), ...children);
}

/** A table that scrolls sideways in its own box, also by keyboard. `body` is its tbody. */
export function table(caption, columns, body) {
  const head = columns.map((name) => h("th", { scope: "col" }, name));
  return h(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": `${caption}, table` },
    h("table", null, h("caption", { class: "hidden" }, caption), h("thead", null, h("tr", null, head)), body),
  );
}

/** A list of terms from [name, value] pairs; empty ones are left out. */
export function terms(className, pairs) {
  return h("dl", { class: className }, pairs.filter(Boolean).map(term));
}

export function term([name, value]) {
  return h("div", null, h("dt", null, name), h("dd", null, value));
}

/** Buttons of which one is pressed: `chosen`. A click calls `choose(key)`; `numOf(key)` is beside the word. */
export function segments(parent, keys, chosen, choose, wordOf = (key) => key, numOf = () => null) {
  const choices = keys.map((key) => ({ key, on: key === chosen, word: wordOf(key), num: numOf(key) }));
  keyed(parent, choices, (choice) => choice.key, ({ key, on, word, num }) =>
    h("button", { type: "button", "aria-pressed": String(on), "data-focus": key, onclick: () => choose(key) }, num === null ? word : [`${word} `, h("small", null, String(num))]),
  );
}

/** Show [value, word] pairs in a select. The chosen value stays, also if it is none of them. */
export function options(select, pairs, chosen) {
  const all = !chosen || pairs.some(([value]) => value === chosen) ? pairs : [...pairs, [chosen, chosen]];
  keyed(select, all, ([value]) => value, ([value, word]) => h("option", { value }, word));
  select.value = chosen;
}

/** Listen, by handlers of event names, until the returned function is called. */
export function listen(target, handlers) {
  for (const [name, handler] of Object.entries(handlers)) target.addEventListener(name, handler);
  return () => {
    for (const [name, handler] of Object.entries(handlers)) target.removeEventListener(name, handler);
  };
}

/** A row of a table that says why there is no other. */
export function emptyRow(columns, text) {
  return h("tr", null, h("td", { colspan: String(columns.length) }, empty(text)));
}

export function badge(text, kind, title) {
  return h("span", { class: `badge ${kind}`, title }, text);
}

/** The mark of a stream that another instance went on with. */
export function continued(row) {
  const times = row.num_continued === 1 ? "once" : `${row.num_continued} times`;
  return row.num_continued ? badge("continued", "warn", `Its instance was lost ${times} in the middle of the stream`) : null;
}

/** The mark that everything emulated carries. */
export function emulated(is) {
  return is ? badge("emulated", "emulated", "This comes from an emulated engine: no model was run") : null;
}

export function empty(text) {
  return h("p", { class: "empty" }, text);
}
