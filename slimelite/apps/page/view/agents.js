// The tab "Agents": curves of episodes, the episodes of a rollout on one time scale, and the calls of their tools.
// An address is #agents?run=0&source=3. `source` is the number of a sample file of the run.
{
  const STEP = 24; // number of episodes that are shown at first

  /** The episodes of a source: [{sample, branches, episode, turns, error}]. An episode comes only once. */
  const episodesOf = async (samples, source) => {
    const found = new Map();
    for (let i = samples.first[source]; i >= 0 && i < samples.size && samples.columns.chunk[i] === source; i++) {
      const { episode, rest } = episodeOf((await samples.open(i)).metadata);
      if (!episode) continue;
      const { log: _, ...facts } = episode; // only the first sample has the log
      const key = `${samples.columns.group[i]} ${JSON.stringify(facts)}`;
      const before = found.get(key);
      if (before) before.branches += 1;
      else found.set(key, { sample: i, branches: 1, episode, turns: turnsOfEpisode(episode), error: JSON.parse(rest).reward_error });
    }
    return [...found.values()];
  };

  const element = (run, samples, { sample, branches, episode, turns, error }, end) => {
    const { columns, statuses } = samples;
    const { kind, name, number: n } = samples.source(sample);
    const of = kind === "eval" ? `eval ${name}` : kind;
    const place = { run, level: "samples", of, number: n, sample };
    const status = statuses[columns.status[sample]];
    const counted = [[episode.turns, "turn"], [episode.tool_calls, "call"], [branches > 1 ? branches : 0, "sample"]]
      .filter(([count]) => count).map(([count, what]) => `${number(count)} ${what}${count === 1 ? "" : "s"}`);
    return el("li", {},
      el("span", {}, el("a", { href: address("samples", place) }, `sample ${columns.sample[sample]}`), " ",
        status === "completed" ? null : el("span", { class: `badge ${STATUS_BADGE[status] ?? ""}` }, status)),
      el("span", { class: "number", title: "reward" }, number(columns.reward[sample])),
      el("span", { class: "lane" }, ...turns.flatMap((turn) => turnBars(turn, end))),
      el("span", { class: "dim" }, [...counted, turns.length ? duration(endOf(turns)) : null].filter(Boolean).join(", ")),
      typeof error === "string" ? el("span", { class: "why" }, ...textNodes(error.slice(0, 300))) : null);
  };

  /** Calls by tool: their number, and their mean and longest time if it was measured. */
  const callsTable = (episodes) => {
    const tools = new Map();
    for (const { name, seconds } of episodes.flatMap(({ turns }) => turns.flatMap(callsOf))) {
      const tool = tools.get(name) ?? { calls: 0, times: [] };
      tools.set(name, tool);
      tool.calls += 1;
      if (Number.isFinite(seconds)) tool.times.push(seconds);
    }
    if (!tools.size) return null;
    const rows = [...tools].sort(([, one], [, other]) => other.calls - one.calls).map(([name, { calls, times }]) => [
      name, number(calls),
      times.length ? duration(times.reduce((sum, value) => sum + value, 0) / times.length) : "–",
      times.length ? duration(times.reduce((most, value) => Math.max(most, value), 0)) : "–",
    ]);
    return el("section", {}, el("h2", {}, "Calls"), el("div", { class: "scroll" }, el("table", { class: "calls-table" },
      el("tr", {}, ...["tool", "calls", "mean", "longest"].map((name, i) => el("th", { class: i ? "number" : "" }, name))),
      ...rows.map(([name, ...cells]) => el("tr", {}, el("td", {}, ...textNodes(name)), ...cells.map((cell) => el("td", { class: "number" }, cell)))))));
  };

  const key = () => {
    const bar = (kind) => el("span", { class: "lane" }, el("span", { class: `bar ${kind}`, style: { left: 0, width: "100%", "--run": "var(--run-0)" } }));
    return el("p", { class: "dim small episodes-key" }, el("span", {}, bar("reply"), "a reply of the model"),
      el("span", {}, bar("acts"), "the environment or the program"), el("span", {}, "all lines have the same time scale"));
  };

  const hasEpisodes = (run) => run.samples.sources.some(({ episodes }) => episodes);

  tab("agents", "Agents", (root, data) => {
    const runs = data.runs.map((run, i) => [run, i]).filter(([run]) => hasEpisodes(run));
    const which = el("select", { "aria-label": "Run", onchange: () => go("agents", { run: which.value }) },
      ...runs.map(([run, i]) => el("option", { value: i }, run.name)));
    const source = el("select", { "aria-label": "Episodes of", onchange: () => go("agents", { run: which.value, source: source.value }) });
    const place = el("div", {});
    const curves = curveSection(data, data.groups.Agents ?? []);
    root.append(...[el("section", {}, el("h2", {}, "Episodes"),
      el("div", { class: "controls" }, runs.length > 1 ? el("label", {}, "run ", which) : null, el("label", {}, "of ", source)), key(), place), curves].filter(Boolean));
    return async (params) => {
      const [run, i] = runs.find(([, i]) => i === Number(params.get("run"))) ?? runs[0];
      which.value = i;
      const sources = run.samples.sources.map((each, at) => [each, at]).filter(([each]) => each.episodes);
      source.replaceChildren(...sources.map(([each, at]) => el("option", { value: at }, sourceName(each))));
      const last = sources.findLast(([each]) => each.kind === "rollout") ?? sources.at(-1);
      const [, at] = sources.find(([, at]) => params.has("source") && at === Number(params.get("source"))) ?? last;
      source.value = at;
      place.replaceChildren(el("p", { class: "dim" }, "decoding …"));
      const samples = await samplesOf(run);
      const episodes = await episodesOf(samples, at);
      if (Number(source.value) !== at) return; // the user has chosen another source
      const end = Math.max(...episodes.map(({ turns }) => (turns.length ? endOf(turns) : 0)), 1e-3);
      const list = el("ol", { class: "episodes", "aria-label": "Episodes" });
      const draw = (limit) => {
        list.replaceChildren(...episodes.slice(0, limit).map((each) => element(i, samples, each, end)));
        if (episodes.length > limit) list.append(el("button", { class: "quiet more", onclick: () => draw(limit + 4 * STEP) }, `${episodes.length - limit} more`));
      };
      draw(STEP);
      place.replaceChildren(...[list, callsTable(episodes)].filter(Boolean));
    };
  }, (data) => data.runs.some(hasEpisodes));
}
