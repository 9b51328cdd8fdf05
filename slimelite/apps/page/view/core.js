// The base of the page: durations as text, the payload and tabs. All files of this folder follow it in a single script,
// which begins with slimelite/apps/page/elements.js. A tab is one file that calls
//
//     tab("name", "Title", render, wanted);
//
// The page has the tab if wanted(data) is true, or if there is no `wanted`.
// render(root, data) runs once, when the tab is first opened, and fills the element `root`. If it returns a function,
// each later view of the tab calls it with the URLSearchParams of the address. `go("samples", {run: 0, rollout: 12})`
// leads to #samples?run=0&rollout=12. Text from a run enters the page only through `el`, which sets textContent.

/** A duration as on the console: 0.35s, 7.1s, 42s, 3m05s, 2h07m. */
function duration(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  if (seconds < 10) return seconds.toFixed(seconds < 1 ? 2 : 1) + "s";
  const whole = Math.round(seconds);
  const two = (n) => String(n).padStart(2, "0");
  if (whole < 60) return `${whole}s`;
  if (whole < 3600) return `${Math.floor(whole / 60)}m${two(whole % 60)}s`;
  return `${Math.floor(whole / 3600)}h${two(Math.floor((whole % 3600) / 60))}m`;
}

/** A sentence as elements, its flags as code. */
function prose(text) {
  return text.split(/(--[a-z][a-z0-9-]*)/).map((part, i) => (i % 2 ? el("code", {}, part) : part));
}

/** Decode base64 and deflate in the background. Gives an ArrayBuffer. */
async function inflate(text) {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).arrayBuffer();
}

/** A dot in the colour of a run, and its name. */
function runName(run) {
  return el("span", { class: "run-name" }, el("i", { class: "dot", style: { background: run.color } }), run.name);
}

const PLURALS = { rollout: "rollouts", batch: "batches" }; // of the unit of a run

const tabs = new Map();

/** Register a tab; see the head of this file. */
function tab(name, title, render, wanted = () => true) {
  const button = el("button", { role: "tab", id: `tab-${name}`, "aria-controls": `panel-${name}`, tabindex: -1 }, title);
  const panel = el("section", { role: "tabpanel", id: `panel-${name}`, "aria-labelledby": `tab-${name}`, hidden: true });
  tabs.set(name, { button, panel, render, wanted, opened: false, shown: null });
}

/** The address of a view of the page, for links. */
function address(name, params = {}) {
  const query = new URLSearchParams(params).toString();
  return `#${name}${query ? "?" + query : ""}`;
}

/** Open a view of a tab at once. A change of location.hash would open it a little later. */
function go(name, params = {}) {
  const place = address(name, params);
  if (location.hash !== place) history.pushState(null, "", place);
  open();
}

let everything = null; // the payload, once the page has started

function open() {
  const [wanted, query] = location.hash.slice(1).split("?");
  const name = tabs.has(wanted) ? wanted : tabs.keys().next().value;
  for (const [other, { button, panel }] of tabs) {
    button.setAttribute("aria-selected", other === name);
    button.tabIndex = other === name ? 0 : -1;
    panel.hidden = other !== name;
  }
  if (open.now && open.now !== name) scrollTo(0, 0);
  open.now = name;
  const entry = tabs.get(name);
  if (!entry.opened) {
    entry.opened = true;
    entry.shown = entry.render(entry.panel, everything) ?? null;
  }
  if (entry.shown) entry.shown(new URLSearchParams(query ?? ""));
}

/** Arrow keys, Home and End move along the tabs. */
function moveAlong(event) {
  const names = [...tabs.keys()];
  const now = names.findIndex((name) => tabs.get(name).button === document.activeElement);
  const steps = { ArrowRight: now + 1, ArrowLeft: now - 1, Home: 0, End: names.length - 1 };
  if (now < 0 || !(event.key in steps)) return;
  event.preventDefault();
  const next = names[(steps[event.key] + names.length) % names.length];
  go(next);
  tabs.get(next).button.focus();
}

/** The payload, with every series as {x, y}. The file has each list of x only once, and NaN and infinities as text. */
function payload() {
  const data = JSON.parse(document.getElementById("data").textContent);
  for (const run of data.runs) {
    for (const [name, [axis, y]] of Object.entries(run.series)) run.series[name] = { x: run.axes[axis], y: y.map(Number) };
  }
  return data;
}

function start() {
  const data = (everything = payload());
  for (const [name, { wanted }] of [...tabs]) if (!wanted(data)) tabs.delete(name);
  const bar = el("div", { role: "tablist", "aria-label": "Parts of the page", onkeydown: moveAlong });
  for (const [name, { button }] of tabs) {
    button.addEventListener("click", () => go(name));
    bar.append(button);
  }
  document.body.append(
    el("header", {}, el("h1", {}, "slimelite"), bar, el("span", { class: "spring" }), written(data), themeButton()),
    el("main", {}, ...[...tabs.values()].map((entry) => entry.panel)),
  );
  addEventListener("hashchange", open);
  open();
}

/** The time when the file was written. A page that is rewritten during the run also has a switch for reloads. */
function written(data) {
  const when = new Date(data.written * 1000);
  const text = el("time", { datetime: when.toISOString(), title: when.toISOString() }, `written ${when.toLocaleString([], { dateStyle: "medium", timeStyle: "short" })}`);
  if (!data.live) return text;
  const box = el("input", { type: "checkbox" });
  const stored = "slimelite-reload";
  let timer = null;
  const set = () => {
    clearInterval(timer);
    if (box.checked) timer = setInterval(() => location.reload(), data.live * 1000);
    try {
      sessionStorage.setItem(stored, box.checked ? "1" : "");
    } catch {} // without storage, the switch is off after a reload
  };
  try {
    box.checked = Boolean(sessionStorage.getItem(stored));
  } catch {}
  box.addEventListener("change", set);
  set();
  return el("span", { class: "written" }, text, el("label", {}, box, ` reload every ${data.live}s`));
}

addEventListener("DOMContentLoaded", start);
