// The tab "Time": the phases of each rollout as bars, in colours that belong to the phase; and memory by phase.
{
  // phase -> label and colour
  const LOOP = {
    rollout: ["generate", "var(--phase-0)"],
    train: ["train", "var(--phase-1)"],
    update_weights: ["sync", "var(--phase-2)"],
    save_model: ["save", "var(--phase-3)"],
    eval: ["evaluate", "var(--phase-4)"],
    rest: ["the rest", "var(--phase-5)"],
  };
  const TRAINING = {
    log_probs: ["log-probs before the step", "var(--phase-0)"],
    ref_log_probs: ["log-probs of the reference", "var(--phase-2)"],
    teacher_log_probs: ["log-probs of the teacher", "var(--phase-3)"],
    values: ["values", "var(--phase-6)"],
    actor_train: ["forward and backward", "var(--phase-1)"],
    critic_train: ["critic", "var(--phase-4)"],
    sleep: ["memory to the host", "var(--phase-5)"],
    wake_up: ["memory back", "var(--phase-7)"],
  };

  /** [{x, seconds: {phase: s}}], one entry for each rollout, with the phases that took time. */
  const turns = (run, phases) => {
    const found = new Map();
    for (const phase of Object.keys(phases)) {
      const { x, y } = run.series[`perf/${phase}_time`] ?? { x: [], y: [] };
      x.forEach((at, i) => {
        if (!found.has(at)) found.set(at, { x: at, seconds: {} });
        found.get(at).seconds[phase] = y[i];
      });
    }
    const steps = run.series["perf/step_time"];
    if ("rest" in phases && steps) {
      steps.x.forEach((at, i) => {
        const seconds = found.get(at)?.seconds ?? {};
        const known = Object.values(seconds).reduce((sum, value) => sum + value, 0);
        if (steps.y[i] > known) seconds.rest = steps.y[i] - known;
      });
    }
    return [...found.values()].sort((a, b) => a.x - b.x);
  };

  /** At most `most` bars. A bar is the mean of its rollouts. */
  const binned = (rows, most) => {
    const size = Math.ceil(rows.length / most);
    if (size <= 1) return { size: 1, bars: rows.map((row) => ({ ...row, from: row.x, to: row.x })) };
    const bars = [];
    for (let i = 0; i < rows.length; i += size) {
      const part = rows.slice(i, i + size);
      const seconds = {};
      for (const row of part) for (const [phase, value] of Object.entries(row.seconds)) seconds[phase] = (seconds[phase] ?? 0) + value / part.length;
      bars.push({ x: (part[0].x + part.at(-1).x) / 2, from: part[0].x, to: part.at(-1).x, seconds });
    }
    return { size, bars };
  };

  /** A chart of stacked bars, one bar for each rollout. */
  const bars = (title, rows, phases, hidden) => chart({
    title,
    height: 220,
    draw: (width, height) => {
      const { size, bars } = binned(rows, Math.floor((width - MARGIN.left - MARGIN.right) / 4));
      const names = Object.keys(phases).filter((phase) => !hidden.has(phase));
      const total = (bar) => names.reduce((sum, phase) => sum + (bar.seconds[phase] ?? 0), 0);
      const most = Math.max(...bars.map(total));
      if (!(most > 0)) return null;
      const across = rollouts([bars[0].from, bars.at(-1).to], width, 0.5);
      const up = scale(0, most * 1.04, height - MARGIN.bottom, MARGIN.top, 5);
      const children = axes(width, height, across, up, { x: size > 1 ? `rollout (a bar is the mean of ${size})` : "rollout", y: "seconds" });
      for (const bar of bars) {
        const [left, right] = [across.place(bar.from - 0.5), across.place(bar.to + 0.5)];
        const gap = Math.min(2, (right - left) * 0.15);
        let below = 0;
        for (const phase of names) {
          const seconds = bar.seconds[phase] ?? 0;
          if (!seconds) continue;
          const [low, high] = [up.place(below), up.place(below + seconds)];
          children.push(svg("rect", { class: `phase ${phase}`, x: left + gap / 2, y: high, width: right - left - gap, height: low - high, style: { fill: phases[phase][1] } }));
          below += seconds;
        }
      }
      const xs = bars.map((bar) => bar.x);
      const rowsAt = (x) => {
        const bar = bars[nearest(xs, x)];
        const parts = names.filter((phase) => bar.seconds[phase]).reverse();
        const mark = (phase) => el("i", { class: "dot", style: { background: phases[phase][1] } });
        const title = size > 1 ? `mean of rollouts ${bar.from} to ${bar.to}: ${duration(total(bar))}` : `rollout ${bar.x}: ${duration(total(bar))}`;
        return { at: bar.x, title, rows: parts.map((phase) => [mark(phase), phases[phase][0], duration(bar.seconds[phase])]) };
      };
      return { children, across, x: xs, rows: rowsAt };
    },
  });

  /** The total, share and median of each phase. */
  const totals = (rows, phases) => {
    const all = rows.flatMap((row) => Object.values(row.seconds)).reduce((sum, value) => sum + value, 0);
    const lines = Object.keys(phases).flatMap((phase) => {
      const values = rows.map((row) => row.seconds[phase]).filter(Number.isFinite).sort((a, b) => a - b);
      const sum = values.reduce((total, value) => total + value, 0);
      if (!sum) return [];
      const mark = el("i", { class: "dot", style: { background: phases[phase][1] } });
      const numbers = [duration(sum), `${((100 * sum) / all).toFixed(1)}%`, duration(values[values.length >> 1]), duration(values.at(-1)), values.length];
      return [el("tr", {}, el("td", {}, mark, phases[phase][0]), ...numbers.map((each) => el("td", { class: "number" }, String(each))))];
    });
    const head = ["phase", "total", "share", "median", "longest", "count"];
    return el("div", { class: "card scroll" }, el("table", { class: "totals" }, el("tr", {}, ...head.map((name, i) => el("th", { class: i ? "number" : "" }, name))), ...lines));
  };

  /** A button for each phase of the runs. It shows or hides the phase in all charts. */
  const legend = (phases, used, hidden, redraw) =>
    Object.entries(phases).filter(([phase]) => used.has(phase)).map(([phase, [label, color]]) => {
      const button = el("button", { class: "quiet legend", "aria-pressed": "true" }, el("span", { class: "run-name" }, el("i", { class: "dot", style: { background: color } }), label));
      button.addEventListener("click", () => {
        if (!hidden.delete(phase)) hidden.add(phase);
        button.setAttribute("aria-pressed", !hidden.has(phase));
        redraw();
      });
      return button;
    });

  const part = (root, data, title, phases) => {
    const hidden = new Set();
    const found = data.runs.map((run) => [run, turns(run, phases)]).filter(([, rows]) => rows.length);
    if (!found.length) return;
    const used = new Set(found.flatMap(([, rows]) => rows.flatMap((row) => Object.keys(row.seconds))));
    if (used.size < 2) return; // a single part would only repeat a phase of the loop
    const made = found.map(([run, rows]) => [bars(run.name, rows, phases, hidden), totals(rows, phases)]);
    root.append(
      el("h2", {}, title),
      el("div", { class: "controls" }, ...legend(phases, used, hidden, () => made.forEach(([each]) => each.redraw()))),
      ...made.map(([each, table]) => el("div", { class: "timeline" }, each.card, table)),
    );
  };

  const memory = (root, data) => {
    const view = { smoothing: 0, log: false, hidden: new Set(), mark: NaN };
    const names = data.runs.flatMap((run) => Object.keys(run.series)).filter((name) => /^perf\/memory_.*_(before|after)$/.test(name));
    const phases = [...new Set(names.map((name) => name.slice(12).replace(/_(before|after)$/, "")))];
    if (!phases.length) return;
    const panels = phases.map((phase) => {
      const lines = data.runs.flatMap((run) =>
        ["before", "after"].flatMap((when) => {
          const found = run.series[`perf/memory_${phase}_${when}`];
          return found ? [{ run, ...found, label: `${run.name}, ${when}`, dashed: when === "before" }] : [];
        }));
      return lineChart({ title: (LOOP[phase] ?? TRAINING[phase] ?? [phase])[0], unit: "GB", detail: "dashed: before, solid: after", lines, view });
    });
    root.append(el("h2", {}, "Memory around each phase"), el("div", { class: "charts" }, ...panels.map((each) => each.card)));
  };

  tab("time", "Time and memory", (root, data) => {
    part(root, data, "Phases of each rollout", LOOP);
    part(root, data, "Inside training", TRAINING);
    memory(root, data);
  });
}
