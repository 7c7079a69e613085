// The breakdown: what takes time and memory, as a flame (blocks in blocks) or a tree map, and by kind beside it.
"use strict";

const METRICS = {
  time_s: { name: "Time", text: timeText },
  saved_bytes: { name: "Saved for backward", text: bytesText },
  peak_bytes: { name: "Held at the peak", text: bytesText },
  parameters: { name: "Parameters", text: (v) => number(Math.round(v)) },
};

function showBreakdown(section, store) {
  return new Breakdown(section, store);
}

class Breakdown {
  constructor(section, store) {
    this.store = store;
    this.root = "";
    this.metric = "time_s";
    this.form = "flame";
    section.classList.add("breakdown");
    this.crumbs = make("div.crumbs");
    this.canvas = make("div.shapes", { tabIndex: 0, "aria-label": "Blocks by what they take; arrow keys select, Enter zooms in, Backspace goes up" });
    this.side = make("aside.side");
    const tools = make("div.tools", {},
      choice("What is shown", Object.entries(METRICS).map(([key, { name }]) => [key, name]), this.metric, (key) => { this.metric = key; this.draw(); }),
      choice("Form", [["flame", "Flame"], ["map", "Tree map"]], this.form, (form) => { this.form = form; this.draw(); }), this.crumbs);
    section.append(tools, make("div.split", {}, this.canvas, this.side));
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    store.on("piece", ({ name }) => name === "costs" && this.draw());
    store.on("select", () => this.mark());
    onResize(this.canvas, () => this.draw());
    this.draw();
  }

  /** Arrows go to the block around, to the largest inside, and to those beside; Enter shows it alone. */
  key(event) {
    const { store } = this, at = store.selected !== null && store.inside(store.selected, this.root) ? store.selected : null;
    const beside = at === null || at === this.root ? [] : this.children(this.parent(at)), place = beside.indexOf(at);
    const largest = (path) => this.children(path).reduce((a, b) => (a === null || this.value(b) > this.value(a) ? b : a), null);
    let next = null;
    if (event.key === "Backspace" && this.root !== "") this.zoom(this.parent(this.root));
    else if (event.key === "Enter" && at !== null) this.zoom(this.children(at).length ? at : this.parent(at));
    else if (event.key === "ArrowDown") next = largest(at ?? this.root);
    else if (event.key === "ArrowUp" && at !== null && at !== this.root) next = this.parent(at);
    else if (event.key === "ArrowRight") next = beside[place + 1] ?? null;
    else if (event.key === "ArrowLeft") next = beside[place - 1] ?? null;
    else return;
    if (next !== null) store.select(next, "breakdown");
    event.preventDefault();
  }

  parent(path) {
    for (const [name, block] of this.store.blocks) if (block.children.includes(path)) return name;
    return "";
  }

  value(path) {
    return this.metric === "parameters" ? this.store.blocks.get(path).parameters : this.store.cost(path, this.metric);
  }

  children(path) {
    return this.store.blocks.get(path).children.filter((child) => this.store.blocks.has(child) && this.value(child) > 0);
  }

  levels(path) {
    return 1 + Math.max(0, ...this.children(path).map((child) => this.levels(child)));
  }

  zoom(path) {
    this.root = path;
    this.draw();
  }

  draw() {
    if (!this.store.data.costs) return;
    if (!this.store.blocks.has(this.root)) this.root = "";
    const line = [];
    for (let at = this.root; ; at = this.parent(at)) {
      line.unshift(at);
      if (at === "") break;
    }
    this.crumbs.replaceChildren(...line.flatMap((path, i) => [i ? " › " : "", make("button.link", { onclick: () => this.zoom(path) }, path === "" ? this.store.blocks.get("").type : path.split(".").at(-1))]));
    const width = this.canvas.clientWidth, height = this.canvas.clientHeight;
    if (!width) return;
    this.boxes = [];
    if (this.form === "flame") this.tall = Math.max(26, Math.min(76, height / this.levels(this.root)));
    if (this.form === "flame") this.flame(this.root, 0, width, 0, height);
    else this.map(this.root, 0, 0, width, height, 0);
    this.largest = Math.max(...this.boxes.filter(({ path }) => !this.children(path).length).map(({ path }) => this.value(path)), 1e-12);
    const svg = drawing("svg", { width, height, viewBox: `0 0 ${width} ${height}` });
    for (const box of this.boxes) svg.append(this.box(box));
    this.canvas.replaceChildren(svg);
    this.mark();
    this.kinds();
  }

  /** A row for every depth, widths by what blocks take, in the order of execution. */
  flame(path, x, width, depth, height) {
    const { tall } = this;
    if (width < 1.2 || depth * tall + tall > height) return;
    this.boxes.push({ path, x, y: depth * tall, width: width - 0.8, height: tall - 1.5, depth });
    const children = this.children(path), all = children.reduce((sum, child) => sum + this.value(child), 0);
    const whole = Math.max(all, this.value(path)) || 1;
    let at = x;
    for (const child of children) {
      const wide = (this.value(child) / whole) * width;
      this.flame(child, at, wide, depth + 1, height);
      at += wide;
    }
  }

  /** Squarified tree map (Bruls, Huizing and van Wijk, 2000): rows whose boxes are as square as can be. */
  map(path, x, y, width, height, depth) {
    const children = this.children(path).sort((a, b) => this.value(b) - this.value(a));
    const head = children.length && depth < 4 && height > 34 && width > 40 ? 17 : 0;
    this.boxes.push({ path, x, y, width: width - 1, height: height - 1, depth, head: head > 0 });
    if (!children.length || depth >= 5 || width < 16 || height < 16) return;
    const pad = head ? 2 : 0;
    let box = { x: x + pad, y: y + head, width: width - 2 * pad - 1, height: height - head - pad - 1 };
    const total = children.reduce((sum, child) => sum + this.value(child), 0), area = Math.max(0, box.width * box.height);
    let rest = children.map((child) => [child, (this.value(child) / total) * area]).filter(([, size]) => size > 0);
    while (rest.length) {
      const side = Math.min(box.width, box.height);
      if (side < 3) break;
      let count = 1;
      while (count < rest.length && worst(rest.slice(0, count + 1), side) <= worst(rest.slice(0, count), side)) count++;
      const row = rest.slice(0, count), sum = row.reduce((s, [, size]) => s + size, 0), thick = sum / side;
      let at = 0;
      for (const [child, size] of row) {
        const long = size / thick;
        if (box.width >= box.height) this.map(child, box.x, box.y + at, thick, long, depth + 1);
        else this.map(child, box.x + at, box.y, long, thick, depth + 1);
        at += long;
      }
      if (box.width >= box.height) box = { ...box, x: box.x + thick, width: box.width - thick };
      else box = { ...box, y: box.y + thick, height: box.height - thick };
      rest = rest.slice(count);
    }
  }

  box({ path, x, y, width, height, depth, head }) {
    const { store } = this, block = store.blocks.get(path), value = this.value(path), whole = this.value("") || 1;
    const leaf = !this.children(path).length;
    const group = drawing("g", { class: leaf ? "shape leaf" : "shape", "data-path": path });
    const share = value / (this.form === "map" ? this.largest : this.value(this.root) || 1);
    const rect = drawing("rect", { x, y, width: Math.max(0.5, width), height: Math.max(0.5, height), rx: Math.min(3, width / 4) });
    rect.style.fill = this.form === "map" && !leaf && head ? "var(--panel)" : `color-mix(in oklab, var(--hot) ${Math.round(12 + 68 * Math.min(1, this.form === "map" ? share : Math.sqrt(share)))}%, var(--cold))`;
    group.append(rect);
    const room = Math.floor((width - 10) / 6.4), name = path === "" ? block.type : block.path.split(".").at(-1);
    if (room >= 3 && height > 12) {
      const words = room > name.length + 12 ? `${name}  ${METRICS[this.metric].text(value)} · ${percent(value / whole)}` : name.length > room ? name.slice(0, room - 1) + "…" : name;
      const text = drawing("text", { x: x + 5, y: head || height < 26 ? y + 12.5 : y + Math.min(height / 2 + 4, 19) }, words);
      if (share > (this.form === "map" ? 0.8 : 0.45) && !(this.form === "map" && head)) text.classList.add("inverse");
      group.append(text);
    }
    group.addEventListener("pointermove", (event) => showTip(event, make("b", {}, path || block.type), `${block.type}${block.detail ? `(${shortPath(block.detail, 60)})` : ""}`,
      `${METRICS[this.metric].text(value)}, ${percent(value / whole)} of the whole`, make("div.dim", {}, "click: zoom in; again: back")));
    group.addEventListener("pointerleave", hideTip);
    group.addEventListener("click", () => {
      hideTip();
      store.select(path, "breakdown");
      if (path === this.root && path !== "") this.zoom(this.parent(path));
      else if (!leaf) this.zoom(path);
      this.canvas.focus({ preventScroll: true });
    });
    return group;
  }

  mark() {
    for (const shape of this.canvas.querySelectorAll(".shape")) shape.classList.toggle("marked", shape.dataset.path === this.store.selected);
  }

  /** Beside it: memory at the peak by what it is for, and time by kind of layer. */
  kinds() {
    const { memory, costs } = this.store.data;
    const whole = this.store.cost("", "time_s") || 1;
    const bars = memory.categories.map((name, i) => [name, memory.at_peak[i]]).filter(([, size]) => size).sort((a, b) => b[1] - a[1]);
    const most = Math.max(...bars.map(([, size]) => size), 1);
    const where = memory.call ? `${memory.phase} of ${memory.call}` : "the optimizer's step";
    const row = (name, share, text, colour) => make("div.kind", {}, make("span", { title: name }, name), make("span.meter", {}, make("span", { style: { width: `${share * 100}%`, background: colour } })), make("b", {}, text));
    const slow = Math.max(...costs.kinds.map((k) => k[2] + k[3]), 1e-12);
    this.side.replaceChildren(
      make("h2", {}, "Memory at the peak"), make("p.note", {}, `${bytesText(memory.peak_bytes)}, reached in ${where}`),
      ...bars.map(([name, size]) => row(kindName(name), size / most, bytesText(size), kindColour(name))),
      make("h2", {}, "Time by kind of layer"),
      ...costs.kinds.slice(0, 12).map(([name, calls, forward, backward]) => row(`${name} × ${calls}`, (forward + backward) / slow, percent((forward + backward) / whole), "var(--forward)")),
      make("h2", {}, "Largest at the peak"),
      ...memory.held.slice(0, 10).map(([name, block, kind, size]) => make("button.hotline", { onclick: () => this.store.blocks.has(block) && this.store.select(block, "held") }, make("code", { title: name }, shortPath(name, 30)), make("b", {}, bytesText(size)))));
  }
}

function worst(row, side) {
  const sum = row.reduce((s, [, size]) => s + size, 0), sizes = row.map(([, size]) => size);
  return Math.max((side * side * Math.max(...sizes)) / (sum * sum), (sum * sum) / (side * side * Math.min(...sizes)));
}
