// The fleet as the server streams it. One object for the whole page; views listen for "change", "models" (their names), "traces"
// (spans came in), "status".

const TABLES = { models: "key", instances: "instance_id", nodes: "node_id" };
const LOGS = { decisions: 200, requests: 200 };

class Live extends EventTarget {
  constructor() {
    super();
    this.fleet = null;
    this.now = 0;
    this.connected = false;
    this.lostAt = 0;
    this.tables = { models: new Map(), instances: new Map(), nodes: new Map() };
    this.sources = {};
    this.decisions = [];
    this.requests = [];
    this.numDropped = 0;
    this.ready = false;
  }

  open() {
    const source = new EventSource("/api/v1/stream");
    source.onopen = () => this.link(true);
    source.onerror = () => {
      this.link(false);
      if (source.readyState === EventSource.CLOSED) setTimeout(() => this.open(), 2000); // refused: 429 or a proxy
    };
    source.addEventListener("fleet", (event) => this.replace(JSON.parse(event.data)));
    source.addEventListener("patch", (event) => this.patch(JSON.parse(event.data)));
    source.addEventListener("traces", (event) => this.tell("traces", JSON.parse(event.data).traces));
    source.addEventListener("dropped", (event) => this.resync(JSON.parse(event.data).num));
  }

  link(up) {
    if (this.connected && !up) this.lostAt = Date.now() / 1000;
    this.connected = up;
    this.tell("status");
  }

  /** The server had to drop messages for this page: what is shown may have holes, so ask for everything again. */
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
      this.tables[table] = new Map(fleet[table].map((row) => [row[key], row]));
    }
    for (const log of Object.keys(LOGS)) this[log] = fleet[log];
    this.sources = fleet.sources;
    this.ready = true;
    this.tell("models");
    this.tell("change");
    this.tell("status");
  }

  patch(patch) {
    if (patch.now < this.now) return;
    this.now = patch.now;
    const known = new Set(this.tables.models.keys());
    for (const [table, key] of Object.entries(TABLES)) {
      for (const row of patch[table] ?? []) this.tables[table].set(row[key], row);
      for (const id of patch.removed?.[table] ?? []) this.tables[table].delete(id);
    }
    for (const [log, limit] of Object.entries(LOGS)) {
      if (patch[log]) this[log] = [...patch[log], ...this[log]].slice(0, limit);
    }
    if (patch.models?.some((row) => !known.has(row.key))) this.tell("models");
    if (patch.sources) {
      this.sources = patch.sources;
      this.tell("status");
    }
    this.tell("change");
  }

  tell(name, detail) {
    this.dispatchEvent(new CustomEvent(name, { detail }));
  }

  model(key) {
    return this.tables.models.get(key);
  }

  get models() {
    return [...this.tables.models.values()].sort((a, b) => a.name.localeCompare(b.name) || (a.key < b.key ? -1 : 1));
  }

  get nodes() {
    return [...this.tables.nodes.values()].sort((a, b) => a.node_id.localeCompare(b.node_id, undefined, { numeric: true }));
  }

  get instances() {
    return this.tables.instances;
  }
}

export const live = new Live();
