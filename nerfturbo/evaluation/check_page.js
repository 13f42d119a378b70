const data = JSON.parse($("data").textContent);
const COLORS = ["#ff5a5f", "#ffb400", "#00d1b2", "#3ea6ff", "#c77dff", "#b8e62e", "#ff7ac6", "#ffd9a0", "#7ef0ff", "#ff8f3a"];
const px = (value, digits = 2) => (isNumber(value) ? value.toFixed(digits) + " px" : "–");

document.title = `${data.scene}: poses – nerfturbo`;
$("title").textContent = data.text;
$("lead").textContent = `${data.scene}: ${data.images.length} of ${data.views} images, compared at ${data.size.join(" × ")} pixels. The error of a match is its Sampson distance from the epipolar geometry of the given cameras.`;
const tile = (label, value, main = false) => $("tiles").append(make("div", { class: main ? "tile main" : "tile" }, make("b", {}, value), make("span", {}, label)));
tile("median error", px(data.error), true);
tile("features alone allow", px(data.floor));
tile("matches in pairs", `${data.matches.toLocaleString("en")} / ${data.pairs.length}`);
tile("images with too few matches", String(data.few_matches.length));

function table(target, head, rows) {
  target.append(make("thead", {}, make("tr", {}, ...head.map((text) => make("th", {}, text)))),
    make("tbody", {}, ...rows.map((cells) => make("tr", {}, ...cells.map((cell) => make("td", {}, cell))))));
}
$("lens").hidden = !data.better.length;
table($("better"), ["", "given", "fits better", "standard deviation", "change"], data.better.map((row) => [row.what, row.given.toFixed(1), row.better.toFixed(1), row.deviation.toFixed(2), ((100 * (row.better - row.given)) / row.given).toFixed(2) + " %"]));
$("plots").hidden = !data.by_image.length;
$("drawn").hidden = !data.drawings.length;
table($("worst"), ["image", data.better.length ? "error left" : "error", "pairs"], data.by_image.slice(0, 5).map((row) => [row.image, px(row.left), String(row.pairs)]));

/* Bars: one value each, with a title; the axis below is written by `label`. */
function bars(svg, values, { label, title, wrong = () => false, format = (tick) => quantity(tick) }) {
  const width = Math.max(240, svg.clientWidth), height = 200, pad = { left: 42, right: 8, top: 10, bottom: 24 };
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.replaceChildren();
  const high = Math.max(...values, 1e-9) * 1.05, step = (width - pad.left - pad.right) / values.length;
  const y = (value) => height - pad.bottom - (value / high) * (height - pad.top - pad.bottom);
  for (const tick of niceTicks(0, high, 4)) svg.append(shape("line", { class: "gridline", x1: pad.left, x2: width - pad.right, y1: y(tick), y2: y(tick) }), shape("text", { x: pad.left - 6, y: y(tick) + 4, "text-anchor": "end" }, format(tick)));
  values.forEach((value, place) => {
    const bar = shape("rect", { x: pad.left + place * step, y: y(value), width: Math.max(1, step - 1), height: Math.max(0, height - pad.bottom - y(value)), fill: wrong(place) ? "var(--bad)" : "var(--accent)" });
    bar.append(shape("title", {}, title(place)));
    svg.append(bar);
  });
  for (const [share, text] of label) svg.append(shape("text", { x: pad.left + share * (width - pad.left - pad.right), y: height - 7, "text-anchor": share === 0 ? "start" : share === 1 ? "end" : "middle" }, text));
}

/* Pairs: a dot for each, both ways; darker is worse. */
function matrix(svg) {
  const width = Math.max(240, svg.clientWidth), n = data.images.length, cell = Math.min(width - 80, 320) / n, left = 42;
  svg.style.height = n * cell + 28 + "px";
  svg.setAttribute("viewBox", `0 0 ${width} ${n * cell + 28}`);
  svg.replaceChildren(shape("rect", { x: left, y: 0, width: n * cell, height: n * cell, fill: "var(--grid)" }));
  const high = Math.max(1, 3 * data.error);
  for (const [i, j, matches, error] of data.pairs) for (const [a, b] of [[i, j], [j, i]]) {
    const share = Math.min(1, error / high), mark = shape("rect", { x: left + a * cell, y: b * cell, width: Math.max(1.5, cell), height: Math.max(1.5, cell) });
    mark.style.fill = `color-mix(in srgb, var(--bad) ${Math.round(100 * share)}%, var(--accent))`;
    mark.append(shape("title", {}, `${data.images[i]} and ${data.images[j]}: ${px(error)}, ${matches} matches`));
    svg.append(mark);
  }
  svg.append(shape("text", { x: left, y: n * cell + 16 }, `image by image; red: ${px(high, 1)} and more`));
}

function plots() {
  if (!data.by_image.length) return;
  const top = 4 * Math.max(0.5, data.error), n = data.histogram.length;
  bars($("histogram"), data.histogram, { label: [0, 0.25, 0.5, 0.75, 1].map((share) => [share, (share * top).toFixed(1)]), title: (place) => `${((place * top) / n).toFixed(2)} to ${(((place + 1) * top) / n).toFixed(2)} px: ${data.histogram[place]} matches` });
  const rows = data.images.map((name) => data.by_image.find((row) => row.image === name) || { image: name, error: 0 });
  bars($("images"), rows.map((row) => row.error), { label: [[0, data.images[0]], [1, data.images.at(-1)]], title: (place) => `${rows[place].image}: ${px(rows[place].error)}`, wrong: (place) => data.wrong_images.includes(rows[place].image) });
  matrix($("pairs"));
}
for (const { names, error, sides } of data.drawings) sides.forEach(({ size, image, points, lines }, side) => {
  const [width, height] = size, svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": names[side] });
  svg.style.cssText = "display:block;width:100%;height:auto;overflow:hidden";
  svg.append(shape("image", { href: image, width, height }));
  const unit = Math.max(width, height) / 400;
  lines.forEach((line, place) => svg.append(shape("polyline", { points: line.map((point) => point.join(",")).join(" "), fill: "none", stroke: COLORS[place % COLORS.length], "stroke-width": unit })));
  points.forEach(([x, y], place) => svg.append(shape("circle", { cx: x, cy: y, r: 3.2 * unit, fill: COLORS[place % COLORS.length], stroke: "#000", "stroke-width": 0.6 * unit })));
  $("drawings").append(make("figure", {}, svg, make("figcaption", {}, `${names[side]}, lines of ${names[1 - side]}: ${px(error)}`)));
});
new ResizeObserver(plots).observe($("plots"));
plots();
