// WebGL2: textures of blocks, one program, pictures of any size.

import { asMatrices, fragmentShader, vertexShader } from "./shader.glsl.js";
import { BLOCK, SceneError } from "./loader.js";

export class Renderer {
  constructor(canvas, scene, atlas) {
    const options = { antialias: false, alpha: false, depth: false, stencil: false, powerPreference: "high-performance" };
    const gl = canvas.getContext("webgl2", options);
    if (!gl) throw new SceneError("This browser has no WebGL2, or graphics acceleration is switched off. Current Chrome, Edge, Firefox and Safari have it.");
    this.gl = gl;
    this.scene = scene;
    this.atlas = atlas;
    this.checkSizes();
    gl.bindVertexArray(gl.createVertexArray());
    const integers = [gl.TEXTURE_3D, 1, gl.RGBA8UI, scene.blocks[0], scene.blocks[1], scene.blocks[2] * scene.levels];
    this.texels = atlas.map((blocks) => blocks * BLOCK);
    this.textures = { blocks: this.texture(0, integers, gl.NEAREST) };
    this.use(this.compile(false));
  }

  // What the picture is drawn with from now on. The first program has no network: the driver is done with it soon.
  use(program) {
    const { gl, scene } = this;
    if (!gl.getProgramParameter(program, gl.LINK_STATUS)) {
      const logs = gl.getAttachedShaders(program).map((shader) => gl.getShaderInfoLog(shader));
      throw new SceneError(`the graphics driver refuses the shader: ${[gl.getProgramInfoLog(program), ...logs].join(" ").trim()}`);
    }
    this.program = program;
    this.places = new Map();
    gl.useProgram(program);
    ["blocks", "base", "features"].forEach((name, unit) => gl.uniform1i(this.at(name), unit));
    gl.uniform3fv(this.at("center"), scene.center);
    gl.uniform3fv(this.at("extent"), scene.blocks.map((blocks) => blocks * 7 * scene.voxel * 0.5));
    gl.uniform3fv(this.at("atlas"), this.texels);
    gl.uniform3iv(this.at("counts"), scene.blocks);
    const outputs = { first: 16, second: 16, third: 3 };
    Object.entries(outputs).forEach(([name, n], i) => {
      if (this.at(name)) gl.uniformMatrix4fv(this.at(name), false, asMatrices(scene.network[i], n));
    });
  }

  checkSizes() {
    const largest = this.gl.getParameter(this.gl.MAX_3D_TEXTURE_SIZE);
    const [x, y, z] = this.scene.blocks;
    const needed = Math.max(x, y, z * this.scene.levels, ...this.atlas.map((blocks) => blocks * BLOCK));
    if (needed > largest) {
      throw new SceneError(`this device takes 3D textures of ${largest} texels a side, the scene needs ${needed}; export it with a smaller --budget-mb`);
    }
  }

  // Drivers compile beside the page until somebody asks for the result, as `use` does.
  compile(shaded) {
    const { gl } = this;
    const program = gl.createProgram();
    for (const [kind, source] of [[gl.VERTEX_SHADER, vertexShader], [gl.FRAGMENT_SHADER, fragmentShader(this.scene, shaded)]]) {
      const shader = gl.createShader(kind);
      gl.shaderSource(shader, source);
      gl.compileShader(shader);
      gl.attachShader(program, shader);
    }
    gl.linkProgram(program);
    return program;
  }

  texture(unit, storage, filter) {
    const { gl } = this;
    gl.activeTexture(gl.TEXTURE0 + unit);
    const texture = gl.createTexture();
    gl.bindTexture(gl.TEXTURE_3D, texture);
    gl.texStorage3D(...storage);
    for (const axis of ["S", "T", "R"]) gl.texParameteri(gl.TEXTURE_3D, gl[`TEXTURE_WRAP_${axis}`], gl.CLAMP_TO_EDGE);
    gl.texParameteri(gl.TEXTURE_3D, gl.TEXTURE_MIN_FILTER, filter);
    gl.texParameteri(gl.TEXTURE_3D, gl.TEXTURE_MAG_FILTER, filter);
    if (gl.getError() === gl.OUT_OF_MEMORY) throw new SceneError("this device has too little graphics memory for the scene");
    return texture;
  }

  at(name) {
    if (!this.places.has(name)) this.places.set(name, this.gl.getUniformLocation(this.program, name));
    return this.places.get(name);
  }

  setIndex(content) {
    const { gl } = this;
    const [x, y, z] = this.scene.blocks;
    gl.activeTexture(gl.TEXTURE0);
    gl.texSubImage3D(gl.TEXTURE_3D, 0, 0, 0, 0, x, y, z * this.scene.levels, gl.RGBA_INTEGER, gl.UNSIGNED_BYTE, content);
  }

  // Blocks first..last of `texels`, which holds all of them one after the other.
  setTexels(kind, texels, blocks, first, last) {
    const { gl } = this;
    const unit = kind === "base" ? 1 : 2;
    this.textures[kind] ??= this.texture(unit, [gl.TEXTURE_3D, 1, gl.RGBA8, ...this.texels], gl.LINEAR);
    gl.activeTexture(gl.TEXTURE0 + unit);
    for (let slot = first; slot < last; slot++) {
      const [x, y, z] = blocks.place(slot).map((at) => at * BLOCK);
      gl.texSubImage3D(gl.TEXTURE_3D, 0, x, y, z, BLOCK, BLOCK, BLOCK, gl.RGBA, gl.UNSIGNED_BYTE, texels, slot * 2048);
    }
  }

  // view: {eye, axes, lens, width, height}; look: {background, depth, depthRange}
  draw(view, look) {
    const { gl } = this;
    gl.viewport(0, 0, view.width, view.height);
    gl.uniform3fv(this.at("eye"), view.eye);
    gl.uniformMatrix3fv(this.at("axes"), false, view.axes.flat());
    gl.uniform4fv(this.at("lens"), view.lens);
    gl.uniform1f(this.at("height"), view.height);
    gl.uniform3fv(this.at("background"), look.background);
    gl.uniform1i(this.at("view"), look.depth ? 1 : 0);
    gl.uniform2fv(this.at("depthRange"), look.depthRange);
    gl.drawArrays(gl.TRIANGLES, 0, 3);
  }

  // The same picture off screen: bytes, four per pixel, the top row first.
  pixels(view, look) {
    const { gl } = this;
    const target = gl.createTexture();
    gl.activeTexture(gl.TEXTURE3);
    gl.bindTexture(gl.TEXTURE_2D, target);
    gl.texStorage2D(gl.TEXTURE_2D, 1, gl.RGBA8, view.width, view.height);
    const frame = gl.createFramebuffer();
    gl.bindFramebuffer(gl.FRAMEBUFFER, frame);
    gl.framebufferTexture2D(gl.FRAMEBUFFER, gl.COLOR_ATTACHMENT0, gl.TEXTURE_2D, target, 0);
    this.draw(view, look);
    const row = view.width * 4;
    const read = new Uint8Array(row * view.height);
    gl.readPixels(0, 0, view.width, view.height, gl.RGBA, gl.UNSIGNED_BYTE, read);
    gl.bindFramebuffer(gl.FRAMEBUFFER, null);
    gl.deleteFramebuffer(frame);
    gl.deleteTexture(target);
    const result = new Uint8Array(read.length);
    for (let y = 0; y < view.height; y++) result.set(read.subarray(y * row, (y + 1) * row), (view.height - 1 - y) * row);
    return result;
  }
}
