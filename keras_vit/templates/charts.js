"use strict";
// Charts as SVG: lines over a common axis, and bars. Values stand below the chart, under the
// pointer, the finger, or the place that the arrow keys reach.
const charts = (() => {
  const SPACE = "http://www.w3.org/2000/svg";
  const ON_PAPER = 320; // pixels of half a page
  const DASHES = ["none", "7 4"];

  function draw(parent, name, attributes = {}, text = null) {
    const node = document.createElementNS(SPACE, name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text !== null) node.textContent = text;
    parent.append(node);
    return node;
  }

  function add(parent, name, attributes = {}, text = null) {
    const node = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text !== null) node.textContent = text;
    parent.append(node);
    return node;
  }

  // Round numbers between two values, about as many as asked for.
  function ticks(low, high, count) {
    const rough = (high - low) / count || 1;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
    const first = Math.ceil(low / step - 1e-9);
    const values = [];
    for (let place = first; place * step <= high + step * 1e-9; place++) values.push(place * step);
    return values;
  }

  function shown(value, isShare) {
    if (value === null || value === undefined) return "–";
    if (isShare) return `${(100 * value).toFixed(2)}%`;
    const size = Math.abs(value);
    if (size !== 0 && (size < 0.001 || size >= 1e6)) return value.toExponential(2);
    return Number.isInteger(value) ? String(value) : value.toPrecision(4);
  }

  function tick(value, isShare) {
    if (isShare) return `${+(100 * value).toPrecision(6)}%`;
    return Math.abs(value) < 0.001 && value !== 0 ? value.toExponential(0) : String(+value.toPrecision(6));
  }

  // `options`: title, x (name), series [{name, points [[x, y]]}], isShare, mark (an x), fromZero.
  function lines(parent, options) {
    const figure = add(parent, "figure", { class: "chart" });
    add(figure, "figcaption", {}, options.title);
    const stage = add(figure, "div", {
      class: "stage", tabindex: "0", role: "slider", "aria-label": options.title,
    });
    const values = add(figure, "div", { class: "values", "aria-hidden": "true" });
    const places = [...new Set(options.series.flatMap(({ points }) => points.map(([x]) => x)))];
    places.sort((a, b) => a - b);
    const finite = options.series.flatMap(({ points }) => points.map(([, y]) => y)).filter((y) => y !== null);
    if (!finite.length) { stage.remove(); values.textContent = "No values."; return; }
    const state = { at: places.length - 1, scale: null, cursor: null };
    const lookup = options.series.map(({ points }) => new Map(points));

    const cells = options.series.map((series, place) => {
      const cell = add(values, "span", { class: `series-${place}` });
      const sample = draw(cell, "svg", { viewBox: "0 0 28 8", "aria-hidden": "true" });
      draw(sample, "path", { d: "M0 4H28", class: "line", "stroke-dasharray": DASHES[place] });
      add(cell, "b", {}, series.name);
      return add(cell, "span", { class: "value" });
    });
    const where = add(values, "span", { class: "where" });

    function choose(at) {
      state.at = Math.max(0, Math.min(places.length - 1, at));
      const x = places[state.at];
      const texts = lookup.map((points) => shown(points.get(x), options.isShare));
      texts.forEach((text, place) => { cells[place].textContent = text; });
      where.textContent = `${options.x} ${x}${x === options.mark ? " (kept)" : ""}`;
      stage.setAttribute("aria-valuenow", x);
      stage.setAttribute("aria-valuetext", `${options.x} ${x}: ${options.series.map((one, place) => `${one.name} ${texts[place]}`).join(", ")}`);
      if (state.cursor) {
        const left = state.scale(x);
        state.cursor.setAttribute("x1", left);
        state.cursor.setAttribute("x2", left);
      }
    }

    function paint(room = stage.clientWidth) {
      const width = Math.max(240, room), height = Math.max(180, Math.min(300, width * 0.6));
      const edge = { left: 52, right: 12, top: 8, bottom: 40 };
      stage.replaceChildren();
      const svg = draw(stage, "svg", { viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
      let low = options.fromZero ? 0 : Math.min(...finite), high = Math.max(...finite);
      if (options.isShare) high = Math.min(1, high + 0.02 * (high - low));
      if (low === high) { low -= Math.abs(low) * 0.1 || 0.5; high += Math.abs(high) * 0.1 || 0.5; }
      const [first, last] = [places[0], places[places.length - 1]];
      const across = (x) => edge.left + (width - edge.left - edge.right) * (last === first ? 0.5 : (x - first) / (last - first));
      const up = (y) => height - edge.bottom - (height - edge.top - edge.bottom) * (y - low) / (high - low);
      for (const y of ticks(low, high, 5)) {
        draw(svg, "line", { class: "grid", x1: edge.left, x2: width - edge.right, y1: up(y), y2: up(y) });
        draw(svg, "text", { x: edge.left - 6, y: up(y) + 4, "text-anchor": "end" }, tick(y, options.isShare));
      }
      const across_ticks = last === first ? [first] : ticks(first, last, width < 420 ? 4 : 8).filter(Number.isInteger);
      for (const x of across_ticks) {
        draw(svg, "text", { x: across(x), y: height - edge.bottom + 16, "text-anchor": "middle" }, String(x));
      }
      draw(svg, "text", { x: (edge.left + width - edge.right) / 2, y: height - 6, "text-anchor": "middle" }, options.x);
      if (options.mark) {
        draw(svg, "line", { class: "mark", x1: across(options.mark), x2: across(options.mark), y1: edge.top, y2: height - edge.bottom });
        const isRight = across(options.mark) > width / 2;
        draw(svg, "text", { x: across(options.mark) + (isRight ? -4 : 4), y: (edge.top + height - edge.bottom) / 2, "text-anchor": isRight ? "end" : "start" }, "kept");
      }
      options.series.forEach(({ points }, place) => {
        let path = "", isOpen = false;
        for (const [x, y] of points) {
          if (y === null) { isOpen = false; continue; }
          path += `${isOpen ? "L" : "M"}${across(x).toFixed(1)} ${up(y).toFixed(1)}`;
          isOpen = true;
        }
        const group = draw(svg, "g", { class: `series-${place}` });
        draw(group, "path", { class: "line", d: path, "stroke-dasharray": DASHES[place] });
        if (points.length === 1 && points[0][1] !== null) draw(group, "circle", { class: "dot", cx: across(points[0][0]), cy: up(points[0][1]), r: 4 });
      });
      state.scale = across;
      state.cursor = draw(svg, "line", { class: "cursor", y1: edge.top, y2: height - edge.bottom });
      choose(state.at);
    }

    function point(event) {
      const box = stage.getBoundingClientRect();
      const at = event.clientX - box.left;
      let best = 0;
      places.forEach((x, place) => {
        if (Math.abs(state.scale(x) - at) < Math.abs(state.scale(places[best]) - at)) best = place;
      });
      choose(best);
    }

    stage.setAttribute("aria-valuemin", places[0]);
    stage.setAttribute("aria-valuemax", places[places.length - 1]);
    stage.addEventListener("pointermove", point);
    stage.addEventListener("pointerdown", point);
    stage.addEventListener("keydown", (event) => {
      const moves = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageDown: -10, PageUp: 10, Home: -Infinity, End: Infinity };
      if (!(event.key in moves)) return;
      event.preventDefault();
      choose(state.at + moves[event.key]);
    });
    new ResizeObserver(() => paint()).observe(stage);
    addEventListener("beforeprint", () => paint(ON_PAPER));
    addEventListener("afterprint", () => paint());
    paint();
  }

  // The reliability diagram: one bar of accuracy in each bin of confidence, and the diagonal.
  // `bins`: [{from, to, images, confidence, accuracy}], empty ones left out.
  function reliability(parent, bins, title) {
    const figure = add(parent, "figure", { class: "chart square" });
    add(figure, "figcaption", {}, title);
    const stage = add(figure, "div", { class: "stage", tabindex: "0", role: "slider", "aria-label": title });
    const values = add(figure, "div", { class: "values", "aria-hidden": "true" });
    const size = 320, edge = { left: 52, right: 24, top: 8, bottom: 40 };
    const across = (x) => edge.left + (size - edge.left - edge.right) * x;
    const up = (y) => size - edge.bottom - (size - edge.top - edge.bottom) * y;
    const svg = draw(stage, "svg", { viewBox: `0 0 ${size} ${size}`, "aria-hidden": "true" });
    for (const y of [0, 0.25, 0.5, 0.75, 1]) {
      draw(svg, "line", { class: "grid", x1: across(0), x2: across(1), y1: up(y), y2: up(y) });
      draw(svg, "text", { x: across(0) - 6, y: up(y) + 4, "text-anchor": "end" }, `${100 * y}%`);
      draw(svg, "text", { x: across(y), y: size - edge.bottom + 16, "text-anchor": "middle" }, `${100 * y}%`);
    }
    draw(svg, "text", { x: across(0.5), y: size - 6, "text-anchor": "middle" }, "how sure the model is");
    const bars = bins.map((bin) => draw(svg, "rect", {
      class: "column", x: across(bin.from) + 0.5, width: across(bin.to) - across(bin.from) - 1,
      y: up(bin.accuracy), height: up(0) - up(bin.accuracy),
    }));
    draw(svg, "line", { class: "mark", x1: across(0), y1: up(0), x2: across(1), y2: up(1) });
    bins.forEach((bin) => draw(svg, "circle", { class: "dot", cx: across(bin.confidence), cy: up(bin.accuracy), r: 2.5 }));
    let at = bins.length - 1;
    function choose(place) {
      at = Math.max(0, Math.min(bins.length - 1, place));
      const { images, confidence, accuracy } = bins[at];
      const text = `${images} image${images === 1 ? "" : "s"}: sure by ${shown(confidence, true)}, right in ${shown(accuracy, true)}`;
      values.textContent = text;
      stage.setAttribute("aria-valuenow", at);
      stage.setAttribute("aria-valuetext", text);
      bars.forEach((bar, place_) => bar.classList.toggle("chosen", place_ === at));
    }
    stage.setAttribute("aria-valuemin", 0);
    stage.setAttribute("aria-valuemax", bins.length - 1);
    const point = (event) => {
      const box = svg.getBoundingClientRect();
      const x = (event.clientX - box.left) / box.width * size;
      const place = bins.findIndex((bin) => across(bin.from) <= x && x < across(bin.to));
      if (place >= 0) choose(place);
    };
    stage.addEventListener("pointermove", point);
    stage.addEventListener("pointerdown", point);
    stage.addEventListener("keydown", (event) => {
      const moves = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, Home: -Infinity, End: Infinity };
      if (!(event.key in moves)) return;
      event.preventDefault();
      choose(at + moves[event.key]);
    });
    choose(at);
  }

  // Makes each heading of a table a button that sorts its rows by that column.
  function sortable(table) {
    const body = table.tBodies[0];
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      const button = head.querySelector("button");
      if (!button) return;
      button.addEventListener("click", () => {
        const direction = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", direction === 1 ? "ascending" : "descending");
        const key = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent;
        const rows = [...body.rows].map((row) => [key(row), row]);
        const isNumber = head.classList.contains("number");
        rows.sort(([a], [b]) => {
          if (!isNumber) return direction * a.localeCompare(b, "en", { numeric: true });
          if (a === "" || b === "") return (a === "") - (b === ""); // what has no value comes last
          return direction * (Number(a) - Number(b));
        });
        body.append(...rows.map(([, row]) => row));
      });
    });
  }

  return { add, draw, lines, reliability, sortable, shown };
})();
