// Charts: scales, axes, lines of runs over rollouts with values under the pointer, and stacked bars.
// All charts of the page that are in sight share one crosshair.

const MARGIN = { left: 56, right: 14, top: 10, bottom: 34 };
const charts = new Set();

/** Round steps from `low` to `high`, about `count` of them: 1, 2 or 5 times a power of ten. */
function ticks(low, high, count) {
  const raw = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = power * ([1, 2, 5].find((factor) => factor * power >= raw * 0.999) ?? 10);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(i * step);
  return found;
}

/** The label of a tick: short, but different from the labels of its neighbours. */
function tickLabel(value, step) {
  if (value === 0) return "0";
  const size = Math.max(Math.abs(value), step);
  if (size >= 1e6 || size < 1e-3) return value.toExponential(step < Math.abs(value) / 9.99 ? 1 : 0);
  if (size >= 1e4) return `${+(value / 1000).toFixed(2)}k`;
  return value.toFixed(Math.max(0, Math.ceil(-Math.log10(step) - 1e-9)));
}

/** A linear or logarithmic scale from [low, high] to [from, to], with its ticks as [value, label]. */
function scale(low, high, from, to, count, log = false) {
  if (log) {
    const [a, b] = [Math.log10(low), Math.log10(high)];
    const place = (value) => from + ((Math.log10(value) - a) / (b - a)) * (to - from);
    const every = Math.max(1, Math.ceil((b - a) / count));
    const powers = ticks(a, b, count).filter((power) => b - a < 1.2 || Number.isInteger(power / every));
    return { place, ticks: powers.map((power) => [10 ** power, number(10 ** power)]) };
  }
  const place = (value) => from + ((value - low) / (high - low)) * (to - from);
  const values = ticks(low, high, count);
  const step = values.length > 1 ? values[1] - values[0] : high - low;
  return { place, ticks: values.map((value) => [value, tickLabel(value, step)]) };
}

/** The range of the values, widened to at least `least`. It begins at 0 if this wastes less than half of it. */
function range(values, least, log) {
  let low = Infinity;
  let high = -Infinity;
  for (const value of values) {
    if (!Number.isFinite(value) || (log && value <= 0)) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  if (low > high) return null;
  if (log) return high / low < 1.5 ? [low / 1.5, high * 1.5] : [low, high];
  if (low >= 0 && low < high / 2) low = 0;
  const missing = Math.max(least, Math.abs(high) * 0.05, 1e-12) - (high - low);
  if (missing > 0) [low, high] = low >= 0 && high < least ? [0, least] : [low - missing / 2, high + missing / 2];
  const room = (high - low) * 0.04;
  return [low === 0 ? 0 : low - room, high + room];
}

/** The exponential mean of the values so far; `weight` of 0 changes nothing. */
function smooth(values, weight) {
  if (!weight) return values;
  let sum = 0;
  let norm = 0;
  return values.map((value) => {
    if (!Number.isFinite(value)) return value;
    sum = sum * weight + value;
    norm = norm * weight + 1;
    return sum / norm;
  });
}

/** The path of a line. If many points share a pixel, it has only the lowest and the highest of them. */
function path(xs, ys, across, up) {
  let text = "";
  let pen = "M";
  const dense = xs.length > 1500;
  for (let i = 0; i < xs.length; ) {
    const column = Math.round(across(xs[i]));
    let [low, high, next] = [i, i, i + 1];
    for (; dense && next < xs.length && Math.round(across(xs[next])) === column; next++) {
      if (ys[next] < ys[low]) low = next;
      if (ys[next] > ys[high]) high = next;
    }
    for (const point of low === high ? [low] : low < high ? [low, high] : [high, low]) {
      const height = up(ys[point]);
      if (Number.isFinite(height)) {
        text += `${pen}${across(xs[point]).toFixed(1)},${height.toFixed(1)}${pen === "M" ? "h0" : ""}`; // h0: draws a dot if no line follows
        pen = "L";
      } else pen = "M";
    }
    i = next;
  }
  return text;
}

/** The index of the value of the sorted `xs` that is nearest to `x`. */
function nearest(xs, x) {
  let [low, high] = [0, xs.length - 1];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] <= x) low = middle;
    else high = middle;
  }
  return Math.abs(xs[high] - x) < Math.abs(xs[low] - x) ? high : low;
}

/** Axes with grid, ticks and labels, as SVG elements. */
function axes(width, height, across, up, labels) {
  const parts = [];
  for (const [value, text] of up.ticks) {
    const y = up.place(value);
    parts.push(svg("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: y, y2: y }));
    parts.push(svg("text", { class: "tick", x: MARGIN.left - 7, y: y + 3.5, "text-anchor": "end" }, text));
  }
  for (const [value, text] of across.ticks) {
    const x = across.place(value);
    parts.push(svg("line", { class: "axis", x1: x, x2: x, y1: height - MARGIN.bottom, y2: height - MARGIN.bottom + 4 }));
    parts.push(svg("text", { class: "tick", x, y: height - MARGIN.bottom + 15, "text-anchor": "middle" }, text));
  }
  const base = height - MARGIN.bottom;
  parts.push(svg("line", { class: "axis", x1: MARGIN.left, x2: width - MARGIN.right, y1: base, y2: base }));
  parts.push(svg("text", { class: "label", x: (MARGIN.left + width - MARGIN.right) / 2, y: height - 3, "text-anchor": "middle" }, labels.x));
  const middle = (MARGIN.top + base) / 2;
  parts.push(svg("text", { class: "label", x: 9, y: middle, transform: `rotate(-90 9 ${middle})`, "text-anchor": "middle" }, labels.y));
  return parts;
}

/**
 * A card with a chart that draws itself when it becomes visible and when its size changes.
 * `draw(width, height)` returns {children, across, x, rows(x)}: the SVG elements, the scale of x, the x values in order,
 * and the text for an x value as {title, rows: [[mark, name, text]], at: x}. Null means that there is nothing to draw.
 * `zoom(first, last)` is called with the selected range, and without arguments after a double click.
 */
function chart({ title, detail, height, draw, zoom }) {
  const picture = svg("svg", { height, tabindex: 0, role: "img", "aria-label": `${title}; arrow keys read its values` });
  const tip = el("div", { class: "tip", hidden: true, role: "status" });
  const head = el("div", { class: "chart-head" }, el("h3", { title }, title), detail ? el("span", { class: "detail mono", title: detail }, detail) : null);
  const card = el("figure", { class: "card chart" }, head, el("div", { class: "plot" }, picture, tip));
  const area = svg("rect", { class: "area", y: MARGIN.top, height: height - MARGIN.top - MARGIN.bottom });
  let began = null; // the pixel at which the pointer went down
  const self = { card, dirty: true, seen: false, drawn: null, line: null, redraw, cross };

  function redraw() {
    self.dirty = true;
    if (!self.seen) return;
    const width = picture.parentNode.clientWidth;
    if (!width) return;
    self.dirty = false;
    picture.setAttribute("viewBox", `0 0 ${width} ${height}`);
    self.drawn = draw(width, height);
    self.width = width;
    self.line = svg("line", { class: "cross", y1: MARGIN.top, y2: height - MARGIN.bottom, visibility: "hidden" });
    picture.replaceChildren(...(self.drawn?.children ?? [svg("text", { class: "label", x: width / 2, y: height / 2, "text-anchor": "middle" }, "nothing to draw on this scale")]), self.line);
    tip.hidden = true;
  }

  function cross(x) {
    if (!self.drawn || !self.line) return;
    const at = x === null ? null : self.drawn.across.place(x);
    const inside = at !== null && at >= MARGIN.left - 1 && at <= self.width - MARGIN.right + 1;
    self.line.setAttribute("visibility", inside ? "visible" : "hidden");
    if (inside) for (const end of ["x1", "x2"]) self.line.setAttribute(end, at);
  }

  function show(x) {
    const said = self.drawn.rows(x);
    for (const other of charts) other.cross(said.at);
    tip.replaceChildren(
      el("b", {}, said.title),
      ...said.rows.map(([mark, name, text]) => el("div", { class: "tip-row" }, mark, el("span", { class: "name" }, name), el("span", { class: "value" }, text))),
    );
    tip.hidden = false;
    const at = self.drawn.across.place(said.at);
    const room = self.width - at - 16;
    tip.style.left = `${room > tip.offsetWidth ? at + 12 : Math.max(0, at - 12 - tip.offsetWidth)}px`;
    self.at = said.at;
  }

  function select(from, to) {
    area.setAttribute("x", Math.min(from, to));
    area.setAttribute("width", Math.abs(to - from));
    if (!area.isConnected) picture.append(area);
  }

  function hide() {
    tip.hidden = true;
    for (const other of charts) other.cross(null);
  }

  picture.addEventListener("pointermove", (event) => {
    if (!self.drawn) return;
    const x = event.clientX - picture.getBoundingClientRect().left;
    show(self.drawn.across.back(x));
    if (began !== null) select(began, x);
  });
  picture.addEventListener("pointerdown", (event) => {
    if (zoom && self.drawn) began = event.clientX - picture.getBoundingClientRect().left;
  });
  picture.addEventListener("pointerup", (event) => {
    const ends = [began, event.clientX - picture.getBoundingClientRect().left].sort((a, b) => a - b);
    if (began !== null && ends[1] - ends[0] > 8) zoom(...ends.map(self.drawn.across.back));
    began = null;
  });
  if (zoom) picture.addEventListener("dblclick", () => zoom());
  picture.addEventListener("pointerleave", () => {
    began = null;
    area.remove();
    hide();
  });
  picture.addEventListener("blur", hide);
  picture.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by || !self.drawn) return;
    event.preventDefault();
    const xs = self.drawn.x;
    const now = self.at === undefined ? (by > 0 ? -1 : xs.length) : nearest(xs, self.at);
    show(xs[Math.min(Math.max(now + by, 0), xs.length - 1)]);
  });
  new IntersectionObserver(([entry]) => {
    self.seen = entry.isIntersecting;
    if (self.seen) {
      charts.add(self);
      if (self.dirty) redraw();
    } else charts.delete(self);
  }, { rootMargin: "200px" }).observe(card);
  new ResizeObserver(() => self.width !== picture.parentNode.clientWidth && redraw()).observe(card);
  return self;
}

/** The scale of x from one rollout to another. `back` converts pixels to rollouts. */
function rollouts([first, last], width, room = 0) {
  let [low, high] = [first - room, last + room];
  if (low === high) [low, high] = [low - 1, high + 1];
  const [from, to] = [MARGIN.left, width - MARGIN.right];
  const found = scale(low, high, from, to, Math.max(2, width / 70));
  found.ticks = found.ticks.filter(([value]) => Number.isInteger(value));
  found.back = (pixel) => low + ((pixel - from) / (to - from)) * (high - low);
  return found;
}

/** The x of rollouts `xs` in the unit of `view.over`: the run's sum up to each rollout. Without it, `xs` itself. */
function over(view, run, xs) {
  const sums = view.over && run.series[view.over.metric];
  return sums ? xs.map((x) => (x < sums.x[0] ? 0 : sums.y[nearest(sums.x, x)])) : xs;
}

/** The points of a line whose x are in the span. */
function within(span, line) {
  if (!span || (span[0] <= line.x[0] && line.x[line.x.length - 1] <= span[1])) return line;
  const inside = (values) => values?.filter((_, i) => span[0] <= line.x[i] && line.x[i] <= span[1]);
  const [x, y, error] = [line.x, line.y, line.error].map(inside);
  return { ...line, x, y, error, smoothed: line.smoothed === line.y ? y : inside(line.smoothed) };
}

/**
 * A chart of lines. `lines`: [{run, label, x, y, error, dashed}], sorted by x; `error`: half the height of each bar.
 * `view`: {smoothing, log, hidden: a Set of runs, mark: a rollout, span: first and last rollout that are
 * shown, zoom(first, last)}, shared by all charts of a tab; without `span` a chart shows all of its own.
 */
function lineChart({ title, unit, detail, lines, least = 0, points = false, view }) {
  const draw = (width, height) => {
    const shown = lines.filter((line) => !view.hidden.has(line.run) && line.x.length).map((line) => ({ ...line, x: over(view, line.run, line.x) }));
    const drawn = shown.map((line) => within(view.span, { ...line, smoothed: smooth(line.y, points ? 0 : view.smoothing) }));
    const ends = (line) => (line.error ? line.y.flatMap((y, i) => [y - line.error[i], y + line.error[i]]) : line.y);
    const found = range(drawn.flatMap(ends), least, view.log);
    if (!found) return null;
    const xs = [...new Set(drawn.flatMap((line) => line.x))].sort((a, b) => a - b);
    const across = rollouts(view.span ?? [xs[0], xs[xs.length - 1]], width);
    const up = scale(...found, height - MARGIN.bottom, MARGIN.top, 5, view.log);
    const high = (y) => (Number.isFinite(y) && (!view.log || y > 0) ? up.place(y) : NaN);
    const children = axes(width, height, across, up, { x: view.over?.label ?? "rollout", y: unit });
    const marked = Number.isFinite(view.mark) && !view.over ? across.place(view.mark) : NaN;
    if (marked >= MARGIN.left && marked <= width - MARGIN.right) {
      children.push(svg("line", { class: "mark", x1: marked, x2: marked, y1: MARGIN.top, y2: height - MARGIN.bottom }));
    }
    for (const line of drawn) children.push(...strokes(line, across.place, high, points || line.x.length === 1));
    return { children, across, x: xs, rows: (x) => said(drawn, x, xs) };
  };

  const strokes = ({ run, x, y, smoothed, error, dashed }, across, high, dots) => {
    const style = { stroke: run.color, fill: run.color };
    const line = (values, name) => svg("path", { class: `line ${name} ${dashed ? "dashed" : ""}`, style, d: path(x, values, across, high) });
    const parts = smoothed === y ? [line(y, "")] : [line(y, "faint"), line(smoothed, "")];
    for (let i = 0; i < x.length; i++) {
      const at = across(x[i]);
      if (!Number.isFinite(y[i])) {
        parts.push(svg("path", { class: "lost", d: `M${at - 3},${MARGIN.top}l6,6m0,-6l-6,6` }, svg("title", {}, String(y[i]))));
      } else if (dots && Number.isFinite(high(y[i]))) {
        parts.push(svg("circle", { cx: at, cy: high(y[i]), r: x.length > 40 ? 1.8 : 2.8, style: { fill: run.color } }));
        const [low, top] = error?.[i] ? [high(y[i] - error[i]), high(y[i] + error[i])] : [NaN, NaN];
        if (Number.isFinite(low) && Number.isFinite(top)) parts.push(svg("path", { class: "whisker", style, d: `M${at},${low}V${top}` }));
      }
    }
    return parts;
  };

  const said = (drawn, x, xs) => {
    const at = xs[nearest(xs, x)];
    const rows = drawn.map((line) => {
      const i = nearest(line.x, at);
      const mark = el("i", { class: "dot", style: { background: line.run.color } });
      const error = line.error?.[i] ? ` ± ${number(line.error[i])}` : "";
      const raw = line.smoothed === line.y ? "" : ` (smoothed ${number(line.smoothed[i])})`;
      const where = line.x[i] === at ? "" : ` at ${number(line.x[i])}`;
      return [mark, line.label ?? line.run.name, number(line.y[i]) + error + raw + where];
    });
    return { at, title: view.over ? `${number(at)} ${view.over.label}` : at < 0 ? "before training" : `rollout ${number(at)}`, rows };
  };

  return chart({ title, detail, height: 200, draw, zoom: view.zoom });
}
