// The timeline: what every rank does in a step, its memory beneath; of any plan, beside plain training.
"use strict";

const EVENT_COLOURS = { forward: "--forward", backward: "--backward", step: "--optimizer", recompute: "--recompute", encode: "--encode",
  decode: "--encode", evict: "--offload", fetch: "--offload", copy: "--offload" };
const EVENT_NAMES = { "--optimizer": "optimizer", "--encode": "encode, decode", "--offload": "copies out and in" };

function showTimeline(section, store) {
  return new TimelinePanel(section, store);
}

class TimelinePanel {
  constructor(section, store) {
    this.store = store;
    this.section = section;
    section.classList.add("timeline");
    this.which = make("select", { "aria-label": "Which plan", onchange: () => this.pick(this.which.value) });
    this.words = make("span.note");
    this.said = make("span.pill.bad", { role: "alert", hidden: true });
    this.runs = make("button.act.measure", { title: "Train one step on this machine, in a process of its own, and record it", onclick: () => this.measure() }, "Run a step here");
    this.canvas = make("canvas", { tabIndex: 0, "aria-label": "Events over time; + and - zoom, arrows move, 0 shows all" });
    this.host = make("div.canvas-host", {}, this.canvas);
    this.empty = make("div.waiting", { hidden: true }, make("b", {}, "No timeline yet"), "It appears with the first plan.");
    this.legend = make("div.keys");
    this.chosen = "plan";  // or the plan for several devices, or a recorded run
    section.append(
      make("div.tools", {}, make("label", {}, "Plan ", this.which), this.words, this.said, document.body.dataset.live === "true" ? this.runs : "",
        make("button.act", { title: "Show everything (0)", onclick: () => this.fit() }, "Fit"),
        make("button.act", { title: "A trace that ui.perfetto.dev and chrome://tracing open", onclick: () => this.trace() }, "Trace for Perfetto")),
      this.empty, this.host, this.legend);
    this.canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    this.canvas.addEventListener("pointerdown", (event) => this.drag(event));
    this.canvas.addEventListener("pointermove", (event) => this.hover(event));
    this.canvas.addEventListener("pointerleave", hideTip);
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    this.canvas.addEventListener("dblclick", () => this.fit());
    store.on("plan", () => this.show());
    store.on("piece", ({ name }) => ["plans", "pipeline", "run", "predicted_run"].includes(name) && this.show());
    store.on("select", () => this.draw());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    onResize(this.host, () => this.draw());
    if (store.data.pipeline?.timeline) this.chosen = "pipeline";
    if (store.data.run?.recorded) this.chosen = "run";
    this.show();
  }

  get pipeline() {
    return this.chosen !== "plan";
  }

  pick(value) {
    this.chosen = value === "pipeline" || value === "run" ? value : "plan";
    if (this.chosen === "plan" && value !== "hand") this.store.pick(Number(value));
    else this.show();
  }

  /** What is drawn: a predicted timeline, and a measured one beside it where there is one. */
  timelines() {
    const { store } = this, { pipeline, run, predicted_run: predicted } = store.data;
    const planned = predicted ?? (pipeline?.timeline?.ranks === run?.recorded?.ranks ? pipeline?.timeline : null);
    if (this.chosen === "run" && run?.recorded) return [planned ?? null, run.recorded];
    if (this.chosen === "pipeline" && pipeline?.timeline) return [pipeline.timeline, null];
    return [store.plan?.timeline ?? null, store.plan ? store.measured.get(planKey(store.plan)) ?? null : null];
  }

  show() {
    const { store } = this, { pipeline, run } = store.data;
    const options = store.points.map((p, i) => make("option", { value: String(i) }, `${bytesText(p.peak_bytes)}, ${p.over_plain.toFixed(3)}×${p.plain ? ", plain training" : ""}`));
    if (store.hand) options.push(make("option", { value: "hand" }, `by hand: ${bytesText(store.hand.peak_bytes)}, ${store.hand.over_plain.toFixed(3)}×`));
    if (pipeline?.timeline) options.unshift(make("option", { value: "pipeline" }, `${pipeline.devices} devices, ${pipeline.arrangement}`));
    if (run?.recorded) options.unshift(make("option", { value: "run" }, `the run ${run.folder}, as it was recorded`));
    this.which.replaceChildren(...options);
    this.which.value = this.pipeline ? this.chosen : store.hand ? "hand" : String(store.point);
    const [predicted, measured] = this.timelines();
    this.shown = predicted ?? measured;
    this.beside = predicted ? measured : null;
    this.empty.hidden = this.shown !== null;
    this.host.hidden = this.legend.hidden = this.shown === null;
    this.runs.hidden = this.pipeline || !store.plan;
    if (!this.shown) return;
    this.stretch = this.beside && Math.abs(Math.log(this.beside.step_s / this.shown.step_s)) > Math.log(4) ? this.shown.step_s / this.beside.step_s : 1;
    this.words.textContent = this.sentence(predicted, measured);
    this.lanes = this.lanesOf();
    const lines = [this.shown, this.beside].filter(Boolean);
    const kinds = new Set(lines.flatMap((line) => line.events.map((event) => line.kinds[event[2]])));
    const colours = new Map([...kinds].map((kind) => [EVENT_COLOURS[kind] ?? "--wait", kind]));
    this.legend.replaceChildren(...[...colours].map(([colour, kind]) => make("span", {}, make("i", { style: { background: `var(${colour})` } }), EVENT_NAMES[colour] ?? kind)),
      make("span.note", {}, "scroll zooms, dragging moves, double click shows all"));
    this.fit();
  }

  sentence(predicted, measured) {
    const { store } = this, line = predicted ?? measured, held = (one) => Math.max(...one.memory.map((m) => m.peak_bytes));
    const idle = line.ranks > 1 ? `, ranks wait ${percent(line.bubble)}` : "", peak = (one) => (held(one) ? `, peak ${bytesText(held(one))}` : "");
    if (!predicted) return `measured step ${timeText(line.step_s)}${peak(line)}${idle}`;
    if (measured) {
      const alone = measured.alone_s ?? measured.step_s, here = measured.device ? ` on ${measured.device}` : "";
      const apart = this.stretch === 1 ? "" : `; drawn ${this.stretch < 1 ? `${(1 / this.stretch).toPrecision(2)} times shorter` : `${this.stretch.toPrecision(2)} times longer`}`;
      const watched = measured.alone_s ? ` (${timeText(measured.step_s)} while it was recorded)` : "";
      return `predicted ${timeText(line.step_s)}${peak(line)} for ${store.data.about.device}; measured ${timeText(alone)}${watched}${peak(measured)}${here}: ${(alone / line.step_s).toPrecision(3)}× the prediction${apart}`;
    }
    const plan = this.pipeline ? null : store.plan, plainLine = store.points.find((p) => p.plain)?.timeline;
    const slower = plainLine ? line.step_s / plainLine.step_s : 1;
    const apart = plan && Math.abs(slower / plan.over_plain - 1) > 0.03 ? `, ${slower.toFixed(3)}× plain (${plan.over_plain.toFixed(3)}× by the planner, which queues copies otherwise)` : "";
    const more = plan && held(line) > plan.peak_bytes * 1.02 ? ` (${bytesText(plan.peak_bytes)} by the planner)` : "";
    return `simulated step ${timeText(line.step_s)}${apart}${peak(line)}${more}${idle}`;
  }

  /** Ask the server to run a step by the plan that is looked at. */
  async measure() {
    const { store, runs } = this, { plan } = store;
    runs.disabled = true;
    runs.textContent = "Running a step…";
    this.said.hidden = true;
    try {
      const answer = await fetch("measure", { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify({ plan: plan.plain ? null : plan.document, needed_bytes: plan.peak_bytes }) });
      const found = await answer.json();
      if (!answer.ok) throw new Error(found.error);
      store.measured.set(planKey(plan), found);
      this.show();
    } catch (error) {
      this.said.textContent = String(error.message);
      this.said.hidden = false;
    }
    runs.disabled = false;
    runs.textContent = "Run a step here";
  }

  /** Rows of ranks and streams that something happens on, the measured ones below the predicted ones of their rank. */
  lanesOf() {
    const used = new Map();
    [this.shown, this.beside].forEach((line, k) => line?.events.forEach(([rank, stream]) => used.set(`${rank} ${k} ${stream}`, [rank, k, stream])));
    const lanes = [...used.values()].sort((a, b) => a[0] - b[0] || a[1] - b[1] || a[2] - b[2]);
    const first = new Set();
    return lanes.map(([rank, k, stream]) => {
      const line = k ? this.beside : this.shown, group = `${rank} ${k}`, begins = !first.has(group);
      first.add(group);
      const names = [line.ranks > 1 ? `rank ${rank}` : "", this.beside && begins ? (k ? "measured" : "predicted") : "", line.streams[stream] === "compute" && this.beside ? "" : line.streams[stream]];
      return { rank, stream, line, by: k ? this.stretch : 1, name: names.filter(Boolean).join(" "), begins };
    });
  }

  get end() {
    return Math.max(this.shown?.step_s ?? 1, (this.beside?.step_s ?? 0) * (this.stretch ?? 1)) * 1e6 * 1.005;
  }

  fit() {
    this.from = 0;
    this.to = this.end;
    this.draw();
  }

  wheel(event) {
    if (!this.shown) return;
    event.preventDefault();
    const box = this.canvas.getBoundingClientRect(), span = this.to - this.from;
    const at = this.from + ((event.clientX - box.left - this.left) / (box.width - this.left)) * span;
    if (event.ctrlKey || event.metaKey || Math.abs(event.deltaY) > Math.abs(event.deltaX)) {
      const by = Math.exp(event.deltaY * 0.002);
      this.view(at - (at - this.from) * by, at + (this.to - at) * by);
    } else this.view(this.from + (event.deltaX / box.width) * span, this.to + (event.deltaX / box.width) * span);
  }

  view(from, to) {
    const { end } = this, span = Math.min(Math.max(to - from, end / 5000), end);
    this.from = Math.min(Math.max(0, from), end - span);
    this.to = this.from + span;
    this.draw();
  }

  drag(down) {
    const { from, to } = this, wide = this.canvas.clientWidth - this.left;
    this.canvas.setPointerCapture(down.pointerId);
    let moved = 0;
    const move = (event) => {
      const by = ((down.clientX - event.clientX) / wide) * (to - from);
      moved = Math.max(moved, Math.abs(down.clientX - event.clientX));
      if (moved > 3) this.view(from + by, to + by);
    };
    const up = (event) => {
      this.canvas.removeEventListener("pointermove", move);
      if (moved > 3) return;
      const hit = this.at(event), call = hit && this.callOf(hit);
      if (call) this.store.select(call[1], "timeline");
    };
    this.canvas.addEventListener("pointermove", move);
    this.canvas.addEventListener("pointerup", up, { once: true });
  }

  key(event) {
    const span = this.to - this.from, middle = (this.from + this.to) / 2;
    if (event.key === "+" || event.key === "=") this.view(middle - span / 3, middle + span / 3);
    else if (event.key === "-") this.view(middle - span * 0.75, middle + span * 0.75);
    else if (event.key === "ArrowLeft") this.view(this.from - span / 8, this.to - span / 8);
    else if (event.key === "ArrowRight") this.view(this.from + span / 8, this.to + span / 8);
    else if (event.key === "0") this.fit();
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  callOf(event) {
    return typeof event[3] === "number" ? this.store.data.costs.calls[event[3]] : this.store.callNamed(event[3]);
  }

  at({ clientX, clientY }) {
    if (!this.shown) return null;
    const box = this.canvas.getBoundingClientRect(), lane = this.lanes[Math.floor((clientY - box.top - this.head) / this.tall)];
    if (!lane) return null;
    const time = this.from + ((clientX - box.left - this.left) / (box.width - this.left)) * (this.to - this.from);
    const slack = ((this.to - this.from) / box.width) * 1.5;
    this.hit = lane;
    return lane.line.events.find(([rank, stream, , , start, length]) => rank === lane.rank && stream === lane.stream && time >= start * lane.by - slack && time <= (start + length) * lane.by + slack) ?? null;
  }

  hover(event) {
    if (!this.shown || event.buttons) return hideTip();
    const hit = this.at(event);
    if (!hit) return this.memoryAt(event);
    const call = this.callOf(hit), kind = this.hit.line.kinds[hit[2]];
    const name = call && typeof hit[3] === "number" ? call[0] : hit[3];
    showTip(event, make("b", {}, `${kind} ${name}${this.hit.line === this.beside ? ", measured" : ""}`), `${timeText(hit[5] / 1e6)}, from ${timeText(hit[4] / 1e6)}`, hit[6] ? bytesText(hit[6]) : "", call && this.store.blocks.get(call[1]) ? make("div.dim", {}, this.store.blocks.get(call[1]).type) : "");
  }

  memoryAt(event) {
    const box = this.canvas.getBoundingClientRect();
    if (event.clientY - box.top < this.curveTop || event.clientX - box.left < this.left) return hideTip();
    const time = this.from + ((event.clientX - box.left - this.left) / (box.width - this.left)) * (this.to - this.from);
    const held = (line, by) => line.memory.map((m) => m.bytes[Math.max(0, m.times_us.findLastIndex((t) => t * by <= time))] ?? 0);
    const rows = (sizes, word) => sizes.slice(0, 8).map((size, rank) => `${sizes.length > 1 ? `rank ${rank}: ` : ""}${bytesText(size)}${word}`);
    showTip(event, make("b", {}, timeText(Math.max(0, time) / 1e6)), ...rows(held(this.shown, 1), this.beside ? " predicted" : ""), ...(this.beside ? rows(held(this.beside, this.stretch), " measured") : []));
  }

  draw() {
    if (this.shown && this.host.clientWidth) drawLanes(this);
  }

  /** Predicted and measured events in the format of chrome://tracing and Perfetto, a process for each rank of either. */
  trace() {
    const events = [];
    for (const [k, line] of [this.shown, this.beside].entries()) {
      if (!line) continue;
      const process = (rank) => rank + k * line.ranks, word = this.beside ? (k ? " measured" : " predicted") : "";
      for (let rank = 0; rank < line.ranks; rank++) {
        events.push({ ph: "M", pid: process(rank), name: "process_name", args: { name: `rank ${rank}${word}` } });
        line.streams.forEach((name, tid) => events.push({ ph: "M", pid: process(rank), tid, name: "thread_name", args: { name } }));
      }
      for (const event of line.events) {
        const [rank, stream, kind, , ts, dur, bytes] = event, call = this.callOf(event);
        const name = typeof event[3] === "number" ? call?.[0] : event[3];
        events.push({ ph: "X", pid: process(rank), tid: stream, ts, dur, cat: line.kinds[kind], name: `${line.kinds[kind]} ${name}`, args: { bytes, block: call?.[1] } });
      }
      line.memory.forEach((m, rank) => m.times_us.forEach((ts, i) => events.push({ ph: "C", pid: process(rank), ts, name: "memory", args: { bytes: m.bytes[i] } })));
    }
    download("trace.json", JSON.stringify({ traceEvents: events, displayTimeUnit: "ms" }));
  }
}
