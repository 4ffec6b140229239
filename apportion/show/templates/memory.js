// Memory

const categoryColour = (k) => CATEGORY_COLOURS[k % CATEGORY_COLOURS.length];
const present = data.categories.map((_, k) => k).filter((k) =>
  data.lines.some((line) => line.memory.some((device) => device.bands[k])));
const chosen = { position: 0, device: 0, line: 0 };

function drawBands(pen, curve, x, y, step) {
  const n = curve.time.length, base = new Float64Array(n);
  for (const k of present) {
    const band = curve.bands[k];
    if (!band) continue;
    pen.fillStyle = categoryColour(k);
    pen.beginPath();
    for (let i = 0; i < n; i += 1) {
      const top = y(base[i] + band[i]);
      pen.lineTo(x(curve.time[i]), top);
      pen.lineTo(x(i + 1 < n ? curve.time[i + 1] : step), top);
    }
    for (let i = n - 1; i >= 0; i -= 1) {
      const bottom = y(base[i]);
      pen.lineTo(x(i + 1 < n ? curve.time[i + 1] : step), bottom);
      pen.lineTo(x(curve.time[i]), bottom);
    }
    pen.fill();
    for (let i = 0; i < n; i += 1) base[i] += band[i];
  }
}

const allPeaks = data.lines.flatMap((line) => line.memory.map((curve) => sum(curve.peak)));
const highest = Math.max(...allPeaks, 1);

function drawSmall(canvas, line, device) {
  const width = canvas.clientWidth || 220, height = 34;
  const pen = prepare(canvas, width, height);
  canvas.style.width = "100%";
  drawBands(pen, line.memory[device], (ns) => ns / Math.max(line.step_ns, 1) * width,
    (bytes) => height - bytes / highest * (height - 1), line.step_ns);
}

const BIG = { left: 66, right: 14, top: 22, bottom: 22, height: 280 };

function bigScale() {
  const canvas = byId("memory-canvas"), width = canvas.parentElement.clientWidth;
  const line = data.lines[chosen.line], limit = data.devices.limit[chosen.device];
  const peak = Math.max(sum(line.memory[chosen.device].peak), 1);
  const near = limit < 1.6 * peak, top = (near ? Math.max(limit, peak) : peak) * 1.06;
  const inner = width - BIG.left - BIG.right, depth = BIG.height - BIG.top - BIG.bottom;
  return {
    canvas, width, line, limit, near, top, curve: line.memory[chosen.device],
    x: (ns) => BIG.left + ns / Math.max(line.step_ns, 1) * inner,
    y: (bytes) => BIG.top + depth - bytes / top * depth,
    ns: (x) => (x - BIG.left) / inner * line.step_ns,
  };
}

function drawMemory() {
  const big = bigScale(), { curve, x, y } = big;
  const pen = prepare(big.canvas, big.width, BIG.height);
  pen.strokeStyle = theme.rule;
  pen.fillStyle = theme.dim;
  pen.textAlign = "right";
  for (const bytes of ticks(0, big.top, 5)) {
    pen.beginPath();
    pen.moveTo(BIG.left, Math.round(y(bytes)) + 0.5);
    pen.lineTo(big.width - BIG.right, Math.round(y(bytes)) + 0.5);
    pen.stroke();
    pen.fillText(bytesText(bytes), BIG.left - 8, y(bytes));
  }
  pen.textAlign = "center";
  for (const ns of ticks(0, big.line.step_ns, Math.max(3, big.width / 130)))
    if (x(ns) < big.width - 20)
      pen.fillText(tickText(ns, big.line.step_ns), x(ns), BIG.height - BIG.bottom / 2 + 2);
  drawBands(pen, curve, x, y, big.line.step_ns);
  const peak = sum(curve.peak);
  mark(pen, big, x(curve.peak_ns), y(peak), `peak ${bytesText(peak)} at ${timeText(curve.peak_ns)}`);
  if (big.near) limitLine(pen, big);
}

function mark(pen, big, at, top, text) {
  pen.strokeStyle = theme.ink;
  pen.setLineDash([3, 3]);
  pen.beginPath();
  pen.moveTo(at, BIG.height - BIG.bottom);
  pen.lineTo(at, top);
  pen.stroke();
  pen.setLineDash([]);
  pen.fillStyle = theme.ink;
  pen.beginPath();
  pen.arc(at, top, 3.5, 0, 7);
  pen.fill();
  const half = pen.measureText(text).width / 2;
  pen.textAlign = "center";
  pen.fillText(text, Math.min(Math.max(at, BIG.left + half), big.width - BIG.right - half), 9);
}

function limitLine(pen, big) {
  pen.strokeStyle = theme.bad;
  pen.fillStyle = theme.bad;
  pen.beginPath();
  pen.moveTo(BIG.left, big.y(big.limit));
  pen.lineTo(big.width - BIG.right, big.y(big.limit));
  pen.stroke();
  pen.textAlign = "left";
  pen.fillText(`limit ${bytesText(big.limit)}`, BIG.left + 4, big.y(big.limit) - 8);
}

function memoryTip(event) {
  const big = bigScale(), box = big.canvas.getBoundingClientRect();
  const ns = big.ns(event.clientX - box.left), { time, bands } = big.curve;
  if (ns < 0 || ns > big.line.step_ns || !time.length) { hideTip(); return; }
  let row = 0;
  for (let low = 0, high = time.length; low < high;) {
    const middle = (low + high) >> 1;
    if (time[middle] <= ns) { row = middle; low = middle + 1; } else high = middle;
  }
  const held = present.filter((k) => bands[k] && bands[k][row]);
  showTip(event, [`${bytesText(sum(held.map((k) => bands[k][row])))} at ${timeText(ns)}`,
    ...held.map((k) => `${data.categories[k]}: ${bytesText(bands[k][row])}`).reverse()]);
}

function chooseMemory(position) {
  const options = [...byId("memory-list").children];
  const at = Math.min(Math.max(position, 0), options.length - 1);
  options.forEach((option, k) => option.setAttribute("aria-selected", k === at ? "true" : "false"));
  byId("memory-list").setAttribute("aria-activedescendant", options[at].id);
  const group = deviceGroups()[Math.floor(at / data.lines.length)];
  chosen.position = at;
  chosen.device = group[0];
  chosen.line = at % data.lines.length;
  const line = data.lines[chosen.line], curve = line.memory[chosen.device];
  const alike = group.length > 1 ? ` (of ${group.length} alike, the one that holds most)` : "";
  const title = `Device ${chosen.device} ${data.devices.name[chosen.device]}${alike}, ${line.source}`;
  byId("memory-device").textContent = `${title}: peak ${bytesText(sum(curve.peak))} of ` +
    bytesText(data.devices.limit[chosen.device]) + (curve.peak_op ? `, in ${curve.peak_op}` : "");
  byId("memory-canvas").setAttribute("aria-label", `Memory over time. ${title}, ` +
    present.map((k) => `${data.categories[k]} ${bytesText(curve.peak[k])}`).join(", "));
  alive(curve);
  drawMemory();
}

function alive(curve) {
  const peak = Math.max(sum(curve.peak), 1);
  const rows = curve.alive.map(([name, type, category, nbytes, op, line]) => {
    const dot = el("span", { class: "dot" });
    dot.style.background = categoryColour(data.categories.indexOf(category));
    return el("tr", {}, el("td", {}, name), el("td", {}, type), el("td", {}, dot, category),
      el("td", { class: "number", title: exactBytes(nbytes) }, bytesText(nbytes)),
      el("td", { class: "number" }, percent(nbytes / peak)),
      el("td", {}, [op, line].filter((text) => text).join(", ")));
  });
  const [count, nbytes] = curve.others;
  if (count) rows.push(el("tr", {}, el("td", {}, `${plural(count, "other")}`), el("td"), el("td"),
    el("td", { class: "number" }, bytesText(nbytes)),
    el("td", { class: "number" }, percent(nbytes / peak)), el("td")));
  byId("alive").replaceChildren(
    el("thead", {}, heading(["value", "whole value", "category", "bytes here", "share",
      "made by"], [3, 4])),
    el("tbody", {}, ...rows));
}

function memory() {
  legend("memory-legend", present.map((k) => [data.categories[k], categoryColour(k)]));
  const list = byId("memory-list");
  list.addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step) return;
    chooseMemory(chosen.position + step);
    list.querySelector("[aria-selected=true]").scrollIntoView({ block: "nearest" });
    event.preventDefault();
  });
  byId("memory-canvas").addEventListener("pointermove", memoryTip);
  byId("memory-canvas").addEventListener("pointerleave", hideTip);
  listMemory();
}

function listMemory() {
  const list = byId("memory-list"), groups = deviceGroups();
  list.replaceChildren();
  for (const group of groups) {
    const d = group[0];
    data.lines.forEach((line) => {
      const position = list.children.length;
      const name = measured ? `${groupName(group)} ${line.source}` : groupName(group);
      const option = el("div", { class: "choice", role: "option", id: "memory-" + position },
        el("div", { class: "name" }, el("span", {}, name),
          el("span", {}, bytesText(sum(line.memory[d].peak)))), el("canvas"));
      option.addEventListener("click", () => chooseMemory(position));
      list.append(option);
    });
  }
  drawSmalls();
  const peaks = groups.map((group) => sum(data.lines[0].memory[group[0]].peak));
  chooseMemory(peaks.indexOf(Math.max(...peaks)) * data.lines.length);
}

function drawSmalls() {
  const groups = deviceGroups();
  [...byId("memory-list").children].forEach((option, k) => drawSmall(option.lastElementChild,
    data.lines[k % data.lines.length], groups[Math.floor(k / data.lines.length)][0]));
}
