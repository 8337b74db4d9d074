// An operator's actions on models and nodes: the buttons, and the question before an action that ends work.

import { change, confirmed } from "/page/asking.js";
import { h } from "/page/dom.js";
import { whyNot } from "/page/session.js";
import { isDrained } from "/page/values.js";

// `word` is on the button, `done` in the note. `ask` is the question before it, if it ends or keeps away work.
const MODEL_VERBS = {
  load: { word: "Load", done: "is told to load" },
  unload: {
    word: "Unload",
    done: "is told to unload",
    ask: (model) => [`Unload ${model.name}?`, ...running(model), "The next request starts it again."].join(" "),
  },
  drain: {
    word: "Drain",
    done: "is drained",
    ask: (model) => [`Drain ${model.name}?`, ...running(model), "New requests are refused until it is loaded again."].join(" "),
  },
  pin: { word: "Pin", done: "is pinned: never evicted, always at least one instance" },
  unpin: { word: "Unpin", done: "is no longer pinned" },
};
const NODE_VERBS = {
  drain: {
    word: "Drain",
    done: "is told to drain",
    ask: (node) => `Drain ${node.node_id}? Its instances finish their requests and stop, and nothing is placed there until it is undrained.`,
  },
  undrain: { word: "Undrain", done: "takes instances again" },
};

const underWay = new Set(); // "models/<key>", "nodes/<id>"
function running(model) {
  const parts = [];
  if (model.num_in_flight) parts.push(`${model.num_in_flight} running ${model.num_in_flight === 1 ? "request finishes" : "requests finish"} first.`);
  if (model.num_waiting) parts.push(`${model.num_waiting} ${model.num_waiting === 1 ? "is" : "are"} waiting.`);
  return parts;
}

/** Load, unload, drain, pin or unpin for one model: those that make sense now. `verbs` chooses some of them. */
export function modelActions(model, verbs = Object.keys(MODEL_VERBS)) {
  return toolbar(`models/${model.key}`, model.name, MODEL_VERBS, verbs.filter((verb) => fits(model, verb)), model);
}

/** Drain or undrain for one node: `nodeActions(row)` is an element to place beside the node's name. */
export function nodeActions(node) {
  return toolbar(`nodes/${node.node_id}`, node.node_id, NODE_VERBS, [isDrained(node) ? "undrain" : "drain"], node);
}

function fits(model, verb) {
  const isRunning = model.instances.length > 0;
  if (verb === "load") return !isRunning || model.suspended;
  if (verb === "unload") return isRunning;
  if (verb === "drain") return !model.suspended;
  return verb === (model.pinned ? "unpin" : "pin");
}

function toolbar(subject, name, words, verbs, row) {
  const refusal = whyNot("operator");
  const buttons = verbs.map((verb) =>
    h(
      "button",
      {
        type: "button",
        class: `act ${words[verb].ask ? "grave" : ""}`,
        disabled: Boolean(refusal) || underWay.has(subject),
        title: refusal,
        "data-refused": Boolean(refusal),
        "data-subject": subject,
        "data-focus": verb,
        "aria-label": `${words[verb].word} ${name}`,
        onclick: () => act(subject, name, verb, words[verb], row),
      },
      words[verb].word,
    ),
  );
  return h("span", { class: "actions", role: "group", "aria-label": `Actions on ${name}` }, buttons);
}

async function act(subject, name, verb, words, row) {
  if (underWay.has(subject)) return;
  if (words.ask && !(await confirmed(words.ask(row), words.word))) return;
  setBusy(subject, true);
  await change(`${words.word} ${name}`, `${name} ${words.done}`, `/api/v1/${subject.split("/").map(encodeURIComponent).join("/")}/${verb}`);
  setBusy(subject, false);
}

function setBusy(subject, busy) {
  if (busy) underWay.add(subject);
  else underWay.delete(subject);
  for (const button of document.querySelectorAll(`button[data-subject="${CSS.escape(subject)}"]`)) button.disabled = busy || "refused" in button.dataset;
}
