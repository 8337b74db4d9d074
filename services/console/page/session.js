// Whether this browser may still read the console. When it may not, the login page takes the place of what is shown.

async function session() {
  try {
    const answer = await fetch("/session");
    return answer.ok ? await answer.json() : null;
  } catch {
    return null; // nobody answers: nothing is known
  }
}

/** False, and on the way to the login page, when the session is over. */
export async function isOpen() {
  const now = await session();
  if (now?.open !== false) return true;
  location.reload(); // the console answers with the login page; the view stays in the address
  return false;
}

/** Show the way out where there is one. */
export async function offerLogout(button) {
  button.hidden = !(await session())?.key_asked;
  button.addEventListener("click", async () => {
    sessionStorage.clear();
    await fetch("/logout", { method: "POST" });
    location.replace("/login");
  });
}
