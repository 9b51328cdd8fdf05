// A response as tokens. Each token has the colour of a number, and a box shows all numbers of the token at the pointer.

const UNTOLD = {
  engine: "no engine sampled it",
  difference: "not computed",
  entropy: "not computed",
  version: "unknown",
};

/** The numbers of a sample that can colour its tokens: name -> {title, value(k), scale, low, high, …}. */
function tokenMeasures(samples, sample, tokens) {
  const { columns } = samples;
  const count = tokens.end - tokens.start;
  const of = (name) => (k) => tokenNumber(tokens, name, k);
  const own = (name) => tokens.columns[name] !== undefined;
  const found = {};
  if (own("difference")) {
    const [title, unit] = ["trainer − engine", "log-prob"];
    found.difference = { title, unit, value: of("difference"), digits: 4, scale: "both", limit: 0.1 };
  }
  if (own("entropy")) found.entropy = { title: "entropy", unit: "nats", value: of("entropy"), digits: 3, scale: "more", limit: 3 };
  if (own("engine")) found.engine = { title: "engine’s log-prob", value: of("engine"), digits: 3, scale: "less", limit: 5 };
  if (own("engine") && own("difference")) {
    const value = (k) => tokenNumber(tokens, "engine", k) + tokenNumber(tokens, "difference", k);
    found.trainer = { title: "trainer’s log-prob", value, digits: 3, scale: "less", limit: 5 };
  }
  const perToken = own("advantages");
  const ofSample = (k) => (tokens.columns.mask[tokens.start + k] ? columns.advantage[sample] : NaN);
  const advantage = perToken ? of("advantages") : ofSample;
  const limit = Math.max(0, ...sampled(columns.advantage.filter(Number.isFinite)).map(Math.abs)) || 1;
  const title = perToken ? "advantage" : "advantage of the sample";
  if (samples.has("advantage", samples.source(sample).kind)) found.advantage = { title, value: advantage, digits: 3, scale: "both", limit };
  if (own("version")) {
    const versions = Array.from({ length: count }, (_, k) => tokenNumber(tokens, "version", k)).filter(Number.isFinite);
    const [oldest, newest] = versions.reduce(([a, b], v) => [Math.min(a, v), Math.max(b, v)], [Infinity, -Infinity]);
    const span = Math.max(1, newest - oldest);
    found.version = { title: "weight version", value: of("version"), digits: 0, scale: "steps", newest, limit: span };
  }
  found.mask = { title: "in the loss", value: of("mask"), digits: 0, scale: "mask", limit: 1 };
  const known = new Set(["token", "lengths", "mask", "engine", "difference", "entropy", "version", "advantages"]);
  for (const name of Object.keys(tokens.columns).filter((name) => !known.has(name))) {
    const values = tokens.columns[name].subarray(tokens.start, tokens.end).filter(Number.isFinite);
    const most = values.reduce((found, value) => Math.max(found, Math.abs(value)), 1e-6);
    const digits = 2 - Math.min(-1, Math.floor(Math.log10(most))); // three of them, also for weights such as 0.00149
    found[name] = { title: name.replaceAll("_", " "), value: of(name), digits, scale: "both", limit: most };
  }
  return found;
}

/** At most a thousand of the values, at even distances. */
function sampled(values) {
  const step = Math.ceil(values.length / 1000);
  return Array.from(values).filter((_, i) => i % step === 0);
}

/** {side, strength}: which of the two colours, and its strength from 0 to 1; null without a value. */
function tint(measure, value) {
  if (!Number.isFinite(value)) return null;
  const { scale, limit } = measure;
  if (scale === "mask") return { side: "more", strength: value ? 0.45 : 0 };
  const size = scale === "steps" ? measure.newest - value : Math.abs(value);
  const side = scale === "less" || scale === "steps" || (scale === "both" && value < 0) ? "less" : "more";
  return { side, strength: Math.min(1, size / limit) ** 0.7 };
}

function shownNumber(value, digits) {
  if (!Number.isFinite(value)) return "–";
  const text = Math.abs(value).toFixed(digits);
  return (value < 0 && Number(text) ? "−" : "") + text;
}

/** The legend of a measure: its scale, the ends, a token without a value, and a token outside the loss. */
function legend(measure, lacks) {
  const { scale, limit } = measure;
  const [low, high] = {
    both: [`−${number(limit)}`, `+${number(limit)}`],
    more: ["0", number(limit)],
    less: [`−${number(limit)}`, "0"],
    steps: [String(measure.newest - limit), String(measure.newest)],
    mask: ["no", "yes"],
  }[scale];
  return el("div", { class: "legend" },
    el("span", { class: "dim" }, low),
    el("i", { class: `scale ${scale}` }),
    el("span", { class: "dim" }, high),
    measure.unit ? el("span", { class: "dim" }, measure.unit) : null,
    lacks ? el("span", { class: "key" }, el("b", { class: "token none" }, "no value")) : null,
    el("span", { class: "key" }, el("b", { class: "token masked" }, "not in the loss")),
  );
}

/** The response as turns of token spans: {root, paint(name)}; `query` is marked. */
function tokensElement(samples, opened, measures, query) {
  const STEP = 5000;
  const { response, tokens } = opened;
  const spans = samples.spans(tokens);
  const starts = offsets(spans.map((span) => span.text.length));
  const hits = findHits(response, query);
  const says = "Response; arrow keys go from token to token";
  const root = el("div", { class: "text tokens", tabindex: 0, role: "group", "aria-label": says });
  let [painted, drawn, nextHit] = [null, [], 0];

  const element = (span, i) => {
    while (nextHit < hits.length && hits[nextHit][1] <= starts[i]) nextHit++;
    const hit = nextHit < hits.length && hits[nextHit][0] < starts[i + 1];
    const masked = span.tokens.every((k) => !tokens.columns.mask[tokens.start + k]);
    const { name, id } = samples.token(tokens, span.tokens[0]);
    const empty = span.text === "";
    const names = `token${masked ? " masked" : ""}${hit ? " hit" : ""}${empty ? " empty" : ""}`;
    const made = el("b", { class: names }, ...(empty ? textNodes(name ?? `⟨${id}⟩`) : breaksShown(span.text)));
    made.span = span;
    return made;
  };
  const paint = (measure) => {
    painted = measure;
    for (const node of drawn) {
      const values = node.span.tokens.map(measure.value).filter(Number.isFinite);
      const value = values.reduce((most, v) => (Math.abs(v) > Math.abs(most) ? v : most), values[0]);
      const found = tint(measure, value);
      node.classList.toggle("none", !found);
      node.classList.toggle("less", found?.side === "less");
      node.style.setProperty("--much", found ? `${(100 * found.strength).toFixed(1)}%` : "0%");
    }
  };
  const draw = (limit) => {
    [drawn, nextHit] = [[], 0];
    let next = 0;
    const last = Math.min(limit, spans.length);
    const put = (block, start, end) => {
      while (next < last && starts[next] < end) {
        const node = element(spans[next], next++);
        drawn.push(node);
        block.append(node);
      }
    };
    const turns = turnsOf(response, "assistant").map((turn) => turnElement(response, turn, put, { marks: true }));
    root.replaceChildren(...turns.filter((turn) => turn.querySelector("b")));
    // spans without text at the end come after all text
    if (next < last) put(root.lastElementChild?.lastElementChild ?? root, 0, Infinity);
    if (last < spans.length) {
      root.append(el("button", { class: "quiet more", onclick: () => draw(limit + 2 * STEP) },
        `show more: ${(spans.length - last).toLocaleString("en-US")} tokens are left out`));
    }
    if (painted) paint(painted);
  };
  const firstHit = hits.length ? starts.findIndex((start) => start >= hits[0][1]) : 0;
  draw(Math.max(STEP, firstHit + 200));
  tokenBox(root, ({ span }) => span.tokens.map((k) => tokenNumbers(samples, tokens, measures, span, k)));
  return { root, paint };
}

/** A text with a sign for each line break, because a line break is invisible as a token. */
function breaksShown(text) {
  return text.split("\n").flatMap((part, i) => [...(i ? [el("i", { class: "break" }), "\n"] : []), ...textNodes(part)]);
}

/** All numbers of one token. */
function tokenNumbers(samples, tokens, measures, span, k) {
  const { id, name } = samples.token(tokens, k);
  const rows = Object.entries(measures).map(([key, { title, value, digits }]) => {
    const found = value(k);
    let text = key === "mask" ? (found ? "yes" : "no") : shownNumber(found, digits);
    if (key === "engine" && Number.isFinite(found)) text += ` (${number(100 * Math.exp(found))} %)`;
    if (!Number.isFinite(found) && UNTOLD[key]) text = `– ${UNTOLD[key]}`;
    return el("tr", { "data-measure": key }, el("th", {}, title), el("td", {}, text));
  });
  const shared = span.tokens.length > 1 ? " part of" : "";
  const text = span.text || name || "";
  return el("div", {},
    el("div", { class: "head" },
      el("span", {}, `${k + 1}${shared} `, el("code", {}, ...textNodes(JSON.stringify(text)))),
      el("span", { class: "dim" }, `id ${id}`)),
    el("table", {}, ...rows));
}
