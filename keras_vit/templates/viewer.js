"use strict";
// Shows maps over the patches of an image: `image` (its source, and its width in the page), `grid`
// ([rows, columns] of patches), `maps` (each with name, caption and unit) and `layers` (of heads).

const MAGMA = ["000004", "1d1147", "51127c", "832681", "b73779", "e75263", "fc8961", "fec488", "fcfdbf"]
  .map((color) => [0, 2, 4].map((place) => parseInt(color.slice(place, place + 2), 16)));

function magma(share) {
  const place = Math.min(Math.max(share, 0), 1) * (MAGMA.length - 1);
  const index = Math.min(Math.floor(place), MAGMA.length - 2);
  return MAGMA[index].map((low, channel) => low + (place - index) * (MAGMA[index + 1][channel] - low));
}

// Reads maps that were written in bytes: one array of values for each.
function unpacked({ values, least, most }) {
  const bytes = Uint8Array.from(atob(values), (letter) => letter.charCodeAt(0));
  const size = bytes.length / least.length;
  return least.map((low, index) => Float32Array.from(
    bytes.subarray(index * size, (index + 1) * size),
    (byte) => low + (byte / 255) * (most[index] - low),
  ));
}

function drawMap(canvas, values, [rows, columns], low, high) {
  canvas.width = columns;
  canvas.height = rows;
  const context = canvas.getContext("2d");
  const pixels = context.createImageData(columns, rows);
  values.forEach((value, place) => {
    pixels.data.set([...magma((value - low) / (high - low || 1)), 255], 4 * place);
  });
  context.putImageData(pixels, 0, 0);
}

function number(value) {
  return Math.abs(value) >= 100 ? value.toFixed(0) : Number(value.toPrecision(3)).toString();
}

function viewer(root, data) {
  const part = (name) => root.querySelector(`.${name}`);
  const [what, layer, head, strength] = ["what", "layer", "head", "strength"].map(part);
  const maps = data.maps.map(unpacked).map(([values]) => values);
  const attention = data.layers.map(unpacked);
  let shown;

  const heads = () => attention[layer.value];

  function mean(arrays) {
    return arrays[0].map((_, place) => arrays.reduce((sum, array) => sum + array[place], 0) / arrays.length);
  }

  function chosen() {
    if (what.value !== "attention") {
      const index = Number(what.value);
      return { ...data.maps[index], values: maps[index] };
    }
    const { name } = data.layers[layer.value];
    const whose = head.value === "mean" ? "the mean of the heads" : `head ${head.value}`;
    return {
      values: head.value === "mean" ? mean(heads()) : heads()[head.value],
      caption: name === "pooling"
        ? `What attention pooling takes from each patch, ${whose}.`
        : `What ${data.who} takes from each patch in ${name}, ${whose}.`,
      unit: "attention weight",
    };
  }

  function showTiles() {
    const values = heads();
    const most = Math.max(...values.map((array) => Math.max(...array)));
    const { name } = data.layers[layer.value];
    part("heads-title").textContent = `The heads of ${name === "pooling" ? "the pooling" : name}, on one scale`;
    [...part("tiles").children].forEach((tile, index) => {
      drawMap(tile.querySelector("canvas"), values[index], data.grid, 0, most);
      tile.setAttribute("aria-pressed", String(head.value === String(index)));
    });
  }

  function draw() {
    offerHeads();
    const isAttention = what.value === "attention";
    root.querySelectorAll(".of-attention").forEach((element) => { element.hidden = !isAttention; });
    shown = chosen();
    const lowest = Math.min(...shown.values);
    const high = Math.max(...shown.values);
    // As in figures.py: colours stretched over noise would look like evidence.
    const least = data.uniform.range * shown.values.reduce((sum, value) => sum + Math.abs(value), 0) / shown.values.length;
    const low = Math.min(lowest, high - least);
    const isUniform = high - lowest <= least;
    drawMap(part("map"), shown.values, data.grid, low, high);
    part("map").setAttribute("aria-label", shown.caption);
    part("map").style.opacity = (isUniform ? 0.2 : 1) * strength.value / 100; // one colour would only veil the image
    part("caption").textContent = isUniform ? `${shown.caption} It is ${data.uniform.text}.` : shown.caption;
    part("least").textContent = number(low);
    part("most").textContent = `${number(high)} ${shown.unit}`;
    part("reading").textContent = "Point at a patch to read its value.";
    part("layer-name").textContent = data.layers[layer.value].name.replace("layer ", "");
    if (isAttention) showTiles();
  }

  function read(event) {
    const box = part("map").getBoundingClientRect();
    const [rows, columns] = data.grid;
    const clipped = (share, count) => Math.min(Math.max(Math.floor(share * count), 0), count - 1);
    const row = clipped((event.clientY - box.top) / box.height, rows);
    const column = clipped((event.clientX - box.left) / box.width, columns);
    part("reading").textContent = `Row ${row}, column ${column} of the patches: ${number(shown.values[row * columns + column])} ${shown.unit}`;
  }

  // Layers may differ in their number of heads: attention pooling has its own.
  function offerHeads() {
    const count = heads().length;
    if (head.options.length === count + 1) return;
    const all = Array.from({ length: count }, (_, index) => new Option(index, index));
    head.replaceChildren(new Option("mean of all", "mean"), ...all);
    part("tiles").replaceChildren(...Array.from({ length: count }, (_, index) => {
      const tile = document.createElement("button");
      tile.type = "button";
      tile.append(document.createElement("canvas"), `head ${index}`);
      tile.addEventListener("click", () => { head.value = String(index); draw(); });
      return tile;
    }));
  }

  for (const control of [what, layer, head, strength]) control.addEventListener("input", draw);
  for (const kind of ["pointermove", "pointerdown"]) part("map").addEventListener(kind, read);
  drawMap(part("colors"), Float32Array.from({ length: 256 }, (_, place) => place), [1, 256], 0, 255);

  const picture = part("picture");
  picture.src = data.image.source;
  picture.width = data.image.width;
  picture.classList.toggle("crisp", data.image.crisp);
  what.replaceChildren(
    ...data.maps.map(({ name }, index) => new Option(name, index)),
    new Option("Attention of a layer and head", "attention"),
  );
  layer.max = data.layers.length - 1;
  layer.value = layer.max;
  draw();
}

viewer(document.getElementById("viewer"), JSON.parse(document.getElementById("view").textContent));
