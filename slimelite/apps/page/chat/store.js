// Conversations, kept in this browser's IndexedDB: "titles" has {id, title, model, used} of each, "talks" all of them.
// A browser without storage loses the conversations when the page is closed.

const DATABASE = ["slimelite", 1];

/** The result of the request that `ask(stores)` makes. `stores`: name -> object store. */
async function stored(mode, ask) {
  const settled = (request) => new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
  const opening = indexedDB.open(...DATABASE);
  opening.onupgradeneeded = () => {
    for (const name of ["titles", "talks"]) opening.result.createObjectStore(name, { keyPath: "id" });
  };
  const database = await settled(opening);
  try {
    const change = database.transaction(["titles", "talks"], mode);
    return await settled(ask({ titles: change.objectStore("titles"), talks: change.objectStore("talks") }));
  } finally {
    database.close();
  }
}

/** Titles of the conversations, the last used first; null if the browser keeps none. */
async function titles() {
  try {
    return (await stored("readonly", ({ titles }) => titles.getAll())).sort((one, other) => other.used - one.used);
  } catch {
    return null;
  }
}

/** The conversation of this id, if it is there. */
async function kept(id) {
  return stored("readonly", ({ talks }) => talks.get(id)).catch(() => undefined);
}

async function keep(talk) {
  const { id, title, model, used } = talk;
  await stored("readwrite", ({ titles, talks }) => {
    titles.put({ id, title, model, used });
    return talks.put(talk);
  }).catch(() => null); // the list shows that nothing is kept
}

async function forget(id) {
  await stored("readwrite", ({ titles, talks }) => {
    titles.delete(id);
    return talks.delete(id);
  }).catch(() => null);
}

/** The messages of these turns for a request, in OpenAI's format. */
function messagesOf(turns) {
  return turns.flatMap((turn) => {
    if (turn.role === "user") return [{ role: "user", content: turn.content }];
    if (turn.role === "tool") return turn.results.map((result) => ({ role: "tool", ...result }));
    const { content, reasoning, calls } = answerOf(turn);
    if (!content && !reasoning && !calls.length) return [];
    const more = { ...(reasoning ? { reasoning_content: reasoning } : {}), ...(calls.length ? { tool_calls: calls } : {}) };
    return [{ role: "assistant", content, ...more }];
  });
}

/** A conversation as a file: JSON with messages, versions and tokens, or readable Markdown. */
function exported(talk, kind) {
  const system = talk.system ? [{ role: "system", content: talk.system }] : [];
  const messages = [...system, ...messagesOf(talk.turns)];
  if (kind === "json") return JSON.stringify({ ...talk, messages }, null, 1);
  const NAMES = { system: "System", user: "You", assistant: "Model", tool: "Tool" };
  const fence = (name, text) => `\`\`\`\`${name}\n${text}\n\`\`\`\``;
  const part = ({ role, content, reasoning_content: thinking, tool_calls: calls }) => [
    `## ${NAMES[role]}`,
    thinking ? thinking.split("\n").map((line) => `> ${line}`).join("\n") : null,
    role === "tool" ? fence("", content) : content,
    ...(calls ?? []).map((call) => fence("json", JSON.stringify(call.function, null, 1))),
  ].filter(Boolean).join("\n\n");
  return [`# ${talk.title}`, ...messages.map(part)].join("\n\n") + "\n";
}

/** Let the user download a text as a file. */
function download(name, type, text) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  el("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}
