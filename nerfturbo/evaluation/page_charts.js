"use strict";
/* What every page shares: elements, numbers for people, and line charts over time or steps. */
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

function listenToAxis(list) {
  const redraw = () => list.forEach((chart) => chart.draw());
  for (const button of document.querySelectorAll(".toggle button")) button.addEventListener("click", () => {
    axis = button.dataset.axis;
    for (const other of document.querySelectorAll(".toggle button")) other.setAttribute("aria-pressed", String(other === button));
    redraw();
  });
  new ResizeObserver(redraw).observe($("charts"));
  redraw();
}
