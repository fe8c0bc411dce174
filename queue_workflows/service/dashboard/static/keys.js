// Keys move and open, and never act: / search, j k Enter rows, g and a letter pages, p pause, ? help.
const typing = (element) => element?.matches?.("input, textarea, select, [contenteditable]");
const STORED = "queue_workflows keys";
const areOff = () => localStorage.getItem(STORED) === "off";
let after = "";

const rows = () => [...document.querySelectorAll("table.rows tbody tr, .needs li")]
  .filter((row) => row.querySelector("a[href]"));

const move = (step) => {
  const all = rows();
  if (!all.length) return;
  const at = all.findIndex((row) => row.classList.contains("here"));
  const next = all[Math.max(0, Math.min(all.length - 1, at < 0 ? (step > 0 ? 0 : all.length - 1) : at + step))];
  for (const row of all) row.classList.toggle("here", row === next);
  next.querySelector("a[href]").focus({preventScroll: true});
  next.scrollIntoView({block: "nearest"});
};

const help = () => {
  let box = document.getElementById("help");
  if (!box) {
    box = document.createElement("dialog");
    box.id = "help";
    box.setAttribute("aria-label", "Keys");
    const lines = [["/", "search"], ["j k", "next and previous row"], ["Enter", "open it"], ["p", "pause updates"], ["Esc", "close"]];
    for (const link of document.querySelectorAll("header nav a[data-key]")) {
      lines.push([`g ${link.dataset.key}`, link.firstChild.textContent.trim()]);
    }
    const list = document.createElement("dl");
    for (const [key, text] of lines) {
      const term = document.createElement("dt");
      const shown = document.createElement("kbd");
      shown.textContent = key;
      term.append(shown);
      const what = document.createElement("dd");
      what.textContent = text;
      list.append(term, what);
    }
    const areOn = document.createElement("input");
    areOn.type = "checkbox";
    areOn.checked = !areOff();
    areOn.addEventListener("change", () => localStorage.setItem(STORED, areOn.checked ? "on" : "off"));
    const label = document.createElement("label");
    label.append(areOn, " Keys are on in this browser");
    const button = document.createElement("button");
    button.textContent = "Close";
    button.autofocus = true;
    button.addEventListener("click", () => box.close());
    const answers = document.createElement("p");
    answers.append(label);
    box.append(list, answers, button);
    document.body.append(box);
  }
  box.showModal();
};

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || typing(event.target) || areOff()) return;
  const before = after;
  after = "";
  if (before === "g") {
    const link = document.querySelector(`header nav a[data-key="${CSS.escape(event.key)}"]`);
    if (link) link.click();
    return;
  }
  switch (event.key) {
    case "/": {
      const field = document.querySelector("[data-find]") ?? document.getElementById("search");
      field?.focus();
      field?.select();
      event.preventDefault();
      break;
    }
    case "j": move(1); break;
    case "k": move(-1); break;
    case "g": after = "g"; setTimeout(() => { after = ""; }, 1500); break;
    case "p": document.dispatchEvent(new CustomEvent("pause")); break;
    case "?": help(); break;
    default:
  }
});

document.querySelector("[data-keys]")?.addEventListener("click", help);
