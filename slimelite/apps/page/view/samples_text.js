// Text from a run: invisible characters shown by name, hits of a search marked, chat marks read as turns.

/** Characters that are invisible or reorder the text. Joiners are not included, because emoji need them. */
const UNSEEN = /(?![\n\t\u200c\u200d])[\p{Cc}\p{Cf}\p{Cs}\u2028\u2029]/gu;

/** The hits of a query, without regard to case: [[start, end], …]. */
function findHits(text, query) {
  if (!query) return [];
  let [where, what] = [text.toLowerCase(), query.toLowerCase()];
  if (where.length !== text.length) [where, what] = [text, query]; // "İ" gets longer, and positions would shift
  const hits = [];
  for (let at = where.indexOf(what); at >= 0; at = where.indexOf(what, at + what.length)) hits.push([at, at + what.length]);
  return hits;
}

/** The nodes of a text without hits. Invisible characters are named, such as U+202E. */
function textNodes(text) {
  const nodes = [];
  let at = 0;
  for (const match of text.matchAll(UNSEEN)) {
    if (match.index > at) nodes.push(text.slice(at, match.index));
    const name = match[0].codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
    nodes.push(el("i", { class: "unseen", title: "an invisible character" }, `U+${name}`));
    at = match.index + match[0].length;
  }
  if (at < text.length) nodes.push(text.slice(at));
  return nodes;
}

/** The nodes of a text, with its hits in <mark>. */
function markedNodes(text, query) {
  const nodes = [];
  let at = 0;
  for (const [start, end] of findHits(text, query)) {
    nodes.push(...textNodes(text.slice(at, start)), el("mark", {}, ...textNodes(text.slice(start, end))));
    at = end;
  }
  return [...nodes, ...textNodes(text.slice(at))];
}

/** One line of a text: around the first hit. Without a hit, it is the beginning or the end of the text. */
function excerpt(text, query, { end = false, length = 160 } = {}) {
  const [hit] = findHits(text, query);
  let from = hit ? Math.max(0, hit[0] - 30) : end ? Math.max(0, text.length - length) : 0;
  if (from && /[\udc00-\udfff]/.test(text[from])) from--;
  const line = text.slice(from, from + length).replace(/\s+/g, " ");
  return [from ? "…" : null, ...markedNodes(line, query), from + length < text.length ? "…" : null];
}

/** The beginnings of a turn in chat templates. The first group that matches is the role. */
const HEADS = new RegExp(
  [
    /<\|im_start\|>([\w -]{1,30})\n/, // ChatML: Qwen, SmolLM
    /<\|start_header_id\|>([\w -]{1,30})<\|end_header_id\|>\n{0,2}/, // Llama 3
    /<start_of_turn>(\w{1,30})\n/, // Gemma
    /<\|start\|>(\w{1,30})(?:[^<\n]{0,60}<\|channel\|>)?[^<\n]{0,60}<\|message\|>/, // gpt-oss
    /<\|(system|user|assistant|tool|observation)\|>\n?/, // Phi, GLM
    /<｜(User|Assistant)｜>/, // DeepSeek
    /\[(\/?INST)\] ?/, // Mistral
  ].map((head) => head.source).join("|"),
  "g",
);
const TURN_END = /(?:<\|(?:im_end|eot_id|eom_id|end|return|call|endoftext)\|>|<end_of_turn>|<｜end▁of▁sentence｜>|<\/s>)\s*$/;
const TURN_BEGIN = /^(?:<\|begin_of_text\|>|<bos>|<s>|<｜begin▁of▁sentence｜>|<\|endoftext\|>|\[gMASK\]|<sop>)+\s*$/;
const BLOCKS = /<(think|tool_call|tool_response|tool_result|tools|answer)>([\s\S]*?)(?:<\/\1>|$)/g;
const MOST = 500; // limit of the turns of a text and of the blocks of a turn: a text may have only marks
const NAMES = {
  INST: "user", "/INST": "assistant", User: "user", Assistant: "assistant", model: "assistant", ipython: "tool", observation: "tool",
};

/**
 * The turns of a text with chat marks: [{role, start, body, stop, end}], offsets of the whole turn and of its body
 * without marks. Text before the first mark is a turn of role `first`; a text without marks is one turn.
 */
function turnsOf(text, first = "") {
  const heads = [...text.matchAll(HEADS)].slice(0, MOST).map((head) => {
    const role = head.slice(1).find(Boolean);
    return { role: NAMES[role] ?? role, start: head.index, body: head.index + head[0].length };
  });
  if (!heads.length || heads[0].start) heads.unshift({ role: first, start: 0, body: 0 });
  const turns = heads.map((turn, i) => {
    const end = heads[i + 1]?.start ?? text.length;
    // a tail is enough to find the end mark, and a long text is not searched again for each turn
    const tail = text.slice(Math.max(turn.body, end - 100), end);
    return { ...turn, end, stop: end - (tail.match(TURN_END)?.[0].length ?? 0) };
  });
  return turns.filter((turn) => turns.length === 1 || turn.role || !TURN_BEGIN.test(text.slice(turn.start, turn.end)));
}

/** Divide text[start:end] into parts inside and outside tags of thinking and tools: [{kind, start, end}]. */
function blocksOf(text, start, end) {
  const parts = [];
  let at = start;
  for (const match of [...text.slice(start, end).matchAll(BLOCKS)].slice(0, MOST)) {
    const from = start + match.index;
    if (from > at) parts.push({ kind: "", start: at, end: from });
    parts.push({ kind: match[1], start: from, end: from + match[0].length });
    at = from + match[0].length;
  }
  if (at < end || !parts.length) parts.push({ kind: "", start: at, end });
  return parts;
}

/** An element for a turn: its role, and blocks that `put(element, start, end)` fills. */
function turnElement(text, turn, put, { marks = false } = {}) {
  const [start, end] = marks ? [turn.start, turn.end] : [turn.body, turn.stop];
  const blocks = blocksOf(text, start, end).map(({ kind, start, end }) => {
    const block = el("div", { class: kind ? `block ${kind}` : "block" });
    put(block, start, end);
    return block;
  });
  const role = turn.role && el("div", { class: "role" }, ...textNodes(turn.role));
  return el("div", { class: "turn", "data-role": turn.role || null }, role || null, ...blocks);
}

/** A text that shows its first part, and more on request: browsers are slow with millions of characters. */
function longText(parent, text, query) {
  const STEP = 50_000;
  const [hit] = findHits(text, query);
  const show = (limit) => {
    const left = text.length - limit;
    parent.replaceChildren(...markedNodes(text.slice(0, limit), query));
    if (left > 0) {
      const more = el("button", { class: "quiet more", onclick: () => show(limit + 4 * STEP) },
        `show more: ${left.toLocaleString("en-US")} of ${text.length.toLocaleString("en-US")} characters are left out`);
      parent.append(" ", more);
    }
  };
  show(Math.max(STEP, hit ? hit[1] + 2000 : 0));
}

/** The messages of a prompt that was saved as JSON, or null. */
function messagesOf(prompt) {
  if (!prompt.startsWith("[{")) return null;
  try {
    const found = JSON.parse(prompt);
    return found.every((message) => typeof message?.role === "string") ? found : null;
  } catch {
    return null; // the prompt begins like JSON, but is not JSON
  }
}

/** The text of a message: its content, thinking and tool calls. */
function messageText({ content, reasoning_content, tool_calls }) {
  const parts = Array.isArray(content) ? content.map((part) => part?.text ?? JSON.stringify(part)) : [content ?? ""];
  const text = parts.map((part) => (typeof part === "string" ? part : JSON.stringify(part, null, 1))).join("\n");
  const calls = (tool_calls ?? []).map((call) => `<tool_call>${JSON.stringify(call.function ?? call, null, 1)}</tool_call>`);
  return [reasoning_content && `<think>${reasoning_content}</think>`, text, ...calls].filter(Boolean).join("\n");
}

/** A prompt as turns. */
function promptElement(prompt, query) {
  const messages = messagesOf(prompt);
  const texts = messages ? messages.map((message) => [message.role, messageText(message)]) : null;
  const turns = texts
    ? texts.map(([role, text]) => [text, { role, start: 0, body: 0, stop: text.length, end: text.length }])
    : turnsOf(prompt).map((turn) => [prompt, turn]);
  // the last turn of a template is the empty beginning of the answer
  const shown = turns.filter(([, turn], i) => turn.stop > turn.body || i < turns.length - 1 || !i);
  return el("div", { class: "text" }, ...shown.map(([text, turn]) =>
    turnElement(text, turn, (block, start, end) => longText(block, text.slice(start, end), query))));
}
