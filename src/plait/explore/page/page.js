// The page: the question in the address, one request at a time, and what the answer looks like.
"use strict";
const BEGINNING = JSON.parse(byId("beginning").textContent);
const TOKEN = new URLSearchParams(location.search).get("token") || "";
const OWN = "";
const PASTED = "pasted";
const FIELDS = ["cluster", "devices", "price", "batch", "sequence", "framework", "objective", "risk", "tokens"];
const DEFAULTS = {
  model: OWN, plan: "", cluster: BEGINNING.cluster, devices: "", price: "", batch: "", sequence: "",
  framework: "plait", objective: "time", risk: "", tokens: "1000",
};
const FEW = 8;
const MOST_CELLS = 60000;
let state = { ...DEFAULTS };
let answer = null;
let showAll = false;

// ---- the server -----------------------------------------------------------------------------------

async function ask(path, choices, signal) {
  const body = new URLSearchParams();
  for (const [name, value] of Object.entries(choices)) if (value !== "" && value != null) body.set(name, value);
  if (BEGINNING.tab) return answered(await askTab(path, body.toString(), signal));
  let reply;
  try {
    reply = await fetch(path, { method: "POST", body, signal, headers: { "X-Plait-Token": TOKEN } });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("plait explore does not answer; is it still running?");
  }
  return answered(await reply.text());
}

function answered(text) {
  let data;
  try { data = JSON.parse(text); } catch { throw new Error(text); }
  if (data.error) throw new Error(data.error);
  return data;
}

// The choices that differ from those of the command line, which the server knows.
function changed(...names) { return Object.fromEntries(names.filter((name) => state[name] !== DEFAULTS[name]).map((name) => [name, state[name]])); }

function question() { return changed("model", "cluster", "devices", "batch", "sequence", "framework", "objective", "risk"); }

let running = null;
let timer = null;

// A question that changes follows the best plan, unless another one was selected.
function soon() {
  if (answer && state.plan === answer.plans[0]?.plan) state.plan = "";
  byId("results").classList.add("waiting");
  clearTimeout(timer);
  timer = setTimeout(look, 180);
}

async function look() {
  clearTimeout(timer);
  timer = null;
  running?.abort();
  const own = new AbortController();
  running = own;
  writeHash();
  byId("results").classList.add("waiting");
  const began = performance.now();
  const clock = setInterval(() => {
    if (BEGINNING.tab && !tabIsReady) return; // its own progress stands there
    const first = state.cluster === "local" ? "Measuring this machine (once), then looking" : "Looking";
    byId("headline").textContent = `${first} for plans ... ${Math.round((performance.now() - began) / 1000)} s`;
  }, 1000);
  try {
    await lookAtChosen(own.signal);
    const found = await ask("/plan.json", { ...question(), ...BEGINNING.first }, own.signal);
    if (found.plans.length && state.plan && !found.plans.some((one) => one.plan === state.plan)) await addChosen(found, own.signal);
    if (running !== own) return;
    answer = found;
    say(found.plans.length ? "" : found.reason);
    if (!found.plans.some((one) => one.plan === state.plan)) state.plan = found.plans[0]?.plan || "";
    writeHash();
    render();
  } catch (error) {
    if (error.name === "AbortError" || running !== own) return;
    answer = null;
    say(error.message);
    render();
  } finally {
    clearInterval(clock);
    if (running === own && timer === null) byId("results").classList.remove("waiting");
  }
}

// What the selected plan becomes under the new question is known at once, before the search ends.
async function lookAtChosen(signal) {
  if (!answer?.chosen) return;
  try {
    renderOne(await estimated(answer.chosen, state.devices || answer.num_devices, signal));
  } catch (error) {
    if (error.name === "AbortError") throw error; // else the search says what is wrong
  }
}

function estimated(plan, count, signal) {
  return ask("/estimate.json", { ...changed("model", "batch", "sequence", "framework"), cluster: clusterText(count), plan }, signal);
}

// The blocks that a plan keeps gathered, as a value of the config; none for most plans.
function keptBy(one) { return one.keep_gathered?.length ? { keep: `[${one.keep_gathered.join(",")}]` } : {}; }

// A plan of the address that the search did not keep is asked for by itself.
async function addChosen(found, signal) {
  try {
    const one = await estimated(state.plan, found.num_devices, signal);
    state.plan = one.plan;
    if (!found.plans.some((other) => other.plan === one.plan)) found.plans.push(one);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    found.notes = [...(found.notes || []), `the plan of the link, '${state.plan}': ${error.message}`];
  }
}

function clusterText(count) {
  const name = state.cluster.replace(/x\d+$/, "");
  return name in BEGINNING.clusters ? `${name}x${count}` : state.cluster;
}

function say(text) {
  byId("error").textContent = text;
  byId("error").hidden = !text;
}

// ---- the address ----------------------------------------------------------------------------------

function writeHash() {
  const kept = Object.entries(state).filter(([name, value]) => value !== DEFAULTS[name]);
  const hash = new URLSearchParams(kept).toString();
  if (location.hash.slice(1) !== hash) history.replaceState(null, "", `${location.pathname}${location.search}${hash ? `#${hash}` : ""}`);
}

function readHash() {
  const given = new URLSearchParams(location.hash.slice(1));
  state = { ...DEFAULTS };
  for (const name of Object.keys(DEFAULTS)) if (given.has(name)) state[name] = given.get(name);
}

function fillForm() {
  for (const name of FIELDS) byId(name).value = state[name];
  const pasted = state.model !== OWN && !(state.model in BEGINNING.models);
  byId("model").value = pasted ? PASTED : state.model;
  if (pasted) { byId("paste").value = state.model; byId("paste-box").open = true; }
  const count = Number(state.devices) || Number(/x(\d+)$/.exec(state.cluster)?.[1]) || 8;
  byId("slider").value = Math.round(Math.log2(count));
  byId("slider").setAttribute("aria-valuetext", `${count} devices`);
  const preset = BEGINNING.clusters[state.cluster.replace(/x\d+$/, "")];
  byId("price").placeholder = preset ? String(preset.price) : "the cluster's";
  byId("devices").placeholder = /x(\d+)$/.exec(state.cluster)?.[1] || (preset ? String(preset.devices) : "the cluster's");
  const known = BEGINNING.models[state.model || BEGINNING.name];
  byId("source").textContent = known ? `Source: ${known.source}` : "";
  byId("sequence").placeholder = known ? String(known.seq_len) : "the model's";
}

function options(id, rows) { byId(id).replaceChildren(...rows.map(([value, text]) => element("option", { value }, text))); }

function prepareForm() {
  const known = Object.keys(BEGINNING.models);
  const own = BEGINNING.name in BEGINNING.models ? [[OWN, BEGINNING.name]] : [[OWN, `${BEGINNING.name} (command line)`]];
  options("model", [...own, ...known.filter((name) => name !== BEGINNING.name).map((name) => [name, name]), [PASTED, "pasted below"]]);
  options("framework", BEGINNING.frameworks.map((name) => [name, name]));
  options("objective", BEGINNING.objectives.map((name) => [name, name]));
  options("risk", [["", "as predicted"], ["0.2", "20 %"], ["0.05", "5 %"], ["0.01", "1 %"]]);
  options("export", [["", "choose ..."], ...BEGINNING.exports.map((name) => [name, name])]);
  options("schedule", Object.keys(BEGINNING.schedules).map((name) => [name, name]));
  byId("clusters").append(...Object.keys(BEGINNING.clusters).map((value) => element("option", { value })));
  byId("question").addEventListener("submit", (event) => { event.preventDefault(); look(); });
  for (const name of FIELDS) {
    byId(name).addEventListener("input", () => {
      state[name] = byId(name).value.trim();
      if (name === "cluster") { state.devices = ""; state.price = ""; }
      fillForm();
      if (name === "price" || name === "tokens") { writeHash(); if (answer) render(); } else soon();
    });
  }
  byId("slider").addEventListener("input", () => { state.devices = String(2 ** Number(byId("slider").value)); fillForm(); soon(); });
  byId("model").addEventListener("change", () => {
    const chosen = byId("model").value;
    if (chosen === PASTED) {
      const known = BEGINNING.models[state.model || BEGINNING.name];
      if (!byId("paste").value && known) byId("paste").value = JSON.stringify(known.config, null, 1);
      byId("paste-box").open = true;
      byId("paste").focus();
      if (byId("paste").value) { state.model = byId("paste").value; soon(); }
      return;
    }
    Object.assign(state, { model: chosen, sequence: "", plan: "" });
    fillForm();
    soon();
  });
  byId("paste").addEventListener("input", () => {
    state.model = byId("paste").value.trim();
    byId("model").value = state.model ? PASTED : OWN;
    soon();
  });
}

// ---- the answer -----------------------------------------------------------------------------------

function chosenPlan() { return answer?.plans.find((one) => one.plan === state.plan); }

function price(one) {
  const given = Number(state.price);
  return state.price !== "" && given >= 0 ? given : one.cost_per_million_tokens * one.tokens_per_second_per_device * 3600 / 1e6;
}

// A share of the peak is at most the whole, however wide the bar of the time is.
function share(one) { return ends(scaled(one, one.mfu, true).map((end) => Math.min(end, 1)), percent); }

function cost(one) { return price(one) / 3600 / one.tokens_per_second_per_device * 1e6; }

function scaled(one, value, inverse) {
  const [low, high] = one.bars.step_seconds.map((end) => end / one.step_seconds);
  return inverse ? [value / high, value / low] : [value * low, value * high];
}

function render() {
  const one = chosenPlan();
  for (const section of document.querySelectorAll("main > section, main > .halves, main > details")) section.hidden = !one;
  if (!one) { byId("headline").textContent = "No plan to show."; return; }
  headline();
  answer.chosen = one.plan;
  renderOne(one);
  renderTable();
  renderRows();
  if (byId("explain-box").open) offerTerms();
  scatter(byId("scatter"), answer.plans, answer.pareto, () => state.plan, select);
  list("lost", answer.explanation || []);
  list("notes", [...(answer.notes || []), `${answer.searched.plans} plans of ${answer.searched.combinations} ways to split were looked at`,
    "every number is predicted; nothing was run"]);
  planGrid(one);
  drawTimeline(one);
  if (byId("scaling-box").open) drawScaling();
}

function renderOne(one) {
  renderChosen(one);
  renderBars(one);
}

function headline() {
  const best = answer.plans[0];
  byId("headline").textContent = `${answer.cluster}, ${answer.num_devices} devices: ${best.plan} takes ${seconds(best.step_seconds)} a step ` +
    `(${ends(best.bars.step_seconds, seconds)}), MFU ${percent(best.mfu)}`;
}

function list(id, lines) { byId(id).replaceChildren(...lines.map((line) => element("li", {}, line))); }

function card(name, value, bar) { return element("div", { class: "card" }, element("span", {}, name), element("b", {}, value), element("small", {}, bar)); }

function renderChosen(one) {
  byId("chosen").textContent = one.plan;
  const sent = Object.values(one.traffic).reduce((all, count) => all + count, 0);
  const axes = Object.entries(one.traffic).filter(([, size]) => size > 0).map(([name, size]) => `${name} ${bytes(size)}`).join(", ");
  const tokens = Number(state.tokens) * 1e9;
  const cards = [
    card("a step", seconds(one.step_seconds), ends(one.bars.step_seconds, seconds)),
    card("tokens a second", count(one.tokens_per_second), ends(scaled(one, one.tokens_per_second, true), count)),
    card("MFU", percent(one.mfu), share(one)),
    card("memory", bytes(one.memory.total), ends(one.bars.memory_total, bytes)),
    card("fits", percent(one.fits_probability), `probability, in ${bytes(one.memory_limit)}`),
    card("bubble", percent(one.bubble_fraction), "of a step"),
    card("sent by a rank", bytes(sent), axes || "nothing"),
    card("price of a million tokens", dollars(cost(one)), ends(scaled(one, cost(one)), dollars)),
  ];
  if (tokens > 0) {
    const whole = tokens / one.tokens_per_second;
    const money = cost(one) * tokens / 1e6;
    cards.push(card(`time for ${count(tokens)} tokens`, seconds(whole), ends(scaled(one, whole), seconds)));
    cards.push(card(`price of ${count(tokens)} tokens`, dollars(money), ends(scaled(one, money), dollars)));
  }
  byId("cards").replaceChildren(...cards);
}

function select(plan) {
  state.plan = plan;
  writeHash();
  render();
  if (byId("export").value) showExport();
}

function small(value, bar) { return element("td", {}, value, element("small", {}, bar)); }

function row(one, colours) {
  const chosen = one.plan === state.plan;
  const sent = Object.values(one.traffic).reduce((all, count) => all + count, 0);
  const name = element("button", { type: "button", "aria-pressed": String(chosen), onclick: () => { select(one.plan); focusOn(one.plan); } },
    element("i", { class: "dot", style: { background: colours.get(familyOf(one.plan)) }, title: familyOf(one.plan) }), one.plan);
  return element("tr", { class: chosen ? "selected" : null, onclick: (event) => { if (event.target.tagName !== "BUTTON") select(one.plan); } },
    element("td", {}, name),
    small(seconds(one.step_seconds), ends(one.bars.step_seconds, seconds)),
    small(percent(one.mfu), share(one)),
    small(bytes(one.memory.total), ends(one.bars.memory_total, bytes)),
    element("td", {}, percent(one.fits_probability)),
    element("td", {}, bytes(sent)),
    small(digits(cost(one)), ends(scaled(one, cost(one)), digits)));
}

function renderTable() {
  const colours = coloursOf(answer.plans);
  const shown = answer.plans.filter((one, index) => showAll || index < FEW || one.plan === state.plan);
  const rows = shown.map((one) => row(one, colours));
  const heads = [...document.querySelectorAll("#plans th")].map((one) => one.textContent);
  for (const one of rows) [...one.cells].forEach((cell, index) => { cell.dataset.name = heads[index]; }); // shown where the page is narrow
  document.querySelector("#plans tbody").replaceChildren(...rows);
  byId("plans").parentElement.classList.toggle("whole", showAll);
  byId("more").hidden = answer.plans.length <= FEW;
  byId("more").textContent = showAll ? "Show fewer" : `Show all ${answer.plans.length}`;
}

const MANY = 64;
const REACHES = { "one node": "one node", "several nodes": `several nodes, ${MANY} devices at most`, large: `more than ${MANY} devices` };

// The published runs whose errors make the bars of this many devices, as plait.predict.cost.bars chooses them.
function renderRows() {
  const node = BEGINNING.clusters[state.cluster.replace(/x\d+$/, "")]?.devices ?? 8;
  const reach = answer.num_devices > MANY ? "large" : answer.num_devices <= node ? "one node" : "several nodes";
  byId("rows").replaceChildren(...["time", "memory"].flatMap((kind) => {
    const place = reach in BEGINNING.rows[kind] ? reach : "several nodes";
    const sources = Object.entries(BEGINNING.rows[kind][place]).sort((one, other) => other[1] - one[1]);
    const runs = sources.reduce((all, [, number]) => all + number, 0);
    return [element("p", { class: "hint" }, `${kind}: ${runs} runs of ${sources.length} source${sources.length === 1 ? "" : "s"}, on ${REACHES[place]}`),
      element("ul", { class: "sources" }, ...sources.map(([name, number]) => element("li", {}, `${name}: ${number}`)))];
  }));
}

function focusOn(plan) {
  for (const button of document.querySelectorAll("#plans button")) if (button.textContent === plan) button.focus();
}

// The axes' words for causes whose name alone says too little.
const CAUSES = {
  tensor: "tensor traffic", context: "context traffic", expert: "expert traffic", bubble: "bubble",
  data: "data traffic", host: "host", cores: "shared cores", recompute: "recompute",
};

function bar(name, value, most, text, colour, limit) {
  const track = element("span", { class: "track" }, element("span", { class: "fill", style: { width: `${100 * value / most}%`, background: colour } }));
  if (limit) track.append(element("span", { class: "limit", style: { left: `${100 * limit / most}%` } }));
  return element("div", { class: "bar" }, element("span", {}, name), track, element("span", { class: "end" }, text));
}

function renderBars(one) {
  const most = Math.max(one.memory_limit, one.memory.total);
  const kinds = Object.entries(one.memory).filter(([name]) => name !== "total");
  byId("memory").replaceChildren(
    ...kinds.map(([name, count]) => bar(name, count, most, bytes(count), "#0072b2")),
    bar("total", one.memory.total, most, bytes(one.memory.total), one.fits ? "#009e73" : ink("--bad"), one.memory_limit),
    element("p", { class: "hint" }, `The line is the room of a device, ${bytes(one.memory_limit)}. 90 % bar of the total: ${ends(one.bars.memory_total, bytes)}.`));
  const causes = Object.entries(one.breakdown_seconds).filter(([, count]) => count > 0.001 * one.step_seconds).sort((a, b) => b[1] - a[1]);
  byId("time").replaceChildren(
    ...causes.map(([name, count]) => bar(CAUSES[name] || name, count, one.step_seconds, seconds(count), name === "compute" ? "#009e73" : "#e69f00")),
    element("p", { class: "hint" }, "Seconds of the slowest rank by cause. What is hidden behind computing does not count."));
}

// ---- the timeline of a step -----------------------------------------------------------------------

const MOST_LANES = 16;
let timelineQuestion = "";

async function drawTimeline(one) {
  const choices = { ...changed("model", "batch", "sequence", "framework"), cluster: clusterText(answer.num_devices), plan: one.plan, ...keptBy(one), timeline: "1" };
  const asked = JSON.stringify(choices);
  if (asked === timelineQuestion) return;
  timelineQuestion = asked;
  try {
    const found = await ask("/estimate.json", choices);
    if (timelineQuestion !== asked) return;
    const lanes = lanesOf(found.timeline);
    drawTimelines(byId("timeline"), [{ caption: `one pipeline of ${lanes.length} ranks, as predicted`, lanes: lanes.slice(0, MOST_LANES) }]);
    const more = lanes.length > MOST_LANES ? `The first ${MOST_LANES} of ${lanes.length} ranks. ` : "";
    byId("timeline-note").textContent = `${more}Drag to zoom in, click twice for all. ${TIMELINE_KEYS}`;
  } catch (error) {
    if (timelineQuestion !== asked) return;
    byId("timeline").replaceChildren();
    byId("timeline-note").textContent = error.message;
  }
}

// ---- the grid of the pipeline ---------------------------------------------------------------------

const grid = new Grid(byId("grid"), byId("grid-note"));
let gridQuestion = "";

function planGrid(one) {
  const { pp, mb } = axesOf(one.plan);
  const stages = pp?.size ?? 1;
  const name = pp?.options[0] || BEGINNING.schedule;
  const virtual = Number(/^v(\d+)$/.exec(pp?.options[1] || "")?.[1]) || 2;
  setGrid(stages > 1 ? name : BEGINNING.schedule, stages, mb?.size ?? (stages > 1 ? stages : 1), virtual);
}

function setGrid(name, stages, micro, virtual) {
  byId("schedule").value = name;
  for (const [id, value] of [["stages", stages], ["microbatches", micro], ["virtual", virtual]]) {
    byId(id).max = Math.max(Number(byId(id).max), value);
    byId(id).value = value;
  }
  drawGrid();
}

async function drawGrid() {
  const name = byId("schedule").value;
  const [stages, wanted, virtual] = ["stages", "microbatches", "virtual"].map((id) => Number(byId(id).value));
  byId("virtual-label").hidden = !BEGINNING.schedules[name].virtual;
  for (const output of document.querySelectorAll("#grid-choices output")) output.textContent = byId(output.htmlFor[0]).value;
  const each = 3 * stages * (BEGINNING.schedules[name].virtual ? virtual : 2);
  const micro = Math.min(wanted, Math.max(stages, Math.floor(MOST_CELLS / each) - stages));
  const choices = { name, stages, microbatches: micro };
  if (BEGINNING.schedules[name].virtual) choices.virtual = virtual;
  const asked = JSON.stringify(choices);
  if (asked === gridQuestion) return;
  gridQuestion = asked;
  try {
    const found = await ask("/schedule.json", choices);
    if (gridQuestion !== asked) return;
    grid.stopped = true;
    grid.show(found);
    const drawn = micro < wanted ? `drawn with ${micro} of ${wanted} micro-batches; ` : "";
    const of = (values) => (new Set(values).size === 1 ? String(digits(values[0])) : values.slice(0, 16).map((value) => digits(value)).join(" ") + (values.length > 16 ? " ..." : ""));
    byId("grid-cards").replaceChildren(
      card("bubble", percent(found.bubble_fraction), "idle time of a step"),
      card("live activations", digits(Math.max(...found.peak_activations_per_rank)), "micro-batches, fullest rank"),
      card("weight versions", digits(Math.max(...found.weight_versions)), "of the fullest stage"),
      card("staleness", digits(Math.max(...found.staleness)), "updates, at most"));
    byId("grid-numbers").textContent = `${drawn}live activations by stage, in micro-batches: ` +
      `${of(found.peak_activations)}; weight versions: ${of(found.weight_versions)}`;
  } catch (error) {
    if (gridQuestion === asked) byId("grid-numbers").textContent = error.message;
  }
}

// ---- scaling --------------------------------------------------------------------------------------

let scalingQuestion = "";

async function drawScaling() {
  if (!answer?.plans.length) return;
  const asked = JSON.stringify(question());
  if (asked === scalingQuestion) return;
  scalingQuestion = asked;
  const now = answer.num_devices;
  const samples = Math.round(answer.plans[0].tokens_per_second * answer.plans[0].step_seconds / sequenceLength());
  const counts = [1 / 8, 1 / 4, 1 / 2, 1, 2, 4].map((factor) => Math.round(now * factor)).filter((count) => count >= 1);
  const rows = counts.map((devices) => ({ devices }));
  for (const one of rows) {
    for (const [kind, batch] of [["strong", samples], ["weak", Math.max(1, Math.round(samples * one.devices / now))]]) {
      if (scalingQuestion !== JSON.stringify(question())) return;
      byId("scaling-note").textContent = `Looking at ${one.devices} devices ...`;
      try {
        const found = await ask("/plan.json", { ...question(), devices: one.devices, batch, top: 1 });
        one[kind] = found.plans[0]?.tokens_per_second;
      } catch { /* this count divides nothing: a gap in the line */ }
      scaling(byId("scaling"), rows);
    }
  }
  byId("scaling-note").textContent = `The best plan of each number of devices, at ${samples} samples a step on ${now} devices. A gap: nothing fits.`;
}

function sequenceLength() {
  const noted = /samples of (\d+) tokens/.exec((answer.notes || []).join(" "));
  return Number(state.sequence) || Number(noted?.[1]) || BEGINNING.models[state.model || BEGINNING.name]?.seq_len || BEGINNING.seq_len || 1;
}

// ---- buttons --------------------------------------------------------------------------------------

async function copy(text, what) {
  let done = true;
  try { await navigator.clipboard.writeText(text); } catch { done = copyByHand(text); }
  byId("copied").textContent = done ? `${what} is copied.` : text;
  setTimeout(() => { byId("copied").textContent = ""; }, 4000);
}

function copyByHand(text) {
  const box = element("textarea", { class: "hidden" });
  box.value = text;
  document.body.append(box);
  box.select();
  const done = document.execCommand("copy");
  box.remove();
  return done;
}

function command() {
  const one = chosenPlan();
  const ranks = ranksOf(one.plan);
  const node = BEGINNING.clusters[state.cluster.replace(/x\d+$/, "")]?.devices ?? ranks;
  const config = state.model === OWN && !(BEGINNING.name in BEGINNING.models) ? BEGINNING.name : "config.toml";
  const sets = [["train.global_batch", state.batch], ["data.seq_len", state.sequence], ["plan.keep_gathered", keptBy(one).keep]].filter(([, value]) => value).map(([key, value]) => `${key}=${value}`);
  const words = `train ${config} --plan "${one.plan}"${sets.length ? ` --set ${sets.join(" ")}` : ""}`;
  return ranks <= node ? `plait ${words} --nproc ${ranks}` : `torchrun --nnodes ${Math.ceil(ranks / node)} --nproc-per-node ${node} -m plait ${words}`;
}

async function showExport() {
  const to = byId("export").value;
  const box = byId("exported");
  box.hidden = !to;
  if (!to) return;
  const pre = box.querySelector("pre");
  const missing = box.querySelector("ul");
  try {
    const found = await ask("/export.json", { plan: state.plan, to, batch: state.batch });
    pre.textContent = found.text;
    missing.replaceChildren(...found.missing.map((line) => element("li", {}, `${to} cannot express: ${line}`)));
  } catch (error) {
    pre.textContent = error.message;
    missing.replaceChildren();
  }
}

function prepareButtons() {
  byId("copy-plan").addEventListener("click", () => copy(state.plan, "The plan"));
  byId("copy-command").addEventListener("click", () => copy(command(), "The command"));
  byId("copy-link").addEventListener("click", () => { writeHash(); copy(location.href, "The link"); });
  byId("export").addEventListener("change", showExport);
  byId("copy-export").addEventListener("click", () => copy(byId("exported").querySelector("pre").textContent, "The export"));
  byId("more").addEventListener("click", () => { showAll = !showAll; renderTable(); });
  byId("reset-grid").addEventListener("click", () => chosenPlan() && planGrid(chosenPlan()));
  byId("play").addEventListener("click", () => {
    if (byId("play").textContent === "Stop") { grid.stopped = true; return; }
    if (!grid.answer) return;
    byId("play").textContent = "Stop";
    grid.play(() => { byId("play").textContent = "Play"; });
  });
  for (const id of ["schedule", "stages", "microbatches", "virtual"]) byId(id).addEventListener("input", drawGrid);
  byId("scaling-box").addEventListener("toggle", () => { if (byId("scaling-box").open) drawScaling(); });
}

function redraw() {
  if (!answer) return;
  scatter(byId("scatter"), answer.plans, answer.pareto, () => state.plan, select);
  grid.draw();
  timelineQuestion = "";
  if (chosenPlan()) drawTimeline(chosenPlan());
}

let resized = null;
window.addEventListener("resize", () => { clearTimeout(resized); resized = setTimeout(redraw, 150); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
window.addEventListener("hashchange", () => { readHash(); fillForm(); look(); });
prepareForm();
prepareButtons();
readHash();
fillForm();
look();
