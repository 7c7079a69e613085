// A drawing as SVG elements. Knows nothing of what is selected or how it is clicked; that is in graph.js.
"use strict";

const SVG = "http://www.w3.org/2000/svg";

/** Replace the content of `world` by a drawing. */
function drawPicture(world, drawing, sketch, blocks) {
  const layers = ["frames", "wires", "shapes", "boxes"].map((name) => element("g", { class: name }));
  const [frames, wires, shapes, boxes] = layers;
  for (const placed of drawing.placed) {
    if (placed.open) frames.append(frameElement(placed, sketch));
    else boxes.append(boxElement(placed, sketch, blocks));
  }
  const skipsFirst = [...drawing.lines].sort((a, b) => Number(b.skip) - Number(a.skip));
  for (const line of skipsFirst) wires.append(...wireElements(line));
  for (const label of drawing.labels) {
    shapes.append(textElement(label.x, label.y, "shape", sketch.wires[label.wire].label));
  }
  for (const end of drawing.ends) {
    const group = element("g", { class: "end" });
    group.append(
      rectElement(end.x, end.y, end.width, end.height, end.height / 2),
      textElement(end.x + end.width / 2, end.y + end.height / 2 + 3.5, "", sketch.ends[end.wire].name),
    );
    boxes.append(group);
  }
  world.replaceChildren(...layers);
}

function frameElement(placed, sketch) {
  const part = sketch.parts[placed.part];
  const group = element("g", { class: "frame", "data-part": placed.part });
  if (level(placed.part, sketch) % 2) group.classList.add("odd");
  group.append(rectElement(placed.x, placed.y, placed.width, placed.height, 6));
  const title = textElement(placed.x + 9, placed.y + 17, "name left", part.name);
  const times = placed.repeat > 1 ? sketch.times[placed.repeat] : 0;
  if (times) title.append(timesElement(placed.repeat));
  const [name, type] = part.header;
  const beside = placed.free > name + type + times + 30;
  const at = beside ? placed.x + 16 + name + times : placed.x + placed.width - 9;
  group.append(title, textElement(at, placed.y + 17, beside ? "small left" : "small right", part.type));
  group.append(badgeElement(placed.x, placed.y, "close"));
  return group;
}

function boxElement(placed, sketch, blocks) {
  const part = sketch.parts[placed.part], { x, y, width, height } = placed;
  const container = part.kind === "container";
  const radius = blocks.get(part.block)?.kind === "function" ? height / 2 : 4;
  const group = element("g", { class: `box ${part.kind}`, "data-part": placed.part });
  if (placed.repeat > 1) group.append(rectElement(x + 4, y + 4, width, height, radius));
  group.append(rectElement(x, y, width, height, radius));
  if (container) {
    const inner = rectElement(x + 2.5, y + 2.5, width - 5, height - 5, 2);
    inner.classList.add("inner");
    group.append(inner);
  }
  const title = textElement(x + width / 2, y + (part.note ? 15 : height / 2 + 4), "", "");
  title.append(spanElement(part.name, "name"));
  if (part.type) title.append(" " + part.type);
  if (placed.repeat > 1) title.append(timesElement(placed.repeat));
  group.append(title);
  if (part.note) group.append(textElement(x + width / 2, y + 29, "small", part.note));
  if (container) group.append(badgeElement(x, y + height / 2, "open"));
  return group;
}

/** What is seen of a wire, and a wider invisible line that is easier to point at. */
function wireElements(line) {
  const outline = linePath(line), kind = line.skip ? " skip" : "";
  const marks = { "data-wire": line.wire, "data-port": line.port };
  const found = [
    element("path", { class: "touch", d: outline, ...marks }),
    element("path", { class: "wire" + kind, d: outline, ...marks }),
  ];
  if (line.arrow) {
    found.push(element("path", { class: "tip" + kind, d: `M${line.x2} ${line.y4}l-3.5-7h7z`, ...marks }));
  }
  return found;
}

function linePath({ x1, x2, y1, y2, y3, y4 }) {
  if (Math.abs(x1 - x2) < STRAIGHT) return `M${x1} ${y1}V${y4}`;
  const middle = (y2 + y3) / 2;
  return `M${x1} ${y1}V${y2}C${x1} ${middle} ${x2} ${middle} ${x2} ${y3}V${y4}`;
}

/** The round button that opens or closes a container. */
function badgeElement(x, y, action) {
  const badge = element("g", { class: "badge", "data-do": action, transform: `translate(${x} ${y})` });
  const sign = action === "open" ? "M-3 0H3M0-3V3" : "M-3 0H3";
  badge.append(element("circle", { r: 6.5 }), element("path", { d: sign }));
  const title = action === "open" ? "Open (Enter)" : "Close (Backspace)";
  badge.append(Object.assign(element("title"), { textContent: title }));
  return badge;
}

function timesElement(repeat) {
  const span = spanElement(` × ${repeat}`, "name times");
  span.dataset.do = "unfold";
  return span;
}

function level(part, sketch) {
  let depth = 0;
  for (let at = sketch.parts[part].parent; at !== null; at = sketch.parts[at].parent) depth++;
  return depth;
}

function rectElement(x, y, width, height, radius) {
  return element("rect", { x, y, width, height, rx: radius });
}

function textElement(x, y, name, text) {
  const found = element("text", { x, y, class: name });
  found.textContent = text;
  return found;
}

function spanElement(text, name) {
  const found = element("tspan", { class: name });
  found.textContent = text;
  return found;
}

function element(name, attributes = {}) {
  const found = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) found.setAttribute(key, value);
  return found;
}
