// The page: a tab for each panel, made when it is first looked at.
"use strict";

const PANELS = [
  { key: "overview", title: "Overview", needs: "costs", show: showOverview },
  { key: "code", title: "Code", needs: "sources", show: showCode },
  { key: "graph", title: "Graph", needs: "drawing", show: showNetwork },
  { key: "breakdown", title: "Breakdown", needs: "costs", show: showBreakdown },
  { key: "timeline", title: "Timeline", needs: "costs", show: showTimeline },
  { key: "plan", title: "Plan", needs: "costs", show: showPlan },
  { key: "run", title: "Run", needs: "costs", show: showRunPanel },
];

class Page {
  constructor() {
    this.store = new Store(JSON.parse(document.getElementById("bundle").textContent));
    this.tabs = document.getElementById("tabs");
    this.panels = document.getElementById("panels");
    this.chosen = PANELS.find((panel) => location.hash === `#${panel.key}`)?.key ?? "overview";
    for (const [i, panel] of PANELS.entries()) {
      this.tabs.append(make("button", { role: "tab", id: `tab-${panel.key}`, "aria-controls": `panel-${panel.key}`, onclick: () => this.open(panel.key) }, panel.title, make("kbd", {}, String(i + 1))));
    }
    document.addEventListener("keydown", (event) => this.key(event));
    if (document.body.dataset.live === "true") new Live(this.store, () => this.fresh());
    if (this.store.data.about) this.fresh();
    else this.panels.replaceChildren(make("section", {}, make("div.waiting", {}, make("b", {}, "Recording the network…"), "Its blocks and costs appear in a few seconds, sizes and plans after that.")));
  }

  /** Make all panels anew: another network is there. */
  fresh() {
    this.store.listeners.clear();
    this.store.on("open", ({ tab }) => this.open(tab));
    for (const old of this.panels.children) old.hidden = true;  // their keys are off
    this.made = new Map();
    this.panels.replaceChildren(...PANELS.map((panel) => make("section", { id: `panel-${panel.key}`, role: "tabpanel", "aria-labelledby": `tab-${panel.key}`, hidden: true })));
    this.facts();
    this.open(this.chosen);
    const { functions, modules, geometry } = this.store.data.drawing;
    layOutAhead(this.store.data.start.functions || !modules.flat[ROOT] ? functions : modules, geometry);
  }

  facts() {
    const { about, graph, title } = this.store.data, chips = [["batch", about.batch], ["on", about.device]];
    const root = graph.blocks.find((block) => block.path === "");
    document.title = title;
    document.querySelector(".bar h1").textContent = title;
    document.getElementById("facts").replaceChildren(
      make("span.chip", {}, make("b", {}, root.type)),
      ...chips.map(([name, value]) => make("span.chip", {}, `${name} `, make("b", {}, String(value)))),
      make("span.chip", {}, make("b", {}, number(root.parameters)), root.parameters === 1 ? " parameter" : " parameters"), make("span.chip", {}, make("b", {}, number(graph.calls.length)), graph.calls.length === 1 ? " call" : " calls"));
  }

  open(key) {
    if (!this.made) return;
    this.chosen = key;
    hideTip();
    for (const panel of PANELS) {
      const section = document.getElementById(`panel-${panel.key}`), mine = panel.key === key;
      section.hidden = !mine;
      document.getElementById(`tab-${panel.key}`).setAttribute("aria-selected", String(mine));
      if (mine && !this.made.has(key)) this.made.set(key, panel.show(section, this.store));
      else if (mine) this.made.get(key).returned?.();
    }
    try {
      history.replaceState(null, "", `#${key}`);
    } catch {
      // a page inside another one has no address of its own
    }
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, select, textarea")) return;
    const panel = PANELS[Number(event.key) - 1];
    if (panel) this.open(panel.key);
  }
}

new Page();
