const data = JSON.parse(document.getElementById("data").textContent);
const { metrics, config, curves, previews, views } = data;
/* Header and tiles */
function header() {
  const protocol = metrics.protocol || {};
  document.title = `${metrics.scene || data.run}: ${fixed(metrics.psnr, 2)} dB – nerfturbo`;
  $("eyebrow").textContent = "nerfturbo run report";
  $("title").textContent = metrics.scene && metrics.scene !== data.run ? `${metrics.scene} · ${data.run}` : data.run;
  const size = Array.isArray(protocol.resolution) ? protocol.resolution.flat().join(" × ") : "";
  $("lead").textContent = metrics.psnr === undefined ? "This run has not been scored yet." :
    `Scored on ${protocol.n_views} ${protocol.split} view${protocol.n_views === 1 ? "" : "s"} it was not trained on, ${size} pixels, background ${protocol.background}, ` +
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
  if (!data.turntable) return;
  const moving = data.turntable.startsWith("data:video") ? make("video", { autoplay: "", loop: "", muted: "", playsinline: "", controls: "" }) : make("img", { alt: "The scene along a camera path" });
  moving.muted = true;
  moving.src = data.turntable;
  $("turntable-figure").hidden = false;
  $("turntable").append(moving);
  $("turntable-caption").textContent = { orbit: "an orbit of the scene", arc: "an arc before the scene, where the images were taken", walk: "a walk through the cameras" }[(metrics.video || {}).path] || "a camera path";
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

/* Time by stage */
function stages() {
  const found = Object.entries(metrics.seconds_by_stage || {}).filter(([, seconds]) => isNumber(seconds) && seconds >= 0.05);
  const ranks = metrics.ranks || [];
  $("stages").hidden = !found.length && !ranks.length;
  ranks.forEach((use, rank) => {
    const busy = isNumber(use.gpu_utilisation) ? `, GPU busy ${fixed(use.gpu_utilisation, 0)}%` : "";
    const loading = `${fixed(use.data_ms, 3)} ms of data loading (${fixed(100 * use.data_share, 1)}%)`;
    $("ranks").append(make("dt", {}, ranks.length > 1 ? `rank ${rank}` : "a step"), make("dd", {}, `${fixed(use.step_ms, 3)} ms, ${loading}${busy}`));
  });
  if (!found.length) return;
  const most = Math.max(...found.map(([, seconds]) => seconds));
  for (const [name, seconds] of found) {
    const bar = make("div", { class: "bar" });
    bar.style.width = `${(100 * seconds) / most}%`;
    $("stage-bars").append(make("div", { class: name === "training" ? "row ours" : "row" }, make("span", {}, name), make("div", { class: "track" }, bar), make("span", {}, duration(seconds))));
  }
}

/* Charts */
function seriesOf(names, labels, transform = (value) => value) {
  return names.map((name, index) => ({
    label: labels[index], color: index ? "var(--second)" : "var(--accent)", dots: false,
    points: (curves.step || []).map((step, place) => ({ step, seconds: curves.seconds[place], y: transform(curves[name][place]) })).filter((point) => isNumber(point.y)),
  }));
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
  const scales = (curves.loss_scale || []).filter(isNumber);
  if (scales.some((value) => value !== scales[0]) || (scales[0] || 1) !== 1) list.push(new Chart({ title: "Loss scale (logarithmic)", series: seriesOf(["loss_scale"], ["scale"]), log: true }));
  if ((curves.learning_rate || []).some(isNumber)) list.push(new Chart({ title: "Learning rate (logarithmic)", series: seriesOf(["learning_rate"], ["rate"]), log: true, format: (value) => value.toExponential(0) }));
  $("charts").append(...list.map((chart) => chart.root));
  listenToAxis(list);
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
  $("command").textContent = metrics.command || "";
  $("made").hidden = !metrics.command && !data.beside.length;
  $("beside").append("In this folder: ", ...data.beside.flatMap((name, index) => [index ? ", " : "", make("a", { href: "./" + name.split("/").map(encodeURIComponent).join("/") }, name)]));
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
stages();
facts();
