// The chat: a list of turns, the box to write in, and settings. A turn is {role, content, reasoning, pieces,
// finish, ids} and its elements; what the model says enters the page through `el` and text nodes alone, so it is never read as HTML.

const SETTINGS = [
  ["temperature", "Temperature", { min: 0, max: 5, step: 0.1, value: 1 }],
  ["top_p", "Top-p", { min: 0, max: 1, step: 0.05, value: 1 }],
  ["max_tokens", "Max tokens", { min: 1, step: 1, value: 512 }],
  ["seed", "Seed", { step: 1, placeholder: "random" }],
];
const ENDS = { length: "cut off at max tokens", stop: null, tool_calls: "calls tools", stopped: "stopped", abort: "aborted" };

const ALTERNATIVES = 5; // that are shown of a token

const turns = [];
let [model, running] = ["", null]; // running: the AbortController of the answer that comes now
let talks = true; // false: the model has no chat template, and goes on with a text
let following = false; // whether the next frame scrolls to the end
const ui = {};

/** The page's parts, once. */
function build() {
  const field = ([name, title, range]) => {
    ui[name] = el("input", { type: "number", id: `set-${name}`, inputmode: "decimal", ...range });
    return el("label", { for: `set-${name}` }, el("span", {}, title), ui[name]);
  };
  ui.model = el("span", { class: "dim model" });
  ui.system = el("textarea", { id: "system", rows: 3, placeholder: "none" });
  ui.colored = el("input", { type: "checkbox", onchange: () => ui.list.classList.toggle("colored", ui.colored.checked) });
  ui.settings = el("details", { class: "card settings", open: innerWidth > 1000 }, el("summary", {}, "Settings"),
    el("div", { class: "fields" },
      el("label", { for: "system", class: "wide" }, el("span", {}, "System prompt"), ui.system),
      ...SETTINGS.map(field),
      el("label", { class: "wide check" }, ui.colored, "colour tokens by probability")));
  ui.list = el("div", { class: "turns", role: "log", "aria-live": "polite", "aria-label": "Conversation" });
  ui.text = el("textarea", { rows: 1, placeholder: "Ask something", "aria-label": "Message", onkeydown: typed, oninput: grow });
  ui.send = el("button", { class: "send", onclick: () => (running ? running.abort() : ask()) }, "Send");
  const clear = el("button", { class: "quiet", onclick: restart }, "New chat");
  document.body.append(
    el("header", {}, el("h1", {}, "slimelite"), ui.model, el("span", { class: "spring" }), clear, themeButton()),
    el("main", {}, ui.settings, ui.list),
    el("footer", {}, el("div", {}, el("div", { class: "compose" }, ui.text, ui.send),
      el("p", { class: "dim small" }, "Enter sends, Shift+Enter begins a line, Esc stops, ↑ edits the last message"))));
  addEventListener("keydown", (event) => event.key === "Escape" && running?.abort());
  tokenBox(ui.list, ({ piece }) => piece.tokens.map(tokenNumbers), learn);
}

function typed(event) {
  if (event.isComposing) return;
  if (event.key === "Enter" && !event.shiftKey) {
    event.preventDefault();
    if (!running) ask();
  } else if (event.key === "ArrowUp" && !ui.text.value && !running) {
    const last = turns.findLast((turn) => turn.role === "user");
    if (last) event.preventDefault();
    if (last) edit(last);
  }
}

function grow() {
  ui.text.style.setProperty("height", "auto");
  ui.text.style.setProperty("height", `${Math.min(ui.text.scrollHeight + 2, innerHeight / 3)}px`);
}

function ask() {
  const content = ui.text.value.trim();
  if (!content) return;
  put({ role: "user", content });
  ui.text.value = "";
  grow();
  answer();
}

/** Forget the conversation. */
function restart() {
  running?.abort();
  cut(0);
  ui.text.focus();
}

/** Forget the turns from number `start` on. */
function cut(start) {
  for (const turn of turns.splice(start)) turn.root.remove();
  marked();
}

/** Take a message of the user's back into the box; what came after it is forgotten. */
function edit(turn) {
  running?.abort();
  ui.text.value = turn.content;
  cut(turns.indexOf(turn));
  grow();
  ui.text.focus();
}

/** Answer the last message of the user's again. */
function again() {
  cut(turns.findLastIndex((turn) => turn.role === "user") + 1);
  answer();
}

/** Show a new turn. */
function put(turn) {
  const user = turn.role === "user";
  const button = (title, onclick) => el("button", { class: "quiet", onclick }, title);
  turn.thinking = el("div", { class: "text" });
  turn.thoughts = el("details", { class: "thoughts", open: true, hidden: true }, el("summary", {}, "Thinking"), turn.thinking);
  turn.body = el("div", { class: "text" }, user ? turn.content : null);
  turn.calling = el("div", { class: "text calls", hidden: true });
  turn.facts = el("span", { class: "dim small" });
  turn.failure = el("p", { class: "failure", role: "alert", hidden: true });
  const answer = { class: "answer", tabindex: 0, role: "group", "aria-label": "Answer; arrow keys go from token to token" };
  turn.root = el("article", { class: `turn ${turn.role}` },
    el("h3", {}, user ? "You" : "Model"),
    el("div", user ? {} : answer, turn.thoughts, turn.body, turn.calling), turn.failure,
    el("div", { class: "tools" }, turn.facts, user ? button("Edit", () => edit(turn)) : button("Regenerate", again)));
  turns.push(turn);
  ui.list.append(turn.root);
  marked();
  turn.root.scrollIntoView({ block: "end" });
  return turn;
}

/** Regenerate belongs to the last turn alone, and to none while it is being written. */
function marked() {
  turns.forEach((turn, i) => turn.root.classList.toggle("last", i === turns.length - 1 && !running));
}

/** What is sent: the conversation and the settings that are filled in. */
function body() {
  const system = ui.system.value.trim();
  const said = turns.filter((turn) => turn.role === "user" || turn.content || turn.reasoning);
  const messages = said.map(({ role, content, reasoning }) => ({ role, content, ...(reasoning ? { reasoning_content: reasoning } : {}) }));
  const set = SETTINGS.map(([name]) => [name, ui[name].value]).filter(([, value]) => value !== "");
  const numbers = Object.fromEntries(set.map(([name, value]) => [name, Number(value)]));
  if (!talks) return { model, stream: true, prompt: said.findLast((turn) => turn.role === "user").content, ...numbers };
  return {
    model, stream: true, logprobs: true, return_token_ids: true,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
    ...numbers,
  };
}

/** Get an answer to the conversation and show it as it comes. */
async function answer() {
  const asked = body();
  const turn = put({ role: "assistant", content: "", reasoning: "", pieces: [] });
  const control = (running = new AbortController());
  const began = performance.now();
  let [waiting, calls] = [[], null]; // waiting: tokens whose text has not come yet
  ui.send.textContent = "Stop";
  turn.root.classList.add("writing");
  marked();
  try {
    for await (const { choices: [choice] = [] } of chunks(asked, control.signal)) {
      if (!choice) continue;
      waiting = [...waiting, ...(choice.logprobs?.content ?? [])];
      if (write(turn, choice.delta ?? { content: choice.text }, waiting)) waiting = [];
      if (choice.delta?.tool_calls) calls = choice.delta.tool_calls;
      turn.finish = choice.finish_reason ?? turn.finish;
      if (choice.token_ids) turn.ids = { prompt: choice.prompt_token_ids, output: choice.token_ids };
    }
  } catch (error) {
    turn.finish = "stopped";
    if (error.name !== "AbortError") failed(turn, error);
  }
  if (calls) {
    const spoken = turn.finish === "tool_calls" ? waiting.splice(0, waiting.length - 1) : waiting.splice(0);
    turn.calling.hidden = false;
    add(turn, turn.calling, spoken.map(textOf).join("") || JSON.stringify(calls, null, 1), spoken);
  }
  if (waiting.length) add(turn, calls ? turn.calling : turn.body, "", waiting);
  turn.root.classList.remove("writing");
  const count = turn.pieces.reduce((sum, piece) => sum + piece.tokens.length, 0);
  const seconds = (performance.now() - began) / 1000;
  const speed = count ? `${count} tokens, ${number(Number((count / seconds).toPrecision(2)))} a second` : null;
  turn.facts.textContent = [speed, ENDS[turn.finish]].filter(Boolean).join(" · ");
  if (running !== control) return; // another answer has begun
  running = null;
  ui.send.textContent = "Send";
  marked();
}

/** Add to a turn what a chunk brings; false if that is no text. */
function write(turn, delta, tokens) {
  follow();
  if (delta.reasoning_content) {
    turn.reasoning += delta.reasoning_content;
    turn.thoughts.hidden = false;
    add(turn, turn.thinking, delta.reasoning_content, tokens);
  } else if (delta.content) {
    turn.content += delta.content;
    add(turn, turn.body, delta.content, tokens);
  } else return false;
  return true;
}

/**
 * If the end of the page is in sight, keep it there when the next frame shows what is added now. Once a frame: a layout
 * for each token would leave no frames, and a button that nobody can press.
 */
function follow() {
  if (following) return;
  following = true;
  const low = innerHeight + scrollY >= document.body.scrollHeight - 40;
  requestAnimationFrame(() => {
    following = false;
    if (low) scrollTo(0, document.body.scrollHeight);
  });
}

function add(turn, root, text, tokens) {
  const pieces = piecesOf(text, tokens);
  turn.pieces.push(...pieces);
  root.append(...pieces.map(pieceElement));
}

/**
 * Ask the server, once for each answer, what else the model might have said in place of each token; true if it knows.
 * Alternatives in the stream would keep it back until its end. An engine that does not score prompts has none.
 */
async function learn(node) {
  const turn = turns.find(({ root }) => root.contains(node));
  if (!turn?.ids) return false;
  turn.learnt ??= alternatives(turn).then(() => true, () => false);
  return turn.learnt;
}

async function alternatives({ ids: { prompt, output }, pieces }) {
  const asked = { model, prompt: [...prompt, ...output], max_tokens: 0, echo: true, logprobs: ALTERNATIVES };
  const { choices } = await (await request("v1/completions", { method: "POST", body: JSON.stringify(asked) })).json();
  const { token_logprobs: own, top_logprobs: top } = choices[0].logprobs;
  const tokens = pieces.flatMap((piece) => piece.tokens);
  if (tokens.length !== output.length) throw new Error("tokens without a log-prob");
  tokens.forEach((token, i) => { token.likely = { own: own[prompt.length + i], others: top[prompt.length + i] }; });
}

/** Say what went wrong; ask for the key if the server wants one. */
function failed(turn, error) {
  const lost = error instanceof TypeError ? "The server does not answer; is it still running?" : error.message;
  turn.failure.textContent = error.status === 401 ? "The server wants its key." : lost;
  turn.failure.hidden = false;
  if (error.status === 401) askForKey(again);
}

/** A dialog for the key; it stays in this tab's sessionStorage. */
function askForKey(then) {
  const field = el("input", { type: "password", id: "key", autocomplete: "off", required: true });
  const refused = sessionStorage.getItem(KEY) !== null;
  const dialog = el("dialog", { class: "card", "aria-label": "Key of the server" },
    el("form", { method: "dialog", onsubmit: () => sessionStorage.setItem(KEY, field.value) },
      el("label", { for: "key" }, refused ? "The server does not take this key. Another one:" : "Key of the server (--api-key):"),
      field, el("button", { class: "send" }, "Use")));
  dialog.addEventListener("close", () => {
    dialog.remove();
    ui.text.focus();
    if (field.value) then();
  });
  document.body.append(dialog);
  dialog.showModal();
}

/** Ask the server for the name of its model. */
async function meet() {
  try {
    const { data } = await (await request("v1/models")).json();
    model = data[0].id;
    talks = data[0].chats !== false;
    for (const [name, value] of Object.entries(data[0].sampling ?? {})) if (ui[name]) ui[name].value = value;
    if (!talks) ui.text.placeholder = "Begin a text; the model goes on with it";
    ui.model.textContent = ui.model.title = model;
    document.title = `${model} – slimelite`;
  } catch (error) {
    if (error.status === 401) askForKey(meet);
    else ui.model.textContent = error instanceof TypeError ? "the server does not answer" : error.message;
  }
}

addEventListener("DOMContentLoaded", () => {
  build();
  meet();
  ui.text.focus();
});
