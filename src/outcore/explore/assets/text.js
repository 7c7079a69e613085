// Small things that every panel uses: elements, numbers as text, the floating hint.
"use strict";

/** An HTML element: `make("button.act", { onclick }, "Copy")`. */
function make(what, attributes = {}, ...content) {
  const [name, ...classes] = what.split(".");
  const found = document.createElement(name || "div");
  if (classes.length) found.className = classes.join(" ");
  for (const [key, value] of Object.entries(attributes)) {
    if (value === undefined || value === null) continue;
    if (key.startsWith("on")) found.addEventListener(key.slice(2), value);
    else if (key === "style") Object.assign(found.style, value);
    else if (key in found && key !== "role") found[key] = value;
    else found.setAttribute(key, value);
  }
  found.append(...content.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return found;
}

function percent(share) {
  if (!Number.isFinite(share)) return "–";
  return share > 0 && share < 0.001 ? "<0.1 %" : `${(share * 100).toFixed(share < 0.0995 ? 1 : 0)} %`;
}

function flopsText(value) {
  for (const [unit, name] of [[1e15, "PFLOP"], [1e12, "TFLOP"], [1e9, "GFLOP"], [1e6, "MFLOP"]]) {
    if (value >= unit) return `${Number((value / unit).toPrecision(3))} ${name}`;
  }
  return `${Math.round(value)} FLOP`;
}

function rateText(value) {
  if (value >= 1000) return Math.round(value).toLocaleString("en");
  return Number(value.toPrecision(3)).toString();
}

function kindName(name) {
  return { state: "optimizer state", feature_maps: "feature maps", feature_gradients: "gradients of feature maps",
    gradients: "gradients of weights" }[name] ?? name;
}

function kindColour(name) {
  return `var(--${name === "state" ? "state-kind" : name})`;
}

function shortPath(path, most = 34) {
  return path.length <= most ? path : "…" + path.slice(path.length - most + 1);
}

/** Show a hint beside the pointer; `rows` are strings or elements. */
function showTip(event, ...rows) {
  const tip = document.getElementById("tip");
  tip.replaceChildren(...rows.filter(Boolean).map((row) => (typeof row === "string" ? make("div", {}, row) : row)));
  tip.hidden = false;
  const { innerWidth: width, innerHeight: height } = window;
  const x = Math.min(event.clientX + 14, width - tip.offsetWidth - 8);
  const below = event.clientY + 16 + tip.offsetHeight < height;
  tip.style.left = `${Math.max(4, x)}px`;
  tip.style.top = `${below ? event.clientY + 16 : event.clientY - tip.offsetHeight - 10}px`;
}

function hideTip() {
  document.getElementById("tip").hidden = true;
}

/** Buttons of which one is pressed. */
function choice(label, options, chosen, pick) {
  const group = make("div.choice", { role: "group", "aria-label": label });
  const press = (value) => {
    for (const button of group.children) button.setAttribute("aria-pressed", String(button.dataset.value === value));
  };
  for (const [value, text, title] of options) {
    group.append(make("button", { type: "button", "data-value": value, title, onclick: () => { press(value); pick(value); } }, text));
  }
  for (const button of group.children) button.dataset.value = button.getAttribute("data-value");
  press(chosen);
  group.press = press;
  return group;
}

function copyButton(text) {
  const button = make("button", { type: "button", onclick: async () => {
    try {
      await navigator.clipboard.writeText(text());
    } catch {
      const area = make("textarea", { value: text() });
      document.body.append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
    }
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = "Copy"), 1200);
  } }, "Copy");
  return button;
}

/** The words of a command, each of which stays on one line: a browser would break --devices after its first hyphen. */
function unbrokenWords(text) {
  return text.split(" ").flatMap((word, i) => (i ? [" ", make("span.word", {}, word)] : [make("span.word", {}, word)]));
}

function download(name, text) {
  const address = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  make("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}

/** Call `draw` now and whenever the element's size changes. */
function onResize(element, draw) {
  let last = "";
  new ResizeObserver(() => {
    const size = `${element.clientWidth}x${element.clientHeight}`;
    if (size === last || !element.clientWidth) return;
    last = size;
    draw();
  }).observe(element);
}
