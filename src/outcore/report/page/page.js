// The page: one tab for each part of the bundle that this page knows how to show.
"use strict";

const TABS = [
  { key: "run", title: "Run", show: showRun },
  { key: "drawing", title: "Graph", show: showGraph },
];

(function start() {
  const bundle = JSON.parse(document.getElementById("bundle").textContent);
  const tabs = document.getElementById("tabs"), panels = document.getElementById("panels");
  document.getElementById("facts").textContent = facts(bundle.graph);
  const shown = TABS.filter(({ key }) => key in bundle).map(({ title, show }) => {
    const button = html("button", title), panel = html("section");
    button.setAttribute("role", "tab");
    button.onclick = () => select(button);
    tabs.append(button);
    panels.append(panel);
    return { button, panel, show };
  });
  function select(chosen) {
    for (const { button, panel, show } of shown) {
      button.setAttribute("aria-selected", String(button === chosen));
      panel.hidden = button !== chosen;
      if (button === chosen && !panel.hasChildNodes()) show(panel, bundle);  // seen, so that it has a size
    }
  }
  if (shown.length) select(shown[0].button);
})();

function facts(graph) {
  if (!graph) return "";
  const root = graph.blocks.find((block) => block.path === "");
  const mode = graph.training ? "train mode" : "eval mode";
  return `${graph.model} · ${mode} · ${counted(root.parameters, "parameter")} · ${counted(graph.calls.length, "call")}`;
}
