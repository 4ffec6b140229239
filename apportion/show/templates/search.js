// How the plan was found

const search = data.search, DOTS = 300;

function shape(tag, properties, ...children) {
  const made = document.createElementNS(byId("curve").namespaceURI, tag);
  for (const [key, value] of Object.entries(properties)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function drawCurve() {
  const points = search.curve;
  if (!points.length) return;
  const svg = byId("curve"), width = Math.max(svg.parentElement.clientWidth, 300), height = 240;
  const left = 76, right = width - 16, top = 12, bottom = height - 40;
  const costs = points.map((point) => point[1] * 1e9);
  const end = Math.max(search.seconds || 0, points[points.length - 1][0], 1e-9) * 1e9;
  const low = Math.min(...costs), high = Math.max(...costs), pad = (high - low || low || 1) * 0.08;
  const x = (seconds) => left + (right - left) * seconds * 1e9 / end;
  const y = (ns) => bottom - (bottom - top) * (ns - low + pad) / (high - low + 2 * pad);
  const grid = shape("g", { class: "grid" });
  for (const tick of ticks(0, end, 6)) {
    const at = x(tick / 1e9);
    grid.append(shape("line", { x1: at, x2: at, y1: top, y2: bottom }),
      shape("text", { x: at, y: bottom + 16, "text-anchor": "middle" }, tickText(tick, end)));
  }
  for (const tick of ticks(low - pad, high + pad, 4)) {
    grid.append(shape("line", { x1: left, x2: right, y1: y(tick), y2: y(tick) }),
      shape("text", { x: left - 8, y: y(tick) + 4, "text-anchor": "end" }, tickText(tick, high)));
  }
  grid.append(shape("text", { x: right, y: height - 6, "text-anchor": "end" }, "time of search"));
  const path = points.map(([at], k) => (k ? `H${x(at)}V` : `M${x(at)} `) + y(costs[k])).join("");
  const line = shape("path", { class: "best", d: path + "H" + right });
  const shown = points.length > DOTS ? [points.length - 1] : points.map((_, k) => k);
  const dots = shown.map((k) => shape("circle", { cx: x(points[k][0]), cy: y(costs[k]), r: 3 },
    shape("title", {}, `${secondsText(points[k][1])} a step after ${secondsText(points[k][0])}`)));
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("height", height);
  svg.setAttribute("aria-label", `The best step against the time of search: from ` +
    `${secondsText(points[0][1])} to ${secondsText(points[points.length - 1][1])}`);
  svg.replaceChildren(grid, line, ...dots);
}

function triedMethods() {
  if (!search.tried.length) return;
  const best = search.tried[0].step_seconds;
  const rows = search.tried.map((row, k) => el("tr", {}, el("td", {}, row.method),
    el("td", { class: "number" }, secondsText(row.step_seconds)),
    el("td", { class: "number" }, k ? "+" + (100 * (row.step_seconds / best - 1)).toFixed(1) + "%" : ""),
    el("td", { class: "number" }, bytesText(row.peak_bytes)),
    el("td", { class: "number" }, bytesText(row.bytes_moved)),
    el("td", { class: row.fits ? "good" : "bad" }, row.fits ? "yes" : "no")));
  byId("tried").append(el("thead", {}, heading(
    ["method", "step time", "to the best", "peak memory", "bytes moved", "fits"], [1, 2, 3, 4])),
    el("tbody", {}, ...rows));
  byId("tried-box").hidden = false;
}

function searched() {
  const figures = Object.entries(search.figures), trials = search.measured;
  if (!search.curve.length && !figures.length && !trials.length && !search.tried.length) return;
  byId("search-section").hidden = byId("search-link").hidden = false;
  byId("curve-box").hidden = !search.curve.length;
  byId("search-figures").textContent = figures.map(([name, number]) =>
    `${name.replaceAll("_", " ")}: ${number.toLocaleString("en-US", { maximumFractionDigits: 1 })}`)
    .join("; ");
  drawCurve();
  triedMethods();
  if (!trials.length) return;
  const rows = trials.map((trial) => el("tr", {}, el("td", {}, trial.method),
    el("td", { class: "number" }, secondsText(trial.predicted_seconds)),
    el("td", { class: "number" }, secondsText(trial.measured_seconds)),
    el("td", {}, trial.chosen ? "kept" : "")));
  byId("trials").append(el("thead", {}, heading(["by", "predicted", "measured", ""], [1, 2])),
    el("tbody", {}, ...rows));
  byId("trials-box").hidden = false;
}
