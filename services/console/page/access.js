// Who may use the fleet: tenants with their limits, and their keys. Nothing here is kept by the console or in the live view: the
// autoscaler is asked, when the page is opened and after each change. A new key is shown once.

import { ask, change, confirmed, errorText, send } from "/page/asking.js";
import { commandLine } from "/page/copy.js";
import { badge, empty, h, keyed, panel, say, table } from "/page/dom.js";
import { count, day } from "/page/format.js";
import { whyNot } from "/page/session.js";

const LIMITS = {
  requests_per_minute: "Requests a minute",
  tokens_per_minute: "Tokens a minute",
  tokens_per_day: "Tokens a day",
  tokens_per_month: "Tokens a month",
  concurrent: "Requests at once",
  queued: "Requests waiting",
};
const OF_TENANTS = ["Tenant", "Class", "Weight", "Limits", "Keys", "Declared in", "Actions"];
const OF_KEYS = ["Key", "Name", "Tenant", "Models", "Opens", "Class", "State", "Ends", "Actions"];
const PRIORITIES = ["interactive", "standard", "batch"];
const SURFACES = { data: "requests to models", read: "reading the fleet", operate: "changing models and nodes", admin: "changing tenants and keys" };

export function accessView() {
  const view = new AccessView();
  view.load();
  return { element: view.element, title: "Access", close: () => {} };
}

class AccessView {
  constructor() {
    this.tenants = [];
    this.keys = [];
    this.state = h("p", { class: "note", role: "status", "aria-live": "polite" });
    this.tenantRows = h("tbody");
    this.keyRows = h("tbody");
    this.filter = h("input", { type: "search", id: "key-filter", placeholder: "Filter by name, tenant, model, prefix", autocomplete: "off" });
    this.filter.addEventListener("input", () => this.draw());
    this.newKey = h("button", { type: "button", class: "strong", onclick: () => this.createKey() }, "New key");
    this.element = h(
      "div",
      { class: "access-view" },
      h("h1", { class: "hidden" }, "Access"),
      h(
        "div",
        { class: "tools" },
        h("label", { class: "hidden", for: "key-filter" }, "Filter keys"),
        this.filter,
        this.newKey,
        h("button", { type: "button", disabled: Boolean(whyNot("admin")), title: whyNot("admin"), onclick: () => this.editTenant(null) }, "New tenant"),
        this.state,
      ),
      panel("Tenants", "tenants", table("Tenants", OF_TENANTS, this.tenantRows)),
      panel("Keys", "keys", table("Keys", OF_KEYS, this.keyRows)),
    );
    this.draw();
  }

  async load() {
    say(this.state, "Reading…");
    try {
      const tenants = await rows("/api/v1/tenants");
      const keys = tenants && (await rows("/api/v1/keys"));
      if (!keys) {
        say(this.state, "Keys are shown to holders of the admin token only.");
        return;
      }
      [this.tenants, this.keys] = [tenants, keys];
      const found = `${count(tenants.length, "tenant")}, ${count(keys.length, "key")}`;
      say(this.state, whyNot("admin") ? `${found}. ${whyNot("admin")}.` : found);
    } catch (error) {
      say(this.state, `Not read: ${error.message}`);
    }
    this.draw();
  }

  draw() {
    const text = this.filter.value.trim().toLowerCase();
    const found = this.keys.filter((key) => !text || [key.name, key.tenant, key.prefix, ...key.models].some((word) => word.toLowerCase().includes(text)));
    this.newKey.title = whyNot("admin") ?? (this.tenants.length ? "" : "Create a tenant first");
    this.newKey.disabled = Boolean(this.newKey.title);
    keyed(this.tenantRows, this.tenants.length ? this.tenants : [{ name: "" }], (row) => row.name, (row) => named(this.tenantRow(row), OF_TENANTS));
    keyed(this.keyRows, found.length ? found : [{ key_id: "" }], (row) => row.key_id, (row) => named(this.keyRow(row), OF_KEYS));
  }

  tenantRow(row) {
    if (!row.name) return h("tr", null, h("td", { colspan: "7" }, empty("No tenant yet. A key belongs to a tenant, so create one first. Until there is a key, the API key opens every model, and where none is set, everybody may use them.")));
    const ofFile = Boolean(row.source);
    return h(
      "tr",
      null,
      h("td", { class: "name" }, row.name),
      h("td", null, row.priority),
      h("td", { class: "num" }, String(row.weight)),
      h("td", { class: "wrap" }, limitsText(row.limits), Object.entries(row.model_limits).map(([model, limits]) => h("small", null, ` ${model}: ${limitsText(limits)}`))),
      h("td", { class: "num" }, String(row.num_keys)),
      h("td", null, row.source ? row.source.split("/").at(-1) : "here"),
      h(
        "td",
        null,
        h(
          "span",
          { class: "actions", role: "group", "aria-label": `Actions on ${row.name}` },
          act("Edit", `Edit ${row.name}`, () => this.editTenant(row), ofFile),
          act("Remove", `Remove ${row.name}`, () => this.removeTenant(row), ofFile, true),
        ),
      ),
    );
  }

  keyRow(row) {
    if (!row.key_id) return h("tr", null, h("td", { colspan: "9" }, empty(this.keys.length ? "No key matches." : "No key yet.")));
    const over = row.state === "active" ? "" : row.state;
    return h(
      "tr",
      { class: over ? "over" : null },
      h("td", { class: "name" }, h("code", null, `${row.prefix}-…`)),
      h("td", null, row.name),
      h("td", null, row.tenant),
      h("td", { class: "wrap" }, row.models.join(", "), hasLimits(row) ? h("small", null, ` at most ${limitsText(row.limits)}`) : null),
      h("td", null, row.surfaces.join(", ")),
      h("td", null, row.priority ?? "its tenant's"),
      h("td", null, over ? badge(over, "warn") : badge("active", "good")),
      h("td", null, row.revoked_at ? day(row.revoked_at) : row.expires_at ? day(row.expires_at) : "never"),
      h(
        "td",
        null,
        over
          ? null
          : h(
              "span",
              { class: "actions", role: "group", "aria-label": `Actions on ${row.prefix}` },
              act("Edit", `Edit ${row.name}`, () => this.editKey(row), Boolean(row.source)),
              act("Rotate", `Rotate ${row.name}`, () => this.rotate(row), Boolean(row.source)),
              act("Revoke", `Revoke ${row.name}`, () => this.revoke(row), false, true),
            ),
      ),
    );
  }

  async editTenant(row) {
    const answer = await ask((end) => tenantForm(row, end));
    if (!answer) return;
    const { name, ...body } = answer;
    await this.change(`Tenant ${name}`, "is saved", "PUT", `/api/v1/tenants/${encodeURIComponent(name)}`, body);
  }

  async removeTenant(row) {
    if (!(await confirmed(`Remove tenant ${row.name}? Its keys stop working.`, "Remove"))) return;
    await this.change(`Tenant ${row.name}`, "is removed", "DELETE", `/api/v1/tenants/${encodeURIComponent(row.name)}?with_keys=true`);
  }

  async createKey() {
    const body = await ask((end) => keyForm(this.tenants, null, end));
    if (!body) return;
    const made = await this.change(`Key ${body.name}`, "is created", "POST", "/api/v1/keys", body);
    if (made?.key) await ask((end) => shownOnce(made.key, end));
  }

  async editKey(row) {
    const answer = await ask((end) => keyForm(this.tenants, row, end));
    if (!answer) return;
    const { tenant, ...body } = answer;
    await this.change(`Key ${body.name}`, "is saved", "PATCH", `/api/v1/keys/${row.key_id}`, body);
  }

  async rotate(row) {
    const question = `Rotate ${row.name}? A second key with the same rights is made; the old one ends in a day.`;
    if (!(await confirmed(question, "Rotate"))) return;
    const made = await this.change(`Key ${row.name}`, "is rotated", "POST", `/api/v1/keys/${row.key_id}/rotate`, { overlap: "1d" });
    if (made?.key) await ask((end) => shownOnce(made.key, end));
  }

  async revoke(row) {
    if (!(await confirmed(`Revoke ${row.name} (${row.prefix})? Its next request is refused everywhere; running ones finish.`, "Revoke"))) return;
    await this.change(`Key ${row.name}`, "is revoked", "DELETE", `/api/v1/keys/${row.key_id}`);
  }

  /** Change something, and read again. Returns the answer's JSON, or null. */
  async change(title, done, method, path, body = null) {
    const made = await change(title, `${title} ${done}`, path, method, body);
    await this.load();
    return made;
  }
}

/** The rows of a list, or null when the person gave no token. Throws with the owner's words. */
async function rows(path) {
  const answer = await send(path, "GET");
  if (answer === null) return null;
  if (!answer.ok) throw new Error(await errorText(answer));
  return (await answer.json()).data;
}

/** A row whose cells say which columns they are of, for the screens on which there is no head. */
function named(row, columns) {
  if (row.cells.length === columns.length) columns.forEach((name, at) => (row.cells[at].dataset.column = name));
  return row;
}

function hasLimits(row) {
  return Object.keys(LIMITS).some((name) => row.limits?.[name]);
}

function limitsText(limits) {
  const parts = Object.keys(LIMITS).filter((name) => limits?.[name]).map((name) => `${limits[name]} ${LIMITS[name].toLowerCase()}`);
  return parts.join(", ") || "none";
}

function act(word, label, onclick, ofFile, grave = false) {
  const title = whyNot("admin") ?? (ofFile ? "Declared in a file: change it there" : null);
  return h("button", { type: "button", class: `act ${grave ? "grave" : ""}`, "aria-label": label, "data-focus": word, disabled: Boolean(title), title, onclick }, word);
}

// ---- forms

function field(id, label, input) {
  return h("div", { class: "setting" }, h("label", { for: id }, label), input);
}

function choice(id, options, chosen) {
  return h("select", { id }, options.map((one) => h("option", { value: one, selected: one === chosen }, one || "its tenant's")));
}

function formOf(title, fields, word, end, read) {
  const complaint = h("p", { class: "bad", role: "alert" });
  const form = h("form", null, h("h2", { id: "asked" }, title), fields, complaint, h("div", { class: "buttons" }, h("button", { type: "button", onclick: () => end(null) }, "Cancel"), h("button", { type: "submit", class: "strong" }, word)));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    end(read());
  });
  return [form];
}

/** Fields of all limits; values above zero. */
function limitFields(row) {
  const inputs = Object.keys(LIMITS).map((key) => [key, h("input", { id: `limit-${key}`, type: "number", min: "0", step: "1", placeholder: "no limit", value: row?.limits?.[key] ? String(row.limits[key]) : "" })]);
  return {
    element: h("div", { class: "two" }, inputs.map(([key, input]) => field(`limit-${key}`, LIMITS[key], input))),
    read: () => Object.fromEntries(inputs.filter(([, input]) => Number(input.value)).map(([key, input]) => [key, Number(input.value)])),
  };
}

function tenantForm(row, end) {
  const name = h("input", { id: "tenant-name", required: true, pattern: "[A-Za-z0-9][A-Za-z0-9._@\\-]{0,63}", title: "Letters, digits and . _ @ -", value: row?.name ?? "", disabled: Boolean(row), autocomplete: "off", "data-first": !row });
  const priority = choice("tenant-priority", PRIORITIES, row?.priority ?? "standard");
  const weight = h("input", { id: "tenant-weight", type: "number", min: "0.001", max: "1000", step: "any", value: String(row?.weight ?? 1) });
  const limits = limitFields(row);
  const fields = [field("tenant-name", "Name", name), field("tenant-priority", "Most urgent class", priority), field("tenant-weight", "Weight among others of its class", weight), limits.element];
  return formOf(row ? `Tenant ${row.name}` : "New tenant", fields, "Save", end, () => ({
    name: name.value,
    priority: priority.value,
    weight: Number(weight.value),
    limits: limits.read(),
    model_limits: row?.model_limits ?? {},
  }));
}

/** `row`: the key that is changed, null for a new one. An end left empty stays as it is. */
function keyForm(tenants, row, end) {
  const tenant = choice("key-tenant", row ? [row.tenant] : tenants.map((one) => one.name), row?.tenant ?? tenants[0]?.name);
  tenant.disabled = Boolean(row);
  const name = h("input", { id: "key-name", required: true, pattern: "[A-Za-z0-9][A-Za-z0-9._@\\-]{0,63}", title: "Letters, digits and . _ @ -", value: row?.name ?? "", autocomplete: "off", "data-first": true });
  const models = h("input", { id: "key-models", value: row ? row.models.join(", ") : "*", required: true, autocomplete: "off", spellcheck: "false" });
  const boxes = Object.entries(SURFACES).map(([surface, word]) => [surface, word, h("input", { type: "checkbox", checked: row ? row.surfaces.includes(surface) : surface === "data" })]);
  const days = h("input", { id: "key-days", type: "number", min: "1", step: "1", placeholder: row?.expires_at ? "as it is" : "never" });
  const priority = choice("key-priority", row?.priority ? PRIORITIES : ["", ...PRIORITIES], row?.priority ?? "");
  const limits = limitFields(row);
  const fields = [
    h("div", { class: "two" }, field("key-tenant", "Tenant", tenant), field("key-name", "Name", name)),
    field("key-models", "Models: names or patterns, with commas between", models),
    h("fieldset", { class: "setting" }, h("legend", null, "Opens"), boxes.map(([, word, box]) => h("label", { class: "box" }, box, word))),
    h("div", { class: "two" }, field("key-days", "Ends after days", days), field("key-priority", "Most urgent class", priority)),
    limits.element,
  ];
  return formOf(row ? `Key ${row.prefix}` : "New key", fields, row ? "Save" : "Create", end, () => ({
    tenant: tenant.value,
    name: name.value,
    models: models.value.split(",").map((one) => one.trim()).filter(Boolean),
    surfaces: boxes.filter(([, , box]) => box.checked).map(([surface]) => surface),
    limits: limits.read(),
    ...(priority.value ? { priority: priority.value } : {}),
    ...(Number(days.value) ? { expires: `${Math.round(Number(days.value))}d` } : {}),
  }));
}

function shownOnce(key, end) {
  return [
    h("h2", { id: "asked" }, "The new key"),
    h("p", null, "It is shown only once. Store it with your secrets."),
    commandLine(key, "Copy the key").element,
    h("div", { class: "buttons" }, h("button", { type: "button", class: "strong", "data-first": true, onclick: () => end(null) }, "Done")),
  ];
}
