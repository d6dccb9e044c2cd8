// A schedule's grid, as `plait schedule` gives it, on a canvas: ranks down, time across.
"use strict";
const ROW = 22;
const LEFT = 34;

// The cells of the lines of a grid: [{rank, start, width, stage, kind, micro, updated}].
function cellsOf(lines) {
  const cells = [];
  lines.forEach((line, rank) => {
    line.trim().split(/\s+/).forEach((word, slot) => {
      const parts = /^(\d+)([A-Z]+?)(\d+)(U?)$/.exec(word);
      const last = cells[cells.length - 1];
      if (parts) {
        cells.push({ rank, start: slot, width: 1, stage: Number(parts[1]), kind: parts[2], micro: Number(parts[3]), updated: parts[4] === "U" });
      } else if (word === "-" && last && last.rank === rank) last.width += 1;
    });
  });
  return cells;
}

function dark() { return matchMedia("(prefers-color-scheme: dark)").matches; }

class Grid {
  constructor(canvas, note) {
    this.canvas = canvas;
    this.cells = [];
    this.until = Infinity;
    this.hint = tip();
    canvas.parentElement.style.position = "relative";
    canvas.parentElement.append(this.hint);
    canvas.addEventListener("mousemove", (event) => this.hover(event));
    canvas.addEventListener("keydown", (event) => this.key(event));
    for (const left of ["mouseleave", "blur"]) canvas.addEventListener(left, () => { this.hint.hidden = true; });
    this.said = spoken();
    canvas.parentElement.after(this.said);
    this.note = note;
  }

  show(answer) {
    this.answer = answer;
    this.cells = cellsOf(answer.grid);
    this.slots = Math.max(1, ...this.cells.map((cell) => cell.start + cell.width));
    this.until = Infinity;
    this.at = null; // what was told is of the grid before
    this.hint.hidden = true;
    this.said.textContent = "";
    const kinds = ["F", "B", "I", "W"].filter((kind) => this.cells.some((cell) => cell.kind === kind));
    this.note.textContent = `${kinds.map((kind) => `${kind} ${MEANING[kind]}`).join(", ")}; the number is the micro-batch. ` +
      `Cells in a ${dark() ? "darker" : "paler"} shade belong to later stages of a rank; a red edge is an update.`;
    this.canvas.setAttribute("aria-label", `${answer.name}: ${answer.ranks} ranks, ${answer.micro_batches} ` +
      `micro-batches, bubble ${percent(answer.bubble_fraction)}. The arrow keys go from cell to cell.`);
    this.draw();
  }

  draw() {
    if (!this.answer) return;
    const room = this.canvas.parentElement.clientWidth - LEFT - 2;
    this.slot = Math.max(room / this.slots, Math.min(9, 6000 / this.slots));
    const width = LEFT + this.slot * this.slots + 2;
    const height = ROW * this.answer.ranks + 2;
    const ratio = Math.min(devicePixelRatio, 16000 / width);
    Object.assign(this.canvas, { width: width * ratio, height: height * ratio });
    Object.assign(this.canvas.style, { width: `${width}px`, height: `${height}px` });
    const context = this.canvas.getContext("2d");
    context.scale(ratio, ratio);
    context.font = "11px system-ui";
    context.textBaseline = "middle";
    context.fillStyle = ink("--faint");
    for (let rank = 0; rank < this.answer.ranks; rank += 1) context.fillText(String(rank), 4, ROW * rank + ROW / 2);
    context.textAlign = "center";
    for (const cell of this.cells) this.drawCell(context, cell);
  }

  drawCell(context, cell) {
    const x = LEFT + cell.start * this.slot;
    const wide = cell.width * this.slot - (this.slot > 4 ? 1 : 0);
    const chunk = Math.floor(cell.stage / this.answer.ranks);
    context.globalAlpha = (cell.start < this.until ? 1 : 0.12) * (chunk ? Math.max(0.45, 1 - 0.25 * chunk) : 1);
    context.fillStyle = COLOURS[cell.kind] || "#8a8f98";
    context.fillRect(x, cell.rank * ROW + 1, wide, ROW - 3);
    context.globalAlpha = cell.start < this.until ? 1 : 0.12;
    const label = `${wide > 26 ? cell.kind : ""}${cell.micro}`;
    if (wide > 7 * label.length) {
      context.fillStyle = chunk && dark() ? "#ffffff" : "#111111";
      context.fillText(label, x + wide / 2, cell.rank * ROW + ROW / 2);
    }
    if (cell.updated) {
      context.fillStyle = ink("--bad");
      context.fillRect(x + wide - 2, cell.rank * ROW, 2, ROW - 1);
    }
    context.globalAlpha = 1;
  }

  hover(event) {
    const box = this.canvas.getBoundingClientRect();
    const slot = (event.clientX - box.left - LEFT) / this.slot;
    const rank = Math.floor((event.clientY - box.top) / ROW);
    const cell = this.cells.find((one) => one.rank === rank && one.start <= slot && slot < one.start + one.width);
    this.hint.hidden = !cell;
    if (cell) this.tell(cell, event.clientX - box.left, event.clientY - box.top, box.width);
  }

  tell(cell, left, top, width) {
    showTip(this.hint, `rank ${cell.rank}, stage ${cell.stage}: ${MEANING[cell.kind] || cell.kind} of micro-batch ${cell.micro}` +
      `${cell.updated ? ", then the update" : ""}`, left, top, width);
  }

  // Left and right go along a rank, up and down to what another rank does at that time.
  key(event) {
    const along = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const across = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!this.answer || !(along || across)) return;
    event.preventDefault();
    const rank = Math.min(Math.max(0, (this.at?.rank ?? 0) + (this.at ? across || 0 : 0)), this.answer.ranks - 1);
    const row = this.cells.filter((one) => one.rank === rank);
    let index = this.at ? row.findLastIndex((one) => one.start <= this.at.start) : -1;
    if (along) index += this.at ? along : 1;
    this.at = row[Math.min(Math.max(0, index), row.length - 1)];
    const scroller = this.canvas.parentElement;
    const x = LEFT + (this.at.start + this.at.width / 2) * this.slot;
    scroller.scrollLeft = Math.max(0, x - scroller.clientWidth / 2);
    this.tell(this.at, x, this.at.rank * ROW + ROW, this.canvas.clientWidth);
    this.said.textContent = this.hint.textContent;
  }

  play(done) {
    const began = performance.now();
    const whole = Math.min(12000, 1500 + 60 * this.slots);
    const frame = (now) => {
      this.until = ((now - began) / whole) * this.slots;
      if (this.stopped || this.until >= this.slots) { this.until = Infinity; this.draw(); done(); return; }
      this.draw();
      requestAnimationFrame(frame);
    };
    this.stopped = false;
    requestAnimationFrame(frame);
  }
}
