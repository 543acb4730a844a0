// Curves: smoothing, the mean over seeds, axes and their labels.

/** Exponential moving average without the bias towards the first value; null where there is no value. */
function smoothed(values, weight) {
  if (!weight) return values;
  let sum = 0;
  let norm = 0;
  return values.map((value) => {
    if (typeof value !== "number") return null;
    sum = weight * sum + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    return sum / norm;
  });
}

const X_AXES = { step: ["steps", "step"], tokens: ["tokens", "sampled tokens"], hours: ["hours", "hours"] };

function acrossOf(run) {
  return run[X_AXES[view.x][0]] || [];
}

/** The place of a step on the x axis of a run. */
function placeOf(run, step) {
  if (view.x === "step" || !run.steps.length) return step;
  const index = run.steps.findIndex((other) => other >= step);
  return index < 0 ? acrossOf(run).at(-1) : step === 0 ? 0 : acrossOf(run)[index];
}

function interpolate(xs, ys, x) {
  let low = 0;
  let high = xs.length - 1;
  if (high < 0 || x < xs[0] || x > xs[high]) return null;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] <= x) low = middle; else high = middle;
  }
  const share = xs[high] === xs[low] ? 0 : (x - xs[low]) / (xs[high] - xs[low]);
  return ys[low] + share * (ys[high] - ys[low]);
}

/** The mean, lowest and highest of several curves {xs, ys}; curves of other places are interpolated. */
function combine(curves) {
  const filled = curves.map(({ xs, ys }) => {
    const kept = xs.map((x, index) => index).filter((index) => typeof ys[index] === "number");
    return { xs: kept.map((index) => xs[index]), ys: kept.map((index) => ys[index]) };
  }).filter((curve) => curve.xs.length);
  if (!filled.length) return [];
  const first = filled[0].xs;
  const aligned = filled.every(({ xs }) => xs.length === first.length && xs[0] === first[0] && xs.at(-1) === first.at(-1) && xs[xs.length >> 1] === first[first.length >> 1]);
  let grid = first;
  if (!aligned) {
    const places = [...new Set(filled.flatMap(({ xs }) => xs))].sort((one, other) => one - other);
    const gap = Math.max(1, Math.ceil(places.length / 600));
    grid = places.filter((_, index) => index % gap === 0 || index === places.length - 1);
  }
  return grid.map((x, index) => {
    const ys = aligned ? filled.map((curve) => curve.ys[index]) : filled.map((curve) => interpolate(curve.xs, curve.ys, x)).filter((y) => y !== null);
    if (!ys.length) return null;
    return { x, y: ys.reduce((sum, y) => sum + y, 0) / ys.length, low: Math.min(...ys), high: Math.max(...ys), n: ys.length };
  }).filter(Boolean);
}

/** One line per visible condition: smoothed mean and range over seeds, and the raw values of every run. */
function linesOf(key) {
  const away = hidden();
  return conditions().filter((name) => !away.has(name)).map((name) => {
    const runs = data.runs.filter((run) => run.condition === name && run.series && run.series[key]);
    const weight = smoothing();
    const detailed = runs.map((run) => (run.detail?.zoom === view.zoom && run.detail.series[key] ? run.detail : run));
    const raw = detailed.map((run) => acrossOf(run).map((x, index) => ({
      x, y: run.series[key][index], low: (run.low[key] || run.series[key])[index], high: (run.high[key] || run.series[key])[index],
    })).filter((p) => typeof p.y === "number"));
    const points = combine(detailed.map((run) => ({ xs: acrossOf(run), ys: smoothed(run.series[key], weight) })));
    return { name, ...styleOf(name), points, raw: weight || raw.some((line) => line.some((p) => p.low !== p.high)) ? raw : [], band: runs.length > 1 };
  }).filter((line) => line.points.length);
}

function smoothing() {
  if (view.smooth !== "") return Number(view.smooth);
  return Math.max(0, ...data.runs.map((run) => (run.steps || []).length)) > 60 ? 0.6 : 0;
}

// ---- axes

function ticks(low, high, count) {
  const raw = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const size = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((step) => step >= raw * 0.999) || raw;
  const found = [];
  for (let number = Math.ceil(low / size - 1e-9); number * size <= high + size * 1e-9; number += 1) found.push(number * size);
  return found;
}

function logTicks(low, high) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) {
    for (const factor of [1, 2, 5]) found.push(factor * 10 ** power);
  }
  const within = found.filter((tick) => tick >= low * 0.999 && tick <= high * 1.001);
  const decades = within.filter((tick) => /^1(e|0*$|\.?0*$)/.test(tick.toExponential(0)));
  const chosen = within.length > 6 && decades.length > 1 ? decades : within;
  const gap = Math.ceil(chosen.length / 6);
  if (chosen.length > 1) return chosen.filter((_, index) => index % gap === 0);
  return [3, 6, 12].map((count) => ticks(low, high, count)).find((list) => list.length > 1) || chosen;
}

/** Labels with as few digits as tell all ticks apart and show each exactly. */
function labelsOf(values) {
  const most = Math.max(...values.map(Math.abs), 0);
  const [scale, suffix] = most >= 1e10 ? [1e9, "G"] : most >= 1e7 ? [1e6, "M"] : most >= 1e4 ? [1e3, "k"] : [1, ""];
  const gap = Math.min(...values.slice(1).map((value, index) => Math.abs(value - values[index])), Infinity);
  for (let digits = 0; digits <= 6; digits += 1) {
    const texts = values.map((value) => (value / scale).toFixed(digits));
    const exact = values.every((value, index) => Math.abs(Number(texts[index]) * scale - value) <= (Number.isFinite(gap) ? gap : Math.abs(value)) * 0.01);
    if (exact && new Set(texts).size === texts.length) return texts.map((text, index) => (values[index] === 0 ? "0" : text.replace("-", "−") + suffix));
  }
  for (let digits = 0; digits <= 8; digits += 1) {
    const texts = values.map((value) => value.toExponential(digits).replace("e+", "e").replace("-", "−"));
    const exact = values.every((value) => Math.abs(Number(value.toExponential(digits)) - value) <= 0.01 * (Number.isFinite(gap) ? gap : Math.abs(value)));
    if (exact && new Set(texts).size === texts.length) return texts.map((text, index) => (values[index] === 0 ? "0" : text));
  }
  return values.map(String);
}

function quantile(sorted, share) {
  return sorted[Math.min(sorted.length - 1, Math.max(0, Math.round(share * (sorted.length - 1))))];
}
