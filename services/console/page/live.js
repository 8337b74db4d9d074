// The fleet as the server streams it. One object for the whole page; views listen for "change" (once per frame, with
// the changes), "models" (a name is new), "traces" (spans came in), "status".

import { isOpen } from "/page/session.js";

const TABLES = { models: "key", instances: "instance_id", nodes: "node_id" };
const DECISIONS_KEPT = 200;
const compare = new Intl.Collator(undefined, { numeric: true }).compare;
const ORDERS = {
  models: (a, b) => compare(a.name, b.name) || (a.key < b.key ? -1 : 1),
  nodes: (a, b) => compare(a.node_id, b.node_id),
};

/** A row as views read it: the value with the facts that were joined with it. */
export function joined(row) {
  return { ...row.value, ...row.joined };
}

function nothing() {
  return { all: false, models: new Set(), instances: new Set(), nodes: new Set(), decisions: 0 };
}

class Live extends EventTarget {
  constructor() {
    super();
    this.now = 0;
    this.connected = false;
    this.lostAt = 0;
    this.tables = { models: new Map(), instances: new Map(), nodes: new Map() };
    this.order = {}; // table -> its keys in order, until a row comes or goes
    this.rows = {}; // table -> its rows in that order, until one changes
    this.sources = {};
    this.decisions = [];
    this.numDropped = 0;
    this.ready = false;
    this.pending = null; // changes since the last frame
  }

  open() {
    const source = new EventSource("/api/v1/stream");
    source.onopen = () => this.link(true);
    source.onerror = () => {
      this.link(false);
      if (source.readyState === EventSource.CLOSED) this.refused();
    };
    source.addEventListener("fleet", (event) => this.replace(JSON.parse(event.data)));
    source.addEventListener("patch", (event) => this.patch(JSON.parse(event.data)));
    source.addEventListener("traces", (event) => this.tell("traces", JSON.parse(event.data).traces));
    source.addEventListener("dropped", (event) => this.resync(JSON.parse(event.data).num));
  }

  /** The session is over, or it is a 429 or a proxy, and time helps. */
  async refused() {
    if (await isOpen()) setTimeout(() => this.open(), 2000);
  }

  link(up) {
    if (this.connected && !up) this.lostAt = Date.now() / 1000;
    this.connected = up;
    this.tell("status");
  }

  /** The server dropped messages for this page, so read everything again. */
  async resync(num) {
    this.numDropped += num;
    try {
      const answer = await fetch("/api/v1/fleet");
      if (answer.ok) this.replace(await answer.json());
    } catch (error) {
      console.warn("fleet could not be read again", error);
    }
    this.tell("traces", []);
  }

  replace(fleet) {
    this.now = fleet.now;
    for (const [table, key] of Object.entries(TABLES)) {
      this.tables[table] = new Map(fleet[table].map(joined).map((row) => [row[key], row]));
    }
    this.order = {};
    this.rows = {};
    this.decisions = fleet.decisions.map(joined);
    this.sources = fleet.sources;
    this.ready = true;
    this.tell("models");
    this.soon().all = true;
    this.tell("status");
  }

  /** New rows, and changed fields of others. An unchanged row stays the same object. */
  patch(patch) {
    if (patch.now < this.now) return;
    this.now = patch.now;
    const changed = this.soon();
    for (const [table, key] of Object.entries(TABLES)) {
      const rows = this.tables[table];
      for (const row of (patch[table] ?? []).map(joined)) {
        rows.set(row[key], row);
        changed[table].add(row[key]);
      }
      for (const fields of patch.changed?.[table] ?? []) {
        const row = rows.get(fields[key]);
        if (!row) continue; // its whole row was dropped; the fleet is being read again
        rows.set(fields[key], { ...row, ...joined(fields) });
        changed[table].add(fields[key]);
      }
      for (const id of patch.removed?.[table] ?? []) {
        rows.delete(id);
        changed[table].add(id);
      }
      if (patch[table] || patch.removed?.[table]) delete this.order[table];
      if (changed[table].size) delete this.rows[table];
    }
    if (patch.decisions) {
      this.decisions = [...patch.decisions.map(joined), ...this.decisions].slice(0, DECISIONS_KEPT);
      changed.decisions += patch.decisions.length;
    }
    if (patch.models) this.tell("models");
    if (patch.sources) {
      this.sources = patch.sources;
      this.tell("status");
    }
  }

  /** Changes since the last frame; listeners of "change" get it in the next one. */
  soon() {
    if (!this.pending) {
      this.pending = nothing();
      requestAnimationFrame(() => {
        const detail = this.pending;
        this.pending = null;
        this.tell("change", detail);
      });
    }
    return this.pending;
  }

  tell(name, detail) {
    this.dispatchEvent(new CustomEvent(name, { detail }));
  }

  model(key) {
    return this.tables.models.get(key);
  }

  nameOf(key) {
    return this.model(key)?.name ?? key;
  }

  /** [key, name] of each model, by name. */
  get names() {
    return this.models.map(({ key, name }) => [key, name]);
  }

  node(id) {
    return this.tables.nodes.get(id);
  }

  inOrder(table) {
    const rows = this.tables[table];
    this.order[table] ??= [...rows.values()].sort(ORDERS[table]).map((row) => row[TABLES[table]]);
    return (this.rows[table] ??= this.order[table].map((key) => rows.get(key)));
  }

  /** By name. The same array until a row changes. */
  get models() {
    return this.inOrder("models");
  }

  get nodes() {
    return this.inOrder("nodes");
  }

  get instances() {
    return this.tables.instances;
  }
}

export const live = new Live();
