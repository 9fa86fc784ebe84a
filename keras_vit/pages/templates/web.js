"use strict";
const settings = JSON.parse(document.getElementById("settings").textContent);
const state = document.getElementById("state");

// Reads a file, and says how far it is.
async function load(name) {
  const reply = await fetch(name);
  if (!reply.ok) throw new Error(`The server has no ${name} beside this page; export again.`);
  const total = Number(reply.headers.get("Content-Length"));
  const parts = [];
  let size = 0;
  for (const reader = reply.body.getReader(); ;) {
    const { done, value } = await reader.read();
    if (done) break;
    parts.push(value);
    size += value.length;
    if (total) state.textContent = `Loading the model: ${Math.round((100 * size) / total)} %`;
  }
  return new Uint8Array(await new Blob(parts).arrayBuffer());
}

async function start() {
  const ort = await import(new URL(settings.runtime, location.href).href);
  ort.env.wasm.numThreads = 1; // more need headers that a plain server does not send
  ort.env.wasm.wasmPaths = new URL("./", location.href).href;
  const session = await ort.InferenceSession.create(await load(settings.model), {
    executionProviders: ["wasm"],
  });
  state.textContent = "";
  return { ort, session };
}

// The pixels of an image file, upright and on white, as they are in the file.
async function pixelsOf(file) {
  let bitmap;
  try {
    bitmap = await createImageBitmap(file, {
      imageOrientation: "from-image", colorSpaceConversion: "none",
    });
  } catch {
    throw new Error(`${file.name} is not an image that this browser reads, or is damaged.`);
  }
  const { width, height } = bitmap;
  if (width * height > settings.most_pixels) {
    throw new Error(`${file.name} has more than ${settings.most_pixels / 1e6} million pixels; make it smaller.`);
  }
  const canvas = document.createElement("canvas");
  Object.assign(canvas, { width, height });
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.fillStyle = "white";
  context.fillRect(0, 0, width, height);
  context.drawImage(bitmap, 0, 0);
  bitmap.close();
  const { data } = context.getImageData(0, 0, width, height);
  return { data: new Uint8Array(data.buffer), shape: [height, width, 4] };
}

async function classify(file) {
  const { ort, session } = await ready;
  const { data, shape } = await pixelsOf(file);
  const image = new ort.Tensor("uint8", data, shape);
  const { probabilities } = await session.run({ [settings.input]: image }, ["probabilities"]);
  const classes = Array.from(probabilities.data, (probability, index) => ({
    label: settings.labels[index], probability,
  }));
  classes.sort((one, other) => other.probability - one.probability);
  return { classes: classes.slice(0, settings.top) };
}

const isFile = location.protocol === "file:";
document.getElementById("as-file").hidden = !isFile;
document.getElementById("drop").hidden = isFile;
const ready = isFile ? new Promise(() => {}) : start();
ready.catch((error) => {
  state.textContent = "";
  document.getElementById("error").textContent = `The model does not start: ${error.message}`;
  document.getElementById("error").hidden = false;
});
takeImages(classify);
