// The code: the user's files with what every line takes in the margin.
"use strict";

const WORDS = new Set("False None True and as assert async await break class continue def del elif else except finally for from global if import in is lambda nonlocal not or pass raise return try while with yield self".split(" "));

function showCode(section, store) {
  return new Code(section, store);
}

class Code {
  constructor(section, store) {
    this.store = store;
    this.section = section;
    this.file = null;
    section.classList.add("code");
    this.files = make("div.files", { role: "tablist", "aria-label": "Files" });
    this.text = make("div.lines", { tabIndex: 0, "aria-label": "Source; arrow keys go to the next line that takes time" });
    this.side = make("aside.side");
    section.append(this.files, make("div.split", {}, this.text, this.side));
    this.text.addEventListener("keydown", (event) => this.key(event));
    store.on("piece", ({ name }) => { if (name === "sources" || name === "costs") this.show(this.file); });
    store.on("select", ({ from }) => this.light(from !== "code"));
    this.show(null);
  }

  show(wanted) {
    const files = this.store.data.sources ?? [];
    const file = files.find((f) => f.name === wanted) ?? files[0];
    this.file = file?.name ?? null;
    this.line = null;
    this.files.replaceChildren(...files.map((f) => make("button", { role: "tab", "aria-selected": String(f === file), onclick: () => this.show(f.name) }, f.name)));
    if (!file) {
      this.text.replaceChildren(make("div.waiting", {}, make("b", {}, "No source to show"), "The network is made of torch's own modules only, or its files are not text."));
      this.side.replaceChildren();
      return;
    }
    this.costs = new Map(file.lines.map((row) => [row.line, row]));
    const times = file.lines.map((row) => row.forward_s + row.backward_s), saved = file.lines.map((row) => row.saved_bytes);
    this.most = { time: Math.max(...times, 1e-12), saved: Math.max(...saved, 1) };
    this.whole = { time: this.store.cost("", "time_s") || 1, saved: this.store.cost("", "saved_bytes") || 1 };
    let inText = "";
    const rows = file.text.replace(/\r/g, "").split("\n").map((text, i) => {
      const [words, quote] = highlighted(text, inText);
      inText = quote;
      return this.row(i + 1, words);
    });
    if (rows.length > 1 && file.text.endsWith("\n")) rows.pop();
    this.text.replaceChildren(make("div.line.head", {}, make("span.no"), make("span.time", {}, "time"), make("span.saved", {}, "memory"), make("span.source")), ...rows);
    this.light(true);
    if (this.line === null) this.toFirst();
  }

  row(number, words) {
    const cost = this.costs.get(number), row = make("div.line", { "data-line": number });
    row.dataset.line = number;
    const time = make("span.time"), saved = make("span.saved");
    if (cost) {
      const seconds = cost.forward_s + cost.backward_s;
      row.classList.add("costs");
      row.style.setProperty("--heat", `${Math.round((seconds / this.most.time) * 100)}%`);
      time.append(make("b", {}, timeText(seconds)), make("span", {}, make("i", { style: { width: `${Math.max(1.5, (seconds / this.most.time) * 100)}%` } })));
      saved.append(make("b", {}, cost.saved_bytes ? bytesText(cost.saved_bytes) : "–"), make("span", {}, make("i", { style: { width: `${(cost.saved_bytes / this.most.saved) * 100}%` } })));
      row.addEventListener("click", () => this.pick(number));
    }
    row.append(make("span.no", {}, String(number)), time, saved, make("span.source", {}, ...words));
    return row;
  }

  toFirst() {
    const [first] = [...this.costs.values()].sort((a, b) => b.forward_s + b.backward_s - a.forward_s - a.backward_s);
    if (first) this.find(first.line)?.scrollIntoView({ block: "center" });
    this.about(null);
  }

  find(number) {
    return this.text.querySelector(`[data-line="${number}"]`);
  }

  pick(number) {
    this.line = number;
    this.store.select(this.costs.get(number).blocks[0] ?? null, "code");
    this.mark(new Set([number]));
    this.about(this.costs.get(number));
  }

  /** Mark the lines of the selected block; `go` to the first of them. */
  light(go) {
    const path = this.store.selected;
    if (path === null) return this.mark(new Set());
    if (!go && this.line !== null) return;
    const covers = (file) => file.lines.filter((row) => row.blocks.includes(path));
    const within = (file) => file.lines.filter((row) => row.blocks.some((block) => this.store.inside(block, path)));
    const files = this.store.data.sources ?? [];
    const exact = files.find((file) => covers(file).length) ?? files.find((file) => within(file).length);
    if (!exact) return this.mark(new Set());
    if (exact.name !== this.file) return this.show(exact.name);
    const rows = covers(exact).length ? covers(exact) : within(exact);
    this.line = rows[0].line;
    this.mark(new Set(rows.map((row) => row.line)));
    this.about(rows[0]);
    this.find(rows[0].line)?.scrollIntoView({ block: "center" });
  }

  mark(numbers) {
    for (const old of this.text.querySelectorAll(".marked")) old.classList.remove("marked");
    for (const number of numbers) this.find(number)?.classList.add("marked");
    if (!numbers.size) this.about(null);
  }

  /** The panel at the side: a line, or the lines that take most. */
  about(row) {
    const { store } = this;
    if (!row) {
      const hottest = [...this.costs?.values() ?? []].sort((a, b) => b.forward_s + b.backward_s - a.forward_s - a.backward_s).slice(0, 8);
      const list = hottest.map((line) => make("button.hotline", { onclick: () => { this.pick(line.line); this.find(line.line).scrollIntoView({ block: "center" }); } },
        make("span", {}, `${line.line}`), make("code", {}, this.source(line.line).trim()), make("b", {}, percent((line.forward_s + line.backward_s) / this.whole.time))));
      this.side.replaceChildren(make("h2", {}, "Lines that take most"), ...list,
        make("p.note", {}, "A line has all that it calls. Lines of one function add up; those of different functions overlap."),
        make("p.note", {}, make("kbd", {}, "↑"), " ", make("kbd", {}, "↓"), " go from line to line."));
      return;
    }
    const seconds = row.forward_s + row.backward_s, facts = make("dl");
    const fact = (name, ...text) => facts.append(make("dt", {}, name), make("dd", {}, ...text));
    fact("time", `${timeText(seconds)}, ${percent(seconds / this.whole.time)}`);
    fact("forward", timeText(row.forward_s));
    fact("backward", timeText(row.backward_s));
    fact("saved", `${bytesText(row.saved_bytes)}, ${percent(row.saved_bytes / this.whole.saved)}`);
    if (row.workspace_bytes) fact("workspace", bytesText(row.workspace_bytes));
    if (row.parameter_bytes) fact("parameters", bytesText(row.parameter_bytes));
    if (row.flops) fact("work", flopsText(row.flops));
    fact("calls", number(row.calls));
    const blocks = row.blocks.slice(0, 40).map((path) => make("button.row.block", { onclick: () => { store.select(path, "code-side"); store.emit("open", { tab: "graph" }); } },
      make("b", {}, path), make("i", {}, store.blocks.get(path)?.type ?? ""), make("span", {}, timeText(store.cost(path, "time_s")))));
    this.side.replaceChildren(make("h2", {}, `Line ${row.line}`), make("pre.one", {}, this.source(row.line).trim()), facts,
      make("h2", {}, row.blocks.length > 1 ? `Blocks (${row.blocks.length})` : "Block"), ...blocks);
  }

  source(line) {
    return this.store.data.sources.find((file) => file.name === this.file).text.split("\n")[line - 1] ?? "";
  }

  key(event) {
    const way = { ArrowDown: 1, ArrowUp: -1, j: 1, k: -1 }[event.key];
    if (!way || !this.costs?.size) return;
    const order = [...this.costs.keys()].sort((a, b) => a - b), at = order.indexOf(this.line);
    const next = order[at < 0 ? 0 : Math.min(order.length - 1, Math.max(0, at + way))];
    this.pick(next);
    this.find(next).scrollIntoView({ block: "nearest" });
    event.preventDefault();
  }
}

/** A line of Python as text and spans, and the quotes that are still open at its end. */
function highlighted(text, open) {
  const out = [], span = (name, words) => out.push(make(`span.${name}`, {}, words));
  let rest = text;
  if (open) {
    const end = rest.indexOf(open);
    if (end < 0) return [[make("span.c-text", {}, rest || "\u200b")], open];
    span("c-text", rest.slice(0, end + 3));
    rest = rest.slice(end + 3);
  }
  const token = /(#.*$)|([rbfuRBFU]{0,2}("""|'''))|([rbfuRBFU]{0,2}("(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'))|(@?[A-Za-z_]\w*)|(\d[\d._eE]*)/;
  for (;;) {
    const found = token.exec(rest);
    if (!found) break;
    if (found.index) out.push(rest.slice(0, found.index));
    const word = found[0];
    rest = rest.slice(found.index + word.length);
    if (found[1]) span("c-note", word);
    else if (found[3]) {
      const end = rest.indexOf(found[3]);
      if (end < 0) {
        span("c-text", word + rest);
        return [out, found[3]];
      }
      span("c-text", word + rest.slice(0, end + 3));
      rest = rest.slice(end + 3);
    } else if (found[4]) span("c-text", word);
    else if (found[7]) span("c-number", word);
    else if (WORDS.has(word)) span("c-key", word);
    else if (/^(def|class)$/.test(out.at(-2)?.textContent ?? "") || word.startsWith("@")) span("c-name", word);
    else out.push(word);
  }
  out.push(rest || (out.length ? "" : "\u200b"));
  return [out, ""];
}
