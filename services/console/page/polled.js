// What a view reads again and again while somebody looks at it.

/**
 * A reader of JSON: what it gives of an address is { ok, status, page }, or null where another one was asked for since.
 * Answers overtake each other, and an older one must not replace what a newer one says.
 */
export function newest() {
  let number = 0;
  return async (address) => {
    const mine = (number += 1);
    const answer = await fetch(address);
    const page = await answer.json();
    return mine === number ? { ok: answer.ok, status: answer.status, page } : null;
  };
}

/** Why an answer is none. */
export function whyNot({ status, page }) {
  return page.error?.message ?? `the console answered ${status}`;
}

/**
 * Read JSON from `address()` now, on `load()`, and every `everyMs()` milliseconds while the page is visible: `show(page)`
 * gets it, `failed(text)` why there is none. Of answers that overtake each other only the last one asked for counts.
 */
export function polled({ address, everyMs, show, failed }) {
  const read = newest();
  let timer = 0;
  let closed = false;
  let number = 0;

  const load = async () => {
    clearTimeout(timer);
    const mine = (number += 1);
    try {
      if (document.hidden) return; // nobody looks: asked again below
      const answer = await read(address());
      if (closed || !answer) return;
      if (answer.ok) show(answer.page);
      else failed(whyNot(answer));
    } catch (error) {
      console.info(`${address()} could not be read`, error);
      if (!closed && mine === number) failed("the console does not answer");
    } finally {
      if (!closed && mine === number) timer = setTimeout(load, everyMs());
    }
  };
  const seen = () => document.hidden || load();
  document.addEventListener("visibilitychange", seen);
  return {
    load,
    close: () => {
      closed = true;
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", seen);
    },
  };
}
