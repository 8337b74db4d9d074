// The logs of services and engines in one list, newest last, followed as they come. The address holds the filters;
// an id in a line links to its page and to the other lines about it.

import { asked as given, decisionAddress, eventAddress, modelAddress, remember } from "/page/address.js";
import { errorText, send } from "/page/asking.js";
import { copy } from "/page/copy.js";
import { badge, empty, h, keyed, options, say } from "/page/dom.js";
import { clock, count, day, short } from "/page/format.js";
import { live } from "/page/live.js";

const LEVELS = ["", "debug", "info", "warning", "error"];
const LEVEL_WORDS = { "": "all levels", debug: "debug and up", info: "info and up", warning: "warnings and errors", error: "errors" };
const SERVICES = ["router", "autoscaler", "placer", "predictor", "prefetcher", "agent", "engines", "console"];
const KEPT = 2000; // lines in the page
const FIRST = 300; // lines read at first
const EVERY_MS = 1000;
const EVERY_MS_A_SOURCE = 20; // a fleet of 200 nodes is asked every 8 s
const SETTLE_MS = 250;
const FIELD_WORDS = { request_id: "request", trace_id: "trace", decision_id: "decision", event_id: "event" };
const WAYS = {
  request_id: (id) => `#/request/${encodeURIComponent(id)}`,
  trace_id: (id) => `#/trace/${id}`,
  decision_id: decisionAddress,
  event_id: eventAddress,
  model: modelAddress,
};

/** The address of the lines that carry one of these ids. */
export function logsAddress(...ids) {
  return `#/logs/${new URLSearchParams({ id: ids.filter(Boolean).join(",") })}`;
}

/** Filters follow `#/logs/` in the address: `service=router&level=warning&q=bus&id=req-1,i-7f2`. */
export function logsView() {
  const view = new LogsView();
  view.begin();
  return { element: view.element, title: "Logs", close: () => view.close(), keys: [["f", "follow the log, or stop"]] };
}

class LogsView {
  constructor() {
    const wanted = Object.fromEntries(given("logs"));
    this.asked = { service: wanted.service ?? "", node: wanted.node ?? "", level: LEVELS.includes(wanted.level) ? wanted.level : "", model: wanted.model ?? "", q: wanted.q ?? "", id: wanted.id ?? "" };
    this.isFollowing = true;
    this.isClosed = false;
    this.number = 0; // of the latest question
    this.timer = 0;
    this.startOver();
    this.filter = h("input", { type: "search", id: "log-filter", value: this.asked.q, placeholder: "Text in a line", autocomplete: "off" });
    this.service = h("select", { id: "log-service" });
    this.node = h("select", { id: "log-node" });
    this.model = h("select", { id: "log-model" });
    this.level = h("select", { id: "log-level" }, LEVELS.map((one) => h("option", { value: one, selected: one === this.asked.level }, LEVEL_WORDS[one])));
    this.follow = h("button", { type: "button", "aria-pressed": "true", "aria-keyshortcuts": "f", onclick: () => this.setFollowing(!this.isFollowing) }, "Follow");
    this.copy = h("button", { type: "button", onclick: () => copy(this.asText(), this.copy) }, "Copy");
    this.ids = h("p", { class: "ids" });
    this.tally = h("p", { class: "note", role: "status", "aria-live": "off" });
    this.list = h("ol", { class: "log-lines" });
    this.box = h("div", { class: "panel log-box", role: "log", "aria-live": "off", "aria-label": "Log lines, newest last", tabindex: "0" }, this.list);
    this.element = h(
      "div",
      { class: "logs-view" },
      h("h1", { class: "hidden" }, "Logs"),
      h("div", { class: "tools" }, named("log-filter", "Filter by text", this.filter), named("log-service", "Service", this.service), named("log-node", "Node", this.node), named("log-model", "Model", this.model), named("log-level", "Level", this.level), this.follow, this.copy),
      this.ids,
      this.tally,
      this.box,
    );
    this.filter.addEventListener("input", () => this.ask({ q: this.filter.value.trim() }, SETTLE_MS));
    for (const name of ["service", "node", "model", "level"]) this[name].addEventListener("change", () => this.ask({ [name]: this[name].value }));
    this.box.addEventListener("scroll", () => this.scrolled());
    this.onKey = (event) => {
      if (event.key === "f" && !event.ctrlKey && !event.metaKey && !event.altKey && !event.target.matches("input, select, textarea")) this.setFollowing(!this.isFollowing);
    };
    this.drawChoices = () => this.choices();
  }

  begin() {
    document.addEventListener("keydown", this.onKey);
    live.addEventListener("models", this.drawChoices);
    this.choices();
    this.drawIds();
    this.read();
  }

  startOver() {
    this.lines = [];
    this.cursors = {};
    this.sources = [];
    this.numLost = 0;
    this.nextId = 0;
  }

  /** Ask for other lines: from the newest again. */
  ask(change, after_ms = 0) {
    Object.assign(this.asked, change);
    remember("logs", Object.entries(this.asked));
    this.drawIds();
    this.startOver();
    this.number += 1;
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.read(), after_ms);
  }

  setFollowing(is) {
    this.isFollowing = is;
    this.follow.setAttribute("aria-pressed", String(is));
    if (!is) return;
    this.toEnd();
    clearTimeout(this.timer);
    this.read();
  }

  /** Do not scroll away from a reader who has scrolled up. */
  scrolled() {
    const isAtEnd = this.box.scrollHeight - this.box.scrollTop - this.box.clientHeight < 24;
    if (isAtEnd === this.isFollowing || this.isPlacing) return;
    if (!isAtEnd) {
      this.isFollowing = false;
      this.follow.setAttribute("aria-pressed", "false");
    } else this.setFollowing(true);
  }

  async read() {
    this.timer = 0;
    const mine = (this.number += 1);
    if (!document.hidden) await this.readNow(mine);
    const every_ms = Math.max(EVERY_MS, EVERY_MS_A_SOURCE * this.sources.length);
    if (mine === this.number && !this.isClosed && this.isFollowing && !this.isRefused) this.timer = setTimeout(() => this.read(), every_ms);
  }

  async readNow(mine) {
    const { service, node, level, q, id, model } = this.asked;
    const isFirst = !Object.keys(this.cursors).length;
    const body = { cursors: this.cursors, service, node, level, words: [...q.split(/\s+/), model].filter(Boolean).slice(0, 8), ids: id.split(",").filter(Boolean).slice(0, 8), limit: isFirst ? FIRST : KEPT };
    if (isFirst) say(this.tally, "Reading…");
    try {
      const answer = await send("/api/v1/logs", "POST", body);
      if (mine !== this.number || this.isClosed) return;
      this.isRefused = !answer;
      if (!answer) this.refused("Logs are shown to holders of the admin token only.");
      else if (!answer.ok) say(this.tally, `Not read: ${await errorText(answer)}`);
      else this.take(await answer.json());
    } catch (error) {
      console.info("logs could not be read", error);
      if (mine === this.number) say(this.tally, "Not read: the console cannot be reached");
    }
  }

  refused(why) {
    say(this.tally, why);
    this.list.replaceChildren(h("li", null, empty(why), h("button", { type: "button", onclick: () => this.ask({}) }, "Try again")));
  }

  take(page) {
    this.cursors = page.cursors;
    this.sources = page.sources;
    this.numLost += page.sources.reduce((sum, source) => sum + source.num_lost, 0);
    for (const line of page.lines) this.lines.push({ ...line, id: (this.nextId += 1) });
    if (page.lines.length) this.lines.sort((a, b) => a.at - b.at || a.id - b.id);
    const num = this.lines.length;
    if (num > KEPT) this.lines = this.lines.slice(num - KEPT);
    this.draw();
    if (!this.service.options.length || page.sources.length !== this.numSources) this.choices();
  }

  draw() {
    this.isPlacing = true;
    const why = Object.values(this.asked).some(Boolean) ? "No line matches." : "No line yet.";
    keyed(this.list, this.lines.length ? this.lines : [{ id: 0, why }], (line) => line.id, (line) => (line.id ? this.line(line) : h("li", { class: "log-line" }, empty(why))));
    if (this.isFollowing) this.toEnd();
    requestAnimationFrame(() => (this.isPlacing = false));
    const silent = this.sources.filter((source) => source.problem);
    const parts = [`${count(this.lines.length, "line")} of ${count(this.sources.length, "log")}`];
    if (this.numLost) parts.push(`${this.numLost} were lost before they could be read`);
    if (silent.length) parts.push(`not read: ${silent.slice(0, 3).map((source) => `${source.name} (${source.problem})`).join(", ")}${silent.length > 3 ? ` and ${silent.length - 3} more` : ""}`);
    say(this.tally, parts.join("; "));
  }

  toEnd() {
    this.box.scrollTop = this.box.scrollHeight;
  }

  line(line) {
    const { exception, ...fields } = line.fields;
    return h(
      "li",
      { class: `log-line ${line.level}` },
      h("time", { title: day(line.at) }, clock(line.at, true)),
      line.level === "info" ? h("span", { class: "level" }, "info") : badge(line.level, line.level === "debug" ? "quiet" : line.level === "warning" ? "warn" : "bad"),
      h("button", { type: "button", class: "plain source", title: `Only ${line.source}`, onclick: () => this.choose("service", line.source) }, line.source),
      h("span", { class: "text" }, line.text, exception ? h("details", null, h("summary", null, exception.trim().split("\n").at(-1)), h("pre", { tabindex: "0" }, exception)) : null),
      h("span", { class: "fields" }, Object.entries(fields).map(([name, value]) => this.field(name, value))),
    );
  }

  field(name, value) {
    const word = FIELD_WORDS[name] ?? name;
    if (WAYS[name]) return h("a", { href: WAYS[name](value), title: `${word} ${value}` }, `${word} `, h("code", null, short(value)));
    if (name === "instance") return h("a", { href: logsAddress(value), title: `All lines about ${value}`, onclick: (event) => this.onId(event, value) }, "instance ", h("code", null, short(value)));
    return h("span", { title: value }, `${word} `, h("code", null, value.length > 60 ? `${value.slice(0, 60)}…` : value));
  }

  onId(event, id) {
    event.preventDefault();
    this.ask({ id });
  }

  choose(name, value) {
    this.ask({ [name]: value });
    this.choices();
    this[name].focus();
  }

  /** The ids that are asked for; each may be taken back. */
  drawIds() {
    const ids = this.asked.id.split(",").filter(Boolean);
    this.ids.hidden = !ids.length;
    const chip = (id) => h("button", { type: "button", class: "act", "aria-label": `Do not ask for ${id}`, onclick: () => this.ask({ id: ids.filter((one) => one !== id).join(",") }) }, h("code", null, short(id)), " ×");
    this.ids.replaceChildren(...(ids.length ? [h("small", null, "Lines about "), ...ids.flatMap((id, at) => [at ? h("small", null, " or ") : null, chip(id)]).filter(Boolean)] : []));
  }

  choices() {
    this.numSources = this.sources.length;
    const services = [...new Set([...SERVICES, ...this.sources.map((source) => source.name)])];
    options(this.service, [["", "All services"], ...services.map((name) => [name, name])], this.asked.service);
    options(this.node, [["", "All nodes"], ...live.nodes.map(({ node_id }) => [node_id, node_id])], this.asked.node);
    options(this.model, [["", "All models"], ...live.names], this.asked.model);
  }

  asText() {
    return this.lines.map((line) => [new Date(line.at * 1000).toISOString(), line.level, line.source, line.text, ...Object.entries(line.fields).map(([name, value]) => `${name}=${value}`)].join(" ")).join("\n");
  }

  close() {
    this.isClosed = true;
    clearTimeout(this.timer);
    document.removeEventListener("keydown", this.onKey);
    live.removeEventListener("models", this.drawChoices);
  }
}

function named(id, word, input) {
  return h("span", null, h("label", { class: "hidden", for: id }, word), input);
}
