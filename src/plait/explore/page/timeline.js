// What each rank does when, on a canvas: drag to zoom in, click twice for all, the pointer tells all.
"use strict";
const COLOURS = {
  F: "#5b8fc7", B: "#f2954c", I: "#eeca3b", W: "#63b05c", REDUCE: "#b279a2", U: "#8069c9",
  UNSHARD: "#9d755d", wait: "#d3354a", other: "#8a8f98",
};
const MEANING = {
  F: "forward", B: "backward", I: "input gradient", W: "weight gradient", REDUCE: "reduce",
  U: "update", UNSHARD: "gather weights", wait: "waiting for a message", other: "transfers and the rest",
};
const TIMELINE_KEYS = "Keys: + and - zoom, 0 shows all, left and right move, Enter tells the next box, up and down change the rank.";
const LANE = 22;
const STRIP = 9;
const NAMES = 58;
const SCALE = 22;

// A step of the axis: 1, 2 or 5 times a power of ten, so that there are about `count`.
function niceStep(length, count) {
  const power = 10 ** Math.floor(Math.log10(length / count));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => length / step <= count) || 10 * power;
}

// One picture; several share a `view` ({from, to, all, pictures}), so that they stay on one time scale.
class Lanes {
  constructor(place, lanes, caption, view) {
    Object.assign(this, { lanes, view });
    this.canvas = element("canvas", { role: "img", tabindex: "0", "aria-label": `${caption}: ${lanes.length} ranks. ${TIMELINE_KEYS}` });
    this.hint = tip();
    this.said = spoken();
    this.lane = 0;
    this.box = -1;
    this.strip = lanes.some((lane) => lane.above?.length) ? STRIP : 0; // what was promised, thin above a rank
    const frame = element("div", { class: "lanes" }, this.canvas, this.hint, this.said);
    place.append(element("p", { class: "caption" }, caption), frame);
    view.pictures.push(this);
    this.canvas.addEventListener("mousemove", (event) => this.move(event));
    for (const left of ["mouseleave", "blur"]) this.canvas.addEventListener(left, () => { this.hint.hidden = true; });
    this.canvas.addEventListener("mousedown", (event) => { this.pressed = this.timeAt(event); });
    this.canvas.addEventListener("mouseup", (event) => this.release(event));
    this.canvas.addEventListener("dblclick", () => zoomTo(view, 0, view.all));
    this.canvas.addEventListener("keydown", (event) => this.key(event));
  }

  get scale() { return (this.width - NAMES) / (this.view.to - this.view.from); }

  timeAt(event) {
    const left = event.clientX - this.canvas.getBoundingClientRect().left;
    return this.view.from + Math.max(0, left - NAMES) / this.scale;
  }

  release(event) {
    const stop = this.timeAt(event);
    const [from, to] = [Math.min(this.pressed, stop), Math.max(this.pressed, stop)];
    this.pressed = undefined;
    if ((to - from) * this.scale > 6) zoomTo(this.view, from, to);
  }

  key(event) {
    const { from, to, all } = this.view;
    const span = to - from;
    const moves = {
      "+": [from + span / 4, to - span / 4], "-": [from - span / 2, to + span / 2], 0: [0, all],
      ArrowRight: [from + span / 5, to + span / 5], ArrowLeft: [from - span / 5, to - span / 5],
    };
    if (moves[event.key]) zoomTo(this.view, ...moves[event.key]);
    else if (event.key === "Enter") this.walk(event.shiftKey ? -1 : 1);
    else if (event.key === "ArrowDown" || event.key === "ArrowUp") this.change(event.key === "ArrowDown" ? 1 : -1);
    else return;
    event.preventDefault();
  }

  // Another rank, at the same moment.
  change(by) {
    const before = this.lanes[this.lane].boxes[this.box];
    this.lane = Math.min(Math.max(0, this.lane + by), this.lanes.length - 1);
    const next = this.lanes[this.lane].boxes.findIndex((box) => box[0] + box[1] > (before ? before[0] : this.view.from));
    this.box = Math.max(0, next) - 1;
    this.walk(1);
  }

  // The next box of a rank, or the one before: what the pointer would tell of it.
  walk(by) {
    const lane = this.lanes[this.lane];
    if (!lane?.boxes.length) return;
    this.box = Math.min(Math.max(0, this.box + by), lane.boxes.length - 1);
    const [start, length, , , hint] = lane.boxes[this.box];
    const span = this.view.to - this.view.from;
    if (start < this.view.from || start > this.view.to) zoomTo(this.view, start - span / 4, start + span * 3 / 4);
    const middle = NAMES + (start + length / 2 - this.view.from) * this.scale;
    showTip(this.hint, `${lane.name}: ${hint}`, middle, this.topOf(this.lane), this.width);
    this.said.textContent = this.hint.textContent;
  }

  topOf(index) { return (LANE + this.strip) * index; }

  draw() {
    this.width = Math.max(260, this.canvas.parentElement.clientWidth);
    const height = this.topOf(this.lanes.length) + SCALE;
    const ratio = devicePixelRatio;
    Object.assign(this.canvas, { width: this.width * ratio, height: height * ratio });
    Object.assign(this.canvas.style, { width: `${this.width}px`, height: `${height}px` });
    const context = this.canvas.getContext("2d");
    context.scale(ratio, ratio);
    context.font = "11px system-ui";
    context.textBaseline = "middle";
    this.lanes.forEach((lane, index) => {
      context.fillStyle = ink("--faint");
      context.textAlign = "left";
      const top = this.topOf(index) + this.strip;
      context.fillText(lane.name, 0, top + LANE / 2, NAMES - 6);
      context.fillStyle = ink("--grid");
      context.fillRect(NAMES, top + 1, this.width - NAMES, LANE - 3);
      context.textAlign = "center";
      for (const box of lane.above || []) this.drawBox(context, box, top - this.strip + 2, this.strip - 2);
      for (const box of lane.boxes) this.drawBox(context, box, top + 1, LANE - 3);
    });
    this.drawScale(context, this.topOf(this.lanes.length));
  }

  drawBox(context, [start, length, kind, label, , slim], top, height) {
    const { from, to } = this.view;
    if (start > to || start + length < from) return;
    const left = NAMES + (Math.max(start, from) - from) * this.scale;
    const right = NAMES + (Math.min(start + length, to) - from) * this.scale;
    const gap = right - left > 3 ? 1 : 0;
    context.fillStyle = COLOURS[kind] || COLOURS.other;
    if (slim) { context.fillRect(left, top + height - 4, Math.max(right - left, 0.5), 4); return; }
    context.fillRect(left, top, Math.max(right - left - gap, 0.5), height);
    if (!label || height <= STRIP) return;
    const short = /\d+(?=U?$)/.exec(label)?.[0] || ""; // of 2F13 the micro-batch
    const text = right - left > Math.max(30, context.measureText(label).width + 4) ? label : short;
    if (right - left <= context.measureText(text).width + 2) return;
    context.fillStyle = "#111111";
    context.fillText(text, (left + right) / 2, top + height / 2 + 0.5);
  }

  drawScale(context, top) {
    const { from, to } = this.view;
    const step = niceStep(to - from, Math.max(2, this.width / 130));
    context.fillStyle = ink("--faint");
    for (let at = Math.ceil(from / step) * step; at <= to; at += step) {
      const x = NAMES + (at - from) * this.scale;
      context.fillRect(x, top, 1, 4);
      context.textAlign = x > this.width - 40 ? "right" : "center";
      context.fillText(at ? this.view.text(at) : "0", x, top + 13);
    }
  }

  move(event) {
    const at = this.timeAt(event);
    const box = this.canvas.getBoundingClientRect();
    const top = event.clientY - box.top;
    const index = Math.floor(top / (LANE + this.strip));
    const lane = this.lanes[index];
    const inside = top - this.topOf(index) - this.strip;
    const under = ((inside < 0 ? lane?.above : lane?.boxes) || []).filter(([start, length]) => start <= at && at <= start + length);
    // Of a wait at the foot of a lane and the action above it, the pointer means the one it is on.
    const low = inside > LANE - 8;
    const found = under.find((one) => Boolean(one[5]) === low) || under[0];
    this.hint.hidden = !found || event.clientX - box.left < NAMES;
    if (!this.hint.hidden) showTip(this.hint, `${lane.name}: ${found[4]}`, event.clientX - box.left, top, box.width);
  }
}

function zoomTo(view, from, to) {
  const span = Math.min(to - from, view.all);
  view.from = Math.min(Math.max(0, from), view.all - span);
  view.to = view.from + span;
  for (const picture of view.pictures) picture.draw();
}

// Pictures below each other: `groups` are {caption, lanes: [{name, boxes, above}]}. A box is
// [start, seconds, kind, label, hint, whether it is a wait at the lane's foot].
function drawTimelines(place, groups, text = seconds) {
  const boxes = groups.flatMap((group) => group.lanes.flatMap((lane) => [...lane.boxes, ...(lane.above || [])]));
  if (!boxes.length) return null;
  place.replaceChildren();
  const all = boxes.reduce((most, box) => Math.max(most, box[0] + box[1]), 0);
  const kinds = new Set(boxes.map((box) => (box[2] in COLOURS ? box[2] : "other")));
  const view = { from: 0, to: all, all, text, pictures: [] };
  place.append(keys(Object.keys(COLOURS).filter((kind) => kinds.has(kind)).map((kind) => [MEANING[kind], COLOURS[kind]])));
  for (const group of groups) new Lanes(place, group.lanes, group.caption, view);
  zoomTo(view, 0, all);
  return view;
}

// The lanes of spans as `plait estimate --timeline --json` lists them.
function lanesOf(spans) {
  const lanes = [];
  for (const one of spans) {
    lanes[one.rank] ||= { name: `rank ${one.rank}`, boxes: [] };
    const hint = `${MEANING[one.kind] || one.kind} ${one.name}, ${seconds(one.seconds)} from ${seconds(one.start_seconds)} on`;
    lanes[one.rank].boxes.push([one.start_seconds, one.seconds, one.kind, one.name, hint, false]);
  }
  return lanes.filter(Boolean);
}
