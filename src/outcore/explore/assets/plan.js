// The plan: which ones there are, what the chosen one does to every block, changes by hand, and the commands.
"use strict";

function showPlan(section, store) {
  return new PlanPanel(section, store);
}

class PlanPanel {
  constructor(section, store) {
    this.store = store;
    this.opened = new Set([""]);
    for (const path of hotBlocks(store)) for (const [name] of store.blocks) if (name !== path && store.inside(path, name)) this.opened.add(name);
    this.change = {};
    this.asked = 0;
    section.classList.add("plan");
    this.list = make("div.plan-list", { role: "listbox", tabIndex: 0, "aria-label": "Plans, the fastest first" });
    this.kinds = make("div.keys");
    this.table = make("div.plan-table");
    this.head = make("div.plan-head");
    this.side = make("aside.side");
    section.append(make("div.plan-left", {}, make("h2", {}, "Plans, the fastest first"), this.kinds, this.list, make("div.pipeline")), make("div.plan-main", {}, this.head, this.table), this.side);
    this.pipeline = section.querySelector(".pipeline");
    this.list.addEventListener("keydown", (event) => {
      const way = { ArrowDown: 1, ArrowUp: -1 }[event.key], next = store.point + way;
      if (!way || !store.points[next]) return;
      this.choose(next);
      event.preventDefault();
    });
    store.on("piece", ({ name }) => {
      if (name === "plans") this.change = {};
      if (["plans", "pipeline", "commands"].includes(name)) this.update();
    });
    store.on("plan", () => this.update());
    store.on("sizes", () => this.commands());
    store.on("select", () => this.mark());
    this.update();
  }

  choose(index) {
    this.change = {};
    this.store.pick(index);
  }

  update() {
    const { store } = this, plan = store.plan;
    const rows = store.points.map((point, i) => make("button.plan-row", { role: "option", "aria-selected": String(!store.hand && i === store.point), tabIndex: -1, onclick: () => this.choose(i) },
      make("b", {}, bytesText(point.peak_bytes)), make("span", {}, `${point.over_plain.toFixed(3)}×`), make("span.time", {}, timeText(point.time_s)), policyBar(point.blocks[""]),
      make("i", {}, point.plain ? "plain training" : point.peak_bytes <= store.capacity ? "" : "larger than the device")));
    if (store.hand) rows.push(make("button.plan-row.hand", { role: "option", "aria-selected": "true", tabIndex: -1 }, make("b", {}, bytesText(store.hand.peak_bytes)), make("span", {}, `${store.hand.over_plain.toFixed(3)}×`), make("span.time", {}, timeText(store.hand.time_s)), policyBar(store.hand.blocks[""]), make("i", {}, "by hand")));
    this.list.replaceChildren(...rows, store.data.plans?.complete ? "" : make("p.note", {}, "searching for more…"));
    const used = POLICIES.filter((kind) => store.points.some((point) => point.blocks[""]?.[kind]));
    this.kinds.replaceChildren(...used.map((kind) => make("span", {}, make("i", { style: { background: `var(--${kind})` } }), kind)));
    this.devices();
    if (!plan) {
      this.head.replaceChildren(make("div.waiting", {}, make("b", {}, "Plans are being searched for"), "They appear here one by one."));
      return;
    }
    const plain = store.points.find((p) => p.plain), less = plain ? 1 - plan.peak_bytes / plain.peak_bytes : 0;
    this.head.replaceChildren(
      make("h3", {}, `${bytesText(plan.peak_bytes)} at ${plan.over_plain.toFixed(3)}× the time`, plan.plain ? "" : make("span.note", {}, `  ${percent(less)} less memory than plain training`)),
      make("p", {}, policyWords(plan)), policyLegend(plan.blocks[""]),
      this.live ? make("p.note", {}, Object.keys(this.change).length ? "Changed by hand: " : "Change what happens to a block below; the step is simulated again at once. ",
        Object.keys(this.change).length ? make("button.link", { onclick: () => { this.change = {}; store.setHand(null); } }, "undo all changes") : "") : make("p.note", {}, "This page was exported: to change a plan by hand, start ", make("code", {}, "outcore explore"), "."));
    this.rows();
    this.commands();
  }

  get live() {
    return document.body.dataset.live === "true";
  }

  /** The plan for several devices, where one was asked for. */
  devices() {
    const found = this.store.data.pipeline;
    if (!found) return this.pipeline.replaceChildren();
    const rows = [make("h2", {}, counted(found.devices, "device"))];
    if (found.refused) rows.push(make("p.note", {}, found.refused));
    else {
      rows.push(make("p", {}, make("b", {}, found.arrangement), ` · ${found.schedule}, ${found.micro_batches} micro-batches`), make("p.note", {}, `step ${timeText(found.step_s)}, ranks wait ${percent(found.bubble)}`));
      rows.push(...found.stages.map((stage, k) => make("div.stage-row", {}, make("i", { style: { background: STAGES[k % STAGES.length] } }), make("span", { title: stage.join(", ") }, shortPath(stage.length > 1 ? `${stage[0]} … ${stage.at(-1)}` : stage[0], 34)), make("b", {}, bytesText(found.peak_bytes[k] ?? 0)))));
      rows.push(make("button.act", { onclick: () => download("plan.json", JSON.stringify(found.document, null, 1)) }, "Download its plan.json"));
      rows.push(...found.why.slice(0, 4).map((line) => make("p.note", {}, line)));
    }
    this.pipeline.replaceChildren(...rows);
  }

  /** Blocks that save something, opened level by level. */
  rows() {
    const { store } = this, plan = store.plan, out = [];
    const total = (path) => POLICIES.reduce((sum, kind) => sum + (plan.blocks[path]?.[kind] ?? 0), 0);
    const most = Math.max(...[...store.blocks.get("").children].map(total), 1);
    const visit = (path, depth) => {
      const block = store.blocks.get(path), row = plan.blocks[path] ?? {}, size = total(path);
      if (!size && path !== "") return;
      const inner = block.children.filter((child) => total(child) > 0), open = this.opened.has(path);
      if (path !== "") out.push(this.row(path, block, row, size, depth, inner.length > 0, open, most));
      if (open) for (const child of inner) visit(child, path === "" ? 0 : depth + 1);
    };
    visit("", 0);
    this.table.replaceChildren(make("div.plan-block.head", {}, make("span", {}, "block"), make("span.size", {}, "saved"), make("span", {}, "what happens to it"), make("span", {}, "extra time"), make("span", {}, this.live ? "by hand" : "")), ...out);
    this.mark();
  }

  row(path, block, row, size, depth, opens, open, most) {
    const { store } = this;
    const toggle = opens ? make("button.opener", { "aria-expanded": String(open), "aria-label": `${open ? "Close" : "Open"} ${path}`, onclick: () => { if (!this.opened.delete(path)) this.opened.add(path); this.rows(); } }, open ? "▾" : "▸") : make("span.opener");
    const main = POLICIES.reduce((a, b) => ((row[b] ?? 0) > (row[a] ?? 0) ? b : a), "keep");
    const chosen = this.change[path] ?? (POLICIES.filter((kind) => row[kind]).length > 1 ? "mixed" : main);
    const hand = this.live ? make("select", { "aria-label": `What happens to ${path}`, onchange: (event) => this.set(path, event.target.value) },
      ...(chosen === "mixed" ? [make("option", { value: "mixed", disabled: true }, "mixed")] : []), ...POLICIES.map((kind) => make("option", { value: kind }, kind))) : make("span");
    if (this.live) hand.value = chosen;
    const line = make("div.plan-block", { "data-path": path }, make("span.name", { style: { paddingLeft: `${depth * 16}px` } }, toggle, make("button.link", { onclick: () => { store.select(path, "plan"); } }, block.path.split(".").at(-1)), make("i", {}, block.type)),
      make("span.size", {}, make("b", {}, bytesText(size))), make("span.how", {}, make("span", { style: { width: `${Math.max(4, Math.min(1, size / most) * 100)}%` } }, policyBar(row))),
      make("span", {}, row.seconds ? `+${timeText(row.seconds)}` : ""), hand);
    line.dataset.path = path;
    if (path in this.change) line.classList.add("changed");
    return line;
  }

  mark() {
    for (const line of this.table.querySelectorAll("[data-path]")) line.classList.toggle("marked", line.dataset.path === this.store.selected);
  }

  /** Ask the server what the step takes with a block changed. */
  async set(path, kind) {
    const before = { ...this.change };
    this.change = { ...Object.fromEntries(Object.entries(this.change).filter(([name]) => !this.store.inside(name, path))), [path]: kind };
    const mine = ++this.asked, base = this.store.points[this.store.point];
    try {
      const answer = await fetch("simulate", { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify({ policy: base.policy, change: this.change }) });
      const found = await answer.json();
      if (mine !== this.asked) return;
      if (!answer.ok) throw new Error(found.error);
      this.store.setHand(found);
    } catch (error) {
      this.change = before;
      this.update();
      this.head.append(make("p.pill.bad", { role: "alert" }, String(error.message)));
    }
  }

  commands() {
    const { store } = this, plan = store.plan;
    if (!plan || !store.data.commands) return;
    const rows = store.data.commands.filter(({ name }) => name !== "explore").map(({ name, what }) => [make("p.note", {}, what), make("div.command", {}, make("code", { title: commandText(store, name) }, ...unbrokenWords(commandText(store, name))), copyButton(() => commandText(store, name)))]).flat();
    const tiles = store.data.plans.tiles;
    const why = tiles ? [make("h2", {}, "In tiles"), make("pre.tiles", {}, tiles.text ?? tiles.refused)] : [];
    this.side.replaceChildren(
      make("h2", {}, "This plan"), make("button.act.main", { onclick: () => download("plan.json", JSON.stringify(plan.document, null, 1)) }, "Download plan.json"),
      make("h2", {}, "Commands"), ...rows, ...why,
      make("h2", {}, "Why"), make("p.note", {}, `${store.hand ? "This plan was changed by hand." : "Of all assignments that the planner looked at, this is the fastest within its memory."} One operation alone needs ${bytesText(store.data.plans.floor_bytes)} (${store.data.plans.floor_at}): no plan can go below that.`));
  }
}
