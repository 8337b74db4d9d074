// What a view reads again and again while somebody looks at it.

/**
 * Read JSON from `address()` now, on `load()`, and every `everyMs()` milliseconds while the page is visible: `show(page)`
 * gets it, `failed(text)` why there is none. Of answers that overtake each other only the last one asked for counts.
 */
export function polled({ address, everyMs, show, failed }) {
  let timer = 0;
  let closed = false;
  let number = 0;

  const load = async () => {
    clearTimeout(timer);
    const mine = (number += 1);
    try {
      if (document.hidden) return; // nobody looks: asked again below
      const answer = await fetch(address());
      const page = await answer.json();
      if (closed || mine !== number) return;
      if (answer.ok) show(page);
      else failed(page.error?.message ?? `the console answered ${answer.status}`);
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
