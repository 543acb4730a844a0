// The completions: found by filters, page by page, from the file's own data or from the live server.

const PAGE = 60;
const lab = { groups: [], next: 0, places: 0, asked: 0, snapshot: {}, busy: false, tokens: new Map() };
const FILTERS = ["condition", "run", "step", "show", "least", "most", "search", "prompt"];
const SORTS = { newest: "newest first", oldest: "oldest first", best: "highest reward", worst: "lowest reward", longest: "longest", shortest: "shortest" };
const KINDS = { "": "all", right: "correct", wrong: "incorrect", truncated: "truncated", errors: "not scored" };
const keyOf = (group) => `${group.run}:${group.step}:${group.at}`;

/** Older logs have no finish_reason; of several turns, they do not show which reached the limit. */
function isTruncated(member, run) {
  return member.finish_reason ? member.finish_reason === "length" : !member.transcript && member.num_tokens >= run.max_tokens;
}

function belongs(member, run) {
  if (view.show === "truncated") return isTruncated(member, run);
  if (view.show === "errors") return member.outcome !== "right" && member.outcome !== "wrong";
  return !view.show || member.outcome === view.show;
}

function matchesView(group) {
  const run = runOf(group.run);
  if (!run || (view.condition && run.condition !== view.condition) || (view.run && run.id !== view.run)) return false;
  if ((view.step !== "" && group.step !== Number(view.step)) || (view.prompt && String(group.prompt_id) !== view.prompt)) return false;
  if (view.color !== "none" && !group.members.some((member) => member.tokens)) return false;
  const words = view.search.toLowerCase();
  if (words && !group.prompt.toLowerCase().includes(words) && !group.members.some((member) => member.text.toLowerCase().includes(words))) return false;
  const reward = (value) => (view.least === "" || (value !== null && value >= Number(view.least))) && (view.most === "" || (value !== null && value <= Number(view.most)));
  return group.members.some((member) => belongs(member, run) && reward(member.reward));
}

/** A page of groups that match the filters. */
async function findGroups(from, wanted = null) {
  if (!data.live) {
    const found = sorted(wanted ? data.groups.filter((group) => group.run === wanted.run && group.step === Number(wanted.step)) : data.groups.filter(matchesView));
    if (view.sort === "newest") found.sort((one, other) => other.step - one.step);
    return { groups: found.slice(from, from + PAGE), next: from + PAGE < found.length ? from + PAGE : null, places: found.length };
  }
  const query = wanted || Object.fromEntries(FILTERS.map((key) => [key, view[key]]).filter(([, value]) => value !== ""));
  const upto = Object.entries(lab.snapshot).map(([id, count]) => `${id}:${count}`).join(",");
  return ask("groups.json", { ...query, order: view.sort === "oldest" ? "oldest" : "newest", from, count: PAGE, upto });
}

async function search() {
  const turn = (lab.asked += 1);
  lab.snapshot = Object.fromEntries(data.runs.map((run) => [run.id, run.index?.groups ?? 0]));
  lab.busy = true;
  fillStatus();
  const page = await findGroups(0);
  if (turn !== lab.asked) return;
  Object.assign(lab, page, { busy: false });
  // A linked group may be on a later page.
  if (view.group && !lab.groups.some((group) => keyOf(group) === view.group)) {
    const [run, step] = view.group.split(":");
    const linked = runOf(run) ? (await findGroups(0, { run, step })).groups.find((group) => keyOf(group) === view.group) : null;
    if (turn !== lab.asked) return;
    if (linked) lab.groups = [linked, ...lab.groups]; else remember({ group: "" });
  }
  fillList();
  fillGroup();
  if (data.live && !lab.groups.length && lab.next !== null) more();
}

async function more() {
  if (lab.busy || lab.next === null) return;
  const turn = lab.asked;
  lab.busy = true;
  fillStatus();
  const page = await findGroups(lab.next);
  if (turn !== lab.asked) return;
  const had = lab.groups.length;
  Object.assign(lab, { busy: false, next: page.next, places: page.places, groups: [...lab.groups, ...page.groups] });
  fillList();
  if (!had) fillGroup();
  if (data.live && !page.groups.length && lab.next !== null && lab.groups.length < PAGE) more();
}

let typing = 0;
function choose(key, value) {
  remember({ [key]: value, at: "completions", ...(key === "color" || key === "sort" ? {} : { group: "" }) });
  clearTimeout(typing);
  if (key === "color" && data.live) fillGroup();
  else if (["search", "least", "most", "step"].includes(key) && data.live) typing = setTimeout(search, 300);
  else search();
}

/** Show the completions behind a check or a prompt, with all other filters reset. */
function openCompletions(changes) {
  remember({ ...Object.fromEntries(FILTERS.map((key) => [key, ""])), sort: "newest", group: "", ...changes, at: "completions" });
  fillFilters();
  search();
  document.getElementById("completions").scrollIntoView({ behavior: "smooth" });
}

// ---- filters

function field(label, key, options) {
  const id = `filter-${key}`;
  const control = options
    ? make("select", { id, onchange: (event) => choose(key, event.target.value) }, Object.entries(options).map(([value, text]) => make("option", { value, selected: String(view[key]) === value }, text)))
    : make("input", { id, type: key === "search" ? "search" : "number", step: "any", value: view[key], placeholder: key === "search" ? "in prompts and completions" : "any", oninput: (event) => choose(key, event.target.value) });
  return make("label", { for: id }, label, control);
}

function stepField() {
  const steps = data.live ? null : [...new Set(data.groups.map((group) => group.step))].sort((one, other) => one - other);
  return steps && steps.length <= 500 ? field("step", "step", { "": "any", ...Object.fromEntries(steps.map((step) => [` ${step}`.trim(), String(step)])) }) : field("step", "step");
}

function fillFilters() {
  const names = conditions();
  const home = document.getElementById("filters");
  if (home.contains(document.activeElement)) return;
  home.replaceChildren(...[
    names.length > 1 ? field("condition", "condition", { "": "any", ...Object.fromEntries(names.map((name) => [name, name])) }) : null,
    data.runs.length > 1 ? field("run", "run", { "": "any", ...Object.fromEntries(data.runs.map((run) => [run.id, run.name])) }) : null,
    stepField(), field("show", "show", KINDS), field("reward from", "least"), field("to", "most"), field("search", "search"),
    field("sort", "sort", SORTS), field("color tokens by", "color", { none: "nothing", surprisal: "surprisal", entropy: "entropy", planning: "planning", advantage: "advantage" }),
    make("label", { class: "toggle", for: "filter-wide" }, make("input", { id: "filter-wide", type: "checkbox", checked: Boolean(view.wide), onchange: (event) => { remember({ wide: event.target.checked ? "1" : "" }); fillGroup(); } }), "full width"),
    view.prompt ? make("button", { type: "button", class: "chip", onclick: () => openCompletions({}) }, "one prompt ✕") : null].filter(Boolean));
}

/** What limits the list while tokens are colored. */
function colorNote() {
  const steps = (groups) => new Set(groups.map((group) => `${group.run}:${group.step}`)).size;
  const [few, all] = view.color === "none" ? [0, 0] : [steps(data.groups.filter((group) => group.members.some((member) => member.tokens))), steps(data.groups)];
  return few && few < all ? `Only the last recorded steps of ${data.runs.length > 1 ? "each" : "the"} run have tokens to color in a file: ${show(few)} of ${counted(all, "step")}. retrain ui colors all recorded steps.` : "";
}

function fillStatus() {
  const node = document.getElementById("lab-status");
  const fresh = data.live ? data.runs.reduce((sum, run) => sum + Math.max(0, (run.index?.groups ?? 0) - (lab.snapshot[run.id] ?? 0)), 0) : 0;
  const indexing = data.live ? Math.min(1, ...data.runs.map((run) => run.index?.read ?? 1)) : 1;
  const shown = lab.next === null || lab.next === undefined ? `${counted(lab.groups.length, "group")}` : `${counted(lab.groups.length, "group")} shown, ${data.live ? `${show(lab.next)} of ${show(lab.places)} searched` : `${show(lab.places)} match`}`;
  const parts = [lab.busy ? "Searching…" : shown];
  if (!data.live) parts.push(colorNote() || data.groups_note);
  if (data.live && lab.next !== null && !["newest", "oldest"].includes(view.sort)) parts.push("Sorted among the groups shown");
  if (indexing < 1) parts.push(`Indexing completions: ${Math.floor(100 * indexing)}%.`);
  node.replaceChildren(parts.filter(Boolean).join(". ").replace(/\.\.+/g, ".") + " ", ...(fresh ? [make("button", { type: "button", id: "lab-fresh", onclick: search }, `${counted(fresh, "new group")}: show`)] : []));
}

// ---- the list

const mean = (values) => values.reduce((sum, value) => sum + value, 0) / Math.max(1, values.length);
function sorted(groups) {
  const score = { best: (group) => -mean(group.members.map((m) => m.reward ?? 0)), worst: (group) => mean(group.members.map((m) => m.reward ?? 0)), longest: (group) => -Math.max(...group.members.map((m) => m.num_tokens)), shortest: (group) => Math.min(...group.members.map((m) => m.num_tokens)) }[view.sort];
  return score ? [...groups].sort((one, other) => score(one) - score(other)) : groups;
}

function dots(group) {
  const marks = group.members.slice(0, 32).map((member) => make("span", { class: `dot ${member.outcome}` }));
  const right = group.members.filter((member) => member.outcome === "right").length;
  return make("span", { class: "dots", role: "img", "aria-label": `${right} of ${group.members.length} correct` }, marks, make("span", { class: "soft" }, ` ${right}/${group.members.length}`));
}

function fillList() {
  const list = document.getElementById("groups");
  const groups = sorted(lab.groups);
  if (!groups.some((group) => keyOf(group) === view.group)) remember({ group: groups.length ? keyOf(groups[0]) : "" });
  const place = list.scrollTop;
  list.replaceChildren(...groups.map((group) => {
    const run = runOf(group.run);
    return make("li", {}, make("button", {
      type: "button", "aria-current": String(keyOf(group) === view.group), "data-key": keyOf(group),
      onclick: () => { remember({ group: keyOf(group), at: "completions" }); for (const other of list.querySelectorAll("button")) other.setAttribute("aria-current", String(other.dataset.key === view.group)); fillGroup(); },
    }, make("span", { class: "ask" }, group.prompt.trim().slice(-160)), make("span", { class: "where" }, make("span", { class: "soft" }, swatch(run.condition), `${data.runs.length > 1 ? `${run.name}, ` : ""}step ${group.step}`), dots(group))));
  }));
  if (!groups.length && !lab.busy) list.append(make("li", { class: "soft empty" }, view.color === "none" || data.live ? "No matches." : "No matches. Token values need runs with [training] record = true."));
  if (lab.next !== null && lab.next !== undefined) list.append(make("li", {}, make("button", { type: "button", class: "more", onclick: more }, data.live ? "Search further" : "Show more")));
  list.scrollTop = place;
  fillStatus();
}

// ---- one group

async function fillGroup() {
  const home = document.getElementById("group");
  const group = lab.groups.find((one) => keyOf(one) === view.group);
  document.getElementById("lab").classList.toggle("wide", Boolean(view.wide));
  if (!group) { home.replaceChildren(); return; }
  const run = runOf(group.run);
  if (data.live && view.color !== "none" && !group.asked) {
    group.asked = true;
    home.replaceChildren(make("p", { class: "soft" }, "Reading token values…"));
    await addTokens(group);
    if (keyOf(group) !== view.group) return;
  }
  const scale = scaleOf(group);
  const reference = group.members.find((member) => member.reference !== undefined)?.reference;
  const members = [...group.members];
  const order = { best: (m) => -(m.reward ?? -Infinity), worst: (m) => m.reward ?? Infinity, longest: (m) => -m.num_tokens, shortest: (m) => m.num_tokens }[view.sort];
  if (order) members.sort((one, other) => order(one) - order(other));
  home.replaceChildren(...[
    make("div", { class: "where" }, make("span", {}, swatch(run.condition), make("strong", {}, run.condition), `, seed ${run.seed}, step ${group.step}`), make("span", {},
      make("button", { type: "button", onclick: () => openCompletions({ prompt: String(group.prompt_id), sort: "oldest" }) }, "This prompt across steps and runs"))),
    view.prompt ? promptPlot() : null,
    make("div", { class: "prompt card" }, ...marked(group.prompt)),
    reference === undefined ? null : make("p", { class: "reference" }, make("span", { class: "soft" }, "Reference answer: "), make("code", {}, reference)),
    view.color === "none" ? null : scaleLegend(scale),
    make("div", { class: "members" }, members.map((member) => memberCard(member, run, scale)))].filter(Boolean));
}

/** The share of correct completions of the prompt at each of its steps. */
function promptPlot() {
  const same = lab.groups.filter((group) => String(group.prompt_id) === view.prompt);
  const chart = new Chart({
    key: "this prompt", title: "This prompt: correct completions by step", unit: "percent", floor: 0, across: "step",
    lines: () => conditions().map((name) => ({ name, ...styleOf(name), points: combine(same.filter((group) => runOf(group.run).condition === name)
      .sort((one, other) => one.step - other.step).map((group) => ({ xs: [group.step], ys: [mean(group.members.map((member) => Number(member.outcome === "right")))] }))) })).filter((line) => line.points.length),
  });
  setTimeout(() => chart.draw());
  return chart.card;
}

function marked(text) {
  const words = view.search.toLowerCase();
  if (!words) return [text];
  const parts = [];
  let from = 0;
  const lower = text.toLowerCase();
  for (let at = lower.indexOf(words); at >= 0; at = lower.indexOf(words, from)) {
    parts.push(text.slice(from, at), make("mark", {}, text.slice(at, at + words.length)));
    from = at + words.length;
  }
  return [...parts, text.slice(from)];
}

const OUTCOMES = { right: "✓ correct", wrong: "✕ incorrect", none: "no reward", error: "! scoring failed", timeout: "! scoring timed out" };

function memberCard(member, run, scale) {
  const away = !belongs(member, run);
  const facts = [`reward ${show(member.reward)}`, `${show(member.num_tokens)} tokens`];
  if (isTruncated(member, run)) facts.push("truncated");
  let body;
  if (member.tokens && view.color !== "none") body = make("div", { class: "answer" }, ...microscope(member.tokens, scale));
  else if (member.transcript) body = make("div", { class: "bubbles" }, member.transcript.map(bubble));
  else body = make("div", { class: "answer" }, ...marked(member.text));
  return make("article", { class: `member ${member.outcome}${away ? " away" : ""}` },
    make("p", { class: "facts" }, make("span", { class: "outcome" }, OUTCOMES[member.outcome] || member.outcome), make("span", { class: "soft" }, facts.join(" · "))),
    member.answer === undefined ? null : make("p", { class: "extracted" }, make("span", { class: "soft" }, "Extracted: "), member.answer ? make("code", {}, member.answer) : make("em", { class: "soft" }, "no answer")),
    member.detail ? make("p", { class: "worse" }, member.detail) : null, body);
}

function bubble(message) {
  const content = typeof message.content === "string" ? message.content : JSON.stringify(message.content ?? message.tool_calls ?? "", null, 1);
  const calls = message.tool_calls && typeof message.content === "string" ? `\n${JSON.stringify(message.tool_calls, null, 1)}` : "";
  return make("div", { class: `bubble ${message.role}` }, make("span", { class: "role" }, message.role, message.score === undefined ? null : ` · score ${show(message.score)}`), ...marked(content + calls));
}

// ---- the token microscope

async function addTokens(group) {
  const key = `${group.run}:${group.step}:${data.runs.find((run) => run.id === group.run)?.epoch}`;
  if (!lab.tokens.has(key)) lab.tokens.set(key, ask("tokens.json", { run: group.run, step: group.step }).then((found) => found.groups, () => []));
  const rows = (await lab.tokens.get(key))[group.at] || [];
  const isOf = (row, member) => [row.text.length, row.sampled?.reduce((sum, value) => sum + value, 0)].includes(member.num_tokens);
  group.members.forEach((member, index) => { if (rows[index] && isOf(rows[index], member)) member.tokens = rows[index]; });
}

/** One color scale for a group, so that its completions can be compared. */
function scaleOf(group) {
  if (view.color === "planning") return 1;
  const sizes = group.members.flatMap((member) => (member.tokens?.[view.color] || []).map((value) => Math.abs(value ?? 0))).sort((one, other) => one - other);
  return sizes.length ? Math.max(quantile(sizes, 0.99), 1e-9) : 0;
}

function paint(value, scale) {
  if (value === null || value === undefined || !scale) return null;
  if (view.color === "planning") return value ? "rgb(230 159 0 / .55)" : null;
  const share = 0.75 * Math.min(1, Math.abs(value) / scale);
  if (view.color === "advantage") return value >= 0 ? `rgb(0 158 115 / ${share})` : `rgb(213 94 0 / ${share})`;
  return `rgb(0 114 178 / ${share})`;
}

function scaleLegend(scale) {
  if (!scale) return make("p", { class: "soft" }, `No ${view.color} was recorded for this step; it needs [training] record = true.`);
  if (view.color === "planning") return make("p", { class: "soft scale" }, make("span", { class: "token", style: `background:${paint(1, 1)}` }, "planning token"), " execution token");
  const ends = view.color === "advantage" ? [-scale, 0, scale] : [0, scale];
  const label = (value) => show(value, 2) + (Math.abs(value) === scale ? " or more" : "");
  return make("p", { class: "soft scale" }, `${view.color}: `, view.color === "advantage" ? `${show(-scale, 2)} or less` : label(ends[0]), make("span", { class: "ramp", style: `background:linear-gradient(90deg, ${ends.map((value) => paint(value, scale)).join(", ")})` }), label(ends.at(-1)));
}

function microscope(tokens, scale) {
  const values = tokens[view.color];
  if (!values) return [make("p", { class: "soft" }, `No ${view.color} was recorded for this run.`)];
  return tokens.text.map((text, index) => {
    const tip = ["surprisal", "entropy", "advantage"].filter((name) => tokens[name]).map((name) => `${name} ${show(tokens[name][index], 4)}`);
    if (tokens.planning) tip.push(tokens.planning[index] ? "planning" : "execution");
    const inserted = tokens.sampled && !tokens.sampled[index];
    if (inserted) tip.push("written by the environment");
    const color = paint(values[index], scale);
    return make("span", { class: inserted ? "token inserted" : "token", style: color ? `background:${color}` : null, ...withTip(`${JSON.stringify(text)}\n${tip.join("\n")}`) }, text);
  });
}

// ---- held-out problems that flipped

function renderFlips() {
  const runs = data.runs.filter((run) => run.flips && run.flips.gained + run.flips.lost);
  const home = document.getElementById("flips");
  const opened = new Set([...home.querySelectorAll("details[open]")].map((node) => node.dataset.run));
  home.replaceChildren(...runs.map((run) => {
    const flips = run.flips;
    const rows = flips.list.map((flip) => [String(flip.problem), `${flip.before[0]} of ${flip.before[1]}`, `${flip.after[0]} of ${flip.after[1]}`, make("span", { class: flip.gained ? "better" : "worse" }, flip.gained ? "▲ gained" : "▼ lost"), ...(flip.prompt === undefined ? [] : [flip.prompt])]);
    const rest = flips.gained + flips.lost - flips.list.length;
    return make("details", { "data-run": run.id, open: opened.has(run.id) }, make("summary", {}, swatch(run.condition), `${data.runs.length > 1 ? `${run.condition}, seed ${run.seed}: ` : "Held-out problems that flipped: "}${flips.gained} gained, ${flips.lost} lost of ${flips.problems}`),
      make("p", { class: "soft" }, `A problem flips when half or more of its completions are correct in only one of the evaluations at steps ${flips.first} and ${flips.last}. Numbers are positions in eval.jsonl and eval_problems.jsonl.`),
      table(["problem", "correct before", "correct after", "", ...(rows.some((row) => row.length > 4) ? ["prompt"] : [])], rows, [0, 1, 2]), rest > 0 ? make("p", { class: "soft" }, `${rest} more in eval.jsonl.`) : null);
  }));
  document.getElementById("flips-title").hidden = !runs.length;
}

function labSection() {
  return [make("p", { class: "soft", id: "lab-status", role: "status" }), make("div", { class: "filters", id: "filters" }),
    make("div", { id: "lab", class: "browser" }, make("ul", { class: "groups", id: "groups" }), make("div", { id: "group" })),
    make("h3", { id: "flips-title", hidden: true }, "Held-out problems that flipped"), make("div", { id: "flips" })];
}
