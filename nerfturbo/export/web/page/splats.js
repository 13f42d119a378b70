// Splats (.splat, 32 bytes each) as blended squares, sorted from far to near whenever the camera moves. The projection is
// that of 3D Gaussian Splatting: `splats/raster.py` has it in torch.

import { OrbitCamera } from "./camera.js";
import { Controls } from "./controls.js";

const BYTES = 32;
const WIDE = 2048; // texels of a row of the texture; three hold one splat
const BINS = 1 << 16;

const vertexShader = `#version 300 es
precision highp float;
precision highp usampler2D;
uniform usampler2D data;
uniform mat3 axes; // of the camera in the world: right, down, forward
uniform vec3 eye;
uniform vec4 lens; // focal lengths and centre in pixels
uniform vec2 size;
in vec2 corner;
in uint index;
out vec2 place;
out vec4 color;

vec4 texel(uint k) {
  uint at = index * 3u + k;
  return uintBitsToFloat(texelFetch(data, ivec2(at % ${WIDE}u, at / ${WIDE}u), 0));
}

void main() {
  gl_Position = vec4(0.0, 0.0, 2.0, 1.0); // outside
  uint first = index * 3u;
  uint packed = texelFetch(data, ivec2(first % ${WIDE}u, first / ${WIDE}u), 0).w;
  vec4 head = texel(0u), one = texel(1u), two = texel(2u);
  color = vec4(packed & 255u, (packed >> 8) & 255u, (packed >> 16) & 255u, packed >> 24) / 255.0;
  vec3 local = transpose(axes) * (head.xyz - eye);
  if (local.z <= 0.01 || color.a * 255.0 <= 1.0) return;
  vec2 plane = local.xy / local.z, scale = lens.xy / local.z;
  vec2 beside = abs(plane - (0.5 * size - lens.zw) / lens.xy) - 0.5 * size / lens.xy;
  if (max(beside.x, beside.y) >= 0.15) return; // large splats far outside would veil the picture
  mat3 covariance = mat3(one.x, one.y, one.z, one.y, one.w, two.x, one.z, two.x, two.y);
  vec3 across = scale.x * (axes[0] - plane.x * axes[2]), down = scale.y * (axes[1] - plane.y * axes[2]);
  float xx = dot(across, covariance * across) + 0.3, yy = dot(down, covariance * down) + 0.3;
  float xy = dot(across, covariance * down);
  float mean = 0.5 * (xx + yy), apart = length(vec2(0.5 * (xx - yy), xy));
  vec2 axis = abs(xy) > 1e-6 ? normalize(vec2(xy, mean + apart - xx)) : (xx >= yy ? vec2(1.0, 0.0) : vec2(0.0, 1.0));
  vec2 deviations = sqrt(vec2(mean + apart, max(mean - apart, 1e-6)));
  place = corner * sqrt(2.0 * log(color.a * 255.0)); // where alpha falls below 1/255
  vec2 offset = axis * place.x * deviations.x + vec2(-axis.y, axis.x) * place.y * deviations.y;
  vec2 pixel = plane * lens.xy + lens.zw + offset;
  gl_Position = vec4(pixel.x / size.x * 2.0 - 1.0, 1.0 - pixel.y / size.y * 2.0, 0.0, 1.0);
}`;

const fragmentShader = `#version 300 es
precision highp float;
in vec2 place;
in vec4 color;
out vec4 result;
void main() {
  float alpha = min(0.99, color.a * exp(-0.5 * dot(place, place)));
  if (alpha < 1.0 / 255.0) discard;
  result = vec4(color.rgb * alpha, alpha);
}`;

class Splats {
  constructor(canvas, bytes) {
    const gl = canvas.getContext("webgl2", { antialias: false, alpha: false, depth: false });
    if (!gl) throw new Error("This browser has no WebGL2, or graphics acceleration is switched off.");
    this.gl = gl;
    this.count = bytes.length / BYTES;
    const program = gl.createProgram();
    for (const [kind, source] of [[gl.VERTEX_SHADER, vertexShader], [gl.FRAGMENT_SHADER, fragmentShader]]) {
      const shader = gl.createShader(kind);
      gl.shaderSource(shader, source);
      gl.compileShader(shader);
      if (!gl.getShaderParameter(shader, gl.COMPILE_STATUS)) throw new Error(gl.getShaderInfoLog(shader));
      gl.attachShader(program, shader);
    }
    gl.linkProgram(program);
    gl.useProgram(program);
    this.at = (name) => gl.getUniformLocation(program, name);
    this.upload(bytes);
    const attribute = (name, values, width) => {
      const buffer = gl.createBuffer();
      gl.bindBuffer(gl.ARRAY_BUFFER, buffer);
      gl.bufferData(gl.ARRAY_BUFFER, values, gl.DYNAMIC_DRAW);
      const place = gl.getAttribLocation(program, name);
      gl.enableVertexAttribArray(place);
      if (width === 2) gl.vertexAttribPointer(place, 2, gl.FLOAT, false, 0, 0);
      else gl.vertexAttribIPointer(place, 1, gl.UNSIGNED_INT, 0, 0);
      gl.vertexAttribDivisor(place, width === 2 ? 0 : 1);
    };
    this.order = new Uint32Array(this.count);
    attribute("corner", new Float32Array([-1, -1, 1, -1, -1, 1, 1, 1]), 2);
    attribute("index", this.order, 1); // stays bound
    gl.enable(gl.BLEND);
    gl.blendFunc(gl.ONE, gl.ONE_MINUS_SRC_ALPHA);
  }

  // Position and colour as they are; scales and quaternion as a covariance.
  upload(bytes) {
    const { gl, count } = this;
    const rows = Math.max(1, Math.ceil((count * 3) / WIDE));
    const largest = gl.getParameter(gl.MAX_TEXTURE_SIZE);
    if (rows > largest) throw new Error(`This device takes textures of ${largest} rows, the splats need ${rows}.`);
    const words = new Uint32Array(rows * WIDE * 4);
    const [floats, from] = [new Float32Array(words.buffer), new Float32Array(bytes.buffer)];
    const colors = new Uint32Array(bytes.buffer);
    this.points = new Float32Array(count * 3);
    for (let i = 0; i < count; i++) {
      let [w, x, y, z] = [28, 29, 30, 31].map((k) => (bytes[BYTES * i + k] - 128) / 128);
      const length = Math.hypot(w, x, y, z) || 1;
      [w, x, y, z] = [w / length, x / length, y / length, z / length];
      const turn = [
        [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
        [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
        [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
      ];
      const squares = [from[8 * i + 3] ** 2, from[8 * i + 4] ** 2, from[8 * i + 5] ** 2];
      const entry = (a, b) => squares.reduce((sum, square, k) => sum + square * turn[a][k] * turn[b][k], 0);
      this.points.set(from.subarray(8 * i, 8 * i + 3), 3 * i);
      floats.set(from.subarray(8 * i, 8 * i + 3), 12 * i);
      words[12 * i + 3] = colors[8 * i + 6];
      floats.set([entry(0, 0), entry(0, 1), entry(0, 2), entry(1, 1), entry(1, 2), entry(2, 2)], 12 * i + 4);
    }
    gl.bindTexture(gl.TEXTURE_2D, gl.createTexture());
    for (const name of [gl.TEXTURE_MIN_FILTER, gl.TEXTURE_MAG_FILTER]) gl.texParameteri(gl.TEXTURE_2D, name, gl.NEAREST);
    gl.texImage2D(gl.TEXTURE_2D, 0, gl.RGBA32UI, WIDE, rows, 0, gl.RGBA_INTEGER, gl.UNSIGNED_INT, words);
  }

  // From far to near along the viewing direction, by counting.
  sort(eye, forward) {
    const { points, count, order } = this;
    const depths = new Float32Array(count);
    let [low, high] = [Infinity, -Infinity];
    for (let i = 0; i < count; i++) {
      const depth = (points[3 * i] - eye[0]) * forward[0] + (points[3 * i + 1] - eye[1]) * forward[1] + (points[3 * i + 2] - eye[2]) * forward[2];
      depths[i] = depth;
      low = Math.min(low, depth);
      high = Math.max(high, depth);
    }
    const [starts, scale] = [new Uint32Array(BINS + 1), (BINS - 1) / Math.max(high - low, 1e-9)];
    const bin = (i) => Math.trunc((high - depths[i]) * scale);
    for (let i = 0; i < count; i++) starts[bin(i) + 1]++;
    for (let k = 0; k < BINS; k++) starts[k + 1] += starts[k];
    for (let i = 0; i < count; i++) order[starts[bin(i)]++] = i;
    this.gl.bufferSubData(this.gl.ARRAY_BUFFER, 0, order);
  }

  draw({ eye, axes, lens, width, height }) {
    const { gl } = this;
    const [right, up, backward] = axes;
    const [down, forward] = [up, backward].map((axis) => axis.map((value) => -value));
    this.sort(eye, forward);
    gl.viewport(0, 0, width, height);
    gl.clearColor(1, 1, 1, 1);
    gl.clear(gl.COLOR_BUFFER_BIT);
    gl.uniformMatrix3fv(this.at("axes"), false, [...right, ...down, ...forward]);
    gl.uniform3fv(this.at("eye"), eye);
    gl.uniform4fv(this.at("lens"), lens);
    gl.uniform2f(this.at("size"), width, height);
    gl.drawArraysInstanced(gl.TRIANGLE_STRIP, 0, 4, this.count);
  }

  // (height, width, 4) bytes from the top row on.
  pixels(view) {
    const { gl } = this;
    [gl.canvas.width, gl.canvas.height] = [view.width, view.height];
    this.draw(view);
    const [rows, bytes] = [view.height, new Uint8Array(view.width * view.height * 4)];
    gl.readPixels(0, 0, view.width, rows, gl.RGBA, gl.UNSIGNED_BYTE, bytes);
    const line = view.width * 4;
    return Uint8Array.from(bytes, (_, k) => bytes[(rows - 1 - Math.floor(k / line)) * line + (k % line)]);
  }
}

function open() {
  const text = atob(document.getElementById("splats").textContent.trim());
  const bytes = Uint8Array.from(text, (letter) => letter.charCodeAt(0));
  if (bytes.length === 0 || bytes.length % BYTES) throw new Error("The page is incomplete: a part of its splats is missing.");
  const canvas = document.getElementById("canvas");
  const camera = new OrbitCamera(JSON.parse(document.getElementById("camera").textContent));
  const splats = new Splats(canvas, bytes);
  let due = false;
  const draw = () => {
    due = false;
    const ratio = Math.min(devicePixelRatio || 1, 2);
    const [width, height] = [canvas.clientWidth, canvas.clientHeight].map((side) => Math.max(1, Math.round(side * ratio)));
    [canvas.width, canvas.height] = [width, height];
    splats.draw(camera.view(width, height));
  };
  const want = () => {
    if (!due) requestAnimationFrame(draw);
    due = true;
  };
  camera.follow(location.hash);
  new Controls(canvas, camera, want);
  addEventListener("resize", want);
  addEventListener("hashchange", () => camera.follow(location.hash) && want());
  document.getElementById("said").textContent = "";
  want();
  return { camera, splats };
}

try {
  window.nerfturbo = { page: open(), ready: Promise.resolve() };
} catch (error) {
  document.getElementById("said").textContent = `The scene cannot be shown. ${error.message}`;
}
