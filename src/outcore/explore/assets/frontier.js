// The frontier: the fastest step for every budget, and the budget as a handle on it.
"use strict";

const POLICIES = ["keep", "encode", "recompute", "offload"];

class Frontier {
  constructor(card, store) {
    this.store = store;
    this.card = card;
    this.host = make("div.plot-host");
    this.reading = make("div.reading");
    card.append(make("h2", {}, "Time against memory"), this.reading, this.host);
    this.plot = new Plot(this.host, 158, [46, 16, 12, 26]);
    this.handle = new Handle(this.host, {
      label: "Memory budget on the frontier",
      at: (clientX) => this.plot.at(clientX),
      move: (bytes) => this.set(bytes),
      step: (way) => this.walk(way),
      leave: () => store.setBudget(null),
    });
  }

  set(bytes) {
    const { store } = this, scale = store.scale(), plain = store.peakOf(store.points[0], scale);
    store.setBudget(bytes >= Math.min(plain, store.capacity) ? null : bytes);
  }

  /** To the next plan, to the left of it or to the right. */
  walk(way) {
    const next = this.store.point - way;
    if (this.store.points[next]) this.store.pick(next);
  }

  update() {
    const { store, plot, host } = this, points = store.points;
    const enough = points.length > 1;
    host.hidden = !enough;
    if (!enough) {
      this.reading.replaceChildren(make("span.note", {}, store.data.plans?.complete ? "There is nothing to choose: every plan takes as much." : "Plans are being searched for…"));
      return;
    }
    if (!host.clientWidth) return;
    plot.height = plotHeight();
    const scale = store.scale(), peak = (point) => store.peakOf(point, scale);
    const most = Math.max(...points.map(peak)), slow = Math.max(1.08, ...points.map((p) => p.over_plain));
    const bytesAt = most >= 2 ** 30 ? 2 ** 30 : 2 ** 20, unit = most >= 2 ** 30 ? "GiB" : "MiB";
    const x = { min: 0, max: most * 1.06, ticks: niceTicks(0, (most * 1.06) / bytesAt, 6).map((v) => v * bytesAt), format: (v) => `${shortNumber(v / bytesAt)} ${unit}`, title: "" };
    plot.begin(x, { min: 1 - (slow - 1) * 0.12, max: slow + (slow - 1) * 0.12, format: (v) => `${Number(v.toFixed(2))}×`, ticks: niceTicks(1, slow, 3).filter((v) => v >= 1), title: "time of a step / plain's" });
    if (store.capacity < x.max) {
      plot.add("rect", { class: "forbidden", x: plot.px(store.capacity), width: plot.px(x.max) - plot.px(store.capacity), y: plot.top, height: plot.height - plot.top - plot.bottom });
      plot.upright(store.capacity, "limit", "capacity");
    }
    const line = [];
    points.forEach((point, i) => {
      if (i) line.push([peak(points[i - 1]), point.over_plain]);
      line.push([peak(point), point.over_plain]);
    });
    plot.path(line, "series front");
    points.forEach((point, i) => {
      const dot = plot.dot(peak(point), point.over_plain, `dot ${point.plain ? "plain" : "front"}${i === store.point && !store.hand ? " chosen" : ""}`, i === store.point && !store.hand ? 6 : 4);
      dot.addEventListener("pointermove", (event) => showTip(event, `${bytesText(peak(point))}, ${point.over_plain.toFixed(3)}×`, policyWords(point)));
      dot.addEventListener("pointerleave", hideTip);
    });
    if (store.hand) plot.dot(peak(store.hand), store.hand.over_plain, "dot hand chosen", 6);
    const budget = Math.min(store.budget ?? Math.min(store.capacity, most), x.max), plan = store.plan;
    plot.upright(budget, "here");
    this.handle.place(plot.px(budget), plot.height - plot.bottom, Math.round(budget), bytesText(budget));
    const words = store.hand ? "by hand" : plan.plain ? "plain training" : `plan ${store.point + 1} of ${points.length}`;
    this.reading.replaceChildren(
      make("b", {}, bytesText(peak(plan))), make("span", {}, `${plan.over_plain.toFixed(3)}× the time`), make("span", {}, words),
      make("span.note", {}, store.data.plans.complete ? "" : "searching…"));
  }
}

/** What a plan does, in a sentence. */
function policyWords(point) {
  if (point.plain) return "Everything is kept, as plain training does.";
  const counts = {};
  for (const how of Object.values(point.policy)) {
    const kind = how.split(":")[0].split("+")[0];
    if (kind !== "keep") counts[kind] = (counts[kind] ?? 0) + 1;
  }
  const verbs = { recompute: "recomputes", offload: "offloads", encode: "encodes" };
  const parts = Object.entries(counts).map(([kind, count]) => `${verbs[kind] ?? kind} ${count}`);
  const moved = point.moved_bytes ? `; ${bytesText(point.moved_bytes)} leave the device and return` : "";
  return parts.length ? `Of the saved tensors it ${parts.join(", ").replace(/, ([^,]*)$/, " and $1")}${moved}.` : "Everything is kept.";
}

/** The bytes of a block by what happens to them, as a bar. */
function policyBar(row = {}) {
  const total = POLICIES.reduce((sum, kind) => sum + (row[kind] ?? 0), 0) || 1;
  return make("div.stack.policy", { role: "img", "aria-label": POLICIES.filter((k) => row[k]).map((k) => `${k} ${bytesText(row[k])}`).join(", ") },
    POLICIES.filter((kind) => row[kind]).map((kind) => make("div", {
      style: { flex: String((1000 * row[kind]) / total), background: `var(--${kind})` },
      onpointermove: (event) => showTip(event, `${kind} ${bytesText(row[kind])}`), onpointerleave: hideTip,
    })));
}

function policyLegend(row = {}) {
  return make("div.keys", {}, POLICIES.filter((kind) => row[kind]).map((kind) =>
    make("span", {}, make("i", { style: { background: `var(--${kind})` } }), kind, make("b", {}, bytesText(row[kind])))));
}
