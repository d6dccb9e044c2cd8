// How the selected plan's strategies work: small terms of its axes, and a stepper over their recorded steps.
"use strict";
const SMALL = { "2d": 4, "2.5d": 8, "3d": 8, interleaved: 2 };
const SMALL_MICRO = 4;

// A small term for each axis that a plan splits work along, as `plait explain` takes them.
function smallTerms(plan) {
  const terms = [];
  for (const [axis, { size, options }] of Object.entries(axesOf(plan))) {
    if (axis === "mb" || size < 2) continue;
    const known = options.filter((one) => one && !/^(replicate\d+|offload)$/.test(one)).join(",")
      .replace(/every\d+/, "every2").replace(/depth\d+/, "depth2");
    const number = SMALL[options[0]] ?? (axis === "ep" ? 4 : 2);
    terms.push(`${axis}${number}${known ? `:${known}` : ""}${axis === "pp" ? ` mb${SMALL_MICRO}` : ""}`);
  }
  return terms.length ? terms : ["dp2"];
}

let explainedTerm = "";

async function explainTerm(term) {
  if (!term || term === explainedTerm) return;
  explainedTerm = term;
  byId("term").value = term;
  byId("idea").textContent = "Running its small case ...";
  try {
    const found = await ask("/explain.json", { term });
    if (explainedTerm !== term) return;
    byId("idea").textContent = found.idea;
    byId("case").textContent = `Formula: ${found.formula}. Paper: ${found.paper}. Case: ${found.case}.`;
    showSteps(found);
  } catch (error) {
    if (explainedTerm === term) byId("idea").textContent = error.message;
  }
}

function offerTerms() {
  const terms = smallTerms(state.plan);
  byId("terms").replaceChildren(...terms.map((term) =>
    element("button", { type: "button", onclick: () => explainTerm(term) }, term)));
}

prepareStepper(byId("stepper"));
byId("explain-box").hidden = false;
byId("explain-box").addEventListener("toggle", () => {
  if (!byId("explain-box").open) return;
  offerTerms();
  explainTerm(smallTerms(state.plan)[0]);
});
byId("term").addEventListener("change", () => explainTerm(byId("term").value.trim()));
