// One chart: drawn as SVG in the pixels of its card, zoomed by dragging, saved as a file for a paper.

const drawnCharts = new Set();
let clips = 0;

class Chart {
  /** `lines` returns [{name, color, dash, points: [{x, y, low, high}], raw, band, bars}]. */
  constructor({ key, title, lines, unit = "number", floor = null, refs = () => [], across = null }) {
    Object.assign(this, { key, title, lines, unit, floor, refs, across });
    this.body = make("div", { class: "plot" });
    this.card = make("figure", { class: "card chart", id: `chart-${key}` },
      make("figcaption", {}, make("span", { class: "name" }, title), key.includes(" ") || key === title ? null : make("code", {}, key),
        make("button", { class: "save", type: "button", title: "Save this chart as an SVG file", onclick: () => saveSvg(this.body.firstChild, this.title, key) }, "SVG")),
      this.body);
    this.visible = false;
  }

  zoomed() { return this.across === null && view.zoom ? view.zoom.split("~").map(Number) : null; }

  format(value) { return this.unit === "percent" ? percent(value) : show(value, 4); }

  draw() {
    const lines = this.lines();
    const all = lines.flatMap((line) => [...line.points, ...(line.raw || []).flat()]);
    if (!all.length) { this.body.replaceChildren(make("p", { class: "soft" }, "No values yet.")); return; }
    const width = Math.max(240, this.body.clientWidth || 380);
    this.box = { left: 46, right: 10, top: 10, bottom: 22, width, height: 200 };
    this.domain(all, lines);
    const { box } = this;
    this.levels = this.log ? logTicks(this.y0, this.y1) : ticks(this.y0, this.y1, 4);
    const isShare = this.unit === "percent";
    this.labels = labelsOf(this.levels.map((level) => level * (isShare ? 100 : 1))).map((text) => text + (isShare ? "%" : ""));
    // A digit of the labels is less than 7 pixels wide.
    box.left = Math.max(46, 12 + 7 * Math.max(0, ...this.labels.map((text) => text.length)));
    const svg = draw("svg", { width, height: box.height, viewBox: `0 0 ${width} ${box.height}`, role: "img", "aria-label": this.describe(lines) });
    const clip = `clip-${(clips += 1)}`;
    svg.append(draw("clipPath", { id: clip }, draw("rect", { x: box.left - 4, y: box.top - 4, width: width - box.left - box.right + 8, height: box.height - box.top - box.bottom + 8 })));
    svg.append(...this.axes());
    const inner = draw("g", { "clip-path": `url(#${clip})` });
    for (const line of lines) inner.append(...this.drawLine(line));
    for (const line of lines) inner.append(...this.drawMean(line));
    this.cursor = draw("line", { class: "cursor", y1: box.top, y2: box.height - box.bottom, x1: -9, x2: -9 });
    this.selection = draw("rect", { class: "selection", y: box.top, height: box.height - box.top - box.bottom, width: 0, x: 0 });
    svg.append(inner, this.selection, this.cursor);
    this.listen(svg, lines);
    this.body.replaceChildren(svg);
    drawnCharts.add(this);
  }

  describe(lines) {
    return `${this.title}. ${lines.map((line) => `${line.name}: ${this.format(line.points[0].y)} to ${this.format(line.points.at(-1).y)}`).join("; ")}`;
  }

  domain(all, lines) {
    const zoom = this.zoomed();
    let [x0, x1] = zoom || [all, all].map((list, index) => list.reduce((best, p) => (index ? Math.max(best, p.x) : Math.min(best, p.x)), index ? -Infinity : Infinity));
    if (x0 === x1) [x0, x1] = [x0 - 0.5, x1 + 0.5];
    const shown = all.filter((p) => p.x >= x0 && p.x <= x1);
    const inside = shown.length ? shown : all;
    // One outlier raises many smoothed values.
    const raw = view.clip ? lines.flatMap((line) => (line.raw?.length ? line.raw.flat() : line.points)).filter((p) => inside === all || (p.x >= x0 && p.x <= x1)) : [];
    const log = Boolean(view.log) && this.across === null && inside.some((p) => p.y > 0);
    const values = (raw.some((p) => !log || p.y > 0) ? raw : inside).flatMap((p) => [p.y, p.low ?? p.y, p.high ?? p.y]).filter((y) => typeof y === "number" && (!log || y > 0)).sort((one, other) => one - other);
    let [y0, y1] = view.clip ? [quantile(values, 0.01), quantile(values, 0.99)] : [values[0], values.at(-1)];
    this.marks = this.refs(lines).filter((mark) => !log || mark.y > 0);
    if (!log) {
      for (const mark of this.marks) if (mark.keep) { y0 = Math.min(y0, mark.y); y1 = Math.max(y1, mark.y); }
      if (this.floor !== null && !view.clip) y0 = Math.min(this.floor, y0);
      if (y0 === y1) [y0, y1] = this.floor === null ? [y0 - Math.max(1e-9, Math.abs(y0) * 0.1), y1 + Math.max(1e-9, Math.abs(y1) * 0.1)] : [y0, y0 + (y0 || 1)];
      else if (this.floor === null) { const room = 0.04 * (y1 - y0); y0 -= room; y1 += room; }
      if (y0 === y1) y1 = y0 + 1;
    } else if (y1 <= y0 * (1 + 1e-9)) { y0 /= 2; y1 *= 2; }
    if (this.unit === "percent" && values.at(-1) <= 1) y1 = Math.min(y1, 1.004);
    const { box } = this;
    const scale = log ? Math.log10 : (value) => value;
    const [low, high] = [scale(y0), scale(y1)];
    this.x = (value) => box.left + ((value - x0) / (x1 - x0)) * (box.width - box.left - box.right);
    const within = (value) => (view.clip ? Math.min(y1, Math.max(y0, value)) : log ? Math.max(value, y0 / 1e3) : value);
    this.y = (value) => box.height - box.bottom - ((scale(within(value)) - low) / (high - low)) * (box.height - box.top - box.bottom);
    this.invert = (pixel) => x0 + ((pixel - box.left) / (box.width - box.left - box.right)) * (x1 - x0);
    Object.assign(this, { x0, x1, y0, y1, log });
  }

  axes() {
    const { box } = this;
    const nodes = [];
    this.levels.forEach((level, index) => {
      nodes.push(draw("line", { class: "grid", x1: box.left, x2: box.width - box.right, y1: this.y(level), y2: this.y(level) }));
      nodes.push(draw("text", { x: box.left - 6, y: this.y(level) + 3.5, "text-anchor": "end" }, this.labels[index]));
    });
    const minutes = this.across === null && view.x === "hours" && this.x1 < 1.5;
    const unit = minutes ? 60 : 1;
    const whole = this.across !== null || view.x !== "hours";
    const places = ticks(this.x0 * unit, this.x1 * unit, Math.max(3, box.width / 80)).filter((tick) => !whole || Number.isInteger(Math.round(tick * 1e6) / 1e6));
    labelsOf(places).forEach((text, index) => {
      const x = this.x(places[index] / unit);
      if (x < box.width - box.right - 52) nodes.push(draw("text", { x, y: box.height - 6, "text-anchor": "middle" }, text));
    });
    nodes.push(draw("line", { class: "axis", x1: box.left, x2: box.width - box.right, y1: box.height - box.bottom, y2: box.height - box.bottom }));
    const name = minutes ? "minutes" : this.across || X_AXES[view.x][1];
    nodes.push(draw("text", { class: "across", x: box.width - box.right, y: box.height - 6, "text-anchor": "end" }, name === "sampled tokens" ? "tokens" : name));
    for (const mark of this.marks) {
      if (mark.y < this.y0 || mark.y > this.y1) continue;
      nodes.push(draw("line", { class: "mark", x1: box.left, x2: box.width - box.right, y1: this.y(mark.y), y2: this.y(mark.y) }));
      nodes.push(draw("text", { class: "marked", x: box.width - box.right - 2, y: this.y(mark.y) + (this.y(mark.y) < 24 ? 11 : -3), "text-anchor": "end" }, mark.label));
    }
    return nodes;
  }

  path(list, value) { return list.map((p) => `${this.x(p.x).toFixed(1)},${this.y(value(p)).toFixed(1)}`).join(" "); }

  /** Raw values, faint, and the range over seeds. */
  drawLine(line) {
    const nodes = [];
    for (const raw of line.raw || []) {
      if (raw.some((p) => p.low !== p.high)) nodes.push(draw("polygon", { class: "raw", points: `${this.path(raw, (p) => p.high)} ${this.path([...raw].reverse(), (p) => p.low)}`, fill: line.color, opacity: 0.18 / line.raw.length ** 0.6 }));
      else nodes.push(draw("polyline", { class: "raw", points: this.path(raw, (p) => p.y), fill: "none", stroke: line.color, "stroke-width": 1, opacity: 0.28 / line.raw.length ** 0.6 }));
    }
    if (line.bars) for (const p of line.points) nodes.push(draw("line", { x1: this.x(p.x), x2: this.x(p.x), y1: this.y(p.low), y2: this.y(p.high), stroke: line.color, "stroke-width": 1.5, opacity: 0.5 }));
    else if (line.band && line.points.some((p) => p.low !== p.high)) {
      nodes.push(draw("polygon", { points: `${this.path(line.points, (p) => p.high)} ${this.path([...line.points].reverse(), (p) => p.low)}`, fill: line.color, opacity: 0.2 }));
    }
    return nodes;
  }

  drawMean(line) {
    const nodes = [draw("polyline", { class: "mean", points: this.path(line.points, (p) => p.y), fill: "none", stroke: line.color, "stroke-width": line.thin ? 1 : 1.8, "stroke-dasharray": line.dash, "stroke-linejoin": "round" })];
    if (line.points.length < 12 || line.bars) nodes.push(...line.points.map((p) => draw("circle", { cx: this.x(p.x), cy: this.y(p.y), r: 2.4, fill: line.color })));
    return nodes;
  }

  listen(svg, lines) {
    let start = null;
    const pixel = (event) => event.clientX - svg.getBoundingClientRect().left;
    svg.addEventListener("pointerdown", (event) => { if (this.across === null && event.button === 0 && event.pointerType === "mouse") { start = pixel(event); svg.setPointerCapture(event.pointerId); } });
    svg.addEventListener("pointermove", (event) => {
      if (start !== null) {
        const [left, right] = [start, pixel(event)].sort((one, other) => one - other);
        this.selection.setAttribute("x", left);
        this.selection.setAttribute("width", right - left);
      }
      this.tell(event, lines, this.invert(pixel(event)));
    });
    svg.addEventListener("pointerup", (event) => {
      const ends = start === null ? [] : [start, pixel(event)].sort((one, other) => one - other);
      start = null;
      this.selection.setAttribute("width", 0);
      if (ends.length && ends[1] - ends[0] > 6) setZoom(...ends.map((end) => Math.max(this.x0, Math.min(this.x1, this.invert(end)))));
    });
    svg.addEventListener("dblclick", () => setZoom(null));
    svg.addEventListener("pointerleave", () => { showTip(null); for (const chart of drawnCharts) if (chart.cursor) chart.cursor.setAttribute("transform", "translate(-99 0)"); });
  }

  tell(event, lines, x) {
    const texts = [];
    let nearest = null;
    for (const line of lines) {
      const point = line.points.reduce((best, p) => (!best || Math.abs(p.x - x) < Math.abs(best.x - x) ? p : best), null);
      nearest = nearest ?? point.x;
      const range = point.low !== undefined && point.low !== point.high ? `  (${this.format(point.low)} to ${this.format(point.high)})` : "";
      texts.push(`${line.name}: ${this.format(point.y)}${range}`);
    }
    if (nearest === null) return;
    for (const chart of drawnCharts) {
      if (!chart.cursor || (chart.across !== null) !== (this.across !== null)) continue;
      const at = chart.x(nearest);
      chart.cursor.setAttribute("transform", "");
      for (const end of ["x1", "x2"]) chart.cursor.setAttribute(end, at);
    }
    const name = this.across || X_AXES[view.x][1];
    showTip(event, `${name} ${show(view.x === "step" ? Math.round(nearest) : nearest)}\n${texts.slice(0, 16).join("\n")}${texts.length > 16 ? `\nand ${texts.length - 16} more` : ""}`);
  }
}

function setZoom(from, to) {
  remember({ zoom: from === null ? "" : `${Number(from.toPrecision(7))}~${Number(to.toPrecision(7))}` });
  renderCharts();
  if (data.live && view.zoom) readDetail().catch(() => {});
}

/** Ask for the steps within the zoom, where the curves of a long run are thinned. */
async function readDetail() {
  const zoom = view.zoom;
  const [from, to] = zoom.split("~").map(Number);
  await Promise.all(data.runs.filter((run) => run.size > 1 && !hidden().has(run.condition)).map(async (run) => {
    const xs = acrossOf(run);
    const inside = run.steps.filter((_, index) => xs[index] >= from && xs[index] <= to);
    if (!inside.length) return;
    // One bucket more on each side, so that lines leave the chart.
    const found = await ask("window.json", { run: run.id, first: Math.max(0, inside[0] - 2 * run.size), last: inside.at(-1) + 2 * run.size });
    const current = runOf(run.id);
    if (current) current.detail = { ...found, zoom };
  }));
  if (zoom === view.zoom) renderCharts();
}

const PRINTED = { c0: "#0072b2", c1: "#d55e00", c2: "#009e73", c3: "#cc79a7", c4: "#e69f00", c5: "#56b4e9", c6: "#8a8a8a", c7: "#b8a300", page: "#fff", ink: "#111" };

/** Download a drawing in the colors of the light page, as a file that stands alone. */
function saveSvg(svg, title, name) {
  const copy = svg.cloneNode(true);
  const style = "text{font:11px Helvetica,Arial,sans-serif;fill:#444}.grid{stroke:#e3e6ea}.axis,.cursor{stroke:#888}.mark{stroke:#555;stroke-dasharray:3 3}.cursor,.selection{display:none}.zero{stroke:#333}.noise{fill:#000;opacity:.07}.strong{font-weight:bold;fill:#111}";
  copy.prepend(draw("title", {}, title), draw("style", {}, style));
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  const text = new XMLSerializer().serializeToString(copy).replace(/var\(--(\w+)\)/g, (_, key) => PRINTED[key]);
  const link = make("a", { href: URL.createObjectURL(new Blob([text], { type: "image/svg+xml" })), download: `${name.replace(/[^\w.@-]+/g, "_")}.svg` });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
