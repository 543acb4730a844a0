"use strict";
// The page renders one object, `data`, which retrain/report/contents.py writes. A file holds all of it;
// a live page starts empty and asks its server for what changed.

const data = JSON.parse(document.getElementById("data").textContent);
data.runs = data.runs || [];

// The color-blind safe palette of Okabe and Ito; beyond eight conditions, dashes tell lines apart.
// page.css has them, brighter on a dark page.
const COLORS = Array.from({ length: 8 }, (_, index) => `var(--c${index})`);
const DASHES = ["", "6 3", "2 3", "8 3 2 3"];

// Everything a reader can choose. What differs from these defaults is kept in the address.
const DEFAULTS = {
  smooth: "", x: "step", log: "", clip: "", zoom: "", hide: "", at: "",
  condition: "", run: "", step: "", show: "", least: "", most: "", search: "", sort: "newest", color: "none",
  prompt: "", group: "", wide: "",
};
const view = { ...DEFAULTS, ...Object.fromEntries(new URLSearchParams(location.hash.slice(1))) };

function remember(changes) {
  Object.assign(view, changes);
  const kept = Object.entries(view).filter(([key, value]) => key in DEFAULTS && String(value) !== String(DEFAULTS[key]));
  history.replaceState(null, "", kept.length ? `#${new URLSearchParams(kept)}` : location.pathname + location.search);
}

// ---- elements

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

function draw(tag, attributes, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes)) if (value !== null && value !== undefined && value !== "") node.setAttribute(key, value);
  node.append(...children);
  return node;
}

function table(heads, rows, numbers = []) {
  const cell = (tag, value, index) => make(tag, { class: numbers.includes(index) ? "number" : null }, value instanceof Node ? value : show(value));
  return make("div", { class: "scroll" }, make("table", {},
    make("thead", {}, make("tr", {}, heads.map((head, index) => cell("th", head, index)))),
    make("tbody", {}, rows.map((row) => make("tr", {}, row.map((value, index) => cell("td", value, index)))))));
}

function showTip(event, text) {
  const tip = document.getElementById("tip");
  tip.hidden = !event;
  if (!event) return;
  tip.textContent = text;
  const place = event.clientX ? { x: event.clientX, y: event.clientY } : (({ left, bottom }) => ({ x: left, y: bottom }))(event.target.getBoundingClientRect());
  tip.style.left = Math.max(4, Math.min(place.x + 14, window.innerWidth - tip.offsetWidth - 8)) + "px";
  tip.style.top = Math.min(place.y + 14, window.innerHeight - tip.offsetHeight - 8) + "px";
}
const withTip = (text) => ({
  onmousemove: (event) => showTip(event, text), onmouseleave: () => showTip(null),
  onfocus: (event) => showTip(event, text), onblur: () => showTip(null),
});

// ---- numbers

function show(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e15) return value.toLocaleString("en-US");
  if (size !== 0 && (size < 0.001 || size >= 1e6)) return value.toExponential(digits - 1).replace("e+", "e");
  return size >= 1000 ? Math.round(value).toLocaleString("en-US") : value.toFixed(size >= 100 ? 1 : digits);
}
/** Rounds 31.25 to 31.2, as Python does in the terminal; toFixed would give 31.3. */
function oneDigit(value) {
  // Only these are exactly in the middle; others are so in decimal notation alone.
  const isTie = Number.isInteger(4 * value) && (4 * value) % 2 !== 0, below = Math.floor(10 * value);
  return (isTie ? (below + (below % 2)) / 10 : value).toFixed(1);
}
const percent = (value) => (value === null || value === undefined ? "–" : `${oneDigit(100 * value)}%`);
const points = (value) => `${value < 0 ? "−" : "+"}${oneDigit(Math.abs(100 * value))}`;
const counted = (count, noun) => `${count.toLocaleString("en-US")} ${noun}${count === 1 ? "" : "s"}`;

function duration(seconds) {
  if (seconds < 90) return `${Math.max(0, Math.round(seconds))} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${Math.round(seconds / 3600)} h` : `${Math.round(seconds / 86400)} days`;
}

// ---- conditions

const conditions = () => [...new Set(data.runs.map((run) => run.condition))];
const hidden = () => new Set(view.hide ? view.hide.split("|") : []);
const runOf = (id) => data.runs.find((run) => run.id === id);

function styleOf(condition) {
  const index = Math.max(0, conditions().indexOf(condition));
  return { color: COLORS[index % COLORS.length], dash: DASHES[Math.floor(index / COLORS.length) % DASHES.length] };
}

function swatch(condition) {
  const { color, dash } = styleOf(condition);
  const svg = draw("svg", { class: "swatch", width: 22, height: 8, "aria-hidden": "true" });
  svg.append(draw("line", { x1: 0, x2: 22, y1: 4, y2: 4, stroke: color, "stroke-width": 3, "stroke-dasharray": dash }));
  return svg;
}

function legend() {
  return make("div", { class: "legend" }, conditions().map((name) => make("button", {
    type: "button", "aria-pressed": String(!hidden().has(name)), title: "Show or hide this condition",
    onclick: () => {
      const away = hidden();
      if (!away.delete(name)) away.add(name);
      remember({ hide: [...away].join("|") });
      renderCharts();
    },
  }, swatch(name), name, make("span", { class: "soft" }, ` ${counted(data.runs.filter((run) => run.condition === name).length, "run")}`))));
}
