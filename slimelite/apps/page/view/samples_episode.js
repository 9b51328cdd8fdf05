// The episode of a sample: what it counted, its turns as a tree beside their times, and what its program printed.

const MOST_INDENTS = 8;

/** Metadata as an object, and its episode apart; without one the text stays whole. */
function episodeOf(metadata) {
  try {
    const { episode, ...rest } = JSON.parse(metadata);
    return episode && typeof episode === "object" ? { episode, rest: JSON.stringify(rest) } : { rest: metadata };
  } catch {
    return { rest: metadata };
  }
}

/** Turns in the order of the tree, with the number of branchings above each: a turn that goes on from the last stands below it. */
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

/** One line a turn: its number, a bar from its begin to its end, tokens and calls. The space between bars is the environment's or the program's. */
function timelineElement(turns) {
  const end = Math.max(...turns.map(({ begin, seconds }) => begin + seconds), 1e-3);
  const line = ({ turn, depth }) => {
    const from = turn.parent === null ? "begins" : `after ${Number(turn.parent)}`;
    const calls = Array.isArray(turn.calls) ? turn.calls.map(String) : [];
    const bar = el("span", {
      class: "bar", title: `${number(turn.begin)} s to ${number(turn.begin + turn.seconds)} s`,
      style: { left: `${(100 * turn.begin) / end}%`, width: `${(100 * turn.seconds) / end}%`, "--run": `var(--run-${turn.role % 8})` },
    });
    return el("li", {},
      el("span", { class: "node", style: { "padding-left": `${14 * Math.min(depth, MOST_INDENTS)}px` } },
        `${depth ? "↳ " : ""}turn ${turn.turn} `, el("span", { class: "dim" }, from)),
      el("span", { class: "lane" }, bar),
      el("span", { class: "said" }, `${number(turn.tokens)} tokens, ${duration(turn.seconds)} `,
        ...calls.map((name) => el("span", { class: "badge" }, ...textNodes(name)))));
  };
  return el("ol", { class: "episode-turns", "aria-label": "Turns" }, ...treeOf(turns).map(line));
}

/** What there is to say about an episode; null without one. */
function episodeElement(episode, query) {
  if (!episode) return null;
  const fact = (name, value) => el("div", { class: "fact" }, el("span", { class: "dim" }, name), el("b", {}, number(value)));
  const counts = Object.entries(episode).filter(([, value]) => typeof value === "number" && value);
  const isTurn = (turn) => ["turn", "role", "begin", "seconds", "tokens"].every((name) => Number.isFinite(turn?.[name]));
  const turns = (Array.isArray(episode.timeline) ? episode.timeline : []).filter(isTurn);
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
