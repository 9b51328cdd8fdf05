// One sample in full, and the samples of one prompt side by side.

/** The origin of a sample, such as "rollout 12", "dropped in rollout 12" or "gsm8k after rollout 9". */
function sourceName({ kind, name, number, unit }) {
  if (kind === "eval") return `${name} ${number < 0 ? "before training" : `after ${unit} ${number}`}`;
  return kind === "dropped" ? `dropped in ${unit} ${number}` : `${unit} ${number}`;
}

const STATUS_BADGE = { completed: "good", truncated: "warn", aborted: "bad", failed: "bad", pending: "bad" };

function statusBadges(samples, sample) {
  const { columns, statuses, reasons } = samples;
  const status = statuses[columns.status[sample]];
  const reason = reasons[columns.reason[sample]];
  const reply = samples.reply(sample);
  return [
    reply ? el("span", { class: "badge", title: "the data set’s word about the reply" }, ...textNodes(reply)) : null,
    el("span", { class: `badge ${STATUS_BADGE[status] ?? ""}` }, status),
    reason ? el("span", { class: "badge bad", title: "why the group was dropped" }, ...textNodes(reason)) : null,
    columns.removed[sample] ? el("span", { class: "badge warn", title: "not used in the loss" }, "removed") : null,
  ];
}

const MOST_ENTRIES = 200; // of an object or a list in metadata
const MOST_LEVELS = 8; // deeper levels are shown as JSON

/** A JSON value as nested lists of names and values. Texts are unchanged, with the hits of a search marked. */
function valueElement(value, query, depth = 0) {
  if (value === null || typeof value !== "object" || depth > MOST_LEVELS) {
    const text = el("span", { class: "value" });
    longText(text, typeof value === "string" ? value : JSON.stringify(value), query);
    return text;
  }
  const plain = Array.isArray(value) && value.every((each) => typeof each === "number");
  if (plain) return el("span", { class: "value" }, value.slice(0, MOST_ENTRIES).map(number).join(", ") + (value.length > MOST_ENTRIES ? " …" : ""));
  const entries = Object.entries(value);
  if (!entries.length) return el("span", { class: "value dim" }, Array.isArray(value) ? "empty list" : "empty");
  const more = entries.length - MOST_ENTRIES;
  return el("dl", { class: "values" },
    ...entries.slice(0, MOST_ENTRIES).flatMap(([name, each]) => [el("dt", {}, ...textNodes(name)), el("dd", {}, valueElement(each, query, depth + 1))]),
    ...(more > 0 ? [el("dt", {}, "…"), el("dd", { class: "dim" }, `${more} more`)] : []));
}

/** JSON as names and values. A text that is not JSON is shown unchanged. */
function jsonElement(text, query) {
  let value = text;
  try {
    value = JSON.parse(text);
  } catch {} // NaN is not JSON
  return valueElement(value, query);
}

/** Whether a dict of rewards, as JSON, has only numbers. */
function isNumbers(text) {
  try {
    return Object.values(JSON.parse(text)).every((value) => ["number", "boolean"].includes(typeof value));
  } catch {
    return false; // NaN is not JSON
  }
}

function sampleFacts(samples, sample) {
  const { columns, components } = samples;
  const fact = (name, value, title) =>
    el("div", { class: "fact", title }, el("span", { class: "dim" }, name), el("b", {}, value));
  const { kind } = samples.source(sample);
  const known = (name) => (samples.has(name, kind) ? fact(name, number(columns[name][sample])) : null);
  const trained = columns.trained[sample];
  const length = columns.length[sample];
  return el("div", { class: "facts" },
    known("reward"),
    ...components.map((name) => [name, columns[`component ${name}`][sample]])
      .filter(([, value]) => Number.isFinite(value)).map(([name, value]) => fact(name, number(value))),
    known("advantage"),
    fact("tokens", trained === length ? number(length) : `${number(length)}, ${number(trained)} in the loss`),
    Number.isFinite(columns.stale[sample])
      ? fact("staleness", number(columns.stale[sample]), "weight updates between the sample’s oldest token and its training")
      : null,
  );
}

/** The sample, filled when its file is decoded. `links`: {close, open(sample), prompt(id), mates, query, neighbours}. */
function sampleElement(samples, sample, links) {
  const { columns } = samples;
  const step = (to, text, title) =>
    el("button", { class: "quiet", title, disabled: to === undefined, onclick: () => links.open(to) }, text);
  const [before, after] = links.neighbours;
  const head = el("div", { class: "sample-head" },
    el("h3", {}, sourceName(samples.source(sample)), el("span", { class: "dim" }, ` · sample ${columns.sample[sample]}`)),
    ...statusBadges(samples, sample),
    el("span", { class: "steps" },
      step(before, "‹", "the previous sample in the list"),
      step(after, "›", "the next sample in the list"),
      el("button", { class: "quiet", onclick: () => links.prompt(columns.prompt[sample]) }, `this prompt in all ${PLURALS[samples.run.unit]}`),
      el("button", { class: "quiet", title: "close the sample", "aria-label": "Close", onclick: links.close }, "✕")),
  );
  const mates = el("div", { class: "mates" }, el("span", { class: "dim" }, "its group"),
    ...links.mates.map((mate) => el("button", {
      class: "mate", "aria-current": String(mate === sample), title: `sample ${columns.sample[mate]}`,
      onclick: () => links.open(mate),
    }, samples.reply(mate) || number(columns.reward[mate]))));
  const body = el("div", {}, el("p", { class: "dim" }, "decoding …"));
  const root = el("article", { class: "sample card", tabindex: -1, "aria-label": "Sample" },
    head, sampleFacts(samples, sample), links.mates.length > 1 ? mates : null, body);
  samples.open(sample).then((opened) => body.replaceChildren(...sampleBody(samples, sample, opened, links.query)));
  return root;
}

function sampleBody(samples, sample, opened, query) {
  const section = (title, ...content) => el("section", {}, el("h4", {}, title), ...content);
  const folded = (title, text, open) =>
    ["{}", "", "null"].includes(text) ? null : el("details", { open }, el("summary", {}, title), jsonElement(text, query));
  const { episode, rest } = episodeOf(opened.metadata);
  const label = el("div", { class: "text label" });
  longText(label, opened.label, query);
  return [
    section("Prompt", promptElement(samples.prompt(sample), query)),
    el("section", {}, ...responseParts(samples, sample, opened, query)),
    opened.label === "" ? null : section("Label", label),
    isNumbers(opened.rewards) ? null : folded("Reward", opened.rewards, true), // numbers stand above
    episodeElement(episode, query),
    folded("Metadata", rest, rest.length < 2000),
  ].filter(Boolean);
}

let lastMeasure = "difference";

function responseParts(samples, sample, opened, query) {
  const title = el("h4", {}, "Response");
  if (!opened.tokens) {
    const text = el("div", { class: "text" });
    const put = (block, from, to) => longText(block, opened.response.slice(from, to), query);
    text.append(...turnsOf(opened.response, "assistant").map((turn) => turnElement(opened.response, turn, put, { marks: true })));
    const why = samples.vocabulary ? "The response is not the text of its tokens, so" : "The run’s tokenizer is missing, so";
    const said = `${why} the boundaries of its tokens are unknown.`;
    return [title, el("p", { class: "dim small" }, said), text];
  }
  if (opened.tokens.start === opened.tokens.end) return [title, el("p", { class: "dim" }, "The response is empty.")];
  const measures = tokenMeasures(samples, sample, opened.tokens);
  const { root, paint } = tokensElement(samples, opened, measures, query);
  const key = el("span", { class: "legend-place" });
  const choice = el("select", { "aria-label": "Colour of the tokens" },
    ...Object.entries(measures).map(([name, { title }]) => el("option", { value: name }, title)));
  const set = () => {
    const measure = measures[choice.value];
    paint(measure);
    const count = opened.tokens.end - opened.tokens.start;
    let lacks = false;
    for (let k = 0; k < count && !lacks; k++) lacks = !Number.isFinite(measure.value(k));
    key.replaceChildren(legend(measure, lacks));
  };
  choice.value = lastMeasure in measures ? lastMeasure : Object.keys(measures)[0];
  choice.addEventListener("change", () => {
    lastMeasure = choice.value;
    set();
  });
  set();
  return [
    el("div", { class: "response-head" }, title, el("label", { class: "dim small" }, "colour: ", choice), key),
    el("div", { class: "token-frame" }, root),
  ];
}

const PICKS = {
  best: ["best of each group", (rewards) => rewards.indexOf(Math.max(...rewards.filter(Number.isFinite)))],
  worst: ["worst of each group", (rewards) => rewards.indexOf(Math.min(...rewards.filter(Number.isFinite)))],
  first: ["first of each group", () => 0],
};

/** The samples of one prompt in the order of the run, one column for each group. `links`: {open(sample), query}. */
function sideBySide(samples, prompt, links) {
  const STEP = 24;
  const { columns } = samples;
  const rows = Array.from(columns.prompt.keys()).filter((i) => columns.prompt[i] === prompt);
  const groups = [...Map.groupBy(rows, (i) => columns.group[i]).values()];
  const when = (i) => samples.source(i).number + (samples.source(i).kind === "eval" ? 0.5 : 0);
  groups.sort((a, b) => when(a[0]) - when(b[0]) || a[0] - b[0]);
  const scored = rows.some((i) => samples.has("reward", samples.source(i).kind));
  const choice = el("select", { "aria-label": "Which samples" },
    ...Object.entries(PICKS).filter(([name]) => scored || name === "first").map(([name, [title]]) => el("option", { value: name }, title)),
    el("option", { value: "all" }, "all samples"));
  choice.value = scored && groups.length > 1 ? "best" : "all";
  const strip = el("div", { class: "side-by-side" });

  const card = (i, group) => {
    const text = el("div", { class: "text" }, "…");
    samples.response(i).then((response) => text.replaceChildren(...markedNodes(response.slice(0, 4000), links.query)));
    const mean = group.reduce((sum, k) => sum + columns.reward[k], 0) / group.length;
    const rewards = [
      el("div", { class: "fact" }, el("span", { class: "dim" }, "reward"), el("b", {}, number(columns.reward[i]))),
      el("div", { class: "fact" }, el("span", { class: "dim" }, `mean of ${group.length}`), el("b", {}, number(mean))),
    ];
    return el("article", { class: "card" },
      el("div", { class: "head" },
        el("button", { class: "link", onclick: () => links.open(i) }, sourceName(samples.source(i))),
        el("span", { class: "spring" }), ...statusBadges(samples, i).slice(0, 3)),
      el("div", { class: "facts" },
        ...(samples.has("reward", samples.source(i).kind) ? rewards : []),
        el("div", { class: "fact" }, el("span", { class: "dim" }, "tokens"), el("b", {}, number(columns.length[i])))),
      text);
  };
  const draw = (limit) => {
    const pick = PICKS[choice.value]?.[1];
    const shown = groups.flatMap((group) =>
      (pick ? [group[pick(group.map((i) => columns.reward[i]))] ?? group[0]] : group).map((i) => [i, group]));
    strip.replaceChildren(...shown.slice(0, limit).map(([i, group]) => card(i, group)));
    if (shown.length > limit) {
      strip.append(el("button", { class: "quiet more", onclick: () => draw(limit + STEP) }, `${shown.length - limit} more`));
    }
  };
  choice.addEventListener("change", () => draw(STEP));
  draw(STEP);
  const counted = (count, what) => `${count} ${what}${count === 1 ? "" : "s"}`;
  return el("div", { class: "prompt-view" },
    el("div", { class: "card" }, el("h4", {}, "Prompt"), promptElement(samples.prompts[prompt], links.query)),
    el("div", { class: "controls" }, el("label", {}, "show", choice), el("span", {}, `${counted(rows.length, "sample")} in ${counted(groups.length, "group")}`)),
    strip);
}
