// One decoded prompt, block by block. `trace` comes ready to be shown (viewer.py, `view`); here it
// is laid out and stepped through. Text of a model is only ever set as text, never as markup.
const HEADS = ["", "draft's choice", "draft's prob.", "target's prob.", "target's choice", "", "survival so far"];
const PROBABILITIES = [2, 3];

function make(kind, name = "", ...inside) {
  const element = document.createElement(kind);
  if (name) element.className = name;
  element.append(...inside);
  return element;
}

// One token; what shows nothing by itself gets a mark from the style sheet.
function token(text, kind = "") {
  const hidden = text === "" ? "dl-part" : text.trim() === "" && text.includes("\n") ? "dl-line" : "";
  const classes = [kind && `dl-${kind}`, hidden].filter(Boolean).join(" ");
  return make("bdi", classes, document.createTextNode(text));
}

const tokens = (texts, kind = "") => texts.map((text) => token(text, kind));
const own = (block) => (block.own === null ? [] : [token(block.own, "own")]);

function inVain(texts, kind, tag) {
  return texts.length ? [make(tag, `dl-${kind}`, ...tokens(texts))] : [];
}

function blockText(block) {
  const kept = () => tokens(block.kept, "accepted");
  const lost = [...inVain(block.unused, "unused", "span"), ...inVain(block.rejected, "rejected", "s")];
  const drafts = make("span", "dl-drafts", make("b", "", block.label), ...kept(), ...lost, ...own(block));
  const shown = make("span", "dl-block", ...kept(), ...own(block), drafts);
  shown.setAttribute("role", "group");
  shown.setAttribute("aria-label", block.label);
  return shown;
}

function legend(words) {
  const sample = (kind) =>
    kind === "rejected" || kind === "unused"
      ? inVain(["token"], kind, kind === "rejected" ? "s" : "span")[0]
      : token("token", kind);
  return Object.entries(words).map(([kind, text]) => make("span", "", sample(kind), ` ${text}`));
}

// The rows of one block: what both said at each draft position, and what became of it.
function rows(block) {
  const drafts = [...block.kept, ...block.unused, ...block.rejected];
  const kept = block.kept.length, accepted = kept + block.unused.length;
  const kind = (k) => (k <= kept ? "accepted" : k <= accepted ? "unused" : "rejected");
  const made = drafts.map((text, i) => ({
    place: i + 1,
    draft: { text, kind: kind(i + 1) },
    probs: [block.draft_prob?.[i], block.target_prob?.[i]],
    choice: choiceOf(block, i, accepted),
    fate: fateOf(i + 1, kept, accepted),
    so_far: block.survival[i],
  }));
  if (accepted === drafts.length && block.own !== null) {
    made.push({ place: drafts.length + 1, choice: choiceOf(block, drafts.length, accepted), fate: "◆ the target's own" });
  }
  return made;
}

function choiceOf(block, i, accepted) {
  if (i >= block.choices.length) return i === accepted && block.own !== null ? { text: block.own, kind: "own" } : null;
  return { text: block.choices[i], kind: i > accepted ? "moot" : i === accepted && block.own !== null ? "own" : "" };
}

function fateOf(place, kept, accepted) {
  if (place <= kept) return "✓ accepted";
  if (place <= accepted) return "✓ accepted, past the end";
  return place === accepted + 1 ? "✗ rejected" : "✗ after a rejected one";
}

const percent = (value) => (value === null || value === undefined ? "" : `${(100 * value).toFixed(value < 0.1 ? 1 : 0)} %`);

function tableRow(row, known) {
  const cell = (...inside) => make("td", "", ...inside);
  const said = (choice) => cell(...(choice ? [token(choice.text, choice.kind)] : []));
  const place = make("th", "", String(row.place));
  place.scope = "row";
  const [accepted, drafted] = row.so_far ?? [0, 0];
  const share = drafted ? `${Math.round((100 * accepted) / drafted)} % (${accepted} of ${drafted})` : "";
  const bar = make("i", "dl-bar");
  bar.style.width = drafted ? `${(5 * accepted) / drafted}em` : "0";
  return make(
    "tr", row.fate.startsWith("✓") ? "" : "dl-lost",
    place, said(row.draft), ...(known ? row.probs ?? [null, null] : []).map((p) => cell(percent(p))),
    said(row.choice), cell(row.fate), cell(bar, share),
  );
}

function table(block) {
  const known = Boolean(block.draft_prob || block.target_prob);
  const heads = HEADS.filter((_, i) => known || !PROBABILITIES.includes(i));
  const head = make("tr", "", ...heads.map((words) => make("th", "", words)));
  for (const cell of head.children) cell.scope = "col";
  const body = make("tbody", "", ...rows(block).map((row) => tableRow(row, known)));
  return make("table", "dl-rows", make("caption", "", block.label), make("thead", "", head), body);
}

// Prefill and blocks as fields on a line; where stages were timed, draft and verify in each.
function timeline(trace, choose) {
  const line = make("div", "dl-time");
  const last = trace.blocks.at(-1);
  if (!last || last.begin_s === null) return line;
  const end = last.begin_s + last.seconds.total;
  const field = (kind, begin, seconds) => {
    const made = make("span", `dl-seg ${kind}`);
    made.style.left = `${(100 * begin) / end}%`;
    made.style.width = `${(100 * seconds) / end}%`;
    line.append(made);
    return made;
  };
  field("dl-prefill", 0, trace.ttft_s);
  trace.blocks.forEach((block, index) => {
    const { total, draft, verify } = block.seconds;
    const whole = field(index % 2 ? "dl-odd" : "dl-even", block.begin_s, total);
    whole.dataset.block = index;
    if (draft === undefined || verify === undefined) return;
    field("dl-drafting", block.begin_s, draft).dataset.block = index;
    field("dl-verifying", block.begin_s + draft, verify).dataset.block = index;
  });
  line.setAttribute("role", "img");
  line.setAttribute("aria-label", trace.clock);
  const pick = ({ target }) => target.dataset.block !== undefined && choose(Number(target.dataset.block), true);
  line.addEventListener("pointerdown", (event) => {
    event.preventDefault(); // the focus goes to the slider
    pick(event);
  });
  line.addEventListener("pointermove", (event) => event.buttons && pick(event));
  return line;
}

function times(block) {
  if (!block.seconds || block.begin_s === null) return "";
  const { total, draft, verify } = block.seconds;
  const ms = (seconds) => `${(1000 * seconds).toFixed(1)} ms`;
  const parts = draft === undefined || verify === undefined ? "" : `: draft ${ms(draft)}, verify ${ms(verify)}, other ${ms(Math.max(0, total - draft - verify))}`;
  return `This block from ${block.begin_s.toFixed(3)} s on, ${ms(total)}${parts}`;
}

function render({ model, el }) {
  const step = make("input", "dl-step");
  Object.assign(step, { type: "range", min: 1, step: 1, autocomplete: "off" });
  const said = make("output", "dl-said");
  said.setAttribute("aria-live", "polite");
  const box = make("input");
  box.type = "checkbox";
  // JupyterLab would take the arrow keys for its headings; it looks at the focused element first.
  for (const input of [step, box]) input.dataset.lmSuppressShortcuts = "true";
  const words = make("div", "dl-legend"), text = make("pre", "dl-text"), detail = make("div", "dl-detail");
  const notes = make("p", "dl-notes"), timed = make("p", "dl-notes");
  let line = make("div", "dl-time"), blocks = [], shown = null;
  text.dir = "auto";
  const steer = make("div", "dl-steer", make("label", "", "Block ", step), said);
  const toggle = make("label", "dl-toggle", box, " each block on a line of its own, with everything that was drafted");
  const root = make("div", "dl-trace dl-viewer tex2jax_ignore", steer, line, timed, words, toggle, text, detail, notes);
  el.replaceChildren(root);
  words.append(...legend(model.get("legend")));

  const trace = () => model.get("trace");
  const chosen = () => Math.min(Math.max(model.get("block"), 0), blocks.length - 1);

  function build() {
    const now = trace();
    shown = null;
    blocks = now.blocks.map(blockText);
    text.replaceChildren(...(now.first === null ? [] : [token(now.first, "first")]), ...blocks);
    const drawn = timeline(now, choose);
    line.replaceWith(drawn);
    line = drawn;
    step.max = Math.max(1, blocks.length);
    step.disabled = blocks.length < 2;
    const known = now.blocks.some((block) => block.draft_prob || block.target_prob);
    const told = known ? "Probabilities are of the draft's choice." : "Probabilities were not recorded; DecodeConfig(probabilities=True) does.";
    const staged = now.blocks.some((block) => block.seconds?.draft !== undefined);
    const fields = staged ? "On the line above: prefill hatched; below each block draft filled, verify striped." : "";
    notes.textContent = [now.note, blocks.length ? told : "", fields].filter(Boolean).join(" ");
    show();
  }

  function show() {
    const at = chosen();
    step.value = at + 1;
    blocks.forEach((block, index) => block.classList.toggle("dl-current", index === at));
    for (const part of line.children) part.classList.toggle("dl-current", part.dataset.block === String(at));
    const label = at < 0 ? "no block" : trace().blocks[at].label;
    said.textContent = label;
    step.setAttribute("aria-valuetext", label);
    timed.textContent = at < 0 ? trace().clock : [times(trace().blocks[at]), trace().clock].filter(Boolean).join(". In all: ");
    lookAt(at);
  }

  function lookAt(at) {
    if (shown === at) return;
    shown = at;
    detail.replaceChildren(...(at < 0 ? [] : [table(trace().blocks[at])]));
  }

  function choose(at, focus = false) {
    model.set("block", at);
    model.save_changes();
    show();
    if (focus) step.focus({ preventScroll: true }); // arrow keys go on from here
  }

  const pointed = (event) => blocks.indexOf(event.target.closest(".dl-block"));
  step.addEventListener("input", () => choose(Number(step.value) - 1));
  text.addEventListener("click", (event) => pointed(event) >= 0 && choose(pointed(event), true));
  text.addEventListener("mouseover", (event) => pointed(event) >= 0 && lookAt(pointed(event)));
  text.addEventListener("mouseleave", () => lookAt(chosen()));
  model.on("change:trace", build);
  model.on("change:block", show);
  build();
}

export default { render };
