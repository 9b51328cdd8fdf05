// The box with the numbers of a token, which the page of a run and the chat page share. A token is an element `b.token`.

/**
 * The box follows the pointer, a tap, and the arrow keys while `root`, or an `.answer` in it, has the focus. It shows the
 * elements that `rows(node)` gives for a token. `learn(node)` is called when the box shows a token. If the promise of
 * `learn` gives true, the box is drawn again.
 */
function tokenBox(root, rows, learn = async () => false) {
  const box = el("div", { class: "token-box", role: "tooltip", hidden: true });
  let at = null;
  const hide = () => {
    at?.classList.remove("at");
    at = null;
    box.hidden = true;
  };
  const draw = () => {
    box.replaceChildren(...rows(at));
    if (!box.isConnected) root.parentElement.append(box);
    box.hidden = false;
    const area = at.getClientRects()[0] ?? at.getBoundingClientRect();
    const below = area.bottom + box.offsetHeight + 12 < innerHeight;
    box.style.setProperty("left", `${Math.max(0, Math.min(area.left, innerWidth - box.offsetWidth - 8))}px`);
    box.style.setProperty("top", `${below ? area.bottom + 6 : Math.max(0, area.top - box.offsetHeight - 6)}px`);
  };
  const show = (node) => {
    at?.classList.remove("at");
    at = node;
    node.classList.add("at");
    draw();
    learn(node).then((news) => news && at === node && draw());
  };
  const over = (event) => {
    const node = event.target.closest?.("b.token");
    if (node) show(node);
    else hide();
  };
  root.addEventListener("pointerover", over);
  root.addEventListener("pointerdown", over);
  root.addEventListener("pointerleave", (event) => event.pointerType !== "touch" && hide());
  root.addEventListener("focusout", hide);
  root.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape") hide();
    if (!step) return;
    const all = (event.target.closest(".answer") ?? root).querySelectorAll("b.token");
    const nodes = [...all].filter((node) => node.getClientRects().length); // the visible tokens
    if (!nodes.length) return;
    event.preventDefault();
    const i = nodes.includes(at) ? nodes.indexOf(at) + step : step > 0 ? 0 : nodes.length - 1;
    if (!nodes[i]) return;
    nodes[i].scrollIntoView({ block: "nearest" });
    show(nodes[i]);
  });
}
