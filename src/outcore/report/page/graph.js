// The graph tab: what is open and what is selected. Where one looks is in camera.js, mouse and keys are in hand.js.
"use strict";

function showGraph(section, bundle) {
  section.append(document.getElementById("graph-panel").content.cloneNode(true));
  return new GraphTab(section, bundle);
}

class GraphTab {
  constructor(section, bundle) {
    this.find = (selector) => section.querySelector(selector);
    this.bundle = bundle;
    this.blocks = new Map(bundle.graph.blocks.map((block) => [block.path, block]));
    this.values = new Map(bundle.graph.values.map((value) => [value.name, value]));
    this.root = this.blocks.get("");
    this.notes = bundle.graph.notes;
    this.state = { opened: new Set(), flat: new Set(), fold: true, functions: bundle.start.functions, shapes: true };
    this.selected = null;
    this.canvas = this.find(".canvas");
    this.world = this.find(".world");
    this.picture = new Picture(this.world);
    this.camera = new Camera(this.canvas, this.world, () => this.look());
    const wanted = decodeURIComponent(location.hash.slice(1));
    this.setDepth(bundle.start.depth);
    new Hand(section, this);
    new Search(this.find(".search"), this);
    this.redraw();
    requestAnimationFrame(() => {
      this.camera.fit(this.drawing, true);
      const part = Object.keys(this.sketch.parts).find((name) => name && this.sketch.parts[name].block === wanted);
      if (part) this.reveal(part);
      layOutAhead(this.sketch, bundle.drawing.geometry);
    });
    new ResizeObserver(() => this.look()).observe(this.canvas);
  }

  look() {
    if (this.camera) this.picture.look(this.camera.view, this.camera.scale);
  }

  get sketch() {
    const { functions, modules } = this.bundle.drawing;
    return this.state.functions || !modules.flat[ROOT] ? functions : modules;  // a model may be functions alone
  }

  /** Names of the parts around a part, the whole model first. */
  around(part) {
    const found = [];
    for (let at = this.sketch.parts[part].parent; at !== null; at = this.sketch.parts[at].parent) found.unshift(at);
    return found;
  }

  within(part, container) {
    return part === container || this.around(part).includes(container);
  }

  // What is shown

  setDepth(depth) {
    const levels = Object.keys(this.sketch.flat).map((name) => [name, this.around(name).length]);
    this.deepest = Math.max(1, ...levels.map(([, level]) => level + 1));
    this.depth = Math.min(Math.max(depth, 1), this.deepest);
    this.state.opened = new Set(levels.filter(([, level]) => level < this.depth).map(([name]) => name));
    this.find("output").value = `depth ${this.depth}`;
  }

  toggle(part, open = !this.state.opened.has(part)) {
    if (!this.sketch.flat[part] || part === "") return;
    this.state.opened[open ? "add" : "delete"](part);
    this.find("output").value = "mixed";
    this.redraw(part);
  }

  unfold(part) {
    const container = this.sketch.parts[part].parent;
    if (!this.state.flat.delete(container)) this.state.flat.add(container);
    this.redraw(part);
  }

  /** Buttons that the details of a part offer. */
  actions(part) {
    const found = [];
    if (this.sketch.flat[part] && part !== "") found.push(["toggle", this.state.opened.has(part) ? "Close" : "Open"]);
    const parent = this.sketch.parts[part].parent;
    if (this.state.fold && this.sketch.folded[parent]) {
      found.push(["unfold", this.state.flat.has(parent) ? "Fold repeats here" : "Unfold repeats here"]);
    }
    return found;
  }

  /** Lay out and draw again; what is at the place of `anchor` stays under the mouse, or `aim` moves the camera. */
  redraw(anchor = null, aim = () => this.look()) {
    const before = anchor === null ? null : this.placeOf(anchor);
    this.drawing = layoutOf(this.sketch, this.bundle.drawing.geometry).drawing(this.state);
    this.placed = new Map(this.drawing.placed.map((placed) => [placed.part, placed]));
    this.picture.set(this.drawing, this.sketch, this.blocks);
    this.world.parentNode.classList.toggle("no-shapes", !this.state.shapes);
    for (const input of this.canvas.closest("section").querySelectorAll("[data-set]")) {
      input.checked = this.state[input.dataset.set];
    }
    if (before) this.camera.follow(before, this.placeOf(anchor));
    else aim();
    this.legend();
    this.select(this.selected !== null && this.sketch.parts[this.selected] ? this.selected : null);
  }

  placeOf(part) {
    for (const name of [part, ...this.around(part).reverse()]) if (this.placed.has(name)) return this.placed.get(name);
    return null;
  }

  legend() {
    const kinds = new Set(this.drawing.placed.filter((p) => !p.open).map((p) => this.sketch.parts[p.part].kind));
    const names = { activation: "activation, pooling", container: "block (double click opens)" };
    const items = [...kinds].sort().map((kind) => {
      const swatch = html("i");
      swatch.className = kind;
      return html("span", swatch, names[kind] ?? kind);
    });
    if (this.sketch.batch !== null) items.push(html("span", `shapes without the batch of ${this.sketch.batch}`));
    this.find(".legend").replaceChildren(...items);
  }

  // What is selected

  select(part) {
    this.selected = part;
    const ends = part === null ? null : this.sketch.parts[part];
    this.picture.choose(part, ends ? [...ends.reads, ...ends.sends] : []);
    showDetails(this.find(".details"), this, part, (other) => this.reveal(other), (name) => this[name](this.selected));
    const path = part === null ? "" : this.sketch.parts[part].block;
    try {
      history.replaceState(null, "", path ? "#" + encodeURIComponent(path) : location.pathname + location.search);
    } catch {
      // a page shown inside another one, as in a notebook, has no address of its own
    }
  }

  /** Open everything around a part, select it and bring it into sight. */
  reveal(part) {
    const aim = () => this.placed.has(part) && this.camera.centre(this.placed.get(part));
    if (!this.placed.has(part)) {
      for (const around of this.around(part)) this.state.opened.add(around);
      this.redraw(null, aim);
    }
    if (!this.placed.has(part)) {
      for (const around of this.around(part)) {
        const children = this.sketch.folded[around]?.children;
        const next = [...this.around(part), part].find((name) => this.sketch.parts[name].parent === around);
        if (children && !children.includes(next)) this.state.flat.add(around);
      }
      this.redraw(null, aim);
    }
    this.select(part);
    aim();
  }

  /** Select the next block along a wire (up, down) or in the order of execution (left, right). */
  step(direction) {
    const boxes = this.drawing.placed.filter((placed) => !placed.open);
    if (!boxes.length) return;
    if (this.selected === null || !this.placed.has(this.selected)) return this.reveal(boxes[0].part);
    const here = this.placed.get(this.selected), { reads, sends } = this.sketch.parts[this.selected];
    const visible = (part) => [part, ...this.around(part).reverse()].find((name) => this.placed.has(name));
    const wires = this.sketch.wires;
    let choices = [];
    if (direction === "up") choices = reads.map((i) => wires[i].source).filter((source) => source !== null).map(visible);
    if (direction === "down") {
      choices = sends.flatMap((i) => wires[i].targets).filter((target) => target !== OUTSIDE).map(visible);
    }
    if (direction === "left" || direction === "right") {
      const sign = direction === "left" ? -1 : 1;
      const beside = (box) => box.y < here.y + here.height && box.y + box.height > here.y;
      choices = boxes.filter((box) => (box.x - here.x) * sign > 1 && beside(box)).map((box) => box.part);
    }
    const distance = (part) => {
      const there = this.placed.get(part);
      return Math.hypot(there.x + there.width / 2 - here.x - here.width / 2, there.y - here.y);
    };
    const [next] = choices.filter((part) => part && part !== this.selected).sort((a, b) => distance(a) - distance(b));
    if (next) this.reveal(next);
  }

  // What tools do

  /** Close a part, or the one around it where it is closed already. */
  close(part) {
    const open = this.sketch.flat[part] && this.state.opened.has(part) ? part : this.sketch.parts[part].parent;
    if (!open) return;
    this.toggle(open, false);
    this.select(open);
  }

  set(name, value) {
    const part = this.selected;
    this.state[name] = value;
    this.selected = this.sketch.parts[part] ? part : null;
    this.redraw(this.selected);
  }

  tool(name) {
    if (name === "in" || name === "out") return this.camera.zoom(name === "in" ? 1.25 : 0.8);
    if (name === "fit") return this.camera.fit(this.drawing);
    const depth = { shallower: this.depth - 1, deeper: this.depth + 1, expand: Infinity, collapse: 1 }[name];
    this.setDepth(depth);
    if (name === "collapse") this.state.flat.clear();
    this.redraw(this.selected, () => this.camera.fit(this.drawing, true));
  }
}
