// A large fleet at a glance: one small tile per node, filled as its memory is. A click shows that node alone.
// It is for the eye and the mouse: the cards below and their filter say the same, so neither Tab nor a reader stops here.

import { h, kept } from "/page/dom.js";
import { bytes } from "/page/format.js";
import { stateOf } from "/page/fleet-nodes.js";
import { bytesInFlight, usedBytes } from "/page/values.js";

const FEW = 12; // nodes that need no map

export class NodeMap {
  constructor() {
    this.element = h("div", { class: "map", "aria-hidden": "true", hidden: true });
  }

  show(nodes) {
    this.element.hidden = nodes.length <= FEW;
    kept(this.element, this.element.hidden ? [] : nodes, (node) => node.node_id, tile);
  }
}

function tile(first) {
  const fill = h("i");
  const element = h("a", { href: `#/fleet/${encodeURIComponent(first.node_id)}`, tabindex: "-1" }, fill);
  let shown = "";
  const update = (node) => {
    let total = 0;
    let used = 0;
    for (const gpu of node.gpus) {
      total += gpu.total_bytes;
      used += usedBytes(gpu);
    }
    const share = total ? Math.round((100 * used) / total) : 0;
    const state = stateOf(node);
    const busy = node.fetches.length || bytesInFlight(node) ? "busy" : "";
    const title = `${node.node_id}, ${state}, ${bytes(used)} of ${bytes(total)} used${busy ? ", weights arriving" : ""}`;
    if (title === shown) return;
    shown = title;
    element.className = `tile ${state} ${busy}`;
    element.title = title;
    fill.style.height = `${share}%`;
  };
  return { element, update };
}
