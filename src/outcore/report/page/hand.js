// Mouse and keys: what they do to a graph tab.
"use strict";

class Hand {
  constructor(section, graph) {
    this.graph = graph;
    this.canvas = graph.canvas;
    this.hint = graph.find(".hint");
    section.addEventListener("click", (event) => {
      const tool = event.target.closest(".tools [data-do]");
      if (tool) graph.tool(tool.dataset.do);
    });
    section.addEventListener("change", (event) => {
      if (event.target.dataset.set) graph.set(event.target.dataset.set, event.target.checked);
    });
    document.addEventListener("keydown", (event) => section.hidden || this.key(event));
    this.canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    this.canvas.addEventListener("pointerdown", (event) => this.drag(event));
    this.canvas.addEventListener("pointermove", (event) => this.hover(event));
    this.canvas.addEventListener("pointerleave", () => (this.hint.hidden = true));
    this.canvas.addEventListener("dblclick", (event) => {
      const part = event.target.closest("[data-part]")?.dataset.part;
      if (part && !event.target.closest("[data-do]")) graph.toggle(part);
    });
  }

  /** The wheel moves the picture; with Ctrl, or two fingers, it zooms. */
  wheel(event) {
    event.preventDefault();
    const camera = this.graph.camera, box = this.canvas.getBoundingClientRect();
    if (event.ctrlKey || event.metaKey) {
      camera.zoom(Math.exp(-event.deltaY * 0.01), event.clientX - box.left, event.clientY - box.top);
    } else {
      const [dx, dy] = event.shiftKey ? [event.deltaY, 0] : [event.deltaX, event.deltaY];
      camera.set(camera.x - dx, camera.y - dy);
    }
  }

  /** Follow the pointer until it is lifted; where it has hardly moved, that was a click. */
  drag(down) {
    if (down.button !== 0) return;
    const camera = this.graph.camera, start = { x: camera.x, y: camera.y };
    let moved = false;
    const move = (event) => {
      const dx = event.clientX - down.clientX, dy = event.clientY - down.clientY;
      moved ||= Math.hypot(dx, dy) > 4;
      this.canvas.classList.toggle("dragging", moved);
      if (moved) camera.set(start.x + dx, start.y + dy);
    };
    const up = (event) => {
      removeEventListener("pointermove", move);
      removeEventListener("pointerup", up);
      this.canvas.classList.remove("dragging");
      if (!moved && event.target instanceof Element) this.click(event.target);
    };
    addEventListener("pointermove", move);
    addEventListener("pointerup", up);
  }

  click(target) {
    const part = target.closest("[data-part]")?.dataset.part, action = target.closest("[data-do]")?.dataset.do;
    if (part === undefined) this.graph.select(null);
    else if (action === "unfold") this.graph.unfold(part);
    else if (action) this.graph.toggle(part, action === "open");
    else this.graph.select(part);
  }

  /** Say what flows along the wire under the pointer. */
  hover(event) {
    const line = event.target.closest("[data-wire]"), hint = this.hint;
    hint.hidden = !line || event.buttons > 0;
    if (hint.hidden) return;
    const value = this.graph.values.get(this.graph.sketch.wires[line.dataset.wire].value);
    hint.textContent = `${value.name}\n${valueFacts(value)}`;
    const box = this.canvas.getBoundingClientRect();
    hint.style.left = `${event.clientX - box.left + 14}px`;
    hint.style.top = `${event.clientY - box.top + 10}px`;
  }

  key(event) {
    if (event.target.matches("input") || event.ctrlKey || event.metaKey || event.altKey) return;
    const graph = this.graph, { key } = event;
    const arrow = { ArrowUp: "up", ArrowDown: "down", ArrowLeft: "left", ArrowRight: "right" }[key];
    const tool = { "[": "shallower", "]": "deeper", e: "expand", c: "collapse", f: "fit", "+": "in", "-": "out" }[key];
    if (arrow) graph.step(arrow);
    else if (tool) graph.tool(tool);
    else if (key === "/") graph.find(".search input").focus();
    else if (key === "Escape") graph.select(null);
    else if (key === "Enter" && graph.selected && !event.target.closest("button, a")) graph.toggle(graph.selected, true);
    else if (key === "Backspace" && graph.selected) graph.close(graph.selected);
    else return;
    event.preventDefault();
  }
}
