// The tab "Overview": the facts, progress, scores and alarms of each run.

/** Curves over all rollouts, each with a link to the tab "Curves"; null if the runs have none of these metrics. */
function curveSection(data, specs) {
  const view = { smoothing: 0, log: false, hidden: new Set(), mark: NaN, zoom: () => go("curves") };
  const ends = data.runs.flatMap((run) => run.axes.flatMap((axis) => [axis[0], axis.at(-1)]));
  view.span = [Math.min(...ends), Math.max(...ends)];
  const panels = specs.map((spec) => curvePanel(data, spec, view)).filter(Boolean);
  panels.forEach((each) => each.redraw());
  return panels.length ? el("section", {}, el("h2", {}, "Curves"), el("div", { class: "charts" }, ...panels.map((each) => each.card))) : null;
}

{
  const STATUS = { finished: "good", running: "warn", failed: "bad", interrupted: "bad", "stopped without a word": "bad" };

  // measures of supervised training, shown in place of a reward
  const SUPERVISED = { "train/loss": "loss", "train/rewards/accuracies": "accuracy", "train/rewards/margins": "margin" };

  /** The first, best and last value of a series, and the rollout of the best. */
  const scores = (run, name) => {
    const { x, y } = run.series[name];
    const sign = name === "train/loss" ? -1 : 1;
    const best = y.reduce((found, value, i) => (sign * value > sign * y[found] || Number.isNaN(y[found]) ? i : found), 0);
    const title = SUPERVISED[name] ?? (name === "rollout/raw_reward" ? "reward" : name.replace("eval/", ""));
    return el("tr", {},
      el("td", { title: name }, title),
      el("td", { class: "number" }, number(y[0])),
      el("td", { class: "number" }, number(y[best])),
      el("td", { class: "number dim" }, x[best] < 0 ? "start" : String(Math.floor(x[best]))),
      el("td", { class: "number" }, number(y[y.length - 1])),
    );
  };

  const facts = (run) => {
    const { status, versions, config } = run;
    const machine = versions.machine ?? {};
    const done = `${status.rollouts_done ?? 0} of ${status.num_rollout ?? "?"}`;
    const memory = machine.memory && `${Math.round(parseInt(machine.memory) / 1e6)} GB`; // it is in kB, as in /proc/meminfo
    const hardware = [machine.gpus?.join(", "), machine.cpu && `${machine.cores} × ${machine.cpu}`, memory];
    const packages = ["python", "torch", "transformers", "ray", "sglang"];
    return {
      [PLURALS[run.unit]]: done,
      time: duration(run.seconds), // of all processes of a resumed run; status.json has only the last process
      began: status.began ? new Date(status.began * 1000).toLocaleString() : null,
      method: status.method,
      model: config.hf_checkpoint,
      data: [config.prompt_data].flat().filter(Boolean).join(", "),
      machine: hardware.filter(Boolean).join(", "),
      versions: packages.filter((name) => versions[name]).map((name) => `${name} ${versions[name]}`).join(", "),
      slimelite: `${versions.slimelite ?? "?"}, commit ${versions.commit ?? "unknown"}`,
      folder: run.folder,
      command: versions.command,
    };
  };

  const card = (run) => {
    const status = run.status.status ?? "unknown";
    const shown = Object.entries(facts(run)).filter(([, value]) => value);
    const names = [...run.scores, ...(run.unit === "batch" ? Object.keys(SUPERVISED) : ["rollout/raw_reward"])].filter((name) => run.series[name]);
    return el("article", { class: "card run", style: { "--run": run.color } },
      el("div", { class: "head" }, el("h2", {}, runName(run)), el("span", { class: `badge ${STATUS[status] ?? ""}` }, status)),
      run.status.message ? el("p", { class: "message mono" }, run.status.message) : null,
      names.length
        ? el("div", { class: "scroll" }, el("table", { class: "scores" },
            el("tr", {}, ...["", "first", "best", `at ${run.unit}`, "last"].map((name, i) => el("th", { class: i ? "number" : "" }, name))),
            ...names.map((name) => scores(run, name))))
        : null,
      el("dl", {}, ...shown.flatMap(([name, value]) => [el("dt", {}, name), el("dd", { class: name === "command" ? "mono" : "" }, String(value))])),
    );
  };

  /** The alarms, with links to the rollouts in which they began. */
  const alarm = (run, index, { kind, rollout_id, says, advice, ended }) => {
    const place = { run: index, rollout: rollout_id };
    const until = ended === null ? "and later" : ended - 1 > rollout_id ? `to ${ended - 1}` : null;
    return el("li", {},
      el("div", { class: "alarm-head" },
        el("span", { class: "badge warn" }, kind.replaceAll("_", " ")),
        el("span", {}, el("a", { href: address("samples", place) }, `${run.unit} ${rollout_id}`), " ", until),
        el("a", { href: address("curves", place) }, "in the curves"),
        runName(run)),
      el("p", {}, ...prose(`${says}.`)),
      el("p", { class: "dim" }, ...prose(advice)),
    );
  };

  const alarms = (data) => {
    const found = data.runs.flatMap((run, i) => run.alarms.map((each) => alarm(run, i, each)));
    const title = found.length === 1 ? "1 alarm" : `${found.length || "No"} alarms`;
    return el("section", { class: "card alarms" }, el("h2", {}, title), found.length ? el("ul", {}, ...found) : null);
  };

  // titles of the panels on this tab, besides the scores of the runs
  const CHOSEN = [
    "reward", "reward margin", "pairs ranked right", "response length", "replies of an episode", "episodes that failed",
  ];

  /** The most important curves. */
  const curves = (data) => {
    const scores = [...new Set(data.runs.flatMap((run) => run.scores))].slice(0, 2);
    const titles = data.runs.some((run) => run.unit === "batch") ? ["loss", ...CHOSEN] : CHOSEN;
    const chosen = Object.values(data.groups).flat().filter(({ title }) => titles.includes(title));
    return curveSection(data, [...chosen, ...scores.map((name) => ({ title: name, unit: "score", metrics: [name], points: true }))]);
  };

  tab("overview", "Overview", (root, data) => {
    root.append(...[el("div", { class: "runs" }, ...data.runs.map(card)), alarms(data), curves(data)].filter(Boolean));
  });
}
