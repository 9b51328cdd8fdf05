// Panels of curves, and the tab "Curves": the metrics of all runs over rollouts, in groups, with one legend, smoothing
// and a search.

const NONE = { x: [], y: [] };

/** One line for each run that has one of the metrics. */
const linesOf = (data, metrics) =>
  data.runs.flatMap((run) => {
    const name = metrics.find((metric) => run.series[metric]);
    if (!name) return [];
    const { x, y } = run.series[name];
    const errors = run.series[`${name}-stderr`] ?? NONE;
    const error = errors.x.length ? x.map((at) => errors.y[errors.x.indexOf(at)] ?? 0) : null;
    return [{ run, x, y, error }];
  });

/** A chart of the first metric of `spec` that a run has; null if no run has one. */
const curvePanel = (data, spec, view) => {
  const lines = linesOf(data, spec.metrics);
  if (!lines.length) return null;
  const detail = spec.metrics.find((name) => data.runs.some((run) => run.series[name]));
  const made = lineChart({ ...spec, detail, lines, view });
  return { ...made, words: `${spec.title} ${spec.metrics.join(" ")}`.toLowerCase() };
};

{
  /** The panels of a group, with the evaluations and the components of the reward that the runs have. */
  const withOwn = (data, panels) => {
    const all = [...new Set(data.runs.flatMap((run) => Object.keys(run.series)))];
    const scores = [...new Set(data.runs.flatMap((run) => run.scores))];
    const evals = scores.map((name) => ({ title: name, unit: "score", metrics: [name], points: true }));
    const parts = all.filter((name) => name.startsWith("rollout/reward/"));
    const components = parts.map((name) => ({ title: `reward: ${name.slice(15)}`, unit: "reward", metrics: [name] }));
    return [panels[0], ...evals, ...components, ...panels.slice(1)];
  };

  const legend = (data, view, redraw) =>
    data.runs.map((run) => {
      const button = el("button", { class: "quiet legend", "aria-pressed": "true", title: "Show or hide this run" }, runName(run));
      button.addEventListener("click", () => {
        if (!view.hidden.delete(run)) view.hidden.add(run);
        button.setAttribute("aria-pressed", !view.hidden.has(run));
        redraw();
      });
      return button;
    });

  tab("curves", "Curves", (root, data) => {
    const view = { smoothing: 0, log: false, hidden: new Set(), mark: NaN, zoom };
    let part = null; // the rollouts that all panels are zoomed to
    const groups = Object.entries(data.groups).map(([title, specs], i) => {
      const panels = (i ? specs : withOwn(data, specs)).map((spec) => curvePanel(data, spec, view)).filter(Boolean);
      return { title, panels };
    });
    const used = new Set(Object.values(data.groups).flat().flatMap((spec) => spec.metrics));
    const isPart = (name) => name.startsWith("rollout/reward/") || data.runs.some((run) => run.scores.includes(name));
    const names = [...new Set(data.runs.flatMap((run) => Object.keys(run.series)))].filter((name) => !used.has(name) && !isPart(name));
    const others = { title: "All other metrics", panels: [], rest: true };
    groups.push(others);
    const all = el("button", { class: "quiet", hidden: true, onclick: () => zoom() });
    function redraw() {
      const ends = data.runs.filter((run) => !view.hidden.has(run)).flatMap((run) => run.axes.flatMap((axis) => over(view, run, [axis[0], axis.at(-1)])));
      view.span = part ?? [Math.min(...ends), Math.max(...ends)];
      groups.forEach((group) => group.panels.forEach((each) => each.redraw()));
    }
    function zoom(first, last) {
      part = first === undefined ? null : [first, last];
      all.hidden = !part;
      if (part) all.textContent = `${view.over?.label ?? "rollouts"} ${number(Math.ceil(first))} to ${number(Math.floor(last))}: show all`;
      redraw();
    }

    const search = el("input", { type: "search", placeholder: "search metrics", "aria-label": "Search metrics" });
    const slider = el("input", { type: "range", min: 0, max: 0.98, step: 0.01, value: 0, "aria-label": "Smoothing" });
    const amount = el("output", {}, "0");
    const log = el("input", { type: "checkbox" });
    slider.addEventListener("input", () => {
      view.smoothing = Number(slider.value);
      amount.textContent = slider.value;
      redraw();
    });
    log.addEventListener("change", () => {
      view.log = log.checked;
      redraw();
    });
    const sums = [{ label: "tokens", metric: "rollout/tokens" }, { label: "FLOPs", metric: "rollout/flops" }];
    const counted = sums.filter(({ metric }) => data.runs.every((run) => run.series[metric]));
    const choice = el("select", { "aria-label": "Curves over" }, ...["rollouts", ...counted.map(({ label }) => label)].map((label) => el("option", {}, label)));
    choice.addEventListener("change", () => {
      view.over = counted.find(({ label }) => label === choice.value);
      zoom();
    });
    const more = el("button", { class: "quiet" }, `show the ${names.length} other metrics`);
    root.append(el("div", { class: "controls sticky" },
      ...legend(data, view, redraw),
      el("span", { class: "spring" }),
      all,
      search,
      ...(counted.length ? [el("label", {}, "over", choice)] : []),
      el("label", {}, "smoothing", slider, amount),
      el("label", {}, log, "log scale"),
    ));
    for (const group of groups) {
      group.count = el("span", { class: "dim small" });
      group.grid = el("div", { class: "charts" }, ...group.panels.map((each) => each.card));
      group.section = el("section", {}, el("h2", {}, group.title, " ", group.count), group.grid);
      root.append(group.section);
    }
    const hint = el("p", { class: "dim" }, more);
    root.append(hint);

    const filter = () => {
      const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
      const fits = (text) => words.every((word) => text.includes(word));
      if ((words.length || more.hidden) && !others.panels.length) {
        others.panels = names.map((name) => curvePanel(data, { title: name, unit: data.units[name], metrics: [name], points: name.startsWith("eval/") }, view));
        others.grid.append(...others.panels.map((each) => each.card));
      }
      for (const group of groups) {
        const found = group.panels.filter((each) => (each.card.hidden = !fits(each.words)) === false);
        const asked = !group.rest || words.length || more.hidden;
        group.section.hidden = !found.length || !asked;
        group.count.textContent = words.length ? `${found.length} of ${group.panels.length}` : "";
      }
      hint.hidden = Boolean(words.length) || more.hidden || !names.length;
    };
    more.addEventListener("click", () => {
      more.hidden = true;
      filter();
    });
    search.addEventListener("input", filter);
    filter();
    return (place) => {
      view.mark = place.has("rollout") ? Number(place.get("rollout")) : NaN;
      redraw();
    };
  });
}
