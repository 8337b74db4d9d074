// What an operator does to models and nodes: buttons, the question before what cannot be taken back, the admin token,
// and a list of what was asked and what came of it. The console only passes these on; their owners decide.

import { h, say } from "/page/dom.js";
import { clock } from "/page/format.js";
import { isOpen } from "/page/session.js";

const TOKEN = "glowplug.admin-token"; // of this tab alone, gone when it closes
const NOTES_KEPT = 8;
const GOOD_FOR_MS = 6000;
const PATIENCE_MS = 30_000;

// `word` is on the button, `done` in the note. `ask` is the question before it, for what ends or keeps away work.
export const MODEL_VERBS = {
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
export const NODE_VERBS = {
  drain: {
    word: "Drain",
    done: "is told to drain",
    ask: (node) => `Drain ${node.node_id}? What runs there finishes and stops, and nothing more is placed there until it is undrained.`,
  },
  undrain: { word: "Undrain", done: "takes instances again" },
};

const underWay = new Set(); // "models/<key>", "nodes/<id>"
const notes = h("ol", { class: "notes" });
const shelf = h("aside", { "aria-label": "What was asked" }, notes);
const spoken = h("p", { class: "hidden", role: "status", "aria-live": "polite" });
const alarm = h("p", { class: "hidden", role: "alert" });
document.body.append(shelf, spoken, alarm); // there before they speak, or they are not heard

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
  return toolbar(`nodes/${node.node_id}`, node.node_id, NODE_VERBS, [node.draining ? "undrain" : "drain"], node);
}

function fits(model, verb) {
  const isRunning = model.instances.length > 0;
  if (verb === "load") return !isRunning || model.suspended;
  if (verb === "unload") return isRunning;
  if (verb === "drain") return !model.suspended;
  return verb === (model.pinned ? "unpin" : "pin");
}

function toolbar(subject, name, words, verbs, row) {
  const buttons = verbs.map((verb) =>
    h(
      "button",
      {
        type: "button",
        class: `act ${words[verb].ask ? "grave" : ""}`,
        disabled: underWay.has(subject),
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
  const line = note("busy", `${words.word} ${name}…`);
  try {
    const answer = await send(`/api/v1/${subject.split("/").map(encodeURIComponent).join("/")}/${verb}`);
    if (answer === null) settle(line, "warn", `${words.word} ${name}: not sent, no admin token was given`);
    else if (answer.ok) settle(line, "good", `${name} ${words.done}`);
    else settle(line, "bad", `${words.word} ${name}: ${await errorText(answer)}`);
  } catch (error) {
    const why = error.name === "TimeoutError" ? "no answer came; it may have been done, look at its state" : "the console cannot be reached";
    settle(line, "bad", `${words.word} ${name}: ${why}`);
  } finally {
    setBusy(subject, false);
  }
}

/** POST with the token; asks for one when the owner wants it. null when the person gave none. */
async function send(path) {
  const post = (token) =>
    fetch(path, { method: "POST", headers: token ? { Authorization: `Bearer ${token}` } : {}, signal: AbortSignal.timeout(PATIENCE_MS) });
  let token = sessionStorage.getItem(TOKEN);
  let answer = await post(token);
  while (answer.status === 401) {
    if (!(await isOpen())) return null; // it was the console that asked, not the owner
    const wrong = Boolean(token);
    sessionStorage.removeItem(TOKEN);
    token = await askToken(wrong ? "That is not this fleet's admin token." : "");
    if (!token) return null;
    answer = await post(token);
  }
  if (token) sessionStorage.setItem(TOKEN, token);
  return answer;
}

/** What an OpenAI-shaped error says, with its code and status. */
export async function errorText(answer) {
  let error = {};
  try {
    error = (await answer.json()).error ?? {};
  } catch {
    error = {}; // not ours: a proxy's page
  }
  const again = answer.headers.get("retry-after");
  return `${error.message ?? answer.statusText ?? "failed"} (${answer.status}${error.code ? ` ${error.code}` : ""})${again ? `, try again in ${again} s` : ""}`;
}

function setBusy(subject, busy) {
  if (busy) underWay.add(subject);
  else underWay.delete(subject);
  for (const button of document.querySelectorAll(`button[data-subject="${CSS.escape(subject)}"]`)) button.disabled = busy;
}

// ---- the two questions

function ask(build) {
  return new Promise((resolve) => {
    const dialog = h("dialog", { class: "ask", "aria-labelledby": "asked" });
    const end = (value) => {
      dialog.close();
      dialog.remove();
      resolve(value);
    };
    dialog.addEventListener("cancel", (event) => {
      event.preventDefault();
      end(null);
    });
    dialog.append(...build(end));
    document.body.append(dialog);
    dialog.showModal();
    dialog.querySelector("[data-first]")?.focus();
  });
}

function confirmed(question, word) {
  return ask((end) => [
    h("p", { id: "asked" }, question),
    h(
      "div",
      { class: "buttons" },
      h("button", { type: "button", "data-first": true, onclick: () => end(false) }, "Cancel"),
      h("button", { type: "button", class: "strong grave", onclick: () => end(true) }, word),
    ),
  ]);
}

function askToken(complaint) {
  return ask((end) => {
    const field = h("input", { type: "password", id: "admin-token", autocomplete: "off", "data-first": true, spellcheck: "false" });
    const form = h(
      "form",
      null,
      h("p", { id: "asked" }, "This needs the fleet's admin rights."),
      h("label", { for: "admin-token" }, "Admin token"),
      field,
      complaint ? h("p", { class: "bad", role: "alert" }, complaint) : null,
      h("p", { class: "note" }, "GLOWPLUG_ADMIN_TOKEN of this fleet. It stays in this tab until the tab is closed."),
      h("div", { class: "buttons" }, h("button", { type: "button", onclick: () => end(null) }, "Cancel"), h("button", { type: "submit", class: "strong" }, "Go on")),
    );
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      end(field.value.trim() || null);
    });
    return [form];
  });
}

// ---- what was asked, and what came of it

function note(kind, text) {
  const line = h("li", { class: `note-line ${kind}` });
  notes.prepend(line);
  while (notes.childElementCount > NOTES_KEPT) notes.lastElementChild.remove();
  write(line, kind, text);
  return line;
}

/** What ended well leaves by itself; what did not stays until it is dismissed. */
function settle(line, kind, text) {
  if (!line.isConnected) notes.prepend(line);
  write(line, kind, text);
  if (kind === "good") setTimeout(() => line.remove(), GOOD_FOR_MS);
}

function write(line, kind, text) {
  line.className = `note-line ${kind}`;
  line.replaceChildren(h("time", null, clock(Date.now() / 1000)), h("span", null, text));
  if (kind !== "busy") line.append(h("button", { type: "button", class: "plain", "aria-label": "Dismiss", onclick: () => line.remove() }, "×"));
  say(kind === "bad" || kind === "warn" ? alarm : spoken, text);
}
