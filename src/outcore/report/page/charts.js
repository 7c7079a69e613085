// Line charts: a few series over one axis, with a cross-hair that reads all of them.
"use strict";

/**
 * A chart as an element. `series`: [{ name, x: [..], y: [.. or null], dashed }], `lines`: [{ name, y }] across,
 * `format` and `formatX` turn numbers into text.
 */
function lineChart({ title, series, lines = [], format = shortNumber, formatX = shortNumber, xTitle = "", zero = false }) {
  const W = 560, H = 230, left = 64, right = 14, top = 12, bottom = 34;
  const figure = html("figure");
  figure.className = "chart";
  figure.append(html("figcaption", title));
  const drawn = series.filter((s) => s.y.some((v) => v !== null));
  if (!drawn.length) return null;
  const xs = drawn.flatMap((s) => s.x), ys = [...drawn.flatMap((s) => s.y), ...lines.map((l) => l.y)].filter((v) => v !== null);
  let [x0, x1] = [Math.min(...xs), Math.max(...xs)], [y0, y1] = [Math.min(...ys), Math.max(...ys)];
  if (zero) y0 = Math.min(0, y0);
  if (x0 === x1) x1 = x0 + 1;
  if (y0 === y1) [y0, y1] = [y0 - Math.abs(y0 || 1) * 0.1, y1 + Math.abs(y1 || 1) * 0.1];
  const unit = format === bytesText ? 1024 ** Math.max(0, Math.floor(Math.log2(Math.max(y1, 1)) / 10)) : 1;
  const yTicks = niceTicks(y0 / unit, y1 / unit, 5).map((v) => v * unit);
  const xTicks = niceTicks(x0, x1, 6).filter((v) => v >= x0 && v <= x1 && Number.isInteger(v));
  y0 = Math.min(y0, yTicks[0]); y1 = Math.max(y1, yTicks[yTicks.length - 1]);
  const px = (x) => left + (x - x0) / (x1 - x0) * (W - left - right);
  const py = (y) => H - bottom - (y - y0) / (y1 - y0) * (H - top - bottom);
  const picture = drawing("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": title });
  for (const y of yTicks) {
    picture.append(drawing("line", { class: "grid", x1: left, x2: W - right, y1: py(y), y2: py(y) }));
    picture.append(drawing("text", { class: "tick end", x: left - 7, y: py(y) + 3.5 }, format(y)));
  }
  for (const x of xTicks) picture.append(drawing("text", { class: "tick middle", x: px(x), y: H - bottom + 16 }, formatX(x)));
  if (xTitle) picture.append(drawing("text", { class: "tick middle", x: (left + W - right) / 2, y: H - 3 }, xTitle));
  for (const line of lines) {
    picture.append(drawing("line", { class: "limit", x1: left, x2: W - right, y1: py(line.y), y2: py(line.y) }));
  }
  drawn.forEach((s, i) => {
    let d = "", pen = false;
    s.x.forEach((x, k) => {
      if (s.y[k] === null) { pen = false; return; }
      d += `${pen ? "L" : "M"}${px(x).toFixed(1)} ${py(s.y[k]).toFixed(1)}`;
      pen = true;
    });
    const known = s.y.filter((v) => v !== null).length;
    picture.append(drawing("path", { class: `series s${i % 4}`, d }));
    if (known <= 30) s.x.forEach((x, k) => {
      if (s.y[k] !== null) picture.append(drawing("circle", { class: `dot s${i % 4}`, cx: px(x), cy: py(s.y[k]), r: 2.6 }));
    });
  });
  figure.append(picture);
  if (drawn.length > 1 || lines.length) figure.append(chartLegend(drawn, lines.map((l) => `${l.name}, ${format(l.y)}`)));
  crossHair(figure, picture, { drawn, px, format, formatX, xTitle, left, right: W - right, top, base: H - bottom });
  return figure;
}

/** What the series are, and the lines across: their names stand here, where no curve is. */
function chartLegend(drawn, across) {
  const legend = html("div");
  legend.className = "keys";
  drawn.forEach((s, i) => {
    const mark = html("i");
    mark.className = `s${i % 4}`;
    legend.append(html("span", mark, s.name));
  });
  for (const name of across) {
    const mark = html("i");
    mark.className = "across";
    legend.append(html("span", mark, name));
  }
  return legend;
}

function crossHair(figure, picture, { drawn, px, format, formatX, xTitle, left, right, top, base }) {
  const hair = drawing("line", { class: "hair", y1: top, y2: base, visibility: "hidden" });
  const tip = html("div");
  tip.className = "tip-box";
  tip.hidden = true;
  picture.append(hair);
  figure.append(tip);
  const stops = [...new Set(drawn.flatMap((s) => s.x))].sort((a, b) => a - b);
  picture.addEventListener("pointermove", (event) => {
    const box = picture.getBoundingClientRect(), scale = picture.viewBox.baseVal.width / box.width;
    const at = (event.clientX - box.left) * scale;
    if (at < left - 10 || at > right + 10) return leave();
    const x = stops.reduce((best, stop) => Math.abs(px(stop) - at) < Math.abs(px(best) - at) ? stop : best);
    const rows = drawn.flatMap((s) => {
      const k = s.x.indexOf(x);
      return k < 0 || s.y[k] === null ? [] : [html("div", `${s.name} ${format(s.y[k])}`)];
    });
    hair.setAttribute("x1", px(x));
    hair.setAttribute("x2", px(x));
    hair.setAttribute("visibility", "visible");
    tip.replaceChildren(html("b", `${xTitle} ${formatX(x)}`), ...rows);
    tip.hidden = false;
    const place = px(x) / scale;
    tip.style.left = `${Math.min(place + 10, box.width - tip.offsetWidth - 4)}px`;
  });
  picture.addEventListener("pointerleave", leave);
  function leave() {
    hair.setAttribute("visibility", "hidden");
    tip.hidden = true;
  }
}

function drawing(name, attributes, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

/** Round numbers that cover a range. */
function niceTicks(low, high, count) {
  const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999);
  const ticks = [];
  for (let v = Math.floor(low / step + 1e-9) * step; v < high + step * 0.999; v += step) ticks.push(Number(v.toPrecision(12)));
  return ticks;
}

function shortNumber(v) {
  if (v === null || v === undefined) return "–";
  const size = Math.abs(v);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return v.toExponential(1).replace("e+", "e");
  return Number(v.toPrecision(4)).toLocaleString("en", { maximumFractionDigits: 12 });
}

function bytesText(v) {
  if (v === null || v === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  while (Math.abs(v) >= 1024 && i < units.length - 1) { v /= 1024; i += 1; }
  return `${i ? v.toFixed(1) : v} ${units[i]}`;  // as the command prints it
}

function timeText(v) {
  if (v === null || v === undefined) return "–";
  if (v === 0) return "0 s";
  if (v < 0.9995e-3) return `${(v * 1e6).toPrecision(3)} µs`;
  if (v < 0.9995) return `${(v * 1e3).toPrecision(3)} ms`;
  if (v < 120) return `${v.toPrecision(3)} s`;
  return v < 7200 ? `${(v / 60).toFixed(1)} min` : `${(v / 3600).toFixed(1)} h`;
}
