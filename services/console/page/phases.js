// The phases of a start, drawn: measured time, and under it the prediction.

import { h } from "/page/dom.js";
import { inLanes, seconds } from "/page/format.js";
import { verdict } from "/page/predicted.js";

export const PHASES = ["decide", "room", "fetch", "launch", "load", "warmup"];
export const PHASE_WORDS = {
  decide: "place it",
  room: "wait for GPU memory",
  fetch: "bring the weights",
  launch: "start the engine",
  load: "load the weights",
  warmup: "warm up",
};

/** One line of bars on the axis 0 to `whole` seconds; `phases` have name, offset_s, duration_s, predicted_s. */
export function phaseBars(phases, whole) {
  const span = Math.max(whole, ...phases.map((phase) => phase.offset_s + Math.max(phase.duration_s, phase.predicted_s)), 1e-9);
  const lanes = inLanes(phases);
  const bars = lanes.flatMap((lane, i) =>
    lane.flatMap((phase) => {
      const place = { top: `${(100 * i) / lanes.length}%`, height: `${100 / lanes.length}%` };
      const bar = (length) => ({ left: `${(100 * phase.offset_s) / span}%`, width: `${Math.max((100 * length) / span, 0.6)}%`, ...place });
      return [
        h("i", { class: `phase ${phase.name}`, style: bar(phase.duration_s) }),
        phase.predicted_s ? h("i", { class: `phase predicted ${phase.name}`, style: bar(phase.predicted_s) }) : null,
      ];
    }),
  );
  return h("span", { class: "phases tall", role: "img", "aria-label": phaseWords(phases) }, bars);
}

function phaseWords(phases) {
  return phases.map((phase) => `${phase.name} ${seconds(phase.duration_s)}${predicted(phase)}`).join(", ");
}

function predicted(phase) {
  return phase.predicted_s ? ` (predicted ${seconds(phase.predicted_s)})` : "";
}

/** The same as a list of words: name, actual, predicted. */
export function phaseList(phases) {
  return h(
    "ul",
    { class: "phase-list" },
    phases.map((phase) =>
      h(
        "li",
        null,
        h("i", { class: `swatch phase ${phase.name}`, "aria-hidden": "true" }),
        phase.name,
        h("b", null, seconds(phase.duration_s)),
        phase.predicted_s ? h("small", { title: "predicted from the starts before it in the whole fleet, or of its engine" }, `predicted ${seconds(phase.predicted_s)}, ${verdict(phase)}`) : null,
      ),
    ),
  );
}
