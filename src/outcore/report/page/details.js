// The panel beside the picture: what is known about the selected block.
"use strict";

/** Fill the panel. `visit(part)` is called when another block is chosen in it, `act(name)` for its buttons. */
function showDetails(panel, graph, part, visit, act) {
  panel.replaceChildren();
  const add = (...nodes) => panel.append(...nodes);
  if (part === null) return add(...introduction(graph));
  const shown = graph.sketch.parts[part], block = graph.blocks.get(shown.block);
  add(html("h2", block.path ? part.replace(/#0$/, "") : block.type), pathLine(graph, part, visit));

  const facts = html("dl");
  const fact = (name, ...value) => facts.append(html("dt", name), html("dd", ...value));
  fact("type", block.type);
  if (block.detail) fact("settings", html("code", block.detail));
  fact("parameters", number(block.parameters));
  if (block.calls > 1) fact("calls", number(block.calls));
  if (block.kind === "opaque") fact("kind", "opaque: recorded as one call");
  if (block.source) fact("source", Object.assign(html("span", block.source), { className: "source" }));
  if (block.aliases.length) fact("also named", block.aliases.join(", "));
  add(facts);

  const actions = html("div");
  actions.className = "actions";
  for (const [name, text] of graph.actions(part)) {
    const button = html("button", text);
    button.onclick = () => act(name);
    actions.append(button);
  }
  if (actions.children.length) add(actions);

  const wires = graph.sketch.wires;
  add(...wireList("Inputs", shown.reads.map((i) => wires[i]), (wire) => [
    "from ", wire.source === null ? "outside" : partLink(graph, wire.source, visit),
  ]));
  add(...wireList("Outputs", shown.sends.map((i) => wires[i]), (wire) => {
    const outside = wire.targets.filter((target) => target !== OUTSIDE && !graph.within(target, part));
    const links = outside.flatMap((target, i) => [i ? ", " : "to ", partLink(graph, target, visit)]);
    return wire.targets.includes(OUTSIDE) ? [...links, links.length ? " and " : "to ", "the output"] : links;
  }));

  function wireList(title, list, ends) {
    if (!list.length) return [];
    const items = html("ul");
    for (const wire of list) {
      const value = graph.values.get(wire.value);
      const name = Object.assign(html("div", value.name), { className: "soft" });
      items.append(html("li", html("div", valueFacts(value)), name, html("div", ...ends(wire))));
    }
    return [html("h3", `${title} (${list.length})`), items];
  }
}

const OUTSIDE = "(outside)";

function introduction(graph) {
  const keys = [
    ["click", "select a block"], ["double click", "open or close it"], ["× N", "unfold repeats"],
    ["arrows", "follow the wires"], ["Enter", "open"], ["Backspace", "close"], ["[ ]", "less, more depth"],
    ["/", "find a block"], ["f", "show everything"],
  ];
  const list = html("dl");
  for (const [key, text] of keys) list.append(html("dt", html("kbd", key)), html("dd", text));
  const notes = graph.notes.map((note) => html("p", note));
  return [html("h2", graph.root.type), html("p", "Select a block to see what is known about it."), ...notes, list];
}

function pathLine(graph, part, visit) {
  const line = Object.assign(html("p"), { className: "path" });
  for (const around of graph.around(part)) {
    line.append(around === "" ? graph.root.type : partLink(graph, around, visit, true), " › ");
  }
  line.append(graph.sketch.parts[part].name);
  return line;
}

function partLink(graph, part, visit, short = false) {
  const link = html("a", short ? graph.sketch.parts[part].name : part.replace(/#0$/, ""));
  link.tabIndex = 0;
  link.onclick = () => visit(part);
  link.onkeydown = (event) => event.key === "Enter" && visit(part);
  return link;
}

function valueFacts({ shape, dtype, bytes: size }) {
  return `${shape.join("×") || "scalar"} ${dtype}, ${bytes(size)}`;
}

function number(value) {
  return value.toLocaleString("en");
}

function bytes(size) {
  for (const [unit, name] of [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]) {
    if (size >= unit) return `${Number((size / unit).toPrecision(3))} ${name}`;
  }
  return `${size} B`;
}

function html(name, ...content) {
  const found = document.createElement(name);
  found.append(...content);
  return found;
}

/** A number with its noun. */
function counted(count, noun) {
  return `${number(count)} ${noun}${count === 1 ? "" : "s"}`;
}
