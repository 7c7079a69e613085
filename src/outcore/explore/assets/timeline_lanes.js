// The picture of a timeline: lanes of events, and beneath them the memory that is held.
"use strict";

/** Draw what a timeline panel shows on its canvas. */
function drawLanes(panel) {
  const { canvas, host, lanes } = panel, width = host.clientWidth, height = Math.max(260, host.clientHeight), scale = devicePixelRatio || 1;
  const pen = canvas.getContext("2d"), style = getComputedStyle(document.body), colours = new Map();
  const colour = (name) => {
    if (!colours.has(name)) colours.set(name, style.getPropertyValue(name).trim());
    return colours.get(name);
  };
  canvas.width = width * scale;
  canvas.height = height * scale;
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  pen.font = `11px ${style.fontFamily}`;
  panel.left = Math.max(96, 16 + Math.max(...lanes.map((lane) => pen.measureText(lane.name).width)));
  panel.head = 26;
  const room = height - panel.head - 30, curve = Math.max(90, Math.min(room * 0.5, room - lanes.length * 20));
  panel.tall = Math.max(10, Math.min(54, (room - curve) / lanes.length));
  panel.curveTop = panel.head + lanes.length * panel.tall + 22;
  const px = (time) => panel.left + ((time - panel.from) / (panel.to - panel.from)) * (width - panel.left);
  pen.fillStyle = colour("--soft");
  pen.strokeStyle = colour("--line");
  for (const tick of niceTicks(panel.from / 1e6, panel.to / 1e6, 8)) {
    const x = px(tick * 1e6);
    if (x < panel.left - 1 || x > width) continue;
    pen.beginPath();
    pen.moveTo(x, panel.head - 6);
    pen.lineTo(x, height - 8);
    pen.stroke();
    if (x + 46 < width) pen.fillText(timeText(tick), x + 3, 14);
  }
  lanes.forEach((lane, i) => {
    pen.fillStyle = colour("--soft");
    pen.fillText(lane.name, 8, panel.head + i * panel.tall + panel.tall / 2 + 4);
  });
  drawEvents(panel, pen, px, width, colour);
  drawCurves(panel, pen, px, width, height, colour);
}

function drawEvents(panel, pen, px, width, colour) {
  const { lanes, store } = panel, narrow = new Map();
  const lane = new Map(lanes.map((one, i) => [`${one.line === panel.beside ? 1 : 0} ${one.rank} ${one.stream}`, [one, i]]));
  for (const [k, line] of [panel.shown, panel.beside].entries()) {
    if (!line) continue;
    const fills = line.kinds.map((kind) => colour(EVENT_COLOURS[kind] ?? "--wait"));
    for (const event of line.events) {
      const [rank, stream, kind, , start, length] = event, [{ by }, i] = lane.get(`${k} ${rank} ${stream}`);
      const x1 = Math.max(panel.left, px(start * by)), x2 = Math.min(width, px((start + length) * by));
      if (x2 < panel.left || x1 > width) continue;
      const y = panel.head + i * panel.tall + 2, wide = Math.max(0.7, x2 - x1 - (x2 - x1 > 4 ? 0.7 : 0));
      let bright = true;
      if (store.selected) {
        const call = panel.callOf(event);
        bright = Boolean(call && store.inside(call[1], store.selected));
      }
      if (wide < 1 && bright && Math.floor(x1 * 2) === narrow.get(i)) continue;  // one beside the other: not to be told apart
      narrow.set(i, wide < 1 ? Math.floor(x1 * 2) : null);
      pen.fillStyle = fills[kind];
      pen.globalAlpha = bright ? 1 : 0.35;
      pen.fillRect(x1, y, wide, panel.tall - 4);
      pen.globalAlpha = 1;
      if (wide > 56) {
        const call = typeof event[3] === "number" ? store.data.costs.calls[event[3]]?.[0] : String(event[3]);
        const name = (call ?? "").replace(/#0$/, ""), fit = Math.floor((wide - 8) / 6);
        pen.fillStyle = colour("--card");
        pen.fillText(name.length > fit ? name.slice(0, Math.max(1, fit - 1)) + "…" : name, x1 + 4, y + (panel.tall - 4) / 2 + 4);
      }
    }
  }
}

/** Memory of every rank; plain training in grey behind it, what was measured dashed, the device's memory as a line. */
function drawCurves(panel, pen, px, width, height, colour) {
  const { shown, beside, store, pipeline, stretch } = panel, base = height - 10, top = panel.curveTop;
  const plain = !pipeline && store.plan && !store.plan.plain ? store.points.find((p) => p.plain)?.timeline : null;
  const measured = beside?.memory.filter((m) => m.bytes.length) ?? [];
  const most = Math.max(...[...shown.memory, ...measured, ...(plain?.memory ?? [])].map((m) => m.peak_bytes), 1) * 1.06;
  const py = (bytes) => base - (bytes / most) * (base - top);
  pen.fillStyle = colour("--soft");
  pen.fillText("memory", 8, top + 10);
  pen.fillText(bytesText(most / 1.06), 8, top + 25);
  const path = (m, by, end) => {
    let last = null;
    pen.beginPath();
    m.times_us.forEach((time, i) => {
      const x = Math.min(width, Math.max(panel.left, px(time * by)));
      if (last === null) pen.moveTo(x, py(m.bytes[i]));
      else pen.lineTo(x, py(last));
      pen.lineTo(x, py(m.bytes[i]));
      last = m.bytes[i];
    });
    pen.lineTo(Math.min(width, px(end)), py(last ?? 0));
  };
  const stroke = (tint, wide, dashes) => {
    pen.strokeStyle = tint;
    pen.lineWidth = wide;
    pen.setLineDash(dashes);
    pen.stroke();
    pen.setLineDash([]);
    pen.lineWidth = 1;
  };
  /** A place for a word above the highest point of a curve. */
  const atPeak = (m, by) => {
    const highest = m.bytes.reduce((best, size, i) => (size > m.bytes[best] ? i : best), 0);
    return [Math.min(width - 90, Math.max(panel.left + 4, px(m.times_us[highest] * by) + 4)), py(m.bytes[highest]) - 4];
  };
  const end = shown.step_s * 1e6;
  if (plain) {
    path(plain.memory[0], 1, end);
    stroke(colour("--faint"), 1, [4, 3]);
    pen.fillStyle = colour("--faint");
    pen.fillText("plain training", ...atPeak(plain.memory[0], 1));
  }
  shown.memory.forEach((m, i) => {
    path(m, 1, end);
    stroke(pipeline ? STAGES[i % STAGES.length] : colour("--accent"), 1.6, []);
    if (pipeline) return;
    pen.lineTo(Math.min(width, px(end)), base);
    pen.lineTo(Math.max(panel.left, px(0)), base);
    pen.globalAlpha = 0.13;
    pen.fillStyle = colour("--accent");
    pen.fill();
    pen.globalAlpha = 1;
  });
  measured.forEach((m, i) => {
    path(m, stretch, beside.step_s * stretch * 1e6);
    stroke(pipeline ? STAGES[i % STAGES.length] : colour("--recompute"), 1.6, [2, 2]);
    if (i) return;
    pen.fillStyle = pipeline ? colour("--soft") : colour("--recompute");
    pen.fillText("measured", ...atPeak(m, stretch));
  });
  for (const [bytes, name, tint] of [[store.capacity, "capacity", "--bad"], [store.budget, "budget", "--accent"]]) {
    if (bytes === null || bytes > most || (pipeline && name === "budget")) continue;
    pen.beginPath();
    pen.moveTo(panel.left, py(bytes));
    pen.lineTo(width, py(bytes));
    stroke(colour(tint), 1, [5, 4]);
    pen.fillStyle = colour(tint);
    const words = `${name} ${bytesText(bytes)}`;
    const place = [width - pen.measureText(words).width - 8, py(bytes) - 4];
    pen.strokeStyle = colour("--card");  // a border, so that it is read where a curve is behind it
    pen.lineWidth = 4;
    pen.lineJoin = "round";
    pen.strokeText(words, ...place);
    pen.fillText(words, ...place);
  }
}
