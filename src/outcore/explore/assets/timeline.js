// The timeline: what every rank does in a step, its memory beneath; of any plan, beside plain training.
"use strict";

const EVENT_COLOURS = { forward: "--forward", backward: "--backward", step: "--optimizer", recompute: "--recompute", encode: "--encode",
  decode: "--encode", evict: "--offload", fetch: "--offload", copy: "--offload" };

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
    this.canvas = make("canvas", { tabIndex: 0, "aria-label": "Events over time; + and - zoom, arrows move, 0 shows all" });
    this.host = make("div.canvas-host", {}, this.canvas);
    this.legend = make("div.keys");
    this.pipeline = false;
    section.append(
      make("div.tools", {}, make("label", {}, "Plan ", this.which), this.words,
        make("button.act", { title: "Show everything (0)", onclick: () => this.fit() }, "Fit"),
        make("button.act", { title: "A trace that ui.perfetto.dev and chrome://tracing open", onclick: () => this.trace() }, "Trace for Perfetto")),
      this.host, this.legend);
    this.canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    this.canvas.addEventListener("pointerdown", (event) => this.drag(event));
    this.canvas.addEventListener("pointermove", (event) => this.hover(event));
    this.canvas.addEventListener("pointerleave", hideTip);
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    this.canvas.addEventListener("dblclick", () => this.fit());
    store.on("plan", () => this.show());
    store.on("piece", ({ name }) => (name === "plans" || name === "pipeline") && this.show());
    store.on("select", () => this.draw());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    onResize(this.host, () => this.draw());
    if (store.data.pipeline?.timeline) this.pipeline = true;
    this.show();
  }

  pick(value) {
    this.pipeline = value === "pipeline";
    if (!this.pipeline && value !== "hand") this.store.pick(Number(value));
    else this.show();
  }

  show() {
    const { store } = this, devices = store.data.pipeline;
    const options = store.points.map((p, i) => make("option", { value: String(i) }, `${bytesText(p.peak_bytes)}, ${p.over_plain.toFixed(3)}×${p.plain ? ", plain training" : ""}`));
    if (store.hand) options.push(make("option", { value: "hand" }, `by hand: ${bytesText(store.hand.peak_bytes)}, ${store.hand.over_plain.toFixed(3)}×`));
    if (devices?.timeline) options.unshift(make("option", { value: "pipeline" }, `${devices.devices} devices, ${devices.arrangement}`));
    this.which.replaceChildren(...options);
    this.which.value = this.pipeline ? "pipeline" : store.hand ? "hand" : String(store.point);
    this.shown = this.pipeline ? devices.timeline : store.plan?.timeline ?? null;
    if (!this.shown) return;
    const line = this.shown, idle = line.ranks > 1 ? `, ranks wait ${percent(line.bubble)}` : "";
    const plan = this.pipeline ? null : store.plan;
    const plainLine = store.points.find((p) => p.plain)?.timeline, slower = plainLine ? line.step_s / plainLine.step_s : 1;
    const apart = plan && Math.abs(slower / plan.over_plain - 1) > 0.03 ? `, ${slower.toFixed(3)}× plain (${plan.over_plain.toFixed(3)}× by the planner, which queues copies otherwise)` : "";
    const held = Math.max(...line.memory.map((m) => m.peak_bytes)), more = plan && held > plan.peak_bytes * 1.02 ? ` (${bytesText(plan.peak_bytes)} by the planner)` : "";
    this.words.textContent = `simulated step ${timeText(line.step_s)}${apart}, peak ${bytesText(held)}${more}${idle}`;
    this.lanes = this.lanesOf(line);
    const kinds = [...new Set(line.events.map((event) => line.kinds[event[2]]))];
    this.legend.replaceChildren(...kinds.map((kind) => make("span", {}, make("i", { style: { background: `var(${EVENT_COLOURS[kind] ?? "--wait"})` } }), kind === "step" ? "optimizer" : kind)),
      make("span.note", {}, "scroll with Ctrl zooms, dragging moves, double click shows all"));
    this.fit();
  }

  /** Rows of ranks and streams that something happens on. */
  lanesOf(line) {
    const used = new Map();
    for (const [rank, stream] of line.events) used.set(`${rank} ${stream}`, [rank, stream]);
    const lanes = [...used.values()].sort((a, b) => a[0] - b[0] || a[1] - b[1]);
    return lanes.map(([rank, stream]) => ({ rank, stream, name: (line.ranks > 1 ? `rank ${rank} ` : "") + line.streams[stream] }));
  }

  fit() {
    this.from = 0;
    this.to = (this.shown?.step_s ?? 1) * 1e6 * 1.005;
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
    const end = this.shown.step_s * 1e6 * 1.005, span = Math.min(Math.max(to - from, end / 5000), end);
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
    return typeof event[3] === "number" ? this.store.data.costs.calls[event[3]] : this.store.data.costs.calls.find(([name]) => name === String(event[3]).split(":")[0].split("~")[0]);
  }

  at({ clientX, clientY }) {
    if (!this.shown) return null;
    const box = this.canvas.getBoundingClientRect(), lane = this.lanes[Math.floor((clientY - box.top - this.head) / this.tall)];
    if (!lane) return null;
    const time = this.from + ((clientX - box.left - this.left) / (box.width - this.left)) * (this.to - this.from);
    const slack = ((this.to - this.from) / box.width) * 1.5;
    return this.shown.events.find(([rank, stream, , , start, length]) => rank === lane.rank && stream === lane.stream && time >= start - slack && time <= start + length + slack) ?? null;
  }

  hover(event) {
    if (!this.shown || event.buttons) return hideTip();
    const hit = this.at(event);
    if (!hit) return this.memoryAt(event);
    const call = this.callOf(hit), kind = this.shown.kinds[hit[2]];
    const name = call && typeof hit[3] === "number" ? call[0] : hit[3];
    showTip(event, make("b", {}, `${kind} ${name}`), `${timeText(hit[5] / 1e6)}, from ${timeText(hit[4] / 1e6)}`, hit[6] ? bytesText(hit[6]) : "", call && this.store.blocks.get(call[1]) ? make("div.dim", {}, this.store.blocks.get(call[1]).type) : "");
  }

  memoryAt(event) {
    const box = this.canvas.getBoundingClientRect();
    if (event.clientY - box.top < this.curveTop || event.clientX - box.left < this.left) return hideTip();
    const time = this.from + ((event.clientX - box.left - this.left) / (box.width - this.left)) * (this.to - this.from);
    const held = this.shown.memory.map((m) => m.bytes[Math.max(0, m.times_us.findLastIndex((t) => t <= time))] ?? 0);
    showTip(event, make("b", {}, timeText(Math.max(0, time) / 1e6)), ...held.slice(0, 8).map((size, rank) => (held.length > 1 ? `rank ${rank}: ${bytesText(size)}` : bytesText(size))));
  }

  draw() {
    if (!this.shown || !this.host.clientWidth) return;
    const width = this.host.clientWidth, height = Math.max(260, this.host.clientHeight), scale = devicePixelRatio || 1;
    const { canvas, shown, lanes } = this, pen = canvas.getContext("2d"), style = getComputedStyle(document.body);
    const colour = (name) => style.getPropertyValue(name).trim();
    canvas.width = width * scale;
    canvas.height = height * scale;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.font = `11px ${style.fontFamily}`;
    this.left = 96;
    this.head = 26;
    const room = height - this.head - 30, curve = Math.max(90, Math.min(room * 0.5, room - lanes.length * 20));
    this.tall = Math.max(10, Math.min(54, (room - curve) / lanes.length));
    this.curveTop = this.head + lanes.length * this.tall + 22;
    const px = (time) => this.left + ((time - this.from) / (this.to - this.from)) * (width - this.left);
    pen.fillStyle = colour("--soft");
    pen.strokeStyle = colour("--line");
    for (const tick of niceTicks(this.from / 1e6, this.to / 1e6, 8)) {
      const x = px(tick * 1e6);
      if (x < this.left - 1 || x > width) continue;
      pen.beginPath();
      pen.moveTo(x, this.head - 6);
      pen.lineTo(x, height - 8);
      pen.stroke();
      pen.fillText(timeText(tick), Math.min(x + 3, width - 46), 14);
    }
    lanes.forEach((lane, i) => {
      pen.fillStyle = colour("--soft");
      pen.fillText(lane.name, 8, this.head + i * this.tall + this.tall / 2 + 4);
    });
    this.events(pen, px, width, colour);
    this.curve(pen, px, width, height, colour);
  }

  events(pen, px, width, colour) {
    const { shown, lanes, store } = this, row = new Map(lanes.map((lane, i) => [`${lane.rank} ${lane.stream}`, i]));
    const fills = shown.kinds.map((kind) => colour(EVENT_COLOURS[kind] ?? "--wait"));
    for (const event of shown.events) {
      const [rank, stream, kind, , start, length] = event;
      const x1 = Math.max(this.left, px(start)), x2 = Math.min(width, px(start + length));
      if (x2 < this.left || x1 > width) continue;
      const y = this.head + row.get(`${rank} ${stream}`) * this.tall + 2, wide = Math.max(0.7, x2 - x1 - (x2 - x1 > 4 ? 0.7 : 0));
      pen.fillStyle = fills[kind];
      pen.globalAlpha = store.selected ? 0.35 : 1;
      if (store.selected !== null && store.selected !== "") {
        const call = this.callOf(event);
        if (call && store.inside(call[1], store.selected)) pen.globalAlpha = 1;
      } else pen.globalAlpha = 1;
      pen.fillRect(x1, y, wide, this.tall - 4);
      pen.globalAlpha = 1;
      if (wide > 56) {
        const call = typeof event[3] === "number" ? store.data.costs.calls[event[3]]?.[0] : String(event[3]);
        const name = (call ?? "").replace(/#0$/, "");
        pen.fillStyle = "#ffffff";
        const fit = Math.floor((wide - 8) / 6);
        pen.fillText(name.length > fit ? name.slice(0, Math.max(1, fit - 1)) + "…" : name, x1 + 4, y + (this.tall - 4) / 2 + 4);
      }
    }
  }

  /** Memory of every rank; plain training in grey behind it, the device's memory as a line. */
  curve(pen, px, width, height, colour) {
    const { shown, store } = this, base = height - 10, top = this.curveTop;
    const plain = !this.pipeline && store.plan && !store.plan.plain ? store.points.find((p) => p.plain)?.timeline : null;
    const curves = [...shown.memory.map((m, i) => [m, this.pipeline ? STAGES[i % STAGES.length] : colour("--accent"), !this.pipeline])];
    const most = Math.max(...shown.memory.map((m) => m.peak_bytes), plain?.memory[0].peak_bytes ?? 0, 1) * 1.06;
    const py = (bytes) => base - (bytes / most) * (base - top);
    pen.fillStyle = colour("--soft");
    pen.fillText("memory", 8, top + 10);
    pen.fillText(bytesText(most / 1.06), 8, top + 25);
    const trace = (m) => {
      let last = null;
      m.times_us.forEach((time, i) => {
        const x = Math.min(width, Math.max(this.left, px(time)));
        if (last === null) pen.moveTo(x, py(m.bytes[i]));
        else pen.lineTo(x, py(last));
        pen.lineTo(x, py(m.bytes[i]));
        last = m.bytes[i];
      });
      pen.lineTo(Math.min(width, px(shown.step_s * 1e6)), py(last ?? 0));
    };
    if (plain) {
      pen.beginPath();
      trace(plain.memory[0]);
      pen.strokeStyle = colour("--faint");
      pen.setLineDash([4, 3]);
      pen.stroke();
      pen.setLineDash([]);
      pen.fillStyle = colour("--faint");
      pen.fillText("plain training", this.left + 6, py(plain.memory[0].peak_bytes) + 12);
    }
    for (const [m, stroke, filled] of curves) {
      pen.beginPath();
      trace(m);
      pen.strokeStyle = stroke;
      pen.lineWidth = 1.6;
      pen.stroke();
      pen.lineWidth = 1;
      if (filled) {
        pen.lineTo(Math.min(width, px(shown.step_s * 1e6)), base);
        pen.lineTo(Math.max(this.left, px(0)), base);
        pen.globalAlpha = 0.13;
        pen.fillStyle = stroke;
        pen.fill();
        pen.globalAlpha = 1;
      }
    }
    for (const [bytes, name, tint] of [[store.capacity, "capacity", "--bad"], [store.budget, "budget", "--accent"]]) {
      if (bytes === null || bytes > most || this.pipeline && name === "budget") continue;
      pen.strokeStyle = colour(tint);
      pen.setLineDash([5, 4]);
      pen.beginPath();
      pen.moveTo(this.left, py(bytes));
      pen.lineTo(width, py(bytes));
      pen.stroke();
      pen.setLineDash([]);
      pen.fillStyle = colour(tint);
      pen.fillText(`${name} ${bytesText(bytes)}`, width - 130, py(bytes) - 4);
    }
  }

  /** The events in the format of chrome://tracing and Perfetto. */
  trace() {
    const line = this.shown, events = [];
    for (const event of line.events) {
      const [rank, stream, kind, , ts, dur, bytes] = event, call = this.callOf(event);
      const name = typeof event[3] === "number" ? call?.[0] : event[3];
      events.push({ ph: "X", pid: rank, tid: stream, ts, dur, name: `${line.kinds[kind]} ${name}`, args: { bytes, block: call?.[1] } });
    }
    line.memory.forEach((m, rank) => m.times_us.forEach((ts, i) => events.push({ ph: "C", pid: rank, ts, name: "memory", args: { bytes: m.bytes[i] } })));
    line.streams.forEach((name, tid) => { for (let pid = 0; pid < line.ranks; pid++) events.push({ ph: "M", pid, tid, name: "thread_name", args: { name } }); });
    download("trace.json", JSON.stringify({ traceEvents: events, displayTimeUnit: "ms" }));
  }
}
