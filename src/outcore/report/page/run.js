// The run: how it ended, its curves, what was predicted beside what was measured, and what it was made with.
"use strict";

function showRun(panel, bundle) {
  const run = bundle.run, page = html("div");
  page.className = "run";
  panel.append(page);
  page.append(headline(run));
  const trouble = runTrouble(run);
  if (trouble) page.append(trouble);
  const charts = html("div");
  charts.className = "charts";
  charts.append(...runCharts(run).filter(Boolean));
  if (charts.children.length) page.append(section("Curves", charts));
  if (run.evaluation) page.append(...evaluation(run.evaluation, run.class_counts || {}));
  if (run.maps) page.append(mapExamples(run.maps));
  page.append(section("Predicted beside measured", comparison(run)));
  if (run.timeline) page.append(section("The last step, rank by rank", timelinePicture(run.timeline)));
  if (run.forecast && run.forecast.decisions.length) page.append(section("Decisions", pairs(run.forecast.decisions)));
  if (run.plan) page.append(section("Plan", folded("plan.json", JSON.stringify(run.plan, null, 1))));
  page.append(section("Settings", folded("config.yaml", run.config)));
  if (run.commands) page.append(section("Commands", html("pre", run.commands.join("\n"))));
  if (run.environment) page.append(section("Environment", pairs(Object.entries(run.environment).filter(([name, v]) => v && !(name === "command" && run.commands)))));
}

function headline(run) {
  const tiles = html("div"), where = run.position || {};
  tiles.className = "tiles";
  const measured = run.measured || {}, budget = run.budget_bytes;
  const tile = (name, value, note = "") => {
    const box = html("div", html("span", name), html("b", value), html("small", note));
    box.className = "tile";
    tiles.append(box);
  };
  tile("ended", run.ended || "going on", run.time_s ? `after ${timeText(run.time_s)}` : "");
  tile("steps", number(where.step || 0), `${counted(where.epoch || 0, "epoch")}, ${counted(where.examples || 0, "example")}`);
  if (where.best !== null && where.best !== undefined) tile(`best ${run.watch || "loss"}`, shortNumber(where.best), `epoch ${where.best_epoch + 1}`);
  if (measured.step_s) tile("step", timeText(measured.step_s), "median, measured");
  if (measured.examples_per_s) tile("throughput", shortNumber(measured.examples_per_s), "examples/s, by the median step");
  if (measured.peak_bytes) tile("peak memory", bytesText(measured.peak_bytes), budget ? `of ${bytesText(budget)} allowed` : "measured");
  return tiles;
}

function runTrouble(run) {
  const lines = [];
  if (run.ended === "failed" && run.error) lines.push(run.error);
  const held = (run.measured || {}).peak_bytes || 0, budget = run.budget_bytes || Infinity;
  if (held > budget) lines.push(`a step held ${bytesText(held)}, more than the ${bytesText(budget)} allowed`);
  if (run.not_finite) lines.push(`${counted(run.not_finite, "step")} had no finite loss and left the weights alone`);
  if (run.checkpoints_lost) lines.push(`${counted(run.checkpoints_lost, "checkpoint")} could not be written`);
  for (const tile of (run.damage || []).slice(0, 20)) lines.push(`read as glass: ${tile}`);
  for (const bad of run.bad || []) lines.push(`skipped: ${bad}`);
  if (!lines.length) return null;
  const list = html("ul");
  list.append(...lines.map((line) => html("li", line)));
  const box = section("Trouble", list);
  box.classList.add("trouble");
  return box;
}

function runCharts(run) {
  const steps = run.steps || {}, epochs = run.epochs || {};
  const at = (name, label) => ({ name: label, x: steps.step || [], y: steps[name] || [] });
  const after = (name, label) => ({ name: label, x: epochs.step || [], y: epochs[name] || [] });
  const known = (name) => epochs[name].some((v) => v !== null), figure = (name) => name.slice(11).replaceAll("_", " ");
  const metrics = Object.keys(epochs).filter((n) => n.startsWith("validation_") && n !== "validation_loss" && known(n));
  const budget = run.budget_bytes ? [{ name: "budget", y: run.budget_bytes }] : [];
  return [
    lineChart({ title: "Loss", xTitle: "step", series: [at("loss", "training"), after("validation_loss", "validation")] }),
    lineChart({ title: metrics.length === 1 ? `Validation: ${figure(metrics[0])}` : "Validation", xTitle: "step", series: metrics.map((n) => after(n, figure(n))) }),
    lineChart({ title: "Step time", xTitle: "step", format: timeText, zero: true, series: [at("time_s", "time")] }),
    lineChart({ title: "Peak memory", xTitle: "step", format: bytesText, zero: true, lines: budget, series: [at("memory_bytes", "peak")] }),
    lineChart({ title: "Learning rate", xTitle: "step", zero: true, series: [at("learning_rate", "learning rate")] }),
    lineChart({ title: "Gradient norm", xTitle: "step", zero: true, series: [at("gradient_norm", "norm")] }),
    ...memoryChart(run),
  ];
}

function memoryChart(run) {
  const curve = run.memory;
  if (!curve) return [];
  const x = curve.predicted.map((_, i) => i);
  const lines = run.budget_bytes ? [{ name: "budget", y: run.budget_bytes }] : [];
  const series = [{ name: "a plain step, predicted", x, y: curve.predicted }];
  return [lineChart({ title: "Memory through a plain step", xTitle: "call", format: bytesText, zero: true, lines, series })];
}

/** How well the best epoch does: pictures, classes, worst examples, and all of them. */
function evaluation(found, trained) {
  const pictures = html("div");
  pictures.className = "pictures";
  for (const [name, svg] of Object.entries(found.pictures)) pictures.append(picture(svg, name));
  const interval = ([v, low, high]) => v === null ? "–" : `${v.toFixed(2)} (${low.toFixed(2)} to ${high.toFixed(2)})`;
  const areas = new Map(found.areas.map((row) => [row.class, row]));
  const classes = grid(["class", "trained on", "validated on", "found", "ROC area", "average precision"], found.classes.map((name, i) => {
    const row = areas.get(name), right = found.confusion[i][i];
    return [name, String(i) in trained ? number(trained[i]) : "–", number(found.counts[i]), number(right), row ? interval(row.roc) : "–", row ? interval(row.pr) : "–"];
  }));
  const line = (e) => [e.example, e.label, e.predicted, e.right ? "" : "wrong", e.probability.toFixed(3)];
  const head = ["example", "true", "predicted", "", "p(true)"];
  const worst = found.examples.filter((e) => !e.right).slice(0, 12);
  const all = html("details", html("summary", `all ${number(found.examples.length)} examples, the worst first`), grid(head, found.examples.slice(0, 2000).map(line)));
  return [
    section("Validation, best epoch", pictures, classes, ...(found.pictures.roc ? [] : [html("p", "ROC and precision against recall need validation examples of two classes.")])),
    section("Worst examples", thumbnails(found.thumbnails || {}, worst), worst.length ? grid(head, worst.map(line)) : html("p", "all were right"), all),
  ];
}

/** How well the map of each example agrees with its mask, the worst first. */
function mapExamples(found) {
  const share = (v) => v === null ? "–" : v.toFixed(3), row = html("div");
  row.className = "pictures";
  for (const e of found.examples.filter((w) => found.thumbnails[w.example])) {
    const image = html("img");
    image.src = found.thumbnails[e.example];
    image.alt = e.example;
    row.append(html("figure", image, html("figcaption", e.example.split("/").pop(), html("br"), `Dice ${share(e.dice)}`)));
  }
  const lines = (examples) => grid(["example", "Dice", "accuracy"], examples.map((e) => [e.example, share(e.dice), share(e.accuracy)]));
  const all = html("details", html("summary", `all ${number(found.examples.length)} examples, the worst first`), lines(found.examples.slice(0, 2000)));
  return section("Worst examples, best epoch", row, lines(found.examples.slice(0, 12)), all);
}

/** Slides that were taken for something else, as small pictures. */
function thumbnails(images, worst) {
  const row = html("div");
  row.className = "pictures";
  for (const e of worst.filter((w) => images[w.example])) {
    const image = html("img");
    image.src = images[e.example];
    image.alt = e.example;
    const name = e.example.split("/").pop();
    row.append(html("figure", image, html("figcaption", name, html("br"), `${e.label}, taken for ${e.predicted}`)));
  }
  return row;
}

function grid(head, rows) {
  const table = html("table", html("tr", ...head.map((t) => html("th", t))));
  for (const row of rows) table.append(html("tr", ...row.map((t, i) => html(i ? "td" : "th", t))));
  return table;
}

function comparison(run) {
  const table = html("table"), head = html("tr", ...["", "plain, predicted", "planned", "measured", "measured / predicted"].map((t) => html("th", t)));
  const forecast = run.forecast || {}, measured = run.measured || {};
  table.append(head);
  const row = (name, plain, planned, found, format) => {
    const predicted = planned ?? plain, ratio = predicted && found ? (found / predicted).toFixed(2) : "–";
    table.append(html("tr", html("th", name), ...[format(plain), format(planned), format(found), ratio].map((t) => html("td", t))));
  };
  row("step time", forecast.step_s, forecast.planned_step_s, measured.step_s, timeText);
  row("peak memory", forecast.peak_bytes, forecast.planned_peak_bytes, measured.peak_bytes, bytesText);
  row("whole process", null, null, measured.process_bytes ?? null, bytesText);
  const notes = (forecast.notes || []).map((note) => html("p", note));
  return html("div", table, ...notes);
}

function timelinePicture(svg) {
  return picture(svg, "Forward and backward passes, transfers and waiting of every rank over time");
}

/** A drawing as an image: nothing in it can run. */
function picture(svg, words) {
  const image = html("img");
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(svg)}`;
  image.alt = words;
  image.className = "timeline";
  return image;
}

function section(title, ...content) {
  return html("section", html("h2", title), ...content);
}

function pairs(rows) {
  const list = html("dl");
  for (const [name, value] of rows) list.append(html("dt", name), html("dd", String(value)));
  return list;
}

function folded(name, text) {
  return html("details", html("summary", name), html("pre", text));
}
