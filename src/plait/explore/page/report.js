// The pictures of a page that is written once: curves and timelines, where it has a place for them.
"use strict";
const DRAWN = JSON.parse(byId("drawn").textContent);
const words = DRAWN.unit === "slots" ? (value) => digits(value) : seconds;
const timelines = byId("timelines") && drawTimelines(byId("timelines"), DRAWN.timelines || [], words);
if (byId("charts") && DRAWN.runs?.length) drawCurves(DRAWN.runs);
if (timelines) {
  byId("timelines").append(element("p", { class: "caption" },
    `A box says stage, kind and micro-batch (2F13), or the micro-batch alone. Drag to zoom in, click twice for all. ${TIMELINE_KEYS}`));
  const again = () => zoomTo(timelines, timelines.from, timelines.to);
  addEventListener("resize", again);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
}
