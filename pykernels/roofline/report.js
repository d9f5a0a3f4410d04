// Shows what a mark stands for while the pointer is on it, or after a tap: the text of its title. On paper all is open.
(() => {
  const box = document.createElement("div");
  box.id = "tip";
  box.hidden = true;
  document.body.append(box);
  for (const title of document.querySelectorAll("svg title")) {
    title.parentNode.dataset.tip = title.textContent;
    title.remove();
  }
  const show = (event) => {
    const mark = event.target.closest ? event.target.closest("[data-tip]") : null;
    box.hidden = mark === null;
    if (mark === null) return;
    box.textContent = mark.dataset.tip;
    const wide = document.documentElement.clientWidth;
    box.style.left = Math.max(8, Math.min(event.clientX + 14, wide - box.offsetWidth - 8)) + "px";
    const below = event.clientY + 18, fits = below + box.offsetHeight < window.innerHeight;
    box.style.top = (fits ? below : Math.max(8, event.clientY - box.offsetHeight - 14)) + "px";
  };
  document.addEventListener("pointermove", show);
  document.addEventListener("pointerdown", show);
  document.addEventListener("scroll", () => { box.hidden = true; }, { passive: true });
  window.addEventListener("beforeprint", () => {
    for (const part of document.querySelectorAll("details")) part.open = true;
  });
})();
