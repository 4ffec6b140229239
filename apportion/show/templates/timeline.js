// Timeline

const GUTTER = window.innerWidth < 600 ? 84 : 128, AXIS = 24, LANE_GAP = 2, BLOCK_GAP = 10;
const HEIGHTS = data.lanes.map((_, k) => (k ? 9 : 20));
const stepNs = Math.max(...data.lines.map((line) => line.step_ns), 1);
const view = { low: 0, high: stepNs, lanes: [], height: 0, width: 0, kinds: new Map() };

function unpack(slices) {
  let at = 0;
  slices.start = Float64Array.from(slices.start, (step) => (at += step));
}

const isPairwise = (kind) => data.kinds.message[kind] && !data.kinds.collective[kind];

function laneRows(line) {
  const rows = Array.from({ length: deviceCount }, () => data.lanes.map(() => []));
  const { kind, device, peer } = line.slices;
  for (let i = 0; i < kind.length; i += 1) {
    rows[device[i]][data.kinds.lane[kind[i]]].push(i);
    if (isPairwise(kind[i])) rows[peer[i]][data.kinds.receiver_lane[kind[i]]].push(i);
  }
  const start = line.slices.start;
  for (const lanes of rows) for (const lane of lanes) lane.sort((a, b) => start[a] - start[b]);
  return rows;
}

function arrangeLanes() {
  const shown = byId("source").value, all = data.lines.length > 1;
  let y = 4;
  view.lanes = [];
  for (const group of deviceGroups()) {
    const d = group[0];
    for (const line of data.lines) {
      if (all && shown !== "both" && shown !== line.source) continue;
      for (let k = 0; k < data.lanes.length; k += 1) {
        view.lanes.push({ line, device: d, group, lane: k, y, height: HEIGHTS[k],
          rows: line.rows[d][k] });
        y += HEIGHTS[k] + LANE_GAP;
      }
      y += BLOCK_GAP;
    }
  }
  view.height = y;
}

function colourOf(slices, i) {
  if (data.kinds.colour[slices.kind[i]]) return data.kinds.colour[slices.kind[i]];
  if (byId("colour-by").value === "phase") return PHASES[named(data.ops.phase, slices.op[i])] || OTHER;
  return view.kinds.get(data.ops.kind.of[slices.op[i]]) || OTHER;
}

function rankKinds() {
  const time = new Map();
  data.ops.kind.of.forEach((kind, op) =>
    time.set(kind, (time.get(kind) || 0) + data.ops.length[0][op]));
  [...time].sort((a, b) => b[1] - a[1]).slice(0, SETS.length)
    .forEach(([kind], k) => view.kinds.set(kind, SETS[k]));
}

function kindColours() {
  // Kinds with a colour of their own, work before messages; of one colour the first kind's name.
  const { name, colour, message } = data.kinds, found = new Map();
  for (const moves of [false, true])
    colour.forEach((own, k) => {
      if (own && message[k] === moves && !found.has(own)) found.set(own, name[k]);
    });
  return [...found].map(([own, text]) => [text, own]);
}

function timelineLegend() {
  const fixed = kindColours();
  const phases = ["forward", "backward", "update"].map((name) => [name, PHASES[name]]);
  const kinds = [...view.kinds].map(([kind, colour]) => [shortKind(data.ops.kind.names[kind]), colour]);
  legend("timeline-legend", byId("colour-by").value === "phase" ? [...phases, ...fixed]
    : [...kinds, ["other", OTHER], ...fixed]);
}

function drawTimeline() {
  const box = byId("lanes"), canvas = byId("lanes-canvas");
  const height = Math.min(view.height + AXIS, 558);
  byId("lanes-spacer").style.height = Math.max(0, view.height + AXIS - height) + "px";
  canvas.style.height = height + "px";
  const width = box.clientWidth;  // less a scrollbar, if there is one now
  const pen = prepare(canvas, width, height);
  view.width = width - GUTTER - 10;
  const x = (ns) => GUTTER + (ns - view.low) / (view.high - view.low) * view.width;
  pen.save();
  pen.beginPath();
  pen.rect(0, AXIS, width, height - AXIS);
  pen.clip();
  for (const lane of view.lanes) {
    const y = lane.y + AXIS - box.scrollTop;
    if (y + lane.height < AXIS || y > height) continue;
    laneLabel(pen, lane, y);
    pen.fillStyle = theme.lane;
    pen.fillRect(GUTTER, y, view.width, lane.height);
    drawLane(pen, lane, y, x);
  }
  pen.restore();
  drawAxis(pen, x, width, height);
}

function laneLabel(pen, lane, y) {
  pen.fillStyle = lane.lane ? theme.dim : theme.ink;
  pen.textAlign = "left";
  if (lane.lane === 0) {
    const mark = data.lines.length > 1 && lane.group.length === 1
      ? `${lane.device} ${lane.line.source}` : groupName(lane.group);
    pen.fillText(fitted(pen, mark, GUTTER - 16), 8, y + lane.height / 2 + 1);
  } else {
    pen.save();
    pen.font = "9px system-ui, sans-serif";
    pen.textAlign = "right";
    pen.fillText(data.lanes[lane.lane], GUTTER - 8, y + lane.height / 2 + 1);
    pen.restore();
  }
}

function firstVisible(lane) {
  // A long slice may begin before its shorter successors: step back over what still reaches in.
  const { start, length } = lane.line.slices, rows = lane.rows;
  let low = 0, high = rows.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (start[rows[middle]] < view.low) low = middle + 1; else high = middle;
  }
  let first = low;
  for (let i = low - 1; i >= 0 && i > low - 64; i -= 1)
    if (start[rows[i]] + length[rows[i]] > view.low) first = i;
  return first;
}

function drawLane(pen, lane, y, x) {
  const { slices } = lane.line, { start, length } = slices, rows = lane.rows;
  const right = GUTTER + view.width;
  let pixel = -1, cover = 0, best = 0, colour = "";
  const flush = () => {
    if (pixel < 0 || cover <= 0) return;
    pen.globalAlpha = Math.max(0.3, Math.min(1, cover));
    pen.fillStyle = colour;
    pen.fillRect(pixel, y, 1, lane.height);
    pen.globalAlpha = 1;
  };
  for (let k = firstVisible(lane); k < rows.length; k += 1) {
    const i = rows[k], from = x(start[i]);
    if (from > right) break;
    const to = x(start[i] + length[i]);
    if (to - from < 1.5) {  // too narrow to see: what lies on one pixel is drawn as one
      const here = Math.floor(Math.max(from, GUTTER));
      if (here !== pixel) { flush(); pixel = here; cover = 0; best = -1; }
      cover += to - from;
      if (to - from > best) { best = to - from; colour = colourOf(slices, i); }
    } else {
      const a = Math.max(from, GUTTER), b = Math.min(to, right), gap = to - from > 4 ? 0.7 : 0;
      pen.fillStyle = colourOf(slices, i);
      pen.fillRect(a, y, Math.max(b - a - gap, 0.8), lane.height);
      if (lane.lane === 0 && b - a > 44) sliceName(pen, slices, i, a, b, y + lane.height / 2 + 1);
    }
  }
  flush();
}

function sliceName(pen, slices, i, a, b, y) {
  pen.fillStyle = "#ffffff";
  pen.textAlign = "left";
  pen.fillText(fitted(pen, data.ops.name[slices.op[i]], b - a - 8), a + 4, y);
}

function drawAxis(pen, x, width, height) {
  pen.strokeStyle = theme.rule;
  pen.fillStyle = theme.dim;
  pen.textAlign = "center";
  pen.lineWidth = 1;
  for (const ns of ticks(view.low, view.high, Math.max(3, view.width / 110))) {
    const at = Math.round(x(ns)) + 0.5;
    pen.globalAlpha = 0.55;
    pen.beginPath();
    pen.moveTo(at, AXIS - 4);
    pen.lineTo(at, height);
    pen.stroke();
    pen.globalAlpha = 1;
    if (at < width - 24) pen.fillText(tickText(ns, view.high), at, AXIS / 2);
  }
  drawPeriods(pen, x, height);
}

function drawPeriods(pen, x, height) {
  // Where steps overlap: when the second one begins.
  pen.strokeStyle = theme.ink;
  for (const { period_ns: period } of data.lines) {
    if (!period || period < view.low || period > view.high) continue;
    pen.beginPath();
    pen.moveTo(Math.round(x(period)) + 0.5, AXIS - 4);
    pen.lineTo(Math.round(x(period)) + 0.5, height);
    pen.stroke();
  }
}

function sliceAt(event) {
  const box = byId("lanes-canvas").getBoundingClientRect();
  const x = event.clientX - box.left, y = event.clientY - box.top - AXIS + byId("lanes").scrollTop;
  if (x < GUTTER || event.clientY - box.top < AXIS) return null;
  const lane = view.lanes.find((one) => y >= one.y && y < one.y + one.height);
  if (!lane) return null;
  const perPixel = (view.high - view.low) / view.width;
  const ns = view.low + (x - GUTTER) * perPixel;
  const { start, length } = lane.line.slices;
  let low = 0, high = lane.rows.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (start[lane.rows[middle]] <= ns + perPixel) low = middle + 1; else high = middle;
  }
  for (let k = low - 1; k >= 0 && k > low - 64; k -= 1) {
    const i = lane.rows[k];
    if (start[i] + length[i] >= ns - perPixel) return { lane, i };
  }
  return null;
}

function describeSlice({ lane, i }) {
  const s = lane.line.slices, op = s.op[i], joint = data.kinds.collective[s.kind[i]];
  const moving = data.kinds.message[s.kind[i]], label = data.kinds.label[s.kind[i]];
  const name = data.ops.name[op];
  const lines = [moving ? `message for ${name}` : label ? `${name}: ${label}` : name];
  const many = s.count ? s.count[i] : 1;
  if (many > 1) lines[0] = `${plural(many, "short task")}, the first: ${lines[0]}`;
  if (named(data.ops.kind, op)) lines.push(named(data.ops.kind, op));
  if (joint) lines.push(`collective of devices ${data.groups[s.group[i]].join(", ")}`);
  else if (moving) lines.push(`device ${s.device[i]} to device ${s.peer[i]}`);
  else if (s.part[i] >= 0) lines.push(`part ${s.part[i]} (of ${data.ops.parts[op] * data.ops.replicas[op]})` +
    (named(data.ops.cut, op) ? `, cut ${named(data.ops.cut, op)}` : "") + `, device ${s.device[i]}`);
  lines.push(`${timeText(s.length[i])}, from ${timeText(s.start[i])}; ${lane.line.source}`);
  lines.push(exactBytes(s.nbytes[i]) + (moving ? " sent" : " read and written"));
  return lines;
}

let waiting = false;
function redrawTimeline() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => { waiting = false; drawTimeline(); });
}

function setView(low, high) {
  const span = Math.min(Math.max(high - low, Math.min(50, stepNs)), stepNs);
  const begin = Math.min(Math.max(low + (high - low - span) / 2, 0), stepNs - span);
  view.low = begin;
  view.high = begin + span;
  redrawTimeline();
}

function zoom(factor, at) {
  const centre = at === undefined ? (view.low + view.high) / 2 : at;
  setView(centre - (centre - view.low) * factor, centre + (view.high - centre) * factor);
}
const pan = (share) => {
  const span = view.high - view.low;
  setView(view.low + share * span, view.high + share * span);
};

function nsAt(event) {
  const box = byId("lanes-canvas").getBoundingClientRect();
  return view.low + (event.clientX - box.left - GUTTER) / view.width * (view.high - view.low);
}

function listenTimeline() {
  const canvas = byId("lanes-canvas"), box = byId("lanes");
  let held = null;
  canvas.addEventListener("pointerdown", (event) => {
    held = { x: event.clientX, low: view.low, high: view.high, moved: false };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (held) {
      const dx = (event.clientX - held.x) / view.width * (held.high - held.low);
      held.moved = held.moved || Math.abs(event.clientX - held.x) > 3;
      if (held.moved) { canvas.classList.add("moving"); setView(held.low - dx, held.high - dx); }
      hideTip();
      return;
    }
    const hit = sliceAt(event);
    if (hit) showTip(event, describeSlice(hit)); else hideTip();
  });
  canvas.addEventListener("pointerup", () => {
    canvas.classList.remove("moving");
    if (held && held.moved) held.done = true;
    setTimeout(() => { held = null; }, 0);
  });
  canvas.addEventListener("pointercancel", () => { held = null; });
  canvas.addEventListener("pointerleave", hideTip);
  let clicked = 0;
  canvas.addEventListener("click", (event) => {
    if (held && held.moved) return;
    const hit = sliceAt(event);
    clearTimeout(clicked);
    if (hit) clicked = setTimeout(() => findOperator(hit.lane.line.slices.op[hit.i]), 280);
  });
  canvas.addEventListener("dblclick", (event) => {
    clearTimeout(clicked);
    const hit = sliceAt(event);
    if (!hit) { zoom(0.5, nsAt(event)); return; }
    const { start, length } = hit.lane.line.slices, margin = Math.max(length[hit.i], 10);
    setView(start[hit.i] - margin, start[hit.i] + length[hit.i] + margin);
  });
  canvas.addEventListener("wheel", (event) => {
    if (event.ctrlKey || event.metaKey) zoom(Math.exp(event.deltaY * 0.002), nsAt(event));
    else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY))
      pan((event.deltaX || event.deltaY) / view.width);
    else return;
    event.preventDefault();
  }, { passive: false });
  box.addEventListener("scroll", redrawTimeline);
  const keys = {
    ArrowLeft: () => pan(-0.15), ArrowRight: () => pan(0.15), "+": () => zoom(0.6),
    "=": () => zoom(0.6), "-": () => zoom(1.6), 0: () => setView(0, stepNs),
  };
  box.addEventListener("keydown", (event) => {
    if (!keys[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    keys[event.key]();
    event.preventDefault();
  });
  byId("zoom-in").addEventListener("click", () => zoom(0.5));
  byId("zoom-out").addEventListener("click", () => zoom(2));
  byId("zoom-all").addEventListener("click", () => setView(0, stepNs));
  byId("colour-by").addEventListener("change", () => { timelineLegend(); redrawTimeline(); });
  byId("source").addEventListener("change", () => { arrangeLanes(); redrawTimeline(); });
}

function timeline() {
  for (const line of data.lines) { unpack(line.slices); line.rows = laneRows(line); }
  if (measured) {
    byId("source-label").hidden = false;
    for (const name of ["both", ...data.lines.map((line) => line.source)])
      byId("source").append(el("option", { value: name }, name));
  }
  const drawn = data.lines[0].slices.kind.length, notes = [];
  const all = data.lines[0].tasks * (data.lines[0].period_ns ? 2 : 1);
  if (drawn < all) notes.push(`This step has ${plural(all, "task")}: short neighbours on a lane are ` +
    `merged, which leaves ${plural(drawn, "slice")}.`);
  if (data.lines[0].period_ns)
    notes.push("Steps overlap: two of them are drawn, the second from the upright line on, and what the " +
      "first leaves to it comes after that line too.");
  if (data.plan.communication_on_device)
    notes.push("Here sending and receiving occupy the device itself, and count as busy.");
  byId("timeline-note").textContent = notes.join(" ");
  rankKinds();
  arrangeLanes();
  timelineLegend();
  drawTimeline();
  listenTimeline();
}
