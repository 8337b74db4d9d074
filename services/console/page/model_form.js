// Deploy a model, or edit one, by a form beside its YAML. Mistakes are named as one types, by the
// autoscaler, which checks each draft as it would check a deployment; the page has no rules of its own.

import { modelAddress } from "/page/address.js";
import { change, confirmed, errorText, send } from "/page/asking.js";
import { copy } from "/page/copy.js";
import { h, panel, say, terms } from "/page/dom.js";
import { fieldOf, fillIn, leavesOf, put, typed, valueAt } from "/page/form_fields.js";
import { bytes, count } from "/page/format.js";
import { live } from "/page/live.js";

const SETTLE_MS = 250;

/** `key`: of the model to edit; "" deploys a new one. */
export function modelFormView(key) {
  const form = new ModelForm(key);
  form.open();
  return { element: form.element, title: key ? `Edit ${key}` : "Deploy a model", close: () => form.close() };
}

class ModelForm {
  constructor(key) {
    this.key = key;
    this.fields = {};
    this.texts = {}; // YAML typed inside the form, by field
    this.asYaml = null; // the whole text, while it was typed last
    this.touched = new Set();
    this.isTried = false;
    this.timer = 0;
    this.isBusy = false;
    this.isStale = false;
    this.isClosed = false;
    this.errors = [];
    this.state = h("p", { class: "form-state", role: "status", "aria-live": "polite" });
    this.origin = h("p", { class: "because", hidden: true });
    this.whole = h("p", { class: "bad fault", role: "alert" });
    this.submit = h("button", { type: "submit", class: "strong" }, key ? "Save" : "Deploy");
    this.remove = h("button", { type: "button", class: "grave-button", onclick: () => this.undeploy(), hidden: !key }, "Delete…");
    this.form = h("form", { class: "model-form", novalidate: true, onsubmit: (event) => this.onSubmit(event) });
    this.yaml = h("textarea", { id: "model-yaml", rows: "18", spellcheck: "false", "aria-describedby": "model-yaml-fault", oninput: () => this.onYaml() });
    this.both = h("small", null, "Change either side; the other follows.");
    this.yamlFault = h("p", { id: "model-yaml-fault", class: "bad fault" });
    this.element = h(
      "div",
      { class: "model-form-view" },
      h("p", { class: "crumbs" }, key ? h("a", { href: modelAddress(key) }, key) : h("a", { href: "#/models" }, "Models")),
      h("h1", null, key ? `Edit ${key}` : "Deploy a model"),
      this.origin,
      h("div", { class: "form-grid" }, this.form, this.yamlPanel()),
    );
  }

  yamlPanel() {
    const button = h("button", { type: "button", class: "act", onclick: () => copy(this.yaml.value, button) }, "Copy the YAML");
    return panel("The same as a file", "model-yaml-panel", h("label", { class: "hidden", for: "model-yaml" }, "YAML"), this.yaml, this.yamlFault, h("p", { class: "acts" }, button, this.both));
  }

  async open() {
    say(this.state, "Reading…");
    this.form.replaceChildren(this.state);
    try {
      const answer = await send("/api/v1/model_files", "GET");
      const file = answer?.ok && this.key ? await send(`/api/v1/model_files/${encodeURIComponent(this.key)}`, "GET") : answer;
      if (this.isClosed) return;
      if (!answer || !file) this.refused("The form is for holders of the admin token.");
      else if (!answer.ok || !file.ok) this.refused(await errorText(answer.ok ? file : answer));
      else this.show(await answer.json(), this.key ? await file.json() : null);
    } catch (error) {
      console.info("the form could not be read", error);
      this.refused("The console cannot be reached.");
    }
  }

  refused(why) {
    say(this.state, why);
    this.form.append(h("div", { class: "buttons" }, h("button", { type: "button", onclick: () => this.open() }, "Try again")));
  }

  show({ schema, engines }, file) {
    this.engines = engines;
    this.inputs = leavesOf(schema).map((one) => fieldOf(one, (...given) => this.onField(...given)));
    this.example = h("p", { class: "acts" });
    this.known = h("details", { class: "arguments", hidden: true });
    const daily = this.inputs.filter(({ one }) => one.isDaily).map(({ element }) => element);
    daily.splice(2, 0, this.example);
    const more = this.inputs.filter(({ one }) => !one.isDaily).map(({ element }) => element);
    this.more = h("details", { class: "more" }, h("summary", null, "More"), h("div", { class: "two" }, more), this.known);
    this.fieldset = h("fieldset", null, h("legend", { class: "hidden" }, "The model"), h("div", { class: "two" }, daily), this.more);
    const cancel = h("a", { class: "button", href: this.key ? modelAddress(this.key) : "#/models" }, "Cancel");
    this.form.replaceChildren(this.fieldset, this.whole, this.state, h("div", { class: "buttons" }, this.remove, cancel, this.submit));
    if (file) this.take(file.fields);
    else this.take({ engine: likelyEngine(Object.keys(engines)) });
    if (file && file.source !== "api") this.lock(file.source);
    this.drawEngine();
    this.check();
    if (!file) this.inputs[0].input.focus();
  }

  /** A model that a file declares is changed there. */
  lock(source) {
    this.origin.hidden = false;
    this.origin.replaceChildren("This model comes from the file ", h("code", null, source), ". Change it there: the fleet follows within seconds.");
    this.fieldset.disabled = true;
    this.yaml.readOnly = true;
    this.submit.hidden = true;
    this.remove.hidden = true;
    this.both.hidden = true;
    this.isLocked = true;
  }

  /** Show these fields in the form. Others stay as they are. */
  take(fields) {
    this.fields = fields;
    this.texts = {};
    for (const { one, input } of this.inputs) {
      const value = valueAt(fields, one.path);
      if (one.kind === "yaml") fillIn(one, input, value && Object.keys(value).length ? lines(value) : "");
      else fillIn(one, input, value);
    }
    this.drawEngine();
    this.drawMore();
  }

  drawMore() {
    const num = this.inputs.filter(({ one }) => !one.isDaily && (this.texts[one.path] ?? valueAt(this.fields, one.path))).length;
    say(this.more.firstElementChild, num ? `More (${num} set)` : "More");
  }

  onField(one, input) {
    this.asYaml = null;
    this.touched.add(one.path);
    if (one.kind === "yaml") this.texts[one.path] = input.value;
    else put(this.fields, one.path, typed(one, input));
    if (one.path === "engine") this.drawEngine();
    this.drawMore();
    this.soon();
  }

  onYaml() {
    this.asYaml = this.yaml.value;
    this.isTried = true;
    this.soon();
  }

  soon() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.check(), SETTLE_MS);
  }

  /** The weights and arguments of the chosen engine, and an example while little is filled in. */
  drawEngine() {
    const engine = this.engines[this.fields.engine];
    const find = (path) => this.inputs.find(({ one }) => one.path === path);
    find("weights.uri").hint.textContent = engine
      ? `${this.fields.engine} reads ${engine.weights}${engine.is_required ? "" : "; may be empty"}. A path, https://…, hf:org/name, s3://… or sample:smollm2`
      : "";
    const isNew = !this.key && engine && Object.keys(engine.example).length;
    this.example.replaceChildren(...(isNew ? [h("button", { type: "button", class: "act", onclick: () => this.fillExample(engine.example) }, `Fill in an example for ${this.fields.engine}`)] : []));
    this.known.hidden = !engine?.arguments.length;
    if (engine) this.known.replaceChildren(h("summary", null, `Arguments of ${this.fields.engine}`), terms("declared", engine.arguments.map((one) => [h("code", null, one.name), `${one.meaning}; ${one.allowed}`])));
  }

  fillExample(example) {
    const { name, engine, aliases } = this.fields;
    this.asYaml = null;
    const isOurs = !name || /^my-[a-z]+-model$/.test(name);
    this.take({ name: isOurs ? `my-${engine}-model` : name, engine, ...(aliases ? { aliases } : {}), ...structuredClone(example) });
    this.check();
  }

  /** Ask the autoscaler about the draft; one question at a time, and the last draft always. */
  async check() {
    if (this.isBusy) {
      this.isStale = true;
      return;
    }
    this.isBusy = true;
    const asked = this.asYaml;
    const draft = asked === null ? { fields: this.fields, texts: this.texts } : { yaml: asked };
    try {
      const answer = await send("/api/v1/model_files", "POST", { ...draft, edits: this.key });
      if (this.isClosed) return;
      if (!answer?.ok) say(this.state, answer ? `Not checked: ${await errorText(answer)}` : "Not checked: no admin token was given");
      else if (!this.isStale) this.showChecked(await answer.json(), asked);
    } catch (error) {
      console.info("the draft could not be checked", error);
      say(this.state, "Not checked: the console cannot be reached");
    } finally {
      this.isBusy = false;
    }
    if (this.isStale && !this.isClosed) {
      this.isStale = false;
      this.check();
    }
  }

  showChecked(checked, asked) {
    this.checked = checked;
    this.errors = checked.errors;
    if (asked === null) this.yaml.value = checked.yaml;
    else if (!checked.errors.some((error) => error.field === "yaml")) this.take(checked.fields);
    this.drawFaults();
    const { model } = checked;
    const needs = model && `An instance takes ${bytes(model.memory_bytes)} of GPU memory: ${bytes(model.weights_bytes)} weights and ${bytes(model.kv_bytes)} KV cache.`;
    const num = checked.errors.length;
    say(this.state, model ? (this.isLocked ? needs : `It can be ${this.key ? "saved" : "deployed"}. ${needs}${checked.change ? ` ${checked.change}.` : ""}${checked.warning ? ` But ${checked.warning}.` : ""}`) : `${count(num, "field")} ${num === 1 ? "is" : "are"} not right yet.`);
    this.state.className = `form-state ${model ? (checked.warning ? "warn" : "good") : ""}`;
  }

  /** Each fault at its field, or at the nearest one that the form has. Untouched fields wait until someone tries to deploy. */
  drawFaults() {
    const rest = [];
    const said = new Map();
    for (const { field, message } of this.errors) {
      const at = this.inputs.find(({ one }) => one.path === field || one.path === `${field}.uri`) ?? this.inputs.find(({ one }) => field.startsWith(`${one.path}.`));
      if (at) said.set(at, [...(said.get(at) ?? []), message]);
      else if (field !== "yaml") rest.push(field ? `${field}: ${message}` : message);
    }
    for (const one of this.inputs) {
      const isShown = this.isTried || this.touched.has(one.one.path);
      one.complain(isShown ? (said.get(one) ?? []).join("; ") : "");
      if (isShown && said.has(one) && !one.one.isDaily) this.more.open = true;
    }
    say(this.whole, rest.join("; "));
    const inYaml = this.errors.filter(({ field }) => field === "yaml").map(({ message }) => message).join("; ");
    say(this.yamlFault, inYaml);
    this.yaml.toggleAttribute("aria-invalid", Boolean(inYaml));
  }

  async onSubmit(event) {
    event.preventDefault();
    if (this.isLocked) return;
    this.isTried = true;
    clearTimeout(this.timer);
    await this.settled();
    this.drawFaults();
    if (this.errors.length) {
      this.inputs.find(({ input }) => input.getAttribute("aria-invalid"))?.input.focus();
      return;
    }
    await this.deploy();
  }

  /** Wait for the answer to the last draft. */
  async settled() {
    await this.check();
    while (this.isBusy) await new Promise((resolve) => setTimeout(resolve, 20));
  }

  async deploy() {
    const name = this.checked.fields.name;
    const word = this.key ? "Save" : "Deploy";
    this.submit.disabled = true;
    const done = ({ warning }) => ({ text: `${name} is ${this.key ? "saved" : "deployed"}`, warning });
    const path = this.key ? `/api/v1/models/${encodeURIComponent(this.key)}` : "/api/v1/models";
    const row = await change(`${word} ${name}`, done, path, this.key ? "PUT" : "POST", this.checked.fields);
    this.submit.disabled = false;
    if (row) location.hash = modelAddress(row.key);
  }

  async undeploy() {
    const model = live.model(this.key);
    const num = model?.instances.length ?? 0;
    const question = `Delete ${model?.name ?? this.key}? ${num ? `${count(num, "instance")} ${num === 1 ? "drains" : "drain"}: running requests finish. ` : ""}Requests for it are refused from then on. Its weights stay where they are.`;
    if (!(await confirmed(question, "Delete"))) return;
    if (await change(`Delete ${this.key}`, `${this.key} is deleted`, `/api/v1/models/${encodeURIComponent(this.key)}`, "DELETE")) location.hash = "#/models";
  }

  close() {
    this.isClosed = true;
    clearTimeout(this.timer);
  }
}

/** An engine that a node of the fleet can start, a real one before an emulated one. */
function likelyEngine(names) {
  const there = new Set(live.nodes.flatMap((node) => node.engines));
  return names.find((name) => there.has(name) && name !== "command") ?? undefined;
}

/** A mapping as YAML: JSON is YAML, and one line for each name is easier to read. */
function lines(mapping) {
  return Object.entries(mapping).map(([name, value]) => `${name}: ${typeof value === "string" && /^[\w./-]*[A-Za-z][\w./-]*$/.test(value) && !/^(true|false|null|yes|no|on|off|y|n)$/i.test(value) ? value : JSON.stringify(value)}`).join("\n");
}
