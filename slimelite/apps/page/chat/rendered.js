// Markdown as elements. The server makes the HTML from an allow list (slimelite/serving/markdown.py). A separate
// document parses the HTML without running scripts, and the policy of this page allows no scripts in it either.

const sources = new WeakMap(); // element -> the HTML of each of its children

/** Put HTML into `root`. Unchanged children stay, so a stream changes only the end. */
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

/** Forget the content of `root`. */
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

/** Copy a text. Returns whether it worked. Pages from another machine without TLS cannot use navigator.clipboard. */
async function copied(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text).then(() => true, () => false);
  const box = el("textarea", { class: "away", value: text });
  document.body.append(box);
  box.select();
  const done = document.execCommand("copy");
  box.remove();
  return done;
}

/** A tool call: its name, and one line for each argument. */
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
