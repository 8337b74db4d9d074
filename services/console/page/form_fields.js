// The fields of a model file as a form has them: those of daily use by hand, the rest made from the schema of its owner.

import { h } from "/page/dom.js";

const DAILY = {
  name: ["Name", "the value of “model” in requests"],
  engine: ["Engine", ""],
  "weights.uri": ["Weights", ""],
  weights_bytes: ["GPU memory for weights", "such as 15.2GB; empty: the size of the weights"],
  kv_bytes: ["GPU memory for the KV cache", "of one instance"],
  min_instances: ["Instances at least", "0: it may leave the GPU when idle"],
  max_instances: ["Instances at most", ""],
  keep_alive_s: ["Kept when idle", "seconds, or 30s, 5m; -1: for ever"],
  aliases: ["Aliases", "other names, with commas between"],
};
const WORDS = {
  num_gpus: "GPUs of one instance",
  max_concurrency: "Requests at once",
  max_queue: "Requests waiting at most",
  max_wait_s: "Longest wait",
  on_cold: "While it is cold",
  engine_args: "Engine arguments",
  context_tokens: "Context, tokens",
  "weights.sha256": "SHA-256 of the weights",
  "weights.num_bytes": "Bytes of the weights",
  "slo.ttft_s": "Aim: first token within",
  "slo.tpot_s": "Aim: each token within",
};
const UNITS = [["_bytes", "bytes, or 512MiB"], ["_s", "seconds, or 250ms, 5m"]];

/** Every leaf of the schema: { path, kind, label, hint, usual, options, isDaily }, those of daily use first. */
export function leavesOf(schema) {
  const found = [];
  const walk = (properties, prefix) => {
    for (const [name, given] of Object.entries(properties)) {
      const property = resolved(schema, given);
      const path = prefix + name;
      const inner = property.properties ?? (property.anyOf ?? []).map((one) => resolved(schema, one)).find((one) => one.properties)?.properties;
      if (inner) walk(inner, `${path}.`);
      else found.push(leaf(path, property, given.default ?? property.default));
    }
  };
  walk(schema.properties, "");
  const order = Object.keys(DAILY);
  return [...found.filter((one) => one.isDaily).sort((a, b) => order.indexOf(a.path) - order.indexOf(b.path)), ...found.filter((one) => !one.isDaily)];
}

function resolved(schema, given) {
  return given.$ref ? { ...schema.$defs[given.$ref.split("/").at(-1)], ...given } : given;
}

function leaf(path, property, usual) {
  const [label, hint] = DAILY[path] ?? [WORDS[path] ?? sentence(path), property.description ?? ""];
  const unit = DAILY[path] ? "" : (UNITS.find(([end]) => path.endsWith(end) && property.anyOf)?.[1] ?? "");
  const shown = Array.isArray(usual) || typeof usual === "object" || usual === undefined || usual === "" ? "" : String(usual);
  return { path, kind: kindOf(path, property), label, hint: [hint, unit].filter(Boolean).join("; "), usual: shown, options: optionsOf(path, property), isDaily: path in DAILY };
}

function kindOf(path, property) {
  if (optionsOf(path, property).length) return "choice";
  if (property.type === "boolean") return "switch";
  if (property.type === "array") return "list";
  if (property.type === "object") return "yaml";
  if (property.maxLength > 10_000 && !path.includes(".")) return "long";
  if (property.type === "integer" || property.type === "number" || property.anyOf?.some((one) => ["integer", "number"].includes(one.type))) return "number";
  return "text";
}

function optionsOf(path, property) {
  if (property.enum) return property.enum;
  const listed = /^\^\(([a-z|]+)\)\??\$$/.exec(property.pattern ?? "");
  return listed ? listed[1].split("|") : [];
}

function sentence(path) {
  const words = path.replace(/_(bytes|s)$/, "").replaceAll(/[_.]/g, " ");
  return words[0].toUpperCase() + words.slice(1).replaceAll("gpus", "GPUs");
}

// ---- values

/** The value at a path, "" without one. A weights text is its uri. */
export function valueAt(fields, path) {
  const [first, second] = path.split(".");
  const value = fields[first];
  if (second === undefined) return value;
  if (first === "weights" && typeof value !== "object") return second === "uri" ? value : undefined;
  return value?.[second];
}

/** Put a value at a path; undefined takes it away. Weights without anything but an address are that address. */
export function put(fields, path, value) {
  const [first, second] = path.split(".");
  if (second === undefined) {
    if (value === undefined) delete fields[first];
    else fields[first] = value;
    return;
  }
  const before = first === "weights" && typeof fields.weights === "string" ? { uri: fields.weights } : (fields[first] ?? {});
  const after = Object.fromEntries(Object.entries({ ...before, [second]: value }).filter(([, one]) => one !== undefined));
  const names = Object.keys(after);
  if (!names.length) delete fields[first];
  else fields[first] = first === "weights" && names.length === 1 && names[0] === "uri" ? after.uri : after;
}

/** What a person has typed, as a file has it. What is not a number stays a text, which its owner judges. */
export function typed(one, input) {
  if (one.kind === "switch") return input.checked || undefined;
  const text = input.value.trim();
  if (!text) return undefined;
  if (one.kind === "list") return text.split(",").map((part) => part.trim()).filter(Boolean);
  return one.kind === "number" && /^-?\d+(\.\d+)?$/.test(text) ? Number(text) : one.kind === "long" ? input.value : text;
}

export function fillIn(one, input, value) {
  if (one.kind === "switch") input.checked = value === true;
  else input.value = value === undefined || value === null ? "" : Array.isArray(value) ? value.join(", ") : String(value);
}

// ---- elements

/** One field: { element, input, complain(text) }. */
export function fieldOf(one, onInput) {
  const id = `field-${one.path.replaceAll(".", "-")}`;
  const input = inputOf(one, id);
  const hint = h("small", { id: `${id}-hint` }, one.hint);
  const fault = h("p", { id: `${id}-fault`, class: "bad fault" });
  input.setAttribute("aria-describedby", `${id}-hint ${id}-fault`);
  input.addEventListener("input", () => onInput(one, input));
  const label = h("label", { for: id }, one.label, one.path === "name" || one.path === "engine" ? h("small", null, " needed") : null);
  const parts = one.kind === "switch" ? [h("span", { class: "box" }, input, label)] : [label, input];
  const element = h("div", { class: `setting kind-${one.kind}` }, parts, hint, fault);
  const complain = (text) => {
    if (fault.textContent !== text) fault.textContent = text;
    if (text) input.setAttribute("aria-invalid", "true");
    else input.removeAttribute("aria-invalid");
  };
  return { one, element, input, hint, complain };
}

function inputOf(one, id) {
  const usual = one.usual ? `${one.usual}` : null;
  if (one.kind === "switch") return h("input", { id, type: "checkbox" });
  if (one.kind === "choice") return h("select", { id }, h("option", { value: "" }, one.usual || "Choose…"), one.options.filter((name) => name !== one.usual).map((name) => h("option", { value: name }, name)));
  if (one.kind === "yaml" || one.kind === "long") return h("textarea", { id, rows: "3", spellcheck: "false", placeholder: one.kind === "yaml" ? "name: value" : null });
  return h("input", { id, type: "text", autocomplete: "off", spellcheck: "false", inputmode: one.kind === "number" && !one.hint ? "numeric" : null, placeholder: usual });
}
