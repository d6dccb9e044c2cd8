// The course of a run as curves over its steps, drawn by uPlot: zoom by dragging, numbers under the pointer.
"use strict";
const CURVES = [
  { key: "loss", label: "loss", of: (one) => one.loss },
  { key: "grad_norm", label: "gradient norm", of: (one) => one.grad_norm },
  { key: "speed", label: "tokens a second", of: (one) => (one.seconds ? one.tokens / one.seconds : null) },
  { key: "ms", label: "milliseconds a step", of: (one) => (one.seconds ? one.seconds * 1e3 : null) },
];
const charts = new Map();

function shown(value) { return Number.isFinite(value) ? digits(value, 4) : "-"; }

function drawCurve(curve, steps, index) {
  const data = [steps.map((one) => one.step), steps.map(curve.of).map((value) => (Number.isFinite(value) ? value : null))];
  const known = charts.get(curve.key);
  if (known) { renew(known, data); return; }
  const place = byId("charts").appendChild(element("div", {}));
  const options = {
    title: curve.label, width: Math.max(280, place.clientWidth), height: 190,
    scales: { x: { time: false } },
    axes: [axis("step", (value) => String(value)), axis("", (value) => digits(value))],
    series: [{ label: "step" }, { label: curve.label, stroke: PALETTE[index], width: 2,
      value: (chart, value) => shown(value) }],
  };
  charts.set(curve.key, new uPlot(options, data, place));
}

// New data keep a zoom that somebody has chosen.
function renew(chart, data) {
  const before = chart.data[0];
  const { min, max } = chart.scales.x;
  const zoomed = min > before[0] || max < before[before.length - 1];
  chart.setData(data, !zoomed);
  if (zoomed) chart.redraw();
}

function drawCurves(steps) {
  if (steps.length) CURVES.forEach((curve, index) => drawCurve(curve, steps, index));
}

addEventListener("resize", () => charts.forEach((chart) =>
  chart.setSize({ width: Math.max(280, byId("charts").clientWidth), height: 190 })));
