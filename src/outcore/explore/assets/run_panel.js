// A training run, while it goes on or after it: how far it is, its curves, what was predicted beside what was measured.
"use strict";

function showRunPanel(section, store) {
  return new RunPanel(section, store);
}

class RunPanel {
  constructor(section, store) {
    this.store = store;
    this.body = make("div.run-body");
    section.classList.add("run-panel");
    section.append(this.body);
    store.on("piece", ({ name }) => name === "run" && !section.hidden && this.update());
    this.update();
  }

  returned() {
    this.update();
  }

  update() {
    const { run } = this.store.data, { scrollTop } = this.body;
    this.body.replaceChildren(...(run ? this.rows(run) : this.nothing()));
    this.body.scrollTop = scrollTop;
  }

  nothing() {
    const command = commandText(this.store, "train") || commandText(this.store, "plan"), live = document.body.dataset.live === "true";
    return [make("div.waiting", {}, make("b", {}, "No run yet"),
      live ? "Start one, and it is shown here while it goes on; another folder is given with --run." : "This page was made without a run: give its folder with --run.",
      command ? make("div.command", {}, make("code", {}, command), copyButton(() => command)) : "")];
  }

  rows(run) {
    const rows = [make("p.run-head", {}, make(run.ended ? "span.pill" : "span.pill.good", {}, run.ended ?? "going on"), ` ${run.folder ?? ""}`), headline(run)];
    const trouble = runTrouble(run);
    if (trouble) rows.push(trouble);
    const charts = runCharts(run).filter(Boolean);
    if (charts.length) rows.push(make("div.run-charts", {}, charts));
    else rows.push(make("p.note", {}, "The first steps are not written yet."));
    rows.push(section("Predicted beside measured", comparison(run)));
    if (run.recorded) rows.push(make("button.act", { onclick: () => this.store.emit("open", { tab: "timeline" }) }, "Show its last recorded step, rank by rank"));
    if (run.config) rows.push(section("Settings", folded("config.yaml", run.config)));
    return rows;
  }
}
