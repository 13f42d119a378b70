// What lies over the picture: buttons, progress, the information panel, messages. Text is always set as text.

const $ = (id) => document.getElementById(id);

export function showError(title, text) {
  $("error-title").textContent = title;
  $("error-text").textContent = text;
  $("error").hidden = false;
  $("progress").hidden = true;
  document.body.classList.add("failed");
}

export function showProgress(share, text) {
  $("progress").hidden = share >= 1;
  $("bar").style.width = `${Math.round(share * 100)}%`;
  $("progress").setAttribute("aria-valuenow", String(Math.round(share * 100)));
  $("progress-text").textContent = text;
}

let toastTimer = 0;
export function toast(text) {
  $("toast").textContent = text;
  $("toast").hidden = false;
  clearTimeout(toastTimer);
  toastTimer = setTimeout(() => ($("toast").hidden = true), 2500);
}

// actions: id of a button -> what it does; keys: key -> id.
export function bindButtons(actions, keys) {
  for (const [id, act] of Object.entries(actions)) $(id).addEventListener("click", act);
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in keys)) return;
    actions[keys[event.key]]();
    event.preventDefault();
  });
}

export function press(id, pressed) {
  $(id).setAttribute("aria-pressed", String(pressed));
}

export function togglePanel() {
  $("panel").hidden = !$("panel").hidden;
  press("info", !$("panel").hidden);
}

export function fillPanel(scene) {
  const facts = scene.facts;
  document.title = facts.name;
  $("title").textContent = facts.name;
  const decibels = (value) => (value === null || value === undefined ? "not measured" : `${value.toFixed(2)} dB`);
  const count = (value) => value.toLocaleString("en");
  const [x, y, z] = scene.blocks.map((blocks) => blocks * 7);
  const rows = [
    ["Against the field's render", decibels(facts.against_field)],
    ["Against the test photos", decibels(facts.against_photos)],
    ["The field, against the photos", decibels(facts.field_against_photos)],
    ["Size", `${(facts.bytes / 1e6).toFixed(1)} MB`],
    ["Cells", `${x} × ${y} × ${z}${scene.levels > 1 ? `, ${scene.levels} levels` : ""}`],
    ["Blocks", `${count(scene.nBlocks)} with ${count(scene.nVertices)} vertices`],
    ["View dependence", scene.network ? `${scene.nFeatures} features, a 16-16-3 network` : "none"],
    ["Baked in", `${facts.seconds.toFixed(0)} s`],
  ];
  for (const [name, value] of rows) {
    const [term, detail] = [document.createElement("dt"), document.createElement("dd")];
    term.textContent = name;
    detail.textContent = value;
    $("facts").append(term, detail);
  }
}

export function showSpeed(milliseconds, width, height) {
  $("speed").textContent = `${width} × ${height}, ${milliseconds.toFixed(0)} ms a frame`;
}
