// The picture: one ray per pixel, marched through nested lattices of blocks. `reference.py` computes the same in torch.

export const vertexShader = `#version 300 es
void main() {
  // One triangle that covers the screen.
  gl_Position = vec4(gl_VertexID == 1 ? 3.0 : -1.0, gl_VertexID == 2 ? 3.0 : -1.0, 0.0, 1.0);
}`;

// `shaded`: with features and network; without them it compiles in a fraction of the time.
export function fragmentShader(scene, shaded) {
  const number = (value) => (Number.isInteger(value) ? `${value}.0` : `${value}`);
  return `#version 300 es
precision highp float;
precision highp int;
precision highp sampler3D;
precision highp usampler3D;

uniform usampler3D blocks;  // x, y, z: place in the atlas; w: how many blocks may be leapt over, 0 where one is
uniform sampler3D base;     // red, green, blue, density code
uniform sampler3D features;
uniform vec3 center, extent, atlas;  // extent: half the box of level 0; atlas: its size in texels
uniform ivec3 counts;                // blocks per axis
uniform vec3 eye;
uniform mat3 axes;        // columns: right, up, backward
uniform vec4 lens;        // focal lengths and principal point, in pixels
uniform float height;     // of the picture, in pixels
uniform vec3 background;
uniform int view;         // 0: colour, 1: depth
uniform vec2 depthRange;
${shaded ? "uniform mat4 first[16], second[16], third[4];" : ""}
out vec4 color;

const int LEVELS = ${scene.levels};
const int MAX_STEPS = ${scene.maxSteps};
const float CELLS = 7.0;
const float BLOCK = 8.0;
const float VOXEL = ${number(scene.voxel)};
const float STEP = ${number(scene.step)};
const float NUDGE = ${number(scene.nudge)};
const float NEAR = ${number(scene.near)};
const float LAST_LIGHT = ${number(scene.lastLight)};
const float LOW = ${number(scene.density[0])};
const float HIGH = ${number(scene.density[1])};
const float FEATURE_SCALE = ${number(scene.featureScale)};

float least(vec3 v) { return min(v.x, min(v.y, v.z)); }
float most(vec3 v) { return max(v.x, max(v.y, v.z)); }

// Where a ray enters and leaves the box, scaled.
vec2 boxSpan(vec3 origin, vec3 inverse, float scale) {
  vec3 a = (center - origin - extent * scale) * inverse;
  vec3 b = (center - origin + extent * scale) * inverse;
  return vec2(most(min(a, b)), least(max(a, b)));
}

${shaded ? networkSource : ""}

vec3 depthColor(float x) {
  const vec3 c0 = vec3(0.99, 0.91, 0.15), c1 = vec3(0.37, 0.79, 0.38), c2 = vec3(0.13, 0.57, 0.55);
  const vec3 c3 = vec3(0.23, 0.32, 0.55), c4 = vec3(0.27, 0.00, 0.33);
  float y = clamp(x, 0.0, 1.0) * 4.0;
  return y < 1.0 ? mix(c0, c1, y) : y < 2.0 ? mix(c1, c2, y - 1.0) : y < 3.0 ? mix(c2, c3, y - 2.0) : mix(c3, c4, y - 3.0);
}

void main() {
  vec2 pixel = vec2(gl_FragCoord.x, height - gl_FragCoord.y);
  vec3 direction = normalize(axes * vec3((pixel.x - lens.z) / lens.x, -(pixel.y - lens.w) / lens.y, -1.0));
  vec3 safe = mix(direction, vec3(1e-8), lessThan(abs(direction), vec3(1e-8)));
  vec3 inverse = 1.0 / safe;
  vec2 span = boxSpan(eye, inverse, exp2(float(LEVELS - 1)));
  float t = max(span.x, NEAR);
  float light = 1.0, depth = 0.0;
  vec3 summed = vec3(0.0);
  vec4 carried = vec4(0.0);
  float scale = 1.0, blockEnd = -1.0;  // of the block in which the ray is
  vec3 blockLow = vec3(0.0), slot = vec3(0.0);
  for (int i = 0; i < MAX_STEPS; i++) {
    if (!(t < span.y) || light < LAST_LIGHT) break;
    vec3 position = eye + direction * t;
    if (t >= blockEnd) {
      int level = 0;
      if (LEVELS > 1) level = min(int(ceil(log2(max(most(abs((position - center) / extent)), 1.0)))), LEVELS - 1);
      scale = exp2(float(level));
      vec3 place = ((position - center) / scale + extent) / VOXEL;
      ivec3 block = clamp(ivec3(floor(place / CELLS)), ivec3(0), counts - 1);
      uvec4 entry = texelFetch(blocks, ivec3(block.xy, block.z + level * counts.z), 0);
      // To the border of the block, or of the cube of blocks that are known to be empty; but not into another level.
      float skip = max(float(entry.w), 1.0);
      vec3 ahead = min(vec3(block) + skip, vec3(counts)), behind = max(vec3(block) - skip + 1.0, 0.0);
      vec3 border = mix(behind, ahead, greaterThan(safe, vec3(0.0))) * CELLS;
      float end = t + max(least((border - place) * VOXEL * scale * inverse), 0.0);
      if (level > 0) {
        vec2 inner = boxSpan(eye, inverse, scale * 0.5);
        if (inner.x < inner.y && inner.x > t) end = min(end, inner.x);
      }
      if (entry.w != 0u) {
        t = end + NUDGE * VOXEL * scale;
        continue;
      }
      blockEnd = end;
      blockLow = vec3(block) * CELLS;
      slot = vec3(entry.xyz);
    }
    vec3 local = clamp(((position - center) / scale + extent) / VOXEL - blockLow, 0.0, CELLS);
    vec3 texel = (slot * BLOCK + 0.5 + local) / atlas;
    vec4 found = textureLod(base, texel, 0.0);
    float thickness = (exp(LOW + found.a * (HIGH - LOW)) - exp(LOW)) * STEP;
    if (thickness > 0.0) {
      float weight = light * (1.0 - exp(-thickness));
      summed += weight * found.rgb;
      depth += weight * t;
      light -= weight;
      ${shaded ? "carried += weight * (textureLod(features, texel, 0.0) - 0.5) * FEATURE_SCALE;" : ""}
    }
    t += STEP * VOXEL * scale;
  }
  float opacity = 1.0 - light;
  if (view == 1) {
    float mean = depth / max(opacity, 1e-6);
    color = vec4(mix(background, depthColor((mean - depthRange.x) / (depthRange.y - depthRange.x)), opacity), 1.0);
    return;
  }
  ${shaded ? "summed += opacity * network(summed, carried, direction);" : ""}
  color = vec4(clamp(summed + light * background, 0.0, 1.0), 1.0);
}`;
}

// Sixteen inputs: base colour, features, eight functions of the direction, one. Rows of four, matrices of 4 x 4.
const networkSource = `
vec4 row(mat4 m[16], int i, vec4 a, vec4 b, vec4 c, vec4 d) {
  return m[i] * a + m[i + 1] * b + m[i + 2] * c + m[i + 3] * d;
}

vec3 network(vec3 summed, vec4 carried, vec3 v) {
  vec4 a = vec4(summed, carried.x);
  vec4 b = vec4(carried.yzw, v.x);
  vec4 c = vec4(v.y, v.z, 2.0 * v.x * v.y, 2.0 * v.y * v.z);
  vec4 d = vec4(2.0 * v.x * v.z, v.x * v.x - v.y * v.y, 1.5 * v.z * v.z - 0.5, 1.0);
  vec4 e = max(row(first, 0, a, b, c, d), 0.0), f = max(row(first, 4, a, b, c, d), 0.0);
  vec4 g = max(row(first, 8, a, b, c, d), 0.0), h = max(row(first, 12, a, b, c, d), 0.0);
  a = max(row(second, 0, e, f, g, h), 0.0);
  b = max(row(second, 4, e, f, g, h), 0.0);
  c = max(row(second, 8, e, f, g, h), 0.0);
  d = max(row(second, 12, e, f, g, h), 0.0);
  return (third[0] * a + third[1] * b + third[2] * c + third[3] * d).xyz;
}`;

// Row-major weights (outputs x 16) as matrices of 4 x 4 in WebGL's column order, missing outputs as zeros.
export function asMatrices(weights, outputs) {
  const rows = Math.ceil(outputs / 4);
  const result = new Float32Array(rows * 64);
  for (let i = 0; i < rows * 4; i++) {
    for (let j = 0; j < 16; j++) {
      const matrix = Math.floor(i / 4) * 4 + Math.floor(j / 4);
      result[matrix * 16 + (j % 4) * 4 + (i % 4)] = i < outputs ? weights[i * 16 + j] : 0;
    }
  }
  return result;
}
