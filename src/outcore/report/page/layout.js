// Coordinates: from schemes and sizes to a drawing, containers from the inside out.
//
// The same as layout.py and settle.py, function by function; see there for what it does and why it exists twice.
// A test compares every coordinate, so change both together. A network has few schemes and many blocks that are laid
// out by each, so what follows from a scheme alone is worked out once (`factsOf`).
"use strict";

const ROOT = "";
const STRAIGHT = 0.5;
const MOST_VERSIONS = 20000;

/** Lay out a sketch. `state` says what is open (`opened`), whether repeats are folded (`fold`) and where not (`flat`). */
function layOut(sketch, geometry, state) {
  return new Layout(sketch, geometry).drawing(state);
}

const LAYOUTS = new WeakMap();

/** The layout of a sketch, one for each. */
function layoutOf(sketch, geometry) {
  if (!LAYOUTS.has(sketch)) LAYOUTS.set(sketch, new Layout(sketch, geometry));
  return LAYOUTS.get(sketch);
}

/** Lay out everything opened while nothing else is asked for, so that it is there when it is. */
function layOutAhead(sketch, geometry) {
  const later = globalThis.requestIdleCallback ?? ((act) => setTimeout(() => act({ timeRemaining: () => 8 }), 30));
  const work = layoutOf(sketch, geometry).ahead({ opened: new Set(Object.keys(sketch.flat)), flat: new Set(), fold: true });
  const go = (time) => {
    while (time.timeRemaining() > 1) if (work.next().done) return;
    later(go);
  };
  later(go);
}

/** Lays out a sketch in any state. What was laid out before is kept: opening a block lays out what is around it. */
class Layout {
  constructor(sketch, geometry) {
    this.sketch = sketch;
    this.g = geometry;
    this.forget();
  }

  forget() {
    this.count = 0;
    this.versions = new Map();
  }

  drawing(state) {
    this.state = state;
    if (this.count > MOST_VERSIONS) this.forget();
    const version = this.version(ROOT);
    if (!version.drawing) {
      const body = this.body(ROOT, version), [left, right] = this.sides(body);
      const drawing = { width: left + right, height: body.height, placed: [], ends: [], lines: [], labels: [] };
      this.draw(drawing, ROOT, body, left, 0, NONE);
      version.drawing = drawing;
    }
    return version.drawing;
  }

  /** Lay out a state ahead, a container at a time, from the inside out. */
  *ahead(state) {
    const open = Object.keys(this.sketch.flat).filter((part) => part === ROOT || state.opened.has(part));
    const depth = (part) => (part === null ? 0 : 1 + depth(this.sketch.parts[part].parent));
    for (const [part] of open.map((part) => [part, depth(part)]).sort((a, b) => b[1] - a[1])) {
      this.state = state;
      this.body(part, this.version(part));
      yield;
    }
    this.drawing(state);
  }

  plane(part) {
    const folded = this.state.fold && !this.state.flat.has(part) && this.sketch.folded[part];
    return folded || this.sketch.flat[part];
  }

  /** A part as it is shown now: folded or not, and with which of its children open, and how those are shown. */
  version(part) {
    const plane = this.plane(part);
    const inner = plane.children.map((child) => (this.state.opened.has(child) && this.sketch.flat[child] ? this.version(child) : null));
    const key = `${plane === this.sketch.flat[part]} ${inner.map((version) => version?.id ?? "").join()}`;
    if (!this.versions.has(part)) this.versions.set(part, new Map());
    const mine = this.versions.get(part);
    if (!mine.has(key)) mine.set(key, { id: ++this.count, plane, inner, body: null, frame: null, drawing: null });
    return mine.get(key);
  }

  body(part, version) {
    if (version.body) return version.body;
    const { plane } = version, scheme = this.sketch.schemes[plane.scheme];
    const extents = scheme.knots.map(([role, index]) => {
      if (role === "box") return version.inner[index] ? this.frame(plane, index, version.inner[index]) : this.extent(plane, index);
      if (part === ROOT && role !== "lane") return this.end(plane.links[index][0], role === "in");
      return NOTHING;
    });
    const shifts = scheme.steps.map(([upper, lower, route]) => {
      const [wire, port] = plane.links[route];
      return (extents[upper].outs.get(port) ?? 0) - (extents[lower].ins.get(wire) ?? 0);
    });
    const x = across(this.g, scheme, extents, shifts);
    version.body = { plane, scheme, extents, x, ...down(this.g, scheme, extents, x, shifts, part !== ROOT) };
    return version.body;
  }

  extent(plane, index) {
    const g = this.g, part = plane.children[index], repeat = plane.repeats[index];
    const ins = plane.ins[index], outs = plane.outs[index];
    const half = this.half(part, repeat);
    const sheet = repeat > 1 ? g.sheet : 0;
    const height = this.sketch.parts[part].height + sheet;
    const extent = { ...makeExtent(), left: half, right: half + sheet, height, box: height };
    extent.labels = outs.routes.length > 0;
    const arriving = spread(ins.routes.map(() => g.port_gap), ins.main, half - g.inset);
    ins.routes.forEach((route, i) => extent.ins.set(plane.links[route][0], arriving[i]));
    const widths = outs.routes.map((route) => g.label_gap + this.sketch.wires[plane.links[route][1]].width);
    const leaving = spread(widths.map((width) => width + g.label_gap), outs.main, null);
    outs.routes.forEach((route, i) => {
      extent.outs.set(plane.links[route][1], leaving[i]);
      extent.left = Math.max(extent.left, -leaving[i]);
      extent.right = Math.max(extent.right, leaving[i] + widths[i]);
    });
    if (extent.labels) extent.height += g.label;
    return extent;
  }

  frame(plane, index, version) {
    if (version.frame?.plane === plane) return version.frame.extent;
    const g = this.g, part = plane.children[index], ins = plane.ins[index];
    const body = this.body(part, version);
    let [left, right] = this.sides(body);
    const ends = { in: new Map(), out: new Map() };
    body.scheme.knots.forEach(([role, route], i) => ends[role]?.set(body.plane.links[route][0], body.x[i]));
    const first = Math.min(...ends.in.values()), last = Math.max(...ends.in.values());
    const [name, type] = this.sketch.parts[part].header;
    left = Math.max(left, name + this.times(plane.repeats[index]) + 2 * g.margin - (ends.in.size ? first : 0));
    right = Math.max(right, type + 2 * g.margin + (ends.in.size ? last : 0));
    const some = ends.in.size ? [...ends.in.values()] : ends.out.size ? [...ends.out.values()] : [0];
    const anchor = ins.main === null
      ? (Math.min(...some) + Math.max(...some)) / 2
      : ends.in.get(plane.links[ins.routes[ins.main]][0]);
    const moved = (map) => new Map([...map].map(([wire, at]) => [wire, at - anchor]));
    const extent = {
      left: left + anchor, right: right - anchor, height: body.height, box: body.height,
      ins: moved(ends.in), outs: moved(ends.out), labels: false, body: { ...body, x: body.x.map((at) => at - anchor) },
    };
    version.frame = { plane, extent };
    return extent;
  }

  end(wire, isInput) {
    const g = this.g, half = this.halfEnd(wire);
    const extent = { ...makeExtent(), left: half, right: half, height: g.pill, box: g.pill, labels: isInput };
    if (isInput) {
      extent.outs.set(wire, 0);
      extent.right = Math.max(half, g.label_gap + this.sketch.wires[wire].width);
      extent.height += g.label;
    }
    return extent;
  }

  times(repeat) {
    return repeat > 1 ? this.sketch.times[repeat] : 0;
  }

  half(part, repeat) {
    return (this.sketch.parts[part].width + this.times(repeat)) / 2;
  }

  halfEnd(wire) {
    return this.sketch.ends[wire].width / 2 + this.g.pill_pad;
  }

  sides(body) {
    if (!body.x.length) return [this.g.pad, this.g.pad];
    const left = Math.max(...body.extents.map((extent, i) => extent.left - body.x[i]));
    const right = Math.max(...body.extents.map((extent, i) => extent.right + body.x[i]));
    return [left + this.g.pad, right + this.g.pad];
  }

  draw(drawing, part, body, x0, y0, skips) {
    const { scheme, plane } = body, g = this.g;
    const { row } = factsOf(scheme), top = [], bottom = [], names = [], arriving = new Map();
    for (const [, lower, route, skip] of scheme.steps) {
      if (skip) arriving.set(lower, (arriving.get(lower) ?? new Set()).add(plane.links[route][0]));
    }
    scheme.knots.forEach(([role, index], i) => {
      const extent = body.extents[i], x = x0 + body.x[i];
      top[i] = bottom[i] = y0 + body.tops[row[i]];
      names[i] = "";
      if (!extent.height) return;
      top[i] += (body.bottoms[row[i]] - body.tops[row[i]] - extent.height) / 2;
      bottom[i] = top[i] + extent.box;
      if (extent.labels) {
        for (const [wire, at] of extent.outs) {
          drawing.labels.push({ wire, x: x + at + g.label_gap, y: bottom[i] + g.label - 3 });
        }
      }
      if (role === "box") {
        names[i] = plane.children[index];
        this.place(drawing, names[i], plane.repeats[index], extent, x, top[i], arriving.get(i) ?? NONE);
      } else {
        const wire = plane.links[index][0], half = this.halfEnd(wire);
        drawing.ends.push({ wire, x: x - half, y: top[i], width: 2 * half, height: extent.box });
      }
    });
    for (const [upper, lower, route, skip] of scheme.steps) {
      const [wire, port] = plane.links[route], from = body.extents[upper], to = body.extents[lower];
      drawing.lines.push({
        wire,
        port,
        x1: x0 + body.x[upper] + (from.outs.get(port) ?? 0),
        x2: x0 + body.x[lower] + (to.ins.get(wire) ?? 0),
        y1: bottom[upper],
        y2: y0 + body.bottoms[row[upper]],
        y3: y0 + body.tops[row[lower]],
        y4: top[lower],
        skip: Boolean(skip) || skips.has(wire),
        source: names[upper],
        target: names[lower],
        arrow: to.height > 0 && !to.body,
      });
    }
  }

  place(drawing, part, repeat, extent, x, y, skips) {
    if (!extent.body) {
      const half = this.half(part, repeat), height = this.sketch.parts[part].height;
      drawing.placed.push({ part, x: x - half, y, width: 2 * half, height, repeat, open: false, free: 0 });
      return;
    }
    const width = extent.left + extent.right;
    const free = extent.left + (extent.ins.size ? Math.min(...extent.ins.values()) : extent.right);
    drawing.placed.push({ part, x: x - extent.left, y, width, height: extent.box, repeat, open: true, free });
    this.draw(drawing, part, extent.body, x, y, skips);
  }
}

const NONE = new Set();

function makeExtent() {
  return { left: 0, right: 0, height: 0, box: 0, ins: new Map(), outs: new Map(), labels: false, body: null };
}

const NOTHING = makeExtent();

/** What follows from a scheme, whatever the sizes of its boxes: rows, columns, neighbours in a row, pulls of wires. */
function factsOf(scheme) {
  const known = FACTS.get(scheme);
  if (known) return known;
  const row = [], column = [], above = [];
  scheme.rows.forEach((knots, i) => knots.forEach((knot) => (row[knot] = i)));
  const straight = new Map(scheme.steps.map(([upper, lower], i) => [`${upper} ${lower}`, i]));
  scheme.columns.forEach((knots, i) => knots.forEach((knot, j) => {
    column[knot] = i;
    if (j) above.push([knot, knots[j - 1], straight.get(`${knots[j - 1]} ${knot}`)]);
  }));
  const neighbours = [], between = scheme.columns.map(() => []), place = new Map();
  for (const knots of scheme.rows) {
    for (let i = 0; i + 1 < knots.length; i++) {
      const a = knots[i], b = knots[i + 1], key = `${column[a]} ${column[b]}`;
      if (!place.has(key)) {
        place.set(key, between[column[b]].length);
        between[column[b]].push(column[a]);
      }
      const boxes = (scheme.knots[a][0] === "box") + (scheme.knots[b][0] === "box");
      neighbours.push([a, b, boxes, column[b], place.get(key)]);
    }
  }
  const solid = scheme.columns.map((knots) => knots.filter((knot) => scheme.knots[knot][0] !== "lane").length);
  const weight = scheme.columns.map((knots, i) => solid[i] + 0.001 * knots.length);
  const pulls = scheme.columns.map(() => []);
  scheme.steps.forEach(([upper, lower, , skip], i) => {
    const a = column[upper], b = column[lower];
    if (a === b) return;
    pulls[a].push([skip && solid[a] ? 0.01 : 1, b, i, -1]);
    pulls[b].push([skip && solid[b] ? 0.01 : 1, a, i, 1]);
  });
  const found = { row, column, above, neighbours, between, weight, pulls };
  FACTS.set(scheme, found);
  return found;
}

const FACTS = new WeakMap();

function spread(spaces, main, room) {
  let at = 0;
  const places = spaces.map((space) => (at += space) - space);
  if (!places.length) return places;
  const middle = main === null ? (places[0] + places.at(-1)) / 2 : places[main];
  const widest = Math.max(...places.map((place) => Math.abs(place - middle)));
  const scale = room !== null && widest > room ? room / widest : 1;
  return places.map((place) => (place - middle) * scale);
}

function across(g, scheme, extents, shifts) {
  const { column, above, neighbours, between, weight, pulls } = factsOf(scheme), count = weight.length;
  const bent = new Array(column.length).fill(0);
  for (const [knot, upper, step] of above) bent[knot] = bent[upper] + shifts[step];
  if (count === 1) return bent;
  const spaces = between.map((others) => others.map(() => -Infinity));
  for (const [a, b, boxes, right, place] of neighbours) {
    const gap = g.lane_gap + (boxes * (g.box_gap - g.lane_gap)) / 2;
    const space = extents[a].right + bent[a] + gap + extents[b].left - bent[b];
    if (space > spaces[right][place]) spaces[right][place] = space;
  }
  const offsets = scheme.steps.map(([upper, lower], i) => shifts[i] + bent[upper] - bent[lower]);
  const x = settle(weight, between, spaces, pulls, offsets);
  return column.map((c, knot) => x[c] + bent[knot]);
}

function down(g, scheme, extents, x, shifts, framed) {
  const { row } = factsOf(scheme), bends = scheme.rows.map(() => 0), tops = [], bottoms = [];
  scheme.steps.forEach(([upper, lower], i) => {
    bends[row[upper]] = Math.max(bends[row[upper]], Math.abs(x[upper] + shifts[i] - x[lower]));
  });
  const heights = scheme.rows.map(() => 0);
  extents.forEach((extent, knot) => (heights[row[knot]] = Math.max(heights[row[knot]], extent.height)));
  let y = framed ? g.header : g.pad;
  heights.forEach((height, i) => {
    if (i) y += g.row_gap + Math.ceil(Math.min(g.bend_most, g.bend * bends[i - 1]));
    if (framed && i === 0 && !height) {
      tops.push(0);
      bottoms.push(bends[0] > STRAIGHT ? g.header - g.margin : 0);
      y = Math.max(bottoms[0], g.header - g.row_gap);
      return;
    }
    tops.push(y);
    y += height;
    bottoms.push(y);
  });
  return { tops, bottoms, height: framed && heights.at(-1) === 0 ? y : y + g.pad };
}

function settle(weight, between, spaces, pulls, offsets) {
  let x = nearest(weight.map(() => 0), weight, between, spaces);
  for (let round = 0; round < 30; round++) {
    const want = x.map((here, i) => {
      if (!pulls[i].length) return here;
      let sum = 0, total = 0;
      for (const [w, other, step, sign] of pulls[i]) {
        sum += w * (x[other] + sign * offsets[step]);
        total += w;
      }
      return (here + sum / total) / 2;
    });
    const before = x;
    x = nearest(want, weight, between, spaces);
    if (x.every((here, i) => Math.abs(here - before[i]) < 0.25)) break;
  }
  return x;
}

/** Places nearest to the wanted ones at which every column keeps its space (`spaces`) to those left of it (`between`). */
function nearest(want, weight, between, spaces) {
  const count = want.length, block = want.map((_, i) => i), offset = new Array(count).fill(0);
  const at = [...want], mass = [...weight], members = want.map((_, i) => [i]);
  for (let column = 0; column < count; column++) {
    for (;;) {
      const own = block[column];
      let worst = 1e-9, left = own, shift = 0;
      for (const member of members[own]) {
        const others = between[member];
        for (let k = 0; k < others.length; k++) {
          const other = others[k];
          if (block[other] === own) continue;
          const space = spaces[member][k], overlap = at[block[other]] + offset[other] + space - at[own] - offset[member];
          if (overlap > worst) [worst, left, shift] = [overlap, block[other], offset[other] + space - offset[member]];
        }
      }
      if (left === own) break;
      const total = mass[left] + mass[own];
      at[left] = (at[left] * mass[left] + (at[own] - shift) * mass[own]) / total;
      mass[left] = total;
      for (const member of members[own]) {
        block[member] = left;
        offset[member] += shift;
        members[left].push(member);
      }
      members[own] = [];
    }
  }
  const x = want.map((_, i) => at[block[i]] + offset[i]);
  for (let i = 0; i < count; i++) between[i].forEach((other, k) => (x[i] = Math.max(x[i], x[other] + spaces[i][k])));
  return x;
}
