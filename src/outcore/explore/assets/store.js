// What the page knows and what is chosen on it. Panels listen; nothing else is shared between them.
//
//   "piece"   a piece of the bundle came or changed         { name }
//   "sizes"   batch, image or budget changed
//   "plan"    another plan is looked at
//   "select"  another block is looked at                    { from }
"use strict";

/** What a plan does to buffers, as a text. */
function planKey(plan) {
  return JSON.stringify(plan.policy);
}

class Store {
  constructor(bundle) {
    this.data = bundle;
    this.listeners = new Map();
    this.selected = null;
    this.hand = null;
    this.measured = new Map();  // planKey -> a step that was run by it
    this.point = 0;
    this.budget = null;
    this.batch = null;
    this.image = null;
    this.begin();
  }

  on(name, act) {
    if (!this.listeners.has(name)) this.listeners.set(name, []);
    this.listeners.get(name).push(act);
  }

  emit(name, detail = {}) {
    for (const act of this.listeners.get(name) ?? []) act(detail);
  }

  /** Take over what the bundle says where the user has not chosen anything. */
  begin() {
    const { about, sizes } = this.data;
    if (!about) return;
    this.blocks = new Map(this.data.graph.blocks.map((block) => [block.path, block]));
    this.batch ??= about.batch;
    this.image ??= sizes?.own[1] ?? null;
    if (this.budget === null && about.budget_bytes) this.setBudget(about.budget_bytes);
    else this.choosePoint();
    if (this.selected !== null && !this.blocks.has(this.selected)) this.selected = null;
  }

  take(name, value) {
    this.data[name] = value;
    if (name === "about") {
      this.batch = value.batch;
      this.image = null;
      this.hand = null;
    }
    if (["about", "graph", "sizes", "plans"].includes(name)) this.begin();
    this.emit("piece", { name });
  }

  // Costs

  /** A number of a block: forward_s, backward_s, saved_bytes, … or time_s, peak_bytes. */
  cost(path, what) {
    const { columns, rows } = this.data.costs.blocks, row = rows[path];
    if (!row) return 0;
    if (what === "time_s") return row[0] + row[1];
    if (what === "peak_bytes") return row.slice(5).reduce((sum, value) => sum + value, 0);
    return row[columns.indexOf(what)];
  }

  /** The row of a call by its name, or of an event that names what a call made: "layer1#0:out". */
  callNamed(name) {
    const { calls } = this.data.costs;
    if (this.indexed !== calls) {
      this.indexed = calls;
      this.byName = new Map(calls.map((row) => [row[0], row]));
    }
    return this.byName.get(String(name).split(":")[0].split("~")[0]);
  }

  // Sizes and plans

  get capacity() {
    return this.data.about.capacity_bytes;
  }

  get atOwnSize() {
    const own = this.data.sizes?.own ?? [this.data.about.batch, this.image];
    return this.batch === own[0] && (this.image === own[1] || own[1] === null);
  }

  setSizes(batch, image) {
    if (batch === this.batch && image === this.image) return;
    [this.batch, this.image] = [batch, image];
    this.choosePoint();
    this.emit("sizes");
  }

  setBudget(bytes) {
    this.budget = bytes;
    this.hand = null;
    this.choosePoint();
    this.emit("sizes");
    this.emit("plan");
  }

  /** The fastest plan within the budget, or within the device's memory. */
  choosePoint() {
    const points = this.points;
    if (!points.length || this.hand) return;
    const most = this.budget ?? this.capacity, scale = this.scale();
    const fitting = points.findIndex((point) => this.peakOf(point, scale) <= most);
    this.point = fitting < 0 ? points.length - 1 : fitting;
  }

  pick(index) {
    this.hand = null;
    this.point = index;
    this.budget = this.points[index].plain ? null : this.peakOf(this.points[index], this.scale());
    this.emit("sizes");
    this.emit("plan");
  }

  setHand(point) {
    this.hand = point;
    this.emit("plan");
    this.emit("sizes");
  }

  get points() {
    return this.data.plans?.points ?? [];
  }

  /** The plan that is looked at. */
  get plan() {
    return this.hand ?? this.points[this.point] ?? null;
  }

  /** How plans change with batch and image: what they hold beside weights, by that of plain training. */
  scale() {
    if (this.atOwnSize || !this.data.sizes) return { fixed: 0, by: 1 };
    const own = predict(this, this.data.sizes.own[0], this.data.sizes.own[1]), here = predict(this, this.batch, this.image);
    const fixed = own.by_kind.slice(0, 3).reduce((sum, value) => sum + value, 0);
    return { fixed, by: Math.max(0.01, (here.peak_bytes - fixed) / Math.max(1, own.peak_bytes - fixed)) };
  }

  peakOf(point, { fixed, by }) {
    return by === 1 ? point.peak_bytes : fixed + Math.max(0, point.peak_bytes - fixed) * by;
  }

  // Selection

  select(path, from) {
    if (path === this.selected) return;
    this.selected = path;
    this.emit("select", { from });
  }

  inside(path, container) {
    return container === "" || path === container || path.startsWith(container + ".");
  }
}
