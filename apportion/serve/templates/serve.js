"use strict";
// The page keeps nothing but what is selected: plans, changes and pins are the server's.
const token = location.hash.slice(1);
const find = (id) => document.getElementById(id);
let state = { plans: [], searches: [] };
let chosen = null; // the id of the plan that is shown
let shownVersion = -1; // of its operators
let shownPlan = null; // whose operators are shown
let ops = [];
let op = null; // the operator that is shown
let change = null; // the change that was tried: of which operator, which one, of which version
let asked = 0; // answers to questions before the last one are dropped

const call = async (path, data, raw) => {
  const options = { headers: { "X-Apportion-Token": token } };
  if (data !== undefined) {
    options.method = "POST";
    options.body = raw ? data : JSON.stringify(data);
    if (raw) options.headers["X-Name"] = encodeURIComponent(raw);
  }
  let answer;
  try {
    answer = await fetch(path, options);
  } catch {
    throw new Error("the server does not answer; it may have been ended");
  }
  if (!answer.ok) {
    const said = await answer.json().catch(() => ({}));
    throw new Error(said.error || `the server answered ${answer.status}`);
  }
  return answer;
};
const ask = async (path, data, raw) => (await call(path, data, raw)).json();

const say = (text, bad) => {
  find("message").textContent = text;
  find("message").className = bad ? "bad" : "";
};
const doing = (work) => async (event) => {
  if (event) event.preventDefault();
  try {
    await work(event);
  } catch (error) {
    say(error.message, true);
    await refresh(true).catch(() => {});
  }
};

const scaled = (number, units, step) => {
  let size = Math.abs(number), unit = 0;
  while (size >= step && unit < units.length - 1) { size /= step; unit += 1; }
  return `${number < 0 ? "-" : ""}${size >= 100 ? size.toFixed(0) : size.toPrecision(3)} ${units[unit]}`;
};
const bytes = (n) => scaled(n, ["B", "kB", "MB", "GB", "TB"], 1000);
const seconds = (s) => scaled(s * 1e6, ["us", "ms", "s"], 1000);
const signed = (text, n) => (n > 0 ? `+${text}` : n < 0 ? text : "no change");

const cell = (row, text, kind) => {
  const made = row.insertCell();
  made.textContent = text;
  if (kind) made.className = kind;
  return made;
};
const button = (parent, text, work) => {
  const made = document.createElement("button");
  made.type = "button";
  made.textContent = text;
  made.addEventListener("click", (event) => { event.stopPropagation(); doing(work)(event); });
  parent.append(made);
  return made;
};

// Searches and plans

const showSearches = () => {
  const place = find("searches");
  place.replaceChildren();
  for (const it of [...state.searches].reverse()) {
    const box = document.createElement("div");
    box.className = "search";
    box.dataset.status = it.status;
    const head = document.createElement("div");
    const best = it.best[0];
    head.textContent = `${it.name}: ${it.status} after ${it.seconds.toFixed(1)} s` +
      (best ? `; best ${seconds(best.step_seconds)} by ${best.method}${best.fits ? "" : ", does not fit"}` : "");
    const more = document.createElement("div");
    more.className = it.error ? "bad" : "small";
    more.textContent = it.error || (it.status === "running" ? it.says : "");
    box.append(head, more);
    if (it.status === "running")
      button(box, "Stop", async () => { await ask(`/api/searches/${it.id}/stop`, {}); await refresh(); });
    place.append(box);
  }
};

const showPlans = () => {
  const body = find("plans").tBodies[0];
  body.replaceChildren();
  find("no-plans").hidden = state.plans.length > 0;
  for (const it of state.plans) {
    const row = body.insertRow();
    row.className = it.id === chosen ? "choose chosen" : "choose";
    row.dataset.plan = it.id;
    const name = cell(row, it.name);
    const small = document.createElement("div");
    small.className = "small";
    small.textContent = `${it.method}, ${it.cluster}, ${it.ops} operators` +
      (it.pinned.length ? `, ${it.pinned.length} pinned` : "");
    name.append(small);
    cell(row, seconds(it.step_seconds) + (it.settled ? "" : " before the changes"));
    cell(row, bytes(it.peak_bytes));
    cell(row, bytes(it.bytes_moved));
    cell(row, it.feasible ? "yes" : "no", it.feasible ? "good" : "bad");
    cell(row, [it.decision, ...it.notes].join("; ").slice(0, 300), "small");
    button(row.insertCell(), "Close", async () => {
      await ask(`/api/plans/${it.id}/close`, {});
      await refresh();
    });
    row.addEventListener("click", doing(() => choose(it.id)));
  }
};

const plan = () => state.plans.find((it) => it.id === chosen);

const refresh = async (all = false) => {
  const number = ++asked;
  const fresh = await ask("/api/state");
  if (number !== asked) return;
  const known = new Set(state.plans.map((it) => it.id));
  const opened = fresh.plans.filter((it) => !known.has(it.id));
  state = fresh;
  showSearches();
  if (chosen !== null && !plan()) chosen = null;
  if (chosen === null && opened.length) await choose(opened[opened.length - 1].id);
  showPlans();
  find("plan").hidden = chosen === null;
  if (chosen !== null) {
    showFigures();
    if (all || plan().version !== shownVersion || shownPlan !== chosen) await showPlan();
  }
};

const choose = async (id) => {
  chosen = id;
  op = wantedOp = change = null;
  find("op").hidden = true;
  showPlans();
  await showPlan();
};

const showFigures = () => {
  const it = plan();
  find("plan-title").textContent = `${it.name} (${it.model || "a model without a name"})`;
  let text = `A step takes ${seconds(it.step_seconds)}, moves ${bytes(it.bytes_moved)}, ` +
    `and the fullest device has ${bytes(it.peak_bytes)}.`;
  if (it.edited_seconds !== null && !it.settled)
    text += ` With the changes: ${seconds(it.edited_seconds)} before messages are merged.`;
  find("plan-figures").textContent = text;
  find("again").disabled = !it.pinned.length;
  find("settle").disabled = it.settled;
};

let drawn = 0; // plans that were asked for; all but the last answer are dropped
const showPlan = async () => {
  const wanted = chosen, number = ++drawn;
  find("plan").hidden = false;
  if (!plan()) return;
  showFigures();
  find("making").hidden = plan().ready;
  find("changing").hidden = !plan().ready;
  if (!plan().ready) return;
  const answer = await ask(`/api/plans/${wanted}/ops`);
  if (wanted !== chosen || number !== drawn) return;
  ops = answer.ops;
  shownVersion = answer.version;
  shownPlan = wanted;
  document.documentElement.dataset.version = shownVersion;
  showOps(new Set(answer.pinned));
  if (wantedOp !== null) await showOp(wantedOp);
};

const MOST_ROWS = 400;
const showOps = (pinned) => {
  const words = find("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  const phase = find("phase").value;
  const body = find("ops").tBodies[0];
  body.replaceChildren();
  let count = 0;
  for (const [index, name, kind, when, module, cut] of ops) {
    const text = `${name} ${kind} ${module}`.toLowerCase();
    if ((phase && when !== phase) || !words.every((word) => text.includes(word))) continue;
    count += 1;
    if (count > MOST_ROWS) continue;
    const row = body.insertRow();
    row.className = index === op ? "choose chosen" : "choose";
    row.dataset.op = index;
    cell(row, (pinned || new Set(plan().pinned)).has(index) ? `\u{1F4CC} ${name}` : name);
    cell(row, cut, "small");
    row.addEventListener("click", doing(() => showOp(index)));
  }
  find("found").textContent = count > MOST_ROWS ? `the first ${MOST_ROWS} of ${count}` : `${count}`;
};

// One operator

let listed = 0; // lists that were asked for; all but the last one are dropped
let wantedOp = null; // the operator that was clicked last, shown or on its way
const showOp = async (index) => {
  const wanted = chosen, number = ++listed;
  wantedOp = index;
  const answer = await ask(`/api/plans/${wanted}/changes/${index}`);
  if (wanted !== chosen || number !== listed) return;
  op = index;
  change = null;
  find("op").hidden = false;
  find("op").dataset.op = index;
  for (const row of find("ops").rows) row.classList.toggle("chosen", +row.dataset.op === index);
  const [, name, kind, phase, module] = ops[index];
  find("op-title").textContent = `${name}: ${kind}, ${phase}${module ? `, ${module}` : ""}`;
  find("op-now").textContent = `Now ${answer.now}.`;
  find("pin").textContent = answer.pinned ? "Take the pin away" : "Pin as it is";
  find("pin").dataset.pinned = answer.pinned;
  find("effect").textContent = answer.changes.length ? "" :
    answer.pinned ? "It is pinned." : "There is no other way to cut it.";
  allowKeeping(false);
  const body = find("changes").tBodies[0];
  body.replaceChildren();
  for (const it of answer.changes) {
    const row = body.insertRow();
    row.className = "choose";
    row.dataset.change = it.index;
    cell(row, it.words);
    cell(row, it.ops > 1 ? `with ${it.ops - 1} others` : "alone", "small");
    cell(row, "");
    if (it.effect) showDifference(row, it.effect);
    row.addEventListener("click", doing(() => tryChange({ op: index, change: it.index, version: answer.version }, row)));
  }
};

const showDifference = (row, effect) => {
  row.cells[2].textContent = signed(seconds(effect.step_difference), effect.step_difference);
  row.cells[2].className = effect.step_difference < 0 ? "good" : effect.step_difference > 0 ? "bad" : "";
};

const allowKeeping = (yes) => {
  find("keep").disabled = find("keep-pin").disabled = !yes;
};

const tryChange = async (wanted, row) => {
  const began = performance.now();
  const answer = await ask(`/api/plans/${chosen}/try`, wanted);
  if (!row.isConnected) return; // another list is shown by now
  change = wanted;
  for (const other of find("changes").rows) other.classList.toggle("chosen", other === row);
  showDifference(row, answer.effect);
  const e = answer.effect;
  find("effect").textContent =
    `A step would take ${seconds(e.step_seconds)} (${signed(seconds(e.step_difference), e.step_difference)}), ` +
    `moving ${bytes(e.bytes_moved)} (${signed(bytes(e.bytes_difference), e.bytes_difference)}); the fullest device ` +
    `holds ${bytes(e.held_bytes)} across it (${signed(bytes(e.held_difference), e.held_difference)}). ` +
    `Answered in ${(answer.server_seconds * 1000).toFixed(0)} ms.`;
  find("effect").dataset.serverSeconds = answer.server_seconds;
  find("effect").dataset.milliseconds = performance.now() - began;
  allowKeeping(true);
};

const keepChange = async (pin) => {
  if (change === null) return;
  allowKeeping(false);
  await ask(`/api/plans/${chosen}/keep`, { ...change, pin });
  say(pin ? "Kept and pinned." : "Kept.");
  await refresh();
};

// What can be pressed

find("search-form").addEventListener("submit", doing(async () => {
  await ask("/api/searches", {
    model: find("model").value, cluster: find("cluster").value, method: find("method").value,
    memory_limit: find("limit").value, recompute: find("recompute").value,
    budget: Number(find("budget").value),
  });
  say("");
  await refresh();
}));
find("file").addEventListener("change", doing(async () => {
  const [file] = find("file").files;
  if (!file) return;
  const answer = await ask("/api/plans", file, file.name);
  find("file").value = "";
  await refresh();
  await choose(answer.id);
}));
find("filter").addEventListener("input", () => showOps());
find("phase").addEventListener("change", () => showOps());
find("keep").addEventListener("click", doing(() => keepChange(false)));
find("keep-pin").addEventListener("click", doing(() => keepChange(true)));
find("pin").addEventListener("click", doing(async () => {
  const pin = find("pin").dataset.pinned !== "true";
  await ask(`/api/plans/${chosen}/pin`, { ops: [op], pin, version: shownVersion });
  await refresh();
}));
find("settle").addEventListener("click", doing(async () => {
  say("Simulating the whole plan ...");
  await ask(`/api/plans/${chosen}/settle`, {});
  say("");
  await refresh();
}));
find("again").addEventListener("click", doing(async () => {
  const budget = Number(find("budget").value);
  await ask(`/api/plans/${chosen}/search`, { version: shownVersion, budget });
  await refresh();
}));
find("download").addEventListener("click", doing(async () => {
  const answer = await call(`/api/plans/${chosen}/plan`);
  const link = document.createElement("a");
  link.href = URL.createObjectURL(await answer.blob());
  link.download = "plan.json";
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  await refresh();
}));
find("report").addEventListener("click", doing(async () => {
  const page = window.open("", "_blank");
  const answer = await ask(`/api/plans/${chosen}/report`, {});
  if (page) page.location = answer.path;
  await refresh();
}));

const fill = (id, rows, first) => {
  for (const row of [...(first || []), ...rows]) {
    const option = document.createElement("option");
    option.value = row.name;
    option.textContent = row.about ? `${row.name}: ${row.about}` : row.name;
    find(id).append(option);
  }
};
const follow = async () => {
  if (!document.hidden)
    try {
      await refresh();
      if (find("message").textContent.startsWith("the server does not answer")) say("");
    } catch (error) {
      say(error.message, true);
    }
  setTimeout(follow, state.searches.some((it) => it.status === "running") ? 500 : 2000);
};
doing(async () => {
  const offered = await ask("/api/choices");
  fill("models", offered.models);
  fill("clusters", offered.clusters);
  fill("method", offered.methods, [{ name: "auto", about: "the best of many" }]);
  fill("recompute", offered.recompute.map((name) => ({ name })));
  document.documentElement.dataset.ready = "yes";
})();
follow();
document.addEventListener("visibilitychange", () => { if (!document.hidden) doing(() => refresh())(); });
