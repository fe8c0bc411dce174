// A log follows while its end is in view, and can be wrapped or not.
const END = 24;

const atEnd = (log) => log.scrollHeight - log.scrollTop - log.clientHeight < END;

const follow = () => {
  for (const log of document.querySelectorAll("pre.log[data-follow]")) {
    if (log.dataset.left !== "1") log.scrollTop = log.scrollHeight;
    if (log.dataset.watched) continue;
    log.dataset.watched = "1";
    log.addEventListener("scroll", () => { log.dataset.left = atEnd(log) ? "" : "1"; }, {passive: true});
  }
};

document.addEventListener("change", (event) => {
  const box = event.target;
  if (!(box instanceof HTMLInputElement) || !box.dataset.wrap) return;
  document.getElementById(box.dataset.wrap)?.classList.toggle("unwrapped", !box.checked);
});

follow();
document.addEventListener("refreshed", follow);
