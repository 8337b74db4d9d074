// The login page: sends the key, and goes on to the view that the address names.

const form = document.querySelector("form");
const field = document.getElementById("key");
const button = form.querySelector("button");
const refusal = document.getElementById("refusal");

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
  if (answer.ok && (await answer.json()).open) goOn();
}

form.addEventListener("submit", logIn);
unlessOpen().catch((error) => console.info("the session is not known", error));
