// Properties of the fleet's values, as the domain has them.

import { live } from "/page/live.js";

export function memoryBytes(model) {
  return model.weights_bytes + model.kv_bytes;
}

export function nodeOf(instance) {
  return instance.workers[0]?.node_id ?? "";
}

export function placeOf(instance) {
  return instance.workers[0]?.gpu_id || nodeOf(instance);
}

export function bytesOf(instance) {
  if (instance.state === "swapped_out" && instance.host_bytes) return instance.host_bytes; // of host memory
  return instance.workers.reduce((sum, worker) => sum + worker.num_bytes, 0);
}

export function isDrained(node) {
  return node.draining || node.cordoned;
}

export function bytesInFlight(node) {
  return node.links.reduce((sum, link) => sum + link.bytes_in_flight, 0);
}

/** Of weights that several read, the bytes are in no grant. */
function sharedOn(gpu) {
  return gpu.shared.filter((weights) => weights.holders.length > 1);
}

/** Sleeping engines' memory counts as free. */
export function usedBytes(gpu) {
  let used = 0;
  for (const grant of gpu.grants) used += grant.num_bytes;
  for (const weights of sharedOn(gpu)) used += weights.num_bytes;
  return Math.min(used, gpu.total_bytes);
}

export function holdersOn(gpu) {
  return [...gpu.grants, ...gpu.sleepers].map((grant) => grant.holder);
}

/** Whose bytes a GPU holds, each counted once, with the model of the (first) holder: "" if unknown. */
export function slicesOf(gpu) {
  const own = [...gpu.grants, ...gpu.sleepers].map(({ holder, owner, num_bytes }) => ({ holders: [holder], owner, num_bytes }));
  const shared = sharedOn(gpu).map(({ holders, num_bytes }) => ({ holders, owner: "shared", num_bytes }));
  return [...own, ...shared]
    .filter((slice) => slice.num_bytes)
    .map((slice) => {
      const instance = live.instances.get(slice.holders[0]);
      return { ...slice, holder: slice.holders.join(", "), model_key: instance?.model_key ?? "", emulated: Boolean(instance?.emulated) };
    });
}

/** Seconds that a start took; 0 while it goes on. */
export function secondsOf(start) {
  return start.ended_at ? start.ended_at - start.began_at : 0;
}

/** Why a start failed, or "". An engine that fails once it was ready is no failed start. */
export function failureOf({ instance }) {
  return instance.state === "failed" && !instance.ready_at ? instance.reason || "no reason given" : "";
}

/** The phases of a start in order, as stretches of its time. `duration_s` is -1 of one that goes on. */
export function phasesOf(start) {
  return start.instance.phases
    .toSorted((a, b) => a.started_at - b.started_at || a.ended_at - b.ended_at)
    .map(({ name, started_at, ended_at, predicted_s }) => ({
      name,
      offset_s: started_at - start.began_at,
      duration_s: ended_at ? Math.max(0, ended_at - started_at) : -1,
      predicted_s,
    }));
}
