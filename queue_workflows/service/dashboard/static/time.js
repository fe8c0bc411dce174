// Times: the zone of the browser for the server, and ages and the clock that go on.
const root = document.documentElement;
const cookie = "queue_workflows_zone";
const own = Intl.DateTimeFormat().resolvedOptions().timeZone;

if (own && !document.cookie.split("; ").some((each) => each.startsWith(`${cookie}=`))) {
  const path = root.dataset.root.replace(/(.)\/$/, "$1");
  document.cookie = `${cookie}=${own}; path=${path}; max-age=31536000; samesite=lax`;
}

const started = performance.now();
const head = document.getElementById("live");
const shown = Date.parse(head?.dataset.now ?? "") || Date.now();

// The server's clock, so that a wrong clock of this machine changes nothing.
const now = () => shown + performance.now() - started;

const inZone = (zone) => new Intl.DateTimeFormat("en-GB", {timeStyle: "medium", timeZone: zone});
const clock = (() => {
  try {
    return inZone(head?.dataset.zone);
  } catch {
    return inZone("UTC"); // the server may know zones that this browser does not
  }
})();

document.addEventListener("arrived", () => {
  document.getElementById("clock").textContent = clock.format(now());
});

// As the filter `span` of the server.
const span = (seconds) => {
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  const whole = Math.floor(seconds);
  const minutes = Math.floor(whole / 60);
  const hours = Math.floor(minutes / 60);
  const days = Math.floor(hours / 24);
  const two = (number) => String(number).padStart(2, "0");
  if (!minutes) return `${whole} s`;
  if (minutes < 10) return `${minutes} min ${two(whole % 60)} s`;
  if (!hours) return `${minutes} min`;
  if (!days) return `${hours} h ${two(minutes % 60)} min`;
  return hours % 24 && days < 10 ? `${days} d ${hours % 24} h` : `${days} d`;
};

const age = (at) => {
  const seconds = (now() - at) / 1000;
  return seconds >= 0 ? `${span(seconds)} ago` : `in ${span(-seconds)}`;
};

setInterval(() => {
  if (document.hidden) return;
  for (const each of document.querySelectorAll(".age[data-at]")) {
    const text = age(Date.parse(each.dataset.at));
    if (each.textContent !== text) each.textContent = text;
  }
}, 1000);

for (const input of document.querySelectorAll("input#zone")) {
  const list = document.createElement("datalist");
  list.id = "zones";
  for (const name of new Set(["UTC", own, ...(Intl.supportedValuesOf?.("timeZone") ?? [])])) {
    list.append(new Option(name, name));
  }
  input.after(list);
  input.setAttribute("list", "zones");
}
