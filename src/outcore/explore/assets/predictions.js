// What a step takes at any batch and image size, from the predictions that came with the page.
//
// Between two predicted sizes a line is drawn, by the batch and by the pixels of the image. Where a cell of the grid is
// missing, the job's own row and column are multiplied; `exact` says which of the three it was.
"use strict";

const FIELDS = ["step_s", "low_s", "high_s", "peak_bytes"];

function predict(store, batch, image) {
  const { sizes, step, memory, about } = store.data;
  if (!sizes) {
    const by = batch / about.batch, fixed = memory.at_peak.slice(0, 3).reduce((sum, v) => sum + v, 0);
    const kinds = memory.at_peak.map((v, i) => (i < 3 ? v : v * by));
    return { step_s: step.step_s * by, low_s: step.interval_s[0] * by, high_s: step.interval_s[1] * by,
      peak_bytes: fixed + (memory.peak_bytes - fixed) * by, by_kind: kinds, exact: by === 1 };
  }
  const [ownBatch, ownImage] = sizes.own, own = ownImage ?? 0, side = image ?? own;
  const cell = (b, s) => sizes.cells[`${b}x${s}`];
  if (cell(batch, side)) return { ...cell(batch, side), exact: true };
  const area = (s) => s * s;
  const batches = sizes.batches, images = sizes.images.length ? sizes.images : [own];
  const [b1, b2, across] = between(batches, batch, (b) => b), [s1, s2, up] = between(images, side, area);
  const corners = [cell(b1, s1), cell(b2, s1), cell(b1, s2), cell(b2, s2)];
  if (corners.every(Boolean)) return blend(blend(corners[0], corners[1], across), blend(corners[2], corners[3], across), up);
  const along = (b) => blend(cell(b1, own) ?? cell(ownBatch, own), cell(b2, own) ?? cell(ownBatch, own), across, b);
  const row = along(), column = blend(cell(ownBatch, s1), cell(ownBatch, s2), up), middle = cell(ownBatch, own);
  const times = (name) => row[name] * column[name] / middle[name];
  const kinds = row.by_kind.map((v, i) => (i < 3 ? v : middle.by_kind[i] ? v * column.by_kind[i] / middle.by_kind[i] : v));
  return { step_s: times("step_s"), low_s: times("low_s"), high_s: times("high_s"),
    peak_bytes: kinds.reduce((sum, v) => sum + v, 0), by_kind: kinds, exact: false };
}

/** The neighbours of a size among the predicted ones, and how far it lies between them. */
function between(list, wanted, measure) {
  const at = Math.max(1, list.findIndex((size) => size >= wanted));
  const high = list.findIndex((size) => size >= wanted) < 0 ? list.length - 1 : at;
  const a = list[Math.max(0, high - 1)], b = list[Math.min(high, list.length - 1)];
  return [a, b, a === b ? 0 : (measure(wanted) - measure(a)) / (measure(b) - measure(a))];
}

function blend(a, b, share) {
  const mix = (x, y) => x + (y - x) * share;
  const found = { by_kind: a.by_kind.map((v, i) => mix(v, b.by_kind[i])), exact: false };
  for (const name of FIELDS) found[name] = mix(a[name], b[name]);
  return found;
}

/** The largest batch that fits at an image size, by the same lines; 0 if none does. */
function largestFitting(store, image, most) {
  const batches = store.data.sizes?.batches ?? [store.data.about.batch];
  const fits = (b) => predict(store, b, image).peak_bytes <= most;
  if (!fits(batches[0])) return batches[0] > 1 && fits(1) ? 1 : 0;
  let low = batches[0], high = batches.at(-1);
  if (fits(high)) return high;
  while (high - low > 1) {
    const middle = Math.floor((low + high) / 2);
    if (fits(middle)) low = middle;
    else high = middle;
  }
  return low;
}
