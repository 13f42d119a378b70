// Frames when they are needed, at a resolution that holds the frame rate: coarse while moving, fine at rest.

const GOOD = 20; // milliseconds: a frame this fast may be finer
const SLOW = 28; // and one this slow must be coarser
const REST = 140; // after so long without a move the picture is drawn as fine as it may be
const LONGEST = 1500; // what a picture at rest may take
const COARSEST = 0.12;
const FIRST = 0.1; // the first picture: soon rather than fine

function finest(cost) {
  return Math.min(1, Math.sqrt(LONGEST / cost));
}

export class Pace {
  // draw(scale, done) draws the picture and calls done(milliseconds) when it is there.
  constructor(draw) {
    this.drawPicture = draw;
    this.scale = FIRST;
    this.hurried = false; // while the scene arrives no fine picture is drawn
    this.cost = 0; // milliseconds of a full picture, as far as known
    this.wanted = false;
    this.busy = false;
    this.restTimer = 0;
  }

  // Something has changed; `settled` draws the fine picture at once.
  want(settled = false) {
    this.wanted = true;
    this.settled = settled;
    clearTimeout(this.restTimer);
    if (!this.busy) requestAnimationFrame(() => this.frame());
    this.busy = true;
  }

  frame() {
    if (!this.wanted) {
      this.busy = false;
      return;
    }
    this.wanted = false;
    const scale = this.settled && this.cost ? finest(this.cost) : this.scale;
    this.drawPicture(scale, (spent) => {
      const whole = spent / (scale * scale);
      if (!this.cost || this.settled) this.cost = whole;
      else this.cost = this.hurried ? Math.min(this.cost, whole) : 0.7 * this.cost + 0.3 * whole; // uploads cost too
      if (this.settled) {
        if (finest(this.cost) > 1.25 * scale) this.wanted = true; // cheaper than thought: once more, finer
      } else {
        if (spent > SLOW) this.scale = Math.max(COARSEST, this.scale * Math.max(0.5, Math.sqrt(GOOD / spent)));
        else if (spent < GOOD) this.scale = Math.min(1, this.scale * 1.08);
        clearTimeout(this.restTimer);
        if (!this.hurried) this.restTimer = setTimeout(() => this.want(true), REST);
      }
      if (this.wanted) requestAnimationFrame(() => this.frame());
      else this.busy = false;
    });
  }
}
