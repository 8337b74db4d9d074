// The login page: sends the key, and goes on to the view that the address names.

const form = document.querySelector("form");
const field = document.getElementById("key");
const button = form.querySelector("button");
const refusal = document.getElementById("refusal");

const elsewhere = document.getElementById("elsewhere");
const FAILED = {
  no_role: "You are logged in there, but none of your groups has a role here. Ask the operator of this fleet.",
  refused: "The login was cancelled.",
  stale: "The login took too long, or was started in another browser. Try again.",
  unreachable: "The login service does not answer. Try again, or use a key.",
};

const goOn = () => location.replace(`/${location.hash}`);

async function logIn(event) {
  event.preventDefault();
  refusal.textContent = "";
  button.disabled = true;
  try {
    const body = JSON.stringify({ key: field.value.trim() });
    const answer = await fetch("/login", { method: "POST", headers: { "Content-Type": "application/json" }, body });
    if (answer.ok) return goOn();
    const again = answer.headers.get("retry-after");
    const { error } = await answer.json();
    refusal.textContent = error.message + (again ? ` Try again in ${again} s.` : "");
  } catch (error) {
    console.info("the key could not be sent", error);
    refusal.textContent = "The console cannot be reached.";
  }
  button.disabled = false;
  field.select();
}

/** A link on another site does not bring the session's cookie along; from here it goes with every request. */
async function unlessOpen() {
  const answer = await fetch("/session");
  const known = answer.ok ? await answer.json() : {};
  if (known.open) return goOn();
  elsewhere.hidden = !known.oidc;
  elsewhere.textContent = `Log in at ${known.oidc}`;
  elsewhere.href = `/login/oidc?view=${encodeURIComponent(location.hash)}`;
}

const failed = new URLSearchParams(location.search).get("failed");
if (failed) {
  refusal.textContent = FAILED[failed] ?? "The login failed. The console's log says why.";
  history.replaceState(null, "", `/login${location.hash}`);
}

form.addEventListener("submit", logIn);
unlessOpen().catch((error) => console.info("the session is not known", error));
