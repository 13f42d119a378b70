// The scene's bytes: where they come from (elements of this page, or files beside it), checked and unpacked.
// `baked.py` writes them and says how they are laid out.

export const BLOCK = 8;
const TEXELS = 512;

export class SceneError extends Error {}

// Chunks that stand in the page itself, as base64. The page may still be arriving.
export function inlineSource(documentNode) {
  return async (index) => {
    const find = () => documentNode.getElementById(`chunk-${index}`);
    const complete = () => documentNode.readyState !== "loading" || documentNode.getElementById(`chunk-${index}-end`);
    while (!complete()) await new Promise((resolve) => setTimeout(resolve, 20));
    const element = find();
    if (!element) throw new SceneError(`part ${index} of the scene is missing: the page was cut off`);
    const bytes = fromBase64(element.textContent.trim(), index);
    element.remove(); // the text is not needed twice
    return bytes;
  };
}

function fromBase64(text, index) {
  try {
    if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
    const binary = atob(text);
    const bytes = new Uint8Array(binary.length);
    for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
    return bytes;
  } catch {
    throw new SceneError(`part ${index} of the scene is not base64: the page is damaged`);
  }
}

// Chunks as files beside the page.
export function fileSource(folder) {
  return async (index, onBytes) => {
    const name = `${folder}/chunk-${String(index).padStart(3, "0")}.bin`;
    let response;
    try {
      response = await fetch(name);
    } catch {
      const local = location.protocol === "file:";
      const hint = local ? "; browsers do not read files beside a local page: serve the folder, say by python -m http.server" : "";
      throw new SceneError(`${name} cannot be read${hint}`);
    }
    if (!response.ok) throw new SceneError(`${name} cannot be read: ${response.status} ${response.statusText}`);
    const parts = [];
    const reader = response.body.getReader();
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      parts.push(value);
      onBytes?.(value.length);
    }
    return new Uint8Array(await new Blob(parts).arrayBuffer());
  };
}

// zlib with its checksum: damage is found here.
export async function inflate(bytes, chunk, index) {
  const broken = (why) => new SceneError(`part ${index} of the scene (${chunk.kind}) is broken: ${why}`);
  if (bytes.length !== chunk.bytes) throw broken(`expected ${chunk.bytes} bytes, got ${bytes.length}`);
  let raw;
  try {
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    raw = new Uint8Array(await new Response(stream).arrayBuffer());
  } catch {
    throw broken("it cannot be unpacked");
  }
  if (raw.length !== chunk.raw) throw broken(`expected ${chunk.raw} bytes unpacked, got ${raw.length}`);
  return raw;
}

// The way along x, y and z to one of 27 blocks, the one in the middle being the 13th.
const toNeighbour = (i) => [(i % 3) - 1, (Math.floor(i / 3) % 3) - 1, Math.floor(i / 9) - 1];

// For every texel of a block that a neighbour may hold too: [direction of the neighbour 0..26, its texel] pairs.
function sharedTexels() {
  const options = (at) => (at === 0 ? [[0, at], [-1, 7]] : at === 7 ? [[0, at], [1, 0]] : [[0, at]]);
  const table = [];
  for (let texel = 0; texel < TEXELS; texel++) {
    const pairs = [];
    for (const [dz, z] of options(texel >> 6)) {
      for (const [dy, y] of options((texel >> 3) & 7)) {
        for (const [dx, x] of options(texel & 7)) {
          if (dx || dy || dz) pairs.push((dz + 1) * 9 + (dy + 1) * 3 + dx + 1, (z * BLOCK + y) * BLOCK + x);
        }
      }
    }
    table.push(pairs);
  }
  return table;
}

// The blocks of a scene: where they are, which texels they keep, and the texels as they come.
export class Blocks {
  constructor(scene) {
    this.scene = scene;
    this.count = scene.nBlocks;
    const side = Math.max(1, Math.ceil(Math.cbrt(this.count)));
    this.atlas = [side, side, Math.max(1, Math.ceil(this.count / (side * side)))]; // in blocks
    this.shared = sharedTexels();
    this.texels = {};
  }

  setPlaces(raw) {
    if (raw.length !== this.count * (8 + TEXELS / 8)) throw new SceneError("the list of blocks has a wrong length");
    this.places = new Uint16Array(raw.buffer.slice(raw.byteOffset, raw.byteOffset + this.count * 8));
    this.kept = raw.subarray(this.count * 8);
    const [nx, ny, nz] = this.scene.blocks;
    this.slots = new Int32Array(nx * ny * nz * this.scene.levels).fill(-1);
    for (let slot = 0; slot < this.count; slot++) {
      const [x, y, z, level] = this.places.subarray(slot * 4, slot * 4 + 4);
      if (x >= nx || y >= ny || z >= nz || level >= this.scene.levels) throw new SceneError("a block lies outside the scene");
      this.slots[((level * nz + z) * ny + y) * nx + x] = slot;
    }
  }

  place(slot) {
    const [nx, ny] = this.atlas;
    return [slot % nx, Math.floor(slot / nx) % ny, Math.floor(slot / (nx * ny))];
  }

  // The index texture: place in the atlas, and for what is empty how many blocks may be leapt over; what has not
  // arrived counts as empty.
  index() {
    const [nx, ny, nz] = this.scene.blocks;
    const result = (this.entries = new Uint8Array(this.slots.length * 4));
    const perLevel = nx * ny * nz;
    for (let level = 0; level < this.scene.levels; level++) {
      const slots = this.slots.subarray(level * perLevel, (level + 1) * perLevel);
      const skips = chessboardDistance(slots, nx, ny, nz);
      for (let i = 0; i < perLevel; i++) {
        const at = (level * perLevel + i) * 4;
        if (slots[i] >= 0) result.set(this.place(slots[i]), at);
        result[at + 3] = Math.max(skips[i], 1);
      }
    }
    return result;
  }

  // The index with the texels of blocks first..last.
  arrived(first, last) {
    for (let i = 0; i < this.slots.length; i++) {
      if (this.slots[i] >= first && this.slots[i] < last) this.entries[i * 4 + 3] = 0;
    }
    return this.entries;
  }

  neighbours(slot) {
    const [nx, ny, nz] = this.scene.blocks;
    const [x, y, z, level] = this.places.subarray(slot * 4, slot * 4 + 4);
    return new Int32Array(27).fill(-1).map((none, i) => {
      const [dx, dy, dz] = toNeighbour(i);
      const [u, v, w] = [x + dx, y + dy, z + dz];
      return u < 0 || v < 0 || w < 0 || u >= nx || v >= ny || w >= nz ? none : this.slots[((level * nz + w) * ny + v) * nx + u];
    });
  }

  // Unpack the texels of a chunk; four bytes each: red, green, blue and density, or four features.
  decode(chunk, raw) {
    const texels = (this.texels[chunk.kind] ??= new Uint8Array(this.count * TEXELS * 4));
    const n = raw.length / 4;
    const isBase = chunk.kind === "base";
    const { kept } = this;
    const left = [0, 0, 0, 0];
    let next = 0;
    for (let slot = chunk.first; slot < chunk.last; slot++) {
      const around = this.neighbours(slot);
      const first = slot * TEXELS;
      for (let texel = 0; texel < TEXELS; texel++) {
        const bit = first + texel;
        if (!((kept[bit >> 3] >> (bit & 7)) & 1)) continue;
        const at = bit * 4;
        const owner = this.earlier(slot, texel, around);
        if (owner >= 0) {
          for (let channel = 0; channel < 4; channel++) texels[at + channel] = texels[owner * 4 + channel];
          continue;
        }
        if (next >= n) throw new SceneError(`a part of the scene (${chunk.kind}) holds too few texels`);
        const x = (texel & 7) > 0 && (kept[(bit - 1) >> 3] >> ((bit - 1) & 7)) & 1 ? 1 : 0;
        const y = ((texel >> 3) & 7) > 0 && (kept[(bit - 8) >> 3] >> (bit & 7)) & 1 ? 1 : 0;
        const z = texel >> 6 > 0 && (kept[(bit - 64) >> 3] >> (bit & 7)) & 1 ? 1 : 0;
        const known = x + y + z;
        const [p, q, r, s] = [raw[next], raw[n + next], raw[2 * n + next], raw[3 * n + next]];
        left[0] = isBase ? q + r : p;
        left[1] = q;
        left[2] = isBase ? q + s : r;
        left[3] = isBase ? p : s;
        for (let channel = 0; channel < 4; channel++) {
          const c = at + channel;
          const sum = (x ? texels[c - 4] : 0) + (y ? texels[c - 32] : 0) + (z ? texels[c - 256] : 0);
          texels[c] = (known ? Math.floor(sum / known) : 0) + left[channel]; // modulo 256
        }
        next++;
      }
    }
    if (next !== n) throw new SceneError(`a part of the scene (${chunk.kind}) holds too many texels`);
    return texels;
  }

  // Where an earlier block holds the same vertex; -1 where none does.
  earlier(slot, texel, around) {
    const pairs = this.shared[texel];
    let best = -1;
    for (let i = 0; i < pairs.length; i += 2) {
      const other = around[pairs[i]];
      if (other >= 0 && other < slot && (best < 0 || other * TEXELS + pairs[i + 1] < best)) {
        best = other * TEXELS + pairs[i + 1];
      }
    }
    return best;
  }
}

// Blocks to the nearest one that exists, the longest axis counting: 0 where one is, at most 255. Two sweeps, each with
// the neighbours that come before, over a grid with a border all around.
export function chessboardDistance(slots, nx, ny, nz) {
  const [px, py] = [nx + 2, ny + 2];
  const grid = new Uint8Array(px * py * (nz + 2)).fill(255);
  const at = (x, y, z) => ((z + 1) * py + y + 1) * px + x + 1;
  const before = Array.from({ length: 13 }, (_, i) => toNeighbour(i)).map(([dx, dy, dz]) => (dz * py + dy) * px + dx);
  const each = (visit, forwards) => {
    for (let k = 0; k < slots.length; k++) {
      const i = forwards ? k : slots.length - 1 - k;
      visit(i, at(i % nx, Math.floor(i / nx) % ny, Math.floor(i / (nx * ny))));
    }
  };
  each((i, place) => (grid[place] = slots[i] >= 0 ? 0 : 255), true);
  const result = new Uint8Array(slots.length);
  for (const sign of [1, -1]) {
    each((i, place) => {
      let best = grid[place];
      for (let k = 0; k < 13; k++) best = Math.min(best, grid[place + sign * before[k]] + 1);
      grid[place] = best;
      result[i] = best;
    }, sign === 1);
  }
  return result;
}
