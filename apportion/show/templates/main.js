// All

function redrawAll() {
  readTheme();
  drawGraph();
  drawTimeline();
  drawSmalls();
  drawMemory();
  drawOverview();
  drawCurve();
}

readTheme();
summarise();
graphSection();
timeline();
memory();
traffic();
operators();
searched();
let resizing = 0, wide = byId("lanes").clientWidth;
new ResizeObserver(() => {  // of the window, or because a scrollbar came or went
  if (byId("lanes").clientWidth === wide) return;
  wide = byId("lanes").clientWidth;
  clearTimeout(resizing);
  resizing = setTimeout(redrawAll, 60);
}).observe(byId("lanes"));
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);
if (root.dataset.ready !== "error") root.dataset.ready = "yes";
