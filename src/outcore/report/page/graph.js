// The graph tab: what is open, selected and in sight, and what mouse, keys and tools do to that.
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
    this.state = { opened: new Set(), flat: new Set(), fold: true, functions: true, shapes: true };
    this.selected = null;
    this.camera = { x: 0, y: 0, scale: 1 };
    this.canvas = this.find(".canvas");
    this.world = this.find(".world");
    const wanted = decodeURIComponent(location.hash.slice(1));
    this.setDepth(bundle.start.depth);
    this.listen();
    new Search(this.find(".search"), this);
    this.redraw();
    requestAnimationFrame(() => {
      this.fit(true);
      const part = Object.keys(this.sketch.parts).find((name) => name && this.sketch.parts[name].block === wanted);
      if (part) this.reveal(part);
    });
  }

  get sketch() {
    return this.bundle.drawing[this.state.functions ? "functions" : "modules"];
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

  /** Lay out and draw again; what is at the place of `anchor` stays under the mouse. */
  redraw(anchor = null) {
    const before = anchor === null ? null : this.placeOf(anchor);
    this.drawing = layOut(this.sketch, this.bundle.drawing.geometry, this.state);
    this.placed = new Map(this.drawing.placed.map((placed) => [placed.part, placed]));
    drawPicture(this.world, this.drawing, this.sketch, this.blocks);
    this.world.parentNode.classList.toggle("no-shapes", !this.state.shapes);
    for (const input of this.canvas.closest("section").querySelectorAll("[data-set]")) {
      input.checked = this.state[input.dataset.set];
    }
    const after = before && this.placeOf(anchor);
    if (after) {
      this.camera.x += (before.x + before.width / 2 - after.x - after.width / 2) * this.camera.scale;
      this.camera.y += (before.y - after.y) * this.camera.scale;
    }
    this.move();
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
    for (const old of this.world.querySelectorAll(".selected, .lit")) old.classList.remove("selected", "lit");
    if (part !== null) {
      this.world.querySelector(`[data-part="${CSS.escape(part)}"]`)?.classList.add("selected");
      const { reads, sends } = this.sketch.parts[part];
      for (const wire of [...reads, ...sends]) this.light(wire);
    }
    showDetails(this.find(".details"), this, part, (other) => this.reveal(other), (name) => this[name](this.selected));
    const path = part === null ? "" : this.sketch.parts[part].block;
    history.replaceState(null, "", path ? "#" + encodeURIComponent(path) : location.pathname + location.search);
  }

  light(wire) {
    for (const line of this.world.querySelectorAll(`[data-wire="${wire}"]:not(.touch)`)) line.classList.add("lit");
  }

  /** Open everything around a part, select it and bring it into sight. */
  reveal(part) {
    for (const around of this.around(part)) this.state.opened.add(around);
    this.redraw();
    if (!this.placed.has(part)) {
      for (const around of this.around(part)) {
        const children = this.sketch.folded[around]?.children;
        const next = [...this.around(part), part].find((name) => this.sketch.parts[name].parent === around);
        if (children && !children.includes(next)) this.state.flat.add(around);
      }
      this.redraw();
    }
    this.select(part);
    const { x, y, width, height } = this.placed.get(part);
    const view = this.canvas.getBoundingClientRect(), scale = this.camera.scale = Math.max(this.camera.scale, 0.7);
    this.camera.x = view.width / 2 - (x + width / 2) * scale;
    this.camera.y = height * scale < view.height ? view.height / 2 - (y + height / 2) * scale : 20 - y * scale;
    this.move();
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
      choices = boxes.filter((box) => (box.x - here.x) * sign > 1 && box.y < here.y + here.height && box.y + box.height > here.y)
        .map((box) => box.part);
    }
    const distance = (part) => {
      const there = this.placed.get(part);
      return Math.hypot(there.x + there.width / 2 - here.x - here.width / 2, there.y - here.y);
    };
    const [next] = choices.filter((part) => part && part !== this.selected).sort((a, b) => distance(a) - distance(b));
    if (next) this.reveal(next);
  }

  // Where the camera is

  move() {
    const { x, y, scale } = this.camera;
    this.world.setAttribute("transform", `translate(${x} ${y}) scale(${scale})`);
  }

  zoom(factor, x = this.canvas.clientWidth / 2, y = this.canvas.clientHeight / 2) {
    const scale = Math.min(4, Math.max(0.02, this.camera.scale * factor)), change = scale / this.camera.scale;
    this.camera = { x: x - (x - this.camera.x) * change, y: y - (y - this.camera.y) * change, scale };
    this.move();
  }

  /** Show everything; at the start, as much from the top as can be read. */
  fit(readable = false) {
    const { clientWidth, clientHeight } = this.canvas, { width, height } = this.drawing;
    const whole = Math.min(clientWidth / width, clientHeight / height, 1);
    const scale = readable ? Math.max(whole, Math.min(1, Math.max(0.5, clientWidth / width))) : whole;
    this.camera = { x: (clientWidth - width * scale) / 2, y: readable ? 6 : (clientHeight - height * scale) / 2, scale };
    this.move();
  }

  // Mouse, keys and tools

  listen() {
    const section = this.canvas.closest("section");
    section.addEventListener("click", (event) => {
      const tool = event.target.closest(".tools [data-do]");
      if (tool) this.tool(tool.dataset.do);
    });
    section.addEventListener("change", (event) => {
      const name = event.target.dataset.set;
      if (!name) return;
      const part = this.selected;
      this.state[name] = event.target.checked;
      if (name === "functions") this.selected = this.sketch.parts[part] ? part : null;
      this.redraw(this.selected);
    });
    this.canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      const box = this.canvas.getBoundingClientRect();
      if (event.ctrlKey || event.metaKey) {
        this.zoom(Math.exp(-event.deltaY * 0.01), event.clientX - box.left, event.clientY - box.top);
      } else {
        this.camera.x -= event.shiftKey ? event.deltaY : event.deltaX;
        this.camera.y -= event.shiftKey ? 0 : event.deltaY;
        this.move();
      }
    }, { passive: false });
    this.canvas.addEventListener("pointerdown", (event) => this.drag(event));
    this.canvas.addEventListener("dblclick", (event) => {
      const part = event.target.closest("[data-part]")?.dataset.part;
      if (part && !event.target.closest("[data-do]")) this.toggle(part);
    });
    this.canvas.addEventListener("pointermove", (event) => this.hover(event));
    this.canvas.addEventListener("pointerleave", () => (this.find(".hint").hidden = true));
    section.addEventListener("keydown", (event) => this.key(event));
  }

  drag(down) {
    if (down.button !== 0) return;
    const start = { ...this.camera }, from = { x: down.clientX, y: down.clientY };
    let moved = false;
    const move = (event) => {
      const dx = event.clientX - from.x, dy = event.clientY - from.y;
      moved ||= Math.hypot(dx, dy) > 4;
      if (!moved) return;
      this.canvas.classList.add("dragging");
      this.camera.x = start.x + dx;
      this.camera.y = start.y + dy;
      this.move();
    };
    const up = (event) => {
      removeEventListener("pointermove", move);
      removeEventListener("pointerup", up);
      this.canvas.classList.remove("dragging");
      if (!moved) this.click(event.target);
    };
    addEventListener("pointermove", move);
    addEventListener("pointerup", up);
  }

  click(target) {
    const part = target.closest?.("[data-part]")?.dataset.part;
    const action = target.closest?.("[data-do]")?.dataset.do;
    if (part === undefined) return this.select(null);
    if (action === "unfold") this.unfold(part);
    else if (action) this.toggle(part, action === "open");
    else this.select(part);
  }

  hover(event) {
    const hint = this.find(".hint"), line = event.target.closest("[data-wire]");
    hint.hidden = !line || event.buttons > 0;
    if (hint.hidden) return;
    const value = this.values.get(this.sketch.wires[line.dataset.wire].value);
    hint.textContent = `${value.name}\n${value.shape.join("×") || "scalar"} ${value.dtype}, ${bytes(value.bytes)}`;
    const box = this.canvas.getBoundingClientRect();
    hint.style.left = `${event.clientX - box.left + 14}px`;
    hint.style.top = `${event.clientY - box.top + 10}px`;
  }

  key(event) {
    if (event.target.matches("input") || event.ctrlKey || event.metaKey || event.altKey) return;
    const arrow = { ArrowUp: "up", ArrowDown: "down", ArrowLeft: "left", ArrowRight: "right" }[event.key];
    const tool = { "[": "shallower", "]": "deeper", e: "expand", c: "collapse", f: "fit", "+": "in", "-": "out" }[event.key];
    if (arrow) this.step(arrow);
    else if (tool) this.tool(tool);
    else if (event.key === "/") this.find(".search input").focus();
    else if (event.key === "Escape") this.select(null);
    else if (event.key === "Enter" && this.selected && event.target === this.canvas) this.toggle(this.selected, true);
    else if (event.key === "Backspace" && this.selected) this.close(this.selected);
    else return;
    event.preventDefault();
  }

  /** Close a part, or the one around it where it is closed already. */
  close(part) {
    const open = this.sketch.flat[part] && this.state.opened.has(part) ? part : this.sketch.parts[part].parent;
    if (!open) return;
    this.toggle(open, false);
    this.select(open);
  }

  tool(name) {
    if (name === "in" || name === "out") return this.zoom(name === "in" ? 1.25 : 0.8);
    if (name === "fit") return this.fit();
    const depth = { shallower: this.depth - 1, deeper: this.depth + 1, expand: Infinity, collapse: 1 }[name];
    this.setDepth(depth);
    if (name === "collapse") this.state.flat.clear();
    this.redraw(this.selected);
    if (this.selected === null) this.fit(true);
  }
}

/** The search field: finds blocks by path or type and reveals them. */
class Search {
  constructor(root, graph) {
    this.graph = graph;
    this.input = root.querySelector("input");
    this.list = root.querySelector("ol");
    this.input.addEventListener("input", () => this.show());
    this.input.addEventListener("focus", () => this.show());
    this.input.addEventListener("blur", () => setTimeout(() => (this.list.hidden = true), 150));
    this.input.addEventListener("keydown", (event) => this.key(event));
  }

  matches() {
    const words = this.input.value.toLowerCase().split(/\s+/).filter(Boolean);
    if (!words.length) return [];
    const found = [];
    for (const [name, { block }] of Object.entries(this.graph.sketch.parts)) {
      const text = `${name} ${this.graph.blocks.get(block).type}`.toLowerCase();
      if (name && words.every((word) => text.includes(word))) found.push(name);
    }
    const exact = (name) => Number(this.graph.sketch.parts[name].block.toLowerCase() !== words[0]);
    return found.sort((a, b) => exact(a) - exact(b) || a.split(".").length - b.split(".").length).slice(0, 40);
  }

  show() {
    const parts = this.matches();
    this.list.hidden = !parts.length;
    this.list.replaceChildren(...parts.map((part, i) => {
      const type = this.graph.blocks.get(this.graph.sketch.parts[part].block).type;
      const item = html("li", part.replace(/#0$/, ""), html("span", type));
      item.dataset.found = part;
      item.setAttribute("aria-selected", String(i === 0));
      item.onpointerdown = () => this.take(part);
      return item;
    }));
  }

  take(part) {
    this.list.hidden = true;
    this.graph.reveal(part);
    this.graph.canvas.focus();
  }

  key(event) {
    const items = [...this.list.children], at = items.findIndex((item) => item.ariaSelected === "true");
    if (event.key === "Escape") this.graph.canvas.focus();
    else if (event.key === "Enter" && items[at]) this.take(items[at].dataset.found);
    else if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      const next = Math.min(items.length - 1, Math.max(0, at + (event.key === "ArrowDown" ? 1 : -1)));
      items.forEach((item, i) => item.setAttribute("aria-selected", String(i === next)));
      items[next]?.scrollIntoView({ block: "nearest" });
    } else return;
    event.preventDefault();
  }
}
