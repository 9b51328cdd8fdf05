"use strict";
// Code that the pages of slimelite share: elements, numbers as text and the theme.

/** A new element. `attributes`: class, title, onclick, style as an object, and so on; children: elements or text. */
function el(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

/** A new SVG element, as `el`. */
function svg(name, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}

function fill(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key === "style") {
      for (const [property, setting] of Object.entries(value)) node.style.setProperty(property, setting);
    } else if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "value") node.value = value;
    else node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

/** A number with about four significant digits: 0.4141, 1,530, 3.0e-7; "NaN" and "∞" as such. */
function number(value) {
  if (value === null || value === undefined) return "–";
  if (!Number.isFinite(value)) return String(value).replace("Infinity", "∞");
  const size = Math.abs(value);
  if (size >= 1e7 || (size > 0 && size < 1e-3)) return value.toExponential(2);
  const digits = size >= 1000 ? 0 : size >= 100 ? 1 : size >= 10 ? 2 : size >= 1 ? 3 : 4;
  return Number(value.toFixed(digits)).toLocaleString("en-US", { maximumFractionDigits: digits });
}

const THEMES = { "light dark": "Auto", light: "Light", dark: "Dark" };

/** The button that switches from the system's theme to light, to dark and back. If possible, the browser keeps it. */
function themeButton() {
  const remember = (theme) => {
    try {
      if (theme) localStorage.setItem("slimelite-theme", theme);
      return localStorage.getItem("slimelite-theme");
    } catch {
      return theme; // a browser may refuse storage to files
    }
  };
  const names = Object.keys(THEMES);
  const button = el("button", { class: "quiet", title: "Colours: system setting, light or dark" });
  const show = (theme) => {
    document.documentElement.style.colorScheme = theme;
    button.textContent = THEMES[theme];
    button.dataset.theme = theme;
  };
  button.addEventListener("click", () => {
    const next = names[(names.indexOf(button.dataset.theme) + 1) % names.length];
    remember(next);
    show(next);
  });
  const before = remember(null);
  show(before in THEMES ? before : names[0]);
  return button;
}
