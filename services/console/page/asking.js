// Questions to a person, and requests to the fleet in a person's name: a dialog, the admin token, and the list of requests
// with their outcomes. The console only passes a request on; its owner decides.

import { h, say } from "/page/dom.js";
import { clock } from "/page/format.js";
import { isOpen } from "/page/session.js";

const TOKEN = "glowplug.admin-token"; // of this tab alone, gone when it closes
const NOTES_KEPT = 8;
const GOOD_FOR_MS = 6000;
const PATIENCE_MS = 30_000;

let asked = null; // the question for the token that is on the page

const notes = h("ol", { class: "notes" });
const shelf = h("aside", { "aria-label": "Requests to the fleet" }, notes);
const spoken = h("p", { class: "hidden", role: "status", "aria-live": "polite" });
const alarm = h("p", { class: "hidden", role: "alert" });
document.body.append(shelf, spoken, alarm); // there before they speak, or they are not heard

/** The answer to a request with the token; asks for one when the owner wants it. null when the person gave none. */
export async function send(path, method = "POST", body = null) {
  const post = (token) => {
    const headers = { ...(token ? { Authorization: `Bearer ${token}` } : {}), ...(body ? { "Content-Type": "application/json" } : {}) };
    return fetch(path, { method, headers, body: body ? JSON.stringify(body) : undefined, cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS) });
  };
  let token = sessionStorage.getItem(TOKEN);
  let answer = await post(token);
  while (answer.status === 401) {
    if (!(await isOpen())) return null; // it was the console that asked, not the owner
    const wrong = Boolean(token);
    sessionStorage.removeItem(TOKEN);
    token = await tokenOf(wrong ? "That is not this fleet's admin token." : "");
    if (!token) return null;
    answer = await post(token);
  }
  if (token) sessionStorage.setItem(TOKEN, token);
  return answer;
}

/** Send a change, and show its outcome: `done` is a text, or gives one from the answer. Returns the answer's JSON, or null. */
export async function change(title, done, path, method = "POST", body = null) {
  const line = note("busy", `${title}…`);
  try {
    const answer = await send(path, method, body);
    if (answer === null) settle(line, "warn", `${title}: not sent, no admin token was given`);
    else if (!answer.ok) settle(line, "bad", `${title}: ${await errorText(answer)}`);
    else {
      const made = await answer.json().catch(() => ({})); // some have no body
      const { text, warning } = typeof done === "string" ? { text: done } : done(made);
      settle(line, warning ? "warn" : "good", warning ? `${text}; ${warning}` : text);
      return made;
    }
  } catch (error) {
    const why = error.name === "TimeoutError" ? "no answer arrived; it may have been done, so check its state" : "the console cannot be reached";
    settle(line, "bad", `${title}: ${why}`);
  }
  return null;
}

/** The message of an OpenAI-shaped error, with its code and status. */
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

// ---- questions

/** A modal dialog; `build(end)` gives its content, and `end(value)` closes it with the answer. Escape answers null. */
export function ask(build) {
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

export function confirmed(question, word) {
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

/** The person's token, or null. One question at a time: requests that need the token meanwhile wait for its answer. */
function tokenOf(complaint) {
  asked ??= askToken(complaint).finally(() => {
    asked = null;
  });
  return asked;
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

// ---- requests and their outcomes

/** A line of the list: "busy" until it is settled. */
function note(kind, text) {
  const line = h("li", { class: `note-line ${kind}` });
  notes.prepend(line);
  while (notes.childElementCount > NOTES_KEPT) notes.lastElementChild.remove();
  write(line, kind, text);
  return line;
}

/** A success disappears by itself; a failure stays until it is dismissed. */
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
