const { runs, settings } = JSON.parse($("data").textContent);
const COLORS = ["#3b6fd4", "#d4703b", "#2f9e6e", "#a04fc0", "#c23b5e", "#8a7a1f", "#2a9db5", "#6b7280"];
const colorOf = (index) => COLORS[index % COLORS.length];

function mark(index) {
  const dot = make("i");
  dot.style.cssText = `display:inline-block;width:10px;height:10px;border-radius:3px;margin-right:7px;background:${colorOf(index)}`;
  return dot;
}
function table(target, head, rows) {
  target.append(make("thead", {}, make("tr", {}, ...head.map((text) => make("th", {}, text)))),
    make("tbody", {}, ...rows.map((cells) => make("tr", {}, ...cells.map((cell, place) => make("td", { "data-label": head[place] }, cell))))));
}
function overlaid(name, transform = (value) => value) {
  return runs.map((run, index) => ({
    label: run.name, color: colorOf(index), dots: false,
    points: (run.curves.step || []).map((step, place) => ({ step, seconds: run.curves.seconds[place], y: transform(run.curves[name][place]) })).filter((point) => isNumber(point.y)),
  }));
}

document.title = `${runs.length} runs – nerfturbo`;
$("title").textContent = runs.map((run) => run.name).join(" · ");
const protocols = new Set(runs.map((run) => run.protocol));
$("lead").textContent = protocols.size === 1 ? `All scored alike: ${[...protocols][0]}.` : "These runs were not all scored alike; see the last column.";
table($("runs"), ["run", "PSNR, dB", "SSIM", "LPIPS", "steps", "training", "rays a second", "memory", "machine", "scored on"],
  runs.map((run, index) => [make("span", {}, mark(index), run.name), fixed(run.psnr, 2), fixed(run.ssim, 4), fixed(run.lpips, 4), quantity(run.steps),
    duration(run.train_seconds), quantity(run.rays_per_second), bytes(run.memory_bytes), run.machine, run.protocol]));
if (settings.length) table($("settings"), ["setting", ...runs.map((run) => run.name)], settings.map((row) => [row.name, ...row.values.map((value) => (value === null ? "none" : String(value)))]));
else $("settings").append(make("caption", {}, "none"));
const list = [
  new Chart({ title: "PSNR of training batches, dB", series: overlaid("psnr"), format: (value) => String(Number(value.toFixed(1))), exact: (value) => value.toFixed(2) + " dB" }),
  new Chart({ title: "Loss (logarithmic)", series: overlaid("loss"), log: true, format: (value) => Number(value.toPrecision(1)).toString(), exact: (value) => value.toPrecision(3) }),
  new Chart({ title: "Occupied share of the grid, %", series: overlaid("occupied_fraction", (value) => 100 * value), zero: true }),
  new Chart({ title: "Rays a second", series: overlaid("rays_per_second"), log: true }),
];
$("charts").append(...list.map((chart) => chart.root));
listenToAxis(list);
