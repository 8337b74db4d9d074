// Numbers and times as people read them. Seconds and bytes in, text out.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export function bytes(count) {
  let unit = 0;
  let value = count;
  while (value >= 1024 && unit < UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${value >= 100 || unit === 0 || Number.isInteger(value) ? Math.round(value) : value.toFixed(1)} ${UNITS[unit]}`;
}

const STATE_WORDS = { swapped_out: "asleep", waiting: "waiting for room" };

/** The state of a model or an instance in the words that people are shown, here and by `glowplug`. */
export function stateWord(state) {
  return STATE_WORDS[state] ?? state;
}

export function rate(bytesPerS) {
  return `${bytes(bytesPerS)}/s`;
}

export function seconds(value) {
  if (!Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0 s";
  if (size < 0.0009995) return `${Math.round(value * 1e6)} µs`;
  if (size < 0.01) return `${(value * 1e3).toFixed(1)} ms`;
  if (size < 0.9995) return `${Math.round(value * 1e3)} ms`;
  if (size < 10) return `${value.toFixed(2)} s`;
  if (size < 100) return `${value.toFixed(1)} s`;
  if (size < 3600) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  return `${Math.floor(value / 3600)} h ${Math.round((value % 3600) / 60)} min`;
}

export function clock(epoch, withMillis = false) {
  if (!epoch) return "–";
  const date = new Date(epoch * 1000);
  const two = (n) => String(n).padStart(2, "0");
  const text = `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
  return withMillis ? `${text}.${String(date.getMilliseconds()).padStart(3, "0")}` : text;
}

export function day(epoch) {
  return new Date(epoch * 1000).toLocaleString();
}

export function count(number, one, many = `${one}s`) {
  return `${number} ${number === 1 ? one : many}`;
}

export function short(id) {
  return id.length > 16 ? `${id.slice(0, 8)}…${id.slice(-4)}` : id;
}

/** Round marks of a time axis: about `wanted` of them over `span` seconds, each 1, 2 or 5 times a power of ten. */
export function ticks(span, wanted = 6) {
  if (!(span > 0)) return { step: 1, marks: [0] };
  const rough = span / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const marks = [];
  for (let i = 0; i * step <= span * 1.0001; i += 1) marks.push(i * step);
  return { step, marks };
}

/** A tick's label in the unit of the whole axis, so that all labels of one axis agree. */
export function mark(value, span) {
  if (value === 0) return "0";
  if (span < 0.002) return `${trim(value * 1e6)} µs`;
  if (span < 2) return `${trim(value * 1e3)} ms`;
  if (span < 240) return `${trim(value)} s`;
  return `${trim(value / 60)} min`;
}

function trim(value) {
  return String(Number(value.toPrecision(6)));
}

/** Stretches of time (`offset_s`, `duration_s`, by start) in as few lanes as they need without overlap. */
export function inLanes(stretches, slack = 1e-6) {
  const lanes = [];
  for (const stretch of stretches) {
    const lane = lanes.find((taken) => taken.end <= stretch.offset_s + slack) ?? lanes[lanes.push({ end: 0, stretches: [] }) - 1];
    lane.end = stretch.offset_s + stretch.duration_s;
    lane.stretches.push(stretch);
  }
  return lanes.map((lane) => lane.stretches);
}
