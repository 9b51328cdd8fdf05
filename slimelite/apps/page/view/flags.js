// The tab "Flags": the flags that differ between the runs, and all flags with a filter.
{
  const text = (value) => {
    if (value === undefined || typeof value === "string") return value ?? "–";
    const short = JSON.stringify(value);
    return short.length > 60 ? JSON.stringify(value, null, 1) : short;
  };

  tab("flags", "Flags", (root, data) => {
    const rows = data.flags.sort().map((name) => {
      const option = `--${name.replaceAll("_", "-")}`;
      const values = data.runs.map((run) => text(run.config[name]));
      const reasons = data.runs.map((run) => run.derivations[name]);
      const differs = data.differing.includes(option);
      const cells = values.map((value, i) => el("td", { class: "mono" }, value, reasons[i] ? el("div", { class: "reason" }, reasons[i]) : null));
      const row = el("tr", { class: differs ? "differs" : "" }, el("td", { class: "mono" }, option), ...cells);
      return { differs, row, words: `${name} ${option} ${values.join(" ")}`.toLowerCase() };
    });

    const many = data.runs.length > 1;
    const search = el("input", { type: "search", placeholder: "filter by name or value", "aria-label": "Filter flags" });
    const only = el("input", { type: "checkbox" });
    only.checked = many;
    const count = el("span", { class: "dim" });
    const body = el("tbody", {}, ...rows.map((each) => each.row));
    const filter = () => {
      const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
      let found = 0;
      for (const each of rows) {
        each.row.hidden = (only.checked && !each.differs) || !words.every((word) => each.words.includes(word));
        found += !each.row.hidden;
      }
      count.textContent = found ? `${found} of ${rows.length} flags` : only.checked && !words.length ? "all flags are the same" : "no flag matches";
    };
    search.addEventListener("input", filter);
    only.addEventListener("change", filter);
    root.append(
      el("div", { class: "controls" }, search, many ? el("label", {}, only, "only where the runs differ") : null, count),
      el("div", { class: "card scroll" }, el("table", { class: "flags" },
        el("thead", {}, el("tr", {}, el("th", {}, "flag"), ...data.runs.map((run) => el("th", {}, runName(run))))), body)),
    );
    filter();
  });
}
