// All metrics: every number that a run logged has a chart. The table below only gives names, units and groups to
// metrics that it knows; others appear under "More" with their own name.

const uncertainty = () => (data.runs.length && data.runs.every((run) => run.uncertainty === data.runs[0].uncertainty) ? data.runs[0].uncertainty.replace(/_/g, " ") : "uncertainty");
const capital = (text) => text[0].toUpperCase() + text.slice(1);
const METRICS = {
  Learning: {
    correct_rate: ["Correct rate of the batch", "percent", 0], running_correct_rate: ["Correct rate over the run", "percent", 0],
    mean_reward: ["Mean reward"], loss: ["Loss"], grad_norm: ["Gradient norm", "number", 0], lr: ["Learning rate", "number", 0],
    kl_ref: ["KL to the reference", "number", 0],
  },
  Completions: {
    prompt_tokens_mean: ["Prompt length, mean", "number", 0],
    completion_tokens_mean: ["Completion length, mean", "number", 0], completion_tokens_p95: ["Completion length, p95", "number", 0],
    completion_tokens_max: ["Completion length, longest", "number", 0], max_token_hit_rate: ["Truncated", "percent", 0], context_hit_rate: ["Truncated, context full", "percent", 0],
    repeated_completions: ["Repeated completions", "number", 0],
  },
  "Entropy and λ": {
    exec_entropy_mean: [() => `${capital(uncertainty())} of execution tokens`], plan_entropy_mean: [() => `${capital(uncertainty())} of planning tokens`],
    exec_entropy_var: [() => `Variance of ${uncertainty()}, execution tokens`, "number", 0], plan_entropy_var: [() => `Variance of ${uncertainty()}, planning tokens`, "number", 0],
    sepa_lambda: ["SEPA λ", "number", 0],
  },
  "Sampler and trainer": {
    ratio_mean: ["Importance ratio, mean"], ratio_max: ["Importance ratio, largest"], kl_sample_train: ["KL between sampler and trainer"],
    mismatch_mean: ["Log-prob difference to the server, mean"], mismatch_max: ["Log-prob difference to the server, largest"],
    mismatch_kl: ["KL to the server"], rows_checked: ["Rows checked", "number", 0], rows_excluded: ["Rows excluded", "number", 0],
    rows_mismatch_max: ["Row mismatch, largest", "number", 0], staleness: ["Staleness in updates", "number", 0], policy_proof: ["Policy proof", "number", 0],
  },
  "Learning signal": {
    groups_all_right: ["Groups all correct", "number", 0], groups_all_wrong: ["Groups all incorrect", "number", 0],
    num_datums: ["Completions trained on", "number", 0], reward_errors: ["Scoring failures", "number", 0],
    rewards_none: ["Completions without a reward", "number", 0], skipped_steps: ["Skipped updates", "number", 0],
  },
  Environment: { turns: ["Turns"], truncated: ["Truncated rollouts", "number", 0], env_forks: ["Restarted rows", "number", 0], rollout_errors: ["Failed rollouts", "number", 0] },
  Teaching: {
    student_accuracy: ["Student accuracy", "percent", 0], baseline_accuracy: ["Baseline accuracy", "percent", 0],
    improvement_rate: ["Improvement rate", "percent", 0], degradation_rate: ["Degradation rate", "percent", 0], teaching_length: ["Teaching length", "number", 0],
  },
  Judge: {},
  Time: {
    step_time_s: ["Seconds per step", "number", 0], sample_time_s: ["Sampling, seconds", "number", 0], train_time_s: ["Training, seconds", "number", 0],
    score_time_s: ["Scoring, seconds", "number", 0], other_time_s: ["Everything else, seconds", "number", 0], tokens_per_s: ["Sampled tokens per second", "number", 0],
  },
  "Back pressure": {},
  More: {},
};
const PREFIXES = { "env/": "Environment", judge_: "Judge", bp_: "Back pressure", mismatch_: "Sampler and trainer", rows_: "Sampler and trainer", completion_: "Completions" };
const RATIOS = { ratio_mean: 1, ratio_max: 1, policy_proof: 1 };

const chartsByKey = new Map();
let chartGroups = new Map();

function groupOf(key) {
  const known = Object.keys(METRICS).find((name) => key in METRICS[name]);
  return known || Object.entries(PREFIXES).find(([prefix]) => key.startsWith(prefix))?.[1] || "More";
}

function referencesOf(key) {
  return (lines) => {
    if (key in RATIOS) return [{ y: RATIOS[key], label: String(RATIOS[key]), keep: true }];
    if (!key.startsWith("completion_tokens")) return [];
    const limits = [...new Set(data.runs.map((run) => !run.is_multi_turn && run.max_tokens))];
    const longest = Math.max(...lines.flatMap((line) => line.points.map((p) => p.high)));
    return limits.filter(Boolean).map((limit) => ({ y: limit, label: `max_tokens ${limit}`, keep: longest > limit / 2 }));
  };
}

function metricChart(key) {
  const [title, unit, floor] = (METRICS[groupOf(key)] || {})[key] || [key.replace(/_/g, " ")];
  return new Chart({ key, title: typeof title === "function" ? title() : title, unit, floor: floor ?? null, lines: () => linesOf(key), refs: referencesOf(key) });
}

/** pass@1 by condition and by run, pass@k for each k, and whatever else an evaluation logged. */
function evaluationCharts() {
  const runs = () => data.runs.filter((run) => run.evals.length && !hidden().has(run.condition));
  const names = () => [...new Set(runs().map((run) => run.condition))];
  const mean = (read) => () => names().map((name) => ({
    name, ...styleOf(name), band: true, points: combine(runs().filter((run) => run.condition === name).map((run) => ({ xs: run.evals.map((e) => placeOf(run, e.x)), ys: run.evals.map(read) }))),
  })).filter((line) => line.points.length);
  const each = () => runs().map((run) => ({ name: `${run.condition}, seed ${run.seed}`, ...styleOf(run.condition), bars: true, thin: true, points: run.evals.map((e) => ({ ...e, x: placeOf(run, e.x) })) }));
  const specs = [{ key: "eval_pass_at_1", title: data.runs.length > 1 ? "Held-out pass@1 by run, 95% intervals" : "Held-out pass@1, 95% intervals", unit: "percent", lines: each }];
  if (data.runs.length > names().length) specs.unshift({ key: "eval_pass_at_1 by condition", title: "Held-out pass@1 by condition", unit: "percent", lines: mean((e) => e.y) });
  const keys = new Set(data.runs.flatMap((run) => run.evals.flatMap((e) => Object.keys(e.more))));
  for (const key of ["eval_pass_at_1", "eval_ci_low", "eval_ci_high"]) keys.delete(key);
  keys.delete("eval_pass_at_k");
  if (!data.runs.some((run) => run.evals.some((e) => e.more.eval_reward_errors))) keys.delete("eval_reward_errors");
  const counts = [...new Set(data.runs.flatMap((run) => run.evals.map((e) => e.k || 1)))].filter((k) => k > 1).sort((one, other) => one - other);
  for (const k of counts) specs.push({ key: `eval_pass_at_k of ${k}`, title: `Held-out pass@${k}`, unit: "percent", lines: mean((e) => ((e.k || 1) === k ? e.more.eval_pass_at_k : null)) });
  for (const key of keys) specs.push({ key, title: key.replace(/_/g, " "), unit: key.includes("pass_at") ? "percent" : "number", lines: mean((e) => e.more[key]) });
  return specs;
}

/** Whether a metric has one value in all runs, which a chart would draw as a flat line. */
function constantOf(key) {
  let value;
  for (const run of data.runs) {
    for (const list of [run.series?.[key], run.low?.[key], run.high?.[key]]) {
      for (const y of list || []) {
        if (y === null) continue;
        if (value === undefined) value = y;
        else if (y !== value) return undefined;
      }
    }
  }
  return value;
}

const watcher = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    const chart = chartsByKey.get(entry.target.dataset.key);
    if (!chart) continue;
    chart.visible = entry.isIntersecting;
    if (chart.visible && chart.stale) drawChart(chart);
  }
}, { rootMargin: "900px" });
let chartWidth = 0;
new ResizeObserver(() => {
  const width = document.getElementById("main").clientWidth;
  if (width !== chartWidth) { chartWidth = width; renderCharts(); }
}).observe(document.getElementById("main"));

function drawChart(chart) { chart.stale = false; chart.draw(); }

function addChart(group, chart) {
  chartsByKey.set(chart.key, chart);
  chart.card.dataset.key = chart.key;
  chart.stale = true;
  if (!chartGroups.has(group)) {
    const grid = make("div", { class: "charts" });
    const box = make("details", { class: "group", open: group !== "More" }, make("summary", {}, group), grid);
    chartGroups.set(group, { box, grid });
  }
  chartGroups.get(group).grid.append(chart.card);
  watcher.observe(chart.card);
}

/** Add charts for new metrics; existing cards stay where they are. */
function syncCharts() {
  if (data.runs.some((run) => run.evals?.length)) {
    for (const spec of evaluationCharts()) if (!chartsByKey.has(spec.key)) addChart("Held-out evaluation", new Chart(spec));
  }
  const keys = [...new Set(data.runs.flatMap((run) => Object.keys(run.series || {})))].filter((key) => !key.startsWith("eval_"));
  const order = Object.values(METRICS).flatMap((group) => Object.keys(group));
  keys.sort((one, other) => (order.indexOf(one) + 1 || 999) - (order.indexOf(other) + 1 || 999));
  const flat = [];
  for (const key of keys) {
    const constant = constantOf(key);
    if (constant !== undefined && !chartsByKey.has(key)) flat.push([key, constant]);
    else if (constant === undefined && !chartsByKey.has(key)) addChart(groupOf(key), metricChart(key));
  }
  const sections = ["Held-out evaluation", ...Object.keys(METRICS)].filter((name) => chartGroups.has(name)).map((name) => chartGroups.get(name).box);
  const home = document.getElementById("chart-groups");
  if (home.children.length !== sections.length) home.replaceChildren(...sections);
  document.getElementById("constants").replaceChildren(...(flat.length ? [make("strong", {}, "Constant so far: "), ...flat.flatMap(([key, value], index) => [index ? ", " : "", make("code", {}, `${key} = ${show(value)}`)])] : []));
}

function renderCharts() {
  const home = document.getElementById("chart-groups");
  if (!home) return;
  document.getElementById("legend").replaceChildren(legend());
  document.getElementById("zoom-reset").hidden = !view.zoom;
  const slider = document.getElementById("charts-smooth");
  if (document.activeElement !== slider) slider.value = smoothing();
  document.getElementById("smooth-value").textContent = smoothing().toFixed(2);
  for (const chart of chartsByKey.values()) {
    if (chart.visible) drawChart(chart); else chart.stale = true;
  }
}

function chartsSection() {
  const toggle = (key, label, title) => make("label", { class: "toggle", title }, make("input", { type: "checkbox", id: `charts-${key}`, checked: Boolean(view[key]), onchange: (event) => { remember({ [key]: event.target.checked ? "1" : "" }); renderCharts(); } }), label);
  const axis = make("select", { id: "charts-x", onchange: (event) => { remember({ x: event.target.value, zoom: "" }); renderCharts(); } },
    Object.entries(X_AXES).map(([key, [, name]]) => make("option", { value: key, selected: view.x === key }, name)));
  return [
    make("div", { class: "toolbar" },
      make("label", {}, "Smoothing ", make("input", { id: "charts-smooth", type: "range", min: 0, max: 0.99, step: 0.01, value: smoothing(), oninput: (event) => { remember({ smooth: event.target.value }); renderCharts(); } }), make("output", { id: "smooth-value" })),
      make("label", {}, "x axis ", axis), toggle("log", "log scale", "Logarithmic y axis; values up to 0 are left out"),
      toggle("clip", "clip outliers", "Show the range from the 1st to the 99th percentile"),
      make("button", { id: "zoom-reset", type: "button", hidden: true, onclick: () => setZoom(null) }, "Reset zoom")),
    make("div", { id: "legend" }),
    make("p", { class: "soft hint" }, "Lines are means over seeds with the range over seeds; raw values are faint. Drag across a chart to zoom all of them, double-click to reset."),
    make("div", { id: "chart-groups" }), make("p", { class: "soft", id: "constants" })];
}

window.addEventListener("beforeprint", () => { for (const chart of chartsByKey.values()) if (chart.stale) drawChart(chart); });
