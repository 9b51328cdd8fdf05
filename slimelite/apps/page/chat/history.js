// The list of conversations that this browser keeps, and the conversation as a file.

/** The card of conversations. `on`: {open(id), forgotten(id), talk()}. */
function historyElement(on) {
  ui.talks = el("ul", { class: "talks" });
  const save = (kind, type) => el("button", { class: "quiet", onclick: () => {
    const talk = on.talk();
    download(`${talk.title.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40) || "conversation"}.${kind}`, type, exported(talk, kind));
  } }, kind === "json" ? "JSON" : "Markdown");
  ui.listTalks = async () => {
    const all = await titles();
    const item = ({ id, title }) => el("li", { "aria-current": String(id === on.talk().id) },
      el("button", { class: "link", dir: "auto", title, onclick: () => on.open(id) }, title),
      el("button", { class: "quiet", title: "delete this conversation", "aria-label": `Delete ${title}`, onclick: async () => {
        on.forgotten(id);
        await forget(id);
        await ui.listTalks();
      } }, "✕"));
    ui.talks.replaceChildren(...(all ?? []).map(item));
    ui.kept.textContent = all === null ? "This browser keeps no conversations." : all.length ? "" : "None yet.";
  };
  ui.kept = el("p", { class: "dim small" });
  return el("details", { class: "card history", open: innerWidth > 1000 }, el("summary", {}, "Conversations"),
    ui.talks, ui.kept, el("div", { class: "small dim export" }, "save this conversation as ", save("json", "application/json"), save("md", "text/markdown")));
}
