// Repeated reads of a visible view.

/**
 * Return a reader of JSON: it gives { ok, status, page } of an address, or null if another was asked for since.
 * Answers overtake each other, and an older one must not replace a newer one.
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
 * Read JSON from `address()` now, on `load()`, and every `everyMs()` milliseconds (null: not again) while the page is visible: `show(page)`
 * gets it, `failed(text, status)` why there is none (no status: no answer). Of answers that overtake each other only the last one asked for counts.
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
      if (document.hidden) return; // hidden: asked again below
      const answer = await read(address());
      if (closed || !answer) return;
      if (answer.ok) show(answer.page);
      else failed(whyNot(answer), answer.status);
    } catch (error) {
      console.info(`${address()} could not be read`, error);
      if (!closed && mine === number) failed("the console does not answer");
    } finally {
      if (!closed && mine === number && everyMs() !== null) timer = setTimeout(load, everyMs());
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
