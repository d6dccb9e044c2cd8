// Runs as curves over their steps, drawn by uPlot: zoom by dragging, numbers under the pointer.
"use strict";
const CURVES = [
  { key: "loss", label: "loss", of: (one) => one.loss },
  { key: "grad_norm", label: "gradient norm", of: (one) => one.grad_norm },
  { key: "lr", label: "learning rate", of: (one) => one.lr },
  { key: "speed", label: "tokens a second", of: (one) => (one.seconds ? one.tokens / one.seconds : null),
    predicted: (guess) => guess.tokens_per_second },
  { key: "ms", label: "milliseconds a step", of: (one) => (one.seconds ? one.seconds * 1e3 : null),
    predicted: (guess) => guess.step_seconds * 1e3 },
  { key: "memory", label: "memory", title: "memory of rank 0 after a step", level: "predicted peak", text: bytes,
    of: (one) => one.memory || null, predicted: (guess) => guess.memory.total },
];
const CURVE_KEYS = "Keys: left and right go from step to step, + and - zoom, 0 shows all.";
const charts = new Map();

function shown(value) { return Number.isFinite(value) ? digits(value, 4) : "-"; }

// The runs whose prediction a curve shows, as a level line.
function promised(curve, runs) { return curve.predicted ? runs.filter((run) => run.predicted) : []; }

// The steps of all runs, one row of values for each run, a gap where a run has none, and predictions.
function columns(curve, runs) {
  const steps = [...new Set(runs.flatMap((run) => run.steps.map((one) => one.step)))].sort((one, other) => one - other);
  const rows = runs.map((run) => {
    const known = new Map(run.steps.map((one) => [one.step, curve.of(one)]));
    return steps.map((step) => (Number.isFinite(known.get(step)) ? known.get(step) : null));
  });
  const levels = promised(curve, runs).map((run) => steps.map(() => curve.predicted(run.predicted)));
  return [steps, ...rows, ...levels];
}

function colourOf(runs, number, index) {
  return PALETTE[(runs.length > 1 ? number : index) % PALETTE.length];
}

function drawCurve(curve, runs, index) {
  const data = columns(curve, runs);
  const known = charts.get(curve.key);
  if (known && known.data.length === data.length) { renew(known, data); return; }
  if (!data.slice(1, runs.length + 1).some((row) => row.some((value) => value !== null))) return;
  const place = known ? known.root.parentNode : byId("charts").appendChild(element("div", {}));
  if (known) known.destroy();
  const text = curve.text || shown;
  const value = (chart, number) => (Number.isFinite(number) ? text(number) : "-");
  const lines = runs.map((run, number) => ({
    label: runs.length > 1 ? run.name : curve.label, width: 2, spanGaps: true, value,
    stroke: colourOf(runs, number, index),
  }));
  const levels = promised(curve, runs).map((run) => ({
    label: `${runs.length > 1 ? `${run.name}, ` : ""}${curve.level || "predicted"}`, width: 1, dash: [6, 4], value,
    stroke: colourOf(runs, runs.indexOf(run), index), points: { show: false },
  }));
  const options = {
    title: curve.title || curve.label, width: Math.max(280, place.clientWidth), height: 190,
    scales: { x: { time: false } },
    axes: [axis("step", (number) => String(number)), axis("", curve.text || ((number) => digits(number)))],
    series: [{ label: "step" }, ...lines, ...levels],
    hooks: { setCursor: [legendAtEnd] },
  };
  const chart = new uPlot(options, data, place);
  charts.set(curve.key, chart);
  legendAtEnd(chart);
  const last = data[1].findLast((number) => number !== null);
  const label = `${options.title} over ${data[0].length} steps${last === undefined ? "" : `, ${text(last)} at the end`}. ${CURVE_KEYS}`;
  for (const [name, text] of [["tabindex", "0"], ["role", "group"], ["aria-label", label]]) place.setAttribute(name, text);
  const said = spoken();
  place.append(said);
  place.onkeydown = (event) => keyOfCurve(chart, said, event);
}

// Without a pointer the legend has the numbers of the last step.
function legendAtEnd(chart) {
  if (!(chart.cursor.left >= 0)) chart.setLegend({ idx: chart.data[0].length - 1 }, false);
}

// Left and right go from step to step, whose numbers the legend shows; + and - zoom, 0 shows all.
function keyOfCurve(chart, said, event) {
  const steps = chart.data[0];
  const { min, max } = chart.scales.x;
  const now = chart.cursor.idx ?? -1;
  const zooms = { "+": [min + (max - min) / 4, max - (max - min) / 4], "-": [min - (max - min) / 2, max + (max - min) / 2], 0: [-Infinity, Infinity] };
  const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (zooms[event.key]) {
    const [from, to] = zooms[event.key];
    chart.setScale("x", { min: Math.max(from, steps[0]), max: Math.min(to, steps[steps.length - 1]) });
  } else if (by) {
    const next = Math.min(Math.max(0, now + by), steps.length - 1);
    chart.setCursor({ left: chart.valToPos(steps[next], "x"), top: chart.over.clientHeight / 2 });
    said.textContent = chart.series.map((one, index) => `${one.label} ${index ? one.value(chart, chart.data[index][next]) : steps[next]}`).join(", ");
  } else return;
  event.preventDefault();
}

// New data keep a zoom that somebody has chosen.
function renew(chart, data) {
  const before = chart.data[0];
  const { min, max } = chart.scales.x;
  const zoomed = min > before[0] || max < before[before.length - 1];
  chart.setData(data, !zoomed);
  if (zoomed) chart.redraw();
  legendAtEnd(chart);
}

function drawCurves(runs) {
  if (runs.some((run) => run.steps.length)) CURVES.forEach((curve, index) => drawCurve(curve, runs, index));
}

addEventListener("resize", () => charts.forEach((chart) =>
  chart.setSize({ width: Math.max(280, chart.root.parentNode.clientWidth), height: 190 })));
