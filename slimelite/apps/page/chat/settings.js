// The fields of a request besides the conversation: the system prompt with its presets, sampling and tools.

const SETTINGS = [
  ["temperature", "Temperature", { min: 0, max: 5, step: 0.1, value: 1 }],
  ["top_p", "Top-p", { min: 0, max: 1, step: 0.05, value: 1 }],
  ["max_tokens", "Max tokens", { min: 1, step: 1, value: 512 }],
  ["seed", "Seed", { step: 1, placeholder: "random" }],
];
const PRESETS = {
  "Brief answers": "You are a helpful assistant. Answer in one or two sentences.",
  "Mathematics, step by step": "Reason step by step, write formulas in LaTeX, and put the final answer within \\boxed{}.",
  "Programmer": "You are an experienced programmer. Answer with short, complete code in Markdown, and say what it assumes.",
  "Translator": "Translate what the user writes into English. Answer with the translation alone.",
};
const OWN = "slimelite-presets"; // key of the user's presets in localStorage
const TOOLS_HINT = '[{"type": "function", "function": {"name": "add", …}}]';

/** The user's presets, name -> system prompt. */
function ownPresets() {
  try {
    return JSON.parse(localStorage.getItem(OWN)) ?? {};
  } catch {
    return {}; // without storage there are no presets
  }
}

/** The card of settings; `colored(on)` is called when colours of tokens are switched. */
function settingsElement(colored) {
  const field = ([name, title, range]) => {
    ui[name] = el("input", { type: "number", id: `set-${name}`, inputmode: "decimal", ...range });
    return el("label", { for: `set-${name}` }, el("span", {}, title), ui[name]);
  };
  ui.system = el("textarea", { id: "system", rows: 3, placeholder: "none", dir: "auto" });
  ui.tools = el("textarea", { id: "tools", rows: 2, placeholder: TOOLS_HINT, spellcheck: "false", class: "mono" });
  ui.colored = el("input", { type: "checkbox", onchange: () => colored(ui.colored.checked) });
  return el("details", { class: "card settings", open: innerWidth > 1000 }, el("summary", {}, "Settings"),
    el("div", { class: "fields" },
      el("label", { for: "system", class: "wide" }, el("span", {}, "System prompt"), ui.system),
      presetsElement(),
      ...SETTINGS.map(field),
      el("label", { for: "tools", class: "wide" }, el("span", {}, "Tools (JSON, in OpenAI’s format)"), ui.tools),
      el("label", { class: "wide check" }, ui.colored, "colour tokens by probability")));
}

/** A list of presets, and buttons to save the current system prompt as a preset and to forget a preset. */
function presetsElement() {
  const choice = el("select", { "aria-label": "Presets" });
  const drop = el("button", { class: "quiet", title: "forget this preset" }, "Forget");
  const list = () => {
    const option = (name) => el("option", { value: name }, name);
    choice.replaceChildren(el("option", { value: "" }, "presets …"), ...Object.keys({ ...PRESETS, ...ownPresets() }).map(option));
    drop.disabled = true;
  };
  const change = (presets) => {
    try {
      localStorage.setItem(OWN, JSON.stringify(presets));
    } catch {} // then they are lost when the page is closed
    list();
  };
  choice.addEventListener("change", () => {
    ui.system.value = { ...PRESETS, ...ownPresets() }[choice.value] ?? ui.system.value;
    drop.disabled = !(choice.value in ownPresets());
  });
  drop.addEventListener("click", () => {
    const { [choice.value]: _, ...rest } = ownPresets();
    change(rest);
  });
  const save = el("button", { class: "quiet", title: "keep this system prompt as a preset", onclick: () => {
    const text = ui.system.value.trim();
    if (!text) return;
    const name = text.split("\n")[0].slice(0, 40);
    change({ ...ownPresets(), [name]: text });
    choice.value = name;
    drop.disabled = false;
  } }, "Save");
  list();
  return el("div", { class: "wide presets" }, choice, save, drop);
}

/** The settings that are filled in, as fields of a request. Throws an Error if the tools are not JSON. */
function chosenSettings() {
  const set = SETTINGS.map(([name]) => [name, ui[name].value]).filter(([, value]) => value !== "");
  const numbers = Object.fromEntries(set.map(([name, value]) => [name, Number(value)]));
  const written = ui.tools.value.trim();
  if (!written || !talks) return numbers;
  try {
    return { ...numbers, tools: [JSON.parse(written)].flat() };
  } catch (error) {
    throw new Error(`The tools are not JSON: ${error.message}`);
  }
}
