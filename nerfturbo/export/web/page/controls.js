// Mouse, touch and keys move the camera: one finger or button turns, two fingers or the right button shift, wheel and
// pinch zoom.

const TURN = 0.08; // radians a key press turns
const SHIFT = 0.04;
const ZOOM = 0.9;

export class Controls {
  // moved() is called whenever the camera has changed.
  constructor(element, camera, moved) {
    this.camera = camera;
    this.moved = moved;
    this.element = element;
    this.pointers = new Map();
    element.style.touchAction = "none";
    element.addEventListener("pointerdown", (event) => this.down(event));
    element.addEventListener("pointermove", (event) => this.move(event));
    for (const name of ["pointerup", "pointercancel", "lostpointercapture"]) {
      element.addEventListener(name, (event) => this.pointers.delete(event.pointerId));
    }
    element.addEventListener("contextmenu", (event) => event.preventDefault());
    element.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    element.addEventListener("dblclick", () => this.act(() => camera.reset()));
    document.addEventListener("keydown", (event) => this.key(event)); // wherever the focus is: there is nothing to type
  }

  get side() {
    return Math.max(1, Math.min(this.element.clientWidth, this.element.clientHeight));
  }

  act(change) {
    change();
    this.moved();
  }

  down(event) {
    this.element.setPointerCapture(event.pointerId);
    const shifts = event.button === 2 || event.button === 1 || event.shiftKey;
    this.pointers.set(event.pointerId, { x: event.clientX, y: event.clientY, shifts });
  }

  move(event) {
    const pointer = this.pointers.get(event.pointerId);
    if (!pointer) return;
    const before = [...this.pointers.values()].map(({ x, y }) => ({ x, y }));
    const [dx, dy] = [(event.clientX - pointer.x) / this.side, (event.clientY - pointer.y) / this.side];
    pointer.x = event.clientX;
    pointer.y = event.clientY;
    if (this.pointers.size === 1) {
      this.act(() => (pointer.shifts ? this.camera.pan(dx, dy) : this.camera.orbit(dx * Math.PI, dy * Math.PI)));
    } else if (this.pointers.size === 2) {
      const after = [...this.pointers.values()];
      const apart = (points) => Math.hypot(points[0].x - points[1].x, points[0].y - points[1].y);
      const factor = Math.max(apart(before), 1) / Math.max(apart(after), 1);
      this.act(() => {
        this.camera.pan(dx / 2, dy / 2); // each finger moves the middle by half its way
        this.camera.zoom(factor);
      });
    }
  }

  wheel(event) {
    event.preventDefault();
    const lines = event.deltaMode === 1 ? 16 : event.deltaMode === 2 ? 400 : 1;
    const amount = Math.max(-200, Math.min(200, event.deltaY * lines));
    this.act(() => this.camera.zoom(Math.exp(amount * 0.0015)));
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const { camera } = this;
    const arrows = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] };
    const letters = { a: [-1, 0], d: [1, 0], w: [0, 1], s: [0, -1] };
    const [arrow, letter] = [arrows[event.key], letters[event.key.toLowerCase()]];
    const shift = letter ?? (event.shiftKey ? arrow : undefined);
    if (shift) this.act(() => camera.pan(-shift[0] * SHIFT, shift[1] * SHIFT));
    else if (arrow) this.act(() => camera.orbit(-arrow[0] * TURN, arrow[1] * TURN));
    else if (event.key === "+" || event.key === "=") this.act(() => camera.zoom(ZOOM));
    else if (event.key === "-") this.act(() => camera.zoom(1 / ZOOM));
    else if (event.key === "Home" || event.key === "r") this.act(() => camera.reset());
    else return;
    event.preventDefault();
  }
}
