// The playground: talk with any model and watch it wake. The talk stays in this page alone, also while another view is open.

import { asCurl, chat } from "/page/chat.js";
import { copy } from "/page/copy.js";
import { emulated, h, keyed, say } from "/page/dom.js";
import { count, seconds, stateWord } from "/page/format.js";
import { live } from "/page/live.js";
import { startUnderWay } from "/page/model.js";
import { stateOf } from "/page/models.js";

const KEY = "glowplug.api-key"; // of this tab alone
const WAKING_EVERY_MS = 300;
const WARMTH = { hot: "Ready", warm: "Prewarmed or asleep: the first answer waits for a short start", cold: "Not loaded: the first answer waits for its start" };

const talk = []; // { role, content } as they are sent
let stop = null; // aborts the answer under way
let last = null; // the latest request, for "copy as curl" and "try again"
let made = null; // the one element, so that a talk survives a look at its trace

export function playgroundView(key) {
  made ??= build();
  made.choose(key);
  live.addEventListener("change", made.draw);
  live.addEventListener("models", made.draw);
  made.draw();
  made.check();
  queueMicrotask(() => made.prompt.focus());
  return {
    element: made.element,
    title: "Playground",
    close: () => {
      live.removeEventListener("change", made.draw);
      live.removeEventListener("models", made.draw);
    },
  };
}

function build() {
  const ui = controls();
  const said = h("ol", { class: "talk", "aria-label": "Talk", tabindex: "0" });
  const announced = h("p", { class: "hidden", role: "status", "aria-live": "polite" });
  const door = h("div", { class: "door" });
  const element = h(
    "div",
    { class: "playground" },
    h("h1", { class: "hidden" }, "Playground"),
    h("aside", { class: "panel settings", "aria-label": "Settings" }, ui.settings),
    h("section", { class: "panel conversation", "aria-label": "Conversation" }, door, said, ui.form, announced),
  );
  let wanted = "";

  const draw = () => {
    if (document.activeElement !== ui.model || !ui.model.value) drawModels(ui.model, wanted); // not under the reader's hand
    wanted = ui.model.value || wanted;
    if (!stop) ui.send.disabled = !ui.model.value;
    const model = live.model(ui.model.value);
    keyed(ui.card, model ? [model] : [], (row) => row.key, modelCard);
  };
  const check = async () => {
    try {
      const answer = await fetch("/playground/v1/models", { headers: ui.key.value ? { Authorization: `Bearer ${ui.key.value}` } : {} });
      const error = answer.ok ? null : ((await answer.json()).error ?? {});
      ui.keyRow.hidden = !(ui.key.value || answer.status === 401);
      door.replaceChildren(error ? h("p", { class: "refusal", role: "alert" }, answer.status === 401 ? "The router asks for its API key." : (error.message ?? `the router answered ${answer.status}`)) : "");
    } catch (error) {
      console.info("the router could not be asked", error);
    }
  };
  const busy = (is) => {
    ui.send.disabled = is || !ui.model.value;
    ui.stop.disabled = !is;
    ui.clear.disabled = is || !said.childElementCount;
    ui.curl.disabled = !last;
  };
  const send = async () => {
    const text = ui.prompt.value.trim();
    if (!text || stop || !ui.model.value) return;
    ui.prompt.value = "";
    await ask(text);
  };
  const ask = async (text) => {
    const model = live.model(ui.model.value);
    const body = request(ui, model, [...talk, { role: "user", content: text }]);
    last = { body };
    stop = new AbortController();
    said.append(h("li", { class: "turn user" }, h("h2", { class: "hidden" }, "You"), h("p", { class: "text" }, text)));
    const answer = answering(model, () => ask(text));
    said.append(answer.element);
    said.scrollTop = said.scrollHeight;
    busy(true);
    say(announced, model.temperature === "hot" ? `${model.name} answers` : `${model.name} is ${stateWord(model.state)}; it is being started`);
    const follow = () => {
      const below = said.scrollHeight - said.scrollTop - said.clientHeight;
      if (below < 120) said.scrollTop = said.scrollHeight;
    };
    const whole = await answer.run(body, ui.key.value, stop.signal, follow);
    if (whole.text) talk.push({ role: "user", content: text }, { role: "assistant", content: whole.text });
    if (whole.status === 401) {
      ui.keyRow.hidden = false;
      ui.key.focus();
    }
    say(announced, whole.words);
    stop = null;
    busy(false);
    follow();
  };

  ui.form.addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  ui.prompt.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    } else if (event.key === "Escape") stop?.abort();
  });
  ui.stop.addEventListener("click", () => stop?.abort());
  ui.clear.addEventListener("click", () => {
    talk.length = 0;
    last = null;
    said.replaceChildren();
    busy(false);
    ui.prompt.focus();
  });
  ui.curl.addEventListener("click", () => copyCurl(ui));
  ui.model.addEventListener("change", () => {
    wanted = ui.model.value;
    history.replaceState(null, "", `#/playground/${encodeURIComponent(wanted)}`);
    draw();
  });
  ui.model.addEventListener("blur", () => draw());
  ui.key.addEventListener("change", () => {
    sessionStorage.setItem(KEY, ui.key.value);
    check();
  });
  busy(false);
  const choose = (key) => {
    if (key) wanted = key;
  };
  return { element, draw, check, choose, prompt: ui.prompt };
}

function controls() {
  const model = h("select", { id: "pg-model" });
  const card = h("div", { class: "model-card" });
  const system = h("textarea", { id: "pg-system", rows: "3", placeholder: "none" });
  const temperature = h("input", { id: "pg-temperature", type: "number", min: "0", max: "2", step: "0.1", placeholder: "the model's own", inputmode: "decimal" });
  const tokens = h("input", { id: "pg-tokens", type: "number", min: "1", step: "1", value: "256", inputmode: "numeric" });
  const key = h("input", { id: "pg-key", type: "password", autocomplete: "off", value: sessionStorage.getItem(KEY) ?? "" });
  const keyRow = row("API key", key, "Kept in this tab until it is closed.");
  const curl = h("button", { type: "button", disabled: true }, "Copy as curl");
  const clear = h("button", { type: "button" }, "New talk");
  keyRow.hidden = !key.value;
  const settings = [row("Model", model), card, row("System prompt", system), row("Temperature", temperature), row("Longest answer, tokens", tokens), keyRow, h("p", { class: "buttons" }, curl, clear)];
  const prompt = h("textarea", { id: "pg-prompt", rows: "2", placeholder: "Say something. Enter sends, Shift+Enter is a new line." });
  const send = h("button", { type: "submit", class: "strong" }, "Send");
  const stopper = h("button", { type: "button", disabled: true }, "Stop");
  const form = h("form", { class: "say" }, h("label", { class: "hidden", for: "pg-prompt" }, "Message"), prompt, send, stopper);
  return { settings, model, card, system, temperature, tokens, key, keyRow, curl, clear, prompt, send, stop: stopper, form };
}

function row(label, field, hint) {
  return h("p", { class: "setting" }, h("label", { for: field.id }, label), field, hint ? h("small", null, hint) : null);
}

/** The models in groups by temperature; the chosen one stays chosen when it changes its group. */
function drawModels(select, wanted) {
  const value = select.value || wanted;
  const groups = Object.keys(WARMTH).map((warmth) => ({ warmth, models: live.models.filter((model) => model.temperature === warmth).map(({ key, name }) => [key, name]) }));
  keyed(select, groups.filter((group) => group.models.length), (group) => group.warmth, (group) =>
    h("optgroup", { label: WARMTH[group.warmth] }, group.models.map(([key, name]) => h("option", { value: key }, name))),
  );
  const known = live.model(wanted) ? wanted : live.model(value) ? value : (live.models[0]?.key ?? "");
  if (select.value !== known) select.value = known;
}

function modelCard(model) {
  return h("p", null, stateOf(model), emulated(model.emulated), h("a", { href: `#/model/${encodeURIComponent(model.key)}` }, "about it"));
}

function request(ui, model, messages) {
  const system = ui.system.value.trim();
  const body = { model: model.name, messages: system ? [{ role: "system", content: system }, ...messages] : messages, stream: true, stream_options: { include_usage: true } };
  if (ui.temperature.value !== "") body.temperature = Number(ui.temperature.value);
  if (ui.tokens.value !== "") body.max_tokens = Math.max(1, Math.round(Number(ui.tokens.value)));
  return body;
}

async function copyCurl(ui) {
  const answer = await fetch("/playground/router");
  const { router } = await answer.json();
  const text = asCurl(router || "http://ROUTER", last.body, Boolean(ui.key.value));
  await copy(text, ui.curl);
}

// ---- one answer

/** A turn of the model: the wait with its phases, the text as it comes, and its timings. */
function answering(model, again) {
  const wait = h("div", { class: "waking" });
  const thought = h("p", { class: "text thought", hidden: true });
  const text = h("p", { class: "text" });
  const foot = h("p", { class: "foot" });
  const marks = h("span", { class: "tags" }, emulated(model.emulated));
  const element = h("li", { class: "turn model", "aria-busy": "true" }, h("h2", null, model.name, marks), wait, thought, text, foot);
  const seen = { head: null, first: 0, latest: 0, pieces: 0, eta_s: 0, text: "" };

  const run = async (body, key, signal, follow) => {
    const began = performance.now();
    const waking = watch(model.key, wait, () => seen.first === 0, () => ({ waited_s: (performance.now() - began) / 1000, eta_s: seen.eta_s }), follow);
    const on = {
      head: (facts) => {
        seen.head = facts;
        if (facts.emulated) marks.replaceChildren(emulated(true));
      },
      waiting: ({ eta_s }) => (seen.eta_s = eta_s),
      ready: (timings) => Object.assign(seen.head.timings, timings),
      text: (piece, isThought) => {
        seen.latest = performance.now();
        seen.first ||= seen.latest;
        seen.pieces += 1;
        if (isThought) thought.hidden = false;
        else seen.text += piece;
        (isThought ? thought : text).append(piece);
        follow();
      },
    };
    const end = { status: 0, text: "", words: "" };
    let state = null;
    try {
      state = await chat(body, { key, signal, on });
      end.words = `${model.name} has answered`;
    } catch (error) {
      end.status = error.status ?? 0;
      end.words = error.name === "AbortError" ? "Stopped" : error.message;
      wait.after(error.name === "AbortError" ? h("p", { class: "note" }, "Stopped.") : refusal(error, again));
    }
    await waking.end();
    const took = performance.now() - began;
    end.text = seen.text;
    element.removeAttribute("aria-busy");
    foot.replaceChildren(...figures(seen, state, took, began));
    return end;
  };
  return { element, run };
}

function refusal(error, again) {
  const about = [error.status || "", error.code].filter(Boolean).join(" ");
  const retry = h("button", { type: "button", onclick: () => !stop && again() }, "Try again");
  return h("div", { class: "refusal", role: "alert" }, h("p", null, error.message), h("p", null, h("small", null, about, error.retryAfter ? ` · try again in ${error.retryAfter} s` : ""), retry));
}

function figures(seen, state, took, began) {
  const { head } = seen;
  const tokens = state?.usage?.completion_tokens ?? seen.pieces;
  const exact = Boolean(state?.usage?.completion_tokens);
  const parts = [];
  if (seen.first) parts.push(["first token", seconds((seen.first - began) / 1000)]);
  if (seen.first && tokens > 1) parts.push(["per token", seconds((seen.latest - seen.first) / 1000 / (tokens - 1))]);
  parts.push(["total", seconds(took / 1000)]);
  if (tokens) parts.push(["", `${exact ? "" : "~"}${count(tokens, "token")}`]);
  if (state?.finish === "length") parts.push(["", "cut at the longest answer"]);
  const words = parts.map(([name, value]) => h("span", null, name ? `${name} ` : "", h("b", null, value)));
  const phases = Object.entries(head?.timings ?? {}).filter(([name, value]) => name !== "router" && value > 0);
  if (phases.length) words.push(h("span", { class: "served" }, phases.map(([name, value]) => h("span", null, `${name} `, h("b", null, seconds(value))))));
  if (head?.traceId) words.push(h("a", { href: `#/trace/${head.traceId}` }, "trace"));
  else if (head?.requestId) words.push(h("a", { href: `#/request/${encodeURIComponent(head.requestId)}` }, "trace"));
  if (head?.requestId) words.push(h("code", null, head.requestId));
  return words;
}

/** Shows how the model wakes for as long as `waiting()`: its phases from the console, the ETA from the router. */
function watch(key, place, waiting, clock, follow) {
  const line = h("p", { class: "note" });
  const stages = h("div");
  let over = false;
  let timer = 0;
  let shown = false;
  const look = async () => {
    if (over || !waiting()) return clear();
    try {
      const answer = await fetch(`/api/v1/models/${encodeURIComponent(key)}`);
      if (answer.ok && !over && waiting()) draw(await answer.json());
    } catch (error) {
      console.info("model could not be read", error);
    }
    if (!over && waiting()) timer = setTimeout(look, WAKING_EVERY_MS);
    else clear();
  };
  const draw = (detail) => {
    const { waited_s, eta_s } = clock();
    if (!shown) place.append(line, stages);
    shown = true;
    const word = detail.model.joined.state === "ready" ? "its turn is near" : detail.model.joined.state;
    say(line, `Waiting for ${seconds(waited_s)}: ${word}${eta_s ? `, about ${seconds(eta_s)} to go` : ""}`);
    keyed(stages, detail.coming, (start) => start.instance.instance_id, (start) => startUnderWay(start, detail), () => String(detail.now));
    follow();
  };
  const clear = () => place.replaceChildren();
  timer = setTimeout(look, WAKING_EVERY_MS);
  return {
    end: async () => {
      over = true;
      clearTimeout(timer);
      clear();
    },
  };
}
