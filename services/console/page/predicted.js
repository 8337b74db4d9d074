// Predicted against actual, in words.

import { seconds } from "/page/format.js";

const CLOSE = 0.1; // within a tenth, or a hundredth of a second, is as predicted

/** "0.61 s, predicted 0.40 s: 0.21 s longer". A phase has duration_s (below 0 while it goes on) and predicted_s (0: unknown). */
export function gapWords(phase) {
  const took = phase.duration_s < 0 ? "under way" : seconds(phase.duration_s);
  if (!phase.predicted_s) return `${took}, no prediction yet`;
  if (phase.duration_s < 0) return `${took}, predicted ${seconds(phase.predicted_s)}`;
  return `${took}, predicted ${seconds(phase.predicted_s)}: ${verdict(phase)}`;
}

export function verdict(phase) {
  const gap = phase.duration_s - phase.predicted_s;
  if (Math.abs(gap) <= Math.max(0.01, CLOSE * phase.predicted_s)) return "as predicted";
  return gap > 0 ? `${seconds(gap)} longer` : `${seconds(-gap)} shorter`;
}
