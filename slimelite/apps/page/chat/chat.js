// The chat: a conversation, {id, title, model, began, used, system, turns}, the input box, and the cards beside them.
// The model's text enters the page in text nodes, or as HTML that the server has made from Markdown (rendered.js).

const ALTERNATIVES = 5; // number of alternatives that are shown for a token
const KEEP_EVERY = 2000; // a conversation is saved this often while an answer arrives [ms]
const SHOWN = "slimelite-shown"; // key in localStorage: whether answers are shown as tokens

let [model, running] = ["", null]; // running: the AbortController of the current answer
let talk = newTalk();
let talks = true; // false: the model has no chat template, and continues a text
let following = false; // whether the next frame scrolls to the end
const ui = {};
const on = { edit, again, goOn, show, results };

function newTalk() {
  const id = Date.now().toString(36) + Math.random().toString(36).slice(2, 8);
  return { id, title: "", model, began: Date.now(), used: Date.now(), system: "", turns: [] };
}

/** The page's parts, once. */
function build() {
  ui.model = el("span", { class: "dim model" });
  ui.list = el("div", { class: "turns", role: "log", "aria-live": "polite", "aria-label": "Conversation" });
  ui.text = el("textarea", { rows: 1, placeholder: "Ask something", "aria-label": "Message", dir: "auto", onkeydown: typed, oninput: grow });
  ui.send = el("button", { class: "send", onclick: () => (running ? running.abort() : ask()) }, "Send");
  const kind = (title, tokens) => el("button", { class: "quiet", onclick: () => showTokens(tokens) }, title);
  [ui.rendered, ui.asTokens] = [kind("Rendered", false), kind("Tokens", true)];
  const clear = el("button", { class: "quiet", onclick: restart }, "New chat");
  document.body.append(
    el("header", {}, el("h1", {}, "slimelite"), ui.model, el("span", { class: "spring" }),
      el("span", { class: "switch", role: "group", "aria-label": "How answers are shown" }, ui.rendered, ui.asTokens), clear, themeButton()),
    el("main", {}, historyElement({ open: openTalk, forgotten, talk: () => talk }), ui.list,
      settingsElement((colored) => {
        ui.list.classList.toggle("colored", colored);
        if (colored) showTokens(true);
      })),
    el("footer", {}, el("div", {}, el("div", { class: "compose" }, ui.text, ui.send),
      el("p", { class: "dim small" }, "Enter sends, Shift+Enter starts a new line, Esc stops, ↑ edits the last message"))));
  addEventListener("keydown", (event) => event.key === "Escape" && running?.abort());
  tokenBox(ui.list, ({ piece }) => piece.tokens.map(tokenNumbers), learn);
}

function showsTokens() {
  return ui.asTokens.getAttribute("aria-pressed") === "true";
}

/** Show answers as their tokens, or rendered; `keeps`: the browser remembers it. */
function showTokens(tokens, keeps = true) {
  ui.asTokens.setAttribute("aria-pressed", tokens);
  ui.rendered.setAttribute("aria-pressed", !tokens);
  try {
    if (keeps) localStorage.setItem(SHOWN, tokens ? "tokens" : "rendered");
  } catch {} // without storage, the page shows rendered answers after a reload
  for (const turn of talk.turns) if (turn.role === "assistant") draw(turn, on);
}

function typed(event) {
  if (event.isComposing) return;
  if (event.key === "Enter" && !event.shiftKey) {
    event.preventDefault();
    if (!running) ask();
  } else if (event.key === "ArrowUp" && !ui.text.value && !running) {
    const last = talk.turns.findLast((turn) => turn.role === "user");
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
  talk.title ||= content.split("\n")[0].slice(0, 60);
  put({ role: "user", content });
  ui.text.value = "";
  grow();
  answer();
}

/** Begin another conversation. The current one stays in the list. */
function restart() {
  enter(newTalk());
  history.replaceState(null, "", location.pathname);
  ui.text.focus();
}

/** Show a saved conversation. */
async function openTalk(id) {
  if (id === talk.id) return; // the saved conversation may be older than the shown one
  const other = await kept(id);
  if (!other) return;
  enter(other);
  ui.system.value = other.system;
  history.replaceState(null, "", `#${id}`);
}

function enter(other) {
  running?.abort();
  running = null;
  ui.send.textContent = "Send";
  for (const turn of talk.turns) views.get(turn).root.remove();
  views.clear();
  talk = { ...other, turns: [] };
  other.turns.forEach(put);
  marked();
  ui.listTalks();
}

/** A conversation was deleted: the rest of its answer is not saved. */
function forgotten(id) {
  if (id !== talk.id) return;
  talk.deleted = true;
  restart();
}

/** Save the conversation `own` in its present state. */
async function remember(own) {
  if (own.deleted) return;
  if (own === talk) own.system = ui.system.value.trim();
  Object.assign(own, { model, used: Date.now() });
  await keep(own);
  if (own === talk) history.replaceState(null, "", `#${own.id}`);
  await ui.listTalks();
}

/** Forget the turns from number `start` on. */
function cut(start) {
  for (const turn of talk.turns.splice(start)) {
    views.get(turn).root.remove();
    views.delete(turn);
  }
  marked();
}

/** Move a message of the user back into the input box. The turns after it are removed. */
function edit(turn) {
  running?.abort();
  ui.text.value = turn.content;
  cut(talk.turns.indexOf(turn));
  grow();
  ui.text.focus();
}

/** Get another version of the last answer. An empty version is replaced. */
function again() {
  const turn = talk.turns.at(-1);
  if (turn?.role !== "assistant") return answer();
  const { content, reasoning, calls } = answerOf(turn);
  if (!content && !reasoning && !calls.length) turn.versions.splice(turn.shown, 1);
  turn.shown = turn.versions.push(emptyAnswer(model)) - 1;
  draw(turn, on);
  return answer(turn);
}

/** Continue the last answer where it was cut off. */
function goOn() {
  answer(talk.turns.at(-1), true);
}

/** Show another version of an answer, with the turns that follow this version. */
function show(turn, version) {
  const place = talk.turns.indexOf(turn) + 1;
  answerOf(turn).rest = talk.turns.slice(place);
  cut(place);
  turn.shown = version;
  const { rest = [] } = answerOf(turn);
  delete answerOf(turn).rest;
  draw(turn, on);
  rest.forEach(put);
  remember(talk);
}

/** Send the results of the tools to the model. */
function results(answers) {
  put({ role: "tool", results: answers });
  answer();
}

/** Add a turn to the conversation, and show it. */
function put(turn) {
  talk.turns.push(turn);
  const { root } = viewOf(turn, on);
  ui.list.append(root);
  marked();
  root.scrollIntoView({ block: "end" });
  return turn;
}

/** Only the last turn has the buttons Regenerate and Continue, and only after its answer has ended. */
function marked() {
  ui.list.classList.toggle("running", Boolean(running));
  talk.turns.forEach((turn, i) => views.get(turn).root.classList.toggle("last", i === talk.turns.length - 1 && !running));
}

/** The turns to send: those before the answer, and the beginning of the answer if it is continued. */
function body(turns, goesOn) {
  const system = ui.system.value.trim();
  const settings = chosenSettings();
  const last = turns.findLast((turn) => turn.role === "user");
  if (!talks) {
    return { model, stream: true, prompt: last.content + (goesOn ? answerOf(turns.at(-1)).content : ""), ...settings };
  }
  const begun = goesOn ? { continue_final_message: true, add_generation_prompt: false } : {};
  return {
    model, stream: true, logprobs: true, return_token_ids: true, ...begun,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messagesOf(turns)],
    ...settings,
  };
}

/** Get an answer and show it while it arrives: in a new turn, or in the version that `turn` shows. */
async function answer(turn = null, goesOn = false) {
  const own = talk;
  const before = turn && !goesOn ? own.turns.slice(0, -1) : [...own.turns];
  turn ??= put({ role: "assistant", versions: [emptyAnswer(model)], shown: 0 });
  const [made, view] = [answerOf(turn), views.get(turn)];
  const control = (running = new AbortController());
  const began = performance.now();
  const spent = made.seconds;
  made.finish = null;
  ui.send.textContent = "Stop";
  view.root.classList.add("writing");
  view.failure.hidden = true;
  marked();
  let failure = null;
  try {
    await read(turn, made, body(before, goesOn), control.signal, () => remember(own));
  } catch (error) {
    made.finish = "stopped";
    if (error.name !== "AbortError") failure = error;
  }
  made.seconds = spent + (performance.now() - began) / 1000;
  view.root.classList.remove("writing");
  if (views.get(turn) === view) {
    view.endPause?.(); // the model has ended
    if (!showsTokens()) render(turn);
    ended(turn, on);
    if (failure) failed(view, failure, goesOn ? () => answer(turn, true) : again);
  }
  await remember(own);
  if (running === control) {
    running = null;
    ui.send.textContent = "Send";
    marked();
  }
}

/** Read the stream of an answer into the version `made`. */
async function read(turn, made, asked, signal, save) {
  let waiting = []; // tokens whose text has not arrived yet
  let saved = performance.now();
  const first = made.pieces.reduce((sum, piece) => sum + piece.tokens.length, 0);
  const add = (place, text, tokens) => {
    for (const piece of piecesOf(text, tokens)) {
      made.pieces.push({ ...piece, place });
      if (showsTokens() && views.has(turn)) showPiece(views.get(turn), made.pieces.at(-1));
    }
    if (!showsTokens() && views.has(turn)) render(turn);
  };
  save();
  try {
    for await (const { choices: [choice] = [] } of chunks(asked, signal)) {
      if (!choice) continue;
      waiting = [...waiting, ...(choice.logprobs?.content ?? [])];
      const { reasoning_content: thought, content, tool_calls: calls } = choice.delta ?? { content: choice.text };
      if (thought) {
        made.reasoning += thought;
        if (views.has(turn)) views.get(turn).thoughts.hidden = false;
      } else if (content) made.content += content;
      if (thought || content) {
        follow();
        add(thought ? "thinking" : "body", thought || content, waiting);
        waiting = [];
      }
      if (calls) made.calls = calls.map(({ index: _, ...call }) => call);
      made.finish = choice.finish_reason ?? made.finish;
      if (choice.token_ids) made.parts.push({ first, prompt: choice.prompt_token_ids, output: choice.token_ids });
      if (performance.now() - saved > KEEP_EVERY) {
        saved = performance.now();
        save();
      }
    }
  } finally {
    if (made.calls.length) {
      const spoken = made.finish === "tool_calls" ? waiting.splice(0, waiting.length - 1) : waiting.splice(0);
      add("calling", spoken.map(textOf).join("") || JSON.stringify(made.calls, null, 1), spoken);
    }
    if (waiting.length) add(made.calls.length ? "calling" : "body", "", waiting);
  }
}

/**
 * If the end of the page is visible, keep it visible when the next frame adds content. Do this once per frame: a layout
 * for each token would leave no time for frames, and nobody could press a button.
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

/**
 * Request the alternatives to each token of an answer, once per answer. Returns true if the server has them. In the
 * stream, alternatives would delay the tokens until the end. An engine that does not score prompts has no alternatives.
 */
async function learn(node) {
  const [turn] = [...views].find(([, { root }]) => root.contains(node)) ?? [];
  const view = views.get(turn);
  if (!turn?.versions || !answerOf(turn).parts.length) return false;
  if (view.learnt?.answer !== answerOf(turn)) view.learnt = { answer: answerOf(turn), done: alternatives(answerOf(turn)).then(() => true, () => false) };
  return view.learnt.done;
}

/** Fill in `likely` of the tokens of an answer. A continued answer has several parts, each with its own prompt. */
async function alternatives({ parts, pieces }) {
  const tokens = pieces.flatMap((piece) => piece.tokens);
  for (const { first, prompt, output } of parts) {
    const asked = { model, prompt: [...prompt, ...output], max_tokens: 0, echo: true, logprobs: ALTERNATIVES };
    const { choices } = await (await request("v1/completions", { method: "POST", body: JSON.stringify(asked) })).json();
    const { token_logprobs: own, top_logprobs: top } = choices[0].logprobs;
    if (tokens.length < first + output.length) throw new Error("tokens without a log-prob");
    output.forEach((_, i) => { tokens[first + i].likely = { own: own[prompt.length + i], others: top[prompt.length + i] }; });
  }
}

/** Show an error. If the server needs a key, ask the user for it and then `retry`. */
function failed(view, error, retry) {
  const lost = error instanceof TypeError ? "The server does not answer; is it still running?" : error.message;
  view.failure.textContent = error.status === 401 ? "The server needs its key." : lost;
  view.failure.hidden = false;
  if (error.status === 401) askForKey(retry);
}

/** A dialog for the key. The key stays in this tab's sessionStorage. */
function askForKey(then) {
  const field = el("input", { type: "password", id: "key", autocomplete: "off", required: true });
  const refused = sessionStorage.getItem(KEY) !== null;
  const dialog = el("dialog", { class: "card", "aria-label": "Key of the server" },
    el("form", { method: "dialog", onsubmit: () => sessionStorage.setItem(KEY, field.value) },
      el("label", { for: "key" }, refused ? "The server refused this key. Enter another key:" : "Key of the server (--api-key):"),
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
    if (!talks) {
      ui.text.placeholder = "Begin a text; the model continues it";
      showTokens(true, false);
    }
    ui.model.textContent = ui.model.title = model;
    document.title = `${model} – slimelite`;
  } catch (error) {
    if (error.status === 401) askForKey(meet);
    else ui.model.textContent = error instanceof TypeError ? "the server does not answer" : error.message;
  }
}

addEventListener("DOMContentLoaded", async () => {
  build();
  let shown = null;
  try {
    shown = localStorage.getItem(SHOWN);
  } catch {} // a browser may refuse storage
  showTokens(shown === "tokens", false);
  ui.text.focus();
  await Promise.all([meet(), ui.listTalks()]);
  if (location.hash) await openTalk(location.hash.slice(1));
});
