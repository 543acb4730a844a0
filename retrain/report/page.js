"use strict";
// Renders one object, `data`, which contents.py writes. Nothing is fetched, except data.json from a live server.

let data = JSON.parse(document.getElementById("data").textContent);
// The color-blind safe palette of Okabe and Ito.
const COLORS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a8a8a", "#b8a300"];
const hidden = new Set();
const chosen = { condition: "", run: "", step: "", outcome: "", search: "", least: "", most: "", group: 0, color: "none" };

const SVG = "http://www.w3.org/2000/svg";
function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}
function draw(tag, attributes, text) {
  const node = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return node;
}
function show(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  if (size !== 0 && (size < 0.001 || size >= 1e6)) return value.toExponential(Math.max(0, digits - 1)).replace("e+", "e");
  return Number.isInteger(value) ? String(value) : value.toFixed(size >= 100 ? 1 : digits);
}
const percent = (value) => (value === null || value === undefined ? "–" : (100 * value).toFixed(1) + " %");
const conditions = () => [...new Set(data.runs.map((run) => run.condition))];
const colorOf = (condition) => COLORS[conditions().indexOf(condition) % COLORS.length];

// ---- curves

function mean(values) {
  return values.reduce((sum, value) => sum + value, 0) / values.length;
}

/** Combine several curves of [step, value]: mean, minimum and maximum at each step. */
function bandOf(curves) {
  const at = new Map();
  for (const [step, value] of curves.flat()) if (typeof value === "number") at.set(step, [...(at.get(step) || []), value]);
  return [...at.entries()].sort((one, other) => one[0] - other[0]).map(([step, values]) => ({
    x: step, y: mean(values), low: Math.min(...values), high: Math.max(...values),
  }));
}
const band = (runs, key) => bandOf(runs.map((run) => run.steps.map((step, index) => [step, (run.series[key] || [])[index]])));

function ticks(low, high, count) {
  const raw = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const size = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((step) => step >= raw) || raw;
  const found = [];
  for (let tick = Math.ceil(low / size) * size; tick <= high + size * 1e-9; tick += size) found.push(tick);
  return found;
}

/** Number of decimal places needed to distinguish these ticks. */
function digitsFor(found) {
  const gap = found.length > 1 ? found[1] - found[0] : 1;
  const digits = Math.max(0, -Math.floor(Math.log10(gap) + 1e-9));
  const left = gap * 10 ** digits;
  return Math.min(6, digits + (Math.abs(left - Math.round(left)) > 1e-6 ? 1 : 0));
}
function label(value, found) {
  const least = found.length > 1 ? found[1] - found[0] : 1;
  if (least < 1e-5 && Math.abs(value) < 1e-3) return Math.abs(value) < least / 2 ? "0" : value.toExponential(0);
  return value.toFixed(digitsFor(found));
}

/** A line chart of [{name, color, points: [{x, y, low, high, n}], dashed}]. */
function chart(title, lines, { unit = show, floor = null, note = "", across = "step" } = {}) {
  const box = { left: 46, right: 8, top: 8, bottom: 26, width: 400, height: 210 };
  const points = lines.flatMap((line) => line.points);
  const card = make("div", { class: "card chart" }, make("h3", {}, title));
  if (!points.length) {
    card.append(make("p", { class: "soft" }, "No values."));
    return card;
  }
  let [x0, x1] = [Math.min(...points.map((p) => p.x)), Math.max(...points.map((p) => p.x))];
  let [y0, y1] = [Math.min(...points.map((p) => p.low ?? p.y)), Math.max(...points.map((p) => p.high ?? p.y))];
  if (floor !== null) y0 = Math.min(floor, y0);
  if (x0 === x1) x1 = x0 + 1;
  if (y0 === y1) [y0, y1] = floor === null ? [y0 - 0.5, y1 + 0.5] : [y0, y0 + 1];
  const x = (value) => box.left + ((value - x0) / (x1 - x0)) * (box.width - box.left - box.right);
  const y = (value) => box.height - box.bottom - ((value - y0) / (y1 - y0)) * (box.height - box.top - box.bottom);
  const svg = draw("svg", { viewBox: `0 0 ${box.width} ${box.height}`, role: "img", "aria-label": title });
  const levels = ticks(y0, y1, 4);
  for (const tick of levels) {
    svg.append(draw("line", { class: "axis", x1: box.left, x2: box.width - box.right, y1: y(tick), y2: y(tick) }));
    svg.append(draw("text", { x: box.left - 5, y: y(tick) + 3, "text-anchor": "end" },
      unit === percent ? label(100 * tick, levels.map((level) => 100 * level)) + " %" : label(tick, levels)));
  }
  for (const tick of ticks(x0, x1, 6).filter(Number.isInteger)) {
    svg.append(draw("text", { x: x(tick), y: box.height - 14, "text-anchor": "middle" }, show(tick)));
  }
  svg.append(draw("text", { x: box.width - box.right, y: box.height - 3, "text-anchor": "end" }, across));
  for (const line of lines) {
    const sorted = line.points;
    if (line.bars) {
      for (const p of sorted) svg.append(draw("line", { x1: x(p.x), x2: x(p.x), y1: y(p.low), y2: y(p.high), stroke: line.color, opacity: 0.45 }));
    } else if (sorted.some((p) => p.low !== undefined && p.low !== p.high)) {
      const upper = sorted.map((p) => `${x(p.x)},${y(p.high ?? p.y)}`);
      const lower = sorted.map((p) => `${x(p.x)},${y(p.low ?? p.y)}`).reverse();
      svg.append(draw("polygon", { points: [...upper, ...lower].join(" "), fill: line.color, opacity: 0.18 }));
    }
    const path = sorted.map((p) => `${x(p.x)},${y(p.y)}`).join(" ");
    const style = { points: path, fill: "none", stroke: line.color, "stroke-width": 1.6 };
    svg.append(draw("polyline", line.dashed ? { ...style, "stroke-dasharray": "4 3" } : style));
    if (sorted.length === 1) svg.append(draw("circle", { cx: x(sorted[0].x), cy: y(sorted[0].y), r: 3, fill: line.color }));
  }
  const cursor = draw("line", { class: "axis", y1: box.top, y2: box.height - box.bottom, x1: -9, x2: -9 });
  svg.append(cursor);
  svg.addEventListener("mousemove", (event) => {
    const place = svg.getBoundingClientRect();
    const step = x0 + (((event.clientX - place.left) / place.width) * box.width - box.left) / (box.width - box.left - box.right) * (x1 - x0);
    const tipLines = [];
    let nearest = null;
    for (const line of lines) {
      const point = line.points.reduce((best, p) => (!best || Math.abs(p.x - step) < Math.abs(best.x - step) ? p : best), null);
      if (!point) continue;
      nearest = nearest ?? point.x;
      const range = point.low !== undefined && point.low !== point.high ? `  (${unit(point.low)} to ${unit(point.high)})` : "";
      tipLines.push(`${line.name}: ${unit(point.y)}${range}`);
    }
    cursor.setAttribute("x1", x(nearest));
    cursor.setAttribute("x2", x(nearest));
    showTip(event, `${across} ${show(nearest)}\n${tipLines.join("\n")}`);
  });
  svg.addEventListener("mouseleave", () => { showTip(null); cursor.setAttribute("x1", -9); cursor.setAttribute("x2", -9); });
  card.append(svg);
  if (note) card.append(make("p", { class: "soft" }, note));
  return card;
}

function showTip(event, text) {
  const tip = document.getElementById("tip");
  tip.hidden = !event;
  if (!event) return;
  tip.textContent = text;
  tip.style.left = Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8) + "px";
  tip.style.top = Math.min(event.clientY + 14, window.innerHeight - tip.offsetHeight - 8) + "px";
}

/** One line per visible condition. */
function curve(title, key, options) {
  const lines = conditions().filter((name) => !hidden.has(name)).map((name) => ({
    name, color: colorOf(name), points: band(data.runs.filter((run) => run.condition === name), key),
  })).filter((line) => line.points.length);
  return chart(title, lines, options);
}

function legend() {
  return make("p", { class: "legend" }, ...conditions().map((name) => make("button", {
    type: "button", "aria-pressed": String(!hidden.has(name)),
    onclick: () => { hidden.has(name) ? hidden.delete(name) : hidden.add(name); render(); },
  }, make("span", { class: "swatch", style: `background:${colorOf(name)}` }),
  `${name} (${data.runs.filter((run) => run.condition === name).length})`)));
}

const has = (key) => data.runs.some((run) => (run.series[key] || []).some((value) => typeof value === "number"));

// ---- sections

function table(heads, rows, numbers = []) {
  const cell = (tag, value, index) => make(tag, { class: numbers.includes(index) ? "number" : null }, value instanceof Node ? value : show(value));
  return make("div", { class: "scroll" }, make("table", {},
    make("thead", {}, make("tr", {}, ...heads.map((head, index) => cell("th", head, index)))),
    make("tbody", {}, ...rows.map((row) => make("tr", {}, ...row.map((value, index) => cell("td", value, index)))))));
}

function overview() {
  return [legend(), table(
    ["run", "condition", "seed", "status", "steps", "correct rate (last 10 % of steps)", "held-out pass@1", "seconds per step"],
    data.runs.map((run) => [run.name, run.condition, run.seed, run.status, run.max_steps ? `${run.done} of ${run.max_steps}` : run.done,
      percent(run.late_correct_rate), run.last_eval ? `${percent(run.last_eval.y)} (${percent(run.last_eval.low)} to ${percent(run.last_eval.high)})` : "–",
      run.median_step_s]), [2, 4, 5, 6, 7])];
}

function learning() {
  const drawn = [curve("Correct rate of the training batch", "correct_rate", { unit: percent, floor: 0 }),
    curve("Running correct rate", "running_correct_rate", { unit: percent, floor: 0 }),
    curve("Mean reward", "mean_reward"), curve("Loss", "loss"), curve("Gradient norm", "grad_norm", { floor: 0 }),
    curve("Completions cut off at max_tokens", "max_token_hit_rate", { unit: percent, floor: 0 }),
    curve("Mean importance ratio", "ratio_mean"), curve("KL between sampler and trainer", "kl_sample_train")];
  return [make("p", { class: "soft" }, "Lines are means over seeds; bands span the lowest to the highest seed."),
    legend(), make("div", { class: "charts" }, ...drawn)];
}

function evaluation() {
  if (!data.runs.some((run) => run.evals.length)) return null;
  const shown = data.runs.filter((run) => run.evals.length && !hidden.has(run.condition));
  const each = shown.map((run) => ({ name: run.name, color: colorOf(run.condition), points: run.evals, bars: true }));
  const means = [...new Set(shown.map((run) => run.condition))].map((name) => ({ name, color: colorOf(name), points: bandOf(
    shown.filter((run) => run.condition === name).map((run) => run.evals.map((point) => [point.x, point.y]))) }));
  return [make("p", { class: "soft" }, "Left: mean over seeds, with the lowest and the highest seed. Right: each run, with its 95 % confidence interval over problems."), legend(),
    make("div", { class: "charts" }, chart("Held-out pass@1, by condition", means, { unit: percent, floor: 0 }), chart("Held-out pass@1, by run", each, { unit: percent, floor: 0 }))];
}

const span = (interval) => (interval ? `${show(interval[0])} to ${show(interval[1])}` : "–");
const CLASS_OF = { statistically_significant_improvement: "better", significant_degradation: "worse" };
function comparison() {
  if (!data.compare) return data.compare_note ? [make("p", {}, data.compare_note)] : null;
  const rows = data.compare.rows.map((row) => [row.condition, row.seeds, row.mean, row.baseline_mean, row.difference,
    span(row.interval), span(row.bootstrap_interval), row.p_value, row.permutation_p, row.p_adjusted, row.cohens_d,
    make("span", { class: CLASS_OF[row.verdict] || null }, row.sentence)]);
  return [make("p", {}, `${data.compare.metric}, compared with ${data.compare.baseline}.`),
    table(["condition", "seeds", "mean", "baseline", "difference", "95 % interval", "bootstrap", "p", "p (sign-flip)", "p (Holm)", "Cohen's d", "verdict"],
      rows, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
    ...(data.compare.notes || []).map((note) => make("p", { class: "soft" }, note))];
}

function credit() {
  const drawn = [["Entropy of execution tokens, mean", "exec_entropy_mean"], ["Entropy of execution tokens, variance", "exec_entropy_var"],
    ["Entropy of planning tokens, mean", "plan_entropy_mean"], ["Entropy of planning tokens, variance", "plan_entropy_var"],
    ["SEPA λ", "sepa_lambda"]].filter(([, key]) => has(key)).map(([title, key]) => curve(title, key, { floor: 0 }));
  return drawn.length ? [legend(), make("div", { class: "charts" }, ...drawn)] : null;
}

function timing() {
  const parts = [["sample_time_s", "sampling"], ["score_time_s", "scoring"], ["train_time_s", "training"], ["other_time_s", "everything else"]];
  const cards = conditions().filter((name) => !hidden.has(name)).map((name) => {
    const runs = data.runs.filter((run) => run.condition === name);
    return chart(`Seconds per step: ${name}`, parts.map(([key, label], index) => ({ name: label, color: COLORS[index], points: band(runs, key).map(({ x, y }) => ({ x, y })) })), { floor: 0 });
  });
  const key = make("p", { class: "legend" }, ...parts.map(([, label], index) => make("span", {}, make("span", { class: "swatch", style: `background:${COLORS[index]}` }), label)));
  return [key, make("div", { class: "charts" }, ...cards, curve("Sampled tokens per second", "tokens_per_s", { floor: 0 }),
    ...(new Set(data.runs.flatMap((run) => run.series.batch_size)).size > 1 ? [curve("Batch size", "batch_size", { floor: 0 })] : []))];
}

function signal() {
  const rows = conditions().map((name) => {
    const totals = data.runs.filter((run) => run.condition === name).map((run) => run.totals);
    const sum = (key) => totals.reduce((all, one) => all + one[key], 0);
    const groups = sum("groups");
    return [name, groups, `${sum("all_right")} (${percent(sum("all_right") / groups)})`, `${sum("all_wrong")} (${percent(sum("all_wrong") / groups)})`, sum("errors")];
  });
  return [make("p", { class: "soft" }, "A group whose completions all received the same reward provides no learning signal."),
    table(["condition", "groups", "all correct", "all incorrect", "scoring failures"], rows, [1, 2, 3, 4]),
    make("div", { class: "charts" }, curve("All-correct groups", "groups_all_right", { floor: 0 }), curve("All-incorrect groups", "groups_all_wrong", { floor: 0 }))];
}

function squeeze() {
  if (!data.squeeze) return null;
  const line = { name: "mean", color: COLORS[0], points: data.squeeze.ranks.map((row) => ({ x: row.rank, y: row.mean, low: row.minimum, high: row.maximum })) };
  return [make("p", {}, `Recommended rank: ${data.squeeze.recommended_rank}. The band spans the worst to the best layer.`),
    make("div", { class: "charts" }, chart("Variance retained at each rank", [line], { unit: percent, across: "rank" }))];
}

function configuration() {
  const rows = data.configs.map((row) => [row.option, ...row.values]);
  const differ = rows.length ? table(["option that differs", ...data.config_columns], rows)
    : make("p", {}, "The runs differ only in their seeds and folders.");
  const same = data.settings.map((row) => [row.option, row.value]);
  return [differ, make("br"), ...(same.length ? [table(["non-default option common to all runs", "value"], same)] : []),
    ...data.origin.map((sentence) => make("p", { class: "soft" }, sentence))];
}

// ---- completions

function groupsShown() {
  const words = chosen.search.toLowerCase();
  const within = (reward) => (chosen.least === "" || reward >= Number(chosen.least)) && (chosen.most === "" || reward <= Number(chosen.most));
  return data.groups.filter((group) => {
    const run = data.runs[group.run];
    if (chosen.condition && run.condition !== chosen.condition) return false;
    if (chosen.run && run.name !== chosen.run) return false;
    if (chosen.step !== "" && group.step !== Number(chosen.step)) return false;
    if (chosen.color !== "none" && !group.members.some((member) => member.tokens)) return false;
    return group.members.some((member) => (!chosen.outcome || member.outcome === chosen.outcome)
      && (chosen.least === "" && chosen.most === "" ? true : member.reward !== null && within(member.reward))
      && (!words || member.text.toLowerCase().includes(words) || group.prompt.toLowerCase().includes(words)));
  });
}

function field(label, key, options) {
  const change = (event) => { chosen[key] = event.target.value; chosen.group = 0; fillBrowser(); };
  const control = options
    ? make("select", { id: `filter-${key}`, onchange: change }, ...options.map((value) => make("option", { value, selected: String(value) === String(chosen[key]) }, value === "" ? "any" : String(value))))
    : make("input", { id: `filter-${key}`, type: key === "search" ? "search" : "number", step: "any", value: chosen[key], oninput: change });
  return make("label", { for: `filter-${key}` }, label, control);
}

function completions() {
  if (!data.groups.length) return null;
  const steps = [...new Set(data.groups.map((group) => group.step))].sort((one, other) => one - other);
  return [make("p", { class: "soft" }, data.groups_note),
    make("div", { class: "filters" }, field("condition", "condition", ["", ...conditions()]), field("run", "run", ["", ...data.runs.map((run) => run.name)]),
      field("step", "step", ["", ...steps]), field("outcome", "outcome", ["", ...new Set(data.groups.flatMap((group) => group.members.map((member) => member.outcome)))]),
      field("minimum reward", "least"), field("maximum reward", "most"), field("search", "search"),
      field("color tokens by", "color", ["none", "surprisal", "entropy", "planning", "advantage"])),
    make("div", { class: "browser" }, make("ul", { class: "groups", id: "groups" }), make("div", { id: "group" }))];
}

function fillBrowser() {
  const list = document.getElementById("groups");
  if (!list) return;
  const found = groupsShown();
  list.replaceChildren(...found.slice(0, 300).map((group, index) => make("li", {}, make("button", {
    type: "button", "aria-current": String(index === chosen.group), onclick: () => { chosen.group = index; fillBrowser(); },
  }, make("span", { class: "ask" }, group.prompt), make("span", { class: "soft" },
    `${data.runs[group.run].name}, step ${group.step}, ${group.members.filter((member) => member.outcome === "right").length} of ${group.members.length} correct${group.members.some((member) => member.tokens) ? ", with tokens" : ""}`)))));
  if (!found.length) list.append(make("li", { class: "soft" }, chosen.color === "none" ? "No matches." : "No matches. Token values require runs with [training] record = true."));
  if (found.length > 300) list.append(make("li", { class: "soft" }, `and ${found.length - 300} more; use the filters to narrow the list.`));
  const group = found[chosen.group];
  document.getElementById("group").replaceChildren(...(group ? [
    make("h3", {}, "Prompt"), make("div", { class: "prompt card" }, ...marked(group.prompt)),
    make("div", { class: "members" }, ...group.members.map(memberCard))] : []));
}

function marked(text) {
  const words = chosen.search;
  if (!words) return [text];
  const parts = [];
  let from = 0;
  const lower = text.toLowerCase();
  for (let at = lower.indexOf(words.toLowerCase()); at >= 0; at = lower.indexOf(words.toLowerCase(), from)) {
    parts.push(text.slice(from, at), make("mark", {}, text.slice(at, at + words.length)));
    from = at + words.length;
  }
  return [...parts, text.slice(from)];
}

function memberCard(member) {
  const body = make("div", { class: "answer" });
  if (member.tokens && chosen.color !== "none") body.append(...microscope(member.tokens));
  else body.append(...marked(member.text));
  return make("div", { class: `member ${member.outcome}` },
    make("p", { class: "soft" }, `${member.outcome}, reward ${show(member.reward)}, ${member.num_tokens} tokens`), body);
}

// ---- the token microscope

function paint(kind, value, scale) {
  if (value === null || value === undefined || !scale) return null;
  if (kind === "planning") return value ? "rgb(230 159 0 / .55)" : null;
  const share = Math.min(1, Math.abs(value) / scale);
  if (kind === "advantage") return value >= 0 ? `rgb(0 158 115 / ${0.75 * share})` : `rgb(213 94 0 / ${0.75 * share})`;
  return `rgb(0 114 178 / ${0.75 * share})`;
}

function microscope(tokens) {
  const kind = chosen.color;
  const values = tokens[kind];
  if (!values) return [make("p", { class: "soft" }, `No ${kind} was recorded for this run.`)];
  const scale = kind === "planning" ? 1 : Math.max(...values.map((value) => Math.abs(value ?? 0)), 1e-9);
  return tokens.text.map((text, index) => {
    const tipLines = ["surprisal", "entropy", "advantage"].filter((name) => tokens[name]).map((name) => `${name} ${show(tokens[name][index], 4)}`);
    if (tokens.planning) tipLines.push(tokens.planning[index] ? "planning" : "execution");
    const inserted = tokens.sampled && !tokens.sampled[index];
    if (inserted) tipLines.push("written by the environment");
    const color = paint(kind, values[index], scale);
    return make("span", { class: inserted ? "token inserted" : "token", style: color ? `background:${color}` : null,
      onmousemove: (event) => showTip(event, `${JSON.stringify(text)}\n${tipLines.join("\n")}`), onmouseleave: () => showTip(null) }, text);
  });
}

// ---- the page

const SECTIONS = [["comparison", "Comparison", comparison], ["overview", "Runs", overview], ["evaluation", "Held-out evaluation", evaluation],
  ["learning", "Learning", learning], ["credit", "Entropy and λ", credit], ["timing", "Time", timing], ["signal", "Dead groups", signal],
  ["squeeze", "Squeeze", squeeze], ["configuration", "Configuration", configuration], ["completions", "Completions", completions]];

function render() {
  document.title = data.title;
  document.getElementById("title").textContent = data.title;
  document.getElementById("subtitle").textContent = data.subtitle;
  const drawn = SECTIONS.map(([id, title, build]) => [id, title, build()]).filter(([, , content]) => content);
  document.getElementById("nav").replaceChildren(...drawn.map(([id, title]) => make("a", { href: `#${id}` }, title)));
  document.getElementById("main").replaceChildren(...drawn.map(([id, title, content]) => make("section", { id }, make("h2", {}, title), ...content)));
  fillBrowser();
}

async function follow() {
  const answer = await fetch("data.json", { cache: "no-store" });
  if (answer.ok) {
    const fresh = await answer.json();
    const typing = document.activeElement && document.activeElement.id.startsWith("filter-");
    if (fresh.version !== data.version && !typing) {
      data = fresh;
      const place = window.scrollY;
      render();
      window.scrollTo(0, place);
    }
  }
}

render();
if (data.live) setInterval(() => follow().catch(() => { document.getElementById("subtitle").textContent = "Lost connection to the server; showing the last data received."; }), data.live * 1000);
