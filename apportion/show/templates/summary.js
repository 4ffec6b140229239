// Summary

const plan = data.plan, predicted = plan.predicted, measured = data.lines[1];
const deviceCount = data.devices.name.length;

function card(what, figure, more, mood) {
  return el("div", { class: "card" }, el("div", { class: "what" }, what),
    el("div", { class: "figure " + (mood || "") }, figure), el("div", { class: "more" }, more));
}

function beside(text) {
  return measured ? "measured " + text(measured.figures) : "predicted";
}

function summarise() {
  const title = plan.model || "A plan";
  document.title = `${title} on ${plan.cluster}: apportion report`;
  byId("title").textContent = title;
  byId("subtitle").textContent =
    `divided over ${plan.cluster} (${plan.about || plural(deviceCount, "device")}) by ${plan.method}`;
  const top = Math.max(...predicted.peak_bytes), at = predicted.peak_bytes.indexOf(top);
  const busy = sum(predicted.busy) / Math.max(deviceCount, 1);
  byId("cards").append(
    card("Step time", secondsText(predicted.step_seconds), beside((f) => secondsText(f.step_seconds))),
    card("Peak memory", bytesText(top), measured
      ? beside((f) => bytesText(Math.max(...f.peak_bytes)))
      : `on device ${at}, limit ${bytesText(data.devices.limit[at])}`),
    card("Bytes moved", bytesText(predicted.bytes_moved), beside((f) => bytesText(f.bytes_moved))),
    card("Devices busy", percent(busy), beside((f) => percent(sum(f.busy) / deviceCount))),
    card("Memory limits", plan.feasible ? "kept" : "exceeded",
      plan.feasible ? "on every device" : "this plan is not feasible", plan.feasible ? "good" : "bad"));
  if (plan.renewed) {
    byId("renewed").textContent = "The figures above are those that the plan was saved with. " +
      "Simulated anew for this page, the step takes " +
      `${secondsText(data.lines[0].figures.step_seconds)} and moves ` +
      `${bytesText(data.lines[0].figures.bytes_moved)}; the drawings below show that.`;
    byId("renewed").hidden = false;
  }
  facts();
  devices();
  provenance();
  byId("footer").textContent =
    `apportion ${plan.version}; graph ${plan.fingerprint}; this page needs no network.`;
}

function facts() {
  const bound = plan.lower_bound;
  const rows = [
    ["model", plan.model || "not named"],
    ["cluster", `${plan.cluster}, ${plural(deviceCount, "device")}`],
    ["method", `${plan.method}, seed ${plan.seed}, budget ${plan.budget} s`],
    ["predicted step time", secondsText(predicted.step_seconds)],
    ["predicted peak memory", exactBytes(Math.max(...predicted.peak_bytes))],
    ["bytes moved in a step", exactBytes(predicted.bytes_moved)],
    ["feasible", plan.feasible ? "yes" : "no"],
    ["search time", secondsText(plan.search_seconds)],
    ["lower bound", isNumber(bound) ? `${bound.toLocaleString("en-US")}, of what the method minimises`
      : "none"],
    ["operators, tasks", `${plan.ops.toLocaleString("en-US")}, ${data.lines[0].tasks.toLocaleString("en-US")}`],
  ];
  if (measured) rows.splice(4, 0, ["measured step time", secondsText(measured.figures.step_seconds)]);
  byId("facts").append(...rows.map(([what, text]) => el("tr", {}, el("th", { scope: "row" }, what),
    el("td", {}, text))));
}

function gauge(share) {
  const inner = el("span");
  inner.style.width = Math.min(100, 100 * share) + "%";
  return el("span", { class: "gauge" + (share > 1 ? " over" : ""), "aria-hidden": "true" }, inner);
}

function heading(names, numeric) {
  return el("tr", {}, ...names.map((name, k) =>
    el("th", { scope: "col", class: numeric.includes(k) ? "number" : "" }, name)));
}

function devices() {
  const names = ["device", "kind", "peak memory", "limit", "fits", "busy"];
  if (measured) names.push("measured peak", "measured busy");
  const body = data.devices.name.map((name, d) => {
    const peak = predicted.peak_bytes[d], limit = data.devices.limit[d];
    const fits = peak <= limit;
    const cells = [
      el("td", {}, `${d} ${name}`), el("td", {}, named(data.devices.kind, d)),
      el("td", { title: exactBytes(peak) }, gauge(peak / limit), bytesText(peak)),
      el("td", { class: "number", title: exactBytes(limit) }, bytesText(limit)),
      el("td", { class: fits ? "good" : "bad" }, fits ? "yes" : "no"),
      el("td", { class: "number" }, percent(predicted.busy[d])),
    ];
    if (measured) cells.push(
      el("td", { class: "number" }, bytesText(measured.figures.peak_bytes[d])),
      el("td", { class: "number" }, percent(measured.figures.busy[d])));
    return el("tr", {}, ...cells);
  });
  byId("devices").append(el("thead", {}, heading(names, [3, 5, 6, 7])), el("tbody", {}, ...body));
}

function provenance() {
  const rows = data.provenance.map((row) => el("tr", {}, ...row.map((text) => el("td", {}, text))));
  byId("provenance").append(el("thead", {}, heading(["figure", "is", "from"], [])),
    el("tbody", {}, ...rows));
}
