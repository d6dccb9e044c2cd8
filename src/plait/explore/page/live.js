// The page of a run that goes on: it asks for /plan.json every second, and shows what has come.
"use strict";
const TOKEN = new URLSearchParams(location.search).get("token") || "";
const ASK_SECONDS = 1;

function card(name, value, beside) {
  return element("div", { class: "card" }, element("span", {}, name), element("b", {}, value),
    element("small", {}, beside || ""));
}

function cards(run) {
  const last = run.metrics[run.metrics.length - 1] || {};
  const guess = run.predicted;
  const beside = (text) => (guess ? `predicted ${text(guess)}` : "");
  byId("cards").replaceChildren(
    card("step", `${run.step} of ${run.steps === null ? "-" : run.steps}`, run.state),
    card("loss", shown(run.loss)),
    card("gradient norm", shown(last.grad_norm)),
    card("tokens a second", run.tokens_per_second ? count(run.tokens_per_second) : "-",
      beside((one) => count(one.tokens_per_second))),
    card("a step", run.step_seconds ? seconds(run.step_seconds) : "-", beside((one) => seconds(one.step_seconds))),
    card("predicted memory", guess ? bytes(guess.memory.total) : "-", "of the fullest rank"),
    card("findings", String(run.findings)),
  );
}

function ranks(run) {
  const head = element("tr", {}, ...["rank", "step", "doing"].map((name) => element("th", {}, name)));
  const rows = run.ranks.map((one) => element("tr", {}, element("td", {}, String(one.rank)),
    element("td", {}, String(one.step)), element("td", {}, one.alive ? one.doing : "not running")));
  byId("ranks").replaceChildren(head, ...rows);
}

function show(run) {
  byId("headline").textContent = `${run.plan || ""}: ${run.state}, ${run.run}`;
  byId("predicted").textContent = run.predicted ? `Predicted for cluster ${run.predicted_for}.` : `No prediction: ${run.why_no_prediction}`;
  cards(run);
  drawCurves([{ name: run.plan || "", steps: run.metrics, predicted: run.predicted }]);
  ranks(run);
}

async function ask() {
  let reply;
  try {
    reply = await fetch("/plan.json", { headers: { "X-Plait-Token": TOKEN } });
  } catch {
    byId("headline").textContent = "The run has ended, and this page's server with it. plait report latest has the whole page.";
    return;
  }
  if (reply.ok) show(await reply.json());
  setTimeout(ask, ASK_SECONDS * 1000);
}

ask();
