// The page: sections are made once and filled again when data arrives, so that nothing jumps while one reads.

const SECTIONS = [["verdict", "Verdict"], ["health", "Health"], ["runs", "Runs"], ["charts", "Metrics"], ["squeeze", "Squeeze"], ["completions", "Completions"], ["configuration", "Configuration"]];

function build() {
  const content = { charts: chartsSection, completions: labSection };
  document.getElementById("main").replaceChildren(...SECTIONS.map(([id, title]) => make("section", { id: `${id}-section` },
    make("h2", { id: `at-${id}` }, title), make("div", { id }, ...(content[id] ? content[id]() : [])))));
  document.getElementById("nav").replaceChildren(...SECTIONS.map(([id, title]) => make("a", {
    href: `#at=${id}`, id: `nav-${id}`, onclick: (event) => { event.preventDefault(); remember({ at: id }); goTo(id, "smooth"); },
  }, title)));
}

function goTo(id, behavior = "auto") {
  const section = document.getElementById(`${id}-section`);
  if (section) section.scrollIntoView({ behavior });
}

/** The section that the address leads to; filters without one lead to the completions. The first group is always in it. */
function target() {
  return view.at || ([...FILTERS, "sort", "color", "wide"].some((key) => view[key] !== DEFAULTS[key]) ? "completions" : "");
}

/** Fill everything except the completions, which change only when asked to. */
function render() {
  document.title = data.title || "retrain";
  document.getElementById("title").textContent = data.title || "retrain";
  document.getElementById("subtitle").textContent = [data.subtitle, data.live ? "" : data.created ? `Created ${data.created}` : ""].filter(Boolean).join(" · ");
  renderVerdict();
  renderHealth();
  renderRuns();
  renderSettings();
  syncCharts();
  renderSqueeze();
  renderCharts();
  renderFlips();
  hideAbsent();
}

/** Sections without data are neither on the page nor in its navigation. */
function hideAbsent() {
  const absent = { squeeze: !data.squeeze, health: !data.runs.length, runs: !data.runs.length, charts: !data.runs.length, configuration: !data.runs.length,
    completions: !(data.live ? data.runs.some((run) => run.index?.groups) : data.groups.length) && !data.runs.some((run) => run.flips) };
  for (const [id, gone] of Object.entries(absent)) {
    document.getElementById(`${id}-section`).hidden = gone;
    document.getElementById(`nav-${id}`).hidden = gone;
  }
}

// ---- live

async function ask(path, query) {
  const answer = await fetch(`${path}?${new URLSearchParams(query)}`, { cache: "no-store" });
  if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
  return answer.json();
}

/** Replace the end of a run's curves by the buckets that changed. */
function merge(old, fresh) {
  if (!fresh.steps) return { ...old, ...fresh };
  const merged = { ...old, ...fresh };
  if (!fresh.from || !old) return merged;
  const join = (before, after) => [...Array.from({ length: fresh.from }, (_, index) => before?.[index] ?? null), ...after];
  for (const key of ["steps", "tokens", "hours"]) merged[key] = join(old[key], fresh[key]);
  for (const part of ["series", "low", "high"]) merged[part] = Object.fromEntries(Object.entries(fresh[part]).map(([key, list]) => [key, join(old[part][key], list)]));
  return merged;
}

const clock = { offset: 0, failed: false };

async function poll() {
  const known = data.runs.map((run) => [run.id, run.version, run.epoch, run.size, run.rows].join(":")).join(",");
  const answer = await ask("data.json", { known, head: data.head_version || "" });
  clock.offset = answer.now - Date.now() / 1000;
  clock.failed = false;
  const changed = answer.head || answer.problem !== (data.problem || "") || answer.runs.some((run) => run.version) || answer.runs.length !== data.runs.length;
  const before = new Map(data.runs.map((run) => [run.id, run]));
  data.runs = answer.runs.map((run) => merge(before.get(run.id), run));
  if (answer.head) Object.assign(data, answer.head, { head_version: answer.head_version });
  data.problem = answer.problem;
  if (!changed) return;
  const empty = !lab.asked && data.runs.some((run) => run.index?.groups && run.index.read === 1);
  keepPlace(render);
  if (empty || before.size !== data.runs.length) fillFilters();
  if (empty) search().catch(() => {}); else if (lab.asked) fillStatus();
  // Completions appear when they are indexed, perhaps after the runs.
  if (((!before.size && data.runs.length) || (empty && !window.scrollY)) && target()) goTo(target());
}

/** Run something that changes the height of the page, and leave what is in the middle of the window there. */
function keepPlace(change) {
  const anchor = document.elementFromPoint(window.innerWidth / 2, window.innerHeight / 2)?.closest(".chart, #filters, #lab, section");
  const before = anchor?.getBoundingClientRect().top;
  change();
  if (anchor?.isConnected && window.scrollY) window.scrollBy(0, anchor.getBoundingClientRect().top - before);
}

/** The next request starts after the last one ended, so that requests cannot pile up. */
async function follow() {
  await poll().catch(() => { clock.failed = true; });
  badge();
  const loading = data.runs.some((run) => run.loading < 1 || run.index?.read < 1) || !data.runs.length;
  setTimeout(follow, loading && !clock.failed ? 500 : data.live * 1000);
}

function badge() {
  const node = document.getElementById("badge");
  const latest = Math.max(0, ...data.runs.map((run) => run.updated || 0));
  const running = data.runs.filter((run) => run.status === "running");
  const age = Date.now() / 1000 + clock.offset - latest;
  const slow = running.length && age > 10 * Math.max(30, ...running.map((run) => run.median_step_s || 0));
  node.hidden = false;
  node.className = clock.failed ? "badge lost" : slow ? "badge slow" : running.length ? "badge running" : "badge";
  const state = clock.failed ? "Connection lost, showing the last data" : running.length ? "Live" : data.runs.length ? (data.runs.every((run) => run.status === "finished") ? "Finished" : data.runs.some((run) => run.status === "failed") ? "Failed" : "Not running") : data.head_version ? "Waiting for the first step" : "Loading …";
  const loading = Math.min(1, ...data.runs.map((run) => run.loading ?? 1));
  node.textContent = [state, latest ? `last step ${duration(age)} ago` : "", loading < 1 ? `reading ${Math.floor(100 * loading)}%` : ""].filter(Boolean).join(" · ");
}

build();
if (data.live) {
  if (data.verdict) renderVerdict(); else document.getElementById("verdict").textContent = "Loading …";
  hideAbsent();
  badge();
  follow();
  setInterval(badge, 1000);
} else {
  render();
  fillFilters();
  search().then(() => { if (target()) goTo(target()); });
}
window.addEventListener("hashchange", () => {
  Object.assign(view, DEFAULTS, Object.fromEntries(new URLSearchParams(location.hash.slice(1))));
  render();
  fillFilters();
  search();
  if (target()) goTo(target());
});
