// Traffic

function traffic() {
  const { block, nbytes, messages } = data.traffic, n = nbytes.length, table = byId("matrix");
  const label = (k) => block === 1 ? String(k)
    : `${k * block}\u2013${Math.min((k + 1) * block, deviceCount) - 1}`;
  const most = Math.max(1, ...nbytes.map((row) => Math.max(...row)));
  const small = n > 16;
  table.className = small ? "small" : "";
  const head = el("tr", {}, el("th", {}, small ? "" : "from \\ to"),
    ...nbytes.map((_, k) => el("th", { scope: "col" }, label(k))));
  if (!small) head.append(el("th", { scope: "col" }, "sent"));
  table.append(el("thead", {}, head));
  const cell = (a, b) => {
    const bytes = nbytes[a][b];
    const made = el("td", { class: bytes ? "" : "none" }, small ? "" : bytes ? bytesText(bytes)
      : a === b ? "" : "0");
    made.title = `${label(a)} to ${label(b)}: ${exactBytes(bytes)}, ${plural(messages[a][b], "message")}`;
    if (bytes) made.style.backgroundColor = `rgba(var(--heat), ${0.08 + 0.52 * bytes / most})`;
    return made;
  };
  const body = nbytes.map((row, a) => {
    const made = el("tr", {}, el("th", { scope: "row" }, label(a)), ...row.map((_, b) => cell(a, b)));
    if (!small) made.append(el("td", { class: "total" }, bytesText(sum(row))));
    return made;
  });
  if (!small) body.push(el("tr", {}, el("th", { scope: "row" }, "received"),
    ...nbytes.map((_, b) => el("td", { class: "total" }, bytesText(sum(nbytes.map((row) => row[b]))))),
    el("td", { class: "total" }, bytesText(sum(nbytes.map(sum))))));
  table.append(el("tbody", {}, ...body));
  const count = sum(messages.map(sum));
  byId("traffic-note").textContent = count
    ? `${plural(count, "message")} in a step, ${exactBytes(sum(nbytes.map(sum)))} in all.`
    : "Nothing moves: no operator reads what another device has.";
}
