// A log follows while its end is in view, and can be wrapped or not.
const END = 24;
// Not attributes: a refreshed page would take them away.
const watched = new WeakSet();
const left = new WeakSet();

const atEnd = (log) => log.scrollHeight - log.scrollTop - log.clientHeight < END;

const follow = () => {
  for (const log of document.querySelectorAll("pre.log[data-follow]")) {
    const box = document.querySelector(`[data-wrap="${log.id}"]`);
    log.classList.toggle("unwrapped", box?.checked === false);
    if (!watched.has(log)) {
      watched.add(log);
      if (log.querySelector(":target")) left.add(log);
      log.addEventListener("scroll", () => { left[atEnd(log) ? "delete" : "add"](log); }, {passive: true});
    }
    if (!left.has(log)) log.scrollTop = log.scrollHeight;
  }
};

document.addEventListener("change", (event) => {
  const box = event.target;
  if (!(box instanceof HTMLInputElement) || !box.dataset.wrap) return;
  document.getElementById(box.dataset.wrap)?.classList.toggle("unwrapped", !box.checked);
});

follow();
document.addEventListener("refreshed", follow);
