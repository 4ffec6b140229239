// The graph: a row per module, its cuts as a small grid, arcs for what skips rows

const graph = data.graph, ROW = 30, TOP = 8;
const DIVISIONS = {
  samples: ["samples cut", "#4583cf"], weights: ["weights cut", "#e08b3e"],
  both: ["samples and weights cut", "#a267b8"], other: ["other axes cut", "#4fa3a5"],
  copied: ["whole on several devices", "#cfa62e"], one: ["whole on one device", "#3f9d76"],
};

function divisionOf(k) {
  const samples = graph.samples[k] > 1, weights = graph.weights[k] > 1;
  if (samples && weights) return "both";
  if (weights) return "weights";
  if (samples) return "samples";
  if (graph.other[k] > 1) return "other";
  return graph.devices[k].length > 1 ? "copied" : "one";
}

function graphShape(tag, properties, ...children) {
  const made = document.createElementNS(byId("graph-picture").namespaceURI, tag);
  for (const [key, value] of Object.entries(properties)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function glyph(k, x, y) {
  // Columns are parts of the samples, rows parts of the weights or of other axes: at most 8 x 4.
  const columns = Math.min(graph.samples[k], 8);
  const rows = Math.min(graph.weights[k] * graph.other[k], 4);
  const width = 44 / columns, height = 18 / rows, colour = DIVISIONS[divisionOf(k)][1];
  const made = graphShape("g", { class: "glyph" });
  for (let i = 0; i < columns; i += 1)
    for (let j = 0; j < rows; j += 1)
      made.append(graphShape("rect", { x: x + i * width, y: y + j * height, fill: colour,
        width: Math.max(width - 1, 0.8), height: Math.max(height - 1, 0.8) }));
  return made;
}

function nodeLines(k) {
  const lines = [graph.name[k] + (graph.times[k] > 1 ? `, ${graph.times[k]} of them` : ""),
    `${graph.how[k]}; on devices ${ranges(graph.devices[k])}`,
    `${plural(graph.ops[k], "forward operator")}, ${timeText(graph.length[k])} with their backward`];
  if (graph.parameters[k]) lines.push(`${bytesText(graph.parameters[k])} of parameters`);
  if (graph.fetched[k]) lines.push(`${bytesText(graph.fetched[k])} arrive from other devices`);
  return lines;
}

function drawGraph() {
  const svg = byId("graph-picture"), count = graph.name.length;
  const width = Math.max(svg.parentElement.clientWidth, 240), narrow = width < 560;
  const arcs = Math.min(110, width * 0.16), left = arcs + 8, name = left + 62;
  const height = TOP * 2 + count * ROW, middle = (k) => TOP + k * ROW + ROW / 2;
  const most = Math.max(1, ...graph.edges.map((edge) => edge[2]));
  const lines = graphShape("g", { class: "flows" });
  for (const [a, b, nbytes] of graph.edges) {
    const thick = 0.7 + 3 * Math.log2(1 + 15 * nbytes / most) / 4;
    const bend = Math.min(arcs - 6, 8 + 7 * Math.abs(b - a));
    const path = b === a + 1 ? `M${left + 22} ${middle(a) + 9}V${middle(b) - 9}`
      : `M${left} ${middle(a)}C${left - bend} ${middle(a)},${left - bend} ${middle(b)},${left} ${middle(b)}`;
    lines.append(graphShape("path", { d: path, "stroke-width": thick,
      class: b < a ? "next" : "" }, graphShape("title", {},
      `${graph.name[a]} to ${graph.name[b]}${b < a ? " of the next one" : ""}: ${bytesText(nbytes)}`)));
  }
  const rows = graph.name.map((text, k) => {
    const times = graph.times[k] > 1 ? ` \u00d7${graph.times[k]}` : "";
    const row = graphShape("g", { class: "node", tabindex: 0, role: "listitem" },
      graphShape("rect", { class: "back", x: left - 4, y: TOP + k * ROW + 1,
        width: width - left, height: ROW - 2, rx: 5 }), glyph(k, left, middle(k) - 9));
    const label = graphShape("text", { x: name, y: middle(k) + 4 }, text + times);
    row.append(label);
    if (!narrow) row.append(graphShape("text", { class: "how", x: width - 10, y: middle(k) + 4,
      "text-anchor": "end" }, graph.how[k] + (graph.fetched[k]
      ? `; ${bytesText(graph.fetched[k])} arrive` : "")));
    row.addEventListener("pointermove", (event) => showTip(event, nodeLines(k)));
    row.addEventListener("pointerleave", hideTip);
    row.addEventListener("click", () => findModule(text));
    row.addEventListener("keydown", (event) => { if (event.key === "Enter") findModule(text); });
    return row;
  });
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("height", height);
  svg.setAttribute("aria-label", `${plural(count, "module")} and how they are divided: ` +
    graph.name.slice(0, 12).map((text, k) => `${text} ${graph.how[k]}`).join("; "));
  svg.replaceChildren(lines, ...rows);
  fitLabels(svg, name, width, narrow);
}

function fitLabels(svg, from, width, narrow) {
  // Names give way to what is said on the right.
  for (const row of svg.querySelectorAll(".node")) {
    const [label, how] = row.querySelectorAll("text");
    let room = width - from - 14;
    if (how && how.getComputedTextLength() > room * 0.62) how.remove();
    else if (how && !narrow) room -= how.getComputedTextLength() + 12;
    const whole = label.textContent;
    let length = whole.length;
    while (length > 4 && label.getComputedTextLength() > room) {
      length -= Math.max(1, Math.floor(length / 12));
      label.textContent = "\u2026" + whole.slice(whole.length - length);
    }
  }
}

function findModule(name) {
  byId("search").value = name.replace(/\.\*(?=\.|$)/g, ".0");
  byId("phase").value = "";
  renderOps();
  byId("search").scrollIntoView({ block: "start" });
}

function graphSection() {
  const used = new Set(graph.name.map((_, k) => divisionOf(k)));
  legend("graph-legend", Object.entries(DIVISIONS).filter(([key]) => used.has(key)).map(([, it]) => it));
  drawGraph();
}
