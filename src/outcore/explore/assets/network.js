// The network: the drawing of `outcore graph`, coloured by what blocks take, linked with the other panels.
"use strict";

function showNetwork(section, store) {
  section.append(document.getElementById("graph-panel").content.cloneNode(true));
  section.classList.add("network");
  return new Network(section, store);
}

const SHADES = [["kind", "Kind"], ["time", "Time"], ["memory", "Memory"], ["policy", "Plan"], ["stage", "Stage"]];
const STAGES = ["#3b82c4", "#e0883b", "#47a06a", "#c46fa1", "#8b79c4", "#d3ac36", "#4fb3bf", "#c0564a"];

class Network extends GraphTab {
  constructor(section, store) {
    super(section, store.data);
    this.store = store;
    this.section = section;
    this.shade = "time";
    const shown = SHADES.filter(([name]) => name !== "stage" || store.data.pipeline?.stage_of);
    section.querySelector(".tools").prepend(make("label.shade", {}, "Colour ", choice("Colour by", shown, this.shade, (name) => { this.shade = name; this.paint(); })));
    store.on("select", ({ from }) => from !== "graph" && !section.hidden && this.follow());
    store.on("plan", () => this.shade === "policy" && this.paint());
    store.on("piece", ({ name }) => name === "plans" && this.paint());
    this.paint();
    if (store.selected !== null) requestAnimationFrame(() => this.follow());
  }

  returned() {
    if (this.store.selected !== null) this.follow();
  }

  /** Select what is selected elsewhere. */
  follow() {
    const path = this.store.selected;
    const part = path === null ? null : Object.keys(this.sketch.parts).find((name) => name && this.sketch.parts[name].block === path);
    if (part && part !== this.selected) this.reveal(part);
    else if (!part && path !== null && !this.state.functions) this.set("functions", true), this.follow();
  }

  redraw(anchor = null, aim = undefined) {
    super.redraw(anchor, aim);
    if (this.store) this.paint();
  }

  select(part) {
    super.select(part);
    if (!this.store) return;
    try {
      history.replaceState(null, "", "#graph");
    } catch {
      // a page inside another one has no address of its own
    }
    this.figures(part);
    if (part !== null) this.store.select(this.sketch.parts[part].block, "graph");
  }

  /** What a block takes, above the rest of its details. */
  figures(part) {
    const panel = this.find(".details");
    if (part === null) return;
    const path = this.sketch.parts[part].block, { store } = this, time = store.cost(path, "time_s"), whole = store.cost("", "time_s") || 1;
    const row = (name, text, share, colour) => make("div.cost", {}, make("span", {}, name), make("b", {}, text),
      make("span.meter", {}, make("span", { style: { width: `${Math.min(1, share) * 100}%`, background: colour } })));
    const saved = store.cost(path, "saved_bytes"), peak = store.cost(path, "peak_bytes");
    const box = make("div.costs-box", {},
      row("time", `${timeText(time)} · ${percent(time / whole)}`, time / whole, "var(--forward)"),
      row("saved for backward", bytesText(saved), saved / (store.cost("", "saved_bytes") || 1), "var(--feature_maps)"),
      row("held at the peak", bytesText(peak), peak / (store.cost("", "peak_bytes") || 1), "var(--weights)"),
      make("div.note", {}, `forward ${timeText(store.cost(path, "forward_s"))}, backward ${timeText(store.cost(path, "backward_s"))}, ${flopsText(store.cost(path, "flops"))}`));
    const plan = store.plan?.blocks[path];
    if (plan && !store.plan.plain) box.append(make("div.note", {}, "in the plan"), policyBar(plan));
    if (store.blocks.get(path)?.source) box.append(make("button.link", { onclick: () => store.emit("open", { tab: "code" }) }, "Show the line"));
    panel.children[1]?.after(box);
  }

  /** What a part is coloured by. A block that is called at several places stands there with the calls of each. */
  value(part) {
    const { store } = this, path = this.sketch.parts[part].block;
    if (this.shade !== "time" && this.shade !== "memory") return 0;
    if (this.places.get(path) > 1) return this.sum(part, this.shade === "time" ? ([, , forward, backward]) => forward + backward : (call) => call[4]);
    return store.cost(path, this.shade === "time" ? "time_s" : "saved_bytes");
  }

  sum(part, value) {
    const inner = this.sketch.flat[part]?.children;
    if (inner) return inner.reduce((total, child) => total + this.sum(child, value), 0);
    const call = this.store.callNamed(part);
    return call ? value(call) : 0;
  }

  /** At how many places each block stands. */
  get places() {
    const { parts } = this.sketch;
    if (this.counted !== parts) {
      this.counted = parts;
      this.counts = new Map();
      for (const { block } of Object.values(parts)) this.counts.set(block, (this.counts.get(block) ?? 0) + 1);
    }
    return this.counts;
  }

  /** Colour all boxes; those that come into sight later are coloured when they are made. */
  paint() {
    let most = 1e-12;
    for (const placed of this.drawing.placed) if (!placed.open) most = Math.max(most, this.value(placed.part));
    this.picture.dress = (group, part) => this.colour(group, part, most);
    this.picture.dressAll();
    this.scale(most);
  }

  colour(group, part, most) {
    const { store } = this, path = this.sketch.parts[part].block;
    let fill = "", share = 0;
    if (this.shade === "time" || this.shade === "memory") {
      share = Math.sqrt(this.value(part) / most);
      fill = `color-mix(in oklab, var(--hot) ${Math.round(share * 82)}%, var(--cold))`;
    } else if (this.shade === "policy") {
      const row = store.plan?.blocks[path] ?? {};
      const total = POLICIES.reduce((sum, kind) => sum + (row[kind] ?? 0), 0);
      const main = POLICIES.slice(1).sort((a, b) => (row[b] ?? 0) - (row[a] ?? 0))[0];
      share = total ? (row[main] ?? 0) / total : 0;
      fill = share ? `color-mix(in oklab, var(--${main}) ${Math.round(20 + share * 60)}%, var(--cold))` : "var(--cold)";
    } else if (this.shade === "stage") {
      const stages = store.data.pipeline?.stage_of ?? {};
      const stage = stages[path] ?? Object.entries(stages).find(([name]) => store.inside(name, path))?.[1];
      fill = stage === undefined ? "var(--cold)" : `color-mix(in oklab, ${STAGES[stage % STAGES.length]} 45%, var(--cold))`;
    }
    if (group.localName === "rect") group.style.fill = fill;
    for (const rect of group.children) if (rect.localName === "rect" && !rect.classList.contains("inner")) rect.style.fill = fill;
    group.classList.toggle("dark-fill", share > 0.9 && this.shade !== "policy");
  }

  scale(most) {
    const legend = this.find(".legend");
    legend.querySelector(".scale")?.remove();
    for (const kind of legend.querySelectorAll(":scope > span:has(> i)")) kind.hidden = this.shade !== "kind";
    if (this.shade === "kind") return;
    const words = this.shade === "time" ? `0 to ${timeText(most)}, forward and backward` : `0 to ${bytesText(most)} saved for backward`;
    const item = make("span.scale");
    if (this.shade === "policy") item.append(...POLICIES.slice(1).map((kind) => make("span", {}, make("i", { style: { background: `var(--${kind})` } }), kind)), " white: kept");
    else if (this.shade === "stage") item.append("one colour for each stage");
    else item.append(make("span.ramp"), words);
    legend.prepend(item);
  }
}
