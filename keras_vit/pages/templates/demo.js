"use strict";
const showMaps = viewer(document.getElementById("viewer"));
const limits = JSON.parse(document.getElementById("limits").textContent);

takeImages(async (file) => {
  if (file.size > limits.bytes) throw new Error(limits.sentence);
  let reply;
  try {
    reply = await fetch("look", {
      method: "POST", headers: { "Content-Type": "application/octet-stream" }, body: file,
    });
  } catch {
    throw new Error("The program does not answer; start keras-vit demo again.");
  }
  const said = await reply.json();
  if (!reply.ok) throw new Error(said.error);
  return { classes: said.classes, show: () => show(said) };
});

function show({ note, sizes, view }) {
  document.getElementById("note").textContent = note;
  document.getElementById("note").hidden = !note;
  document.getElementById("sizes").textContent = sizes;
  document.getElementById("viewer").hidden = !view;
  if (view) showMaps(view);
}
