// One strategy step by step: back, forward and play, with what each rank holds in its hands drawn.
"use strict";
const PLAY_SECONDS = 1.6;
let explained = { ranks: 0, steps: [] };
let at = 0;
let playing = null;

function entry(value) { return Number.isInteger(value) ? String(value) : digits(value); }

// Rows of a matrix; a vector is one row, and of more dimensions the last two are drawn one below the other.
function rowsOf(values) {
  if (!Array.isArray(values)) return [[values]];
  if (!Array.isArray(values[0])) return [values];
  if (!Array.isArray(values[0][0])) return values;
  return values.flatMap(rowsOf);
}

function matrix(one) {
  const rows = rowsOf(one.values).map((row) => element("tr", {}, ...row.map((value) => element("td", {}, entry(value)))));
  const name = one.transposed ? `${one.name}^T` : one.name;
  return element("figure", {}, element("table", { class: "matrix" }, ...rows), element("figcaption", {}, name));
}

function panel(rank, step) {
  const own = step.values.filter((value) => value.rank === rank);
  const peer = own.find((value) => value.peer !== null)?.peer;
  const other = peer !== undefined && peer !== rank;
  const title = `rank ${rank}${other ? `, ${step.operation === "broadcast" ? "from" : "to"} rank ${peer}` : ""}`;
  const drawn = own.flatMap((value) => [...value.operands.map(matrix),
    ...(value.results.length ? [element("span", { class: "gives" }, "\u2192"), ...value.results.map(matrix)] : [])]);
  return element("div", { class: own.length ? "panel" : "panel away" }, element("b", {}, title), element("div", { class: "hands" }, ...drawn));
}

function showStep(wanted) {
  at = Math.min(Math.max(0, wanted), explained.steps.length - 1);
  const step = explained.steps[at];
  byId("step").value = at;
  byId("where").textContent = `step ${at + 1} of ${explained.steps.length}, ${step.phase}${step.action ? ` (${step.action})` : ""}`;
  byId("what").textContent = step.sentence;
  byId("formula").textContent = `${step.formula}${step.bytes ? `; ${step.bytes} bytes are sent in all` : ""}`;
  byId("panels").replaceChildren(...Array.from({ length: explained.ranks }, (_, rank) => panel(rank, step)));
}

function stop() {
  clearInterval(playing);
  playing = null;
  byId("play-steps").textContent = "Play";
}

function play() {
  if (playing !== null) { stop(); return; }
  byId("play-steps").textContent = "Stop";
  if (at === explained.steps.length - 1) showStep(0);
  playing = setInterval(() => {
    showStep(at + 1);
    if (at === explained.steps.length - 1) stop();
  }, PLAY_SECONDS * 1000);
}

// The steps that the stepper goes through, from the first.
function showSteps(data) {
  stop();
  explained = data;
  byId("step").max = data.steps.length - 1;
  showStep(0);
}

function prepareStepper(place) {
  place.replaceChildren(
    element("div", { class: "buttons" },
      element("button", { type: "button", id: "back", onclick: () => { stop(); showStep(at - 1); } }, "Back"),
      element("button", { type: "button", id: "forward", onclick: () => { stop(); showStep(at + 1); } }, "Forward"),
      element("button", { type: "button", id: "play-steps", onclick: play }, "Play"),
      element("input", { type: "range", id: "step", min: 0, max: 0, value: 0, "aria-label": "step",
        oninput: (event) => { stop(); showStep(Number(event.target.value)); } }),
      element("span", { id: "where", role: "status" })),
    element("p", { id: "what" }), element("p", { id: "formula", class: "note" }), element("div", { id: "panels" }));
  (byId("drawn") ? document : place).addEventListener("keydown", stepByKey);
}

function stepByKey(event) {
  const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!by || event.defaultPrevented || event.target.tagName === "INPUT") return;
  event.preventDefault();
  stop();
  showStep(at + by);
}

if (byId("drawn")) {
  prepareStepper(byId("stepper"));
  showSteps(JSON.parse(byId("drawn").textContent));
}
