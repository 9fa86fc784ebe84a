"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const { add } = charts;

  for (const parent of document.querySelectorAll("[data-charts]")) {
    for (const chart of data.curves) charts.lines(parent, chart);
  }
  for (const parent of document.querySelectorAll("[data-reliability]")) {
    charts.reliability(parent, data.calibration, "Reliability");
  }
  for (const table of document.querySelectorAll("table.sortable")) charts.sortable(table);

  // One image with what it is and what it was predicted as.
  function show(parent, place) {
    const { source, name, truth, taken, confidence, crisp } = data.images[place];
    const figure = add(parent, "figure");
    const image = add(figure, "img", { src: source, alt: `${data.labels[truth]}: ${name}` });
    if (crisp) image.className = "crisp";
    const caption = add(figure, "figcaption");
    const sure = `${(100 * confidence).toFixed(1)}%`;
    add(caption, "span", { class: "name" }, truth === taken
      ? `${data.labels[truth]}, ${sure} sure`
      : `${data.labels[truth]} predicted as ${data.labels[taken]}, ${sure} sure`);
    add(caption, "span", { class: "file" }, name);
  }

  for (const parent of document.querySelectorAll("[data-gallery]")) {
    for (const place of JSON.parse(parent.dataset.gallery)) show(parent, place);
  }

  const matrix = document.querySelector(".matrix")?.parentElement;
  if (matrix) new ResizeObserver(() => { document.getElementById("wider").hidden = matrix.scrollWidth <= matrix.clientWidth; }).observe(matrix);

  const panel = document.getElementById("cell");
  const buttons = [...document.querySelectorAll("button[data-cell]")];
  for (const button of buttons) {
    button.setAttribute("aria-pressed", "false");
    button.addEventListener("click", () => {
      const wasOpen = button.getAttribute("aria-pressed") === "true";
      buttons.forEach((other) => other.setAttribute("aria-pressed", "false"));
      panel.replaceChildren();
      if (wasOpen) return;
      button.setAttribute("aria-pressed", "true");
      const [truth, taken] = button.dataset.cell.split(",").map(Number);
      const places = data.cells[button.dataset.cell] ?? [];
      const count = data.counts[button.dataset.cell];
      const what = truth === taken ? `${data.labels[truth]}, correct` : `${data.labels[truth]} predicted as ${data.labels[taken]}`;
      const some = places.length < count ? `; ${places.length || "none"} of them ${places.length === 1 ? "is" : "are"} in this page` : "";
      add(panel, "h3", {}, `${what}: ${count} image${count === 1 ? "" : "s"}${some}`);
      const images = add(panel, "div", { class: "images" });
      for (const place of places) show(images, place);
      panel.scrollIntoView({ block: "nearest" });
    });
  }

  const find = document.getElementById("find");
  find?.addEventListener("input", () => {
    const text = find.value.toLowerCase();
    for (const row of document.getElementById("class-table").tBodies[0].rows) {
      row.hidden = !row.cells[0].textContent.toLowerCase().includes(text);
    }
  });

  const strength = document.getElementById("strength");
  strength?.addEventListener("input", () => {
    for (const heat of document.querySelectorAll(".heat")) heat.style.opacity = strength.value / 100;
  });
  const patches = document.getElementById("patches");
  patches?.addEventListener("click", () => {
    const isShown = document.querySelector(".views").classList.toggle("show-patches");
    patches.setAttribute("aria-pressed", String(isShown));
  });
  // What is folded would be lost on paper.
  addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((each) => { each.open = true; }));
})();
