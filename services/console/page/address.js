// The address of a view holds its filters, so that it can be shared: `#/events/plane=tel&model=smol`.

/** The parameters of the address, when it is that of `view`. */
export function asked(view) {
  const [name, ...rest] = location.hash.replace(/^#\/?/, "").split("/");
  return new URLSearchParams(name === view ? rest.join("/") : "");
}

/** Write parameters into the address without opening the view again. Empty ones are left out. */
export function remember(view, pairs) {
  const text = new URLSearchParams(pairs.filter(([, value]) => value)).toString();
  history.replaceState(null, "", text ? `#/${view}/${text}` : `#/${view}`);
}

export function decisionAddress(id) {
  return `#/decision/${encodeURIComponent(id)}`;
}

export function eventAddress(id) {
  return `#/event/${encodeURIComponent(id)}`;
}

export function modelAddress(key) {
  return `#/model/${encodeURIComponent(key)}`;
}

export function gpuAddress(id) {
  return `#/gpu/${encodeURIComponent(id)}`;
}
