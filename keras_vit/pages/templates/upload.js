"use strict";
// Gives each image that is dropped, chosen or pasted to `answer(file)`, and shows what it returns:
// the classes, `{label, probability}` each. What it throws is shown as a sentence. Of images that
// follow one another fast the last one counts.
function takeImages(answer) {
  const element = (id) => document.getElementById(id);
  const [drop, input] = [element("drop"), element("file")];
  let latest = 0;

  function row({ label, probability }) {
    const [line, name, bar, number] = ["tr", "th", "td", "td"].map((kind) => document.createElement(kind));
    name.scope = "row";
    name.textContent = label;
    const share = document.createElement("div");
    share.className = "share";
    share.append(document.createElement("div"));
    share.firstChild.style.width = `${100 * probability}%`;
    bar.append(share);
    number.className = "number";
    number.textContent = `${(100 * probability).toFixed(2)} %`;
    line.append(name, bar, number);
    return line;
  }

  async function take(file) {
    if (!file) return;
    latest += 1;
    const turn = latest;
    element("state").textContent = `Looking at ${file.name} ...`;
    element("error").hidden = true;
    try {
      const { classes, show } = await answer(file);
      if (turn !== latest) return;
      element("name").textContent = file.name;
      element("classes").replaceChildren(...classes.map(row));
      element("answer").hidden = false;
      show?.();
    } catch (error) {
      if (turn !== latest) return;
      element("error").textContent = error.message;
      element("error").hidden = false;
    }
    element("state").textContent = "";
  }

  input.addEventListener("click", () => { input.value = ""; }); // or the same file would be no change
  input.addEventListener("change", () => take(input.files[0]));
  addEventListener("paste", (event) => take(event.clipboardData?.files[0]));
  for (const kind of ["dragenter", "dragover", "dragleave", "drop"]) {
    addEventListener(kind, (event) => {
      event.preventDefault(); // or the browser would open the file
      drop.classList.toggle("over", kind === "dragenter" || kind === "dragover");
      if (kind === "drop") take(event.dataTransfer.files[0]);
    });
  }
}
