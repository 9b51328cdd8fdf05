// The lists of the tab "Samples": their rows, their columns, and the elements of the visible rows.

const ROW = 30; // pixels

/** A list of rows of the same height. Only the visible rows have elements. */
function rowList(draw) {
  const space = el("div", { class: "rows", role: "presentation" });
  const says = "Rows; arrow keys choose one, Enter opens it";
  const box = el("div", { class: "row-box", tabindex: 0, role: "rowgroup", "aria-label": says }, space);
  let count = 0;
  const show = () => {
    const from = Math.max(0, Math.floor(box.scrollTop / ROW) - 5);
    const to = Math.min(count, from + Math.ceil((box.clientHeight || 800) / ROW) + 10);
    const rows = [];
    for (let i = from; i < to; i++) {
      rows.push(draw(i));
      rows.at(-1).style.setProperty("top", `${i * ROW}px`);
    }
    space.replaceChildren(...rows);
  };
  box.addEventListener("scroll", show);
  new ResizeObserver(show).observe(box);
  return {
    box,
    show,
    reset(size) {
      count = size;
      space.style.setProperty("height", `${size * ROW}px`);
      show();
    },
    reveal(i) {
      if (i * ROW < box.scrollTop) box.scrollTop = i * ROW;
      if ((i + 1) * ROW > box.scrollTop + box.clientHeight) box.scrollTop = (i + 1) * ROW - box.clientHeight;
    },
  };
}

/** One number for each sample, by the name of its column. */
function numbersOf({ columns, components }) {
  const taken = ["reward", "advantage", "tokens", "stale", "status", "dropped because"];
  const title = (name) => (taken.includes(name) ? `component ${name}` : name);
  const own = Object.fromEntries(components.map((name) => [title(name), columns[`component ${name}`]]));
  return { reward: columns.reward, ...own, advantage: columns.advantage, tokens: columns.length, stale: columns.stale };
}

/** Means over the samples of each key, [{key, rows, reward, spread, tokens, truncated, stale}], by first appearance. */
function summed(samples, rows, keyOf) {
  const { reward, length, stale, status } = samples.columns;
  const cut = samples.statuses.indexOf("truncated");
  const found = new Map();
  for (const i of rows) {
    const key = keyOf(i);
    if (!found.has(key)) found.set(key, { key, rows: [] });
    found.get(key).rows.push(i);
  }
  const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length; // NaN of none
  for (const sum of found.values()) {
    const rewards = sum.rows.map((i) => reward[i]).filter(Number.isFinite);
    sum.reward = mean(rewards);
    sum.spread = Math.sqrt(mean(rewards.map((value) => (value - sum.reward) ** 2)));
    sum.tokens = mean(sum.rows.map((i) => length[i]));
    sum.truncated = mean(sum.rows.map((i) => Number(status[i] === cut)));
    sum.stale = mean(sum.rows.map((i) => stale[i]).filter(Number.isFinite));
  }
  return [...found.values()];
}

/** The rows of a level, from the remaining samples. `whole`: rollouts have the numbers of all their samples. */
function rowsOf(samples, level, left, whole) {
  const { columns, sources } = samples;
  if (level === "samples") return left;
  if (level === "groups") return summed(samples, left, (i) => columns.group[i]);
  if (level === "rollouts") {
    return summed(samples, left, (i) => columns.chunk[i]).map((row) => {
      const source = sources[row.key];
      const { reward = NaN, spread = NaN, length, truncated } = source;
      const all = whole ? { reward, spread, tokens: length, truncated: truncated / source.samples } : {};
      return { ...row, ...all, source };
    });
  }
  return summed(samples, left, (i) => columns.prompt[i]).map((row) => {
    const groups = summed(samples, row.rows, (i) => columns.group[i]);
    groups.sort((a, b) => samples.source(a.rows[0]).number - samples.source(b.rows[0]).number);
    return { ...row, groups: groups.length, first: groups[0].reward, last: groups.at(-1).reward };
  });
}

/** Rows sorted by a column. Rows without a number come last in both directions. */
function sorted(rows, key, down) {
  const lost = (value) => value === undefined || Number.isNaN(value);
  const order = (a, b) => lost(a) - lost(b) || (a < b ? -1 : a > b ? 1 : 0) * (down && !lost(a) ? -1 : 1);
  return rows.map((row) => [key(row), row]).sort((a, b) => order(a[0], b[0])).map(([, row]) => row);
}

function percent(value) {
  return value ? `${(100 * value).toFixed(1)} %` : "0";
}

/** Rewards as at most sixteen bars, in ascending order. */
function rewardBars(samples, rows) {
  const [low, high] = samples.rewardRange;
  const values = rows.map((i) => samples.columns.reward[i]).sort((a, b) => a - b);
  const count = Math.min(16, values.length);
  const chosen = Array.from({ length: count }, (_, i) => values[Math.floor(((i + 0.5) * values.length) / count)]);
  return el("span", { class: "bars" }, ...chosen.map((value) => {
    const part = Number.isFinite(value) ? (high > low ? (value - low) / (high - low) : 1) : null;
    return el("i", { class: part === null ? "none" : null, style: { "--h": `${10 + 90 * (part ?? 1)}%` } });
  }));
}

/** The question of a prompt, without chat marks: its last turn with text. */
function promptLine(samples, id) {
  samples.lines ??= new Map();
  if (!samples.lines.has(id)) {
    const prompt = samples.prompts[id];
    const messages = messagesOf(prompt);
    const texts = messages ? messages.map(messageText) : turnsOf(prompt).map((turn) => prompt.slice(turn.body, turn.stop));
    samples.lines.set(id, texts.filter((text) => text.trim()).at(-1) ?? prompt);
  }
  return samples.lines.get(id);
}

/**
 * The columns of a level: [{title, hint, least, number, key, cell}]: `least` width in pixels, where texts grow beyond;
 * `key(row)` to sort by, none for a column that cannot be sorted; `cell(row)` its content. `state`: {query, of; partial:
 * some samples of a file are left out; narrow: a sample stands beside the list; one: all are from one file}.
 */
function columnsOf(samples, level, state) {
  const { columns, reasons, statuses } = samples;
  const told = (value) => (Number.isFinite(value) ? number(value) : "–");
  const numeric = (title, key, hint, shown = told, least = 76) =>
    ({ title, hint, least, number: true, key, cell: (row) => shown(key(row)) });
  const wide = { dropped: 150, rollout: 92 }[state.of] ?? 190;
  const place = (of) => ({ title: "from", least: wide, key: (row) => of(row).number, cell: (row) => sourceName(of(row)) });
  const prompt = (of) => ({
    title: "prompt", least: 200, text: true, key: (row) => promptLine(samples, of(row)),
    cell: (row) => {
      const [line, whole] = [promptLine(samples, of(row)), samples.prompts[of(row)]];
      const hidden = !findHits(line, state.query).length && findHits(whole, state.query).length; // in an earlier turn
      return excerpt(hidden ? whole : line, state.query);
    },
  });
  const why = (sample) => reasons[columns.reason[sample]];
  const reason = (of) => ({ title: "dropped because", least: 150, key: (row) => why(of(row)), cell: (row) => textNodes(why(of(row))) });
  const rewards = {
    title: "rewards", hint: "rewards in ascending order", least: 124,
    key: (row) => row.reward, cell: (row) => rewardBars(samples, row.rows),
  };
  const scored = samples.has("reward", state.of);
  const [reward, spread, tokens, truncated, stale] = [
    numeric("reward", (row) => row.reward, "mean reward"),
    numeric("spread", (row) => row.spread, "standard deviation of the rewards"),
    numeric("tokens", (row) => row.tokens, "mean length of the responses"),
    numeric("truncated", (row) => row.truncated, "share of truncated responses", percent, 84),
    numeric("stale", (row) => row.stale, "mean number of weight updates between oldest token and training"),
  ];
  const means = [...(scored ? [reward, spread] : []), tokens, truncated, ...(samples.aged ? [stale] : [])];
  const dropped = state.of === "dropped";
  if (level === "rollouts") {
    const equal = numeric("equal groups", (row) => row.source.equal / row.source.groups,
      "share of groups whose rewards are all equal, so that nothing is learned from them", percent, 100);
    const shown = numeric("shown", (row) => row.rows.length, "samples in this page, after the filters");
    return [
      place((row) => row.source),
      numeric("samples", (row) => row.source.samples, "number of samples"),
      ...(state.partial ? [shown] : []),
      ...means,
      ...(scored ? [equal, { ...rewards, least: 160 }] : []),
    ];
  }
  if (level === "groups") {
    const first = (row) => row.rows[0];
    const from = state.one ? [] : [place((row) => samples.source(first(row)))];
    return [...from, ...(scored ? [rewards] : []), ...means, ...(dropped ? [reason(first)] : []), prompt((row) => columns.prompt[first(row)])];
  }
  if (level === "prompts") {
    const changes = [
      numeric("first", (row) => row.first, "mean reward of the prompt’s first group"),
      numeric("last", (row) => row.last, "mean reward of the prompt’s last group"),
      numeric("change", (row) => row.last - row.first, "change of the mean reward from the first group to the last"),
    ];
    return [
      numeric("groups", (row) => row.groups, "how often the prompt was used"),
      ...(scored ? changes : []),
      tokens,
      truncated,
      prompt((row) => row.key),
    ];
  }
  const ended = (row) => statuses[columns.status[row]] + (columns.removed[row] ? ", removed" : "");
  const status = { title: "status", least: 92, key: ended, cell: ended };
  const response = {
    title: "response", least: 260, text: true,
    cell(row) {
      const cell = el("span", {}, "…");
      samples.response(row).then((text) => fill(cell, {}, excerpt(text, state.query)).firstChild.remove());
      return cell;
    },
  };
  const reply = { title: "reply", least: 92, key: (row) => samples.reply(row), cell: (row) => samples.reply(row) };
  const each = Object.entries(numbersOf(samples)).filter(([name]) => samples.has(name, state.of)).map(([name, values]) => numeric(name, (row) => values[row]));
  const few = ["reward", "advantage", "tokens"]; // the sample beside the list shows the others
  const kept = each.filter(({ title }) => (state.narrow ? few.includes(title) : title !== "stale" || samples.aged));
  const lost = dropped && !state.narrow ? [reason((row) => row)] : [];
  const from = state.one ? [] : [place((row) => samples.source(row))];
  const asked = state.narrow ? [] : [prompt((row) => columns.prompt[row])];
  return [...from, ...(samples.replies.length > 1 && !scored ? [reply] : []), ...kept, ...(state.narrow ? [] : [status]), ...lost, ...asked, response];
}
