// Keep pages alive: one tab follows the stream for all, each visible one fetches what changed.
const root = document.documentElement;
const state = document.getElementById("live");
const FETCH_MS = 1000;
const POLL_MS = 5000;
const SPEAK_MS = 10000;
const channel = new BroadcastChannel(`queue_workflows ${root.dataset.root}`);
let paused = false;
let stream = null;
let leads = false;
let broken = false;
let due = new Set();
let fetched = 0;
let timer = 0;
let awaited = false;

// Nobody looks at this tab, nor waits for the end of its run.
const away = () => document.hidden && !awaited;

// --- what changed ---------------------------------------------------------------------------

const fits = (element, hint) => (element.dataset.live ?? "").split(" ").some((each) => {
  if (each === "5s") return hint.poll;
  if (each === "jobs") return hint.jobs;
  if (each === "runs") return hint.all || hint.ids?.length > 0;
  if (each.startsWith("run:")) return hint.all || hint.ids?.includes(decodeURIComponent(each.slice(4)));
  return false;
});

const take = (hint) => {
  for (const element of document.querySelectorAll("[data-live]")) {
    if (fits(element, hint)) due.add(element);
  }
  schedule();
};

const rests = () => paused || away() || document.querySelector("details.act[open], dialog[open]")
  || !(document.getSelection()?.isCollapsed ?? true);

const schedule = () => {
  if (timer || !due.size) return;
  timer = setTimeout(fetchDue, Math.max(0, fetched + FETCH_MS - Date.now()));
};

const fetchDue = () => {
  timer = 0;
  if (rests()) {
    if (!away()) timer = setTimeout(fetchDue, FETCH_MS);
    return;
  }
  fetched = Date.now();
  const elements = [...due].filter((element) => element.isConnected);
  due = new Set();
  for (const element of elements) htmx.trigger(element, "refresh");
};

// --- fragments ------------------------------------------------------------------------------

document.addEventListener("htmx:configRequest", (event) => {
  const tag = event.detail.elt.dataset.etag;
  if (tag) event.detail.headers["If-None-Match"] = tag;
});

document.addEventListener("htmx:beforeSwap", (event) => {
  const {xhr, target, elt} = event.detail;
  if (!elt.dataset.live) return;
  event.detail.shouldSwap = false;
  if (xhr.status === 401) {
    location.reload();
    return;
  }
  if (xhr.status === 304) {
    arrived();
    return;
  }
  if (xhr.status !== 200) return;
  const tag = xhr.getResponseHeader("etag");
  if (tag) elt.dataset.etag = tag;
  morph(target, xhr.responseText);
  arrived();
  document.dispatchEvent(new CustomEvent("refreshed"));
});

// Parts whose button was used: their rows are let in, wherever the pointer is.
const admitted = new WeakSet();

// Whether the pointer or the focus is in the table that has the rows beside this new one.
const isUsed = (row) => {
  const beside = [...row.parentNode.children].map((each) => each.id && document.getElementById(each.id));
  const table = beside.find(Boolean)?.closest("table");
  return table?.matches(":hover") || table?.contains(document.activeElement);
};

// Cells change in place; new rows of a list wait behind a button, so that nothing moves.
const morph = (target, text) => {
  const lets = admitted.delete(target);
  let waiting = 0;
  Idiomorph.morph(target, text, {
    morphStyle: "innerHTML",
    ignoreActiveValue: true,
    callbacks: {
      beforeNodeAdded: (node) => {
        const isRow = node instanceof HTMLElement && node.matches("tr[id]");
        if (!isRow || lets || !isUsed(node)) return true;
        waiting += 1;
        return false;
      },
      // What somebody chose or types stays.
      beforeNodeMorphed: (node) => !node.matches?.("input:not([type=hidden]), textarea, select"),
      beforeAttributeUpdated: (name, node) => !(name === "open" && node instanceof HTMLDetailsElement)
        && !(name === "hidden" && node.matches?.("button.copy, [data-close], [data-script]"))
        && !(name === "class" && node.classList?.contains("here")),
    },
  });
  offer(target, waiting);
};

const offer = (target, count) => {
  let button = target.previousElementSibling?.matches(".waiting-rows") ? target.previousElementSibling : null;
  if (!count) {
    button?.remove();
    return;
  }
  if (!button) {
    button = document.createElement("button");
    button.className = "waiting-rows";
    button.type = "button";
    button.dataset.said = "";
    button.addEventListener("click", () => {
      admitted.add(target);
      delete target.dataset.etag;
      button.remove();
      htmx.trigger(target, "refresh");
    });
    target.before(button);
  }
  button.textContent = `${count} new`;
};

const arrived = () => {
  broken = false;
  root.classList.remove("stale");
  const number = document.getElementById("needs")?.dataset.number ?? "0";
  const title = document.title.replace(/^\(\d+\) /, "");
  document.title = number === "0" ? title : `(${number}) ${title}`;
  document.getElementById("shown-needs").textContent = number === "0" ? "" : number;
  document.dispatchEvent(new CustomEvent("arrived"));
  say();
  speak();
  if (!over && document.querySelector("[data-over]")) end();
};

for (const name of ["htmx:sendError", "htmx:responseError", "htmx:timeout"]) {
  document.addEventListener(name, (event) => {
    if (!event.detail.elt?.dataset?.live || event.detail.xhr?.status === 304) return;
    broken = true;
    root.classList.add("stale");
    say();
  });
}

const say = () => {
  const text = paused ? "paused at" : broken ? "not live since" : "live";
  if (state.textContent !== text) state.textContent = text;
  state.className = paused || broken ? "off" : "on";
};

// A screen reader hears the summary of the page alone, and not more often than it can follow.
const summary = () => [...document.querySelectorAll("[data-said]")]
  .map((each) => each.textContent.replace(/\s+/g, " ").trim()).join(" ").slice(0, 400);
let spoken = summary();
let spokenAt = 0;

const speak = () => {
  const text = summary();
  if (text === spoken || Date.now() - spokenAt < SPEAK_MS) return;
  spoken = text;
  spokenAt = Date.now();
  document.getElementById("said").textContent = text;
};

// The button that asks for a notification: until the run is over, a hidden tab follows it too.
const bell = document.querySelector("[data-bell]");
if (bell && "Notification" in window) {
  bell.hidden = false;
  bell.addEventListener("click", async () => {
    awaited = !awaited && await Notification.requestPermission() === "granted";
    bell.setAttribute("aria-pressed", String(awaited));
  });
}

// The run of this page is over.
let over = document.querySelector("[data-over]") !== null;
const end = () => {
  over = true;
  bell?.remove();
  if (awaited) new Notification(document.title, {body: summary()});
  awaited = false;
};

document.addEventListener("pause", () => {
  paused = !paused;
  say();
  schedule();
});

// --- the stream -----------------------------------------------------------------------------

const open = () => {
  // A refusal, such as of too many viewers, ends a stream for good, unlike a lost connection.
  if (stream?.readyState === EventSource.CLOSED) stream = null;
  if (stream || !leads || away() && !others) return;
  stream = new EventSource(state.dataset.stream);
  stream.addEventListener("hint", (event) => {
    const hint = JSON.parse(event.data);
    channel.postMessage({hint});
    take(hint);
  });
};

const close = () => {
  stream?.close();
  stream = null;
};

// The tab that leads keeps the stream while any tab is visible; the others tell it every 5 s.
let others = false;
let seen = 0;
channel.addEventListener("message", (event) => {
  if (event.data.hint) take(event.data.hint);
  if (event.data.visible) {
    seen = Date.now();
    others = true;
    open();
  }
});

const tick = () => {
  // While the service refuses the stream, or no tab can lead, pages do not wait for hints.
  const refused = stream?.readyState === EventSource.CLOSED;
  const polls = refused || !navigator.locks;
  if (refused) channel.postMessage({hint: {jobs: true, all: true}});
  if (!away()) {
    channel.postMessage({visible: true});
    take({poll: true, jobs: polls, all: polls});
  }
  others = Date.now() - seen < 2 * POLL_MS;
  if (away() && !others) close();
  else open();
};

document.addEventListener("visibilitychange", () => {
  if (!document.hidden) {
    take({poll: true, jobs: true, all: true});
    tick();
  }
});

addEventListener("pagehide", close);
navigator.locks?.request(`queue_workflows ${root.dataset.root}`, () => {
  leads = true;
  open();
  return new Promise(() => {});
});
setInterval(tick, POLL_MS);
say();
