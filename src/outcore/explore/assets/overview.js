// The overview: two figures, the sizes they depend on, the memory's budget, and where the time goes.
"use strict";

function showOverview(section, store) {
  return new Overview(section, store);
}

class Overview {
  constructor(section, store) {
    this.store = store;
    this.rate = make("div.figure");
    this.rateNote = make("div.note");
    this.rateGauge = make("div.gauge", { "aria-hidden": "true" });
    this.peak = make("div.figure");
    this.peakNote = make("div.note");
    this.parts = make("div.parts");
    this.bar = make("div.memory-bar", {}, this.parts);
    this.barKeys = make("div.keys");
    this.verdict = make("div.verdict");
    this.stepBar = make("div.stack");
    this.stepKeys = make("div.keys");
    this.batchHost = make("div.plot-host");
    this.batchCard = make("div.card.size", {}, make("h2", {}, "Batch size"), make("div.reading"), this.batchHost);
    this.imageHost = make("div.plot-host");
    this.imageCard = make("div.card.size", {}, make("h2", {}, "Image size"), make("div.reading"), this.imageHost);
    this.frontierCard = make("div.card.wide-chart");
    this.hot = make("div.hot");
    section.classList.add("overview");
    section.append(
      make("div.grid-top", {},
        make("div.card.throughput", {}, make("h2", {}, "Throughput"), this.rate, this.rateNote, this.rateGauge),
        make("div.card.memory", {}, make("h2", {}, "Peak memory"), this.peak, this.peakNote, this.bar, this.barKeys),
        make("div.card.verdict-card", {}, this.verdict)),
      make("div.grid-charts", {}, this.batchCard, this.imageCard, this.frontierCard),
      make("div.grid-bottom", {},
        make("div.card", {}, make("h2", {}, "Where the time goes"), this.hot),
        make("div.card", {}, make("h2", {}, "A step"), this.stepBar, this.stepKeys, make("div.facts-list"))),
    );
    this.facts = section.querySelector(".facts-list");
    this.frontier = new Frontier(this.frontierCard, store);
    this.batchPlot = new SizePlot(this.batchCard, this.batchHost, store, "batch");
    this.imagePlot = new SizePlot(this.imageCard, this.imageHost, store, "image");
    this.handle = new Handle(this.bar, {
      label: "Memory budget: drag to plan for less",
      at: (clientX) => {
        const box = this.bar.getBoundingClientRect();
        return Math.min(1, Math.max(0, (clientX - box.left) / box.width)) * this.most;
      },
      move: (bytes) => this.setBudget(bytes),
      step: (way, large) => this.setBudget((store.budget ?? store.capacity) + way * this.most * (large ? 0.1 : 0.01)),
      leave: () => store.setBudget(null),
    });
    store.on("sizes", () => this.update());
    store.on("piece", () => this.update());
    onResize(section, () => this.update());
    this.update();
  }

  setBudget(bytes) {
    const { store } = this, floor = (store.data.plans?.floor_bytes ?? 0) * 0.5;
    store.setBudget(bytes >= store.capacity * 0.995 ? null : Math.max(floor, bytes));
  }

  update() {
    const { store } = this, { about } = store.data, here = predict(store, store.batch, store.image);
    const plan = store.plan, scale = store.scale();
    const over = plan && !plan.plain ? plan.over_plain : 1;
    const planned = plan && !plan.plain ? store.peakOf(plan, scale) : here.peak_bytes;
    const step = here.step_s * over, rate = store.batch / step;
    this.rate.replaceChildren(rateText(rate), make("small", {}, "samples/s"));
    const spread = `${timeText(here.low_s * over)} – ${timeText(here.high_s * over)}`;
    const how = about.source === "measured" ? "from measured blocks" : "predicted";
    this.rateNote.textContent = `step ${timeText(step)} (${spread}), ${here.exact ? how : `${how}, interpolated`}`;
    this.gauge(rate, planned <= (store.budget ?? store.capacity));
    this.memory(here, planned);
    this.say(here, plan, planned, over);
    this.batchPlot.update();
    this.imagePlot.update();
    this.frontier.update();
    this.blocks();
    this.step();
  }

  /** Throughput beside the most that any batch that fits would give. */
  gauge(rate, fits) {
    const { store } = this, sizes = store.data.sizes;
    const rates = (sizes?.batches ?? []).map((b) => [b, predict(store, b, store.image)])
      .filter(([, cell]) => cell.peak_bytes <= (store.budget ?? store.capacity)).map(([b, cell]) => [b, b / cell.step_s]);
    const [bestBatch, best] = rates.reduce((a, b) => (b[1] > a[1] ? b : a), [store.batch, rate]);
    const share = Math.min(1, rate / Math.max(best, rate, 1e-12));
    const words = best > rate * 1.01 ? `${percent(share)} of ${rateText(best)} samples/s, at batch ${number(bestBatch)}`
      : sizes ? "the most of all predicted batches that fit" : "";
    if (!fits) return this.rateGauge.replaceChildren(make("div.note", {}, "this would be its speed if it fitted"));
    this.rateGauge.replaceChildren(
      make("div.track", {}, make("div.fill", { style: { width: `${share * 100}%` } })), make("div.note", {}, words));
  }

  memory(here, planned) {
    const { store } = this, { categories } = store.data.memory, capacity = store.capacity;
    const fits = planned <= capacity;
    this.most = Math.max(capacity, here.peak_bytes) * 1.04;
    this.peak.className = fits ? "figure" : "figure over";
    this.peak.replaceChildren(bytesText(planned), make("small", {}, `of ${bytesText(capacity)}`));
    const less = planned < here.peak_bytes * 0.999;
    this.peakNote.textContent = less
      ? `plain training takes ${bytesText(here.peak_bytes)}`
      : `${percent(here.peak_bytes / capacity)} of ${store.data.about.device}`;
    const parts = [];
    let from = 0;
    categories.forEach((name, i) => {
      const size = here.by_kind[i];
      if (!size) return;
      parts.push(make("div.part", {
        style: { left: `${(from / this.most) * 100}%`, width: `${(size / this.most) * 100}%`, background: kindColour(name) },
        onpointermove: (event) => showTip(event, `${kindName(name)} ${bytesText(size)}`), onpointerleave: hideTip,
      }));
      from += size;
    });
    const end = make("div.capacity", { style: { left: `${(capacity / this.most) * 100}%` } });
    const cut = store.budget !== null && from > store.budget
      ? [make("div.beyond", { style: { left: `${(store.budget / this.most) * 100}%`, width: `${((from - store.budget) / this.most) * 100}%` } })] : [];
    this.parts.replaceChildren(...parts, ...cut, end);
    const at = store.budget ?? capacity;
    const said = store.budget === null ? `budget: all ${bytesText(capacity)}` : `budget ${bytesText(at)}`;
    this.handle.place((at / this.most) * this.bar.clientWidth, 13, Math.round(at), said);
    this.handle.knob.dataset.text = store.budget === null ? "◂ drag to a budget" : bytesText(at);
    this.handle.knob.classList.toggle("left", at / this.most > 0.82);
    this.handle.knob.classList.toggle("right", at / this.most < 0.14);
    this.barKeys.replaceChildren(...categories.map((name, i) => [name, here.by_kind[i]]).filter(([, size]) => size > here.peak_bytes * 0.004)
      .sort((a, b) => b[1] - a[1])
      .map(([name, size]) => make("span", {}, make("i", { style: { background: kindColour(name) } }), kindName(name), make("b", {}, bytesText(size)))));
  }

  /** In words: whether it fits, by what plan, and what that costs. */
  say(here, plan, planned, over) {
    const { store } = this, most = store.budget ?? store.capacity, complete = store.data.plans?.complete;
    const rows = [];
    const about = store.atOwnSize ? "" : "≈ ";
    if (here.peak_bytes <= most) {
      const room = largestFitting(store, store.image, most);
      rows.push(make("h3", {}, make("span.pill.good", {}, "fits"), " Plain training, nothing to change"));
      if (store.data.sizes) rows.push(make("p", {}, room > store.batch ? `Batches of ${room < store.data.sizes.batches.at(-1) ? "up to about" : "at least"} ${number(room)} fit.` : "A larger batch would not fit as it is."));
    } else if (!plan || plan.plain || planned > most) {
      const tiles = store.data.plans?.tiles;
      if (!complete) rows.push(make("h3", {}, make("span.pill.warn", {}, "too large"), " Searching for a plan that fits…"));
      else {
        rows.push(make("h3", {}, make("span.pill.bad", {}, "does not fit"), ` No plan within ${bytesText(most)}`));
        const smallest = store.points.at(-1);
        if (tiles?.text && !store.budget) rows.push(make("p", {}, "Streamed in tiles it does:"), make("pre.tiles", {}, tiles.text));
        else if (tiles?.refused && !store.budget) rows.push(make("details", {}, make("summary", {}, "Tiles do not help here; why"), make("pre.tiles", {}, tiles.refused)));
        if (!tiles?.text || store.budget) rows.push(make("p", {}, `The smallest plan that was found takes ${about}${bytesText(store.peakOf(smallest, store.scale()))}. One operation alone, ${store.data.plans.floor_at}, needs ${bytesText(store.data.plans.floor_bytes)}.`));
      }
    } else {
      rows.push(make("h3", {}, make("span.pill.good", {}, "fits"), ` With a plan: ${about}${bytesText(planned)}, ${over.toFixed(over < 1.1 ? 3 : 2)}× the time`));
      rows.push(make("p", {}, policyWords(plan)), policyBar(plan.blocks[""]), policyLegend(plan.blocks[""]));
    }
    if (!store.atOwnSize) {
      const own = store.data.sizes.own, here = sizeText(store.batch, store.image), live = document.body.dataset.live === "true";
      const back = () => store.setSizes(own[0], own[1]);
      rows.push(make("p.note", {}, `Plans were made for ${sizeText(own[0], own[1])} and are scaled here. `, make("button.link", { onclick: back }, "Back to it")));
      if (live) rows.push(make("button.act.main.resize", { onclick: () => askSize(store.batch, store.image === own[1] ? store.data.about.image : store.image) }, `Plan for ${here}`));
    } else if (store.data.about.resized) rows.push(make("p.note", {}, `Everything here is for ${sizeText(store.batch, store.image)}, as you chose. `, make("button.link.unsize", { onclick: () => askSize(null, null) }, "Back to the job's own size")));
    const command = commandText(store, store.atOwnSize ? "plan" : "explore");
    if (command) rows.push(make("div.command", {}, make("code", {}, ...unbrokenWords(command)), copyButton(() => command)));
    if (store.budget !== null) rows.push(make("button.link", { onclick: () => store.setBudget(null) }, "Use all of the device's memory"));
    this.verdict.replaceChildren(...rows);
  }

  /** The blocks that take most, at the depth at which none is nearly everything. */
  blocks() {
    const { store } = this, whole = store.cost("", "time_s") || 1, saved = store.cost("", "saved_bytes") || 1;
    const rows = hotBlocks(store).slice(0, innerHeight > 980 ? 10 : 7).map((path) => {
      const block = store.blocks.get(path), time = store.cost(path, "time_s"), bytes = store.cost(path, "saved_bytes");
      return make("button.row", { type: "button", "aria-current": String(path === store.selected), onclick: () => { store.select(path, "overview"); store.emit("open", { tab: block.source ? "code" : "graph" }); } },
        make("span.name", {}, make("b", {}, path || block.type), make("i", {}, block.type)),
        make("span.meter", {}, make("span", { style: { width: `${(time / whole) * 100}%`, background: "var(--forward)" } })),
        make("span.value", {}, `${timeText(time)} `, make("i", {}, percent(time / whole))),
        make("span.meter", {}, make("span", { style: { width: `${Math.min(1, bytes / saved) * 100}%`, background: "var(--feature_maps)" } })),
        make("span.value", {}, bytesText(bytes)));
    });
    this.hot.replaceChildren(make("div.row.head", {}, make("span", {}, "block"), make("span", {}, "time, forward and backward"), make("span"), make("span", {}, "saved for backward"), make("span")), ...rows);
  }

  step() {
    const { step, about } = this.store.data;
    const parts = [["forward", step.forward_s], ["backward", step.backward_s], ["optimizer", step.optimizer_s], ["wait", step.wait_s + step.transfer_s]].filter(([, s]) => s > 0);
    this.stepBar.replaceChildren(...parts.map(([name, s]) => make("div", { style: { flex: String((1000 * s) / step.step_s), background: `var(--${name})` } })));
    this.stepKeys.replaceChildren(...parts.map(([name, s]) => make("span", {}, make("i", { style: { background: `var(--${name})` } }), name === "wait" ? "host and copies" : name, make("b", {}, timeText(s)))));
    const list = make("dl");
    const fact = (name, text) => list.append(make("dt", {}, name), make("dd", {}, text));
    fact("matrix work", `${flopsText(step.flops)} per step, ${flopsText(step.flops / step.step_s)}/s`);
    for (const p of step.precisions) fact(`in ${p.name}`, `${percent(p.peak_share)} of the device's peak, ${percent(p.busy_peak_share)} while at it`);
    fact("device busy", percent(step.busy_share));
    const root = this.store.blocks.get("");
    fact("parameters", number(root.parameters));
    if (about.unmeasured) fact("without a time", counted(about.unmeasured, "call"));
    for (const note of about.notes.slice(0, 3)) fact("note", note);
    this.facts.replaceChildren(list);
  }
}

/** Throughput and memory over one size, with a handle. */
class SizePlot {
  constructor(card, host, store, axis) {
    Object.assign(this, { card, host, store, axis });
    this.reading = card.querySelector(".reading");
    this.plot = new Plot(host, 158, [46, 56, 12, 26]);
    this.handle = new Handle(host, {
      label: axis === "batch" ? "Batch size" : "Image size, longest side",
      at: (clientX) => this.plot.at(clientX),
      move: (value) => this.set(value),
      step: (way, large) => this.set(this.value + way * Math.max(this.grain, large ? this.value / 2 : this.value / 16)),
      leave: () => this.set(store.data.sizes.own[axis === "batch" ? 0 : 1]),
    });
  }

  get value() {
    return this.axis === "batch" ? this.store.batch : this.store.image;
  }

  get grain() {
    const own = this.store.data.sizes?.own[1] ?? 32;
    return this.axis === "batch" ? 1 : Math.min(32, own & -own);
  }

  set(value) {
    const { store, sizes } = this, low = sizes[0], high = sizes.at(-1);
    const near = sizes.find((size) => Math.abs(Math.log(size / value)) < 0.035);
    const whole = Math.min(high, Math.max(low, near ?? Math.max(1, Math.round(value / this.grain)) * this.grain));
    if (this.axis === "batch") store.setSizes(whole, store.image);
    else store.setSizes(store.batch, whole);
  }

  update() {
    const { store, plot, host } = this, known = store.data.sizes;
    this.sizes = (this.axis === "batch" ? known?.batches : known?.images) ?? [];
    const enough = this.sizes.length > 1;
    this.card.classList.toggle("empty", !enough);
    host.hidden = !enough;
    this.card.hidden = this.axis === "image" && Boolean(known) && known.own[1] === null;
    if (!enough) {
      const why = known?.notes.find((note) => note.startsWith(this.axis));
      this.reading.replaceChildren(make("span.note", {}, why ?? (store.data.plans?.complete ? "No other size was predicted." : "Predictions for other sizes are being made…")));
      return;
    }
    if (!host.clientWidth) return;
    plot.height = plotHeight();
    const steps = [];
    for (let i = 0; i + 1 < this.sizes.length; i++) for (let k = 0; k < 6; k++) steps.push(this.sizes[i] * (this.sizes[i + 1] / this.sizes[i]) ** (k / 6));
    steps.push(this.sizes.at(-1));
    const at = (size) => (this.axis === "batch" ? predict(store, size, store.image) : predict(store, store.batch, size));
    const rate = (size, cell) => (this.axis === "batch" ? size : store.batch) / cell.step_s;
    const cells = steps.map((size) => [size, at(size)]);
    const rates = cells.map(([size, cell]) => [size, rate(size, cell)]), memory = cells.map(([size, cell]) => [size, cell.peak_bytes]);
    const most = Math.max(...rates.map(([, r]) => r)) * 1.12, capacity = store.budget ?? store.capacity;
    const x = { min: this.sizes[0], max: this.sizes.at(-1), log: true, ticks: this.sizes, format: (v) => `${number(v)}${this.axis === "image" ? " px" : ""}`, title: "" };
    const tops = Math.max(capacity * 1.15, memory[0][1] * 1.1, Math.min(Math.max(...memory.map(([, m]) => m)), capacity * 2));
    plot.begin(x, { min: 0, max: most, format: (v) => rateText(v), ticks: niceTicks(0, most, 5), title: "samples/s" });
    const left = plot.y;
    plot.y = { min: 0, max: tops };
    const over = memory.findIndex(([, m]) => m > capacity);
    if (over >= 0) {
      const from = over === 0 ? x.min : crossing(memory[over - 1], memory[over], capacity);
      plot.add("rect", { class: "forbidden", x: plot.px(from), width: Math.max(0, plot.px(x.max) - plot.px(from)), y: plot.top, height: plot.height - plot.top - plot.bottom });
    }
    plot.path(upTo(memory, tops), "series memory");
    const held = plot.py(Math.min(memory.at(-1)[1], tops));
    plot.y = left;
    plot.area(rates, "fill rate");
    plot.path(rates, "series rate");
    plot.y = { min: 0, max: tops };
    plot.level(capacity, "limit");
    const across = plot.py(capacity);
    plot.y = left;
    plot.names([["memory", "memory", held], ["rate", "rate", plot.py(rates.at(-1)[1])], ["limit", store.budget === null ? "capacity" : "budget", across], ["limit", bytesText(capacity), across + 13]]);
    const here = at(this.value), value = Math.min(x.max, Math.max(x.min, this.value));
    plot.upright(value, "here");
    this.handle.place(plot.px(value), plot.py(rate(this.value, here)), this.value, `${number(this.value)}${this.axis === "image" ? " px" : ""}`);
    this.reading.replaceChildren(
      make("b", {}, `${number(this.value)}${this.axis === "image" ? " px" : ""}`),
      make("span", {}, `${rateText(rate(this.value, here))} samples/s`),
      make(here.peak_bytes <= capacity ? "span" : "span.over", {}, here.peak_bytes <= capacity ? bytesText(here.peak_bytes) : `${bytesText(here.peak_bytes)} if all is kept`),
      make("span.note", {}, here.exact ? "" : "interpolated"));
  }
}

/** Plots are taller where there is room for it. */
function plotHeight() {
  return Math.round(Math.min(280, Math.max(150, innerHeight * 0.21)));
}

function crossing([x1, y1], [x2, y2], level) {
  return x1 + ((level - y1) / (y2 - y1)) * (x2 - x1);
}

/** Blocks to begin with: the whole, whose largest parts are opened until there are a handful. */
function hotBlocks(store) {
  let shown = [""];
  const time = (path) => store.cost(path, "time_s");
  for (let round = 0; round < 40; round++) {
    const open = shown.filter((path) => store.blocks.get(path).children.length).sort((a, b) => time(b) - time(a))[0];
    if (open === undefined || (shown.length >= 6 && time(open) < 0.35 * time(""))) break;
    shown = shown.flatMap((path) => (path === open ? store.blocks.get(path).children.filter((child) => time(child) > 0) : [path]));
  }
  return shown.sort((a, b) => time(b) - time(a));
}

function sizeText(batch, image) {
  return `batch ${number(batch)}${image ? `, ${number(image)} px` : ""}`;
}

/** Have the server look at another size; null for the job's own. */
function askSize(batch, image) {
  return fetch("size", { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify({ batch, image }) });
}

function commandText(store, name) {
  const command = store.data.commands?.find((row) => row.name === name);
  if (!command) return "";
  const bytes = store.budget ?? store.capacity;
  const memory = bytes >= 2 ** 30 ? `${Number((bytes / 2 ** 30).toFixed(2))}GiB` : `${Math.ceil(bytes / 2 ** 20)}MiB`;
  const text = store.image === null || (!store.data.about.image && store.image === store.data.sizes?.own[1]) ? command.text.replace(" --image {image}", "") : command.text.replace("{image}", store.image);
  return text.replace("{batch}", store.batch).replace("{memory}", memory);
}

/** A rising curve as far as a height: it ends there, and does not go on level. */
function upTo(points, most) {
  const over = points.findIndex(([, y]) => y > most);
  if (over <= 0) return over < 0 ? points : [];
  return [...points.slice(0, over), [crossing(points[over - 1], points[over], most), most]];
}
