// A camera that circles a target, with +z up; and its link: seven numbers behind the # of the page's address.

const UP = [0, 0, 1];
const HIGHEST = (89 * Math.PI) / 180;

export const add = (a, b) => a.map((value, i) => value + b[i]);
export const subtract = (a, b) => a.map((value, i) => value - b[i]);
export const times = (a, factor) => a.map((value) => value * factor);
export const dot = (a, b) => a.reduce((sum, value, i) => sum + value * b[i], 0);
export const cross = (a, b) => [a[1] * b[2] - a[2] * b[1], a[2] * b[0] - a[0] * b[2], a[0] * b[1] - a[1] * b[0]];
export const unit = (a) => times(a, 1 / Math.max(Math.hypot(...a), 1e-12));

export class OrbitCamera {
  // start: {eye, target, fieldOfView, radius}; radius is that of the scene, and sets how near and far one may go.
  constructor(start) {
    this.start = start;
    this.reset();
  }

  reset() {
    this.lookFrom(this.start.eye, this.start.target);
    this.fieldOfView = this.start.fieldOfView;
  }

  lookFrom(eye, target) {
    const offset = subtract(eye, target);
    this.target = [...target];
    this.distance = Math.max(Math.hypot(...offset), 1e-6);
    this.yaw = Math.atan2(offset[1], offset[0]);
    this.pitch = Math.asin(Math.max(-1, Math.min(1, offset[2] / this.distance)));
    this.pitch = Math.max(-HIGHEST, Math.min(HIGHEST, this.pitch));
  }

  get eye() {
    const flat = Math.cos(this.pitch) * this.distance;
    const offset = [flat * Math.cos(this.yaw), flat * Math.sin(this.yaw), Math.sin(this.pitch) * this.distance];
    return add(this.target, offset);
  }

  // Columns right, up, backward.
  get axes() {
    const backward = unit(subtract(this.eye, this.target));
    const right = unit(cross(UP, backward));
    return [right, cross(backward, right), backward];
  }

  orbit(right, up) {
    this.yaw -= right;
    this.pitch = Math.max(-HIGHEST, Math.min(HIGHEST, this.pitch + up));
  }

  // In fractions of the picture's shorter side, at the distance of the target.
  pan(right, up) {
    const reach = 2 * Math.tan(this.fieldOfView / 2) * this.distance;
    const [x, y] = this.axes;
    const moved = add(this.target, add(times(x, -right * reach), times(y, up * reach)));
    const offset = subtract(moved, this.start.target);
    const limit = 4 * this.start.radius;
    const length = Math.hypot(...offset);
    this.target = length > limit ? add(this.start.target, times(offset, limit / length)) : moved;
  }

  zoom(factor) {
    const { radius } = this.start;
    this.distance = Math.max(radius * 0.02, Math.min(radius * 20, this.distance * factor));
  }

  // What the shader takes, for a picture of this size: the field of view is that of the shorter side.
  view(width, height) {
    const focal = (0.5 * Math.min(width, height)) / Math.tan(this.fieldOfView / 2);
    return { eye: this.eye, axes: this.axes, lens: [focal, focal, width / 2, height / 2], width, height };
  }

  get link() {
    const numbers = [...this.eye, ...this.target, this.fieldOfView];
    return `#camera=${numbers.map((value) => Number(value.toPrecision(6))).join(",")}`;
  }

  // True where the text is a link of ours; anything else leaves the camera as it is.
  follow(hash) {
    const match = /^#camera=([^&]*)$/.exec(hash);
    const numbers = match ? match[1].split(",").map((text) => (text.trim() === "" ? NaN : Number(text))) : [];
    if (numbers.length !== 7 || !numbers.every((value) => Number.isFinite(value) && Math.abs(value) < 1e6)) return false;
    const [eye, target, fieldOfView] = [numbers.slice(0, 3), numbers.slice(3, 6), numbers[6]];
    if (!(fieldOfView > 0.01 && fieldOfView < 3.1) || Math.hypot(...subtract(eye, target)) < 1e-6) return false;
    this.lookFrom(eye, target);
    this.fieldOfView = fieldOfView;
    return true;
  }
}
