// The tab "Samples": lists of rollouts, groups, samples and prompts that can be sorted, filtered and searched, with one
// sample beside them.
//
// Addresses: #samples?run=0&level=samples&of=rollout&number=12&group=340&sample=2731, where run, group and sample are
// counted within the page; #samples?rollout=12 for short; and #samples?prompt=7 for one prompt in all rollouts.
{
  const LEVELS = { rollouts: "Rollouts", groups: "Groups", samples: "Samples", prompts: "Prompts" };
  const KINDS = { rollout: "trained on", dropped: "dropped" };

  class View {
    constructor(root, samples) {
      Object.assign(this, { root, samples, filters: [], query: "", hits: null, sorts: {}, place: {}, rows: [] });
      this.kinds = [...new Set(samples.sources.map(({ kind, name }) => (kind === "eval" ? `eval ${name}` : kind)))];
      this.list = rowList((i) => this.row(i));
      this.list.box.addEventListener("keydown", (event) => this.move(event));
      this.build();
    }

    build() {
      const { samples } = this;
      const leave = { group: null, sample: null, prompt: null };
      this.levels = Object.entries(LEVELS).map(([level, title]) => {
        const attributes = { class: "quiet", "data-level": level, onclick: () => this.go({ ...leave, level }) };
        return el("button", attributes, title, " ", el("span", { class: "dim count" }));
      });
      const changed = () => this.go({ ...leave, of: this.kind.value, number: null });
      this.kind = el("select", { "aria-label": "Which samples", onchange: changed },
        ...this.kinds.map((kind) => el("option", { value: kind }, KINDS[kind] ?? kind)));
      const says = "search prompts and responses";
      this.search = el("input", { type: "search", placeholder: says, "aria-label": says, oninput: () => this.typed() });
      this.said = el("span", { class: "dim small", role: "status" });
      const names = Object.keys(numbersOf(samples)).filter((name) => this.kinds.some((of) => samples.has(name, of)));
      const add = el("select", { "aria-label": "Add a filter", onchange: () => { this.addFilter(add.value); add.value = ""; } },
        el("option", { value: "" }, "+ filter"),
        ...names.map((name) => el("option", { value: name }, name)),
        el("option", { value: "status" }, "status"),
        samples.reasons?.length > 1 ? el("option", { value: "dropped because" }, "dropped because") : null);
      this.chips = el("span", { class: "chips" });
      this.head = el("div", { class: "row head", role: "row" });
      this.table = el("div", { class: "list card", role: "table" }, this.head, this.list.box);
      this.main = el("div", { class: "main" });
      this.side = el("div", { class: "side", hidden: true });
      this.root.replaceChildren(
        ...samples.notes.map((note) => el("p", { class: "note" }, note)),
        el("div", { class: "controls" },
          el("span", { class: "levels", role: "group", "aria-label": "Level" }, ...this.levels),
          this.kind, this.search, this.chips, add, this.said),
        el("div", { class: "split" }, this.main, this.side),
      );
    }

    /** Change the place and the address, so that the browser's back button works. */
    go(changes, quietly = false) {
      const next = { ...this.place, ...changes };
      const kept = Object.fromEntries(Object.entries(next).filter(([, value]) => value !== null && value !== undefined));
      if (!quietly) return go("samples", kept);
      history.replaceState(null, "", address("samples", kept));
      this.show(new URLSearchParams(kept));
    }

    show(params) {
      const whole = (name) => (params.get(name) === null ? null : Number(params.get(name)));
      const short = whole("rollout");
      this.place = {
        run: whole("run") ?? 0,
        level: Object.hasOwn(LEVELS, params.get("level")) ? params.get("level") : short === null ? "rollouts" : "groups",
        of: this.kinds.includes(params.get("of")) ? params.get("of") : this.kinds[0],
        number: whole("number") ?? short,
        group: whole("group"), prompt: whole("prompt"), sample: whole("sample"),
      };
      if (this.samples.columns.chunk?.[this.place.sample] === undefined) this.place.sample = null; // the address belongs to another page
      this.refresh();
    }

    addFilter(column) {
      this.filters.push({ column, low: "", high: "", value: "" });
      this.refresh();
      this.chips.lastElementChild?.querySelector("input, select")?.focus();
    }

    typed() {
      clearTimeout(this.timer);
      this.timer = setTimeout(() => this.find(this.search.value), 200);
    }

    /** Search all prompts and responses, one file at a time. */
    async find(query) {
      const { samples } = this;
      this.query = query;
      if (!query) {
        this.hits = null;
        this.said.textContent = "";
        return this.refresh();
      }
      const hits = new Uint8Array(samples.size);
      const inPrompt = samples.prompts.map((prompt) => findHits(prompt, query).length > 0);
      let found = 0;
      for (let i = 0; i < samples.size; i++) {
        if (samples.first[samples.columns.chunk[i]] === i) {
          await samples.chunk(i);
          this.said.textContent = `searching: ${number((100 * i) / samples.size)} %`;
          if (this.query !== query) return undefined;
        }
        if (inPrompt[samples.columns.prompt[i]] || findHits(await samples.response(i), query).length) {
          hits[i] = 1;
          found++;
        }
      }
      if (this.query !== query) return undefined;
      this.hits = hits;
      this.said.textContent = found ? "" : "no sample contains it";
      return this.refresh();
    }

    /** The samples that match the place, the filters and the search. */
    left() {
      const { samples, place } = this;
      const { columns } = samples;
      const numbers = numbersOf(samples);
      const wanted = samples.sources.map(({ kind, name, number: n }) =>
        (kind === "eval" ? `eval ${name}` : kind) === place.of && (place.number === null || n === place.number));
      const tests = this.filters.map(({ column, low, high, value }) => {
        if (column === "status") return value && ((i) => samples.statuses[columns.status[i]] === value);
        if (column === "dropped because") return value && ((i) => samples.reasons[columns.reason[i]] === value);
        // the numbers are float32: 0.1 is in the range from 0.1 on
        const [least, most] = [low === "" ? -Infinity : Math.fround(low), high === "" ? Infinity : Math.fround(high)];
        const values = numbers[column];
        return (low !== "" || high !== "") && ((i) => values[i] >= least && values[i] <= most);
      }).filter(Boolean);
      const found = [];
      for (let i = 0; i < samples.size; i++) {
        if (!wanted[columns.chunk[i]] || (place.group !== null && columns.group[i] !== place.group)) continue;
        if (this.hits && !this.hits[i]) continue;
        if (tests.every((test) => test(i))) found.push(i);
      }
      this.narrowed = Boolean(tests.length || this.hits);
      return found;
    }

    refresh() {
      const { samples, place } = this;
      const left = this.left();
      const groups = new Set(left.map((i) => samples.columns.group[i])).size;
      const counts = {
        rollouts: new Set(left.map((i) => samples.columns.chunk[i])).size, groups, samples: left.length,
        prompts: new Set(left.map((i) => samples.columns.prompt[i])).size,
      };
      for (const button of this.levels) {
        const level = button.dataset.level;
        button.setAttribute("aria-pressed", level === place.level);
        button.querySelector(".count").textContent = counts[level].toLocaleString("en-US");
        if (level === "rollouts") button.firstChild.data = place.of?.startsWith("eval ") ? "Evaluations" : samples.run.unit === "batch" ? "Batches" : LEVELS.rollouts;
      }
      this.kind.value = place.of;
      this.drawChips();
      if (samples.prompts[place.prompt] !== undefined) {
        const key = `${place.prompt} ${this.query}`; // the choice in this view stays while the user opens its samples
        if (this.beside?.key !== key) {
          const links = { open: (sample) => this.go({ sample }), query: this.query };
          this.beside = { key, element: sideBySide(samples, place.prompt, links) };
        }
        this.main.replaceChildren(this.beside.element);
      } else {
        const partial = this.narrowed || samples.size < samples.run.samples.total;
        const state = { query: this.query, of: place.of, partial, narrow: place.sample !== null, one: place.number !== null };
        this.columns = columnsOf(samples, place.level, state);
        const all = rowsOf(samples, place.level, left, !this.narrowed);
        const sort = this.sorts[place.level];
        const by = sort && this.columns.find((column) => column.title === sort.title);
        this.rows = by ? sorted(all, by.key, sort.down) : all;
        this.drawHead(sort);
        if (this.main.firstChild !== this.table) this.main.replaceChildren(this.table); // a replaced element loses the focus
        const widths = this.columns.map(({ least, text }) => (text ? `minmax(${least}px, ${least}fr)` : `${least}px`));
        this.table.style.setProperty("--columns", widths.join(" "));
        this.table.style.setProperty("--least", `${this.columns.reduce((sum, { least }) => sum + least + 14, 18)}px`);
        this.list.reset(this.rows.length);
      }
      this.drawSample();
    }

    drawHead(now) {
      const focused = [...this.head.children].findIndex((title) => title.contains(document.activeElement));
      this.head.replaceChildren(...this.columns.map((column) => {
        const on = now?.title === column.title;
        const state = on ? (now.down ? "descending" : "ascending") : "none";
        const text = `${column.title}${on ? (now.down ? " ↓" : " ↑") : ""}`;
        const attributes = { role: "columnheader", class: column.number ? "number" : "", "aria-sort": column.key ? state : null };
        const sort = { class: "link", title: column.hint, onclick: () => this.sortBy(column) };
        return el("span", attributes, column.key ? el("button", sort, text) : text);
      }));
      this.head.children[focused]?.firstElementChild?.focus(); // keep the focus for the keyboard
    }

    /** Each click changes the order: for numbers first descending, then ascending, then the order of the run. */
    sortBy(column) {
      const { level } = this.place;
      const now = this.sorts[level];
      const first = Boolean(column.number);
      const next = now?.title !== column.title ? first : now.down === first ? !first : null;
      this.sorts[level] = next === null ? null : { title: column.title, down: next };
      this.refresh();
      this.list.box.scrollTop = 0;
    }

    row(i) {
      const row = this.rows[i];
      const cells = this.columns.map(({ number: right, text, cell }) =>
        el("span", { role: "cell", class: right ? "number" : text ? "text-cell" : "" }, ...[cell(row)].flat()));
      const chosen = row === this.place.sample || i === this.at ? " chosen" : "";
      const attributes = { class: `row${chosen}`, role: "row", "aria-rowindex": i + 1, onclick: () => this.enter(i) };
      return el("div", attributes, ...cells);
    }

    /** Go from a row to its parts: from a rollout to its groups, and so on. */
    enter(i) {
      const row = this.rows[i];
      this.at = null;
      const { level } = this.place;
      if (level === "samples") this.go({ sample: row }, this.place.sample !== null);
      else if (level === "rollouts") this.go({ level: "groups", number: row.source.number, sample: null });
      else if (level === "groups") this.go({ level: "samples", group: row.key, sample: row.rows[0] });
      else this.go({ prompt: row.key, sample: null });
    }

    move(event) {
      const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: 15, PageUp: -15 };
      const opened = this.place.level === "samples" && this.place.sample !== null;
      const now = opened ? this.rows.indexOf(this.place.sample) : this.at ?? -1;
      if (event.key === "Enter" && now >= 0) return this.enter(now);
      if (!(event.key in steps) || !this.rows.length) return undefined;
      event.preventDefault();
      const next = Math.max(0, Math.min(this.rows.length - 1, now + steps[event.key]));
      if (opened) this.go({ sample: this.rows[next] }, true);
      else this.at = next;
      this.list.reveal(next);
      return this.list.show();
    }

    drawChips() {
      const { place, samples } = this;
      const chip = (text, ...rest) => el("span", { class: "chip" }, text, ...rest);
      const scope = (text, changes) =>
        chip(text, el("button", { class: "link", "aria-label": `Leave ${text}`, onclick: () => this.go(changes) }, "✕"));
      const one = samples.sources.find((source) => source.number === place.number && place.of.startsWith(source.kind));
      const shown = [
        one ? scope(sourceName(one), { number: null, group: null, sample: null, level: "rollouts" }) : null,
        place.group !== null ? scope(`group ${place.group + 1}`, { group: null, sample: null, level: "groups" }) : null,
        place.prompt !== null ? scope("one prompt", { prompt: null, sample: null }) : null,
      ].filter(Boolean);
      const made = this.filters.map((filter) => filter.chip ?? (filter.chip = this.filterChip(filter, chip)));
      // a chip in which the user types is not replaced
      const all = [...shown, ...made];
      if (all.length !== this.chips.children.length || all.some((node, i) => node !== this.chips.children[i])) {
        const focus = document.activeElement;
        this.chips.replaceChildren(...all);
        if (this.chips.contains(focus)) focus.focus();
      }
    }

    filterChip(filter, chip) {
      const { samples } = this;
      const drop = el("button", { class: "link", "aria-label": `Remove the filter ${filter.column}`, onclick: () => {
        this.filters = this.filters.filter((other) => other !== filter);
        this.refresh();
      } }, "✕");
      const lists = { status: samples.statuses, "dropped because": samples.reasons.slice(1) };
      if (filter.column in lists) {
        const changed = () => {
          filter.value = choice.value;
          this.refresh();
        };
        const options = lists[filter.column].map((value) => el("option", { value }, ...textNodes(value.slice(0, 80))));
        const choice = el("select", { "aria-label": filter.column, onchange: changed }, el("option", { value: "" }, "any"), ...options);
        return chip(filter.column, choice, drop);
      }
      const bound = (end, title) => {
        const changed = (event) => {
          filter[end] = event.target.value;
          this.refresh();
        };
        const label = `${filter.column} ${title}`;
        return el("input", { type: "number", step: "any", placeholder: title, "aria-label": label, oninput: changed });
      };
      return chip(filter.column, bound("low", "from"), bound("high", "to"), drop);
    }

    drawSample() {
      const { sample } = this.place;
      const { samples } = this;
      this.side.hidden = sample === null;
      this.side.parentElement.classList.toggle("open", sample !== null);
      if (sample === null) {
        this.drawn = null;
        return this.side.replaceChildren();
      }
      const drawn = `${sample} ${this.query}`;
      if (drawn === this.drawn) return undefined;
      this.drawn = drawn;
      const at = this.rows.indexOf(sample);
      const { chunk, group } = samples.columns;
      const mates = [];
      for (let i = samples.first[chunk[sample]]; i < samples.size && chunk[i] === chunk[sample]; i++) {
        if (group[i] === group[sample]) mates.push(i);
      }
      return this.side.replaceChildren(sampleElement(samples, sample, {
        mates, query: this.query,
        neighbours: at < 0 ? [] : [this.rows[at - 1], this.rows[at + 1]],
        open: (other) => this.go({ sample: other }, true),
        prompt: (prompt) => this.go({ prompt, sample: null }),
        close: () => this.go({ sample: null }),
      }));
    }
  }

  tab("samples", "Samples", (root, data) => {
    root.classList.add("samples");
    const views = new Map();
    const choice = el("select", { "aria-label": "Run", onchange: () => go("samples", { run: choice.value }) },
      ...data.runs.map((run, i) => el("option", { value: i }, run.name)));
    const place = el("div", {});
    root.append(...(data.runs.length > 1 ? [el("label", { class: "run-choice dim" }, "run ", choice)] : []), place);
    return async (params) => {
      const i = Number(params.get("run") ?? 0) in data.runs ? Number(params.get("run") ?? 0) : 0;
      const run = data.runs[i];
      choice.value = i;
      if (!run.samples.sources.length) {
        const notes = run.samples.notes.map((note) => el("p", { class: "note" }, note));
        place.replaceChildren(...notes, el("p", { class: "dim" }, "This run saved no samples."));
        return;
      }
      if (!views.has(i)) {
        place.replaceChildren(el("p", { class: "dim" }, "decoding …"));
        views.set(i, samplesOf(run).then((samples) => new View(el("div", {}), samples)));
      }
      const view = await views.get(i);
      if (place.firstChild !== view.root) place.replaceChildren(view.root);
      view.show(params);
    };
  });
}
