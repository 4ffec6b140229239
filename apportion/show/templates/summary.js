// Summary

const plan = data.plan, predicted = plan.predicted, measured = data.lines[1];
const deviceCount = data.devices.name.length, done = plan.throughput;

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
  byId("decision").textContent = plan.decision + ".";
  const top = Math.max(...predicted.peak_bytes), at = predicted.peak_bytes.indexOf(top);
  byId("cards").append(
    card("Step time", secondsText(predicted.step_seconds), beside((f) => secondsText(f.step_seconds))),
    ...(done ? [card(`${done.unit[0].toUpperCase()}${done.unit.slice(1)} a second`, rateText(done.per_device),
      `on each device, ${rateText(done.per_second)} in all`)] : []),
    card("Peak memory", bytesText(top), measured
      ? beside((f) => bytesText(Math.max(...f.peak_bytes)))
      : `on device ${at}, limit ${bytesText(data.devices.limit[at])}`),
    card("Bytes moved", bytesText(predicted.bytes_moved), beside((f) => bytesText(f.bytes_moved))),
    card("Devices compute", percent(meanShare(data.lines[0], 0)), shareText(data.lines[0])),
    card("Model FLOPs utilisation", plan.utilisation <= 1 ? percent(plan.utilisation) : "not known", "of the devices' peak rates"),
    card("Memory limits", plan.feasible ? "kept" : "exceeded",
      plan.feasible ? "on every device" : "this plan is not feasible", plan.feasible ? "good" : "bad"));
  if (plan.renewed) {
    byId("renewed").textContent = "The figures above are those that the plan was saved with. " +
      "Simulated anew for this page, the step takes " +
      `${secondsText(data.lines[0].figures.step_seconds)} and moves ` +
      `${bytesText(data.lines[0].figures.bytes_moved)}; the drawings below show that.`;
    byId("renewed").hidden = false;
  }
  if (plan.notes.length) {
    byId("notes").append(...plan.notes.map((note) => el("li", {}, note)));
    byId("notes").hidden = false;
  }
  facts();
  foldable();
  devices();
  provenance();
  byId("footer").textContent =
    `apportion ${plan.version}; graph ${plan.fingerprint}; this page needs no network.`;
}

// Shares of a step: computes, assembles, exchanges, waits. They add up to the whole.

const SHARES = ["computes", "assembles", "exchanges", "waits"];
const meanShare = (line, k) => sum(line.figures.shares.map((row) => row[k])) / Math.max(deviceCount, 1);
const shareText = (line) => SHARES.slice(1).map((name, k) => [name, meanShare(line, k + 1)])
  .filter(([, share]) => share >= 0.005).map(([name, share]) => `${name} ${percent(share)}`).join(", ");

// Devices that do the same are shown once, unless each is wanted.

const folded = data.alike.some((group) => group.length > 1);
const eachDevice = data.devices.name.map((_, d) => [d]);
const deviceGroups = () => folded && !byId("every").checked ? data.alike : eachDevice;
function groupName(group) {
  if (group.length === 1) return `${group[0]} ${data.devices.name[group[0]]}`;
  return `${ranges([...group].sort((a, b) => a - b))} (${group.length} alike)`;
}

function foldable() {
  byId("every-label").hidden = !folded;
  byId("every").addEventListener("change", () => {
    devices();
    arrangeLanes();
    redrawTimeline();
    listMemory();
  });
}

function facts() {
  const bound = plan.lower_bound;
  const rows = [
    ["model", plan.model || "not named"],
    ["cluster", `${plan.cluster}, ${plural(deviceCount, "device")}`],
    ["method", `${plan.method}, seed ${plan.seed}, budget ${plan.budget} s`],
    ["communication", plan.communication],
    ["predicted step time", secondsText(predicted.step_seconds)],
    ...(done ? [[`${done.unit} a second`,
      `${rateText(done.per_device)} on each device, ${rateText(done.per_second)} in all`]] : []),
    ["predicted peak memory", exactBytes(Math.max(...predicted.peak_bytes))],
    ["bytes moved in a step", exactBytes(predicted.bytes_moved)],
    ["model FLOPs utilisation", plan.utilisation <= 1 ? (100 * plan.utilisation).toFixed(1) + "%" : "not known"],
    ["feasible", plan.feasible ? "yes" : "no"],
    ["search time", secondsText(plan.search_seconds)],
    ["lower bound", isNumber(bound) ? `${bound.toLocaleString("en-US")}, of what the method minimises`
      : "none"],
    ["operators, tasks", `${plan.ops.toLocaleString("en-US")}, ${data.lines[0].tasks.toLocaleString("en-US")}`],
  ];
  if (measured) rows.splice(5, 0, ["measured step time", secondsText(measured.figures.step_seconds)]);
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
  const names = ["device", "kind", "peak memory", "limit", "fits", ...SHARES];
  if (measured) names.push("measured peak", "measured: computes");
  const body = deviceGroups().map((group) => {
    const d = group[0], peak = predicted.peak_bytes[d], limit = data.devices.limit[d];
    const fits = peak <= limit;
    const cells = [
      el("td", {}, groupName(group)), el("td", {}, named(data.devices.kind, d)),
      el("td", { title: exactBytes(peak) }, gauge(peak / limit), bytesText(peak)),
      el("td", { class: "number", title: exactBytes(limit) }, bytesText(limit)),
      el("td", { class: fits ? "good" : "bad" }, fits ? "yes" : "no"),
      ...data.lines[0].figures.shares[d].map((x) => el("td", { class: "number" }, percent(x))),
    ];
    if (measured) cells.push(
      el("td", { class: "number" }, bytesText(measured.figures.peak_bytes[d])),
      el("td", { class: "number" }, percent(measured.figures.shares[d][0])));
    return el("tr", {}, ...cells);
  });
  byId("devices").replaceChildren(el("thead", {}, heading(names, [3, 5, 6, 7, 8, 9, 10])),
    el("tbody", {}, ...body));
}

function provenance() {
  const rows = data.provenance.map((row) => el("tr", {}, ...row.map((text) => el("td", {}, text))));
  byId("provenance").append(el("thead", {}, heading(["figure", "is", "from"], [])),
    el("tbody", {}, ...rows));
}
