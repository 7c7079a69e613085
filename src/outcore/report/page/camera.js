// The camera: which part of a drawing is in sight, and how large.
"use strict";

class Camera {
  /** `moved` is called whenever another part of the drawing is in sight. */
  constructor(canvas, world, moved = () => {}) {
    this.canvas = canvas;
    this.world = world;
    this.moved = moved;
    this.set(0, 0, 1);
  }

  /** The rectangle of the drawing that is in sight. */
  get view() {
    const { clientWidth, clientHeight } = this.canvas, { x, y, scale } = this;
    return { left: -x / scale, top: -y / scale, right: (clientWidth - x) / scale, bottom: (clientHeight - y) / scale };
  }

  set(x, y, scale = this.scale) {
    Object.assign(this, { x, y, scale });
    this.world.setAttribute("transform", `translate(${x} ${y}) scale(${scale})`);
    this.moved();
  }

  /** Change the scale; the point at (x, y) of the canvas stays where it is. */
  zoom(factor, x = this.canvas.clientWidth / 2, y = this.canvas.clientHeight / 2) {
    const scale = Math.min(4, Math.max(0.02, this.scale * factor)), change = scale / this.scale;
    this.set(x - (x - this.x) * change, y - (y - this.y) * change, scale);
  }

  /** Show a whole drawing, or (`readable`) as much of it, from the top, as can be read. */
  fit({ width, height }, readable = false) {
    const { clientWidth, clientHeight } = this.canvas;
    const whole = Math.min(clientWidth / width, clientHeight / height, 1);
    const scale = readable ? Math.max(whole, Math.min(1, Math.max(0.5, clientWidth / width))) : whole;
    this.set((clientWidth - width * scale) / 2, readable ? 6 : (clientHeight - height * scale) / 2, scale);
  }

  /** Move along with something that has a new place. */
  follow(before, after) {
    const dx = before.x + before.width / 2 - after.x - after.width / 2, dy = before.y - after.y;
    this.set(this.x + dx * this.scale, this.y + dy * this.scale);
  }

  /** Bring something into the middle, or its top into sight if it is large. */
  centre({ x, y, width, height }) {
    const { clientWidth, clientHeight } = this.canvas, scale = Math.max(this.scale, 0.7);
    const top = height * scale < clientHeight ? clientHeight / 2 - (y + height / 2) * scale : 20 - y * scale;
    this.set(clientWidth / 2 - (x + width / 2) * scale, top, scale);
  }
}
