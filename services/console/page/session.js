// Who reads the console, with which role, and whether that still holds. When it does not, the login page takes the place of
// the page. The console itself refuses what a role may not do; the page only says so first.

const ROLES = ["none", "viewer", "operator", "admin"];

async function session() {
  try {
    const answer = await fetch("/session");
    return answer.ok ? await answer.json() : null;
  } catch {
    return null; // no answer: nothing is known
  }
}

const first = session();
let known = null;

/** Learn who is here, before anything is drawn that depends on it. */
export async function knowWho() {
  known = await first;
}

/** The reason why this person lacks the role `least`; null if they have it. */
export function whyNot(least) {
  const role = known?.role ?? "admin"; // not known: the console decides
  return ROLES.indexOf(role) >= ROLES.indexOf(least) ? null : `Your role is ${role}; this needs the role ${least}`;
}

/** False, and on the way to the login page, when the session is over. */
export async function isOpen() {
  const now = await session();
  if (now?.open !== false) return true;
  location.reload(); // the console answers with the login page; the view stays in the address
  return false;
}

/** Show who is here, and the way out, where a login is asked for. */
export function offerLogout(label, button) {
  label.hidden = button.hidden = !known?.key_asked;
  const role = document.createElement("b");
  role.textContent = known?.role ?? "";
  label.replaceChildren(role, ` ${known?.name ?? ""}`);
  label.title = label.textContent;
  button.addEventListener("click", async () => {
    sessionStorage.clear();
    const answer = await fetch("/logout", { method: "POST" });
    location.replace(answer.status === 200 ? (await answer.json()).next : "/login");
  });
}
