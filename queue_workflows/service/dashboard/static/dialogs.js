// Questions before an act: the safe button has the focus, Escape closes; copying; messages end.
document.addEventListener("toggle", (event) => {
  const box = event.target;
  if (!(box instanceof HTMLDetailsElement) || !box.matches("details.act")) return;
  if (!box.open) return;
  for (const other of document.querySelectorAll("details.act[open]")) {
    if (other !== box) other.open = false;
  }
  const safe = box.querySelector("[data-close]");
  if (safe) {
    safe.hidden = false;
    safe.focus();
  }
}, true);

document.addEventListener("click", async (event) => {
  const target = event.target instanceof Element ? event.target : null;
  if (target?.closest("[data-close]")) {
    close(target.closest("details.act"));
    return;
  }
  const copy = target?.closest("[data-copy]");
  if (copy) {
    try {
      await navigator.clipboard.writeText(copy.dataset.copy);
      copy.textContent = "copied";
    } catch {
      copy.textContent = "select it";
    }
    setTimeout(() => { copy.textContent = "copy"; }, 1500);
  }
});

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") close(document.querySelector("details.act[open]"));
});

const close = (box) => {
  if (!box) return;
  box.open = false;
  box.querySelector("summary")?.focus();
};

// A form is sent once; the server would answer a second POST as the first.
document.addEventListener("submit", (event) => {
  const form = event.target;
  if (form.method !== "post") return;
  if (form.dataset.sent) event.preventDefault();
  form.dataset.sent = "1";
});
addEventListener("pageshow", () => {
  for (const form of document.querySelectorAll("form[data-sent]")) delete form.dataset.sent;
});

// A checkbox `whole` stands for all of its form, until one of them is not checked any more.
document.addEventListener("change", (event) => {
  const box = event.target;
  const whole = box.form?.elements.whole;
  if (whole && box.name === "id" && !box.checked) whole.checked = false;
  if (!whole || box !== whole) return;
  for (const each of box.form.querySelectorAll("input[type=checkbox][name=id]")) each.checked = box.checked;
});

// Parts that need scripts.
const show = () => {
  for (const each of document.querySelectorAll("button.copy[hidden], [data-script][hidden]")) each.hidden = false;
};
show();
document.addEventListener("refreshed", show);

for (const flash of document.querySelectorAll("[data-flash]")) {
  const url = new URL(location);
  url.searchParams.delete("did");
  history.replaceState(history.state, "", url);
  setTimeout(() => flash.querySelector(".act")?.remove(), 30000);
}
