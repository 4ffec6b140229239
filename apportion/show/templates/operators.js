// Operators

const ops = data.ops, MAX_ROWS = 3000;
const shortKind = (kind) => kind.replace(/^aten\./, "").replace(/\.default$/, "");
const setColours = new Map();
const open = new Set();
let tree = null;

function isShown(op) { return op < ops.name.length - 1 || ops.fetched[op] + ops.length[0][op] > 0; }

function colourSets() {
  const counts = new Map();
  for (const set of ops.devices.of) if (set >= 0) counts.set(set, (counts.get(set) || 0) + 1);
  [...counts].sort((a, b) => b[1] - a[1]).slice(0, SETS.length)
    .forEach(([set], k) => setColours.set(set, SETS[k]));
}

function buildTree() {
  tree = { name: "", path: "", children: new Map(), ops: [] };
  for (let op = 0; op < ops.name.length; op += 1) {
    if (!isShown(op)) continue;
    let node = tree;
    const module = named(ops.module, op);
    for (const step of module ? module.split(".") : ["(outside of modules)"]) {
      if (!node.children.has(step)) node.children.set(step, {
        name: step, path: node.path ? node.path + "." + step : step, children: new Map(), ops: [],
      });
      node = node.children.get(step);
    }
    node.ops.push(op);
  }
  for (const child of tree.children.values()) if (child.children.size) open.add(child.path);
}

function wanted() {
  const terms = byId("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  const phase = byId("phase").value;
  if (!terms.length && !phase) return null;
  const found = new Set();
  for (let op = 0; op < ops.name.length; op += 1) {
    if (!isShown(op) || (phase && named(ops.phase, op) !== phase)) continue;
    const text = [ops.name[op], named(ops.kind, op), named(ops.phase, op), named(ops.line, op),
      named(ops.module, op), named(ops.cut, op)].join(" ").toLowerCase();
    if (terms.every((term) => text.includes(term))) found.add(op);
  }
  return found;
}

function everyOp(node, filter, into) {
  for (const op of node.ops) if (!filter || filter.has(op)) into.push(op);
  for (const child of node.children.values()) everyOp(child, filter, into);
  return into;
}

function opCells(op, depth) {
  const set = ops.devices.of[op], dot = el("span", { class: "dot" });
  dot.style.background = setColours.get(set) || OTHER;
  const name = el("td", { title: ops.name[op] }, ops.name[op]);
  name.style.paddingLeft = 18 + 14 * depth + "px";
  const kind = named(ops.kind, op), why = ops.undescribed[kind];
  const cells = [
    name,
    el("td", { title: why ? `${kind}: cannot be split, ${why}` : kind }, shortKind(kind)),
    el("td", {}, named(ops.phase, op)),
    el("td", { title: named(ops.line, op), class: "dim" }, named(ops.line, op).split("/").pop()),
    el("td", { class: "cut", title: named(ops.cut, op) }, named(ops.cut, op) || (set < 0 ? "" : "whole")),
    set < 0 ? el("td") : el("td", { title: "devices " + ops.devices.names[set].join(", ") }, dot,
      ranges(ops.devices.names[set])),
    el("td", { class: "number" }, ops.replicas[op] || ""),
  ];
  return [...cells, ...figureCells([op])];
}

function figureCells(members) {
  const bytes = sum(members.map((op) => ops.fetched[op]));
  const count = sum(members.map((op) => ops.messages[op]));
  const cells = [el("td", { class: "number", title: `${exactBytes(bytes)}, ${plural(count, "message")}` },
    bytes ? bytesText(bytes) : "")];
  for (const lengths of ops.length)
    cells.push(el("td", { class: "number" }, timeText(sum(members.map((op) => lengths[op])))));
  return cells;
}

function groupRow(node, members, depth, isOpen) {
  const toggle = el("button", { type: "button", class: "toggle", "aria-expanded": String(isOpen),
    title: node.path }, el("span", { class: "arrow" }, isOpen ? "\u25bc" : "\u25b6"), node.name);
  toggle.addEventListener("click", () => {
    if (open.has(node.path)) open.delete(node.path); else open.add(node.path);
    renderOps(node.path);
  });
  toggle.dataset.path = node.path;
  const first = el("td", {}, toggle);
  first.style.paddingLeft = 4 + 14 * depth + "px";
  const cuts = [...new Set(members.map((op) => named(ops.cut, op)).filter(Boolean))];
  const devices = new Set();
  for (const op of members)
    if (ops.devices.of[op] >= 0) for (const d of ops.devices.names[ops.devices.of[op]]) devices.add(d);
  return el("tr", { class: depth ? "group inner" : "group" }, first,
    el("td", { colSpan: 3, class: "dim" }, plural(members.length, "operator")),
    el("td", { class: "cut dim", title: cuts.join(", ") },
      cuts.length > 2 ? `${cuts.length} different cuts` : cuts.join(", ") || "whole"),
    el("td", { class: "dim" }, ranges([...devices].sort((a, b) => a - b))), el("td"),
    ...figureCells(members));
}

function addNode(node, depth, filter, rows) {
  const direct = node.ops.filter((op) => !filter || filter.has(op));
  for (const op of direct) {
    if (rows.length >= MAX_ROWS) return;
    rows.push(el("tr", {}, ...opCells(op, depth)));
  }
  for (const child of node.children.values()) {
    const members = everyOp(child, filter, []);
    if (!members.length || rows.length >= MAX_ROWS) continue;
    const isOpen = open.has(child.path) || (filter !== null && members.length <= 200);
    rows.push(groupRow(child, members, depth, isOpen));
    if (isOpen) addNode(child, depth + 1, filter, rows);
  }
}

function renderOps(focus) {
  const filter = wanted(), order = byId("order").value, rows = [];
  const members = everyOp(tree, filter, []);
  if (order === "graph") addNode(tree, 0, filter, rows);
  else {
    const weight = order === "length" ? ops.length[0] : ops.fetched;
    members.sort((a, b) => weight[b] - weight[a]);
    for (const op of members.slice(0, 300)) rows.push(el("tr", {}, ...opCells(op, 0)));
  }
  const body = byId("ops").tBodies[0];
  body.replaceChildren(...rows);
  const cutOff = order === "graph" ? rows.length >= MAX_ROWS : members.length > 300;
  byId("found").textContent = plural(members.length, "operator") +
    (cutOff ? `, the first ${rows.length} rows` : "");
  if (focus !== undefined)
    for (const toggle of body.querySelectorAll(".toggle")) if (toggle.dataset.path === focus) toggle.focus();
}

function findOperator(op) {
  byId("search").value = ops.name[op];
  byId("phase").value = "";
  renderOps();
  byId("search").scrollIntoView({ block: "start" });
}

function setAll(node, isOpen) {
  for (const child of node.children.values()) {
    if (isOpen) open.add(child.path); else open.delete(child.path);
    setAll(child, isOpen);
  }
}

function operators() {
  colourSets();
  buildTree();
  const names = ["operator", "kind", "phase", "line", "cut (axis:parts)", "devices", "replicas", "fetched"];
  names.push(...data.lines.map((line) => measured ? line.source : "time"));
  const widths = [29, 16, 7, 11, 13, 8, 6, 8, ...data.lines.map(() => 8)];
  const head = heading(names, [6, 7, 8, 9]), all = sum(widths);
  [...head.children].forEach((cell, k) => { cell.style.width = 100 * widths[k] / all + "%"; });
  byId("ops").tHead.append(head);
  byId("phase").append(el("option", { value: "" }, "all"),
    ...ops.phase.names.filter((name) => name !== "end").map((name) => el("option", { value: name }, name)));
  for (const id of ["search", "phase", "order"])
    byId(id).addEventListener(id === "search" ? "input" : "change", () => renderOps());
  byId("expand").addEventListener("click", () => { setAll(tree, true); renderOps(); });
  byId("collapse").addEventListener("click", () => { setAll(tree, false); renderOps(); });
  document.addEventListener("keydown", (event) => {
    const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(document.activeElement.tagName);
    if (event.key === "/" && !typing) { byId("search").focus(); event.preventDefault(); }
    if (event.key === "Escape" && document.activeElement === byId("search")) {
      byId("search").value = "";
      renderOps();
    }
  });
  renderOps();
  overview();
}

// Overview: a column per Op in order, a row per device

const SHAPES = { cut: "#4583cf", copied: "#cfa62e", one: "#3f9d76" };
const shapeOf = (op) => ops.parts[op] > 1 ? "cut" : ops.replicas[op] > 1 ? "copied" : "one";

function overviewSize() {
  const width = byId("overview").parentElement.clientWidth - 36, count = ops.name.length - 1;
  const row = Math.max(2, Math.min(10, Math.floor(120 / deviceCount)));
  return { width, count, row, top: 16, height: 16 + row * Math.min(deviceCount, 128) };
}

function drawOverview() {
  const { width, count, row, top, height } = overviewSize();
  const pen = prepare(byId("overview"), width, height), column = width / Math.max(count, 1);
  pen.fillStyle = theme.lane;
  pen.fillRect(0, top, width, height - top);
  for (let op = 0; op < count; op += 1) {
    pen.fillStyle = SHAPES[shapeOf(op)];
    for (const d of ops.devices.names[ops.devices.of[op]])
      if (d < 128) pen.fillRect(op * column, top + d * row, Math.max(column - (column > 3 ? 0.6 : 0), 0.6),
        row - (row > 3 ? 1 : 0));
  }
  pen.textAlign = "left";
  let from = 0;
  for (let op = 1; op <= count; op += 1) {
    if (op < count && ops.phase.of[op] === ops.phase.of[from]) continue;
    const name = named(ops.phase, from);
    pen.fillStyle = PHASES[name] || OTHER;
    pen.fillRect(from * column, 12, (op - from) * column, 2);
    pen.fillStyle = theme.dim;
    if ((op - from) * column > 50) pen.fillText(name, from * column, 5);
    from = op;
  }
}

function overview() {
  const canvas = byId("overview");
  legend("overview-legend", [["cut into parts", SHAPES.cut], ["whole on several devices", SHAPES.copied],
    ["whole on one device", SHAPES.one]]);
  byId("overview-legend").append(el("span", {},
    "one column per operator, in order; one row per device" +
    (deviceCount > 128 ? ", the first 128" : "")));
  const opAt = (event) => {
    const { width, count } = overviewSize(), box = canvas.getBoundingClientRect();
    const op = Math.floor((event.clientX - box.left) / width * count);
    return op >= 0 && op < count ? op : null;
  };
  canvas.addEventListener("pointermove", (event) => {
    const op = opAt(event);
    if (op === null) { hideTip(); return; }
    showTip(event, [ops.name[op], `${named(ops.kind, op)}, ${named(ops.phase, op)}`,
      `${named(ops.cut, op) || "whole"} on ${ranges(ops.devices.names[ops.devices.of[op]])}` +
      (ops.replicas[op] > 1 ? `, ${ops.replicas[op]} replicas` : "")]);
  });
  canvas.addEventListener("pointerleave", hideTip);
  canvas.addEventListener("click", (event) => {
    const op = opAt(event);
    if (op !== null) findOperator(op);
  });
  drawOverview();
}
