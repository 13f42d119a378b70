// The page: reads the scene's header, loads its parts while it already draws, and listens to buttons.

import { OrbitCamera } from "./camera.js";
import { Controls } from "./controls.js";
import { Blocks, SceneError, fileSource, inflate, inlineSource } from "./loader.js";
import { Pace } from "./pace.js";
import { Renderer } from "./renderer.js";
import { bindButtons, fillPanel, press, showError, showProgress, showSpeed, toast, togglePanel } from "./ui.js";

const BACKGROUNDS = [[1, 1, 1], [0, 0, 0], [0.5, 0.5, 0.5]];
const FIRST_PARTS = 2; // where the blocks lie, and those that are seen most
const LONGEST_WAIT = 3000; // milliseconds that loading waits for the first picture
const STILL_WAIT = 10000; // and graphics for the still: until a browser paints at all, there is nothing to draw on
const MAX_RATIO = 2; // device pixels per CSS pixel that are drawn

class Page {
  constructor(scene, blocks) {
    this.scene = scene;
    this.canvas = document.getElementById("canvas");
    this.look = { background: BACKGROUNDS[0], depth: false, depthRange: [0, 1] };
    this.camera = new OrbitCamera(scene.camera);
    this.camera.follow(location.hash);
    this.blocks = blocks;
    this.renderer = new Renderer(this.canvas, scene, this.blocks.atlas);
    this.pace = new Pace((scale, done) => this.draw(scale, done));
    this.controls = new Controls(this.canvas, this.camera, () => this.moved());
    addEventListener("resize", () => this.pace.want());
    addEventListener("hashchange", () => {
      if (location.hash !== this.camera.link && this.camera.follow(location.hash)) this.pace.want();
    });
    this.canvas.addEventListener("webglcontextlost", (event) => {
      event.preventDefault();
      showError("The graphics device was lost", "Reload the page to go on.");
    });
    this.bind();
    fillPanel(scene);
  }

  bind() {
    const toggle = (id, change) => () => {
      press(id, change());
      this.pace.want(true);
    };
    const actions = {
      depth: toggle("depth", () => (this.look.depth = !this.look.depth)),
      backdrop: toggle("backdrop", () => {
        const next = (BACKGROUNDS.indexOf(this.look.background) + 1) % BACKGROUNDS.length;
        this.look.background = BACKGROUNDS[next];
        return next > 0;
      }),
      reset: () => this.controls.act(() => this.camera.reset()),
      shot: () => this.screenshot(),
      link: () => this.copyLink(),
      full: () => this.fullScreen(),
      info: togglePanel,
    };
    const keys = { z: "depth", b: "backdrop", p: "shot", l: "link", f: "full", i: "info" };
    bindButtons(actions, keys);
  }

  moved() {
    this.pace.want();
    clearTimeout(this.linkTimer);
    // Not history.replaceState: pages opened from a file may not call it.
    this.linkTimer = setTimeout(() => location.replace(this.camera.link), 400);
  }

  get lookNow() {
    const { radius, target } = this.scene.camera;
    const away = Math.hypot(...this.camera.eye.map((value, i) => value - target[i]));
    const near = Math.max(away - radius, this.scene.near, 0.02 * radius);
    return { ...this.look, depthRange: [near, Math.max(away + radius, 2 * near)] };
  }

  draw(scale, done) {
    const ratio = Math.min(devicePixelRatio || 1, MAX_RATIO) * scale;
    const size = (side) => Math.max(1, Math.round(side * ratio));
    const [width, height] = [size(this.canvas.clientWidth), size(this.canvas.clientHeight)];
    if (this.canvas.width !== width || this.canvas.height !== height) {
      this.canvas.width = width;
      this.canvas.height = height;
    }
    const { gl } = this.renderer;
    const began = performance.now();
    this.renderer.draw(this.camera.view(width, height), this.lookNow);
    const fence = gl.fenceSync(gl.SYNC_GPU_COMMANDS_COMPLETE, 0);
    gl.flush();
    const wait = () => {
      const state = gl.clientWaitSync(fence, 0, 0);
      if (state === gl.TIMEOUT_EXPIRED) return setTimeout(wait, 1);
      gl.deleteSync(fence);
      const spent = performance.now() - began;
      this.frames = (this.frames ?? 0) + 1;
      if (this.hasTexels && !this.pictureMark) {
        this.pictureMark = performance.mark("first-picture");
        document.getElementById("still").remove();
        this.pictured?.();
      }
      showSpeed(spent, width, height);
      return done(spent);
    };
    setTimeout(wait, 0);
  }

  screenshot() {
    const ratio = Math.min(devicePixelRatio || 1, MAX_RATIO);
    const [width, height] = [this.canvas.clientWidth, this.canvas.clientHeight].map((side) => Math.round(side * ratio));
    const pixels = this.renderer.pixels(this.camera.view(width, height), this.lookNow);
    const sheet = document.createElement("canvas");
    [sheet.width, sheet.height] = [width, height];
    sheet.getContext("2d").putImageData(new ImageData(new Uint8ClampedArray(pixels.buffer), width, height), 0, 0);
    sheet.toBlob((blob) => {
      const link = document.createElement("a");
      link.download = `${this.scene.facts.name.replace(/[^\w-]+/g, "_") || "scene"}.png`;
      link.href = URL.createObjectURL(blob);
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 10000);
    });
    toast("Picture saved");
  }

  async copyLink() {
    location.replace(this.camera.link);
    try {
      await navigator.clipboard.writeText(location.href);
      toast("Link to this view copied");
    } catch {
      toast("The page's address is the link to this view");
    }
  }

  fullScreen() {
    if (document.fullscreenElement) document.exitFullscreen();
    else document.documentElement.requestFullscreen?.().catch(() => toast("The browser allows no full screen here"));
  }

  // What is seen most comes first; unpacking the rest would only hold its picture up. A page in a hidden tab draws none.
  async firstPicture() {
    this.hasTexels = true;
    this.pace.want();
    await new Promise((resolve) => {
      this.pictured = resolve;
      setTimeout(resolve, document.hidden ? 0 : LONGEST_WAIT);
    });
  }

  // `parts` as `unpacked` gives them, `first` those of them that were taken before.
  async load(first, parts) {
    let shaded = null;
    this.pace.hurried = true;
    const add = async ([chunk, content]) => {
      if (chunk.kind === "blocks") {
        this.renderer.setIndex(content);
      } else {
        if (chunk.kind === "features") shaded ??= this.renderer.compile(true);
        this.renderer.setTexels(chunk.kind, content, this.blocks, chunk.first, chunk.last);
        if (chunk.kind === "base") this.renderer.setIndex(this.blocks.arrived(chunk.first, chunk.last));
        if (!this.hasTexels) await this.firstPicture();
        if (chunk.last === this.blocks.count) delete this.blocks.texels[chunk.kind]; // the textures have them
      }
      if (this.hasTexels) this.pace.want(); // before, every ray would walk through empty blocks for nothing
      await new Promise((resolve) => setTimeout(resolve, 0)); // let the page breathe
    };
    for (const part of first) await add(part);
    for await (const part of parts) await add(part);
    this.pace.hurried = false;
    if (shaded) this.renderer.use(shaded);
    showProgress(1, "");
    this.pace.want(true);
  }
}

// The parts of the scene as they come, each [chunk, what its texture takes].
async function* unpacked(scene, blocks) {
  const source = scene.folder ? fileSource(scene.folder) : inlineSource(document);
  const total = scene.chunks.reduce((sum, chunk) => sum + chunk.bytes, 0);
  let loaded = 0;
  for (const [index, chunk] of scene.chunks.entries()) {
    const kind = chunk.kind === "features" ? "reflections" : "scene";
    const tell = () => showProgress(Math.min(loaded / total, 0.999), `loading the ${kind}, ${(loaded / 1e6).toFixed(1)} of ${(total / 1e6).toFixed(1)} MB`);
    tell();
    const start = loaded;
    const bytes = await source(index, (n) => {
      loaded += n;
      tell();
    });
    const raw = await inflate(bytes, chunk, index);
    if (chunk.kind === "blocks") blocks.setPlaces(raw);
    yield [chunk, chunk.kind === "blocks" ? blocks.index() : blocks.decode(chunk, raw)];
    loaded = start + chunk.bytes;
  }
}

export async function start() {
  try {
    if (typeof DecompressionStream === "undefined") throw new SceneError("This browser is too old. It cannot unpack data (DecompressionStream): Chrome 80, Firefox 113 and Safari 16.4 or newer can.");
    const scene = JSON.parse(document.getElementById("scene").textContent);
    const blocks = new Blocks(scene);
    const parts = unpacked(scene, blocks);
    // Graphics start in a process of their own, and who asks for them waits: what the first picture needs comes before.
    const first = [];
    while (first.length < Math.min(FIRST_PARTS, scene.chunks.length)) first.push((await parts.next()).value);
    await Promise.race([stillShown, new Promise((resolve) => setTimeout(resolve, document.hidden ? 0 : STILL_WAIT))]);
    const page = new Page(scene, blocks);
    window.nerfturbo.page = page;
    await page.load(first, parts);
    return page;
  } catch (error) {
    showError("The scene cannot be shown", error instanceof SceneError ? error.message : `${error.name}: ${error.message}`);
    throw error;
  }
}

// For tests and for programs: `await nerfturbo.ready`, then nerfturbo.page.renderer.pixels(view, look).
window.nerfturbo = {};
window.nerfturbo.ready = start();
window.nerfturbo.ready.catch(() => {}); // shown on the page
