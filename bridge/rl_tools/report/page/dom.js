"use strict";
// Elements from data. Text goes in as text alone: what a model wrote is never read as HTML.

const content = JSON.parse(document.getElementById("content").textContent);
const SVG = "http://www.w3.org/2000/svg";

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.flat(9).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}
const el = (tag, attributes, ...children) => filled(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) => filled(document.createElementNS(SVG, tag), attributes, children);

// Characters that would hide, or turn what stands around them, are shown by their code points.
const ODD = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]/u;
function shown(text) {
  const parts = [];
  let plain = "";
  for (const character of String(text)) {
    if (!ODD.test(character)) { plain += character; continue; }
    if (plain) parts.push(plain);
    plain = "";
    const code = character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
    parts.push(el("span", { class: "odd" }, `U+${code}`));
  }
  if (plain) parts.push(plain);
  return parts;
}

function number(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e6) return String(value);
  if (size >= 1e6 || (size > 0 && size < 1e-4)) return value.toExponential(2).replace("e+", "e");
  if (size >= 1000) return String(Math.round(value));
  return String(Number(value.toPrecision(4)));
}
function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 120) return `${number(Math.round(seconds * 10) / 10)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}
const words = (name) => name.replaceAll("_", " ");
const color = (place) => `var(--c${place % 8})`;
const DASHES = ["", "7 3", "2 3", "9 3 2 3", "12 4", "1 3", "5 2 1 2 1 2", "3 6"];

// A choice is kept while the page is open, over reloads too.
const kept = {
  get(name, otherwise) {
    const found = window.history.state && window.history.state[name];
    return found === undefined || found === null ? otherwise : found;
  },
  set(name, value) { window.history.replaceState({ ...window.history.state, [name]: value }, ""); },
};
function choice(label, name, options, otherwise, changed) {
  const before = kept.get(name, otherwise);
  const now = options.some(([value]) => value === before) ? before : otherwise;
  const select = el("select", { onchange: () => { kept.set(name, select.value); changed(select.value); } },
    options.map(([value, text]) => el("option", { value, selected: value === now }, text)));
  return { node: el("label", {}, label, select), value: () => select.value };
}
function check(label, name, otherwise, changed) {
  const box = el("input", { type: "checkbox", checked: kept.get(name, otherwise),
    onchange: () => { kept.set(name, box.checked); changed(); } });
  return { node: el("label", {}, box, label), value: () => box.checked };
}
function swatch(place) {
  return svg("svg", { width: 30, height: 10, "aria-hidden": "true" },
    svg("line", { x1: 1, x2: 29, y1: 5, y2: 5, stroke: color(place), "stroke-width": 3, "stroke-dasharray": DASHES[place % 8] }));
}
function section(id, title, ...children) {
  return el("section", { id, "aria-labelledby": `${id}-title` }, el("h2", { id: `${id}-title` }, title), ...children);
}
