// A command to take into a terminal: shown, and copied with one press.

import { h } from "/page/dom.js";

/** `text` may be changed later with `set`. */
export function commandLine(text, label = "Copy as command") {
  const code = h("code", { class: "command-text" }, text);
  const button = h("button", { type: "button", class: "act", onclick: () => copy(code.textContent, button) }, label);
  const element = h("p", { class: "command" }, code, button);
  return { element, set: (fresh) => code.textContent !== fresh && (code.textContent = fresh) };
}

/** Put text on the clipboard and say so in `button` for a moment. */
export async function copy(text, button) {
  const before = button.textContent;
  const done = (await clipboard(text)) ? "Copied" : "Press Ctrl+C";
  button.textContent = done;
  const announcer = document.getElementById("announcer");
  if (announcer) announcer.textContent = done;
  setTimeout(() => button.textContent === done && (button.textContent = before), 1600);
}

async function clipboard(text) {
  try {
    await navigator.clipboard.writeText(text); // there only on https and on this machine
    return true;
  } catch (error) {
    console.info("no clipboard here, trying the old way", error);
  }
  const box = h("textarea", { class: "hidden", "aria-hidden": "true" }, text);
  document.body.append(box);
  box.select();
  const copied = document.execCommand("copy");
  box.remove();
  return copied;
}
