"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const { metrics, config, curves, previews, views } = data;
const $ = (id) => document.getElementById(id);

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}
function shape(tag, attributes, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

/* Numbers for people */
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
const fixed = (value, digits) => (isNumber(value) ? value.toFixed(digits) : "–");
function quantity(value, digits = 1) {
  if (!isNumber(value)) return "–";
  for (const [limit, unit] of [[1e9, " G"], [1e6, " M"], [1e3, " k"]]) if (Math.abs(value) >= limit) return (value / limit).toFixed(digits).replace(/\.0+$/, "") + unit;
  return Number(value.toPrecision(3)).toString();
}
function duration(seconds) {
  if (!isNumber(seconds)) return "–";
  if (seconds < 100) return seconds.toFixed(seconds < 10 ? 1 : 0) + " s";
  const whole = Math.round(seconds), pad = (n) => String(n).padStart(2, "0");
  return whole < 3600 ? `${Math.floor(whole / 60)}:${pad(whole % 60)} min` : `${Math.floor(whole / 3600)}:${pad(Math.floor((whole % 3600) / 60))} h`;
}
const bytes = (value) => (isNumber(value) ? (value >= 1e9 ? (value / 1e9).toFixed(2) + " GB" : Math.round(value / 1e6) + " MB") : "–");

/* Header and tiles */
function header() {
  const protocol = metrics.protocol || {};
  document.title = `${metrics.scene || data.run}: ${fixed(metrics.psnr, 2)} dB – nerfturbo`;
  $("eyebrow").textContent = "nerfturbo run report";
  $("title").textContent = metrics.scene && metrics.scene !== data.run ? `${metrics.scene} · ${data.run}` : data.run;
  const size = Array.isArray(protocol.resolution) ? protocol.resolution.flat().join(" × ") : "";
  $("lead").textContent = metrics.psnr === undefined ? "This run has not been scored yet." :
    `Scored on ${protocol.n_views} ${protocol.split} views it was not trained on, ${size} pixels, background ${protocol.background}, ` +
    `trained with the ${config.preset} preset on ${metrics.machine ? metrics.machine.gpu || metrics.machine.processor : "an unknown machine"}.`;
  const tile = (label, value, unit = "", main = false) =>
    $("tiles").append(make("div", { class: main ? "tile main" : "tile" }, make("b", {}, value, unit ? make("small", {}, " " + unit) : ""), make("span", {}, label)));
  tile("PSNR on test views", fixed(metrics.psnr, 2), "dB", true);
  tile("SSIM", fixed(metrics.ssim, 4));
  tile("of training", duration(metrics.train_seconds));
  tile("steps", isNumber(metrics.steps) ? metrics.steps.toLocaleString("en") : "–");
  tile("rays a second", quantity(metrics.rays_per_second));
  tile("samples a second", quantity(metrics.samples_per_second));
  if (isNumber(metrics.samples_skipped_fraction)) tile("of uniform samples skipped", (100 * metrics.samples_skipped_fraction).toFixed(1), "%");
  tile(metrics.peak_gpu_memory_bytes ? "GPU memory at most" : "memory at most", bytes(metrics.peak_gpu_memory_bytes || metrics.peak_memory_bytes));
}

/* Slider */
function select(view, row) {
  for (const name of ["truth", "render", "error"]) $(name).src = view[name];
  for (const other of document.querySelectorAll("#views tr[aria-selected]")) other.removeAttribute("aria-selected");
  if (row) row.setAttribute("aria-selected", "true");
  $("caption").textContent = `test view ${view.index}: ${fixed(view.psnr, 2)} dB` + (isNumber(view.ssim) ? `, SSIM ${fixed(view.ssim, 4)}` : "") + " · drag to compare";
}
function stage() {
  const shown = views.filter((view) => view.render);
  if (!shown.length) return;
  $("stage").hidden = false;
  $("truth").addEventListener("load", () => $("stage").style.setProperty("--aspect", $("truth").naturalWidth / $("truth").naturalHeight));
  $("slider").addEventListener("input", (event) => $("frame").style.setProperty("--cut", event.target.value + "%"));
  if (data.turntable) { $("turntable-figure").hidden = false; $("turntable").src = data.turntable; }
}

/* Baselines */
function baselines() {
  const found = metrics.baselines;
  if (!found || !isNumber(metrics.psnr)) return;
  $("baselines").hidden = false;
  const rows = [["one constant colour", found.constant_psnr], ["the truth blurred by 3 pixels", found.blurred_psnr], ["this run", metrics.psnr]];
  const top = Math.max(...rows.map((row) => row[1] || 0)) * 1.05;
  rows.forEach(([label, value], index) => {
    const bar = make("div", { class: "bar" });
    bar.style.width = `${(100 * Math.max(0, value)) / top}%`;
    $("scale").append(make("div", { class: index === 2 ? "row ours" : "row" }, make("span", {}, label), make("div", { class: "track" }, bar), make("span", {}, `${fixed(value, 2)} dB`)));
  });
}

/* Charts */
let axis = "seconds";
function niceTicks(low, high, count) {
  const raw = (high - low) / Math.max(1, count) || 1, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= raw) || raw;
  const ticks = [];
  for (let value = Math.ceil(low / step - 1e-9) * step; value <= high + step * 1e-9; value += step) ticks.push(Math.abs(value) < step * 1e-9 ? 0 : value);
  return ticks;
}
function logTicks(low, high) {
  const all = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) for (const factor of [1, 2, 5]) all.push(factor * 10 ** power);
  const inside = all.filter((value) => value >= low * 0.999 && value <= high * 1.001);
  return inside.length > 6 ? inside.filter((value) => /^1(e|0*$|\.0*$)|^0\.0*1$/.test(String(value))) : inside;
}
function seriesOf(names, labels, transform = (value) => value) {
  return names.map((name, index) => ({
    label: labels[index], color: index ? "var(--second)" : "var(--accent)", dots: false,
    points: (curves.step || []).map((step, place) => ({ step, seconds: curves.seconds[place], y: transform(curves[name][place]) })).filter((point) => isNumber(point.y)),
  }));
}
class Chart {
  constructor(options) {
    Object.assign(this, { log: false, format: (value) => quantity(value), zero: false }, options);
    this.svg = shape("svg", { role: "img", "aria-label": this.title });
    this.tip = make("div", { class: "tip", hidden: "" });
    const legend = make("div", { class: "legend" });
    if (this.series.length > 1) for (const { label, color } of this.series) {
      const mark = make("i"); mark.style.background = color;
      legend.append(make("span", {}, mark, label));
    }
    this.root = make("div", { class: "chart" }, make("h3", {}, this.title), legend, this.svg, this.tip);
    this.svg.addEventListener("pointermove", (event) => this.hover(event));
    this.svg.addEventListener("pointerleave", () => { this.tip.hidden = true; this.cross.setAttribute("visibility", "hidden"); });
  }
  draw() {
    const width = Math.max(240, this.svg.clientWidth), height = 200, pad = { left: 46, right: 12, top: 10, bottom: 26 };
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.replaceChildren();
    const all = this.series.flatMap((series) => series.points);
    this.cross = shape("line", { class: "cross", y1: pad.top, y2: height - pad.bottom, visibility: "hidden" });
    if (!all.length) { this.svg.append(shape("text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, "nothing logged"), this.cross); return; }
    const xs = all.map((point) => point[axis]), ys = all.map((point) => point.y).filter((value) => !this.log || value > 0);
    const x0 = 0, x1 = Math.max(...xs, 1e-9);
    let y0 = this.zero ? 0 : Math.min(...ys), y1 = Math.max(...ys);
    if (this.log) { y0 /= 1.15; y1 *= 1.15; } else { const room = (y1 - y0 || Math.abs(y1) || 1) * 0.06; y0 = this.zero ? 0 : y0 - room; y1 += room; }
    const scale = this.log ? Math.log10 : (value) => value;
    this.x = (value) => pad.left + ((value - x0) / (x1 - x0)) * (width - pad.left - pad.right);
    this.y = (value) => height - pad.bottom - ((scale(value) - scale(y0)) / (scale(y1) - scale(y0) || 1)) * (height - pad.top - pad.bottom);
    for (const tick of this.log ? logTicks(y0, y1) : niceTicks(y0, y1, 4)) {
      this.svg.append(shape("line", { class: "gridline", x1: pad.left, x2: width - pad.right, y1: this.y(tick), y2: this.y(tick) }),
        shape("text", { x: pad.left - 7, y: this.y(tick) + 4, "text-anchor": "end" }, this.format(tick)));
    }
    const unit = axis === "seconds" ? " s" : "";
    for (const tick of niceTicks(x0, x1, width / 90)) this.svg.append(shape("text", { x: this.x(tick), y: height - 8, "text-anchor": tick === 0 ? "start" : "middle" }, quantity(tick) + unit));
    this.svg.append(shape("line", { class: "axis", x1: pad.left, x2: width - pad.right, y1: height - pad.bottom, y2: height - pad.bottom }));
    for (const { points, color, dots } of this.series) {
      const usable = points.filter((point) => !this.log || point.y > 0);
      const path = usable.map((point, index) => `${index ? "L" : "M"}${this.x(point[axis]).toFixed(1)} ${this.y(point.y).toFixed(1)}`).join("");
      const line = shape("path", { d: path, fill: "none", "stroke-width": 2, "stroke-linejoin": "round", "stroke-linecap": "round" });
      line.style.stroke = color;
      this.svg.append(line);
      if (dots) for (const point of usable) { const dot = shape("circle", { cx: this.x(point[axis]), cy: this.y(point.y), r: usable.length > 1 ? 3 : 4.5 }); dot.style.fill = color; this.svg.append(dot); }
    }
    this.svg.append(this.cross);
  }
  hover(event) {
    if (!this.x) return;
    const box = this.svg.getBoundingClientRect(), mouse = ((event.clientX - box.left) / box.width) * this.svg.viewBox.baseVal.width;
    const nearest = this.series.map((series) => series.points.reduce((best, point) => (!best || Math.abs(this.x(point[axis]) - mouse) < Math.abs(this.x(best[axis]) - mouse) ? point : best), null));
    const anchor = nearest.find((point) => point);
    if (!anchor) return;
    this.tip.replaceChildren(make("div", {}, `step ${anchor.step.toLocaleString("en")}, ${duration(anchor.seconds)}`),
      ...nearest.map((point, index) => (point ? make("div", {}, (this.series.length > 1 ? this.series[index].label + ": " : "") + (this.exact || this.format)(point.y)) : "")));
    this.tip.hidden = false;
    const x = this.x(anchor[axis]);
    this.cross.setAttribute("x1", x); this.cross.setAttribute("x2", x); this.cross.setAttribute("visibility", "visible");
    const left = this.svg.offsetLeft + (x / this.svg.viewBox.baseVal.width) * box.width;
    this.tip.style.left = Math.min(Math.max(8, left + 12), this.root.clientWidth - this.tip.offsetWidth - 8) + "px";
    this.tip.style.top = this.svg.offsetTop + 8 + "px";
  }
}
function charts() {
  const psnr = seriesOf(["psnr"], ["training batches"]);
  const seen = previews.filter((preview) => isNumber(preview.psnr)).map(({ step, seconds, psnr: y }) => ({ step, seconds, y }));
  if (seen.length) psnr.push({ label: "one test view on the way", color: "var(--second)", dots: true, points: seen });
  if (isNumber(metrics.psnr)) psnr.push({ label: "all test views", color: "var(--ink)", dots: true, points: [{ step: metrics.steps, seconds: metrics.train_seconds, y: metrics.psnr }] });
  const list = [
    new Chart({ title: "PSNR, dB", series: psnr, format: (value) => String(Number(value.toFixed(1))), exact: (value) => value.toFixed(2) + " dB" }),
    new Chart({ title: "Loss (logarithmic)", series: seriesOf(["loss"], ["loss"]), log: true, format: (value) => Number(value.toPrecision(1)).toString(), exact: (value) => value.toPrecision(3) }),
    new Chart({ title: "Occupied share of the grid, %", series: seriesOf(["occupied_fraction"], ["occupied"], (value) => 100 * value), zero: true, format: (value) => String(Number(value.toFixed(1))), exact: (value) => value.toFixed(2) + " %" }),
    new Chart({ title: "Throughput, a second", series: seriesOf(["rays_per_second", "samples_per_second"], ["rays", "samples"]), log: true }),
  ];
  $("charts").append(...list.map((chart) => chart.root));
  const redraw = () => list.forEach((chart) => chart.draw());
  for (const button of document.querySelectorAll(".toggle button")) button.addEventListener("click", () => {
    axis = button.dataset.axis;
    for (const other of document.querySelectorAll(".toggle button")) other.setAttribute("aria-pressed", String(other === button));
    redraw();
  });
  new ResizeObserver(redraw).observe($("charts"));
  redraw();
}

/* Views */
function table() {
  const values = views.map((view) => view.psnr).filter(isNumber), low = Math.min(...values), high = Math.max(...values);
  const cell = (...children) => make("td", {}, ...children);
  const body = make("tbody");
  const shown = views.filter((view) => view.render), opening = shown[Math.floor(shown.length / 2)];
  for (const view of views) {
    const bar = make("i"), share = high > low ? (view.psnr - low) / (high - low) : 1;
    bar.style.width = `${10 + 90 * share}%`;
    const thumbs = make("td", { class: "thumbs" });
    for (const name of ["truth", "render", "error"]) if (view[name]) thumbs.append(make("img", { src: view[name], alt: "", loading: "lazy" }));
    const small = cell(isNumber(view.seconds) ? duration(view.seconds) : "–");
    small.className = "hide-small";
    const row = make("tr", {}, cell(String(view.index)), cell(fixed(view.psnr, 2), make("span", { class: "meter hide-small" }, bar)), cell(fixed(view.ssim, 4)), small, thumbs);
    if (view.render) {
      const choose = () => { select(view, row); };
      row.className = "has-picture"; row.tabIndex = 0;
      row.addEventListener("click", () => { choose(); $("stage").scrollIntoView({ behavior: "smooth", block: "nearest" }); });
      row.addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); choose(); } });
      if (view === opening) choose();
    }
    body.append(row);
  }
  const head = ["view", "PSNR, dB", "SSIM", "rendered in", "truth, render, error"].map((text, index) => make("th", index === 3 ? { class: "hide-small" } : {}, text));
  $("views").append(make("thead", {}, make("tr", {}, ...head)), body);
}

/* Protocol, machine, settings */
const words = (name) => name.replaceAll("_", " ");
function text(value) {
  if (value === null || value === undefined) return "none";
  if (Array.isArray(value)) return value.map(text).join(" × ");
  return typeof value === "object" ? Object.entries(value).map(([key, item]) => `${words(key)} ${text(item)}`).join(", ") : String(value);
}
function list(target, entries) {
  for (const [name, value] of entries) target.append(make("dt", {}, words(name)), make("dd", {}, text(value)));
}
function facts() {
  list($("protocol"), Object.entries(metrics.protocol || {}));
  const used = { device: metrics.device, backend: metrics.backend, ...metrics.machine, ...metrics.versions, "total time": duration(metrics.total_seconds), "stopped by": metrics.stopped_by };
  list($("machine"), Object.entries(used).filter(([, value]) => value !== undefined));
  for (const [name, value] of Object.entries(config)) {
    if (value === null || typeof value !== "object") continue;
    const inner = make("dl");
    list(inner, Object.entries(value));
    $("config").append(make("details", name === "data" ? { open: "" } : {}, make("summary", {}, name), inner));
  }
  $("footer").textContent = "This page holds everything it shows. The numbers are those of metrics.json and log.jsonl beside it.";
}

header();
stage();
baselines();
table();
charts();
facts();
