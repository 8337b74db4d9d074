// One chat completion, streamed through the console: its head, comments and events. No DOM here.

const CHAT = "/playground/v1/chat/completions";
const TIMING = /([a-z_]+);dur=([0-9.]+)/gi;

/** A failure, as the router says it. `status` is 0 without an answer. */
class ChatFailed extends Error {
  constructor(message, { status = 0, code = "", retryAfter = "" } = {}) {
    super(message);
    Object.assign(this, { status, code, retryAfter });
  }
}

/**
 * Ask, and call `on`: `head(facts)` once, `waiting({ eta_s })` while held, `ready(timings)`,
 * `text(piece, isThought)` for each piece. Returns { finish, usage }. Raises ChatFailed, or AbortError when stopped.
 */
export async function chat(body, { key, signal, on }) {
  const headers = { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  let answer;
  try {
    answer = await fetch(CHAT, { method: "POST", headers, body: JSON.stringify(body), signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ChatFailed("the console cannot be reached");
  }
  on.head(facts(answer.headers));
  if (!answer.ok) throw await failure(answer);
  const state = { finish: "", usage: null, done: false };
  try {
    for await (const line of lines(answer.body)) take(line, state, on);
  } catch (error) {
    if (error.name === "AbortError" || error instanceof ChatFailed) throw error;
    throw new ChatFailed("the answer ended early");
  }
  if (!state.done) throw new ChatFailed("the answer ended early: it has no end");
  return state;
}

function facts(headers) {
  const [, traceId = "", , flags = "0"] = (headers.get("traceparent") ?? "").split("-");
  return {
    requestId: headers.get("x-request-id") ?? "",
    instanceId: headers.get("x-glowplug-instance") ?? "",
    emulated: headers.get("x-glowplug-emulated") === "1",
    traceId: Number.parseInt(flags, 16) & 1 ? traceId : "",
    timings: timings(headers.get("server-timing") ?? ""),
  };
}

/** Server-Timing in seconds by name. */
function timings(text) {
  return Object.fromEntries([...text.matchAll(TIMING)].map(([, name, ms]) => [name, Number(ms) / 1000]));
}

async function failure(answer) {
  let error = {};
  try {
    error = (await answer.json()).error ?? {};
  } catch {
    error = {}; // a proxy's page
  }
  const about = { status: answer.status, code: error.code ?? "", retryAfter: answer.headers.get("retry-after") ?? "" };
  return new ChatFailed(error.message ?? `the router answered ${answer.status}`, about);
}

async function* lines(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let kept = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    const parts = (kept + value).split(/\r?\n/);
    kept = parts.pop();
    yield* parts;
  }
  if (kept) yield kept;
}

function take(line, state, on) {
  if (line.startsWith(":")) {
    if (line.includes("glowplug waiting")) on.waiting({ eta_s: Number(/eta_s=([0-9.]+)/.exec(line)?.[1] ?? 0) });
    if (line.includes("glowplug ready")) on.ready(timings(line));
    return;
  }
  if (!line.startsWith("data:")) return;
  const data = line.slice(5).trim();
  if (data === "[DONE]") {
    state.done = true;
    return;
  }
  const event = JSON.parse(data);
  if (event.error) throw new ChatFailed(event.error.message ?? "the answer ended early", { code: event.error.code ?? "" });
  if (event.usage) state.usage = event.usage;
  const choice = event.choices?.[0];
  if (!choice) return;
  const thought = choice.delta?.reasoning_content ?? choice.delta?.reasoning;
  if (thought) on.text(thought, true);
  if (choice.delta?.content) on.text(choice.delta.content, false);
  if (choice.finish_reason) state.finish = choice.finish_reason;
}

/** The same request as a command for a shell. The key, when there is one, is left to the shell's environment. */
export function asCurl(router, body, hasKey) {
  const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
  const key = hasKey ? ' \\\n  -H "Authorization: Bearer $GLOWPLUG_API_KEY"' : "";
  return `curl -N ${quoted(`${router}/v1/chat/completions`)} \\\n  -H 'Content-Type: application/json'${key} \\\n  -d ${quoted(JSON.stringify(body))}`;
}
