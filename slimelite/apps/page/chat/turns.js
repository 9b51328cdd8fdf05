// Turns on the page. A turn is {role: "user", content}, {role: "tool", results} or {role: "assistant", versions, shown};
// a version is {content, reasoning, calls, pieces, parts, finish, seconds, model} and perhaps `rest`, the turns after it.
// Turns are plain data, so that they can be kept; their elements are in `views`.

const ENDS = { length: "cut off at max tokens", stop: null, tool_calls: "calls tools", stopped: "stopped", abort: "aborted" };
const views = new Map(); // turn -> its elements, and whether its answer is being rendered

function emptyAnswer(model) {
  return { content: "", reasoning: "", calls: [], pieces: [], parts: [], finish: null, seconds: 0, model };
}

/** The shown version of an assistant's turn. */
function answerOf(turn) {
  return turn.versions[turn.shown];
}

const NAMES = { user: "You", assistant: "Model", tool: "Tool" };

/** The elements of a turn. `on`: the actions of its buttons, {edit, again, goOn, show, results}. */
function viewOf(turn, on) {
  const view = { root: el("article", { class: `turn ${turn.role}` }, el("h3", {}, NAMES[turn.role])) };
  views.set(turn, view);
  const button = (title, onclick, more = {}) => el("button", { class: "quiet", onclick, ...more }, title);
  view.failure = el("p", { class: "failure", role: "alert", hidden: true });
  if (turn.role === "tool") {
    view.root.append(...turn.results.map(({ name, content }) =>
      el("div", { class: "text body", dir: "auto" }, el("span", { class: "dim" }, `${name}: `), content)));
    return view;
  }
  if (turn.role === "user") {
    view.root.append(el("div", { class: "text body", dir: "auto" }, turn.content),
      el("div", { class: "tools" }, copyButton(() => turn.content), button("Edit", () => on.edit(turn))));
    return view;
  }
  view.thinking = el("div", { dir: "auto" });
  view.thoughts = el("details", { class: "thoughts", open: true, hidden: true }, el("summary", {}, "Thinking"), view.thinking);
  view.body = el("div", { dir: "auto" });
  view.calling = el("div", { hidden: true });
  view.results = el("div", {});
  view.facts = el("span", { class: "dim small" });
  view.count = el("span", { class: "small" });
  view.versions = el("span", { class: "versions", hidden: true },
    button("‹", () => on.show(turn, turn.shown - 1), { "aria-label": "Version before" }), view.count,
    button("›", () => on.show(turn, turn.shown + 1), { "aria-label": "Next version" }));
  view.goOn = button("Continue", on.goOn, { class: "quiet again", title: "continue the answer where it was cut off" });
  view.root.append(
    el("div", { class: "answer", tabindex: 0, role: "group", "aria-label": "Answer; arrow keys go from token to token" },
      view.thoughts, view.body, view.calling), view.results, view.failure,
    el("div", { class: "tools" }, view.facts, view.versions, copyButton(() => answerOf(turn).content),
      view.goOn, button("Regenerate", on.again, { class: "quiet again" })));
  draw(turn, on);
  return view;
}

/** Show the chosen version of an assistant's turn, as the server renders it or as tokens. */
function draw(turn, on) {
  const [view, answer] = [views.get(turn), answerOf(turn)];
  const tokens = showsTokens();
  for (const name of ["thinking", "body", "calling"]) {
    unplace(view[name]);
    view[name].className = `${name} ${tokens ? "text" : "rendered"}`;
  }
  view.failure.hidden = true;
  view.thoughts.hidden = !answer.reasoning;
  view.calling.hidden = true;
  if (tokens) for (const piece of answer.pieces) showPiece(view, piece);
  else render(turn);
  ended(turn, on);
}

/** Add a piece to the tokens that are shown. */
function showPiece(view, piece) {
  if (piece.place === "calling") view.calling.hidden = false;
  view[piece.place].append(pieceElement(piece));
}

/** Show the facts of an answer that has ended: its speed, how it ended, its calls, and the buttons to continue. */
function ended(turn, on) {
  const [view, answer] = [views.get(turn), answerOf(turn)];
  const count = answer.pieces.reduce((sum, piece) => sum + piece.tokens.length, 0);
  const speed = count && answer.seconds
    ? `${count} tokens, ${number(Number((count / answer.seconds).toPrecision(2)))} a second` : null;
  view.facts.textContent = [speed, ENDS[answer.finish]].filter(Boolean).join(" · ");
  view.versions.hidden = turn.versions.length < 2;
  view.count.textContent = ` ${turn.shown + 1}/${turn.versions.length} `;
  view.versions.firstChild.disabled = turn.shown === 0;
  view.versions.lastChild.disabled = turn.shown === turn.versions.length - 1;
  view.goOn.hidden = !answer.content || answer.calls.length > 0 || ["stop", "tool_calls"].includes(answer.finish);
  if (!showsTokens()) {
    view.calling.hidden = !answer.calls.length;
    view.calling.replaceChildren(...answer.calls.map(callElement));
  }
  view.results.replaceChildren(...(answer.calls.length && answer.finish === "tool_calls" ? [resultsElement(answer.calls, on.results)] : []));
}

/** The form in which the user enters the results of the tools. */
function resultsElement(calls, send) {
  const fields = calls.map((call) => [call, el("input", { type: "text", "aria-label": `Result of ${call.function.name}`, dir: "auto", autocomplete: "off" })]);
  const results = () => fields.map(([{ id, function: { name } }, field]) => ({ tool_call_id: id, name, content: field.value }));
  return el("form", { class: "results", onsubmit: (event) => { event.preventDefault(); send(results()); } },
    ...fields.map(([{ function: { name } }, field]) => el("label", {}, el("span", { class: "dim small" }, `result of ${name}`), field)),
    el("button", { class: "quiet" }, "Return results"));
}

/**
 * Render the part of an answer that has arrived, again and again until its end. There is one request at a time. The
 * pause is several times as long as the request, so a long answer is rendered less often, and the model is not slowed.
 * `endPause` of its view ends the pause early.
 */
async function render(turn) {
  const view = views.get(turn);
  view.stale = true;
  if (view.rendering) return;
  view.rendering = true;
  while (view.stale && views.get(turn) === view && !showsTokens()) {
    view.stale = false;
    const [answer, began] = [answerOf(turn), performance.now()];
    const texts = [answer.reasoning, answer.content];
    let html = null;
    try {
      ({ html } = await (await request("render", { method: "POST", body: JSON.stringify({ texts }) })).json());
    } catch {} // too long, or no answer: show plain text
    if (answer !== answerOf(turn) || showsTokens()) continue;
    follow();
    [view.thinking, view.body].forEach((root, i) => {
      root.classList.toggle("plain", !html);
      if (html) place(root, html[i]);
      else {
        unplace(root);
        root.textContent = texts[i];
      }
    });
    if (!answer.finish) {
      const pause = Math.max(50, 4 * (performance.now() - began));
      await new Promise((resolve) => { view.endPause = resolve; setTimeout(resolve, pause); });
    }
  }
  view.rendering = false;
}
