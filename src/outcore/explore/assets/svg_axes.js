// A small plot with axes, and a handle on it that can be dragged or moved by keys.
"use strict";

class Plot {
  /** `margins`: left, right, top, bottom. */
  constructor(host, height, margins = [54, 16, 10, 28]) {
    this.host = host;
    this.height = height;
    [this.left, this.right, this.top, this.bottom] = margins;
    this.svg = drawing("svg", { class: "plot", role: "img" });
    host.append(this.svg);
  }

  /** Begin a new drawing. `x` and `y`: { min, max, log, ticks, format, title }. */
  begin(x, y) {
    this.x = x;
    this.y = y;
    this.width = this.host.clientWidth;
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${this.height}`);
    this.svg.setAttribute("width", this.width);
    this.svg.setAttribute("height", this.height);
    this.svg.replaceChildren();
    for (const at of y.ticks ?? niceTicks(y.min, y.max, 4)) {
      if (at < y.min || at > y.max * 1.0001) continue;
      this.add("line", { class: "grid", x1: this.left, x2: this.width - this.right, y1: this.py(at), y2: this.py(at) });
      this.add("text", { class: "tick end", x: this.left - 7, y: this.py(at) + 3.5 }, y.format(at));
    }
    let last = -Infinity;
    for (const at of x.ticks ?? niceTicks(x.min, x.max, 5)) {
      if (at < x.min || at > x.max * 1.0001) continue;
      const place = this.px(at), words = x.format(at), half = words.length * 3.3;
      if (place - half < last + 8) continue;
      this.add("text", { class: "tick middle", x: place, y: this.height - this.bottom + 15 }, words);
      last = place + half;
    }
    if (y.title) this.add("text", { class: "tick title", x: 2, y: this.top - 3 }, y.title);
    if (x.title) this.add("text", { class: "tick end title", x: this.width - this.right, y: this.height - 2 }, x.title);
  }

  share(axis, value) {
    const { min, max, log } = axis;
    return log ? Math.log(value / min) / Math.log(max / min || 1.0001) : (value - min) / (max - min || 1);
  }

  px(value) {
    return this.left + this.share(this.x, value) * (this.width - this.left - this.right);
  }

  py(value) {
    return this.height - this.bottom - this.share(this.y, value) * (this.height - this.top - this.bottom);
  }

  /** The value under a place of the screen. */
  at(clientX) {
    const box = this.host.getBoundingClientRect(), { min, max, log } = this.x;
    const share = Math.min(1, Math.max(0, (clientX - box.left - this.left) / (this.width - this.left - this.right)));
    return log ? min * (max / min) ** share : min + (max - min) * share;
  }

  add(name, attributes, text) {
    const node = drawing(name, attributes, text);
    this.svg.append(node);
    return node;
  }

  path(points, name) {
    if (!points.length) return null;
    const d = points.map(([x, y], i) => `${i ? "L" : "M"}${this.px(x).toFixed(1)} ${this.py(y).toFixed(1)}`).join("");
    return this.add("path", { class: name, d });
  }

  area(points, name) {
    if (!points.length) return null;
    const line = points.map(([x, y]) => `L${this.px(x).toFixed(1)} ${this.py(y).toFixed(1)}`).join("");
    const base = this.height - this.bottom;
    const d = `M${this.px(points[0][0]).toFixed(1)} ${base}${line}L${this.px(points.at(-1)[0]).toFixed(1)} ${base}Z`;
    return this.add("path", { class: name, d });
  }

  dot(x, y, name, radius = 4) {
    return this.add("circle", { class: name, cx: this.px(x), cy: this.py(y), r: radius });
  }

  upright(x, name, words = "") {
    const at = this.px(x), end = at > this.width * 0.6;
    this.add("line", { class: name, x1: at, x2: at, y1: this.top, y2: this.height - this.bottom });
    if (words) this.add("text", { class: `tick ${end ? "end" : ""} ${name}-name`, x: at + (end ? -5 : 5), y: this.top + 9 }, words);
  }

  level(y, name) {
    const at = this.py(y);
    this.add("line", { class: name, x1: this.left, x2: this.width - this.right, y1: at, y2: at });
  }

  /** Names of curves and levels in the margin, where no curve is: [[class, words, height where it ends]], none over another. */
  names(rows) {
    const sorted = [...rows].sort((a, b) => a[2] - b[2]), last = this.height - this.bottom - 1;
    let least = this.top + 8;
    const heights = sorted.map(([, , wanted]) => {
      const at = Math.max(least, wanted + 4);
      least = at + 13;
      return at;
    });
    for (let i = heights.length - 1, most = last; i >= 0; i--, most -= 13) heights[i] = Math.min(heights[i], most);
    sorted.forEach(([name, words], i) => this.add("text", { class: `tick ${name}-name`, x: this.width - this.right + 11, y: heights[i] }, words));
  }
}

/** A knob over a plot or a bar: `move(value)` on dragging, `step(direction, large)` on keys, `leave()` on Escape. */
class Handle {
  constructor(host, { label, at, move, step, leave }) {
    this.knob = make("div.knob", { role: "slider", tabIndex: 0, "aria-label": label, title: label });
    host.classList.add("draggable");
    host.append(this.knob);
    const follow = (event) => move(at(event.clientX));
    host.addEventListener("pointerdown", (down) => {
      if (down.button !== 0) return;
      down.preventDefault();
      this.knob.focus({ preventScroll: true });
      host.setPointerCapture(down.pointerId);
      host.classList.add("dragging");
      follow(down);
    });
    host.addEventListener("pointermove", (event) => host.classList.contains("dragging") && follow(event));
    const stop = () => host.classList.remove("dragging");
    host.addEventListener("pointerup", stop);
    host.addEventListener("pointercancel", stop);
    if (leave) host.addEventListener("dblclick", leave);
    this.knob.addEventListener("keydown", (event) => {
      const way = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageDown: -1, PageUp: 1 }[event.key];
      if (way) step(way, event.key.startsWith("Page") || event.shiftKey);
      else if (event.key === "Escape" && leave) leave();
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
  }

  place(x, y, value, text) {
    this.knob.style.left = `${x}px`;
    this.knob.style.top = `${y}px`;
    this.knob.setAttribute("aria-valuenow", String(value));
    this.knob.setAttribute("aria-valuetext", text);
  }
}
