// The curves of a page that is written once.
"use strict";
drawCurves(JSON.parse(byId("steps").textContent));
