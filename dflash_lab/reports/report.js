// Sliders and prompt picker of a report; the script of the trace viewer stands above this one.
// Everything shown was made beforehand and lies in this page; here it is only chosen.
(async () => {
  const by = (id) => document.getElementById(id);
  if (!globalThis.DecompressionStream) return; // a browser from before 2023: as without scripts
  const bytes = Uint8Array.from(atob(by("data").textContent), (letter) => letter.charCodeAt(0));
  const json = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const data = await new Response(json).json();
  if (!data.positions) return;

  const size = by("block-size"), width = by("draft-window");
  const prompt = by("prompt");
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

  // The viewer asks for its values as it does of a notebook's widget.
  const heard = {};
  const values = { legend: data.legend, trace: data.traces[cell][0], block: 0 };
  const model = {
    get: (name) => values[name],
    set: (name, value) => {
      values[name] = value;
      for (const hear of heard[`change:${name}`] ?? []) hear();
    },
    on: (event, hear) => (heard[event] ??= []).push(hear),
    save_changes: () => {},
  };

  function showText() {
    by("prompt-name").textContent = prompt.selectedOptions[0].textContent;
    values.block = 0;
    model.set("trace", data.traces[cell][Number(prompt.value)]);
  }

  size.addEventListener("input", showCell);
  width.addEventListener("input", showCell);
  prompt.addEventListener("change", showText);
  render({ model, el: by("text") });
  document.documentElement.classList.add("live");
  for (const pan of document.querySelectorAll(".pan")) {
    if (pan.scrollWidth > pan.clientWidth) pan.tabIndex = 0; // reach what a small screen cuts off
  }
  showText();
  showCell();
})();
