// The two charts, drawn by uPlot: plans by time and memory, and speed over devices.
"use strict";

function axis(label, format) {
  return {
    label, stroke: ink("--faint"), labelSize: 22, font: "12px system-ui", labelFont: "12px system-ui",
    grid: { stroke: ink("--grid"), width: 1 }, ticks: { stroke: ink("--line"), width: 1 },
    values: (chart, values) => values.map((value) => (value === null ? "" : format(value))),
    size: (chart, values, index) => (index === 0 ? 32 : 56),
  };
}

function keys(entries) {
  return element("div", { class: "keys" }, ...entries.map(([name, colour]) =>
    element("span", {}, element("i", { class: "dot", style: { background: colour } }), name)));
}

function tip() { return element("div", { class: "tip", hidden: "" }); }

function showTip(made, text, left, top, width) {
  made.textContent = text;
  made.hidden = false;
  const x = left > width / 2 ? left - made.offsetWidth - 14 : left + 14;
  made.style.left = `${Math.max(0, x)}px`;
  made.style.top = `${Math.max(0, top - 20)}px`;
}

// What keys have come to, for those who hear the page.
function spoken() { return element("p", { class: "hidden", role: "status" }); }

// Plans as points: `plans` as in plan.json, `front` the texts of the Pareto front.
function scatter(place, plans, front, selected, select) {
  place.replaceChildren();
  if (!plans.length) return;
  const sorted = [...plans].sort((one, other) => one.step_seconds - other.step_seconds);
  const gigabytes = (one) => one.memory.total / 1e9;
  const times = sorted.map((one) => one.step_seconds);
  const colours = coloursOf(plans);
  const families = [...colours.keys()];
  const best = new Set(front);
  const limit = sorted[0].memory_limit / 1e9;
  const highest = Math.max(...sorted.map(gigabytes));
  const frontLine = sorted.map((one) => (best.has(one.plan) ? gigabytes(one) : null));
  const points = families.map((name) =>
    sorted.map((one) => (familyOf(one.plan) === name ? gigabytes(one) : null)));
  const hint = tip();
  const said = spoken();
  let near = null;

  function ring(chart, one, colour) {
    const context = chart.ctx;
    const x = chart.valToPos(one.step_seconds, "x", true);
    const y = chart.valToPos(gigabytes(one), "y", true);
    context.beginPath();
    context.arc(x, y, 8 * devicePixelRatio, 0, 2 * Math.PI);
    context.lineWidth = 2 * devicePixelRatio;
    context.strokeStyle = colour;
    context.stroke();
  }

  function draw(chart) {
    const y = chart.valToPos(limit, "y", true);
    const context = chart.ctx;
    context.save();
    if (y >= chart.bbox.top) {
      context.fillStyle = ink("--bad");
      context.fillRect(chart.bbox.left, y, chart.bbox.width, 1.5 * devicePixelRatio);
      context.font = `${11 * devicePixelRatio}px system-ui`;
      context.textAlign = "left";
      context.textBaseline = "bottom";
      context.fillText(`room of a device, ${digits(limit)} GB`, chart.bbox.left + 6, y - 3);
    }
    const chosen = plans.find((one) => one.plan === selected());
    if (chosen) ring(chart, chosen, ink("--ink"));
    if (near) ring(chart, near, ink("--accent"));
    context.restore();
  }

  const span = times[times.length - 1] - times[0] || times[0] * 0.2;
  const chart = new uPlot({
    width: place.clientWidth || 600, height: 320, legend: { show: false },
    cursor: { points: { show: false }, x: false, y: false, drag: { x: false, y: false } },
    scales: {
      x: { time: false, range: [Math.max(0, times[0] - span * 0.05), times[times.length - 1] + span * 0.05] },
      y: { range: [0, Math.max(highest * 1.08, Math.min(limit * 1.08, highest * 2))] },
    },
    axes: [axis("seconds of a step", (value) => digits(value, 4)), axis("GB of the fullest rank", (value) => digits(value))],
    series: [{},
      { stroke: ink("--ink"), width: 1.5, dash: [5, 4], spanGaps: true, points: { show: false } },
      ...families.map((name) => ({
        paths: () => null, points: { show: true, size: 8, fill: colours.get(name), stroke: colours.get(name) },
      }))],
    hooks: { draw: [draw] },
  }, [times, frontLine, ...points], place);

  function nearest(event) {
    const box = chart.over.getBoundingClientRect();
    const left = event.clientX - box.left;
    const top = event.clientY - box.top;
    let found = null;
    let least = 30;
    for (const one of sorted) {
      const far = Math.hypot(chart.valToPos(one.step_seconds, "x") - left, chart.valToPos(gigabytes(one), "y") - top);
      if (far < least) { least = far; found = one; }
    }
    return { found, left, top, width: box.width };
  }
  function point(found, left, top, width) {
    if (found !== near) { near = found; chart.redraw(false); }
    hint.hidden = !found;
    if (found) {
      showTip(hint, `${found.plan}\n${seconds(found.step_seconds)} a step (${ends(found.bars.step_seconds, seconds)})\n` +
        `${bytes(found.memory.total)} (${ends(found.bars.memory_total, bytes)})\nMFU ${percent(found.mfu)}, ` +
        `fits with ${percent(found.fits_probability)}\n${dollars(found.cost_per_million_tokens)} a million tokens`, left, top, width);
    }
  }
  chart.over.append(hint);
  chart.over.addEventListener("mousemove", (event) => {
    const { found, left, top, width } = nearest(event);
    chart.over.style.cursor = found ? "pointer" : "";
    point(found, left, top, width);
  });
  chart.over.addEventListener("mouseleave", () => { hint.hidden = true; near = null; chart.redraw(false); });
  chart.over.addEventListener("click", (event) => {
    const { found } = nearest(event);
    if (found) select(found.plan);
  });
  // Right and left go by time, up and down by memory; Enter selects.
  const rising = [...plans].sort((one, other) => one.memory.total - other.memory.total);
  const steps = { ArrowRight: [sorted, 1], ArrowLeft: [sorted, -1], ArrowUp: [rising, 1], ArrowDown: [rising, -1] };
  place.onkeydown = (event) => {
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      if (near) select(near.plan);
      return;
    }
    if (!steps[event.key]) return;
    event.preventDefault();
    const [order, by] = steps[event.key];
    const from = near || plans.find((one) => one.plan === selected()) || order[0];
    const found = order[Math.min(Math.max(0, order.indexOf(from) + by), order.length - 1)];
    point(found, chart.valToPos(found.step_seconds, "x"), chart.valToPos(gigabytes(found), "y"), chart.over.clientWidth);
    said.textContent = hint.textContent;
  };
  place.onblur = () => { hint.hidden = true; near = null; chart.redraw(false); };
  for (const [name, value] of [["tabindex", "0"], ["role", "group"], ["aria-label", `${plans.length} plans by time and memory: arrow keys go from plan to plan, Enter selects`]]) {
    place.setAttribute(name, value);
  }
  place.append(keys([...colours]), said);
  return chart;
}

// The numbers of the curves; the share is that of the ideal line.
function scalingTable(rows, base) {
  const cells = (value, devices) => [element("td", {}, value ? count(value) : "-"),
    element("td", {}, value ? percent(value / (base * devices)) : "-")];
  const head = ["devices", "strong, tokens a second", "of the ideal", "weak, tokens a second", "of the ideal"];
  const body = rows.map((row) => element("tr", {}, element("th", { scope: "row" }, String(row.devices)),
    ...cells(row.strong, row.devices), ...cells(row.weak, row.devices)));
  return element("div", { class: "scroll" }, element("table", { class: "numbers" },
    element("thead", {}, element("tr", {}, ...head.map((name) => element("th", { scope: "col" }, name)))),
    element("tbody", {}, ...body)));
}

// Tokens a second over devices; `rows` are {devices, strong, weak}, `now` the devices of the question.
function scaling(place, rows) {
  place.replaceChildren();
  if (!rows.length) return;
  const counts = rows.map((row) => row.devices);
  const first = rows.find((row) => row.weak) || rows.find((row) => row.strong);
  const base = first ? (first.weak || first.strong) / first.devices : 0;
  const line = (colour, dash) => ({
    stroke: colour, width: 2, dash, spanGaps: true, points: { show: !dash, size: 7, fill: colour },
  });
  const top = Math.max(...rows.flatMap((row) => [row.strong || 0, row.weak || 0, base * row.devices]));
  const chart = new uPlot({
    width: place.clientWidth || 600, height: 280, legend: { show: false },
    cursor: { points: { show: true }, drag: { x: false, y: false } },
    scales: {
      x: { time: false, distr: 3, log: 2 },
      y: { distr: 3, range: [Math.min(...rows.flatMap((row) => [row.strong, row.weak].filter(Boolean))) * 0.8, top * 1.2] },
    },
    axes: [{ ...axis("devices", (value) => digits(value, 6)), splits: () => counts }, axis("tokens a second", count)],
    series: [{}, line("#0072b2"), line("#d55e00"), line(ink("--faint"), [4, 4])],
  }, [counts, rows.map((row) => row.strong ?? null), rows.map((row) => row.weak ?? null), counts.map((count) => base * count)], place);
  place.append(keys([["strong: the samples of a step stay", "#0072b2"], ["weak: samples grow with devices", "#d55e00"], ["ideal", ink("--faint")]]), scalingTable(rows, base));
  place.setAttribute("role", "group");
  place.setAttribute("aria-label", "Tokens a second over devices; the table below has the numbers");
  return chart;
}
