// The episode of a sample: its counts, its turns as a tree with their times, and the output of its program.

const MOST_INDENTS = 8;

/** Metadata as an object, and the episode separately. Metadata without an episode stays a text. */
function episodeOf(metadata) {
  try {
    const { episode, ...rest } = JSON.parse(metadata);
    return episode && typeof episode === "object" ? { episode, rest: JSON.stringify(rest) } : { episode: null, rest: metadata };
  } catch {
    return { episode: null, rest: metadata };
  }
}

/** The turns of an episode that can be drawn. `answer`: seconds until the environment or the next request followed. */
function turnsOfEpisode(episode) {
  const isTurn = (turn) => ["turn", "role", "begin", "seconds", "tokens"].every((name) => Number.isFinite(turn?.[name]));
  const turns = (Array.isArray(episode?.timeline) ? episode.timeline : []).filter(isTurn);
  return turns.map((turn) => {
    if (Number.isFinite(turn.answer)) return turn;
    const next = turns.filter(({ role, parent }) => role === turn.role && parent === turn.turn).map(({ begin }) => begin);
    const gap = Math.min(...next) - turn.begin - turn.seconds;
    return Number.isFinite(gap) && gap > 0 ? { ...turn, answer: gap } : turn;
  });
}

/** The end of the last of these turns [s]. */
function endOf(turns) {
  return Math.max(...turns.map(({ begin, seconds, answer = 0 }) => begin + seconds + answer), 1e-3);
}

/** The calls of a turn, [{name, seconds}]. `seconds` is NaN if the time was not measured. */
function callsOf({ calls, call_seconds: took }) {
  if (!Array.isArray(calls)) return [];
  return calls.map((name, i) => ({ name: String(name), seconds: Number.isFinite(took?.[i]) ? took[i] : NaN }));
}

/** The bars of a turn, the reply and the answer to it, on a scale of `end` seconds. */
function turnBars(turn, end) {
  const bar = (name, from, seconds, title) => el("span", {
    class: `bar ${name}`, title, style: { left: `${(100 * from) / end}%`, width: `${(100 * seconds) / end}%`, "--run": `var(--run-${turn.role % 8})` },
  });
  const { begin, seconds, answer } = turn;
  const whose = Number.isFinite(turn.answer) && turn.answer > 0;
  return [
    bar("reply", begin, seconds, `reply: ${number(begin)} s to ${number(begin + seconds)} s`),
    whose ? bar("acts", begin + seconds, answer, `environment or program: ${duration(answer)}`) : null,
  ].filter(Boolean);
}

/** Turns in the order of the tree, with the number of branchings above each. A turn follows the one it continues. */
function treeOf(turns) {
  const key = ({ role, turn }) => `${role}/${turn}`;
  const children = Map.groupBy(turns, ({ role, parent }) => (parent === null ? null : `${role}/${parent}`));
  const rows = [];
  const seen = new Set();
  const stack = turns.filter((turn) => turn.parent === null || !turns.some((other) => key(other) === `${turn.role}/${turn.parent}`))
    .reverse().map((turn, i, roots) => ({ turn, depth: i < roots.length - 1 ? 1 : 0 }));
  while (stack.length) {
    const { turn, depth } = stack.pop();
    if (seen.has(key(turn))) continue;
    seen.add(key(turn));
    rows.push({ turn, depth });
    const next = children.get(key(turn)) ?? [];
    next.toReversed().forEach((child, i) => stack.push({ turn: child, depth: depth + (i < next.length - 1 ? 1 : 0) }));
  }
  return rows;
}

/** One line for each turn: its number, a bar for the reply, a paler bar for the answer to it, tokens and calls. */
function timelineElement(turns) {
  const end = endOf(turns);
  const line = ({ turn, depth }) => {
    const from = turn.parent === null ? "begins" : `after ${Number(turn.parent)}`;
    return el("li", {},
      el("span", { class: "node", style: { "padding-left": `${14 * Math.min(depth, MOST_INDENTS)}px` } },
        `${depth ? "↳ " : ""}turn ${turn.turn} `, el("span", { class: "dim" }, from)),
      el("span", { class: "lane" }, ...turnBars(turn, end)),
      el("span", { class: "said" }, `${number(turn.tokens)} tokens, ${duration(turn.seconds)} `,
        ...callsOf(turn).map(({ name, seconds }) =>
          el("span", { class: "badge" }, ...textNodes(name), Number.isFinite(seconds) ? ` ${duration(seconds)}` : null))));
  };
  return el("ol", { class: "episode-turns", "aria-label": "Turns" }, ...treeOf(turns).map(line));
}

/** The facts of an episode; null without an episode. */
function episodeElement(episode, query) {
  if (!episode) return null;
  const fact = (name, value) => el("div", { class: "fact" }, el("span", { class: "dim" }, name), el("b", {}, number(value)));
  const counts = Object.entries(episode).filter(([, value]) => typeof value === "number" && value);
  const turns = turnsOfEpisode(episode);
  const log = Object.entries(episode.log ?? {}).filter(([, text]) => typeof text === "string" && text.trim());
  return el("section", { class: "episode" }, el("h4", {}, "Episode"),
    el("div", { class: "facts" }, ...counts.map(([name, value]) => fact(name.replaceAll("_", " "), value))),
    turns.length ? timelineElement(turns) : null,
    ...log.map(([name, text]) => {
      const pre = el("pre", {});
      longText(pre, text, query);
      return el("details", { open: text.length < 2000 }, el("summary", {}, `The program’s ${name}`), pre);
    }));
}
