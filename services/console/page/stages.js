// Where the time of a request went: one bar cut into stages, and the same in words.

import { emulated, h, panel } from "/page/dom.js";
import { seconds } from "/page/format.js";

const WORDS = {
  queue: "waiting in the queue",
  decide: "deciding where",
  room: "waiting for GPU memory that others give back",
  fetch: "bringing the weights",
  launch: "starting the engine",
  load: "loading the weights",
  warmup: "warming up",
  prefill: "reading the prompt",
  decode: "writing the answer",
  answer: "answering (no first token seen)",
  other: "elsewhere: router, network, events that are not here",
};

export function drawStages(stages, isEmulated) {
  if (!stages.length) return [];
  const whole = stages.reduce((sum, stage) => sum + stage.own_s, 0);
  const share = (stage) => `${((100 * stage.own_s) / whole).toFixed(stage.own_s / whole < 0.01 ? 1 : 0)} %`;
  const bar = h(
    "div",
    { class: "stage-bar", role: "img", "aria-label": stages.map((stage) => `${stage.name} ${share(stage)}`).join(", ") },
    stages.filter((stage) => stage.own_s > 0).map((stage) => h("i", { class: `stage p-${stage.name}`, style: { width: `${(100 * stage.own_s) / whole}%` }, title: `${WORDS[stage.name]}: ${seconds(stage.own_s)}` })),
  );
  const lines = stages.map((stage) => {
    const more = stage.seconds - stage.own_s > 0.0005 ? `, ${seconds(stage.seconds)} with overlaps` : "";
    return h(
      "li",
      { title: WORDS[stage.name] },
      h("i", { class: `swatch stage p-${stage.name}`, "aria-hidden": "true" }),
      stage.name,
      h("b", null, seconds(stage.own_s)),
      h("small", null, share(stage) + more),
    );
  });
  return [panel("Where the time went", "trace-stages", bar, h("ul", { class: "stage-list" }, lines, isEmulated ? h("li", null, emulated(true)) : null))];
}
