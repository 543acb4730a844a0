// The verdict, the health of each run, the table of runs, and the configuration.

const BETTER = { statistically_significant_improvement: ["better", "▲ better"], significant_degradation: ["worse", "▼ worse"], insufficient_evidence: ["soft", "insufficient evidence"] };
const isShare = (metric) => metric !== "mean_reward" && !/loss|norm|time|tokens/.test(metric);

const brief = (name) => (name.length > 38 ? `${name.slice(0, 20)}…${name.slice(-17)}` : name);

/** Rows of dots with an interval on one axis. */
function dotPlot({ rows, low, high, zero = null, noise = null, label, axis, height = 34 }) {
  const width = Math.max(300, Math.min(760, (document.getElementById("main").clientWidth || 760) - 8));
  const narrow = width < 520;
  const left = narrow ? 10 : Math.min(340, 26 + 8 * Math.max(...rows.map((row) => brief(row.name).length)));
  const right = narrow ? 12 : 96;
  const step = narrow ? height + 16 : height;
  const top = 12;
  const bottom = top + rows.length * step + 4;
  const room = 0.06 * (high - low || 1);
  const [from, to] = [low - room, high + room];
  const x = (value) => left + ((value - from) / (to - from)) * (width - left - right);
  const svg = draw("svg", { width, height: bottom + 38, viewBox: `0 0 ${width} ${bottom + 38}`, role: "img", "aria-label": axis });
  if (noise) svg.append(draw("rect", { class: "noise", x: x(Math.max(from, -noise)), width: x(Math.min(to, noise)) - x(Math.max(from, -noise)), y: top - 6, height: bottom - top + 6 }));
  const levels = ticks(from, to, narrow ? 3 : 6);
  const texts = labelsOf(levels.map((level) => level * label.factor));
  levels.forEach((level, index) => {
    svg.append(draw("line", { class: "grid", x1: x(level), x2: x(level), y1: top - 6, y2: bottom }));
    svg.append(draw("text", { x: x(level), y: bottom + 14, "text-anchor": "middle" }, (zero !== null && level > 0 ? "+" : "") + texts[index] + label.unit));
  });
  if (zero !== null) svg.append(draw("line", { class: "zero", x1: x(zero), x2: x(zero), y1: top - 6, y2: bottom }));
  svg.append(draw("text", { x: left + (width - left - right) / 2, y: bottom + 32, "text-anchor": "middle" }, axis));
  rows.forEach((row, index) => {
    const y = top + index * step + step / 2 + (narrow ? 8 : 0);
    svg.append(draw("text", narrow ? { class: "strong", x: left, y: y - 16 } : { class: "strong", x: left - 12, y: y + 4, "text-anchor": "end" }, brief(row.name)));
    svg.append(...row.marks(x, y, step));
    svg.append(draw("text", narrow ? { class: "strong", x: width - 4, y: y - 16, "text-anchor": "end" } : { class: "strong", x: width - right + 10, y: y + 4 }, row.value));
  });
  return svg;
}

function dot(cx, cy, r, color, text, more = {}) {
  const node = draw("circle", { cx, cy, r, fill: color, ...more });
  for (const [name, listener] of Object.entries(withTip(text))) node.addEventListener(name.slice(2), listener);
  return node;
}

function forestPlot(verdict) {
  const share = isShare(verdict.metric);
  const label = share ? { factor: 100, unit: "" } : { factor: 1, unit: "" };
  const all = verdict.rows.flatMap((row) => [...row.pairs.map((pair) => pair.difference), ...(row.interval || []), 0]);
  const noise = verdict.noise;
  const reach = Math.max(...all.map(Math.abs));
  if (noise && noise < 3 * reach) all.push(noise, -noise);
  const rows = verdict.rows.map((row) => ({
    name: row.condition,
    value: share ? points(row.difference) : show(row.difference),
    marks: (x, y) => {
      const { color } = styleOf(row.condition);
      const text = (value) => (share ? `${points(value)} points` : show(value, 4));
      const nodes = [];
      if (row.interval) nodes.push(draw("line", { x1: x(row.interval[0]), x2: x(row.interval[1]), y1: y, y2: y, stroke: color, "stroke-width": 3, "stroke-linecap": "round" }));
      nodes.push(...(row.pairs.length > 1 ? row.pairs : []).map((pair, index) => dot(x(pair.difference), y + 9 * (index % 2 ? 1 : -1), 3.2, color, `seed ${pair.seed}: ${text(pair.difference)}`, { opacity: 0.6 })));
      const at = x(row.difference);
      nodes.push(draw("polygon", { class: "diamond", points: `${at - 7},${y} ${at},${y - 7} ${at + 7},${y} ${at},${y + 7}`, fill: color }));
      nodes.push(dot(at, y, 8, "transparent", `mean difference ${text(row.difference)}${row.interval ? `\n${verdict.interval_title} ${text(row.interval[0])} to ${text(row.interval[1])}` : ""}`));
      return nodes;
    },
  }));
  return dotPlot({ rows, low: Math.min(...all), high: Math.max(...all), zero: 0, noise, label, axis: `difference in ${verdict.name} to ${verdict.baseline}${share ? ", points" : ""}` });
}

function changePlot(verdict) {
  const share = isShare(verdict.metric);
  const all = verdict.rows.flatMap((row) => [row.before, row.after].flatMap((end) => [end.y, end.low ?? end.y, end.high ?? end.y]));
  const text = (value) => (share ? percent(value) : show(value));
  const end = (name, e) => `${name}, step ${e.step}: ${text(e.y)}${e.low === undefined ? "" : `\n95% interval ${text(e.low)} to ${text(e.high)}`}`;
  const rows = verdict.rows.slice(0, 40).map((row) => ({
    name: verdict.rows.length > 1 ? `${row.condition}, seed ${row.seed}` : "",
    value: `${text(row.after.y)}`,
    marks: (x, y) => {
      const { color } = styleOf(row.condition);
      const bar = (e, shift, opacity) => (e.low === undefined ? [] : [draw("line", { x1: x(e.low), x2: x(e.high), y1: y + shift, y2: y + shift, stroke: color, "stroke-width": 3, "stroke-linecap": "round", opacity })]);
      return [...bar(row.before, -6, 0.3), ...bar(row.after, 6, 0.75),
        draw("line", { x1: x(row.before.y), x2: x(row.after.y), y1: y - 6, y2: y + 6, stroke: color, opacity: 0.5, "stroke-dasharray": "2 3" }),
        dot(x(row.before.y), y - 6, 5, "var(--page)", end("before", row.before), { stroke: color, "stroke-width": 2 }), dot(x(row.after.y), y + 6, 5.5, color, end("after", row.after))];
    },
  }));
  return dotPlot({ rows, low: Math.min(...all), high: Math.max(...all), label: { factor: share ? 100 : 1, unit: share ? "%" : "" }, axis: `${verdict.name}: ○ before, ● after`, height: 40 });
}

function renderVerdict() {
  const verdict = data.verdict;
  const home = document.getElementById("verdict");
  if (!verdict || !home) return;
  const opened = home.querySelector("details")?.open;
  const [headline, ...rest] = verdict.sentence.replace(/ %/g, "\u00a0%").split(/(?<=[.])\s(?=[A-Z])/);
  const nodes = [make("p", { class: "headline" }, headline), rest.length ? make("p", {}, rest.join(" ")) : null].filter(Boolean);
  if (verdict.kind === "comparison") {
    const svg = forestPlot(verdict);
    nodes.push(make("div", { class: "forest" }, svg, saver(svg, "Verdict", "verdict")));
    const several = verdict.rows.some((row) => row.interval);
    const key = [several ? `Each dot is one pair of runs with the same seed; the diamond is their mean with its ${verdict.interval_title}.` : "Each diamond is one pair of runs with the same seed; one pair has no interval."];
    if (verdict.noise) key.push(`Shaded: the noise floor, ±${isShare(verdict.metric) ? `${(100 * verdict.noise).toFixed(1)} points` : show(verdict.noise)}, which two runs of one condition exceed 5% of the time.`);
    nodes.push(make("p", { class: "soft" }, key.join(" ")), statistics(verdict, opened));
  } else if (verdict.rows?.length) {
    const svg = changePlot(verdict);
    nodes.push(make("div", { class: "forest" }, svg, saver(svg, "Before and after", "verdict")));
    if (verdict.rows.length > 40) nodes.push(make("p", { class: "soft" }, `The first 40 of ${verdict.rows.length} runs; the table below lists all.`));
  }
  nodes.push(...(verdict.kind === "comparison" ? [] : verdict.notes || []).map((note) => make("p", { class: "soft" }, note)));
  if (data.problem) nodes.push(make("p", { class: "soft" }, data.problem));
  home.replaceChildren(...nodes);
}

const saver = (svg, title, name) => make("button", { class: "save", type: "button", title: "Save as an SVG file", onclick: () => saveSvg(svg, title, name) }, "SVG");

function statistics(verdict, opened) {
  const interval = (pair) => (pair ? `${show(pair[0], 4)} to ${show(pair[1], 4)}` : "–");
  const p = (value) => (value === null ? "–" : value < 0.0001 ? "<0.0001" : value.toFixed(4));
  const rows = verdict.rows.map((row) => {
    const [kind, word] = BETTER[row.verdict];
    return [row.condition, String(row.pairs.length), row.mean.toFixed(4), row.difference.toFixed(4) + row.mark, interval(row.interval), p(row.p_value), p(row.p_adjusted), show(row.cohens_d, 2), make("span", { class: kind }, word)];
  });
  const base = [verdict.baseline, "", verdict.baseline_mean.toFixed(4), "", "", "", "", "", "baseline"];
  return make("details", { open: Boolean(opened) }, make("summary", {}, "Statistics"),
    make("p", { class: "soft" }, `${capital(verdict.name)} at step ${verdict.step}, paired by seed.`),
    table(["condition", "seeds", "mean", "difference", verdict.interval_title, "p", verdict.p_title, "d", "verdict"], [base, ...rows], [1, 2, 3, 4, 5, 6, 7]),
    make("ul", { class: "notes" }, [...(verdict.rows.length > 1 ? verdict.rows.map((row) => row.sentence) : []), ...verdict.notes].map((note) => make("li", {}, note))));
}

// ---- health

const COMPACT_FROM = 4;
const LEVELS = { ok: ["✓", "ok"], warning: ["!", "warning"], problem: ["✕", "problem"], unknown: ["?", "unknown"] };

const isBad = (check) => check.level === "warning" || check.level === "problem";

function chip(run, check, compact = false) {
  const [icon, word] = LEVELS[check.level];
  const first = check.step === null || check.step === undefined ? "" : `\nSince step ${check.step}.`;
  const docs = isBad(check) ? "\nCauses and fixes are below." : "";
  const tip = `${check.name}: ${word}\n${check.value}\nRule: ${check.rule.replace(/\.+$/, "")}.${first}${docs}\nClick to see the completions.`;
  return make("button", {
    type: "button", class: `chip ${check.level}`, "aria-label": tip.replace(/\.*\n/g, ". "), ...withTip(tip),
    onclick: () => openCompletions({ run: run.id, step: check.step ?? "", show: check.filter === "longest" ? "" : check.filter, sort: check.filter === "longest" ? "longest" : "newest" }),
  }, make("span", { class: "icon", "aria-hidden": "true" }, icon), compact ? null : check.name,
  !isBad(check) ? null : make("span", { class: compact ? "brief" : "value" }, check.value + (first ? ` since step ${check.step}` : "")));
}

/** Many runs: one column per check, with words only where something is wrong. */
function healthTable() {
  const names = [...new Set(data.runs.flatMap((run) => (run.health || []).map((check) => check.name)))];
  const cell = (run, name) => {
    const check = (run.health || []).find((one) => one.name === name);
    return check ? chip(run, check, true) : "–";
  };
  return table(["run", ...names], data.runs.map((run) => [make("span", {}, swatch(run.condition), `${run.condition}, seed ${run.seed}`), ...names.map((name) => cell(run, name))]));
}

/** A block of the manual. */
function adviceBlock(block) {
  const inline = (text) => text.split("`").map((part, at) => at % 2 ? make("code", {}, part) : part);
  if (block.kind === "code") return make("pre", {}, block.text);
  if (block.kind === "definitions") return make("dl", {}, ...block.items.flatMap(([term, text]) => [make("dt", {}, ...inline(term.replace(/\*\*/g, ""))), make("dd", {}, ...inline(text))]));
  if (block.kind === "list") return make("ul", {}, ...block.items.map(([, text]) => make("li", {}, ...inline(text))));
  return make("p", {}, ...inline(block.text));
}

function renderHealth() {
  const home = document.getElementById("health");
  const focused = document.activeElement?.classList.contains("chip") && home.contains(document.activeElement);
  if (focused) return;
  const opened = new Set([...home.querySelectorAll("details[open]")].map((one) => one.dataset.topic));
  const help = Object.entries(data.advice || {}).map(([topic, blocks]) => make("details", { class: "advice", "data-topic": topic, open: opened.has(topic) },
    make("summary", {}, `Causes and fixes: ${topic.replace(/-/g, " ")}`), ...blocks.map(adviceBlock)));
  if (data.runs.length > COMPACT_FROM && window.innerWidth > 700) { home.replaceChildren(healthTable(), ...help); return; }
  home.replaceChildren(...data.runs.map((run) => make("div", { class: "strip" },
    make("div", { class: "who" }, swatch(run.condition), make("strong", {}, data.runs.length > 1 ? `${run.condition}, seed ${run.seed}` : run.name)),
    make("div", { class: "chips" }, ...chips(run)))), ...help);
}

/** The worst first. Many runs on a phone: one chip for all that are not bad. */
function chips(run) {
  const order = ["problem", "warning", "ok", "unknown"];
  const checks = [...(run.health || [])].sort((one, other) => order.indexOf(one.level) - order.indexOf(other.level));
  if (data.runs.length <= COMPACT_FROM) return checks.map((check) => chip(run, check));
  const bad = checks.filter(isBad), fine = checks.filter((check) => check.level === "ok").length;
  const rest = fine ? [make("span", { class: "chip ok" }, make("span", { class: "icon", "aria-hidden": "true" }, "✓"), bad.length ? `${fine} other checks` : `${fine} checks`)] : [];
  return [...bad.map((check) => chip(run, check)), ...rest];
}

// ---- runs and configuration

function renderRuns() {
  const rows = data.runs.map((run) => [run.name, make("span", {}, swatch(run.condition), run.condition), String(run.seed), run.status,
    run.max_steps ? `${show(run.done)} of ${show(run.max_steps)}` : show(run.done), percent(run.late_correct_rate),
    run.last_eval ? `${percent(run.last_eval.y)} (${percent(run.last_eval.low)} to ${percent(run.last_eval.high)})` : "–", deadGroups(run), show(run.median_step_s, run.median_step_s < 10 ? 2 : 1)]);
  const errors = data.runs.filter((run) => run.error).map((run) => make("p", {}, `${run.name} failed: ${run.error}`));
  document.getElementById("runs").replaceChildren(table(
    ["run", "condition", "seed", "status", "steps", "correct, last 10%", "held-out pass@1", "dead groups", "s/step"], rows, [2, 4, 5, 6, 7, 8]), ...errors);
}

function deadGroups(run) {
  const { groups, all_right: right, all_wrong: wrong } = run.totals;
  return groups ? `${percent((right + wrong) / groups)}` : "–";
}

function renderSettings() {
  const rows = (data.configs || []).map((row) => [row.option, ...row.values]);
  const differ = rows.length ? table(["option that differs", ...data.config_columns], rows) : data.runs.length > 1 ? make("p", {}, "The runs differ only in their seeds and folders.") : null;
  const same = (data.settings || []).map((row) => [row.option, row.value]);
  document.getElementById("configuration").replaceChildren(...[differ,
    same.length ? table([data.runs.length > 1 ? "non-default option common to all runs" : "non-default option", "value"], same) : null,
    ...(data.origin || []).map((sentence) => make("p", { class: "soft" }, sentence))].filter(Boolean));
}

function renderSqueeze() {
  const section = document.getElementById("squeeze-section");
  section.hidden = !data.squeeze;
  if (!data.squeeze || chartsByKey.has("squeeze")) return;
  const lines = () => [{ name: "mean over layers", color: COLORS[0], dash: "", band: true, points: data.squeeze.ranks.map((row) => ({ x: row.rank, y: row.mean, low: row.minimum, high: row.maximum })) }];
  const chart = new Chart({ key: "squeeze", title: "Variance retained at each rank", unit: "percent", lines, across: "rank" });
  chartsByKey.set("squeeze", chart);
  chart.card.dataset.key = "squeeze";
  chart.stale = true;
  watcher.observe(chart.card);
  document.getElementById("squeeze").replaceChildren(make("p", {}, `Recommended rank: ${data.squeeze.recommended_rank}. The band spans the worst to the best layer.`), make("div", { class: "charts" }, chart.card));
}
