// A hue for every model and service: the same one on each page and each day, and apart from its neighbours.

const SERVICES = {
  router: 70,
  autoscaler: 300,
  placer: 190,
  prefetcher: 245,
  agent: 150,
  engine: 350,
  llamacpp: 350,
  vllm: 350,
  predictor: 115,
};
const STEPS = 12;

function hash(text) {
  let value = 2166136261;
  for (let i = 0; i < text.length; i += 1) value = Math.imul(value ^ text.charCodeAt(i), 16777619);
  return value >>> 0;
}

/** Hues by key. Two keys share one only when there are more keys than steps. */
export function hues(keys) {
  const taken = new Set();
  const given = new Map();
  for (const key of [...keys].sort()) {
    let step = hash(key) % STEPS;
    for (let i = 0; i < STEPS && taken.has(step) && taken.size < STEPS; i += 1) step = (step + 5) % STEPS;
    taken.add(step);
    given.set(key, (step * 360) / STEPS + 15);
  }
  return given;
}

/** Hues of the lines of one chart, as far apart as so many can be. */
export function apart(keys) {
  return new Map(keys.map((key, i) => [key, (75 + (i * 360) / Math.max(3, keys.length)) % 360]));
}

export function plainService(name) {
  return name.replace(/^glowplug-/, "");
}

export function serviceHue(name) {
  const plain = plainService(name).replace(/-\d+$/, "");
  return SERVICES[plain] ?? (hash(plain) % STEPS) * 30;
}
