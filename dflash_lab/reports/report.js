// Sliders, prompt picker and block stepper of a report. Everything shown was made beforehand and
// lies in this page; here it is only chosen.
(() => {
  "use strict";
  const by = (id) => document.getElementById(id);
  const data = JSON.parse(by("data").textContent);
  if (!data.positions) return;

  const size = by("block-size"), width = by("draft-window");
  const prompt = by("prompt"), step = by("block"), text = by("text");
  const copy = (id) => by(id).content.cloneNode(true);
  let cell = by("readout").dataset.cell;

  const say = (input, words) => {
    input.setAttribute("aria-valuetext", words);
    by(`${input.id}-value`).textContent = words;
  };

  const show = (image, picture) => {
    const svg = picture.svg.map((line) => data.lines[line]).join("\n");
    image.src = `data:image/svg+xml,${encodeURIComponent(svg)}`;
    image.alt = picture.alt;
  };

  function showCell() {
    const names = (input) => input.dataset.values.split(" ")[Number(input.value)];
    say(size, names(size));
    say(width, names(width));
    const position = data.positions[Number(size.value)][Number(width.value)];
    by("shown").textContent = position.words;
    by("shown").classList.toggle("warning", !position.measured);
    for (const place of document.querySelectorAll(".place")) place.textContent = position.place;
    if (position.cell === cell) return;
    cell = position.cell;
    by("readout").dataset.cell = cell;
    by("readout").replaceChildren(copy(`facts-${cell}`));
    const [throughput, survival] = data.pictures[cell];
    show(by("throughput"), throughput);
    show(by("survival"), survival);
    showText();
  }

  const blocks = () => [...text.querySelectorAll(".dl-block")];

  function showText() {
    by("prompt-name").textContent = prompt.selectedOptions[0].textContent;
    text.replaceChildren(copy(`text-${cell}-${prompt.value}`));
    for (const block of blocks()) block.tabIndex = -1; // the block slider stands for them
    step.max = Math.max(1, blocks().length);
    step.value = 1;
    step.disabled = blocks().length < 2;
    showBlock();
  }

  function showBlock() {
    const at = Number(step.value) - 1;
    blocks().forEach((block, index) => block.classList.toggle("dl-current", index === at));
    say(step, blocks()[at]?.getAttribute("aria-label") ?? "no block");
  }

  function pick(event) {
    const at = blocks().indexOf(event.target.closest(".dl-block"));
    if (at < 0) return;
    step.value = at + 1;
    showBlock();
  }

  size.addEventListener("input", showCell);
  width.addEventListener("input", showCell);
  prompt.addEventListener("change", showText);
  step.addEventListener("input", showBlock);
  text.addEventListener("focusin", pick);
  text.addEventListener("click", pick);
  document.documentElement.classList.add("live");
  for (const pan of document.querySelectorAll(".pan")) {
    if (pan.scrollWidth > pan.clientWidth) pan.tabIndex = 0; // reach what a small screen cuts off
  }
  showText();
  showCell();
})();
