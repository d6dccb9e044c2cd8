// Numbers in words, elements from text, and what a plan's text says. Text is never read as HTML.
"use strict";
const SIZES = ["B", "kB", "MB", "GB", "TB", "PB"];
const PALETTE = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#7a5cc7"];
const OTHERS = "#8a8f98";
const AXES = { tp: "tensor", pp: "pipeline", cp: "context", ep: "experts" };

function element(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name === "style") Object.assign(made.style, value);
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== false && value !== null) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

function byId(id) { return document.getElementById(id); }

function digits(value, count = 3) {
  if (!Number.isFinite(value)) return "-";
  if (Math.abs(value) >= 10 ** count) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(count)));
}

function bytes(value) {
  let unit = 0;
  while (value >= 1000 && unit < SIZES.length - 1) { value /= 1000; unit += 1; }
  return `${digits(value)} ${SIZES[unit]}`;
}

function seconds(value) {
  if (value < 1e-3) return `${digits(value * 1e6)} µs`;
  if (value < 1) return `${digits(value * 1e3)} ms`;
  if (value < 600) return `${digits(value)} s`;
  if (value < 172800) return `${digits(value / 3600)} h`;
  return `${digits(value / 86400)} days`;
}

function count(value) {
  if (value >= 1e12) return `${digits(value / 1e12)} T`;
  if (value >= 1e9) return `${digits(value / 1e9)} G`;
  if (value >= 1e6) return `${digits(value / 1e6)} M`;
  return value >= 1e4 ? `${digits(value / 1e3)} k` : digits(value);
}

function dollars(value) {
  if (value >= 1e9) return `$${digits(value / 1e9)} bn`;
  if (value >= 1e6) return `$${digits(value / 1e6)} M`;
  return value >= 1e4 ? `$${digits(value / 1e3)} k` : `$${digits(value)}`;
}

function percent(value) { return `${(value * 100).toFixed(value < 0.1 ? 1 : 0)} %`; }

function ends(pair, text) { return `${text(pair[0])} to ${text(pair[1])}`; }

// The axes of a plan's text: {pp: {size, options}, ...}; mb is the number of micro-batches.
function axesOf(text) {
  const found = {};
  for (const word of text.split(" ")) {
    const parts = /^(dp|tp|pp|ep|cp|mb)(\d+)(?::(.*))?$/.exec(word);
    if (parts) found[parts[1]] = { size: Number(parts[2]), options: (parts[3] || "").split(",") };
  }
  return found;
}

function ranksOf(text) {
  const axes = axesOf(text);
  return ["dp", "tp", "pp", "cp"].reduce((all, name) => all * (axes[name]?.size ?? 1), 1);
}

function familyOf(text) {
  const axes = axesOf(text);
  const used = Object.keys(AXES).filter((name) => (axes[name]?.size ?? 1) > 1);
  if (used.length === 0) return "data only";
  return used.map((name) => AXES[name]).join(" + ");
}

// A colour for each family of some plans: the commonest first, the rarest share one.
function coloursOf(plans) {
  const counts = new Map();
  for (const one of plans) counts.set(familyOf(one.plan), (counts.get(familyOf(one.plan)) || 0) + 1);
  const names = [...counts.keys()].sort((one, other) => counts.get(other) - counts.get(one) || one.localeCompare(other));
  return new Map(names.map((name, index) => [name, PALETTE[index] || OTHERS]));
}

function ink(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}
