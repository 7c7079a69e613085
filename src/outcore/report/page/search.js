// The search field: finds blocks by path or type and reveals them.
"use strict";

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
