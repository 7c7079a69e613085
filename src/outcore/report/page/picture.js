// A drawing as SVG elements: those that are in sight and around it, made when one looks there, gone when one looks away.
//
// From afar nothing can be read: boxes are plain then, and wires one path. What is selected or lit is kept by name, so
// that an element has it whenever it is made. How it is clicked is in hand.js.
"use strict";

const SVG = "http://www.w3.org/2000/svg";
const LEGIBLE = 0.28;
const AROUND = 0.5;  // of the view, drawn on each side of it

class Picture {
  constructor(world) {
    this.world = world;
    this.shown = new Map();
    this.selected = null;
    this.lit = new Set();
    this.dress = () => {};  // called with every box that is made, and its part
  }

  /** Take another drawing; nothing of it is drawn before `look`. */
  set(drawing, sketch, blocks) {
    Object.assign(this, { drawing, sketch, blocks, drawn: null });
    this.shown.clear();
    this.layers = ["frames", "skips", "wires", "shapes", "boxes"].map((name) => element("g", { class: name }));
    this.world.replaceChildren(...this.layers);
    this.items = [
      ...drawing.placed.map((placed) => this.item(placed.open ? 0 : 4, placed.x, placed.y, placed.width + 5, placed.height + 5, placed, placed.open ? "frame" : "box")),
      ...drawing.lines.map((line) => this.wire(line)),
      ...drawing.labels.map((label) => this.item(3, label.x, label.y - 12, sketch.wires[label.wire].width, 16, label, "label")),
      ...drawing.ends.map((end) => this.item(4, end.x, end.y, end.width, end.height, end, "end"))];
  }

  item(layer, x, y, width, height, of, kind) {
    return { layer, left: x - 8, right: x + width + 8, top: y - 8, bottom: y + height + 8, of, kind };
  }

  wire(line) {
    const left = Math.min(line.x1, line.x2);
    return this.item(line.skip ? 1 : 2, left, line.y1, Math.max(line.x1, line.x2) - left, line.y4 - line.y1, line, "wire");
  }

  /** Draw what lies in a rectangle of the drawing, seen at a scale. */
  look({ left, top, right, bottom }, scale) {
    if (!this.drawing) return;
    const near = scale >= LEGIBLE, drawn = this.drawn;
    if (drawn && drawn.near === near && left >= drawn.left && right <= drawn.right && top >= drawn.top && bottom <= drawn.bottom) return;
    const dx = (right - left) * AROUND, dy = (bottom - top) * AROUND;
    const view = { left: left - dx, right: right + dx, top: top - dy, bottom: bottom + dy, near };
    if (drawn && drawn.near !== near) this.clear();
    this.drawn = view;
    const added = this.layers.map(() => []), far = { wire: "", skip: "" };
    for (const item of this.items) {
      const inside = item.right > view.left && item.left < view.right && item.bottom > view.top && item.top < view.bottom;
      if (!near && item.kind === "wire") {
        if (inside) far[item.of.skip ? "skip" : "wire"] += linePath(item.of);
      } else if (!near && item.kind === "label") continue;
      else if (!inside) {
        for (const old of this.shown.get(item) ?? []) old.remove();
        this.shown.delete(item);
      } else if (!this.shown.has(item)) {
        const made = this.make(item, near);
        this.shown.set(item, made);
        added[item.layer].push(...made);
      }
    }
    added.forEach((made, i) => this.layers[i].append(...made));
    if (!near) {
      this.layers[1].replaceChildren(element("path", { class: "wire skip", d: far.skip }));
      this.layers[2].replaceChildren(element("path", { class: "wire", d: far.wire }));
    }
    this.mark();
  }

  clear() {
    this.shown.clear();
    for (const layer of this.layers) layer.replaceChildren();
  }

  make({ kind, of }, near) {
    const { sketch, blocks } = this;
    if (kind === "frame") return [near ? frameElement(of, sketch) : plainElement(of, sketch, "frame")];
    if (kind === "box") {
      const group = near ? boxElement(of, sketch, blocks) : plainElement(of, sketch, `box ${sketch.parts[of.part].kind}`);
      this.dress(group, of.part);
      return [group];
    }
    if (kind === "wire") return wireElements(of);
    if (kind === "label") return [textElement(of.x, of.y, "shape", sketch.wires[of.wire].label)];
    const group = element("g", { class: "end" });
    group.append(rectElement(of.x, of.y, of.width, of.height, of.height / 2), textElement(of.x + of.width / 2, of.y + of.height / 2 + 3.5, "", sketch.ends[of.wire].name));
    return [group];
  }

  /** Select a part and light some wires. */
  choose(part, wires) {
    this.selected = part;
    this.lit = new Set(wires);
    this.mark();
  }

  mark() {
    for (const old of this.world.querySelectorAll(".selected, .lit")) old.classList.remove("selected", "lit");
    if (this.selected === null) return;
    for (const [{ kind, of }, made] of this.shown) {
      if ((kind === "box" || kind === "frame") && of.part === this.selected) made[0].classList.add("selected");
      if (kind !== "wire" || !(this.lit.has(of.wire) || this.lit.has(of.port))) continue;
      for (const path of made) if (!path.classList.contains("touch")) path.classList.add("lit");
    }
  }

  /** Dress all boxes that are there again. */
  dressAll() {
    for (const [{ kind, of }, [group]] of this.shown) if (kind === "box") this.dress(group, of.part);
  }
}

/** A box or a frame from afar: its outline. */
function plainElement(placed, sketch, name) {
  const odd = name === "frame" && level(placed.part, sketch) % 2 ? " odd" : "", { x, y, width, height, part } = placed;
  return element("rect", { class: name + odd, "data-part": part, x, y, width, height, rx: 4 });
}

function frameElement(placed, sketch) {
  const part = sketch.parts[placed.part];
  const group = element("g", { class: "frame", "data-part": placed.part });
  if (level(placed.part, sketch) % 2) group.classList.add("odd");
  group.append(rectElement(placed.x, placed.y, placed.width, placed.height, 6));
  const title = textElement(placed.x + 9, placed.y + 17, "name left", part.name);
  const times = placed.repeat > 1 ? sketch.times[placed.repeat] : 0;
  if (times) title.append(timesElement(placed.repeat));
  const [name, type] = part.header;
  const beside = placed.free > name + type + times + 30;
  const at = beside ? placed.x + 16 + name + times : placed.x + placed.width - 9;
  group.append(title, textElement(at, placed.y + 17, beside ? "small left" : "small right", part.type));
  group.append(badgeElement(placed.x, placed.y, "close"));
  return group;
}

function boxElement(placed, sketch, blocks) {
  const part = sketch.parts[placed.part], { x, y, width, height } = placed;
  const container = part.kind === "container";
  const radius = blocks.get(part.block)?.kind === "function" ? height / 2 : 4;
  const group = element("g", { class: `box ${part.kind}`, "data-part": placed.part });
  if (placed.repeat > 1) group.append(rectElement(x + 4, y + 4, width, height, radius));
  group.append(rectElement(x, y, width, height, radius));
  if (container) {
    const inner = rectElement(x + 2.5, y + 2.5, width - 5, height - 5, 2);
    inner.classList.add("inner");
    group.append(inner);
  }
  const title = textElement(x + width / 2, y + (part.note ? 15 : height / 2 + 4), "", "");
  title.append(spanElement(part.name, "name"));
  if (part.type) title.append(" " + part.type);
  if (placed.repeat > 1) title.append(timesElement(placed.repeat));
  group.append(title);
  if (part.note) group.append(textElement(x + width / 2, y + 29, "small", part.note));
  if (container) group.append(badgeElement(x, y + height / 2, "open"));
  return group;
}

/** What is seen of a wire, and a wider invisible line that is easier to point at. */
function wireElements(line) {
  const outline = linePath(line), kind = line.skip ? " skip" : "";
  const marks = { "data-wire": line.wire, "data-port": line.port };
  const found = [
    element("path", { class: "touch", d: outline, ...marks }),
    element("path", { class: "wire" + kind, d: outline, ...marks }),
  ];
  if (line.arrow) {
    found.push(element("path", { class: "tip" + kind, d: `M${line.x2} ${line.y4}l-3.5-7h7z`, ...marks }));
  }
  return found;
}

function linePath({ x1, x2, y1, y2, y3, y4 }) {
  if (Math.abs(x1 - x2) < STRAIGHT) return `M${x1} ${y1}V${y4}`;
  const middle = (y2 + y3) / 2;
  return `M${x1} ${y1}V${y2}C${x1} ${middle} ${x2} ${middle} ${x2} ${y3}V${y4}`;
}

/** The round button that opens or closes a container. */
function badgeElement(x, y, action) {
  const badge = element("g", { class: "badge", "data-do": action, transform: `translate(${x} ${y})` });
  const sign = action === "open" ? "M-3 0H3M0-3V3" : "M-3 0H3";
  badge.append(element("circle", { r: 6.5 }), element("path", { d: sign }));
  const title = action === "open" ? "Open (Enter)" : "Close (Backspace)";
  badge.append(Object.assign(element("title"), { textContent: title }));
  return badge;
}

function timesElement(repeat) {
  const span = spanElement(` × ${repeat}`, "name times");
  span.dataset.do = "unfold";
  return span;
}

function level(part, sketch) {
  let depth = 0;
  for (let at = sketch.parts[part].parent; at !== null; at = sketch.parts[at].parent) depth++;
  return depth;
}

function rectElement(x, y, width, height, radius) {
  return element("rect", { x, y, width, height, rx: radius });
}

function textElement(x, y, name, text) {
  const found = element("text", { x, y, class: name });
  found.textContent = text;
  return found;
}

function spanElement(text, name) {
  const found = element("tspan", { class: name });
  found.textContent = text;
  return found;
}

function element(name, attributes = {}) {
  const found = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) found.setAttribute(key, value);
  return found;
}
