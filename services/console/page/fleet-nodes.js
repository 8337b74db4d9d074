// Cards of nodes: the memory of each GPU, the instances, and the weights arriving. A card off the screen is a head only.

import { nodeActions } from "/page/actions.js";
import { gpuAddress, modelAddress } from "/page/address.js";
import { hues } from "/page/colours.js";
import { h, keyed, kept, emulated } from "/page/dom.js";
import { bytes, clock, rate, stateWord } from "/page/format.js";
import { live } from "/page/live.js";
import { bytesOf, holdersOn, isDrained, nodeOf, slicesOf, usedBytes } from "/page/values.js";

const OWNER_WORDS = { weights: "weights", kv: "KV cache", prewarm: "prewarmed", reservation: "reserved", sleeper: "kept by sleepers", shared: "weights that all of these read" };
export const KIND_WORDS = { host: "host memory", cuda: "CUDA", emulated: "emulated" };
const HOLDERS_SHOWN = 8;
const AHEAD = "400px"; // how far outside the window a card is drawn

export function stateOf(node) {
  if (node.lost_since) return "silent";
  return isDrained(node) ? "draining" : "ready";
}

export class NodeGrid {
  constructor() {
    this.element = h("div", { class: "nodes" });
    this.cards = new Map();
    this.here = new Map(); // node id -> its instances
    this.known = new Set(); // ids of instances, as the GPUs were last drawn
    this.hue = new Map();
    this.seer = new IntersectionObserver((entries) => {
      for (const entry of entries) this.cards.get(entry.target.dataset.node)?.see(entry.isIntersecting);
    }, { rootMargin: AHEAD });
  }

  recolour() {
    this.hue = hues(live.tables.models.keys());
  }

  /** Who runs where, for the lists on the cards. */
  index() {
    this.here = new Map();
    for (const instance of live.instances.values()) {
      const list = this.here.get(nodeOf(instance));
      if (list) list.push(instance);
      else this.here.set(nodeOf(instance), [instance]);
    }
  }

  show(nodes, all = false) {
    kept(this.element, nodes, (node) => node.node_id, (node) => this.card(node), all);
  }

  card(node) {
    let card = this.cards.get(node.node_id);
    if (!card) {
      card = new NodeCard(node, this);
      this.cards.set(node.node_id, card);
      this.seer.observe(card.element);
    }
    return { element: card.element, update: (row) => card.update(row) };
  }

  /** These instances changed: the cards of their nodes list them anew, and where one came or went, whose its bytes are. */
  touch(instanceIds) {
    const moved = new Set([...instanceIds].filter((id) => this.known.has(id) !== live.instances.has(id)));
    for (const card of this.cards.values()) {
      if (!card.isSeen) continue;
      if (moved.size && card.holds(moved)) card.drawGpus();
      if (card.holds(instanceIds) || card.runs(instanceIds)) card.list();
    }
    this.known = new Set(live.instances.keys());
  }

  /** Forget the cards of nodes that are no more. */
  tidy() {
    if (this.cards.size <= live.nodes.length) return;
    for (const id of this.cards.keys()) {
      if (live.node(id)) continue;
      this.seer.unobserve(this.cards.get(id).element);
      this.cards.delete(id);
    }
  }

  close() {
    this.seer.disconnect();
  }
}

class NodeCard {
  constructor(node, grid) {
    this.grid = grid;
    this.node = node;
    this.head = h("h3", { id: `node-${node.node_id}` });
    this.gpus = h("div", { class: "gpus" });
    this.holders = h("ul", { class: "legend", "aria-label": "Instances" });
    this.links = h("div", { class: "links" });
    this.fetches = h("ul", { class: "fetches", "aria-label": "Weights arriving" });
    this.cache = h("div");
    this.element = h(
      "article",
      { class: "node", "data-node": node.node_id, "aria-labelledby": `node-${node.node_id}`, style: { "--rows": String(node.gpus.length) } },
      this.head,
      this.gpus,
      this.holders,
      this.links,
      this.fetches,
      this.cache,
    );
    this.isSeen = false;
    this.isStale = true;
  }

  see(isSeen) {
    this.isSeen = isSeen;
    if (!isSeen) this.isStale = true; // its instances are not followed meanwhile
    else if (this.isStale) this.draw();
  }

  /** Does one of these instances run here? */
  runs(instanceIds) {
    return (this.grid.here.get(this.node.node_id) ?? []).some((instance) => instanceIds.has(instance.instance_id));
  }

  /** Does one of them hold memory here? One that is gone may, until its node says otherwise. */
  holds(instanceIds) {
    return this.node.gpus.some((gpu) => holdersOn(gpu).some((holder) => instanceIds.has(holder)));
  }

  update(node) {
    this.node = node;
    this.element.className = `node ${stateOf(node)}`;
    keyed(this.head, [headOf(node)], () => "head", headElement);
    if (this.isSeen) this.draw();
    else this.isStale = true;
  }

  draw() {
    const { node, grid } = this;
    this.isStale = false;
    const colour = (key) => grid.hue.get(key) ?? -1;
    this.drawGpus();
    this.list();
    keyed(this.links, node.links.map((link) => ({ ...link, measured: node.fetches.reduce((all, fetch) => all + fetch.bytes_per_s, 0) })), (link) => link.link_id, linkLine);
    kept(this.fetches, node.fetches, (fetch) => fetch.report.digest, (fetch) => new FetchLine(fetch, colour), true);
    keyed(this.cache, cacheOf(node), () => "cache", (cache) => cacheLine(cache, colour));
  }

  drawGpus() {
    const colour = (key) => this.grid.hue.get(key) ?? -1;
    const look = (gpu) => slicesOf(gpu).map((slice) => `${colour(slice.model_key)} ${live.nameOf(slice.model_key)}`).join();
    keyed(this.gpus, this.node.gpus, (gpu) => gpu.gpu_id, (gpu) => gpuBar(gpu, colour), look);
  }

  /** The instances here. An emulated node carries the mark itself, so they need not repeat it. */
  list() {
    const { node, grid } = this;
    const lines = holdersOf(node, grid.here.get(node.node_id) ?? [], !isEmulated(node));
    keyed(this.holders, lines, (line) => line.id, (line) => holderLine(line, (key) => grid.hue.get(key) ?? -1));
  }
}

function isEmulated(node) {
  return node.gpus.length > 0 && node.gpus.every((gpu) => gpu.kind === "emulated");
}

function headOf(node) {
  const kinds = [...new Set(node.gpus.map((gpu) => gpu.kind))];
  const { node_id, lost_since, draining, cordoned, engines } = node;
  const used = new Set(live.models.map((model) => model.engine));
  const inUse = engines.filter((engine) => used.has(engine));
  const others = engines.filter((engine) => !used.has(engine));
  return { node_id, lost_since, draining, cordoned, inUse, others, kinds, numGpus: node.gpus.length, isEmulated: isEmulated(node) };
}

function headElement(head) {
  const words = { silent: `silent since ${clock(head.lost_since)}`, draining: head.cordoned ? "drained" : "draining", ready: "ready" };
  const state = stateOf(head);
  const gpus = `${head.numGpus} × ${head.kinds.map((kind) => KIND_WORDS[kind] ?? kind).join(", ")}`;
  return h(
    "span",
    { class: "node-head" },
    h("b", null, head.node_id),
    h("span", { class: `node-state ${state}` }, h("i", { class: "dot", "aria-hidden": "true" }), words[state]),
    head.isEmulated ? [h("small", null, `${head.numGpus} GPU${head.numGpus === 1 ? "" : "s"}`), emulated(true)] : h("small", null, gpus),
    h("small", { class: "engines", title: head.others.length ? `It can start ${head.others.join(", ")} too, which no model uses` : null }, head.inUse.join(", ") || "no model's engine"),
    !head.lost_since || head.cordoned ? nodeActions(head) : null,
  );
}

// ---- GPUs

function gpuBar(gpu, colour) {
  const used = usedBytes(gpu);
  const slices = slicesOf(gpu);
  const name = gpu.gpu_id.slice(gpu.gpu_id.lastIndexOf("/") + 1);
  const words = slices.map((slice) => `${live.nameOf(slice.model_key) || slice.holder}: ${OWNER_WORDS[slice.owner] ?? slice.owner} ${bytes(slice.num_bytes)}`);
  const label = `GPU ${name}, ${KIND_WORDS[gpu.kind] ?? gpu.kind}, ${bytes(used)} of ${bytes(gpu.total_bytes)} used. ${words.join("; ")}`;
  return h(
    "a",
    { class: "gpu", href: gpuAddress(gpu.gpu_id), "data-focus": gpu.gpu_id },
    h("span", { class: "gpu-name", "aria-hidden": "true" }, name),
    h("div", { class: "bar", role: "img", "aria-label": label }, slices.map((slice) => sliceBar(slice, gpu.total_bytes, colour))),
    h("span", { class: used ? "num" : "num zero", "aria-hidden": "true" }, bytes(used), h("small", null, ` / ${bytes(gpu.total_bytes)}`)),
  );
}

function sliceBar(slice, total, colour) {
  const hue = colour(slice.model_key);
  const width = `${(100 * slice.num_bytes) / Math.max(total, 1)}%`;
  const title = `${live.nameOf(slice.model_key) || slice.holder} · ${OWNER_WORDS[slice.owner] ?? slice.owner} · ${bytes(slice.num_bytes)} · ${slice.holder}${slice.emulated ? " · emulated" : ""}`;
  return h("i", { class: `grant ${slice.owner} ${hue < 0 ? "" : "owned"}`, title, style: { width, "--h": String(Math.max(hue, 0)) } });
}

/** A line per instance on the node: those that the agent reports, and holders of bytes that it reports no more. */
function holdersOf(node, instances, marks) {
  const lines = new Map();
  for (const i of instances) {
    lines.set(i.instance_id, { id: i.instance_id, key: i.model_key, name: live.nameOf(i.model_key), state: i.state, load: i.num_in_flight, most: i.max_concurrency, emulated: marks && i.emulated, num_bytes: bytesOf(i) });
  }
  for (const gpu of node.gpus) {
    for (const slice of slicesOf(gpu)) {
      if (lines.has(slice.holder) || slice.owner === "shared") continue;
      const line = { id: slice.holder, key: slice.model_key, name: live.nameOf(slice.model_key) || slice.holder, state: OWNER_WORDS[slice.owner] ?? slice.owner, emulated: marks && slice.emulated, num_bytes: slice.num_bytes };
      lines.set(slice.holder, line);
    }
  }
  const all = [...lines.values()].sort((a, b) => a.name.localeCompare(b.name) || (a.id < b.id ? -1 : 1));
  if (all.length <= HOLDERS_SHOWN) return all;
  return [...all.slice(0, HOLDERS_SHOWN - 1), { id: "", more: all.length - HOLDERS_SHOWN + 1, names: all.slice(HOLDERS_SHOWN - 1).map((line) => line.name).join(", ") }];
}

function holderLine(line, colour) {
  if (line.more) return h("li", { class: "more", title: line.names }, `and ${line.more} more`);
  const hue = colour(line.key);
  const title = `${line.id}, ${stateWord(line.state)}, ${bytes(line.num_bytes)}`;
  return h(
    "li",
    { class: `holder ${line.state}`, title },
    h("i", { class: `swatch ${hue < 0 ? "nobody" : ""}`, style: { "--h": String(Math.max(hue, 0)) }, "aria-hidden": "true" }),
    line.key ? h("a", { href: modelAddress(line.key), "data-focus": line.id }, line.name) : h("span", null, line.name),
    h("small", null, line.state === "ready" ? `${line.load}/${line.most}` : stateWord(line.state)),
    line.emulated ? emulated(true) : null,
  );
}

// ---- arriving weights

function linkLine(link) {
  const name = link.link_id.slice(link.link_id.lastIndexOf("/") + 1).toUpperCase();
  const isBusy = link.bytes_in_flight > 0 || link.num_transfers > 0;
  const share = link.bytes_per_s ? Math.min(1, link.measured / link.bytes_per_s) : isBusy ? 1 : 0;
  const words = isBusy
    ? [`${bytes(link.bytes_in_flight)} in flight`, link.measured ? rate(link.measured) : "", link.num_transfers > 1 ? `${link.num_transfers} transfers` : ""].filter(Boolean).join(" · ")
    : link.bytes_per_s ? `idle · ${rate(link.bytes_per_s)}` : "idle";
  return h(
    "p",
    { class: `link ${isBusy ? "busy" : ""}` },
    h("span", null, name),
    h("span", { class: "thin", "aria-hidden": "true" }, h("i", { class: link.bytes_per_s ? "" : "unlimited", style: { width: `${100 * share}%` } })),
    h("small", null, words),
  );
}

/** One fetch: the bar grows in place. */
class FetchLine {
  constructor({ report }, colour, node = "") {
    this.fill = h("i", { style: { "--h": String(Math.max(colour(report.model_key), 0)) } });
    this.words = h("small");
    this.element = h(
      "li",
      { class: "fetch" },
      h("a", { href: modelAddress(report.model_key) }, live.nameOf(report.model_key)),
      node ? h("small", null, `→ ${node}`) : null,
      h("span", { class: "thin", "aria-hidden": "true" }, this.fill),
      this.words,
    );
  }

  update = ({ report, bytes_per_s }) => {
    this.fill.style.width = `${(100 * report.num_bytes_done) / Math.max(report.num_bytes, 1)}%`;
    this.words.textContent = `${bytes(report.num_bytes_done)} of ${bytes(report.num_bytes)}${bytes_per_s ? ` · ${rate(bytes_per_s)}` : ""}`;
  };
}

function cacheOf(node) {
  const used = node.cached.reduce((sum, blob) => sum + blob.num_bytes, 0);
  if (!used && !node.host_cache_bytes) return [];
  return [{ used, total: node.host_cache_bytes, blobs: node.cached.map((blob) => [blob.model_keys[0] ?? "", blob.num_bytes]) }];
}

function cacheLine(cache, colour) {
  const slices = cache.blobs.map(([key, size]) => {
    const hue = colour(key);
    return h("i", { class: hue < 0 ? "" : "owned", title: `${live.nameOf(key)} ${bytes(size)}`, style: { width: `${(100 * size) / Math.max(cache.total || cache.used, 1)}%`, "--h": String(Math.max(hue, 0)) } });
  });
  return h(
    "p",
    { class: "link cache" },
    h("span", null, "Cache"),
    h("span", { class: "thin", "aria-hidden": "true" }, slices),
    h("small", null, `${bytes(cache.used)}${cache.total ? ` of ${bytes(cache.total)}` : ""}`, h("span", { class: "hidden" }, " of host memory")),
  );
}
