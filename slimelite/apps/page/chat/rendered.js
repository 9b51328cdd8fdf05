// Markdown as elements. The server makes the HTML (slimelite/serving/markdown.py), which has passed an allow list; a
// document of its own reads it, where nothing runs, and the policy of this page lets nothing run either.

const sources = new WeakMap(); // element -> the HTML of each of its children

/** Put HTML into `root`. Children that are there already stay, so that a stream changes the end alone. */
function place(root, html) {
  const nodes = [...new DOMParser().parseFromString(html, "text/html").body.childNodes];
  const texts = nodes.map((node) => node.outerHTML ?? node.data);
  const before = sources.get(root) ?? [];
  let same = 0;
  while (same < Math.min(before.length, texts.length) && before[same] === texts[same]) same += 1;
  while (root.childNodes.length > same) root.lastChild.remove();
  for (const node of nodes.slice(same)) {
    root.append(node);
    const codes = node.matches?.(".code") ? [node] : (node.querySelectorAll?.(".code") ?? []);
    for (const code of codes) code.prepend(copyButton(() => code.querySelector("code").textContent.replace(/\n$/, "")));
  }
  sources.set(root, texts);
}

/** Forget what `root` shows. */
function unplace(root) {
  sources.delete(root);
  root.replaceChildren();
}

function copyButton(text) {
  const button = el("button", { class: "quiet copy", onclick: async () => {
    button.textContent = (await copied(text())) ? "Copied" : "Not allowed";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  } }, "Copy");
  return button;
}

/** Copy a text; whether that worked. Pages that come without TLS from another machine have no clipboard of their own. */
async function copied(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text).then(() => true, () => false);
  const box = el("textarea", { class: "away", value: text });
  document.body.append(box);
  box.select();
  const done = document.execCommand("copy");
  box.remove();
  return done;
}

/** A call of a tool: its name, and its arguments one by one. */
function callElement({ function: { name, arguments: written } }) {
  let values = null;
  try {
    values = JSON.parse(written || "{}");
  } catch {} // shown as it was written
  const json = (value) => (JSON.stringify(value).length < 60 ? JSON.stringify(value) : JSON.stringify(value, null, 1));
  const shown = (value) => (typeof value === "string" ? value : json(value));
  const listed = values && typeof values === "object" && !Array.isArray(values);
  return el("div", { class: "call", role: "group", "aria-label": `Call of ${name}` },
    el("div", { class: "name" }, name),
    listed
      ? el("dl", {}, ...Object.entries(values).flatMap(([key, value]) => [el("dt", {}, key), el("dd", { dir: "auto" }, shown(value))]))
      : el("pre", {}, written));
}
