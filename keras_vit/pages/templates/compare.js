"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  for (const parent of document.querySelectorAll("[data-charts]")) {
    for (const chart of data.curves) charts.lines(parent, chart);
  }
})();
