// Texts from the plan are shown with textContent and fillText only: they are never markup.

const root = document.documentElement;
const byId = (id) => document.getElementById(id);

function fail(message) {
  root.dataset.ready = "error";
  const box = byId("failure");
  box.textContent = "This report could not be drawn whole: " + message;
  box.hidden = false;
}
window.addEventListener("error", (event) => fail(event.message));
window.addEventListener("unhandledrejection", (event) => fail(String(event.reason)));

const data = JSON.parse(byId("data").textContent);
const PHASES = {
  forward: "#4583cf", backward: "#e08b3e", update: "#3f9d76", end: "#7d8796",
};
const CATEGORY_COLOURS = [
  "#3b6fb6", "#82aee0", "#98a2b0", "#cfa62e", "#3f9d76", "#e08b3e", "#a267b8", "#cf4b5c",
  "#4fa3a5", "#8a6d4b", "#6a6fc4", "#b3b34a",
];
const SETS = [
  "#4583cf", "#e08b3e", "#3f9d76", "#cf4b5c", "#a267b8", "#8a6d4b", "#d67ab1", "#98a23a", "#4fa3a5",
];
const OTHER = "#7d8796";

// Words

function el(tag, properties, ...children) {
  const made = document.createElement(tag);
  for (const [key, value] of Object.entries(properties || {})) {
    if (key === "class") made.className = value;
    else if (key.includes("-") || key === "role") made.setAttribute(key, value);
    else made[key] = value;
  }
  made.append(...children.map((child) => (child instanceof Node ? child : String(child))));
  return made;
}

function digits(x) {
  if (x >= 100) return x.toFixed(0);
  return x >= 10 ? x.toFixed(1) : x.toFixed(2);
}

function scaled(x, units, base) {
  let k = 0;
  while (k < units.length - 1 && Math.abs(x) >= base) { x /= base; k += 1; }
  return (k === 0 ? String(Math.round(x)) : digits(x)) + " " + units[k];
}

const isNumber = (x) => typeof x === "number";
const timeText = (ns) => ns >= 1e9 ? digits(ns / 1e9) + " s" : scaled(ns, ["ns", "\u00b5s", "ms"], 1e3);
const secondsText = (s) => isNumber(s) ? timeText(s * 1e9) : "not known";
const bytesText = (n) => scaled(n, ["B", "KB", "MB", "GB", "TB", "PB"], 1e3);
const exactBytes = (n) => n >= 1000 ? `${bytesText(n)} (${n.toLocaleString("en-US")} bytes)` : n + " bytes";
const rateText = (x) => x.toLocaleString("en-US", x < 100 ? { maximumSignificantDigits: 3 } : { maximumFractionDigits: 0 });
const percent = (x) => (100 * x).toFixed(0) + "%";
const plural = (n, word) => n.toLocaleString("en-US") + " " + word + (n === 1 ? "" : "s");
const sum = (items) => items.reduce((a, b) => a + b, 0);
const named = (column, row) => column.names[column.of[row]];

function ranges(numbers) {
  const found = [];
  for (let i = 0; i < numbers.length; i += 1) {
    let j = i;
    while (j + 1 < numbers.length && numbers[j + 1] === numbers[j] + 1) j += 1;
    found.push(j > i + 1 ? `${numbers[i]}\u2013${numbers[j]}` : numbers.slice(i, j + 1).join(", "));
    i = j;
  }
  return found.join(", ");
}

function legend(id, entries) {
  byId(id).replaceChildren(...entries.map(([text, colour]) => {
    const dot = el("span", { class: "dot" });
    dot.style.background = colour;
    return el("span", {}, dot, text);
  }));
}

function showTip(event, lines) {
  const tip = byId("tip");
  tip.replaceChildren(...lines.map((line) => el("div", {}, line)));
  tip.hidden = false;
  const x = Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8);
  const below = event.clientY + 16 + tip.offsetHeight < window.innerHeight;
  tip.style.left = Math.max(x, 4) + "px";
  tip.style.top = (below ? event.clientY + 16 : event.clientY - tip.offsetHeight - 10) + "px";
}
const hideTip = () => { byId("tip").hidden = true; };

// Canvas

let theme = {};
function readTheme() {
  const style = getComputedStyle(root);
  theme = {};
  for (const name of ["ink", "dim", "rule", "card", "lane", "bad"])
    theme[name] = style.getPropertyValue("--" + name).trim();
}

function prepare(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.max(1, Math.round(width * ratio));
  canvas.height = Math.max(1, Math.round(height * ratio));
  canvas.style.width = width + "px";
  canvas.style.height = height + "px";
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  pen.font = "11px system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif";
  pen.textBaseline = "middle";
  return pen;
}

function ticks(low, high, wanted) {
  const rough = Math.max((high - low) / wanted, 1e-9);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((m) => m * power >= rough * 0.999);
  const found = [];
  for (let k = Math.ceil(low / step); k * step <= high; k += 1) found.push(k * step);
  return found;
}

function tickText(ns, span) {
  const [unit, name] = span >= 2e9 ? [1e9, "s"] : span >= 2e6 ? [1e6, "ms"]
    : span >= 2e3 ? [1e3, "\u00b5s"] : [1, "ns"];
  return Number((ns / unit).toPrecision(9)) + " " + name;
}

function fitted(pen, text, width) {
  if (pen.measureText(text).width <= width) return text;
  let low = 0, high = text.length;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (pen.measureText(text.slice(0, middle) + "\u2026").width <= width) low = middle;
    else high = middle - 1;
  }
  return low > 1 ? text.slice(0, low) + "\u2026" : "";
}
